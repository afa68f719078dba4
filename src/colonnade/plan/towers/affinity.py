"""How alike features are: the mean |cosine| of their pooled vectors over samples, and the distances that follow.

What stands for the interaction of two features in the tower partitioner of DMT (Luo et al. 2024). Pure functions.
Legend: S samples, F features, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError

Distance = Literal["coherent", "diverse"]
DISTANCES: tuple[Distance, ...] = ("coherent", "diverse")
"""Alike features near each other, or far from each other."""

Floats = NDArray[np.float64]
CHUNK_FLOATS = 1 << 22


class Affinity:
    """Sums over the samples of any number of batches: what `matrix` is the mean of."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.sums = np.zeros((len(self.names), len(self.names)))
        self.counts = np.zeros_like(self.sums)
        self.num_samples = 0

    def add(self, vectors: Sequence[NDArray]) -> None:
        """(S, D) of each feature, in the order of the names; D may differ between features. Raises DataError."""
        dims = np.array([each.shape[1] for each in vectors])
        for name, each in zip(self.names, vectors, strict=True):
            if not np.isfinite(each).all():
                raise DataError(
                    f"feature {name!r}: got vectors that are not finite, wanted those of a model that was trained "
                    "without NaN; take an earlier checkpoint with --at"
                )
        self.num_samples += len(vectors[0]) if len(vectors) else 0
        for dim in sorted(set(dims.tolist())):
            of_dim = np.flatnonzero(dims == dim).tolist()
            step = max(1, CHUNK_FLOATS // max(1, len(of_dim) * max(dim, len(of_dim))))
            for at in range(0, len(vectors[of_dim[0]]), step):
                # (S, F, D)
                some = np.stack([vectors[f][at : at + step] for f in of_dim], 1).astype(np.float64)
                # By the longest element first: a square neither overflows nor vanishes.
                scale = np.abs(some).max(-1, initial=0.0, keepdims=True)
                some /= np.where(scale > 0, scale, 1.0)
                length = np.linalg.norm(some, axis=-1, keepdims=True)
                some /= np.where(length > 0, length, 1.0)
                there = (length[..., 0] > 0).astype(np.float64)  # (S, F)
                here = np.ix_(of_dim, of_dim)
                self.sums[here] += np.abs(some @ some.transpose(0, 2, 1)).sum(0)
                self.counts[here] += there.T @ there

    @property
    def silent(self) -> tuple[str, ...]:
        """Features whose vector is zero in every sample: they are unlike all others."""
        found = np.flatnonzero(np.diag(self.counts) == 0)
        return tuple(self.names[f] for f in found)

    def matrix(self) -> Floats:
        """(F, F): over the samples in which both features have a vector, the mean |cosine|; 0 where there is none.

        A cosine needs one dim. What is not known of two features of different dims is taken for the mean of all
        that is known, so that dims by themselves neither join features nor part them.
        """
        found = self.sums / np.maximum(self.counts, 1)
        apart = ~np.eye(len(found), dtype=bool)
        known = (self.counts > 0) & apart
        present = np.diag(self.counts) > 0
        unknown = (self.counts == 0) & apart & present[:, None] & present[None]
        found[unknown] = found[known].mean() if known.any() else 0.0
        np.fill_diagonal(found, 1.0)
        return np.minimum((found + found.T) / 2, 1.0)


def distances(affinity: Floats, kind: Distance) -> Floats:
    """(F, F), zero on the diagonal: 1 - affinity (coherent), or the affinity itself (diverse)."""
    found = 1.0 - affinity if kind == "coherent" else affinity.copy()
    np.fill_diagonal(found, 0.0)
    return found


def within_and_between(affinity: Floats, towers: Sequence[int]) -> tuple[float, float]:
    """The mean affinity of pairs of features of one tower, and of two; NaN where there is no such pair.

    towers: by feature, its tower's number.
    """
    label = np.asarray(towers)
    same = label[:, None] == label[None]
    upper = np.triu(np.ones_like(same), 1)
    pairs = [affinity[upper & chosen] for chosen in (same, ~same)]
    within, between = (float(each.mean()) if len(each) else float("nan") for each in pairs)
    return within, between
