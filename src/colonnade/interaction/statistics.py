"""Operators without weights, with partials that are sums over single vectors.

Legend: B samples, F fields, D dim, E vectors, P floats of a partial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.interaction.contract import Interaction
from colonnade.ops import interaction as ops


class FM(Interaction):
    """Second-order term of a factorization machine (Rendle 2010): sum over pairs of fields of <v_i, v_j>, (B, 1).

    Statistics: S = sum v_i (D floats) and Q = sum |v_i|^2 (one float); the value is (|S|^2 - Q) / 2.
    """

    def width(self, dim: int) -> int:
        return dim + 1

    def needs_pooled_fields(self) -> bool:
        return True

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
        sums, squares = stats[:, :-1], stats[:, -1:]
        return (sums.square().sum(1, keepdim=True) - squares) / 2

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        return torch.cat([fields.sum(1), fields.square().sum((1, 2))[:, None]], dim=1)

    def forward(self, fields: Tensor) -> Tensor:
        return ops.fm([fields], dim=fields.shape[2])


class Sum(Interaction):
    """Sum of a sample's vectors, (B, D): for first-order weights of a linear model (D: one per task)."""

    def width(self, dim: int) -> int:
        return dim

    def needs_pooled_fields(self) -> bool:
        return False

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


class BiInteraction(Interaction):
    """Bi-interaction pooling (He and Chua 2017): sum over pairs of fields of v_i * v_j, elementwise, (B, D).

    Statistics: S = sum v_i and Q = sum v_i^2 (D floats each); the value is (S^2 - Q) / 2. Its elements add up to FM's.
    """

    def width(self, dim: int) -> int:
        return 2 * dim

    def needs_pooled_fields(self) -> bool:
        return True

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
        return torch.cat([fields.sum(1), fields.square().sum(1)], dim=1)

    def forward(self, fields: Tensor) -> Tensor:
        return (fields.sum(1).square() - fields.square().sum(1)) / 2


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
