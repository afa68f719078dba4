"""Who uses a row next, and who has it, one row at a time: the definition of `cache.sight.Sight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from colonnade.cache import sight
from colonnade.cache.sight import LONG, Worth

Batch = Mapping[int, Set[int]]
"""By id: the ranks that use it."""


class SlowSight:
    def __init__(self, num_ranks: int, quota: int, worth: Worth, *, holds: bool) -> None:
        self.num_ranks, self.quota, self.worth, self.holds = num_ranks, quota, worth, holds
        self.is_over = False
        self.batches: list[Batch] = []
        self.decided = 0
        self.newest: dict[int, int] = {}  # of rows that are remembered: the last batch seen
        self.history: dict[int, list[Set[int]]] = {}  # of these: users of batches decided on
        self.holder: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.back: list[tuple[int, int, bool]] = []
        self.right = dict.fromkeys(range(LONG + 1), 1)  # by uses in a row
        self.wrong = dict.fromkeys(range(LONG + 1), 1)

    @property
    def in_sight(self) -> Sequence[Batch]:
        return self.batches[self.decided :]

    def see(self, batch: Batch) -> None:
        is_idle = {id: not any(id in each for each in self.in_sight) for id in batch}
        for id, users in batch.items():
            if id not in self.history or not is_idle[id]:
                continue
            last = self.history[id][-1]
            same = last == users and len(users) == 1
            self.learn(self.right if same else self.wrong, id)
            if id in self.holder and not same:
                self.recall(id, self.holder[id] in users)
        self.batches.append(batch)
        self.newest |= dict.fromkeys(batch, len(self.batches))
        room = sum(map(len, self.in_sight)) + self.quota * self.num_ranks
        for id in sorted(self.newest, key=lambda id: (self.newest[id], id)):
            if len(self.newest) <= room:
                break
            self.learn(self.wrong, id)
            del self.newest[id], self.history[id]
            if id in self.holder:
                self.recall(id, False)
        for uses in self.right:
            if self.right[uses] + self.wrong[uses] > sight.MANY:
                self.right[uses] //= 2
                self.wrong[uses] //= 2

    def learn(self, counts: dict[int, int], id: int) -> None:
        counts[min(LONG, alone(self.history[id][::-1]))] += 1

    def recall(self, id: int, is_copied: bool) -> None:
        holder = self.holder.pop(id)
        self.back.append((id, holder, is_copied))
        if is_copied:
            self.copies[id] = holder

    def decide(self) -> tuple[set[int], set[int], set[int], dict[int, int], set]:
        """Ids whose user has them; those whose user has them afterwards, or a copy; who reads a copy of which; (id,
        holder, whether a copy stays) of rows that come back."""
        batch, *coming = self.in_sight
        has = {id for id in batch if id in self.holder}
        idle = [id for id in self.holder if not any(id in each for each in self.in_sight)]
        readers = {id: self.copies.pop(id) for id in batch if id in self.copies}
        wishes, copied = [], set()
        for id, users in batch.items():
            uses = [each[id] for each in coming if id in each]
            history = [*self.history.get(id, []), users]
            is_alone, run = len(users) == 1, min(LONG, alone(history[::-1]))
            is_next = is_alone and uses[:1] == [users]
            is_read = is_alone and bool(uses) and len(uses[0]) > 1 and users <= uses[0]
            is_free = is_alone and not uses and self.holds and not self.is_over
            if id in has and not (is_next or is_free):
                holder = self.holder.pop(id)
                if is_read:
                    copied.add(id)
                    self.copies[id] = holder
            pays = self.right[run] > self.worth.chance * (self.right[run] + self.wrong[run])
            if id not in has and (
                (is_next and (alone([users, *uses]) >= self.worth.least or pays))
                or (is_free and pays)
                or (is_read and self.worth.passes)
            ):
                soon = next((t for t, each in enumerate(coming) if id in each), len(coming))
                wishes.append((min(users), soon, id, is_read))
            self.history[id] = history
        for rank in range(self.num_ranks):
            mine = sorted(wish for wish in wishes if wish[0] == rank)
            theirs = [id for id in idle if self.holder.get(id) == rank]
            theirs.sort(key=lambda id: (self.newest[id], id))
            has_now = [*self.holder.values(), *self.copies.values()].count(rank)
            wanted = sum(soon < len(coming) for _, soon, _, _ in mine) - (self.quota - has_now)
            for id in theirs[: max(0, wanted)]:
                self.recall(id, False)
                has_now -= 1
            for _, _, id, is_read in mine[: max(0, self.quota - has_now)]:
                (self.copies if is_read else self.holder)[id] = rank
                copied |= {id} if is_read else set()
        self.decided += 1
        back, self.back = set(self.back), []
        return has, {id for id in batch if id in self.holder}, copied, readers, back


def alone(users: Sequence[Set[int]]) -> int:
    """Uses by one and the same rank alone at the beginning."""
    if not users or len(users[0]) > 1:
        return 0
    return next((i for i, each in enumerate(users) if each != users[0]), len(users))


def forced_moves(batches: Sequence[Batch]) -> int:
    """Rows that travel where all that comes is in sight and all rows have room: one that a rank alone uses twice in a
    row stays; who used it alone has it at the next use, whoever shares that; each other use reads it once. Each rank
    writes what others need: its row when it used it alone, its gradient when it did not. What is lent at the end comes
    back."""
    moves = 0
    before: dict[int, Set[int]] = {}
    for batch in batches:
        for id, users in batch.items():
            last = before.get(id, frozenset())
            has = len(last) == 1 and last <= users
            moves += len(users) - has
            moves += len(users) * (len(users) > 1)
            moves += len(last) == 1 and last != users
            before[id] = users
    return moves + sum(len(users) == 1 for users in before.values())
