"""What an operator is that can be evaluated where rows live: F(x; W) = combine(merge over shards of partial(shard)).

Legend: B samples, F fields, D dim, W columns of fields side by side, E vectors, P floats of a partial.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn


class Interaction(nn.Module):
    """A model's first operator after the embeddings, in two parts (DES, Rong et al. 2020, section 3).

    A partial is an additive statistic of the vectors a rank holds; the merge of all ranks' partials is
    what `combine` needs. On one process the two compose to the ordinary operator.

    It may have parameters. They are dense weights: the same on every rank, found by `model.parameters()`, and used by
    `partial_of` wherever that is evaluated.
    """

    merge: Literal["sum", "logsumexp", "whole"] = "sum"
    """"whole": there are no partials. One rank that has all of its fields of a sample evaluates it (a tower module)."""
    one_width: bool = True
    """Whether its fields have one dim, and come as (B, F, D); else they have any, and come side by side, (B, W)."""

    sequences: int = 0
    """How many of its fields, the last ones, are sequences, whose rows it takes one by one. Of such an operator,
    `partial` has the others, pooled and side by side, as its context, and `forward` takes (them, rows, offsets)."""

    num_dense: int = 0
    """How many dense columns of a batch, `Batch.dense` as it is, `combine` and `forward` take behind what else they
    take; 0: they are given none."""

    @abstractmethod
    def width(self, dim: int) -> int | None:
        """P, floats per sample in a partial, for vectors of width `dim`; None: values must travel."""

    @abstractmethod
    def needs(self) -> Literal["rows", "fields"]:
        """Whether single rows suffice, or a field's rows must be pooled on one rank first."""

    def partial(
        self,
        values: Tensor,  # (E, D)
        segments: Tensor,  # (E,) int64: the sample of each vector
        num_samples: int,  # B
        weights: Tensor | None = None,  # (E,)
        context: Tensor | None = None,  # what the sample's rank sends first
    ) -> Tensor:
        """(B, P). Samples without vectors get the merge's neutral element.

        An operator defines this, or, where it is made of all fields together, `partial_of`: then every sample must
        bring as many vectors, in field order.
        """
        if weights is not None:
            values = values * weights[:, None]
        fields = values.reshape(num_samples, len(values) // max(1, num_samples), values.shape[1])
        return self.partial_of(fields if self.one_width else fields.flatten(1))

    @abstractmethod
    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        """Merged statistics (B, P) -> (B, anything). dense: (B, num_dense), of an operator that takes some."""

    def refusal(self, dims: Sequence[int]) -> str | None:
        """Why it cannot take fields of these dims, in this order; None: it can."""
        if self.one_width and len(set(dims)) > 1 and self.width(max(dims)) is not None:
            return f"needs fields of one width; got dims {sorted(set(dims))}"
        return None

    def partial_of(self, fields: Tensor, numbers: Sequence[int] | None = None) -> Tensor:
        """Of as many vectors for every sample: pooled fields (B, F, D), or (B, W) unless `one_width`, -> (B, P).

        numbers: which of the consumer's fields these are, ascending, where a rank has only some; None: all of them.
        """
        num_samples, num_fields, dim = fields.shape
        samples = torch.arange(num_samples, device=fields.device).repeat_interleave(num_fields)
        return self.partial(fields.reshape(num_samples * num_fields, dim), samples, num_samples)

    def forward(self, fields: Tensor) -> Tensor:
        """The whole operator where every sample's vectors are here: pooled fields as `partial_of` takes them ->
        (B, anything)."""
        return self.combine(self.partial_of(fields))


class SomeFields(Interaction):
    """An operator's partial, of some of its fields. Where values travel, these as they are, (B, W), for then the
    operator is evaluated whole where the others are."""

    def __init__(self, operator: Interaction, numbers: Sequence[int]) -> None:
        """operator: its merge is a sum. numbers: which of its fields, ascending."""
        super().__init__()
        self.operator, self.numbers = operator, tuple(numbers)
        self.one_width = operator.one_width

    def width(self, dim: int) -> int | None:
        return self.operator.width(dim)

    def needs(self) -> Literal["rows", "fields"]:
        return self.operator.needs()

    def partial_of(self, fields: Tensor, numbers: Sequence[int] | None = None) -> Tensor:
        taken = range(len(self.numbers)) if numbers is None else numbers
        return self.operator.partial_of(fields, [self.numbers[n] for n in taken])

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats

    def forward(self, fields: Tensor) -> Tensor:
        return fields.flatten(1)
