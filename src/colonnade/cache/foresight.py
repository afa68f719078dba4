"""What a rank knows of its own coming batches: in how many batches it uses each row again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from colonnade import _native


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Of one batch, as `Directory.step` takes it."""

    next_uses: (
        np.ndarray
    )  # (U,) int32: batches until each of its rows is used again; 0: not in sight
    coming: np.ndarray | None  # int64: rows of the last batch in sight, where that is new


class Foresight:
    """Of one table. `see` is called of each batch of a lookahead in order; `next` for each in order, too, when the
    `window` batches after it have been seen, or all that are left. A pure function of the order of batches.

    Memory: some 24 bytes for each use in sight and 23 for each different row.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._batches: deque[np.ndarray] = deque()  # rows of those that `next` is still to tell of
        self._newest = _native.RowIndex()  # of each row in sight: the number of its last use there
        # Uses are numbered through. Of those in sight: the number of the batch that uses the row next, 0: none yet.
        self._following = np.zeros(0, np.int64)
        self._base = self._first = self._end = (
            0  # number of the first here, the first in sight, the next one
        )
        self._seen = self._told = 0  # batches

    def see(self, ids: np.ndarray) -> None:
        """The next batch: its rows (U,) int64, ascending, each once."""
        self._seen += 1
        before = np.empty(len(ids), np.int64)
        self._newest.get(ids, before)
        self._following[before[before >= 0] - self._base] = self._seen
        self._make_room(len(ids))
        numbers = np.arange(self._end, self._end + len(ids))
        self._following[numbers - self._base] = 0
        self._newest.put(ids, numbers)
        self._end += len(ids)
        self._batches.append(ids)

    def next(self) -> Foreseen:
        """Of the oldest batch that was seen and not told of."""
        ids = self._batches.popleft()
        self._told += 1
        first = self._first - self._base
        following = self._following[first : first + len(ids)]
        is_last = following == 0
        self._newest.erase(ids[is_last])
        self._first += len(ids)
        next_uses = np.where(is_last, 0, following - self._told).astype(np.int32)
        is_new = len(self._batches) == self.window
        return Foreseen(next_uses, self._batches[-1] if is_new and self._batches else None)

    def _make_room(self, uses: int) -> None:
        """For so many more."""
        if self._end - self._base + uses <= len(self._following):
            return
        here = self._following[self._first - self._base : self._end - self._base]
        self._following = np.concatenate([here, np.zeros(len(here) + 2 * uses, np.int64)])
        self._base = self._first
