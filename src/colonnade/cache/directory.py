"""Directory of cached rows: decides from the order of batches alone which rows of a table a rank caches, when it
requests them from their owners, and when it sends pending gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

import numpy as np

from colonnade import _native
from colonnade.config.plan import CachePolicy
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.staleness import RowClock

MAX_VERSIONS = 2**22
"""Largest number of versions of a table, 4 bytes each."""
MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class OverwrittenVersions:
    """Versions that `VersionLog.record_row_changes` overwrote, with their indices."""

    indices: np.ndarray  # (n,) int64
    before: np.ndarray  # (n,) int32


class VersionLog:
    """Version of each of this rank's rows: the number of the batch that last changed it.

    Tables of up to MAX_VERSIONS rows have a version for each row. In others, rows with one hash share a version: an
    unchanged row may count as changed, but a changed row never as unchanged.
    """

    def __init__(self, rows: Sequence[int | None]) -> None:
        """Begin with versions of 0. rows: of each whole table; None: an open table."""
        bits = [
            max(
                1,
                int(
                    (MAX_VERSIONS if num_rows is None else min(num_rows, MAX_VERSIONS)) - 1
                ).bit_length(),
            )
            for num_rows in rows
        ]
        self._shifts = np.array([64 - num_bits for num_bits in bits], np.uint64)
        self._is_hashed = np.array(
            [num_rows is None or num_rows > MAX_VERSIONS for num_rows in rows]
        )
        self._firsts = np.cumsum([0, *(1 << num_bits for num_bits in bits)])
        self._newest = np.zeros(self._firsts[-1], np.int32)

    def table_versions(self, table_index: int) -> np.ndarray:
        """Return a view of the versions of a table, int32."""
        return self._newest[self._firsts[table_index] : self._firsts[table_index + 1]]

    def copy_versions_before(
        self, overwritten_versions: Iterable[OverwrittenVersions]
    ) -> list[np.ndarray]:
        """Return a copy of the versions by table as they were before the changes `overwritten_versions`, listed newest
        first."""
        newest = self._newest.copy()
        for overwritten in overwritten_versions:
            newest[overwritten.indices] = overwritten.before
        return np.split(newest, self._firsts[1:-1])

    def record_row_changes(
        self, table_indices: np.ndarray | int, row_ids: np.ndarray, batch_number: int
    ) -> OverwrittenVersions:
        """Record that batch `batch_number` changes these rows (n,) of tables (n,), or of one table. Return what
        `undo_row_changes` needs."""
        indices = self._version_indices(table_indices, row_ids)
        overwritten_versions = OverwrittenVersions(indices, self._newest[indices])
        self._newest[indices] = batch_number
        return overwritten_versions

    def undo_row_changes(self, overwritten_versions: OverwrittenVersions) -> None:
        """Undo the newest `record_row_changes`, which returned `overwritten_versions`."""
        self._newest[overwritten_versions.indices] = overwritten_versions.before

    def has_changed_since(
        self, tables: np.ndarray | int, ids: np.ndarray, read_batches: np.ndarray
    ) -> np.ndarray:
        """Return which rows may have changed in batch read_batches[i] or later, (n,) bool. A copy read for batch
        read_batches[i] does not have that batch's updates."""
        newest = self._newest[self._version_indices(tables, ids)]
        return np.asarray(newest >= read_batches)

    def renumber(self, shift: int) -> None:
        """Subtract `shift` from all versions; smaller ones become 0."""
        self._newest = np.maximum(self._newest - shift, 0)

    def _version_indices(self, tables: np.ndarray | int, ids: np.ndarray) -> np.ndarray:
        hashes = (ids.astype(np.uint64) * MIX >> self._shifts[tables]).astype(np.int64)
        return np.asarray(np.where(self._is_hashed[tables], hashes, ids) + self._firsts[tables])


HIT = 0
MISS = 1
EXPIRED = 2
"""Values of `Decision.outcomes`: the copy is used without a request, there is none, or its time-to-live is over."""
POLICIES: tuple[CachePolicy, ...] = get_args(CachePolicy)
UNBOUNDED = 2**31 - 2
"""Bound that no count exceeds."""
MAX_FIRST_BATCH = 2**27
"""Batch number of the 2**28 that a directory counts, from which on a continued run begins with a lower one."""
SHIFT_UNIT = 2**20
"""Numbers are lowered by a multiple of this, so that decisions, which depend on a number's last bits, stay the same."""
KNOWN_USE = 2**31
"""Smallest eviction score of policy `lookahead` that encodes a known next use; earlier uses have higher scores."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about the copies for one batch: U rows of the batch, in its order; E other rows, which are evicted."""

    number: int  # of the batch: 1, 2, ..; one more with every `decide_batch`
    slots: np.ndarray  # (U,) int32, all different
    outcomes: np.ndarray
    """HIT (no request), MISS or EXPIRED (the owner gets a request before the step), (U,) uint8."""
    ages: np.ndarray  # (U,) int32: batches since the copy was read or renewed; 0 for a miss
    ticks: np.ndarray
    """Number of batches with pending gradients, this one included, (U,) int32."""
    pushed: np.ndarray  # (U,) bool: pending gradients are sent to the owner with this step
    leaving: np.ndarray
    """True if the copy leaves with the step; its slot is free for the next batch, (U,) bool."""
    evicted_ids: np.ndarray
    """Rows not of this batch that leave with its step and have pending gradients, (E,) int64, ascending."""
    evicted_slots: np.ndarray
    """Their slots. Their gradients are sent with this step; then the slots are free, (E,) int32."""
    evicted_ticks: np.ndarray  # (E,) int32
    journal: object = None  # private to the directory, for `undo_decision`


ROW_FIELDS = tuple(field.name for field in fields(Decision))[1:-1]


def join_decisions(decisions: Sequence[Decision]) -> Decision:
    """Join the decisions of several tables about one batch: all rows, table by table. The result cannot be undone."""
    arrays = (
        np.concatenate([getattr(decision, name) for decision in decisions]) for name in ROW_FIELDS
    )
    return Decision(decisions[0].number, *arrays)


@dataclass
class CacheCounts:
    """Counts of rows of training's batches since the run was opened, each row once a batch. Pushes are counted on the
    rank that sends them, and so are whole rows."""

    hits: int = 0  # used without a request
    misses: int = 0
    lease_over: int = 0
    renewed: int = (
        0  # part of `lease_over`: copies that had not changed at the owner, which sent a bit
    )
    pushed_full: int = 0  # because more batches were pending than the write rule allows
    pushed_leaving: int = 0  # because the copy is dropped with the batch that used it
    pushed_evicted: int = 0  # because the copy was evicted
    ticks: int = 0  # batches with gradients in all that was pushed

    def add_decision(self, joined_decision: Decision, sign: int = 1) -> None:
        """Add the counts of a decision of all tables, `join_decisions`. sign -1: subtract them, to undo it."""
        num_by_outcome = np.bincount(joined_decision.outcomes, minlength=3) * sign
        self.hits += int(num_by_outcome[HIT])
        self.misses += int(num_by_outcome[MISS])
        self.lease_over += int(num_by_outcome[EXPIRED])
        leaving = int((joined_decision.pushed & joined_decision.leaving).sum()) * sign
        self.pushed_leaving += leaving
        self.pushed_full += int(joined_decision.pushed.sum()) * sign - leaving
        self.pushed_evicted += len(joined_decision.evicted_ids) * sign
        ticks = int(joined_decision.ticks[joined_decision.pushed].sum()) + int(
            joined_decision.evicted_ticks.sum()
        )
        self.ticks += ticks * sign


AGES = 32
"""Number of bins of counts of rows by age of the copy that was read: 0 batches, 1, 2 to 3, 4 to 7, and so on."""


def count_rows_by_age(decisions: Sequence[Decision]) -> np.ndarray:
    """Count a batch's rows by age: batches since they were last requested from their owner, 0 with this one. (AGES,)
    int64.

    A read misses at most that many batches of every other rank, and the batches whose gradients were pending there at
    the request: at most `write_bound`."""
    ages = [np.where(decision.outcomes == HIT, decision.ages, 0) for decision in decisions]
    return np.bincount(np.frexp(np.concatenate(ages))[1], minlength=AGES)


@dataclass(frozen=True, slots=True)
class FlushedRows:
    """Rows with pending gradients, which are all sent now."""

    ids: np.ndarray  # (n,) int64 ascending
    slots: np.ndarray  # (n,) int32
    ticks: np.ndarray  # (n,) int32


@dataclass(frozen=True, slots=True)
class StepJournal:
    """Record of one step, to undo it and to repeat it."""

    arguments: tuple[np.ndarray, np.ndarray | None, np.ndarray | None, int]  # of the native step
    done: _native.DirectoryStep


class Directory:
    """Map from ids to slots, with the batch that read each copy and the number of batches of pending gradients
    ("ticks").

    `decide_batch` is called once per batch, in the order of training, any number of batches ahead: its decision is a
    pure
    function of the sequence of batches. Values are stored elsewhere and follow in the same order. Before batch n's step
    the rows that are not hits are read into their slots; then the batch's gradients are added to the pending ones; then
    all of `pushed` and of `evicted_slots` are sent, after which nothing is pending there.

    * A copy read (or renewed: requested and found unchanged) at batch n is used without a request in batches up to
      n + read_bound, so it misses at most read_bound pushes of each other rank. A later batch requests it.
    * A row's pending gradients are sent as soon as they are of more batches than the clock's write rule allows
      (`RowClock`), or when the row leaves. Sending them changes neither the copy nor its age. The rule compares with
      the number of batches that used the row since it got its copy. It is stored in one byte, up to 507,904: exactly
      below 32, then with five significant bits, rounded up or down by a hash of id and batch number, so that the mean
      of its errors is zero. A batch's uses are added when they are sent. The distance of a row's last two uses, which
      `step_bound` compares with, is known modulo 256.
    * At most `capacity` copies outlast a step. Of all copies, those of the batch included, the ones with the lowest
      scores leave; of equal scores the one with the smallest id. So a row with a lower score than all others is used
      once, leaves with its step, and evicts no other row. Score, by policy:

        lru        the last batch that used the row
        lfu        number of uses. A count halves while as many rows are used as the cache holds, so that popular rows
                   of the past make room for those of today. Rows not used while counts halved two million times may
                   have equal scores
        lookahead  the next use, from `next_uses` and `coming`, sooner is higher; rows without a known one have lower
                   scores, by the last batch that used them. A predicted use that did not occur is forgotten within 64
                   batches

    * A slot that is free after batch n is assigned to another row by batch n + 1 at the earliest, which is read after
      batch n was pushed. Slots are numbered from 0 and the lowest free one is taken, so there are never more than
      capacity + the largest number of rows of a batch (`num_slots`: of all so far).

    State is in flat, native arrays: at most 30 bytes per slot (`num_bytes`) from some ten thousand slots on, at any
    time. Ids are any 64 bits. No row has more than 2**20 - 2 ticks, whatever the bound. A directory counts 2**28
    batches, then raises ColonnadeError; see `shift_batch_numbers`. Calls release the interpreter's lock. One thread at
    a time: the owner of this object locks.
    """

    def __init__(self, capacity: int, clock: RowClock, policy: str = "lru") -> None:
        """Begin without copies. capacity: rows, 0 or more, below 2**32. clock: bounds of at most UNBOUNDED. Raises
        ConfigError."""
        if not isinstance(capacity, int | np.integer) or capacity < 0:
            raise ConfigError(
                f"cache: got a capacity of {capacity} rows, wanted a whole number, 0 or more"
            )
        if policy not in POLICIES:
            raise ConfigError(
                f"cache: got policy {policy!r}, wanted {', '.join(POLICIES[:-1])} or {POLICIES[-1]}"
            )
        self.clock = clock
        self.policy = policy
        self._native = _native.Directory(capacity, _native_clock(clock), policy)

    def __len__(self) -> int:
        """Return the number of rows with a copy."""
        return len(self._native)

    @property
    def capacity(self) -> int:
        return self._native.capacity

    @property
    def number(self) -> int:
        """Number of batches so far."""
        return self._native.number

    @property
    def num_slots(self) -> int:
        return self._native.num_slots

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the directory's own state."""
        return self._native.bytes

    def decide_batch(
        self,
        batch_row_ids: np.ndarray,
        next_use_batches: np.ndarray | None = None,
        entering_ids: np.ndarray | None = None,
        window_batches: int = 0,
    ) -> Decision:
        """Decide about the next batch. batch_row_ids: its rows, (U,) int64, ascending, each once.

        For policy lookahead: next_use_batches (U,) int32, batches from this one to the next use of each row, 0 if
        unknown; coming, rows of the batch `window_batches` after this one, ascending, which is new in the window.
        """
        arguments = (
            np.ascontiguousarray(batch_row_ids),
            next_use_batches,
            entering_ids,
            window_batches,
        )
        try:
            done = self._native.step(*arguments)
        except OverflowError:
            raise ColonnadeError(
                f"plan.cache: got more than {self.number:,} batches, wanted at most that many, counted from the run's "
                "last start; start it again: it continues from its newest checkpoint, with a lower count"
            ) from None
        return Decision(
            done.number,
            done.slots,
            done.outcomes,
            done.ages,
            done.ticks,
            done.pushed,
            done.leaving,
            done.evicted_ids,
            done.evicted_slots,
            done.evicted_ticks,
            StepJournal(arguments, done),
        )

    def undo_decision(self, decision: Decision) -> None:
        """Undo the newest step, which returned `decision`."""
        if decision.number != self.number:
            raise RuntimeError(
                f"got the decision of batch {decision.number} to undo, wanted the newest: {self.number}"
            )
        assert isinstance(decision.journal, StepJournal)
        self._native.undo(decision.journal.arguments[0], decision.journal.done)

    def flush(self, above: int = 0) -> FlushedRows:
        """Send the pending gradients of rows with more than `above` batches of them. Copies and their ages do not
        change. No step may be undone afterwards."""
        ids, slots, _, ticks, *_ = (part.numpy() for part in self._native.flush(above))
        return FlushedRows(ids, slots, ticks)

    def set_clock(self, clock: RowClock) -> None:
        """Set bounds and write rule from the next step on. Pending gradients of more than the new write bound's batches
        must have been flushed on every rank. No step may be undone afterwards. Raises ConfigError.

        If the write bound becomes lower, each copy counts as read that many batches earlier, because that many more
        batches may have been pending on other ranks when it was read. So from now on no read misses more than the sum
        of the two bounds.
        """
        self._native.set_clock(_native_clock(clock))
        self.clock = clock

    def export_state(self, undone_decisions: Sequence[Decision] = ()) -> dict[str, np.ndarray]:
        """Return the whole state by row, ascending by id, for `load_state`.

        undone_decisions: decisions of the newest steps, oldest first, which the state does not include. They are
        undone and then repeated, with the same results, because capacity and bounds have not changed since.
        """
        undone: list[StepJournal] = []
        try:
            for decision in reversed(undone_decisions):
                self.undo_decision(decision)
                assert isinstance(decision.journal, StepJournal)
                undone.append(decision.journal)
            return self._export_row_arrays()
        finally:
            for journal in reversed(undone):
                self._native.step(*journal.arguments)

    def _export_row_arrays(self) -> dict[str, np.ndarray]:
        ids, slots, copied, ticks, uses, stamps, score = (
            part.numpy() for part in self._native.rows()
        )
        return {
            "number": np.array([self.number], np.int64),
            "time": np.array([self._native.time], np.int64),
            "bounds": np.array([self.clock.read_bound, self.clock.write_bound], np.int64),
            "ids": ids,
            "slots": slots,
            "copied": copied.astype(np.int64),
            "ticks": ticks,
            "uses": uses.astype(np.uint8),
            "stamps": stamps.astype(np.uint8),
            "score": score.view(np.uint32).astype(np.int64),
        }

    def without_rows(self) -> Directory:
        """Return a directory that continues this one's count of batches, without rows."""
        empty = Directory(self.capacity, self.clock, self.policy)
        scalars = ("number", "time", "bounds")
        state = self.export_state()
        empty.load_state({name: state[name][: len(scalars) * (name in scalars)] for name in state})
        return empty

    def load_state(self, directory_state: dict[str, np.ndarray]) -> None:
        """Load a state, its bounds included, into an empty directory, which keeps its own capacity.

        The next step evicts rows beyond the capacity and sends their pending gradients. Slots do not change. Rows of an
        older state, without `uses` and `stamps`, count as never used. Raises ValueError for rows that no directory has.
        """
        read_bound, write_bound = directory_state["bounds"].tolist()
        ids = directory_state["ids"]
        none = np.zeros(len(ids), np.uint8)
        uses = directory_state.get("uses", none)
        stamps = directory_state.get("stamps", none)
        if not len(self):
            self.set_clock(replace(self.clock, read_bound=read_bound, write_bound=write_bound))
        self._native.load(
            ids,
            directory_state["slots"],
            directory_state["copied"].astype(np.int32),
            directory_state["ticks"],
            uses.astype(np.int32),
            stamps.astype(np.int32),
            directory_state["score"].astype(np.uint32).view(np.int32),
            int(directory_state["number"][0]),
            int(directory_state["time"][0]),
        )


def surplus_batches(number: int) -> int:
    """Return the number of batches to subtract from the count of a run that continues at batch `number`."""
    return max(0, number - MAX_FIRST_BATCH) // SHIFT_UNIT * SHIFT_UNIT


def shift_batch_numbers(
    directory_state: dict[str, np.ndarray], eviction_policy: str, num_batches: int
) -> dict[str, np.ndarray]:
    """Return a directory's state as if it had begun `num_batches` batches later, a multiple of SHIFT_UNIT. Its
    decisions are the same, because they depend on differences only. Copies from before count as read and used at the
    new beginning."""
    copied = np.maximum(directory_state["copied"] - num_batches, 0)
    score = directory_state["score"]
    if eviction_policy in ("lru", "lookahead"):
        is_known = (score >= KNOWN_USE) & (eviction_policy == "lookahead")
        later = np.minimum(score + num_batches, 2 * KNOWN_USE - 1)
        score = np.where(is_known, later, np.maximum(score - num_batches, 1))
    return {
        **directory_state,
        "number": directory_state["number"] - num_batches,
        "copied": copied,
        "score": score,
    }


def _native_clock(clock: RowClock) -> _native.DirectoryClock:
    """Return the clock of a native directory. Raises ConfigError for a bound above UNBOUNDED."""
    if max(clock.read_bound, clock.write_bound) > UNBOUNDED:
        raise ConfigError(f"cache: got {clock}, wanted bounds of at most {UNBOUNDED:,} batches")
    return _native.DirectoryClock(
        clock.read_bound, clock.write_bound, clock.write_share, clock.step_bound or 0
    )
