"""Directory of cached rows: which rows of a table a rank has copies of, and when it speaks of them to owners, by the
order of batches alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from colonnade import _native
from colonnade.errors import ColonnadeError, ConfigError

MOST = 2**22
"""Numbers that are kept of a table, 4 bytes each."""
MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Marked:
    """Numbers that `mark` wrote over: their places, and what they were."""

    places: np.ndarray  # (n,) int64
    before: np.ndarray  # (n,) int32


class Changes:
    """Numbers of the batches that last changed this rank's rows.

    Rows of a table may share a number, the newest of theirs: a row that has not changed may count as changed, and never
    the other way.
    """

    def __init__(self, rows: Sequence[int | None]) -> None:
        """rows: of each whole table; None: open."""
        bits = [
            max(1, int((MOST if of is None else min(of, MOST)) - 1).bit_length()) for of in rows
        ]
        self._shifts = np.array([64 - each for each in bits], np.uint64)
        self._firsts = np.cumsum([0, *(1 << each for each in bits)])
        self._newest = np.zeros(self._firsts[-1], np.int32)

    def of(self, t: int) -> np.ndarray:
        """Return a view of table t's numbers, int32."""
        return self._newest[self._firsts[t] : self._firsts[t + 1]]

    def without(self, marked: Iterable[Marked]) -> list[np.ndarray]:
        """Return a copy of the numbers by table as they were before `marked`, which is listed newest first."""
        newest = self._newest.copy()
        for each in marked:
            newest[each.places] = each.before
        return np.split(newest, self._firsts[1:-1])

    def mark(self, tables: np.ndarray | int, ids: np.ndarray, number: int) -> Marked:
        """Batch `number` changes these rows (n,) of tables (n,), or of one. For `undo`."""
        places = self._places(tables, ids)
        marked = Marked(places, self._newest[places])
        self._newest[places] = number
        return marked

    def undo(self, marked: Marked) -> None:
        """As if the newest `mark`, which gave this, had not been."""
        self._newest[marked.places] = marked.before

    def since(self, tables: np.ndarray | int, ids: np.ndarray, read: np.ndarray) -> np.ndarray:
        """(n,) bool: may have changed in batch read[i], before whose updates the copy was read, or later."""
        return self._newest[self._places(tables, ids)] >= read

    def renumber(self, shift: int) -> None:
        """As if batches had been counted from `shift` on; those of before are all the first."""
        self._newest = np.maximum(self._newest - shift, 0)

    def _places(self, tables: np.ndarray | int, ids: np.ndarray) -> np.ndarray:
        mixed = ids.astype(np.uint64) * MIX >> self._shifts[tables]
        return mixed.astype(np.int64) + self._firsts[tables]


HIT, MISS, LEASE_OVER = 0, 1, 2
"""Of `Decision.asked`."""
POLICIES = ("lru", "lfu", "lookahead")
UNBOUNDED = 2**31 - 2
"""A bound that nothing passes."""
RENUMBERED = 2**27
"""Batches that a run which goes on has behind it at most, or 63 more, of the 2**28 that a directory counts."""
TURN = 64  # batches after which uses that were foretold and did not come are forgotten
KNOWN = 2**31
"""Of `lookahead`: from here on a worth says when the next use is, the sooner the more."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What one batch means for the copies. U rows of the batch, in its order; E others."""

    number: int  # of the batch: 1, 2, ..; one more with every `step`
    slots: np.ndarray  # (U,) int32, each its own
    asked: (
        np.ndarray
    )  # (U,) uint8: HIT (nothing is said), MISS or LEASE_OVER (before the step the owner is asked)
    ages: np.ndarray  # (U,) int32: batches since the copy was read or renewed; 0 of a miss
    ticks: (
        np.ndarray
    )  # (U,) int32: batches whose gradients are pending when this one's are added, it included
    pushed: np.ndarray  # (U,) bool: what is pending goes to the owner with this step
    leaving: (
        np.ndarray
    )  # (U,) bool: the copy leaves with the step. Its slot is free for the next batch
    evicted_ids: (
        np.ndarray
    )  # (E,) int64, ascending: not of this batch, leave with its step and have something pending
    evicted_slots: (
        np.ndarray
    )  # (E,) int32. What is pending there goes with this step; then they are free
    evicted_ticks: np.ndarray  # (E,) int32
    journal: object = None  # the directory's own: what `undo` needs


OF_ROWS = tuple(field.name for field in fields(Decision))[1:-1]


def joined(decisions: Sequence[Decision]) -> Decision:
    """Of several tables and one batch, as one: all rows, table by table; nothing that could be undone."""
    arrays = (np.concatenate([getattr(each, name) for each in decisions]) for name in OF_ROWS)
    return Decision(decisions[0].number, *arrays)


@dataclass(frozen=True, slots=True)
class Flushed:
    """Rows with something pending, all of which is pushed now."""

    ids: np.ndarray  # (n,) int64 ascending
    slots: np.ndarray  # (n,) int32
    ticks: np.ndarray  # (n,) int32


@dataclass(frozen=True, slots=True)
class Journal:
    """What `undo` needs, and what does the step again."""

    arguments: tuple[np.ndarray, np.ndarray | None, np.ndarray | None, int]  # of the native step
    done: _native.DirectoryStep


class Directory:
    """id -> slot, when its copy was read, and how many batches' gradients of it are pending.

    A batch is one tick of every row it uses. `step` is called once per batch, in the order of training, as early as one
    likes: what it decides is a pure function of the sequence of batches and of nothing else, so how far ahead it is
    called changes nothing. Values are somebody else's, and follow in the order of the numbers: before batch n's step
    the rows of `asked` are read into their slots; then its gradients are added to what is pending; then all of
    `pushed` and of `evicted_slots` is sent, after which nothing is pending there.

    * A copy read (or renewed: asked for, and found to be as it was) at batch n is used without a word in batches up to
      n + read_bound, so it misses at most read_bound pushes of each other rank. A batch that finds it older asks.
    * A row's ticks are pushed as soon as there are more than write_bound, or when it leaves. Pushing keeps the copy and
      its age.
    * At most `capacity` copies outlast a step. Of all copies, the batch's own among them, those that are worth least
      leave; of those alike the one with the smallest id. So a row that is worth less than all that are here is used
      once and leaves with its step, and takes nobody's place. Worth, by policy:

        lru        the last batch that used the row
        lfu        how often it was used. A count halves while as many rows are used as the cache holds, so that what
                   was popular makes room for what is. Rows not used while counts halved two million times may count
                   alike
        lookahead  how soon it is used again, as `next_uses` and `coming` say; all others by the last batch that used
                   them, behind those. A use that was foretold and did not come is forgotten within 64 batches

    * A slot that is left at batch n is given to another row by batch n + 1 at the earliest, which is read after batch n
      was pushed. Slots are numbered from 0 and the lowest free one is taken, so there are never more than capacity +
      the most rows of a batch (`num_slots`, of all that were given so far).

    In flat, native arrays: bookkeeping is 30 bytes a slot or less (`num_bytes`) once there are some ten thousand, at
    any time. Ids are any 64 bits. Ticks of one row stop at 2**24 - 1. A directory ends with its 2**28th batch:
    ColonnadeError; a state of so many is `renumbered`. The interpreter's lock is let go of; one thread at a time: the
    owner of this object locks.
    """

    def __init__(
        self, capacity: int, read_bound: int, write_bound: int, policy: str = "lru"
    ) -> None:
        """capacity: rows, 0 or more, below 2**32. Bounds: 0 .. UNBOUNDED, in batches. Raises ConfigError."""
        _check(capacity, read_bound, write_bound)
        if policy not in POLICIES:
            raise ConfigError(
                f"cache: got policy {policy!r}, wanted {', '.join(POLICIES[:-1])} or {POLICIES[-1]}"
            )
        self.read_bound, self.write_bound, self.policy = read_bound, write_bound, policy
        self._native = _native.Directory(capacity, read_bound, write_bound, policy)

    def __len__(self) -> int:
        """Rows with a copy."""
        return len(self._native)

    @property
    def capacity(self) -> int:
        return self._native.capacity

    @property
    def number(self) -> int:
        """Batches so far."""
        return self._native.number

    @property
    def num_slots(self) -> int:
        return self._native.num_slots

    @property
    def num_bytes(self) -> int:
        """Of bookkeeping."""
        return self._native.bytes

    def step(
        self,
        ids: np.ndarray,
        next_uses: np.ndarray | None = None,
        coming: np.ndarray | None = None,
        window: int = 0,
    ) -> Decision:
        """The next batch's rows: (U,) int64, ascending, each once.

        Of `lookahead`: next_uses (U,) int32, batches from this one to the next that uses each row, 0 if that is not
        known; coming, the rows of the batch `window` after this one, ascending: what is new in sight.
        """
        arguments = np.ascontiguousarray(ids), next_uses, coming, window
        try:
            done = self._native.step(*arguments)
        except OverflowError:
            raise ColonnadeError(
                f"plan.cache: got more than {self.number:,} batches, wanted as many at most, counted from the run's "
                "last start; start it again: it goes on from its newest checkpoint, and counts from less"
            ) from None
        return Decision(
            done.number, done.slots, done.asked, done.ages, done.ticks, done.pushed, done.leaving,
            done.evicted_ids, done.evicted_slots, done.evicted_ticks, Journal(arguments, done),
        )  # fmt: skip

    def undo(self, decision: Decision) -> None:
        """As if the newest step, which this is the decision of, had not been."""
        if decision.number != self.number:
            raise RuntimeError(
                f"got the decision of batch {decision.number} to undo, wanted the newest: {self.number}"
            )
        assert isinstance(decision.journal, Journal)
        self._native.undo(decision.journal.arguments[0], decision.journal.done)

    def flush(self, above: int = 0) -> Flushed:
        """What is pending of rows with more than `above` batches is pushed; copies and their ages stay. No step may be
        undone afterwards."""
        ids, slots, _, ticks, _ = (part.numpy() for part in self._native.flush(above))
        return Flushed(ids, slots, ticks)

    def set_bounds(self, read_bound: int, write_bound: int) -> None:
        """From the next step on; what is pending of more than `write_bound` batches must have been flushed, on every
        rank. No step may be undone afterwards.

        Where the write bound becomes lower, each copy counts as read so many batches earlier: so much more may have
        waited on other ranks when it was read. So from here on no read misses more than the two bounds together.
        """
        _check(self.capacity, read_bound, write_bound)
        self._native.set_bounds(read_bound, write_bound)
        self.read_bound, self.write_bound = read_bound, write_bound

    def state(self, without: Sequence[Decision] = ()) -> dict[str, np.ndarray]:
        """All it remembers: `load` goes on from there. By row, ascending by id.

        without: decisions of the newest steps, oldest first; the state is as if these had not been. They are undone for
        it, and done again: the same decisions, for capacity and bounds have not changed since.
        """
        undone: list[Journal] = []
        try:
            for decision in reversed(without):
                self.undo(decision)
                assert isinstance(decision.journal, Journal)
                undone.append(decision.journal)
            return self._state()
        finally:
            for journal in reversed(undone):
                self._native.step(*journal.arguments)

    def _state(self) -> dict[str, np.ndarray]:
        ids, slots, copied, ticks, score = (part.numpy() for part in self._native.rows())
        return {
            "number": np.array([self.number], np.int64),
            "time": np.array([self._native.time], np.int64),
            "bounds": np.array([self.read_bound, self.write_bound], np.int64),
            "ids": ids,
            "slots": slots,
            "copied": copied.astype(np.int64),
            "ticks": ticks,
            "score": score.view(np.uint32).astype(np.int64),
        }

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Load a state, its bounds included, into an empty directory that keeps its own capacity.

        Rows beyond the capacity are evicted by the next step, which pushes what is pending there. Slots stay as they
        were. Raises ValueError for rows that no directory has.
        """
        if not len(self):
            self.set_bounds(*state["bounds"].tolist())
        self._native.load(
            state["ids"],
            state["slots"],
            state["copied"].astype(np.int32),
            state["ticks"],
            state["score"].astype(np.uint32).view(np.int32),
            int(state["number"][0]),
            int(state["time"][0]),
        )


def surplus(number: int) -> int:
    """Batches that a run which goes on at batch `number` need not count."""
    return max(0, number - RENUMBERED) // TURN * TURN


def renumbered(state: dict[str, np.ndarray], policy: str, shift: int) -> dict[str, np.ndarray]:
    """A directory's state as if it had begun `shift` batches later, a multiple of TURN: what it decides is the same,
    for ages and orders are differences. Copies of before count as read and used at its begin."""
    copied = np.maximum(state["copied"] - shift, 0)
    worth = state["score"]
    if policy in ("lru", "lookahead"):
        is_known = (worth >= KNOWN) & (policy == "lookahead")
        later = np.minimum(worth + shift, 2 * KNOWN - 1)
        worth = np.where(is_known, later, np.maximum(worth - shift, 1))
    return {**state, "number": state["number"] - shift, "copied": copied, "score": worth}


def _check(capacity: int, read_bound: int, write_bound: int) -> None:
    """Raises ConfigError."""
    bounds = 0 <= read_bound <= UNBOUNDED and 0 <= write_bound <= UNBOUNDED
    if not isinstance(capacity, int | np.integer) or capacity < 0 or not bounds:
        raise ConfigError(
            f"cache: got a capacity of {capacity} rows, bounds {read_bound} and {write_bound}; wanted whole numbers, "
            "0 or more"
        )
