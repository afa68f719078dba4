"""`Directory` on flat arrays in native code, 30 bytes a row; with policies that know what is worth keeping out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colonnade import _native
from colonnade.cache.directory import UNBOUNDED, Decision, Flushed
from colonnade.errors import ConfigError

POLICIES = ("lru", "lfu", "light_lfu", "lookahead")


@dataclass(frozen=True, slots=True)
class Journal:
    """What `undo` needs: the batch's rows, and what the step found."""

    ids: np.ndarray
    done: _native.DirectoryStep


class NativeDirectory:
    """The contract of `Directory`: same calls, same decisions, same slots. What differs is who leaves.

    Of all copies, the batch's own among them, those that are worth least leave until `capacity` are left; of those
    alike the one with the smallest id. So a row that is worth less than all that are here is used once and leaves with
    its step, and takes nobody's place. Worth, by policy:

        lru        the last batch that used the row
        lfu        how often it was used. A count halves while as many rows are used as the cache holds, so that what
                   was popular makes room for what is
        light_lfu  how often, up to 10, then the last batch. A row used more often never leaves but for a smaller
                   capacity: HET's policy, which freezes. For comparison
        lookahead  how soon it is used again, as `next_uses` and `coming` say; all others by the last batch that used
                   them, behind those. A use that was foretold and did not come is forgotten within 64 batches

    Bookkeeping is 30 bytes a slot or less (`num_bytes`) once there are some ten thousand, at any time. Ids are any 64
    bits. Ticks of one row stop at 2**24 - 1. A directory ends with its 2**28th batch, or of `lfu` when counts have
    halved four million times: OverflowError. The interpreter's lock is let go of; one thread at a time.
    """

    def __init__(
        self, capacity: int, read_bound: int, write_bound: int, policy: str = "lru"
    ) -> None:
        """capacity: rows, 0 or more, below 2**32. Bounds: 0 .. UNBOUNDED, in batches. Raises ConfigError."""
        if capacity < 0 or not (0 <= read_bound <= UNBOUNDED and 0 <= write_bound <= UNBOUNDED):
            raise ConfigError(
                f"cache: got a capacity of {capacity} rows, bounds {read_bound} and {write_bound}; wanted 0 or more"
            )
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
        ids = np.ascontiguousarray(ids)
        done = self._native.step(ids, next_uses, coming, window)
        return Decision(
            done.number, done.slots, done.asked, done.ages, done.ticks, done.pushed, done.leaving,
            done.evicted_ids, done.evicted_slots, done.evicted_ticks, Journal(ids, done),
        )  # fmt: skip

    def undo(self, decision: Decision) -> None:
        """As if the newest step, which this is the decision of, had not been."""
        if decision.number != self.number:
            raise RuntimeError(
                f"got the decision of batch {decision.number} to undo, wanted the newest: {self.number}"
            )
        assert isinstance(decision.journal, Journal)
        self._native.undo(decision.journal.ids, decision.journal.done)

    def flush(self) -> Flushed:
        """Everything pending is pushed; copies and their ages stay. No step may be undone afterwards."""
        ids, slots, _, ticks, _ = (part.numpy() for part in self._native.flush())
        return Flushed(ids, slots, ticks)

    def forget(self) -> None:
        """No copy is left. What is pending must have been flushed. No step may be undone afterwards."""
        self._native.forget()

    def resize(self, capacity: int) -> None:
        """From the next step on, which pushes what has to leave for it."""
        self._native.resize(capacity)

    def state(self) -> dict[str, np.ndarray]:
        """All it remembers: `load` goes on from there. By row, ascending by id."""
        ids, slots, copied, ticks, score = (part.numpy() for part in self._native.rows())
        return {
            "number": np.array([self.number], np.int64),
            "time": np.array([self._native.time], np.uint64),
            "ids": ids,
            "slots": slots,
            "copied": copied.astype(np.int64),
            "ticks": ticks,
            "score": score.view(np.uint32).astype(np.int64),
        }

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Into a directory without copies. Slots stay as they were. ValueError for rows that no directory has."""
        self._native.load(
            state["ids"],
            state["slots"],
            state["copied"].astype(np.int32),
            state["ticks"],
            state["score"].astype(np.uint32).view(np.int32),
            int(state["number"][0]),
            int(state["time"][0]),
        )
