"""Batches of ids for caches: skewed, with popular ids that change."""

from __future__ import annotations

import numpy as np


def batches(count: int, size: int, *, num_ids: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Each ascending, each id once, 0 .. `size` of them."""
    random = np.random.default_rng(seed)
    drawn = (random.pareto(0.8, (count, size)).astype(np.int64) for _ in range(1))
    ids = next(drawn) % num_ids
    ids = (ids + np.arange(count)[:, None] // 50 * 17) % num_ids  # what is popular moves
    keep = random.random((count, size)) < random.random((count, 1)) * 1.5
    return [np.unique(row[mine]) for row, mine in zip(ids, keep, strict=True)]
