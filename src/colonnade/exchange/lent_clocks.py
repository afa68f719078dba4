"""Clocks of rows that are lent: how often each was updated, counted by its owner, so that they need not come back.

An owner hears of every use of its rows, wherever they lie, and a use is one update. On the training thread, in the
order of the batches. Rows are listed rank by rank, table by table: counts (N, T) of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.exchange.cached_wire import tables_of
from colonnade.table import CLOCK_BYTES, ITEM_BYTES, Table


class LentClocks:
    """Of all tables."""

    def __init__(self, num_tables: int) -> None:
        self._by_id = [_native.RowIndex() for _ in range(num_tables)]

    def lend(self, counts: np.ndarray, ids: Tensor, clocks: Tensor) -> None:
        """clocks (n,) int64 of rows that are lent from here on."""
        for t, rows in _by_table(counts):
            self._by_id[t].put(ids[rows], clocks[rows])

    def tick(self, counts: np.ndarray, ids: Tensor) -> None:
        """Rows that are lent were updated, each once."""
        clocks = self.of(counts, ids)
        self.lend(counts, ids, clocks + 1)

    def of(self, counts: np.ndarray, ids: Tensor) -> Tensor:
        """(n,) int64 of rows that are lent."""
        found = torch.empty(len(ids), dtype=torch.int64)
        for t, rows in _by_table(counts):
            mine = torch.empty(len(rows), dtype=torch.int64)
            self._by_id[t].get(ids[rows], mine)
            found[rows] = mine
        return found

    def end(self, counts: np.ndarray, ids: Tensor) -> Tensor:
        """Likewise; they are lent no more."""
        found = self.of(counts, ids)
        for t, rows in _by_table(counts):
            self._by_id[t].erase(ids[rows])
        return found


def _by_table(counts: np.ndarray) -> Iterator[tuple[int, Tensor]]:
    """Tables that have some of the rows, and where these are."""
    order = torch.from_numpy(np.argsort(tables_of(counts), kind="stable"))
    parts = order.split(counts.sum(0).tolist())
    return ((t, rows) for t, rows in enumerate(parts) if len(rows))


def moved_bytes(table: Table) -> tuple[int, int]:
    """(Of a record that is lent, of one that comes back). The first has 4 bytes of its clock where updates depend on
    it, for in memory a clock stops at 2^32."""
    counts = any(part.optimizer.counts_steps for part in table.parts)
    rounds = ITEM_BYTES[table.dtype] < ITEM_BYTES["float32"] and not table.master
    without = table.record_bytes - CLOCK_BYTES
    return without + (CLOCK_BYTES // 2 if counts or rounds else 0), without
