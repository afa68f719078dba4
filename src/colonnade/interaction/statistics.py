"""Operators without weights, with partials that are sums over single vectors.

Legend: B samples, F fields, D dim, E vectors, P floats of a partial.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

import torch
from torch import Tensor

from colonnade.config.model import PairVariables
from colonnade.errors import ConfigError
from colonnade.interaction.contract import SQUARES, Interaction
from colonnade.ops import interaction as ops


class PairwiseProducts(Interaction):
    """Base class of operators on products of all pairs of a sample's variables.

    over="fields": a variable is a field's pooled vector. over="ids": a variable is x v of one id (FM's own definition),
    so two ids of one bag are a pair, too; pooling gives x (`SQUARES`), and an id that a bag repeats is a variable each
    time. With at most one id per field both are the same. Statistics over ids are sums over ids, so any ranks may have
    the rows of a bag; over fields one rank must have them all.

    Over ids, each field is followed by its squares among the operator's inputs, except the `single` ones.
    """

    def __init__(self, over: PairVariables = "fields", *, single: Collection[int] = ()) -> None:
        """Create the operator. single: indices of fields with at most one id per sample, which need no squares."""
        super().__init__()
        if over not in get_args(PairVariables):
            raise ConfigError(f"{type(self).__name__}: got over={over!r}, wanted 'fields' or 'ids'")
        self.over = over
        self.single = frozenset(single)

    def list_inputs(self, fields: Sequence[str]) -> tuple[str, ...]:
        if self.over == "fields":
            return tuple(fields)
        kinds = [("",) if i in self.single else ("", SQUARES) for i in range(len(fields))]
        return tuple(name + kind for name, own in zip(fields, kinds, strict=True) for kind in own)

    def needs_pooled_fields(self) -> bool:
        return self.over == "fields" or bool(self.single)

    def group_summed_inputs(self, count: int) -> Sequence[int | None]:
        if self.over == "fields":
            return [None] * count
        return [None if term == ops.BOTH else term for term in self._list_terms(count)[:count]]

    def sum_inputs(
        self, fields: Tensor, field_indices: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return sums (B, D) of all variables and of their squares. fields (B, F, D): some inputs, at these indices."""
        if self.over == "fields":
            return fields.sum(1), fields.square().sum(1)
        indices = range(fields.shape[1]) if field_indices is None else field_indices
        terms = self._list_terms(max(indices, default=-1) + 1)
        return ops.sum_terms(fields, [terms[i] for i in indices])

    def _list_terms(self, count: int) -> list[int]:
        """List the terms (`ops.interaction.fm`) of the first inputs over ids, at least `count`."""
        terms = (
            [ops.BOTH] if i in self.single else [ops.VECTOR, ops.SQUARES] for i in range(count)
        )
        return [term for field_terms in terms for term in field_terms]


class FM(PairwiseProducts):
    """Second-order term of a factorization machine (Rendle 2010): sum over pairs of variables of <v_i, v_j>, (B, 1).

    Statistics: S = sum v_i (D floats) and Q = sum |v_i|^2 (one float); the value is (|S|^2 - Q) / 2. Variables are
    fields, or ids with over="ids" (`PairwiseProducts`).
    """

    def width(self, dim: int) -> int:
        return dim + 1

    def partial(
        self,
        values: Tensor,
        segments: Tensor,
        num_samples: int,
        weights: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        if weights is not None:
            values = values * weights[:, None]
        stats = torch.cat([values, values.square().sum(1, keepdim=True)], dim=1)  # (E, D + 1)
        return _sum_by_sample(stats, segments, num_samples)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        sums = stats[:, :-1]
        squares = stats[:, -1:]
        return (sums.square().sum(1, keepdim=True) - squares) / 2

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        if self.over == "fields":
            return torch.cat([fields.sum(1), fields.square().sum((1, 2))[:, None]], dim=1)
        sums, squares = self.sum_inputs(fields, field_indices)
        return torch.cat([sums, squares.sum(1, keepdim=True)], dim=1)

    def forward(self, fields: Tensor) -> Tensor:
        count = fields.shape[1]
        terms = [] if self.over == "fields" else self._list_terms(count)[:count]
        return ops.fm([fields], dim=fields.shape[2], terms=terms)


class Sum(Interaction):
    """Sum of a sample's vectors, (B, D): for first-order weights of a linear model (D: one per task)."""

    def width(self, dim: int) -> int:
        return dim

    def needs_pooled_fields(self) -> bool:
        return False

    def group_summed_inputs(self, count: int) -> Sequence[int | None]:
        return [0] * count

    def partial(
        self,
        values: Tensor,
        segments: Tensor,
        num_samples: int,
        weights: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        if weights is not None:
            values = values * weights[:, None]
        return _sum_by_sample(values, segments, num_samples)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        return fields.sum(1)

    def forward(self, fields: Tensor) -> Tensor:
        return fields.sum(1)


class BiInteraction(PairwiseProducts):
    """Bi-interaction pooling (He and Chua 2017): sum over pairs of variables of v_i * v_j, elementwise, (B, D).

    Statistics: S = sum v_i and Q = sum v_i^2 (D floats each); the value is (S^2 - Q) / 2. Its elements add up to FM's.
    Variables are fields, or ids with over="ids" (`PairwiseProducts`).
    """

    def width(self, dim: int) -> int:
        return 2 * dim

    def partial(
        self,
        values: Tensor,
        segments: Tensor,
        num_samples: int,
        weights: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        if weights is not None:
            values = values * weights[:, None]
        return _sum_by_sample(torch.cat([values, values.square()], dim=1), segments, num_samples)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        sums, squares = stats.chunk(2, dim=1)
        return (sums.square() - squares) / 2

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        return torch.cat(self.sum_inputs(fields, field_indices), dim=1)

    def forward(self, fields: Tensor) -> Tensor:
        sums, squares = self.sum_inputs(fields, None)
        return (sums.square() - squares) / 2


class Concat(Interaction):
    """Concatenation of pooled fields, (B, sum of dims). It has no smaller partial, so values are always sent."""

    def width(self, dim: int) -> None:
        return None

    def needs_pooled_fields(self) -> bool:
        return True

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        return fields.flatten(1)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats


def _sum_by_sample(values: Tensor, segments: Tensor, num_samples: int) -> Tensor:
    """Add up values by sample: (E, P) -> (B, P)."""
    return values.new_zeros(num_samples, values.shape[1]).index_add(0, segments, values)
