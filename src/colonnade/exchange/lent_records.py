"""Records of rows that are lent or come back, on their way in and out of memory.

Legend: N ranks, T tables, n rows, listed rank by rank, table by table: counts (N, T) of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import BudgetExceeded
from colonnade.exchange.cached_wire import by_table, table_major

TOGETHER = 4096
"""Rows that are put back at once, where memory has room for them."""


def unpack(
    store: Any,
    slots: np.ndarray,
    counts: np.ndarray,
    widths: np.ndarray,
    records: Tensor,
    clocks: Tensor | None = None,
) -> None:
    """To slots (n,) of a store, pinned, as `_native.Dram.unpack_blocks`; a commit that is under way has the rows as
    they were."""
    if not len(slots):
        return
    where = torch.from_numpy(slots)
    order = table_major(counts)
    ends = torch.from_numpy(np.concatenate([[0], counts.sum(0).cumsum()]))
    store.before_update(where[torch.from_numpy(order)], ends)
    store.native.unpack_blocks(where, counts.ravel(), widths, records, clocks)


def clocks_at(store: Any, slots: np.ndarray, counts: np.ndarray) -> Tensor:
    """(n,) int64 of rows in slots (n,)."""
    found = torch.empty(len(slots), dtype=torch.int64)
    for t, rows in enumerate(by_table(counts)):
        if len(rows):
            where = torch.from_numpy(rows)
            found[where] = store.clocks(t, torch.from_numpy(slots)[where])
    return found


def put_by_room(store: Any, t: int, ids: Tensor, records: Tensor) -> None:
    """As many at once as memory has room for. Raises BudgetExceeded where that is not one."""
    first, together = 0, TOGETHER
    while first < len(ids):
        some = slice(first, first + together)
        try:
            store.put(t, ids[some], records[some])
        except BudgetExceeded:
            if together == 1:
                raise
            together = max(1, together // 2)
            continue
        first += together
