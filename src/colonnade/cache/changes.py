"""When a row last changed at its owner, in batches: whether a copy that was read at one is still what the owner has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 2**22
"""Numbers that are kept of a table, 4 bytes each."""
MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Marked:
    """What `mark` wrote over: as numbers are kept, which and what they were."""

    places: np.ndarray  # (n,) int64
    before: np.ndarray  # (n,) int32


class Changes:
    """Of the rows that lie here. Rows of a table may share a number, which is the newest of theirs: a row may be called
    changed that is not, and never the other way."""

    def __init__(self, rows: Sequence[int | None]) -> None:
        """rows: of each whole table; None: open."""
        bits = [
            max(1, int((MOST if of is None else min(of, MOST)) - 1).bit_length()) for of in rows
        ]
        self._shifts = np.array([64 - each for each in bits], np.uint64)
        self._firsts = np.cumsum([0, *(1 << each for each in bits)])
        self._newest = np.zeros(self._firsts[-1], np.int32)

    def of(self, t: int) -> np.ndarray:
        """Table t's numbers, int32: a view."""
        return self._newest[self._firsts[t] : self._firsts[t + 1]]

    def without(self, marked: Iterable[Marked]) -> list[np.ndarray]:
        """By table, its numbers, copied, as if the newest of what was marked, newest first, had not been."""
        newest = self._newest.copy()
        for each in marked:
            newest[each.places] = each.before
        return np.split(newest, self._firsts[1:-1])

    def mark(self, tables: np.ndarray | int, ids: np.ndarray, number: int) -> Marked:
        """Batch `number` changes these rows (n,) of tables (n,), or of one. For `undo`."""
        places = self._places(tables, ids)
        marked = Marked(places, self._newest[places])
        self._newest[places] = number
        return marked

    def undo(self, marked: Marked) -> None:
        """As if the newest `mark`, which gave this, had not been."""
        self._newest[marked.places] = marked.before

    def since(self, tables: np.ndarray | int, ids: np.ndarray, read: np.ndarray) -> np.ndarray:
        """(n,) bool: may have changed in batch read[i], before whose updates the copy was read, or later."""
        return self._newest[self._places(tables, ids)] >= read

    def renumber(self, shift: int) -> None:
        """As if batches had been counted from `shift` on; those of before are all the first."""
        self._newest = np.maximum(self._newest - shift, 0)

    def _places(self, tables: np.ndarray | int, ids: np.ndarray) -> np.ndarray:
        mixed = ids.astype(np.uint64) * MIX >> self._shifts[tables]
        return mixed.astype(np.int64) + self._firsts[tables]
