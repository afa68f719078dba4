"""Laws of ranks that cache rows as the directory decides, whatever the order of uses and evictions.

Every use of a row adds one to it, so a value says which updates it has seen. Values lie by slot, as in the exchange."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.cache.directory import HIT, MISS, POLICIES, Directory
from colonnade.staleness import RowClock


class Rank:
    """One rank's copies: `value` is what the model sees, `pending` what the owner does not have."""

    def __init__(self, capacity: int, read: int, write: int, policy: str) -> None:
        self.directory = Directory(capacity, RowClock(read, write), policy)
        self.value, self.pending = Counter(), Counter()
        self.own: Counter = Counter()  # by id: updates of this rank

    def read(self, ids: np.ndarray, owners: Counter) -> tuple[object, list[int]]:
        decision = self.directory.decide_batch(ids)
        outputs = []
        for id, slot, requested in zip(
            ids.tolist(), decision.slots.tolist(), decision.outcomes.tolist(), strict=True
        ):
            if requested == MISS:
                assert self.pending[slot] == 0, (
                    "a slot is given on with what another row had pending"
                )
            if requested != HIT:
                self.value[slot] = owners[id] + self.pending[slot]
            outputs.append(self.value[slot])
        return decision, outputs

    def go_on_with(self, capacity: int) -> None:
        """Continue with a cache of another size."""
        old = self.directory
        self.directory = Directory(capacity, old.clock, old.policy)
        self.directory.load_state(old.export_state())

    def change(self, read: int, write: int, owners: Counter) -> None:
        flushed = self.directory.flush(write)
        for id, slot, ticks in zip(
            *(part.tolist() for part in (flushed.ids, flushed.slots, flushed.ticks)), strict=True
        ):
            assert self.pending[slot] == ticks > write
            owners[id] += self.pending.pop(slot)
        self.directory.set_clock(RowClock(read, write))

    def write(self, ids: np.ndarray, decision, owners: Counter) -> None:
        for id, slot, pushed in zip(
            ids.tolist(), decision.slots.tolist(), decision.pushed.tolist(), strict=True
        ):
            self.value[slot] += 1
            self.pending[slot] += 1
            self.own[id] += 1
            if pushed:
                owners[id] += self.pending.pop(slot)
        for id, slot, ticks in zip(
            decision.evicted_ids.tolist(),
            decision.evicted_slots.tolist(),
            decision.evicted_ticks.tolist(),
            strict=True,
        ):
            assert self.pending[slot] == ticks > 0
            owners[id] += self.pending.pop(slot)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 8]),
    capacity=st.sampled_from([0, 1, 4, 12, 60]),
    read=st.sampled_from([0, 1, 5, 50]),
    write=st.sampled_from([0, 2, 5, 50]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_update_is_lost_or_seen_twice_and_none_is_missed_for_longer_than_the_bounds(
    policy, ranks, capacity, read, write, seed
):
    """Invariants I1 to I6 of bounded staleness: what owners have after a flush is every update, once (I1); no read
    sees more than there is (I2), or less than its own rank wrote, through evictions too (I3); at most read + write
    updates of each other rank are missed (I4), none at bounds of 0 (I5); with caches smaller than a batch, and with
    steps decided ahead and undone (I6). All of it by other bounds from any step on."""
    random = np.random.default_rng(seed)
    world = [Rank(capacity, read, write, policy) for _ in range(ranks)]
    owners: Counter = Counter()
    for step in range(70):
        if step == 40:
            for rank in world:
                rank.go_on_with(capacity // 2)
        if random.random() < 0.07:
            read, write = (int(random.choice([0, 1, 4, 30])) for _ in range(2))
            for rank in world:
                rank.change(read, write, owners)
        total = sum((rank.own for rank in world), Counter())
        batches = [
            np.unique((random.pareto(0.8, random.integers(0, 12)) * 3).astype(np.int64) % 40 - 20)
            for _ in world
        ]
        lines = []
        for rank, ids in zip(world, batches, strict=True):
            if random.random() < 0.2:  # a batch that was looked at ahead and never came
                rank.directory.undo_decision(
                    rank.directory.decide_batch(np.unique(random.integers(-9, 99, 9)))
                )
            decision, output = rank.read(ids, owners)
            lines.append(decision)
            for id, value in zip(ids.tolist(), output, strict=True):
                assert rank.own[id] <= value <= total[id]
                assert total[id] - value <= (ranks - 1) * (read + write)
        for rank, ids, decision in zip(world, batches, lines, strict=True):
            rank.write(ids, decision, owners)
    for rank in world:
        rank.change(0, 0, owners)
        assert not +rank.pending
    assert owners == sum((rank.own for rank in world), Counter())
