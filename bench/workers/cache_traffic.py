"""What 8 ranks with caches say to the owners of their rows, counted: rows and bytes of names, exactly, in the order of
their batches.

How it is counted. A row's values or its summed gradient are D float32. A row is named by 8 bytes and two bits (read,
write), once a step and rank, for all that is said of it in the step; a renewal says its age besides, 4 bytes, and is
answered by a bit, and by the row where somebody changed it. Owners are none of the ranks. A parameter server without
caches, ids deduplicated: every unique row of a batch is named (8 bytes), read and written.

    row_clock   the rules of src/colonnade/cache/directory.py. The owner notes the step of a row's last update
    het         HET's, as published and as its code counts: every unique row of a batch is named with its version, 16
                bytes; it is sent where more than s updates are missing; pushes name row and number of updates, 16
                bytes; an update is one of a batch
    exact       synchronous. A row that one rank alone used last stays there, unsaid, until another's use comes into
                the window; then its owner asks for it (8 bytes; or a bit, if that use was in sight when the row was
                sent) and it travels. Rows used by several ranks travel each time

Legend: U unique rows of a rank's batch, N rows of all tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.cache.directory import HIT, LEASE_OVER, MISS, UNBOUNDED, Directory
from workers.cache_streams import RANKS, Stream

NAME, FLAGS, AGE, BIT = 8.0, 0.25, 4.0, 0.125
VERSIONED = 16.0
NextUses = list[list[NDArray[np.int32]]]


@dataclass
class Traffic:
    """Of all ranks in the measured steps."""

    rows: int = 0  # travelled, either way
    named: float = 0.0  # bytes of all else
    uses: int = 0  # rows of batches
    hits: int = 0  # of these, those about which nothing was asked

    def payload(self, dim: int) -> float:
        return self.named + self.rows * 4.0 * dim

    def saved(self, dim: int) -> float:
        """Of what a parameter server without caches moves: 0 nothing, 1 all."""
        return 1 - self.payload(dim) / (self.uses * (NAME + 8.0 * dim))


@dataclass(frozen=True)
class Policy:
    """Who leaves. window: batches that `lookahead` sees ahead; None: all that come."""

    name: str
    window: int | None = None

    def __str__(self) -> str:
        if self.name != "lookahead":
            return self.name
        return "optimum" if self.window is None else f"lookahead {self.window}"


OPTIMUM = Policy("lookahead")
"""Belady's: whoever is used again last leaves, and rows that are used later than all that are here stay out."""


class Caches:
    """The directories of all ranks, which are told of coming uses as their policy says."""

    def __init__(
        self,
        stream: Stream,
        next_uses: NextUses,
        policy: Policy,
        capacity: int,
        read: int,
        write: int,
    ) -> None:
        self.stream, self.next_uses, self.policy = stream, next_uses, policy
        self.ranks = [Directory(capacity, read, write, policy.name) for _ in range(RANKS)]

    def step(self, step: int, rank: int):
        ids, directory = self.stream.batches[step][rank], self.ranks[rank]
        if self.policy.name != "lookahead":
            return directory.step(ids)
        distances, window = self.next_uses[step][rank], self.policy.window
        if window is None:
            return directory.step(ids, distances)
        last = step + window < len(self.stream.batches)
        coming = self.stream.batches[step + window][rank] if last else None
        return directory.step(ids, np.where(distances > window, 0, distances), coming, window)


def row_clock(
    stream: Stream, next_uses: NextUses, policy: Policy, capacity: int, staleness: int
) -> Traffic:
    """Copies of `staleness` // 2 batches are used unasked, the rest is the bound of writes."""
    read = staleness // 2
    caches = Caches(stream, next_uses, policy, capacity, read, staleness - read)
    changed = np.full(stream.num_rows, -1, np.int32)  # the step of a row's last update
    found = Traffic()
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        said = [caches.step(step, rank) for rank in range(RANKS)]
        if step >= stream.shape.warm:
            for ids, each in zip(batches, said, strict=True):
                is_over = each.asked == LEASE_OVER
                is_new = changed[ids[is_over]] >= step - each.ages[is_over]
                num_missing, num_over = int((each.asked == MISS).sum()), len(is_new)
                num_named = int(((each.asked != HIT) | each.pushed).sum()) + len(each.evicted_ids)
                found.rows += num_missing + int(is_new.sum())
                found.rows += int(each.pushed.sum()) + len(each.evicted_ids)
                found.named += num_named * (NAME + FLAGS) + num_over * (AGE + BIT)
                found.uses += len(ids)
                found.hits += int((each.asked == HIT).sum())
        for ids, each in zip(batches, said, strict=True):
            changed[ids[each.pushed]] = changed[each.evicted_ids] = step
    return found


def het(stream: Stream, policy: Policy, capacity: int, staleness: int) -> Traffic:
    """Every copy is asked about in every batch: a read bound of 0. Ranks read and push one after the other."""
    caches = Caches(stream, [], policy, capacity, 0, staleness)
    versions = np.zeros(stream.num_rows, np.int64)
    seen = np.zeros((RANKS, stream.num_rows), np.int64)
    found = Traffic()
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        for rank, ids in enumerate(batches):
            each = caches.step(step, rank)
            is_sent = (each.asked == MISS) | (versions[ids] - seen[rank, ids] > staleness)
            seen[rank, ids[is_sent]] = versions[ids[is_sent]]
            pushed = ids[each.pushed]
            for some, ticks in (
                (pushed, each.ticks[each.pushed]),
                (each.evicted_ids, each.evicted_ticks),
            ):
                versions[some] += ticks
                seen[rank, some] += ticks
            if step >= stream.shape.warm:
                num_pushed = len(pushed) + len(each.evicted_ids)
                found.rows += int(is_sent.sum()) + num_pushed
                found.named += len(ids) * VERSIONED + num_pushed * VERSIONED
                found.uses += len(ids)
                found.hits += int((~is_sent).sum())
    return found


def exact(stream: Stream, next_uses: NextUses, policy: Policy, capacity: int | None) -> Traffic:
    """`policy` must see ahead: its window is the rule's.

    capacity None: what synchronous semantics force, whatever the caches: a row used by one rank and next by the same
    alone moves nowhere; one that others use next is written once and read by each; used by k ranks at once, k gradients
    are written and next time all read. What is read is named; nobody has to ask for what is to be written.
    """
    window = policy.window or len(stream.batches)
    caches = (
        None
        if capacity is None
        else Caches(stream, next_uses, policy, capacity, UNBOUNDED, UNBOUNDED)
    )
    users = np.zeros(stream.num_rows, np.uint8)  # of the last step that used it, a bit each
    is_held = np.zeros(stream.num_rows, bool)  # its last user alone has its newest values
    sent = np.zeros(stream.num_rows, np.int32)  # the step of a row's last reading from its owner
    found = Traffic()
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        ids = np.unique(np.concatenate(batches))
        now = np.zeros(len(ids), np.uint8)
        is_here = np.zeros((RANKS, len(ids)), bool)
        gone = []
        for rank, mine in enumerate(batches):
            at = np.searchsorted(ids, mine)
            now[at] |= np.uint8(1 << rank)
            if caches is None:
                is_here[rank, at] = True
                continue
            said = caches.step(step, rank)
            is_here[rank, at] = said.asked != MISS
            gone.append((rank, said.evicted_ids, mine[said.leaving]))
        before, held = users[ids], is_held[ids]
        is_alone = _counts(before) == 1
        # Read by each that does not have the newest: the last to use it alone has, if it kept its copy.
        has_newest = np.zeros(len(ids), bool)
        rows, named, asked = 0, 0, 0.0
        is_read = np.zeros(len(ids), bool)
        for rank in range(RANKS):
            uses = (now >> rank & 1).astype(bool)
            has = uses & is_alone & (before >> rank & 1).astype(bool) & is_here[rank]
            has_newest |= has
            is_read |= uses & ~has
            rows += int((uses & ~has).sum())
            named += int((uses & ~has).sum())
        stays = held & has_newest & (_counts(now) == 1)
        recalled = held & ~stays
        rows += int(recalled.sum())  # what one rank held is written first
        if caches:
            in_sight = step - sent[ids[recalled]] <= window
            asked = float(np.where(in_sight, BIT, NAME).sum())
        sent[ids[is_read]] = step
        shared = _counts(now) > 1
        rows += int(_counts(now)[shared].sum())  # gradients of all that use it now
        users[ids], is_held[ids] = now, ~shared
        for rank, evicted, leaving in gone:
            # Newest values that leave with their copy. (One that leaves with its step was counted as one that stays.)
            lost = np.concatenate([evicted, leaving])
            lost = lost[is_held[lost] & (users[lost] == 1 << rank)]
            rows += len(lost)
            named += len(lost)
            is_held[lost] = False
        if step >= stream.shape.warm:
            found.rows += rows
            found.named += named * NAME + asked
            found.uses += sum(map(len, batches))
    return found


def _counts(masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return BITS[masks]


BITS = np.array([bin(mask).count("1") for mask in range(256)], np.uint8)
