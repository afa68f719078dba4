"""HET's light LFU, which training does not have: a row that was used often enough never leaves.

The rules of `colonnade.cache.directory` but for who leaves, in numpy: how often a row was used, up to `MOST_USES`, then
the last batch that used it. A row used more often stays.

Legend: U rows of a batch, E others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.cache.directory import HIT, LEASE_OVER, MISS

MOST_USES = 10
USE = 2**28  # more than there are batches


@dataclass(frozen=True, slots=True)
class Decision:
    """What one batch means for the copies: `colonnade.cache.directory.Decision` without slots."""

    asked: NDArray[np.uint8]  # (U,)
    ages: NDArray[np.int64]  # (U,)
    ticks: NDArray[np.int64]  # (U,)
    pushed: NDArray[np.bool_]  # (U,)
    evicted_ids: NDArray[np.int64]  # (E,)
    evicted_ticks: NDArray[np.int64]  # (E,)


class LightLfu:
    """Copies that one rank keeps of `num_rows` rows."""

    def __init__(self, capacity: int, read_bound: int, write_bound: int, num_rows: int) -> None:
        self.capacity, self.read_bound, self.write_bound = capacity, read_bound, write_bound
        self.number = self.num_copies = 0
        self.worth = np.zeros(num_rows, np.int64)  # 0: no copy
        self.copied = np.zeros(num_rows, np.int64)
        self.ticks = np.zeros(num_rows, np.int64)

    def step(self, ids: NDArray[np.int64]) -> Decision:
        """Decide about the next batch's rows: (U,), ascending, each once."""
        self.number += 1
        is_here = self.worth[ids] > 0
        ages = np.where(is_here, self.number - self.copied[ids], 0)
        is_over = ages > self.read_bound
        asked = np.where(is_here, np.where(is_over, LEASE_OVER, HIT), MISS).astype(np.uint8)
        self.copied[ids[asked != HIT]] = self.number
        ticks = np.where(is_here, self.ticks[ids], 0) + 1
        pushed = ticks > self.write_bound
        self.ticks[ids] = np.where(pushed, 0, ticks)
        uses = np.minimum(self.worth[ids] // USE + 1, MOST_USES + 1)
        self.worth[ids] = uses * USE + np.where(uses <= MOST_USES, self.number, 0)
        self.num_copies += int((~is_here).sum())
        gone = self._evict()
        leaves = np.isin(ids, gone)
        others = np.setdiff1d(gone, ids)
        others = others[self.ticks[others] > 0]
        return Decision(asked, ages, ticks, pushed | leaves, others, self.ticks[others])

    def _evict(self) -> NDArray[np.int64]:
        """Drop the copies that are worth least, of those alike the smallest ids. Returns them."""
        surplus = self.num_copies - self.capacity
        if surplus <= 0:
            return np.empty(0, np.int64)
        here = np.flatnonzero(self.worth)
        worth = self.worth[here]
        most = np.partition(worth, surplus - 1)[surplus - 1]
        less, alike = here[worth < most], here[worth == most]
        gone = np.concatenate([less, alike[: surplus - len(less)]])
        self.worth[gone] = 0
        self.num_copies -= surplus
        return gone
