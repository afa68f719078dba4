"""Traffic of 8 ranks with caches to the owners of their rows, counted: rows and bytes of names, exactly, in the order
of their batches.

How it is counted. A row's values or its summed gradient are D float32. A row is named by 8 bytes and two bits (read,
write), once a step and rank, for all that is said of it in the step; a renewal says its age besides, 4 bytes, and is
answered by a bit, and by the row where somebody changed it. Owners are none of the ranks. A parameter server without
caches, ids deduplicated: every unique row of a batch is named (8 bytes), read and written.

    row_clock   the rules of src/colonnade/cache/directory.py, and of light_lfu.py. The owner notes the step of a row's
                last update
    het         HET's, as published and as its code counts: every unique row of a batch is named with its version, 16
                bytes; it is sent where more than s updates are missing; pushes name row and number of updates, 16
                bytes; an update is one of a batch

Legend: U unique rows of a rank's batch, N rows of all tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.cache.directory import EXPIRED, HIT, MISS, Directory
from colonnade.cache.next_use import NextUseWindow, RowNextUses
from colonnade.plan.measure.popularity import estimate_from_spectrum, predict_cache_load
from colonnade.staleness import RowClock, TableCache
from colonnade.staleness import row_clock as row_clock_of
from workers.cache_streams import RANKS, Ids, Stream
from workers.light_lfu import LightLfu

NAME, FLAGS, AGE, BIT = 8.0, 0.25, 4.0, 0.125
VERSIONED = 16.0
NextUses = list[list[NDArray[np.int32]]]


@dataclass
class Traffic:
    """Traffic of all ranks in the measured steps."""

    rows: int = 0  # travelled, either way
    name_bytes: float = 0.0  # bytes of all else
    uses: int = 0  # rows of batches
    hits: int = 0  # of these, those about which nothing was asked

    def payload(self, dim: int) -> float:
        """Return the bytes of all ranks in the measured steps."""
        return self.name_bytes + self.rows * 4.0 * dim

    def saved(self, dim: int) -> float:
        """Return the saved part of the bytes of a parameter server without caches: 0 nothing, 1 all."""
        return 1 - self.payload(dim) / (self.uses * (NAME + 8.0 * dim))


def predict_payload(
    stream: Stream, policy: Policy, capacity: int, staleness: int, dim: int
) -> float:
    """Predict the payload of `row_clock`, as `colonnade plan` does from counts of lookups."""
    shape = stream.shape
    counts, rows = np.unique(stream.counts[stream.counts > 0], return_counts=True)
    popularity = estimate_from_spectrum(counts.astype(float), rows.astype(float), stream.num_rows)
    clock = row_clock_of(staleness)
    cache = TableCache(capacity, clock, policy.name, policy.window or 0)
    batches = (shape.warm, shape.warm + shape.measured)
    unique = popularity.unique(shape.lookups)
    load = predict_cache_load(popularity, shape.lookups, unique, cache, RANKS, batches, 4 * dim)
    names = load.listed * (NAME + FLAGS) + load.renewed * (AGE + BIT)
    step = names + (load.fetched + load.pushed) * 4.0 * dim
    return step * RANKS * shape.measured


@dataclass(frozen=True)
class Policy:
    """Eviction policy. window: batches that `lookahead` sees ahead; None: all that come."""

    name: str
    window: int | None = None

    def __str__(self) -> str:
        if self.name != "lookahead":
            return self.name
        return "optimum" if self.window is None else f"lookahead {self.window}"


OPTIMUM = Policy("lookahead")
"""Belady's: whoever is used again last leaves, and rows that are used later than all that are here stay out."""
LIGHT_LFU = "light_lfu"
"""Eviction policy of HET, which training does not have."""


def open_directory(
    policy: str, capacity: int, read: int, write: int, num_rows: int
) -> Directory | LightLfu:
    """Open the directory of one rank's cache over a table of `num_rows` rows."""
    if policy == LIGHT_LFU:
        return LightLfu(capacity, read, write, num_rows)
    return Directory(capacity, RowClock(read, write), policy)


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
        self.hints = [
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
            return directory.decide_batch(ids)
        if self.policy.window is None:
            return directory.decide_batch(ids, self.next_uses[step][rank])
        text = next(self.hints[rank])
        return directory.decide_batch(ids, text.next_uses, text.coming, self.policy.window)


def foreseen(batches: Iterable[Ids], window: int) -> Iterator[RowNextUses]:
    """Return what training knows in advance of each of one rank's batches."""
    sight, waiting = NextUseWindow(window), 0
    for ids in batches:
        sight.add_batch_rows(ids)
        waiting += 1
        if waiting > window:
            yield sight.pop_next_uses()
            waiting -= 1
    for _ in range(waiting):
        yield sight.pop_next_uses()


def row_clock(
    stream: Stream, next_uses: NextUses, policy: Policy, capacity: int, staleness: int
) -> Traffic:
    """Copies of `staleness` // 2 batches are used unasked, the rest is the bound of writes."""
    clock = row_clock_of(staleness)
    caches = Caches(stream, next_uses, policy, capacity, clock.read_bound, clock.write_bound)
    changed = np.full(stream.num_rows, -1, np.int32)  # the step of a row's last update
    result = Traffic()
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        lines = [caches.step(step, rank) for rank in range(RANKS)]
        if step >= stream.shape.warm:
            for ids, item in zip(batches, lines, strict=True):
                is_over = item.outcomes == EXPIRED
                is_new = changed[ids[is_over]] >= step - item.ages[is_over]
                num_missing, num_over = int((item.outcomes == MISS).sum()), len(is_new)
                num_named = int(((item.outcomes != HIT) | item.pushed).sum()) + len(
                    item.evicted_ids
                )
                result.rows += num_missing + int(is_new.sum())
                result.rows += int(item.pushed.sum()) + len(item.evicted_ids)
                result.name_bytes += num_named * (NAME + FLAGS) + num_over * (AGE + BIT)
                result.uses += len(ids)
                result.hits += int((item.outcomes == HIT).sum())
        for ids, item in zip(batches, lines, strict=True):
            changed[ids[item.pushed]] = changed[item.evicted_ids] = step
    return result


def het(stream: Stream, policy: Policy, capacity: int, staleness: int) -> Traffic:
    """Every copy is asked about in every batch: a read bound of 0. Ranks read and push one after the other."""
    caches = Caches(stream, [], policy, capacity, 0, staleness)
    versions = np.zeros(stream.num_rows, np.int64)
    observed = np.zeros((RANKS, stream.num_rows), np.int64)
    result = Traffic()
    for step, batches in enumerate(stream.batches[: stream.shape.warm + stream.shape.measured]):
        for rank, ids in enumerate(batches):
            item = caches.step(step, rank)
            is_sent = (item.outcomes == MISS) | (versions[ids] - observed[rank, ids] > staleness)
            observed[rank, ids[is_sent]] = versions[ids[is_sent]]
            pushed = ids[item.pushed]
            for subset, ticks in (
                (pushed, item.ticks[item.pushed]),
                (item.evicted_ids, item.evicted_ticks),
            ):
                versions[subset] += ticks
                observed[rank, subset] += ticks
            if step >= stream.shape.warm:
                num_pushed = len(pushed) + len(item.evicted_ids)
                result.rows += int(is_sent.sum()) + num_pushed
                result.name_bytes += len(ids) * VERSIONED + num_pushed * VERSIONED
                result.uses += len(ids)
                result.hits += int((~is_sent).sum())
    return result
