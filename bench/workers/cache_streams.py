"""The lookups of `bench cache`: which rows each of 8 ranks uses in each step, and when it uses them next.

    zipf     one table; the k-th most frequent row is looked up with a probability ~ 1 / k**1.05
    criteo   26 fields with the cardinalities of Criteo, capped, as data/sets/synthetic.py draws them

Legend: N rows of all tables, T steps, R ranks, U unique rows of a rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.data.sets.synthetic import draw_samples, open_synthetic
from workers.workload import draw

RANKS, FIELDS, SKEW = 8, 26, 1.05

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Shape of one stream. Steps: `warm` of them fill the caches, `measured` are counted, `tail` are there so that
    hints see beyond the end."""

    name: str
    batch_size: int
    rows: int  # of zipf; of criteo the most of one field
    warm: int
    measured: int
    tail: int

    @property
    def steps(self) -> int:
        return self.warm + self.measured + self.tail

    @property
    def lookups(self) -> int:
        return self.batch_size * FIELDS


@dataclass(frozen=True)
class Stream:
    shape: Shape
    num_rows: int
    batches: list[list[Ids]]  # [step][rank] (U,) ascending, each once
    counts: Ids  # (N,) lookups of a row in all steps

    def next_uses(self) -> list[list[NDArray[np.int32]]]:
        """Return [step][rank] (U,): steps until the same rank uses the row again; 0: not in this stream."""
        results: list[list[NDArray[np.int32]]] = [[] for _ in self.batches]
        for rank in range(len(self.batches[0])):
            coming = np.full(self.num_rows, -1, np.int32)
            for step in reversed(range(len(self.batches))):
                ids = self.batches[step][rank]
                results[step].append(
                    np.where(coming[ids] < 0, 0, coming[ids] - step).astype(np.int32)
                )
                coming[ids] = step
        return results


def open_stream(
    shape: Shape, *, seed: int = 0, shift_at: int | None = None, num_ranks: int = RANKS
) -> Stream:
    """shift_at: from this step on other rows are popular, of zipf."""
    if shape.name == "zipf":
        num_rows, lookups = shape.rows, _zipf(shape, seed, shift_at)
    else:
        num_rows, lookups = _criteo(shape, seed)
    counts = np.zeros(num_rows, np.int64)

    def unique(step: int, rank: int) -> Ids:
        ids, number = np.unique(lookups(step, rank), return_counts=True)
        counts[ids] += number
        return ids

    batches = [[unique(step, rank) for rank in range(num_ranks)] for step in range(shape.steps)]
    return Stream(shape, num_rows, batches, counts)


Lookups = Callable[[int, int], Ids]


def _zipf(shape: Shape, seed: int, shift_at: int | None) -> Lookups:
    generator = torch.Generator().manual_seed(seed)

    def lookups(step: int, rank: int) -> Ids:
        ids = draw(SKEW, shape.rows, (1, 1, shape.lookups), generator).flatten().numpy()
        is_shifted = shift_at is not None and step >= shift_at
        return (ids + shape.rows // 3) % shape.rows if is_shifted else ids

    return lookups


def _criteo(shape: Shape, seed: int) -> tuple[int, Lookups]:
    law = open_synthetic(max_cardinality=shape.rows, num_test=0, seed=seed).train.distribution
    starts = np.cumsum([0, *(field.rows for field in law.fields)])

    def lookups(step: int, rank: int) -> Ids:
        first = (step * RANKS + rank) * shape.batch_size
        return (draw_samples(law, first, shape.batch_size).ids + starts[:-1, None]).ravel()

    return int(starts[-1]), lookups
