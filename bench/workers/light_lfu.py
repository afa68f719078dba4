"""Light LFU, the eviction policy of HET, which training does not have: a row used often enough is never evicted.

Everything but the choice of evicted rows follows `colonnade.cache.directory`, in numpy: rows are ranked by how often
they were used, up to `MOST_USES`, then by the last batch that used them. A row used more often stays. A row's slot is
its id.

Legend: U rows of a batch, E evicted rows that are not in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colonnade.cache.directory import EXPIRED, HIT, MISS, Decision

MOST_USES = 10
USE = 2**28  # more than there are batches


class LightLfu:
    """Directory of the rows that one rank caches, of a table of `num_rows` rows."""

    def __init__(self, capacity: int, read_bound: int, write_bound: int, num_rows: int) -> None:
        self.capacity, self.read_bound, self.write_bound = capacity, read_bound, write_bound
        self.number = self.num_cached = 0
        self.score = np.zeros(num_rows, np.int64)  # 0: not cached
        self.read_at = np.zeros(num_rows, np.int64)
        self.ticks = np.zeros(num_rows, np.int64)

    def decide_batch(self, ids: NDArray[np.int64]) -> Decision:
        """Decide about the rows of the next batch: (U,), ascending, each once."""
        self.number += 1
        is_cached = self.score[ids] > 0
        ages = np.where(is_cached, self.number - self.read_at[ids], 0)
        is_over = ages > self.read_bound
        status = np.where(is_cached, np.where(is_over, EXPIRED, HIT), MISS).astype(np.uint8)
        self.read_at[ids[status != HIT]] = self.number
        ticks = np.where(is_cached, self.ticks[ids], 0) + 1
        is_full = ticks > self.write_bound
        self.ticks[ids] = np.where(is_full, 0, ticks)
        uses = np.minimum(self.score[ids] // USE + 1, MOST_USES + 1)
        self.score[ids] = uses * USE + np.where(uses <= MOST_USES, self.number, 0)
        self.num_cached += int((~is_cached).sum())
        evicted = self._evict()
        is_evicted = np.isin(ids, evicted)
        evicted = np.setdiff1d(evicted, ids)
        evicted = evicted[self.ticks[evicted] > 0]
        return Decision(
            self.number, ids, status, ages, ticks, is_full | is_evicted, is_evicted,
            evicted, evicted, self.ticks[evicted],
        )  # fmt: skip

    def _evict(self) -> NDArray[np.int64]:
        """Evict the rows of the lowest scores, among equals those of the smallest ids. Returns their ids."""
        surplus = self.num_cached - self.capacity
        if surplus <= 0:
            return np.empty(0, np.int64)
        cached_ids = np.flatnonzero(self.score)
        scores = self.score[cached_ids]
        threshold = np.partition(scores, surplus - 1)[surplus - 1]
        below, equal = cached_ids[scores < threshold], cached_ids[scores == threshold]
        evicted = np.concatenate([below, equal[: surplus - len(below)]])
        self.score[evicted] = 0
        self.num_cached -= surplus
        return evicted
