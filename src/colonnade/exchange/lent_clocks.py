"""Clocks of rows that are lent: how often each was updated, counted by its owner, so that they need not come back.

An owner hears of every use of its rows, wherever they lie, and a use is one update. On the training thread, in the
order of the batches. Rows are listed rank by rank, table by table: counts (N, T) of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from colonnade.exchange.cached_wire import tables_of
from colonnade.exchange.row_numbers import RowNumbers
from colonnade.table import CLOCK_BYTES, ITEM_BYTES, Table


class LentClocks:
    """Of all tables."""

    def __init__(self, rows: Sequence[int | None]) -> None:
        """rows: of each table; None: open."""
        self._clocks = RowNumbers(rows)

    def lend(self, counts: np.ndarray, ids: Tensor, clocks: Tensor) -> None:
        """clocks (n,) int64 of rows that are lent from here on."""
        self._clocks.put(tables_of(counts), ids.numpy(), clocks.numpy())

    def tick(self, counts: np.ndarray, ids: Tensor) -> None:
        """Rows that are lent were updated, each once."""
        self.lend(counts, ids, self.of(counts, ids) + 1)

    def of(self, counts: np.ndarray, ids: Tensor) -> Tensor:
        """(n,) int64 of rows that are lent."""
        return torch.from_numpy(self._clocks.get(tables_of(counts), ids.numpy()))

    def end(self, counts: np.ndarray, ids: Tensor) -> Tensor:
        """Likewise; they are lent no more."""
        found = self.of(counts, ids)
        self._clocks.erase(tables_of(counts), ids.numpy())
        return found


def moved_bytes(table: Table) -> tuple[int, int]:
    """(Of a record that is lent, of one that comes back). The first has 4 bytes of its clock where updates depend on
    it, for in memory a clock stops at 2^32."""
    counts = any(part.optimizer.counts_steps for part in table.parts)
    rounds = ITEM_BYTES[table.dtype] < ITEM_BYTES["float32"] and not table.master
    without = table.record_bytes - CLOCK_BYTES
    return without + (CLOCK_BYTES // 2 if counts or rounds else 0), without
