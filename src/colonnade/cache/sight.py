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
LONG = 4
"""Uses in a row are counted up to here."""
MANY = 2**16
"""Of what followed uses out of sight; beyond, what was long ago counts half."""
NAME_BYTES = 2
"""Of a row that its holder is told to give back: of its number, about."""


@dataclass(frozen=True, slots=True)
class Worth:
    """When bytes are saved by lending a row. Of `worth_of`."""

    least: int  # uses in a row that make up for its record both ways
    chance: float  # that each use must have of being followed by another, where none is in sight
    passes: bool  # whether for a copy, read once, a row is lent and given back with one use


@dataclass(frozen=True, slots=True)
class Decided:
    """Of one batch: its rows (n,) as they were seen, and m others."""

    has: np.ndarray  # (n,) bool: it lies with its user
    keeps: np.ndarray  # (n,) bool: it does so after the batch
    copied: (
        np.ndarray
    )  # (n,) bool: it comes back with this batch, if it was not plain, and a copy stays
    reader: (
        np.ndarray
    )  # (n,) int16: the rank that has a copy of it, which ends with the batch; or NOBODY
    recalled: np.ndarray  # (m,) int64: rows of other batches, which come back with this one
    holders: np.ndarray  # (m,) int16: the ranks that they lie with
    recopied: np.ndarray  # (m,) bool: a copy stays there


class Sight:
    """Of one table's rows that one owner has. `see` is called of each batch in order, `decide` of each in order, too;
    in sight of a batch are those that were seen when it is decided on.

    * A row that a rank alone uses may stay there as long as no use by another is in sight: it comes back with the
      batch before which such a use came into sight, or with its last use before it. So nobody needs a row that is
      elsewhere, wherever at least one batch is in sight; where none is, `holds` is to be False.
    * It is lent where as many uses in a row by the rank alone, this one included, as make up for the state of the
      optimizer that travels both ways (`Worth.least`) are in sight; and where so many are to be expected, because of
      its rows that had been used as many times in a row, up to four, and then were out of sight, so large a share was
      next used by the rank alone again (`Worth.chance`).
    * Where its next use is in sight, by several ranks and it is one of them, a copy stays that it reads then: what it
      knows nobody has to send. It takes the room of a row.
    * A rank has at most `quota` rows at a time. Rows with no use in sight come back for those that have one, those used
      longest ago first, and not for each other, for in turns they would drive each other out; where more would stay,
      those do that are used again soonest, of those alike the smallest ids.
    * Beyond what is in sight, the `quota` x ranks rows used last are remembered. Who is not comes back.

    All of it is a pure function of the order of calls. Flat arrays; the number of a row is its slot in a `Directory`
    of the rows that are remembered.
    """

    def __init__(self, num_ranks: int, quota: int, worth: Worth, *, holds: bool) -> None:
        """holds: whether rows stay that nobody uses in sight."""
        self.quota, self.worth, self.holds = quota, worth, holds
        self.is_over = (
            False  # nothing else will be seen: no row of a batch stays that is not used in sight
        )
        self.lent = np.zeros(
            num_ranks, np.int64
        )  # rows and copies that each rank has, as of the newest decision
        # By uses in a row: rows out of sight that were next used by the same rank alone, and that were not.
        self._right, self._wrong = np.ones(LONG + 1, np.int64), np.ones(LONG + 1, np.int64)
        self._directory = Directory(0, UNBOUNDED, UNBOUNDED)
        self._seen: deque[np.ndarray] = (
            deque()
        )  # slots of the rows of batches that are to be decided on
        self._back: list[
            tuple[np.ndarray, np.ndarray, np.ndarray]
        ] = []  # ids, holders, and whether a copy stays: with the next decision
        # Uses in sight are numbered through; of number i, at i modulo the length.
        self._first = self._end = 0
        self._users = np.empty(1, np.int16)
        self._following = np.empty(1, np.int64)  # number of the row's next use
        self._rejoins = np.empty(1, bool)  # that is by several ranks, this one's user among them
        # By slot.
        self._ids = np.empty(0, np.int64)
        self._newest = np.empty(0, np.int64)  # number of the newest use
        self._user = np.empty(0, np.int16)  # of the newest use that was decided on
        self._run = np.empty(0, np.int16)  # uses in a row by it alone until then
        self._is_lent = np.empty(0, bool)  # the row, or a copy that is yet to be read

    def see(
        self, ids: np.ndarray, users: np.ndarray, sharing: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """The next batch: its rows here (n,) int64, ascending, each once; users (n,) int16: the rank, or SHARED.
        sharing: of each SHARED one and each of its ranks, in any order: (its place in ids, the rank)."""
        in_sight = self._end - self._first + len(ids)
        self._directory.resize(in_sight + self.quota * len(self.lent))
        said = self._directory.step(ids)
        slots = said.slots.astype(np.int64)
        self._make_room(in_sight, self._directory.num_slots)
        numbers = np.arange(self._end, self._end + len(ids))
        self._users[self._at(numbers)], self._following[self._at(numbers)] = users, NONE
        self._rejoins[self._at(numbers)] = False
        is_known = said.asked == HIT
        new = slots[~is_known]
        before = self._newest[slots]
        is_next = is_known & (before >= self._first)
        is_idle = is_known & ~is_next
        self._following[self._at(before[is_next])] = numbers[is_next]
        last = self._user[slots].copy()
        last[is_next] = self._users[self._at(before[is_next])]
        rows, ranks = sharing
        joins = np.zeros(len(ids), bool)
        joins[rows[last[rows] == ranks]] = True
        self._rejoins[self._at(before[is_next])] = joins[is_next]
        is_other = is_idle & (last != users)
        forgotten = said.evicted_slots.astype(np.int64)
        self._learn(slots[is_idle & ~is_other], np.concatenate([slots[is_other], forgotten]))
        self._recall(slots[is_other & self._is_lent[slots]], joins[is_other & self._is_lent[slots]])
        forgotten = forgotten[self._is_lent[forgotten]]
        self._recall(forgotten, np.zeros(len(forgotten), bool))
        self._ids[slots], self._newest[slots] = ids, numbers
        self._user[new], self._run[new] = NOBODY, 0
        self._end += len(ids)
        self._seen.append(slots)

    def decide(self) -> Decided:
        """Of the oldest batch that was seen."""
        slots = self._seen.popleft()
        numbers = self._at(np.arange(self._first, self._first + len(slots)))
        users, following = self._users[numbers], self._following[numbers]
        is_alone, is_here, before = users != SHARED, self._is_lent[slots], self._user[slots]
        has = is_alone & is_here
        run = np.where(before == users, self._run[slots], 0) + 1
        run = np.minimum(run, LONG) * is_alone
        is_next = self._is_by(users, following)
        is_read = is_alone & self._rejoins[numbers]
        is_free = is_alone & (following == NONE) & (self.holds and not self.is_over)
        stays = is_next | is_read & (has | self.worth.passes) | (has & is_free)
        self.lent -= np.bincount(before[is_here & ~stays], minlength=len(self.lent))
        lends = ~has & (
            (is_next & self._runs_on(users, following))
            | ((is_next | is_free) & self._pays()[run])
            | (is_read & stays)
        )
        for rank in np.unique(users[lends]).tolist():
            rows = np.flatnonzero(lends & (users == rank))
            wanted = int((following[rows] != NONE).sum()) - (self.quota - int(self.lent[rank]))
            if wanted > 0:
                idle = self._idle()
                idle = idle[self._user[idle] == rank]
                idle = idle[np.argsort(self._newest[idle])[:wanted]]
                self._recall(idle, np.zeros(len(idle), bool))
            room = max(0, self.quota - int(self.lent[rank]))
            soonest = np.argsort(
                np.where(following[rows] == NONE, self._end, following[rows]), kind="stable"
            )
            lends[rows[soonest[room:]]] = False
            self.lent[rank] += min(len(rows), room)
        stays = (has & stays) | lends
        reader = np.where(is_here & ~is_alone, before, NOBODY)
        self._is_lent[slots], self._user[slots], self._run[slots] = stays, users, run
        self._first += len(slots)
        none = (self._ids[:0], self._user[:0], self._is_lent[:0])
        ids, holders, copied = (
            np.concatenate(each) for each in zip(none, *self._back, strict=True)
        )
        self._back = []
        return Decided(has, stays & ~is_read, stays & is_read, reader, ids, holders, copied)

    def _learn(self, right: np.ndarray, wrong: np.ndarray) -> None:
        """Slots of rows that were out of sight: that the same rank alone uses next, and that it does not."""
        for counts, slots in ((self._right, right), (self._wrong, wrong)):
            counts += np.bincount(self._run[slots], minlength=LONG + 1)
        halves = self._right + self._wrong > MANY
        self._right[halves] //= 2
        self._wrong[halves] //= 2

    def _pays(self) -> np.ndarray:
        """(LONG + 1,) bool, by uses in a row: what was used so by one rank is worth to be lent to it."""
        return self._right > self.worth.chance * (self._right + self._wrong)

    def _recall(self, slots: np.ndarray, copied: np.ndarray) -> None:
        """Rows that are lent and not used in sight; copied: a copy stays."""
        self._back.append((self._ids[slots], self._user[slots], copied))
        self._is_lent[slots] = copied
        self.lent -= np.bincount(self._user[slots[~copied]], minlength=len(self.lent))

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
        for _ in range(self.worth.least - 2):
            rows = np.flatnonzero(runs)
            ahead[rows] = self._following[self._at(ahead[rows])]
            runs[rows] = self._is_by(users[rows], ahead[rows])
        return runs

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        return numbers & (len(self._users) - 1)

    def _make_room(self, uses: int, num_slots: int) -> None:
        if uses > len(self._users):
            numbers = np.arange(self._first, self._end)
            here, size = self._at(numbers), 1 << int(uses - 1).bit_length()
            old = {name: getattr(self, name) for name in ("_users", "_following", "_rejoins")}
            for name, values in old.items():
                setattr(self, name, np.empty(size, values.dtype))
            there = self._at(numbers)
            for name, values in old.items():
                getattr(self, name)[there] = values[here]
        if num_slots > len(self._ids):
            more = max(num_slots, len(self._ids) * 3 // 2) - len(self._ids)
            for name in ("_ids", "_newest", "_user", "_run", "_is_lent"):
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros(more, values.dtype)]))


def worth_of(value_bytes: int, gradient_bytes: int, moved_bytes: int) -> Worth:
    """Of a table; moved_bytes: of a record on its way to a rank and back. A row that stays for n uses moves so in place
    of n values and n gradients, and is named where it is given back out of turn; of uses each of which is followed by
    another with chance p there are 1 / (1 - p) in a row."""
    both = value_bytes + gradient_bytes
    return Worth(
        max(2, moved_bytes // both + 1),
        1 - both / (moved_bytes + NAME_BYTES),
        moved_bytes < both + value_bytes,
    )
