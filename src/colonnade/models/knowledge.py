"""Knowledge graphs: vectors of entities and relations, by which a true triple (head, relation, tail) scores high.

TransE (Bordes et al. 2013), DistMult (Yang et al. 2015), ComplEx (Trouillon et al. 2016), RotatE (Sun et al. 2019).
`link_prediction.KnowledgeGraph` says what they have in common.

Legend: B samples, M candidates, P queries, D width of an entity's row; complex vectors are D / 2 pairs side by side.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.models.link_prediction import KnowledgeGraph
from colonnade.ops.linear import distances, linear, squared_distances
from colonnade.table import Feature, Table


class Distance(KnowledgeGraph):
    """Scores are less by the distance between what a question leads to and an entity."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        norm: int = 1,
        squared: bool = False,
        **settings: Any,
    ) -> None:
        """Beside the settings of `KnowledgeGraph`: norm: 1, the sum of the absolute differences of an entity's numbers
        (of complex ones: moduli); 2, the root of the sum of their squares, which of many entities is a product of
        matrices. squared: that sum without the root, whose gradient does not fade beside long vectors. Raises
        ConfigError."""
        super().__init__(tables, features, **settings)
        if norm not in (1, 2):
            raise ConfigError(f"{self.kind}: got norm={norm!r}, wanted 1 or 2")
        if squared and norm == 1:
            raise ConfigError(
                f"{self.kind}: got squared beside norm=1, which has no root to leave out; set norm=2"
            )
        self.norm, self.squared = norm, squared

    @abstractmethod
    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """(P, D) from each of (M, D) -> (P, M) sums of absolute differences."""

    @abstractmethod
    def difference(self, queries: Tensor, answers: Tensor) -> Tensor:
        """(P, D), (P, D) -> (P,): the diagonal of `differences`."""

    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        if self.norm == 1:
            return -self.differences(queries, candidates)
        if self.squared:
            return -squared_distances(queries, candidates)
        return -distances(queries, candidates)

    def compare_one(self, queries: Tensor, answers: Tensor) -> Tensor:
        if self.norm == 1:
            return -self.difference(queries, answers)
        if self.squared:
            return -(queries - answers).square().sum(1)
        return -torch.linalg.vector_norm(queries - answers, dim=1)


class TransE(Distance):
    """-|h + r - t|."""

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return head + relation

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail - relation

    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return torch.cdist(queries, candidates, p=1.0)

    def difference(self, queries: Tensor, answers: Tensor) -> Tensor:
        return (queries - answers).abs().sum(1)


class DistMult(KnowledgeGraph):
    """sum of h * r * t."""

    start = 0.0

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return head * relation

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail * relation

    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return linear(queries, candidates, None)

    def compare_one(self, queries: Tensor, answers: Tensor) -> Tensor:
        return (queries * answers).sum(1)


class ComplEx(DistMult):
    """The real part of the sum of h * r * conj(t)."""

    is_complex = True

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return _times(head, relation, 1.0)

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return _times(tail, relation, -1.0)


class RotatE(Distance):
    """-|h * exp(i r) - t|: a relation turns each of an entity's numbers. A relation's row begins within its
    initializer's scale, which stands for the whole circle: a step of the optimizer turns by that much of it."""

    relation_share = 0.5
    init_scales: Mapping[str, float] = {"relation": 1.0}
    is_complex = True

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        center: float = 0.0,
        **settings: Any,
    ) -> None:
        """Beside the settings of `Distance`: center: what an entity's complex numbers are, but for its row, which is
        added. Above 0 all entities begin near one vector, so each relation begins with one of its own, that vector
        turned, and answers gather around it, as they do around TransE's r; without it they must first agree on a
        middle. Raises ConfigError."""
        super().__init__(tables, features, **settings)
        if not math.isfinite(center):
            raise ConfigError(f"rotate: got center={center}, wanted a finite number")
        self.center = center

    def vectors(self, rows: Tensor) -> Tensor:
        if not self.center:
            return rows
        real, imaginary = rows.chunk(2, 1)
        return torch.cat([real + self.center, imaginary], 1)

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return _times(head, self._turn(relation), 1.0)

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return _times(tail, self._turn(relation), -1.0)

    def cubes(self, heads: Tensor, there: Tensor, back: Tensor, tails: Tensor) -> Tensor:
        return self._cubes(heads) + self._cubes(tails)  # a turn's numbers are all of size 1

    def _turn(self, relation: Tensor) -> Tensor:
        angle = relation * (math.pi / self.relation_range)
        return torch.cat([angle.cos(), angle.sin()], 1)

    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return moduli(queries, candidates)

    def difference(self, queries: Tensor, answers: Tensor) -> Tensor:
        # Its gradient is 0 where the two are equal, as that of `differences`; hypot's would be NaN.
        both = (queries - answers).unflatten(1, (2, -1))
        return torch.linalg.vector_norm(both, dim=1).sum(1)


def moduli(queries: Tensor, candidates: Tensor) -> Tensor:
    """(P, D), (M, D) -> (P, M): sums of the moduli of the differences of D / 2 complex numbers."""
    ours, theirs = (x.unflatten(1, (2, -1)).permute(2, 0, 1) for x in (queries, candidates))
    return torch.cdist(ours, theirs, p=2.0, compute_mode="donot_use_mm_for_euclid_dist").sum(0)


def _times(vectors: Tensor, turns: Tensor, sign: float) -> Tensor:
    """vectors * turns, or (sign -1) times their conjugates; real parts, then imaginary ones."""
    (a, b), (c, d) = vectors.chunk(2, 1), turns.chunk(2, 1)
    d = sign * d
    return torch.cat([a * c - b * d, a * d + b * c], 1)
