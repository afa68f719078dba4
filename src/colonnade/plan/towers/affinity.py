"""Affinity of features, by the cosines of their vectors or by the interactions in a model's logit; and distances.

The mean |cosine| of pooled vectors is the measure of the tower partitioner of DMT (Luo et al. 2024). It finds groups
only where the model turns the vectors of interacting features to each other. The mixed difference

    f(x) - f(x with i changed) - f(x with j changed) + f(x with both changed)

of a logit f is 0 where f is a sum of a function without i and one without j, whatever the model. Pure functions.
Legend: S samples, F features, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError

Distance = Literal["coherent", "diverse"]
AffinityKind = Literal["interactions", "cosine"]
AFFINITIES: tuple[AffinityKind, ...] = get_args(AffinityKind)
DISTANCES: tuple[Distance, ...] = ("coherent", "diverse")
"""Kinds of distance: similar features are near each other (coherent), or far from each other (diverse)."""

Floats = NDArray[np.float64]
CHUNK_FLOATS = 1 << 22
ROUNDING = 1e-6
"""Part of the largest interaction below which differences of float32 logits are rounding."""


class Cosines:
    """Accumulator of |cosines| over the samples of any number of batches; `matrix` is their mean."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.sums = np.zeros((len(self.names), len(self.names)))
        self.counts = np.zeros_like(self.sums)
        self.num_samples = 0

    def add_batch_vectors(self, vectors: Sequence[NDArray[np.floating[Any]]]) -> None:
        """Add the vectors of a batch, (S, D) of each feature in the order of the names; D may differ between features.

        Raises DataError for vectors that are not finite."""
        dims = np.array([matrix.shape[1] for matrix in vectors])
        for name, matrix in zip(self.names, vectors, strict=True):
            if not np.isfinite(matrix).all():
                raise DataError(
                    f"feature {name!r}: got vectors that are not finite, wanted those of a model that was trained "
                    "without NaN; take an earlier checkpoint with --at"
                )
        self.num_samples += len(vectors[0]) if len(vectors) else 0
        for dim in sorted(set(dims.tolist())):
            features = np.flatnonzero(dims == dim).tolist()
            step = max(1, CHUNK_FLOATS // max(1, len(features) * max(dim, len(features))))
            for start in range(0, len(vectors[features[0]]), step):
                # (S, F, D)
                chunk = np.stack([vectors[f][start : start + step] for f in features], 1).astype(
                    np.float64
                )
                # Scale by the largest element first, so that squares neither overflow nor vanish.
                scale = np.abs(chunk).max(-1, initial=0.0, keepdims=True)
                chunk /= np.where(scale > 0, scale, 1.0)
                length = np.linalg.norm(chunk, axis=-1, keepdims=True)
                chunk /= np.where(length > 0, length, 1.0)
                is_present = (length[..., 0] > 0).astype(np.float64)  # (S, F)
                block = np.ix_(features, features)
                self.sums[block] += np.abs(chunk @ chunk.transpose(0, 2, 1)).sum(0)
                self.counts[block] += is_present.T @ is_present

    def __add__(self, other: Cosines) -> Cosines:
        """Return the accumulator of the samples of both."""
        total = Cosines(self.names)
        total.sums = self.sums + other.sums
        total.counts = self.counts + other.counts
        total.num_samples = self.num_samples + other.num_samples
        return total

    @property
    def silent(self) -> tuple[str, ...]:
        """Features with a zero vector in every sample; their affinity to all others is 0."""
        indices = np.flatnonzero(np.diag(self.counts) == 0)
        return tuple(self.names[f] for f in indices)

    def matrix(self) -> Floats:
        """Return the mean |cosine| over samples in which both features have a vector, (F, F); 0 if there is none.

        A cosine needs equal dims. Pairs of features with different dims get the mean of all known pairs, so that dims
        alone neither join nor separate features.
        """
        affinity = self.sums / np.maximum(self.counts, 1)
        off_diagonal = ~np.eye(len(affinity), dtype=bool)
        is_measured = (self.counts > 0) & off_diagonal
        present = np.diag(self.counts) > 0
        is_unmeasured = (self.counts == 0) & off_diagonal & present[:, None] & present[None]
        affinity[is_unmeasured] = affinity[is_measured].mean() if is_measured.any() else 0.0
        np.fill_diagonal(affinity, 1.0)
        symmetric: Floats = np.minimum((affinity + affinity.T) / 2, 1.0)
        return symmetric


class LogitInteractions:
    """Accumulator of |mixed differences| of a logit over samples; `matrix` is their mean, scaled by feature."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.sums = np.zeros((len(self.names), len(self.names)))
        self.num_samples = 0

    def add_pair_differences(self, first: int, second: int, differences: Floats) -> None:
        """Add the mixed differences of two features, by their indices, for samples (S,).

        Raises DataError for differences that are not finite."""
        if not np.isfinite(differences).all():
            raise DataError(
                f"features {self.names[first]!r} and {self.names[second]!r}: got logits that are not finite, wanted "
                "those of a model that was trained without NaN; take an earlier checkpoint with --at"
            )
        total = np.abs(differences).sum()
        self.sums[first, second] += total
        self.sums[second, first] += total

    def __add__(self, other: LogitInteractions) -> LogitInteractions:
        """Return the accumulator of the samples of both."""
        total = LogitInteractions(self.names)
        total.sums = self.sums + other.sums
        total.num_samples = self.num_samples + other.num_samples
        return total

    @property
    def silent(self) -> tuple[str, ...]:
        """Features that interact with no other."""
        return tuple(self.names[f] for f in np.flatnonzero(~self._is_interacting()))

    def matrix(self) -> Floats:
        """Return the mean mixed differences over the root of both features' sums, (F, F), the largest scaled to 1.

        So a feature with large effects is not near all others. 1 on the diagonal."""
        means = np.where(np.outer(self._is_interacting(), self._is_interacting()), self.sums, 0.0)
        scales = np.sqrt(np.where(self._is_interacting(), self.sums.sum(1), 1.0))
        affinity: Floats = means / np.outer(scales, scales)
        affinity /= max(float(affinity.max(initial=0.0)), 1e-300)
        np.fill_diagonal(affinity, 1.0)
        return affinity

    def _is_interacting(self) -> NDArray[np.bool_]:
        """Return which features' differences are more than the rounding of the largest, (F,)."""
        totals = self.sums.sum(1)
        return np.asarray(totals > ROUNDING * totals.max(initial=0.0))


def affinity_distances(affinity: Floats, kind: Distance) -> Floats:
    """Return distances of features, (F, F): 1 - affinity (coherent) or the affinity (diverse); 0 on the diagonal."""
    matrix = 1.0 - affinity if kind == "coherent" else affinity.copy()
    np.fill_diagonal(matrix, 0.0)
    return matrix


def compute_agreement(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the part of the pairs that are in one tower in either partition that are so in both; 1 without such pairs.

    one, other: index of each feature's tower, (F,)."""
    together = [towers[:, None] == towers for towers in (one, other)]
    upper = np.triu(np.ones_like(together[0]), 1)
    either = int((upper & (together[0] | together[1])).sum())
    return int((upper & together[0] & together[1]).sum()) / either if either else 1.0


def compute_mean_affinities(
    affinity_matrix: Floats, tower_by_feature: Sequence[int]
) -> tuple[float, float]:
    """Return the mean affinity of pairs of features inside one tower, and across towers; NaN without such pairs.

    tower_by_feature: index of each feature's tower.
    """
    label = np.asarray(tower_by_feature)
    is_same = label[:, None] == label[None]
    upper = np.triu(np.ones_like(is_same), 1)
    pairs = [affinity_matrix[upper & is_pair] for is_pair in (is_same, ~is_same)]
    within, between = (float(values.mean()) if len(values) else float("nan") for values in pairs)
    return within, between
