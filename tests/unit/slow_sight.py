"""Who uses a row next, and who has it, one row at a time: the definition of `cache.sight.Sight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Batch = Mapping[int, int]
"""By id: the rank that alone uses it, or -1."""


def decisions(
    batches: Sequence[Batch], *, window: int, quota: int, least: int
) -> list[tuple[set[int], set[int]]]:
    """By batch: the ids whose user has them, and those whose user has them afterwards."""
    holder: dict[int, int] = {}
    found = []
    for t, batch in enumerate(batches):
        coming = batches[t + 1 : t + 1 + window]
        has = {id for id in batch if id in holder}
        runs = {id: uses_in_a_row(id, user, coming) for id, user in batch.items()}
        for id in has:
            if runs[id] < 2:
                del holder[id]
        for rank in sorted(set(batch.values()) - {-1}):
            lends = [
                (next_use(id, coming), id)
                for id, user in batch.items()
                if user == rank and id not in has and runs[id] >= max(2, least)
            ]
            room = quota - sum(other == rank for other in holder.values())
            for _, id in sorted(lends)[: max(0, room)]:
                holder[id] = rank
        found.append((has, {id for id in batch if id in holder}))
    return found


def uses_in_a_row(id: int, user: int, coming: Sequence[Batch]) -> int:
    """By one rank alone, this one included."""
    count = 1
    for batch in coming:
        if id in batch:
            if user == -1 or batch[id] != user:
                break
            count += 1
    return count


def next_use(id: int, coming: Sequence[Batch]) -> int:
    return next(t for t, batch in enumerate(coming) if id in batch)


def forced_moves(batches: Sequence[Batch], users: Sequence[Mapping[int, int]]) -> int:
    """Rows that travel where all that comes is in sight and all rows have room: one that a rank alone uses twice in a
    row stays; each other use of a rank reads it once and writes it once. users: by batch and id, how many."""
    moves = 0
    newest: dict[int, int] = {}
    for batch, count in zip(batches, users, strict=True):
        for id, user in batch.items():
            stays = user != -1 and newest.get(id) == user
            moves += 0 if stays else 2 * count[id]
            newest[id] = user
    return moves
