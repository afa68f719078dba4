"""Which rows of a table a rank keeps copies of, and when it speaks of them to owners: by the order of batches alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import numpy as np

from colonnade.errors import ConfigError

HIT, MISS, LEASE_OVER = 0, 1, 2
"""Of `Decision.asked`."""
POLICIES = ("lru", "lfu")
HALF_LIFE = 256
"""Batches in which a use comes to count half, of `lfu`."""
UNBOUNDED = 2**31 - 2
"""A bound that nothing passes."""


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


@dataclass(frozen=True, slots=True)
class Flushed:
    """Rows with something pending, all of which is pushed now."""

    ids: np.ndarray  # (n,) int64 ascending
    slots: np.ndarray  # (n,) int32
    ticks: np.ndarray  # (n,) int32


@dataclass(frozen=True, slots=True)
class Journal:
    """What a step changed, as it was."""

    slots: np.ndarray  # of the batch's rows
    new: np.ndarray  # (U,) bool: had no copy
    before: tuple[np.ndarray, ...]  # copied, ticks, score of those slots
    gone_ids: np.ndarray  # all that left, of the batch or not
    gone_slots: np.ndarray
    gone: tuple[np.ndarray, ...]  # copied, ticks, score of those, as they left
    free: list[int]
    num_slots: int


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
    * At most `capacity` copies outlast a step. Who leaves first: rows that this batch does not use, by worth, then its
      own, which are used once and leave with the step; those that are worth alike by id, the smallest first. Worth is
      the last batch that used a row ("lru"), or how often it was used lately, a use counting half after HALF_LIFE
      batches ("lfu").
    * A slot that is left at batch n is given to another row by batch n + 1 at the earliest, which is read after batch n
      was pushed. Slots are numbered from 0 and the lowest free one is taken, so there are never more than capacity +
      the most rows of a batch (`num_slots`, of all that were given so far).

    For one thread at a time: the owner of this object locks.
    """

    def __init__(
        self, capacity: int, read_bound: int, write_bound: int, policy: str = "lru"
    ) -> None:
        """capacity: rows, 0 or more. Bounds: 0 .. UNBOUNDED, in batches. Raises ConfigError."""
        if capacity < 0 or not (0 <= read_bound <= UNBOUNDED and 0 <= write_bound <= UNBOUNDED):
            raise ConfigError(
                f"cache: got a capacity of {capacity} rows, bounds {read_bound} and {write_bound}; wanted 0 or more"
            )
        if policy not in POLICIES:
            raise ConfigError(f"cache: got policy {policy!r}, wanted {' or '.join(POLICIES)}")
        self.capacity, self.read_bound, self.write_bound = capacity, read_bound, write_bound
        self.policy = policy
        self.number = 0  # batches so far
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []  # below num_slots; the lowest last
        self.num_slots = 0
        # By slot.
        self._live = np.zeros(0, bool)
        self._ids = np.zeros(0, np.int64)
        self._copied = np.zeros(0, np.int64)
        self._ticks = np.zeros(0, np.int32)
        self._score = np.zeros(0, np.float64)

    def __len__(self) -> int:
        """Rows with a copy."""
        return len(self._slot_of)

    def step(self, ids: np.ndarray) -> Decision:
        """The next batch's rows: (U,) int64, ascending, each once."""
        self.number += 1
        now, keys = self.number, ids.tolist()
        free, num_slots = list(self._free), self.num_slots
        slots = np.fromiter(map(self._slot_of.get, keys, repeat(-1)), np.int32, len(keys))
        new = slots < 0
        slots[new] = self._take(int(new.sum()))
        before = self._copied[slots], self._ticks[slots], self._score[slots]
        self._slot_of.update(zip(ids[new].tolist(), slots[new].tolist(), strict=True))
        self._ids[slots[new]], self._live[slots[new]] = ids[new], True

        ages = np.where(new, 0, now - before[0])
        asked = np.where(new, MISS, np.where(ages > self.read_bound, LEASE_OVER, HIT)).astype(np.uint8)  # fmt: skip
        self._copied[slots[asked != HIT]] = now
        ticks = np.where(new, 1, before[1] + 1).astype(np.int32)
        self._score[slots] = self._worth(before[2], new)

        gone = self._leavers(slots)
        leaving = np.isin(slots, gone)
        pushed = (ticks > self.write_bound) | leaving
        self._ticks[slots] = np.where(pushed, 0, ticks)
        fields = self._copied[gone], self._ticks[gone], self._score[gone]
        gone_ids = self._ids[gone]
        dirty = gone[(fields[1] > 0) & ~np.isin(gone, slots)]
        dirty = dirty[np.argsort(self._ids[dirty])]
        decision = Decision(
            now, slots, asked, np.minimum(ages, UNBOUNDED).astype(np.int32), ticks, pushed, leaving,
            self._ids[dirty], dirty.astype(np.int32), self._ticks[dirty],
            Journal(slots, new, before, gone_ids, gone, fields, free, num_slots),
        )  # fmt: skip
        self._release(gone_ids, gone)
        return decision

    def undo(self, decision: Decision) -> None:
        """As if the newest step, which this is the decision of, had not been."""
        if decision.number != self.number:
            raise RuntimeError(
                f"got the decision of batch {decision.number} to undo, wanted the newest: {self.number}"
            )
        said = decision.journal
        assert isinstance(said, Journal)
        for id, slot in zip(said.gone_ids.tolist(), said.gone_slots.tolist(), strict=True):
            self._slot_of[id] = slot
        self._ids[said.gone_slots], self._live[said.gone_slots] = said.gone_ids, True
        copied, ticks, score = said.gone
        self._copied[said.gone_slots], self._ticks[said.gone_slots] = copied, ticks
        self._score[said.gone_slots] = score
        fresh = said.slots[said.new]
        for id in self._ids[fresh].tolist():
            del self._slot_of[id]
        self._copied[said.slots], self._ticks[said.slots], self._score[said.slots] = said.before
        self._live[fresh] = False
        self._free, self.num_slots = list(said.free), said.num_slots
        self.number -= 1

    def flush(self) -> Flushed:
        """Everything pending is pushed; copies and their ages stay. No step may be undone afterwards."""
        slots = np.flatnonzero(self._ticks)
        slots = slots[np.argsort(self._ids[slots])]
        flushed = Flushed(self._ids[slots], slots.astype(np.int32), self._ticks[slots])
        self._ticks[slots] = 0
        return flushed

    def forget(self) -> None:
        """No copy is left. What is pending must have been flushed. No step may be undone afterwards."""
        assert not self._ticks.any()
        slots = np.array(sorted(self._slot_of.values()), np.int64)
        self._release(self._ids[slots], slots)

    def resize(self, capacity: int) -> None:
        """From the next step on, which pushes what has to leave for it."""
        self.capacity = capacity

    def state(self) -> dict[str, np.ndarray]:
        """All it remembers: `load` goes on from there. By row, ascending by id."""
        ids = np.array(sorted(self._slot_of), np.int64)
        slots = np.fromiter(map(self._slot_of.__getitem__, ids.tolist()), np.int32, len(ids))
        return {
            "number": np.array([self.number], np.int64),
            "ids": ids,
            "slots": slots,
            "copied": self._copied[slots],
            "ticks": self._ticks[slots],
            "score": self._score[slots],
        }

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Into a directory without copies. Slots stay as they were."""
        assert not self._slot_of, "a directory that has copies"
        slots = state["slots"]
        self.number = int(state["number"][0])
        self._grow(int(slots.max()) + 1 if len(slots) else 0)
        self._slot_of = dict(zip(state["ids"].tolist(), slots.tolist(), strict=True))
        self._ids[slots], self._live[slots] = state["ids"], True
        self._copied[slots] = state["copied"]
        self._ticks[slots], self._score[slots] = state["ticks"], state["score"]
        used = set(slots.tolist())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def _worth(self, score: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Of rows that are used now. Of lfu the logarithm of 2 ** (when / HALF_LIFE), summed over uses: nothing is
        rewritten to age."""
        if self.policy == "lru":
            return np.full(len(score), float(self.number))
        use = self.number / HALF_LIFE
        return np.where(new, use, np.logaddexp2(score, use))

    def _leavers(self, slots: np.ndarray) -> np.ndarray:
        """Slots of rows that leave, `slots` being those of the batch."""
        surplus = len(self._slot_of) - self.capacity
        if surplus <= 0:
            return np.empty(0, np.int64)
        others = self._live.copy()
        others[slots] = False
        others = np.flatnonzero(others)
        gone = self._least(others, min(surplus, len(others)))
        mine = self._least(np.sort(slots.astype(np.int64)), surplus - len(gone))
        return np.concatenate([gone, mine])

    def _least(self, slots: np.ndarray, count: int) -> np.ndarray:
        """The `count` of them that are worth least."""
        if count == 0:
            return slots[:0]
        if count < len(slots):
            score = self._score[slots]
            slots = slots[score <= np.partition(score, count - 1)[count - 1]]
        return slots[np.lexsort((self._ids[slots], self._score[slots]))[:count]]

    def _take(self, count: int) -> np.ndarray:
        """The lowest free slots."""
        self._grow(self.num_slots + max(0, count - len(self._free)))
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return np.array(taken, np.int32)

    def _grow(self, num_slots: int) -> None:
        """To so many slots."""
        self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self.num_slots = max(self.num_slots, num_slots)
        if (room := len(self._live)) < num_slots:
            room = max(num_slots, room + room // 2) - room
            self._live = np.concatenate([self._live, np.zeros(room, bool)])
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._copied = np.concatenate([self._copied, np.zeros(room, np.int64)])
            self._ticks = np.concatenate([self._ticks, np.zeros(room, np.int32)])
            self._score = np.concatenate([self._score, np.zeros(room, np.float64)])

    def _release(self, ids: np.ndarray, slots: np.ndarray) -> None:
        for id in ids.tolist():
            del self._slot_of[id]
        self._live[slots], self._ticks[slots] = False, 0
        self._free = sorted([*self._free, *slots.tolist()], reverse=True)
