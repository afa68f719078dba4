"""What owners see of coming batches: who uses a row, who uses it next, and so which rows stay with their only user."""

from __future__ import annotations

from collections import deque

import numpy as np

from colonnade.cache.directory import HIT, UNBOUNDED, Directory

SHARED = -1
"""Of `Sight.see`: several ranks use the row in one batch."""
NONE = -1
"""Nobody uses it in sight."""


class Sight:
    """Of one table's rows that one owner has. `see` is called of each batch in order, `decide` of each in order, too;
    in sight of a batch are those that were seen when it is decided on.

    * A row stays with the rank that alone uses it in a batch if the next batch in sight that uses it at all is that
      rank's alone. So nobody ever needs a row that is elsewhere: it is given back with the last such use.
    * It is lent only where at least `least` such uses, the first included, are in sight: so many make up for the
      state of the optimizer that travels both ways.
    * A rank has at most `quota` rows at a time. Where more would stay, those do that are used again soonest, of those
      alike the smallest ids; who has a row already keeps it.

    All of it is a pure function of the order of calls. Flat arrays over what is in sight, 10 bytes a use; the number
    of a row among these is its slot in a `Directory` that remembers rows in sight alone.
    """

    def __init__(self, num_ranks: int, quota: int, least: int) -> None:
        self.quota, self.least = quota, max(2, least)
        self.lent = np.zeros(
            num_ranks, np.int64
        )  # rows that each rank has, as of the newest decision
        self._directory = Directory(0, UNBOUNDED, UNBOUNDED)
        self._seen: deque[np.ndarray] = (
            deque()
        )  # slots of the rows of batches that are to be decided on
        # Uses in sight are numbered through; of number i, at i modulo the length.
        self._first = self._end = 0
        self._user = np.empty(1, np.int16)
        self._next = np.empty(1, np.int64)  # number of the row's next use
        self._newest = np.empty(0, np.int64)  # by slot: number of the newest use
        self._is_lent = np.empty(0, bool)  # by slot

    def see(self, ids: np.ndarray, users: np.ndarray) -> None:
        """The next batch: its rows here (n,) int64, ascending, each once; users (n,) int16: the rank, or SHARED."""
        in_sight = self._end - self._first
        self._directory.resize(in_sight + len(ids))
        said = self._directory.step(ids)
        slots = said.slots.astype(np.int64)
        self._make_room(in_sight + len(ids), self._directory.num_slots)
        numbers = np.arange(self._end, self._end + len(ids))
        self._user[self._at(numbers)], self._next[self._at(numbers)] = users, NONE
        before = self._newest[slots]
        is_known = (said.asked == HIT) & (before >= self._first)
        self._next[self._at(before[is_known])] = numbers[is_known]
        self._newest[slots] = numbers
        self._end += len(ids)
        self._seen.append(slots)

    def decide(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the oldest batch, by row as it was seen: (n,) bool, whether its user has it; (n,) bool, whether the user
        has it afterwards."""
        slots = self._seen.popleft()
        numbers = np.arange(self._first, self._first + len(slots))
        users, following = self._user[self._at(numbers)], self._next[self._at(numbers)]
        has = self._is_lent[slots]
        stays = self._same(users, following)
        lends = stays & ~has
        ahead = following.copy()
        for _ in range(self.least - 2):
            rows = np.flatnonzero(lends)
            ahead[rows] = self._next[self._at(ahead[rows])]
            lends[rows] = self._same(users[rows], ahead[rows])
        self.lent -= np.bincount(users[has & ~stays], minlength=len(self.lent))
        for rank in np.unique(users[lends]).tolist():
            rows = np.flatnonzero(lends & (users == rank))
            room = max(0, self.quota - int(self.lent[rank]))
            if len(rows) > room:
                soonest = np.argsort(following[rows], kind="stable")
                lends[rows[soonest[room:]]] = False
            self.lent[rank] += min(len(rows), room)
        keeps = (has & stays) | lends
        self._is_lent[slots] = keeps
        self._first += len(slots)
        return has, keeps

    def _same(self, users: np.ndarray, following: np.ndarray) -> np.ndarray:
        """(n,) bool: one rank alone, and so in use number `following`."""
        found = (users != SHARED) & (following != NONE)
        found[found] = self._user[self._at(following[found])] == users[found]
        return found

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        return numbers & (len(self._user) - 1)

    def _make_room(self, uses: int, slots: int) -> None:
        if uses > len(self._user):
            numbers = np.arange(self._first, self._end)
            old = self._at(numbers), self._user, self._next
            size = 1 << int(uses - 1).bit_length()
            self._user, self._next = np.empty(size, np.int16), np.empty(size, np.int64)
            self._user[self._at(numbers)], self._next[self._at(numbers)] = (
                old[1][old[0]],
                old[2][old[0]],
            )
        if slots > len(self._newest):
            more = max(slots, len(self._newest) * 3 // 2) - len(self._newest)
            self._newest = np.concatenate([self._newest, np.full(more, NONE)])
            self._is_lent = np.concatenate([self._is_lent, np.zeros(more, bool)])


def least_uses(value_bytes: int, gradient_bytes: int, record_bytes: int) -> int:
    """Uses in a row by one rank from which on a row's record both ways is less than values and gradients."""
    return max(2, 2 * record_bytes // (value_bytes + gradient_bytes) + 1)
