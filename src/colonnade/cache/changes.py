"""When a row last changed at its owner, in batches: whether a copy that was read at one is still what the owner has."""

from __future__ import annotations

import numpy as np

MOST = 2**22
"""Numbers that are kept of a table, 4 bytes each."""
MIX = np.uint64(0x9E3779B97F4A7C15)


class Changes:
    """Of one table's rows that lie here. Rows may share a number, which is the newest of theirs: a row may be called
    changed that is not, and never the other way."""

    def __init__(self, rows: int | None) -> None:
        """rows: of the whole table; None: open."""
        size = MOST if rows is None else min(rows, MOST)
        self._shift = np.uint64(64 - max(1, int(size - 1).bit_length()))
        self.newest = np.zeros(1 << (64 - int(self._shift)), np.int32)

    def mark(self, ids: np.ndarray, number: int) -> None:
        """Batch `number` changed them."""
        self.newest[self._places(ids)] = number

    def since(self, ids: np.ndarray, read: np.ndarray) -> np.ndarray:
        """(n,) bool: may have changed in batch read[i], before whose updates the copy was read, or later."""
        return self.newest[self._places(ids)] >= read

    def _places(self, ids: np.ndarray) -> np.ndarray:
        return (ids.astype(np.uint64) * MIX >> self._shift).astype(np.int64)
