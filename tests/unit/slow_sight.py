"""Who uses a row next, and who has it, one row at a time: the definition of `cache.sight.Sight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Batch = Mapping[int, int]
"""By id: the rank that alone uses it, or SHARED."""
SHARED = -1


class SlowSight:
    def __init__(self, num_ranks: int, quota: int, least: int, *, holds: bool) -> None:
        self.num_ranks, self.quota, self.least, self.holds = num_ranks, quota, max(2, least), holds
        self.is_over = False
        self.batches: list[Batch] = []
        self.decided = 0
        self.newest: dict[int, int] = {}  # of rows that are remembered: the last batch seen
        self.history: dict[int, list[int]] = {}  # of these: users of batches decided on
        self.holder: dict[int, int] = {}
        self.back: list[tuple[int, int]] = []

    @property
    def in_sight(self) -> Sequence[Batch]:
        return self.batches[self.decided :]

    def see(self, batch: Batch) -> None:
        for id, user in batch.items():
            if self.holder.get(id, user) != user and not any(id in each for each in self.in_sight):
                self.recall(id)
        self.batches.append(batch)
        self.newest |= dict.fromkeys(batch, len(self.batches))
        room = sum(map(len, self.in_sight)) + self.quota * self.num_ranks
        for id in sorted(self.newest, key=lambda id: (self.newest[id], id)):
            if len(self.newest) <= room:
                break
            del self.newest[id]
            self.history.pop(id, None)
            if id in self.holder:
                self.recall(id)

    def recall(self, id: int) -> None:
        self.back.append((id, self.holder.pop(id)))

    def decide(self) -> tuple[set[int], set[int], set[tuple[int, int]]]:
        """Ids whose user has them, those whose user has them afterwards, (id, holder) of rows that come back."""
        batch, *coming = self.in_sight
        has = {id for id in batch if id in self.holder}
        idle = [id for id in self.holder if not any(id in each for each in self.in_sight)]
        wishes = []
        for id, user in batch.items():
            uses = [each[id] for each in coming if id in each]
            history = [*self.history.get(id, []), user]
            is_next, is_free = uses[:1] == [user], not uses and self.holds and not self.is_over
            stays = user != SHARED and (is_next or is_free)
            if id in has and not stays:
                del self.holder[id]
            is_worth = runs([user, *uses]) >= self.least or runs(history[::-1]) >= self.least
            if id not in has and stays and is_worth:
                soon = next((t for t, each in enumerate(coming) if id in each), len(coming))
                wishes.append((user, soon, id))
            self.history[id] = history
        for rank in range(self.num_ranks):
            mine = sorted(wish for wish in wishes if wish[0] == rank)
            theirs = [id for id in idle if self.holder.get(id) == rank]
            theirs.sort(key=lambda id: (self.newest[id], id))
            has_now = sum(user == rank for user in self.holder.values())
            wanted = sum(soon < len(coming) for _, soon, _ in mine) - (self.quota - has_now)
            for id in theirs[: max(0, wanted)]:
                self.recall(id)
                has_now -= 1
            for _, _, id in mine[: max(0, self.quota - has_now)]:
                self.holder[id] = rank
        self.decided += 1
        back, self.back = set(self.back), []
        return has, {id for id in batch if id in self.holder}, back


def runs(users: Sequence[int]) -> int:
    """Equal ones at the beginning."""
    return next((i for i, user in enumerate(users) if user != users[0]), len(users))


def forced_moves(batches: Sequence[Batch], users: Sequence[Mapping[int, int]]) -> int:
    """Rows that travel where all that comes is in sight and all rows have room: one that a rank alone uses twice in a
    row stays; each other use of a rank reads it once and writes it once. users: by batch and id, how many."""
    moves = 0
    newest: dict[int, int] = {}
    for batch, count in zip(batches, users, strict=True):
        for id, user in batch.items():
            stays = user != SHARED and newest.get(id) == user
            moves += 0 if stays else 2 * count[id]
            newest[id] = user
    return moves
