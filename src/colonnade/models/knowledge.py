"""Knowledge graph models that give true triples (head, relation, tail) high scores.

TransE (Bordes et al. 2013), DistMult (Yang et al. 2015), ComplEx (Trouillon et al. 2016), RotatE (Sun et al. 2019).
`link_prediction.KnowledgeGraph` has what they have in common.

Legend: B samples, M candidates, P queries, D width of an entity's row. Complex vectors are D / 2 real parts, then D / 2
imaginary parts.
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
    """Knowledge graph model that scores an entity by its negative distance from the query vector."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        norm: int = 1,
        squared: bool = False,
        **settings: Any,
    ) -> None:
        """Create the model with the settings of `KnowledgeGraph` and these.

        norm: 1, the sum of absolute differences of the elements (complex elements: moduli); 2, the root of the sum of
        their squares, which for many entities is a matrix product. squared: the sum of squares without the root. Its
        gradient does not fade for long vectors. Raises ConfigError.
        """
        super().__init__(tables, features, **settings)
        if norm not in (1, 2):
            raise ConfigError(f"{self.kind}: got norm={norm!r}, wanted 1 or 2")
        if squared and norm == 1:
            raise ConfigError(
                f"{self.kind}: got squared with norm=1, which has no root to leave out; set norm=2"
            )
        self.norm = norm
        self.squared = squared

    @abstractmethod
    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Compute sums of absolute differences of each query and each candidate: (P, D), (M, D) -> (P, M)."""

    @abstractmethod
    def pair_differences(self, queries: Tensor, answers: Tensor) -> Tensor:
        """Compute the sum of absolute differences of each query and its answer: (P, D), (P, D) -> (P,)."""

    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        if self.norm == 1:
            return -self.differences(queries, candidates)
        if self.squared:
            return -squared_distances(queries, candidates)
        return -distances(queries, candidates)

    def compare_pairs(self, queries: Tensor, answers: Tensor) -> Tensor:
        if self.norm == 1:
            return -self.pair_differences(queries, answers)
        if self.squared:
            return -(queries - answers).square().sum(1)
        return -torch.linalg.vector_norm(queries - answers, dim=1)


class TransE(Distance):
    """TransE, with the score -|h + r - t|."""

    def predict_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return head + relation

    def predict_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail - relation

    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return torch.cdist(queries, candidates, p=1.0)

    def pair_differences(self, queries: Tensor, answers: Tensor) -> Tensor:
        return (queries - answers).abs().sum(1)


class DistMult(KnowledgeGraph):
    """DistMult, with the score sum of h * r * t."""

    start = 0.0

    def predict_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return head * relation

    def predict_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail * relation

    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return linear(queries, candidates, None)

    def compare_pairs(self, queries: Tensor, answers: Tensor) -> Tensor:
        return (queries * answers).sum(1)


class ComplEx(DistMult):
    """ComplEx, with the score real part of the sum of h * r * conj(t)."""

    is_complex = True

    def predict_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return _multiply_complex(head, relation, 1.0)

    def predict_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return _multiply_complex(tail, relation, -1.0)


class RotatE(Distance):
    """RotatE, with the score -|h * exp(i r) - t|: a relation rotates each complex element of an entity.

    A relation's row is initialised within +- its initializer's scale, which covers the whole circle. A step of the
    optimizer rotates by the same fraction of it.
    """

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
        """Create the model with the settings of `Distance` and this one.

        center: constant added to the real parts of every entity's row. With a center, all entities begin near one
        vector, so each relation has a vector of its own from the start: that vector, rotated. Answers gather around it,
        as they do around TransE's r. Without it, entities must first learn a common direction. Raises ConfigError.
        """
        super().__init__(tables, features, **settings)
        if not math.isfinite(center):
            raise ConfigError(f"rotate: got center={center}, wanted a finite number")
        self.center = center

    def vectors(self, rows: Tensor) -> Tensor:
        if not self.center:
            return rows
        real, imaginary = rows.chunk(2, 1)
        return torch.cat([real + self.center, imaginary], 1)

    def predict_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return _multiply_complex(head, self._rotation(relation), 1.0)

    def predict_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return _multiply_complex(tail, self._rotation(relation), -1.0)

    def cubic_norms(
        self, heads: Tensor, relations: Tensor, inverse_relations: Tensor, tails: Tensor
    ) -> Tensor:
        # A rotation's elements all have modulus 1, so relations add a constant.
        return self._cubic_norms(heads) + self._cubic_norms(tails)

    def _rotation(self, relation: Tensor) -> Tensor:
        """Return the complex numbers of modulus 1 that a relation's row (angles) stands for."""
        angle = relation * (math.pi / self.relation_range)
        return torch.cat([angle.cos(), angle.sin()], 1)

    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return sum_moduli(queries, candidates)

    def pair_differences(self, queries: Tensor, answers: Tensor) -> Tensor:
        # Where the two are equal, the gradient is 0, as in `differences`; hypot's would be NaN.
        parts = (queries - answers).unflatten(1, (2, -1))
        return torch.linalg.vector_norm(parts, dim=1).sum(1)


def sum_moduli(queries: Tensor, candidates: Tensor) -> Tensor:
    """Sum the moduli of the differences of D / 2 complex elements, for all pairs: (P, D), (M, D) -> (P, M)."""
    points, other_points = (x.unflatten(1, (2, -1)).permute(2, 0, 1) for x in (queries, candidates))
    return torch.cdist(
        points, other_points, p=2.0, compute_mode="donot_use_mm_for_euclid_dist"
    ).sum(0)


def _multiply_complex(vectors: Tensor, factors: Tensor, sign: float) -> Tensor:
    """Multiply complex vectors by factors or, with sign -1, by their conjugates. Real parts first, then imaginary."""
    a, b = vectors.chunk(2, 1)
    c, d = factors.chunk(2, 1)
    d = sign * d
    return torch.cat([a * c - b * d, a * d + b * c], 1)
