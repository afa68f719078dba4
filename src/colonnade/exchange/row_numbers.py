"""A number for each of some rows of any table.

One index for all tables of a vocabulary, whose rows lie one after another there, and one for each open table.

Legend: T tables, n rows in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from colonnade import _native

ABSENT = -1


class RowNumbers:
    """tables (n,) int, ids (n,) int64: rows, each once in a call."""

    def __init__(self, rows: Sequence[int | None]) -> None:
        """By table; None: open."""
        known = np.array([count or 0 for count in rows])
        self._firsts = np.concatenate([[0], known.cumsum()[:-1]])
        is_open = np.array([count is None for count in rows])
        self._of = np.where(is_open, is_open.cumsum(), 0)  # by table: which index
        self._indexes = [_native.RowIndex() for _ in range(int(is_open.sum()) + 1)]

    def get(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """(n,) int64; ABSENT where there is none."""
        found = np.empty(len(ids), np.int64)
        for index, rows, keys in self._parts(tables, ids):
            mine = np.empty(len(keys), np.int64)
            index.get(keys, mine)
            found[rows] = mine
        return found

    def put(self, tables: np.ndarray, ids: np.ndarray, numbers: np.ndarray) -> None:
        """numbers (n,) int64, 0 or more."""
        for index, rows, keys in self._parts(tables, ids):
            index.put(keys, numbers[rows])

    def erase(self, tables: np.ndarray, ids: np.ndarray) -> None:
        for index, _, keys in self._parts(tables, ids):
            index.erase(keys)

    def _parts(
        self, tables: np.ndarray, ids: np.ndarray
    ) -> Iterator[tuple[_native.RowIndex, np.ndarray | slice, np.ndarray]]:
        """By index that has some of the rows: which these are, and their keys."""
        if len(self._indexes) == 1:
            yield self._indexes[0], slice(None), ids + self._firsts[tables]
            return
        of, keys = self._of[tables], ids + self._firsts[tables] * (self._of[tables] == 0)
        for i in np.flatnonzero(np.bincount(of, minlength=len(self._indexes))).tolist():
            rows = np.flatnonzero(of == i)
            yield self._indexes[i], rows, keys[rows]
