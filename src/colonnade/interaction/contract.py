"""Contract of operators that owner ranks can evaluate: F(x; W) = combine(merge over shards of partial(shard)).

Legend: B samples, F fields, D dim, W columns of concatenated fields, E vectors, P floats of a partial.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

SQUARES = "^2"
"""Suffix of the name of a field's squares: by sample, the sum over its ids of (x v)^2, element by element, (B, D).

v is an id's vector, x what pooling multiplies it by: the lookup's weight, over n for a mean of n ids, over sqrt(n) for
sqrtn."""


class Interaction(nn.Module):
    """First operator of a model after the embeddings, in two parts (DES, Rong et al. 2020, section 3).

    A partial is an additive statistic of the vectors that a rank owns; `combine` takes the merge of all ranks'
    partials. On one process the two compose to the ordinary operator.

    An operator may have parameters. They are dense weights: the same on every rank, part of `model.parameters()`, and
    used by `partial_of_fields` on the rank that evaluates it.
    """

    merge: Literal["sum", "logsumexp", "whole"] = "sum"
    """Merge of partials. "whole": there are no partials; one rank with all of a sample's fields evaluates the operator
    (a tower module)."""
    needs_equal_dims: bool = True
    """True if all fields have one dim and are passed as (B, F, D); else they are passed concatenated, (B, W)."""

    sequences: int = 0
    """Number of fields, the last ones, that are sequences: the operator reads their single rows. `partial` then gets
    the other fields, pooled and concatenated, as its context, and `forward` takes (these, rows, offsets)."""

    num_dense: int = 0
    """Number of dense columns of a batch (`Batch.dense`) that `combine` and `forward` take as their last argument; 0:
    they do not take it."""

    def list_inputs(self, fields: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the operator's inputs for these fields: the fields, and squares of some (`SQUARES`)."""
        return tuple(fields)

    def group_summed_inputs(self, count: int) -> Sequence[int | None]:
        """Return by input the group of those of which partials need the sum alone, or None. count: inputs. The sum of a
        group's inputs may be passed to `partial_of_fields` as the first one of them, without the others."""
        return [None] * count

    @abstractmethod
    def width(self, dim: int) -> int | None:
        """Return P, the floats per sample in a partial, for vectors of width `dim`; None: values must be sent."""

    @abstractmethod
    def needs_pooled_fields(self) -> bool:
        """Return whether rows of a field without squares must be pooled on one rank first; False if partials can be
        computed from single rows."""

    def partial(
        self,
        values: Tensor,  # (E, D)
        segments: Tensor,  # (E,) int64: the sample of each vector
        num_samples: int,  # B
        weights: Tensor | None = None,  # (E,)
        context: Tensor | None = None,  # pooled fields that the sample's rank sends first
    ) -> Tensor:
        """Compute the partial of each sample from its vectors, (B, P); the merge's neutral element without vectors.

        An operator defines this method or, if it needs all fields together, `partial_of_fields`: then every sample
        must have one vector per field, in field order.
        """
        if weights is not None:
            values = values * weights[:, None]
        fields = values.reshape(num_samples, len(values) // max(1, num_samples), values.shape[1])
        return self.partial_of_fields(fields if self.needs_equal_dims else fields.flatten(1))

    @abstractmethod
    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        """Compute the operator's output (B, any) from merged statistics (B, P). dense: (B, num_dense), if it takes
        dense columns."""

    def find_dims_problem(self, dims: Sequence[int]) -> str | None:
        """Return why the operator cannot take fields of these dims, in this order; None if it can."""
        if self.needs_equal_dims and len(set(dims)) > 1 and self.width(max(dims)) is not None:
            return f"needs fields of one width; got dims {sorted(set(dims))}"
        return None

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Compute partials from pooled fields: (B, F, D), or (B, W) unless `needs_equal_dims` -> (B, P).

        field_indices: indices of these fields in the consumer, ascending, if a rank has only a part of them; None: all.
        """
        num_samples, num_fields, dim = fields.shape
        samples = torch.arange(num_samples, device=fields.device).repeat_interleave(num_fields)
        return self.partial(fields.reshape(num_samples * num_fields, dim), samples, num_samples)

    def forward(self, fields: Tensor) -> Tensor:
        """Evaluate the whole operator on pooled fields, as `partial_of_fields` takes them, of one rank -> (B, any)."""
        return self.combine(self.partial_of_fields(fields))


class FieldSubset(Interaction):
    """Partial of an operator over a subset of its fields. If values are sent instead of partials, it returns them
    unchanged, (B, W): the operator is then evaluated on the rank that has the other fields."""

    def __init__(self, operator: Interaction, field_indices: Sequence[int]) -> None:
        """Create the partial. operator: its merge must be a sum. field_indices: indices of the subset, ascending."""
        super().__init__()
        self.operator = operator
        self.field_indices = tuple(field_indices)
        self.needs_equal_dims = operator.needs_equal_dims

    def width(self, dim: int) -> int | None:
        return self.operator.width(dim)

    def needs_pooled_fields(self) -> bool:
        return self.operator.needs_pooled_fields()

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        chosen = range(len(self.field_indices)) if field_indices is None else field_indices
        return self.operator.partial_of_fields(fields, [self.field_indices[i] for i in chosen])

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats

    def forward(self, fields: Tensor) -> Tensor:
        return fields.flatten(1)
