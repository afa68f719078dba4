"""Emulated latency of byte-addressable memory for `bench tiers`: a delay for each cache line that moves.

Every row that moves between memory and its cache in mapped files costs `line_ns` for each of its lines, in the thread
that moves it, one line after another. Hardware has several lines in flight, so this is the slow end.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from torch import Tensor

from colonnade.store.dram import DramStore
from colonnade.table import CLOCK_BYTES, Table

LINE_BYTES = 64


def count_lines(table: Table) -> int:
    """Return the cache lines of a row: its weights, and its state with its clock, are apart."""
    weights = table.width * table.itemsize
    state = table.record_bytes - weights - CLOCK_BYTES // 2
    return -(-weights // LINE_BYTES) - (-state // LINE_BYTES)


def delay_moves(store: DramStore, library: Path, line_ns: int) -> None:
    """Delay each acquire of the store by its moves. The tables' rows have equal sizes."""
    spin = ctypes.CDLL(str(library)).spin
    spin.argtypes = [ctypes.c_int64]
    lines, acquire = max(map(count_lines, store.tables)), store.acquire
    moved = 0

    def acquire_slowly(ids: Tensor, offsets: Tensor, next_use: Tensor | None = None) -> Any:
        nonlocal moved
        result = acquire(ids, offsets, next_use)
        assert store.tiers is not None
        counts = store.tiers.cache_counts()
        before, moved = moved, counts["hits"] + counts["rows_inserted"]
        spin((moved - before) * lines * line_ns)
        return result

    store.acquire = acquire_slowly  # type: ignore[method-assign]
