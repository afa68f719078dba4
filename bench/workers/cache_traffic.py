"""What 8 ranks with caches say to the owners of their rows, counted: rows and bytes of names, exactly, in the order of
their batches.

How it is counted. A row's values or its summed gradient are D float32. A row is named by 8 bytes and two bits (read,
write), once a step and rank, for all that is said of it in the step; a renewal says its age besides, 4 bytes, and is
answered by a bit, and by the row where somebody changed it. Owners are none of the ranks. A parameter server without
caches, ids deduplicated: every unique row of a batch is named (8 bytes), read and written.

    row_clock   the rules of src/colonnade/cache/directory.py, and of light_lfu.py. The owner notes the step of a row's
                last update
    het         HET's, as published and as its code counts: every unique row of a batch is named with its version, 16
                bytes; it is sent where more than s updates are missing; pushes name row and number of updates, 16
                bytes; an update is one of a batch
    exact       synchronous, the rule of src/colonnade/cache/sight.py and the messages of exchange/lent_wire.py, as
                they are packed: every row of a batch is named, by 8 bytes, or by a number where the rank has it;
                plain ones are read and written, of copies that are there only the gradient travels, lent rows travel
                when they are lent and when they come back
    forced      what any rule has to move: of rows that are read the names, and the rows

Legend: U unique rows of a rank's batch, N rows of all tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade import _native
from colonnade.cache.directory import HIT, LEASE_OVER, MISS, Directory
from colonnade.cache.foresight import Foreseen, Foresight
from colonnade.cache.sight import Sight, worth_of
from colonnade.exchange.lent_wire import pack_numbers, read_said, said_messages
from colonnade.exchange.loans import NONE, Loans
from colonnade.exchange.owner import listed
from colonnade.exchange.said import Said, listed_back
from workers.cache_streams import RANKS, Ids, Stream
from workers.light_lfu import LightLfu

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
LIGHT_LFU = "light_lfu"
"""HET's, which training does not have."""


def open_directory(
    policy: str, capacity: int, read: int, write: int, num_rows: int
) -> Directory | LightLfu:
    """One rank's, of copies of `num_rows` rows."""
    if policy == LIGHT_LFU:
        return LightLfu(capacity, read, write, num_rows)
    return Directory(capacity, read, write, policy)


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
        self.told = [
            foreseen([batches[rank] for batches in stream.batches], policy.window or 1)
            for rank in range(RANKS)
        ]
        self.ranks = [
            open_directory(policy.name, capacity, read, write, stream.num_rows)
            for _ in range(RANKS)
        ]

    def step(self, step: int, rank: int):
        ids, directory = self.stream.batches[step][rank], self.ranks[rank]
        if isinstance(directory, LightLfu) or self.policy.name != "lookahead":
            return directory.step(ids)
        if self.policy.window is None:
            return directory.step(ids, self.next_uses[step][rank])
        said = next(self.told[rank])
        return directory.step(ids, said.next_uses, said.coming, self.policy.window)


def foreseen(batches: Iterable[Ids], window: int) -> Iterator[Foreseen]:
    """What training knows of each of one rank's batches."""
    sight, waiting = Foresight(window), 0
    for ids in batches:
        sight.see(ids)
        waiting += 1
        if waiting > window:
            yield sight.next()
            waiting -= 1
    for _ in range(waiting):
        yield sight.next()


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


def forced(stream: Stream) -> Traffic:
    """What synchronous semantics force, whatever the caches: a row used by one rank and next by the same alone moves
    nowhere; one that others use next is written once and read by each; used by k ranks at once, k gradients are written
    and next time all read. What is read is named; nobody has to ask for what is to be written."""
    users = np.zeros(stream.num_rows, np.uint8)  # of the last step that used it, a bit each
    is_held = np.zeros(stream.num_rows, bool)  # its last user alone has its newest values
    found = Traffic()
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        ids, now = _users(batches)
        before, many = users[ids], _counts(now)
        is_alone, is_shared = _counts(before) == 1, many > 1
        # The last to use it alone has the newest, and need not read it.
        has_newest = is_alone & ((now & before) > 0)
        read = int(many.sum() - has_newest.sum())
        rows = read + int(many[is_shared].sum())
        # What one holds is written once, some day: counted when it begins.
        rows += int((~is_shared & ~(is_held[ids] & has_newest)).sum())
        users[ids], is_held[ids] = now, ~is_shared
        if step >= stream.shape.warm:
            found.rows += rows
            found.named += read * NAME
            found.uses += sum(map(len, batches))
    return found


def exact(stream: Stream, window: int, capacity: int, dim: int) -> Traffic:
    """The rule of training (`cache.sight`) and its words (`exchange.lent_wire`), SGD, one owner; capacity: rows that
    each rank may have; dim: of rows, for what lending is worth follows from their bytes."""
    row = 4 * dim
    worth = worth_of(row, row, 2 * row)
    sight = Sight(RANKS, [capacity], [worth], holds=window > 0)
    lent, had = Loans(RANKS, [None]), [Loans(1, [None]) for _ in range(RANKS)]
    found, seen = Traffic(), deque[tuple[NDArray[np.int32], float]]()
    coming = iter(stream.batches)
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        for next_batches in islice(coming, window + 1 - len(seen)):
            plan = _plan(next_batches)
            sight.see(_named(next_batches), plan)
            named = sum(map(_request_bytes, had, next_batches))
            seen.append((np.asarray(plan.inverse), named))
        (rows, named), done = seen.popleft(), sight.decide()
        asked, counts = np.concatenate(batches), _named(batches)
        stays = done.keeps | done.copied
        reads = done.reader[rows] == np.repeat(np.arange(RANKS), counts[:, 0])
        said = Said(counts, done.has[rows] | reads, stays[rows], done.copied[rows] | reads)
        back = listed_back(done.holders, done.tables, done.recalled, done.recopied, (RANKS, 1))
        words = said_messages(said, back, lent.numbers(back.tables, back.ids.numpy()))
        lent.decide(said, asked, back)
        for end, message, mine in zip(had, words, batches, strict=True):
            numbers = end.numbers(np.zeros(len(mine), np.int64), mine)
            heard = read_said([message], np.array([[len(mine)]]), numbers, end)
            end.decide(heard[0], mine, heard[1])
        if step >= stream.shape.warm:
            # A row that is lent comes back once: counted when it leaves, as in `forced`.
            found.rows += int(2 * said.plain.sum() + said.read.sum() + 2 * said.borrowed.sum())
            found.named += named + sum(map(len, words))
            found.uses += len(asked)
    return found


def _request_bytes(had: Loans, ids: NDArray[np.int64]) -> float:
    """Of one rank's batch: of its rows, numbers of those that it has by the newest decision, names of the others."""
    numbers = had.numbers(np.zeros(len(ids), np.int64), ids)
    [named] = pack_numbers(numbers, np.array([len(ids)]))
    return len(named) + int((numbers == NONE).sum()) * NAME


def _named(batches: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(ranks, 1): of the one table."""
    return np.array([[len(each)] for each in batches])


def _plan(batches: Sequence[NDArray[np.int64]]) -> _native.Plan:
    """Of what all ranks name, rank by rank."""
    asked, one = torch.from_numpy(np.concatenate(batches)), torch.ones(1, dtype=torch.int64)
    return _native.make_plan(listed(asked, _named(batches)), 0 * one, one)


def _users(batches: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """By rank -> (rows of all, ascending; who uses each, a bit for each rank)."""
    ids = np.unique(np.concatenate(batches))
    masks = np.zeros(len(ids), np.uint8)
    for rank, mine in enumerate(batches):
        masks[np.searchsorted(ids, mine)] |= np.uint8(1 << rank)
    return ids, masks


def _counts(masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return BITS[masks]


BITS = np.array([bin(mask).count("1") for mask in range(256)], np.uint8)
