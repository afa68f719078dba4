"""Affinity of features: the mean |cosine| of their pooled vectors over samples, and distances derived from it.

Measures the interaction of two features in the tower partitioner of DMT (Luo et al. 2024). Pure functions.
Legend: S samples, F features, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError

Distance = Literal["coherent", "diverse"]
DISTANCES: tuple[Distance, ...] = ("coherent", "diverse")
"""Kinds of distance: similar features are near each other (coherent), or far from each other (diverse)."""

Floats = NDArray[np.float64]
CHUNK_FLOATS = 1 << 22


class Affinity:
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


def affinity_distances(affinity: Floats, kind: Distance) -> Floats:
    """Return distances of features, (F, F): 1 - affinity (coherent) or the affinity (diverse); 0 on the diagonal."""
    matrix = 1.0 - affinity if kind == "coherent" else affinity.copy()
    np.fill_diagonal(matrix, 0.0)
    return matrix


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
