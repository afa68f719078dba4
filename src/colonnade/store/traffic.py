"""Sample of the rows that a store's batches use, from which memory is divided anew."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_IDS = 1 << 20
"""Number of ids, 8 MiB, above which a sample loses every other batch."""
MIN_BATCHES = 8
"""Number of batches below which a sample is too small to judge by, and goes on to the next commit."""


class TrafficSample:
    """Ids of every k-th batch since `clear`; k doubles when the sample is full.

    It has at most MAX_IDS ids, or those of 2 x MIN_BATCHES batches: large batches must not leave too few.
    One thread may add batches while another reads and clears.
    """

    def __init__(self, num_tables: int) -> None:
        self._lock = threading.Lock()
        self.peaks = [0] * num_tables
        """Number of ids of the batch with most, by table, ever."""
        self.clear()

    def clear(self) -> None:
        """Begin anew with every batch."""
        with self._lock:
            self.num_batches = 0
            self._stride = 1
            self._batches: list[tuple[Tensor, list[int]]] = []
            self._num_ids = 0

    @property
    def num_sampled(self) -> int:
        """Number of batches in the sample."""
        return len(self._batches)

    def add(self, batch_row_ids: Tensor, table_offsets: Tensor) -> None:
        """Count a batch, and keep every k-th. batch_row_ids (U,): unique within each table; table_offsets (T + 1,)."""
        bounds = table_offsets.tolist()
        sizes = [last - first for first, last in pairwise(bounds)]
        with self._lock:
            self.peaks = list(map(max, self.peaks, sizes))
            self.num_batches += 1
            if self.num_batches % self._stride:
                return
            self._batches.append((batch_row_ids.clone(), bounds))
            self._num_ids += len(batch_row_ids)
            while self._num_ids > MAX_IDS and len(self._batches) > 2 * MIN_BATCHES:
                self._batches = self._batches[1::2]
                self._num_ids = sum(len(batch_row_ids) for batch_row_ids, _ in self._batches)
                self._stride *= 2

    def by_table(self) -> list[list[NDArray[np.int64]]]:
        """Return the ids of each table in each batch of the sample, by table."""
        with self._lock:
            batches = list(self._batches)
        return [
            [ids[offsets[t] : offsets[t + 1]].numpy() for ids, offsets in batches]
            for t in range(len(self.peaks))
        ]
