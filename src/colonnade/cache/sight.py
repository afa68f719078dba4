"""What owners see of coming batches: who uses a row, who uses it next, and so which rows stay with their only user."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from colonnade.cache.directory import HIT, UNBOUNDED, Directory

SHARED = -1
"""Of `Sight.see`: several ranks use the row in one batch."""
NOBODY = -2
NONE = -1
"""No use in sight."""
LONG = 2**15 - 1
"""Uses in a row are counted up to here."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Of one batch: its rows (n,) as they were seen, and m others."""

    has: np.ndarray  # (n,) bool: it lies with its user
    keeps: np.ndarray  # (n,) bool: it does so after the batch
    recalled: np.ndarray  # (m,) int64: rows of other batches, which come back with this one
    holders: np.ndarray  # (m,) int16: the ranks that they lie with


class Sight:
    """Of one table's rows that one owner has. `see` is called of each batch in order, `decide` of each in order, too;
    in sight of a batch are those that were seen when it is decided on.

    * A row that a rank alone uses may stay there as long as no use by another is in sight: it comes back with the
      batch before which such a use came into sight, or with its last use before it. So nobody needs a row that is
      elsewhere, wherever at least one batch is in sight; where none is, `holds` is to be False.
    * It is lent where as many uses in a row by the rank alone, this one included, as make up for the state of the
      optimizer that travels both ways (`least`) are in sight, or were before.
    * A rank has at most `quota` rows at a time. Rows with no use in sight come back for those that have one, those used
      longest ago first, and not for each other, for in turns they would drive each other out; where more would stay,
      those do that are used again soonest, of those alike the smallest ids.
    * Beyond what is in sight, the `quota` x ranks rows used last are remembered. Who is not comes back.

    All of it is a pure function of the order of calls. Flat arrays; the number of a row is its slot in a `Directory`
    of the rows that are remembered.
    """

    def __init__(self, num_ranks: int, quota: int, least: int, *, holds: bool) -> None:
        """holds: whether rows stay that nobody uses in sight."""
        self.quota, self.least, self.holds = quota, max(2, least), holds
        self.is_over = (
            False  # nothing else will be seen: no row of a batch stays that is not used in sight
        )
        self.lent = np.zeros(
            num_ranks, np.int64
        )  # rows that each rank has, as of the newest decision
        self._directory = Directory(0, UNBOUNDED, UNBOUNDED)
        self._seen: deque[np.ndarray] = (
            deque()
        )  # slots of the rows of batches that are to be decided on
        self._back: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # ids and holders, with the next decision
        # Uses in sight are numbered through; of number i, at i modulo the length.
        self._first = self._end = 0
        self._users = np.empty(1, np.int16)
        self._following = np.empty(1, np.int64)  # number of the row's next use
        # By slot.
        self._ids = np.empty(0, np.int64)
        self._newest = np.empty(0, np.int64)  # number of the newest use
        self._user = np.empty(0, np.int16)  # of the newest use that was decided on
        self._run = np.empty(0, np.int16)  # uses in a row by it alone until then
        self._is_lent = np.empty(0, bool)

    def see(self, ids: np.ndarray, users: np.ndarray) -> None:
        """The next batch: its rows here (n,) int64, ascending, each once; users (n,) int16: the rank, or SHARED."""
        in_sight = self._end - self._first + len(ids)
        self._directory.resize(in_sight + self.quota * len(self.lent))
        said = self._directory.step(ids)
        slots = said.slots.astype(np.int64)
        self._make_room(in_sight, self._directory.num_slots)
        numbers = np.arange(self._end, self._end + len(ids))
        self._users[self._at(numbers)], self._following[self._at(numbers)] = users, NONE
        is_known = said.asked == HIT
        old, new = slots[is_known], slots[~is_known]
        before = self._newest[old]
        is_next = before >= self._first
        self._following[self._at(before[is_next])] = numbers[is_known][is_next]
        idle = old[~is_next]
        others = self._is_lent[idle] & (self._user[idle] != users[is_known][~is_next])
        self._recall(idle[others])
        forgotten = said.evicted_slots.astype(np.int64)
        self._recall(forgotten[self._is_lent[forgotten]])
        self._ids[slots], self._newest[slots] = ids, numbers
        self._user[new], self._run[new] = NOBODY, 0
        self._end += len(ids)
        self._seen.append(slots)

    def decide(self) -> Decided:
        """Of the oldest batch that was seen."""
        slots = self._seen.popleft()
        numbers = self._at(np.arange(self._first, self._first + len(slots)))
        users, following = self._users[numbers], self._following[numbers]
        is_alone, has = users != SHARED, self._is_lent[slots]
        run = np.where(self._user[slots] == users, self._run[slots], 0) + 1
        run = np.minimum(run, LONG) * is_alone
        is_next = self._is_by(users, following)
        is_free = is_alone & (following == NONE) & (self.holds and not self.is_over)
        stays = is_next | (has & is_free)
        self.lent -= np.bincount(users[has & ~stays], minlength=len(self.lent))
        lends = ~has & (
            (is_next & self._runs_on(users, following))
            | ((is_next | is_free) & (run >= self.least))
        )
        for rank in np.unique(users[lends]).tolist():
            rows = np.flatnonzero(lends & (users == rank))
            wanted = int(is_next[rows].sum()) - (self.quota - int(self.lent[rank]))
            if wanted > 0:
                idle = self._idle()
                idle = idle[self._user[idle] == rank]
                self._recall(idle[np.argsort(self._newest[idle])[:wanted]])
            room = max(0, self.quota - int(self.lent[rank]))
            soonest = np.argsort(
                np.where(following[rows] == NONE, self._end, following[rows]), kind="stable"
            )
            lends[rows[soonest[room:]]] = False
            self.lent[rank] += min(len(rows), room)
        keeps = (has & stays) | lends
        self._is_lent[slots], self._user[slots], self._run[slots] = keeps, users, run
        self._first += len(slots)
        ids, holders = zip((self._ids[:0], self._user[:0]), *self._back, strict=True)
        self._back = []
        return Decided(has, keeps, np.concatenate(ids), np.concatenate(holders))

    def _recall(self, slots: np.ndarray) -> None:
        """Rows that are lent and not used in sight."""
        self._back.append((self._ids[slots], self._user[slots]))
        self._is_lent[slots] = False
        self.lent -= np.bincount(self._user[slots], minlength=len(self.lent))

    def _idle(self) -> np.ndarray:
        """Slots of rows that are lent and not used in sight."""
        return np.flatnonzero(self._is_lent & (self._newest < self._first))

    def _is_by(self, users: np.ndarray, following: np.ndarray) -> np.ndarray:
        """(n,) bool: one rank alone, and so in use number `following`."""
        found = (users != SHARED) & (following != NONE)
        found[found] = self._users[self._at(following[found])] == users[found]
        return found

    def _runs_on(self, users: np.ndarray, following: np.ndarray) -> np.ndarray:
        """(n,) bool: `least` uses in a row, the first of them this one, are in sight."""
        runs, ahead = self._is_by(users, following), following.copy()
        for _ in range(self.least - 2):
            rows = np.flatnonzero(runs)
            ahead[rows] = self._following[self._at(ahead[rows])]
            runs[rows] = self._is_by(users[rows], ahead[rows])
        return runs

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        return numbers & (len(self._users) - 1)

    def _make_room(self, uses: int, num_slots: int) -> None:
        if uses > len(self._users):
            numbers = np.arange(self._first, self._end)
            here, users, following = self._at(numbers), self._users, self._following
            size = 1 << int(uses - 1).bit_length()
            self._users, self._following = np.empty(size, np.int16), np.empty(size, np.int64)
            there = self._at(numbers)
            self._users[there], self._following[there] = users[here], following[here]
        if num_slots > len(self._ids):
            more = max(num_slots, len(self._ids) * 3 // 2) - len(self._ids)
            for name in ("_ids", "_newest", "_user", "_run", "_is_lent"):
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros(more, values.dtype)]))


def least_uses(value_bytes: int, gradient_bytes: int, record_bytes: int) -> int:
    """Uses in a row by one rank from which on a row's record both ways is less than values and gradients."""
    return max(2, 2 * record_bytes // (value_bytes + gradient_bytes) + 1)
