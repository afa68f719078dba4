"""Which rows of a table lie in which slot of a small, fast memory, and who leaves when another row comes.

    found = directory.find(ids); directory.pin(found[found >= 0], codes)
    victims = directory.choose(count)        # nothing has changed
    slots = directory.admit(new_ids, victims, codes)

One array element per slot, 39 bytes with the index; every call is of whole arrays. What is not said to be atomic is
the caller's to lock. Legend: S slots, N rows of a call.
"""

from __future__ import annotations

import numpy as np

from colonnade import _native

HELD, HERE, DIRTY, PIN = 1, 2, 4, 8
"""Marks of a slot: it has a row; the row's values are there; they are newer than below; and a count of pins above."""
DIRECT = (
    6  # a vocabulary of fewer rows than so many to a slot is indexed by an array: that takes less
)
HALF_LIFE = 32  # uses, by the number of slots, after which a count of uses is halved
LATEST = 60.0  # half-lives that float32 counts hold apart; then all are scaled down
EXACT = 8192  # slots up to which the rows worth least are found exactly
SAMPLE = 1024  # slots that the threshold is taken from, where there are more
LEAST = 0.02  # of the rows: those below the threshold
RUN = 1 << 16  # slots swept at a time
UNKNOWN = 49151  # batches ahead, as good as any other, where a hint says nothing


def _batches_ahead() -> np.ndarray:
    """(256,) float32, by code of `Batch.next_use`."""
    ahead = np.exp2((np.arange(256) - 1) / 8)
    ahead[0], ahead[255] = UNKNOWN, np.inf
    return ahead.astype(np.float32)


BATCHES_AHEAD = _batches_ahead()


class SlotDirectory:
    """Of a table's rows. Worth is how often a row was used, halved as time passes, or, from the first hint on, how
    soon it is used again."""

    def __init__(self, num_slots: int, rows: int | None = None) -> None:
        """rows: of a vocabulary table."""
        self.num_slots = num_slots
        self.ids = np.zeros(num_slots, np.int64)
        self.marks = np.zeros(num_slots, np.int32)
        self.num_rows = self.num_pinned = 0
        self._worth = np.zeros(num_slots, np.float32)
        self._index: _ArrayIndex | _native.RowIndex = _native.RowIndex()
        if rows is not None and rows < DIRECT * num_slots:
            self._index = _ArrayIndex(rows)
        self._num_used = 0  # slots that ever held a row; those given back are in `_free`
        self._free = np.empty(0, np.int64)
        self._hand = 0
        self._time = 0.0  # half-lives; with hints, acquires
        self._has_hints = False
        self._random = np.random.default_rng(num_slots)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """(N,) int64 slots; -1 where absent."""
        slots = np.empty(len(ids), np.int64)
        self._index.get(ids, slots)
        return slots

    def tick(self, num_rows: int, is_hinted: bool) -> None:
        """Time passes: so many rows are about to be used."""
        if is_hinted != self._has_hints:  # worths of one kind mean nothing to the other
            self._has_hints, self._time = is_hinted, 0.0
            self._worth[:] = -UNKNOWN if is_hinted else 1.0
        self._time += 1.0 if is_hinted else num_rows / (HALF_LIFE * max(1, self.num_slots))
        if not is_hinted and self._time > LATEST:
            self._worth *= np.float32(2.0**-self._time)
            self._time = 0.0

    def pin(self, slots: np.ndarray, codes: np.ndarray | None) -> None:
        """slots (N,) unique; codes (N,) uint8 as in `Batch.next_use`: these rows are used."""
        self._hold(slots)
        if codes is None:
            self._worth[slots] += np.float32(2.0**self._time)
        else:
            self._worth[slots] = self._hinted(codes)

    def unpin(self, slots: np.ndarray, *, dirty: bool) -> None:
        """Undo one `pin` or `admit`. Raises ValueError, nothing changed, where a slot is not pinned."""
        marks = self.marks[slots] - np.int32(PIN)
        if len(marks) and marks.min() < 0:
            raise ValueError("a slot that is released is not pinned")
        if dirty:
            marks |= DIRTY
        self.marks[slots] = marks
        self.num_pinned -= int(np.count_nonzero(marks < PIN))

    def is_pinned(self, slots: np.ndarray) -> np.ndarray:
        return self.marks[slots] >= PIN

    def num_others(self, here: np.ndarray, count: int) -> int:
        """Rows that are pinned and not among `here`, slots of some of `count` rows to be pinned together; not exact
        where all these have room."""
        if self.num_pinned + count <= self.num_slots:
            return self.num_pinned
        return self.num_pinned - int(np.count_nonzero(self.is_pinned(here)))

    def choose(self, count: int) -> np.ndarray:
        """Slots of rows that leave for `count` others: none where there are free ones, never a pinned row. There must
        be room."""
        needed = count - (self.num_slots - self.num_rows)
        if needed <= 0:
            return np.empty(0, np.int64)
        if self._num_used <= EXACT:
            return self._least(self._leaving(0, self._num_used), needed)
        sample = self._random.integers(0, self._num_used, SAMPLE)
        worths = self._worth[sample[self._may_leave(sample)]]
        share = max(LEAST, 1.5 * needed / (self.num_rows - self.num_pinned))
        if len(worths) and share < 1:
            found = self._sweep(needed, float(np.quantile(worths, share, method="lower")))
            if len(found) == needed:
                return found
        return self._least(self._leaving(0, self._num_used), needed)

    def admit(self, ids: np.ndarray, victims: np.ndarray, codes: np.ndarray | None) -> np.ndarray:
        """(N,) slots of rows ids (N,), which were absent, pinned; those of `choose(N)` have left."""
        self.drop(victims)
        fresh = max(0, len(ids) - len(self._free))
        kept = len(self._free) - (len(ids) - fresh)
        slots = np.concatenate(
            [self._free[kept:], np.arange(self._num_used, self._num_used + fresh)]
        )
        self._index.put(ids, slots)
        self._free, self._num_used = self._free[:kept], self._num_used + fresh
        self.ids[slots], self.marks[slots] = ids, HELD
        self.num_rows += len(slots)
        self._hold(slots)
        self._worth[slots] = np.float32(2.0**self._time) if codes is None else self._hinted(codes)
        return slots

    def drop(self, slots: np.ndarray) -> None:
        """Unpinned rows give their slots back."""
        if not len(slots):
            return
        self._index.erase(self.ids[slots])
        self.marks[slots] = 0
        self.num_rows -= len(slots)
        self._free = np.concatenate([self._free, slots])

    def dirty(self) -> np.ndarray:
        """Slots of rows newer than below."""
        return np.flatnonzero(self.marks[: self._num_used] & DIRTY)

    def pinned_share(self) -> float:
        return self.num_pinned / max(1, self.num_slots)

    def _hold(self, slots: np.ndarray) -> None:
        marks = self.marks[slots]
        self.num_pinned += int(np.count_nonzero(marks < PIN))
        self.marks[slots] = marks + np.int32(PIN)

    def _hinted(self, codes: np.ndarray) -> np.ndarray:
        return -(np.float32(self._time) + BATCHES_AHEAD[codes])

    def _may_leave(self, slots: np.ndarray | slice) -> np.ndarray:
        marks = self.marks[slots]
        return (marks > 0) & (marks < PIN)

    def _leaving(self, begin: int, end: int) -> np.ndarray:
        return np.flatnonzero(self._may_leave(slice(begin, end))) + begin

    def _least(self, slots: np.ndarray, count: int) -> np.ndarray:
        if count >= len(slots):
            return slots
        return slots[np.argpartition(self._worth[slots], count - 1)[:count]]

    def _sweep(self, count: int, threshold: float) -> np.ndarray:
        """The next `count` rows behind the hand that may leave and are worth at most this; fewer after one round."""
        found: list[np.ndarray] = []
        missing, begin, swept = count, self._hand % self._num_used, 0
        while missing and swept < self._num_used:
            end = min(begin + RUN, self._num_used, begin + self._num_used - swept)
            slots = self._leaving(begin, end)
            slots = slots[self._worth[slots] <= threshold][:missing]
            found.append(slots)
            missing -= len(slots)
            swept += end - begin
            self._hand = int(slots[-1]) + 1 if not missing and len(slots) else end
            begin = end % self._num_used
        return np.concatenate(found)


class _ArrayIndex:
    """`_native.RowIndex` for ids 0 .. rows - 1."""

    def __init__(self, rows: int) -> None:
        self._slots = np.full(rows, -1, np.int32)

    def get(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._slots[ids]

    def put(self, ids: np.ndarray, slots: np.ndarray) -> None:
        self._slots[ids] = slots

    def erase(self, ids: np.ndarray) -> None:
        self._slots[ids] = -1
