"""The directory of a rank's copies, held against a cache of dicts that does one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cache_batches import batches

from colonnade.cache.directory import HALF_LIFE, HIT, LEASE_OVER, MISS, POLICIES, Directory
from colonnade.errors import ConfigError


class SlowCache:
    """id -> [copied, ticks, last use, uses]: the definition, row by row."""

    def __init__(self, capacity: int, read_bound: int, write_bound: int, policy: str) -> None:
        self.capacity, self.read_bound, self.write_bound = capacity, read_bound, write_bound
        self.policy, self.rows, self.now = policy, {}, 0

    def worth(self, row: list) -> float:
        return (
            row[2] if self.policy == "lru" else math.log2(sum(2 ** (t / HALF_LIFE) for t in row[3]))
        )

    def step(self, ids: list[int]) -> tuple[dict, dict]:
        """(by id of the batch: asked, age, ticks, pushed, leaving), (by other id that leaves dirty: ticks)."""
        self.now += 1
        said = {}
        for id in ids:
            row = self.rows.get(id)
            asked, age = MISS, 0
            if row is not None:
                age = self.now - row[0]
                asked = LEASE_OVER if age > self.read_bound else HIT
            row = self.rows.setdefault(id, [self.now, 0, 0, []])
            if asked != HIT:
                row[0] = self.now
            row[1], row[2] = row[1] + 1, self.now
            row[3].append(self.now)
            said[id] = [asked, age, row[1], row[1] > self.write_bound, False]
            if row[1] > self.write_bound:
                row[1] = 0
        order = sorted(self.rows, key=lambda id: (id in ids, self.worth(self.rows[id]), id))
        dirty = {}
        for id in order[: max(0, len(order) - self.capacity)]:
            row = self.rows.pop(id)
            if id in ids:
                said[id][3:] = [True, True]
            elif row[1]:
                dirty[id] = row[1]
        return said, dirty


CASES = [
    (capacity, read, write, policy)
    for capacity in (0, 3, 12, 60)
    for read, write in ((0, 0), (3, 0), (0, 5), (4, 7))
    for policy in POLICIES
]


@pytest.mark.parametrize(("capacity", "read", "write", "policy"), CASES)
def test_it_decides_as_a_cache_of_dicts_does(capacity, read, write, policy):
    """Ages, pushes and who leaves; slots are one's own; a dirty slot is not reused by the batch that it leaves with."""
    fast, slow = Directory(capacity, read, write, policy), SlowCache(capacity, read, write, policy)
    stream = batches(300, 9, seed=capacity)
    for ids in stream:
        decision = fast.step(ids)
        said, dirty = slow.step(ids.tolist())
        assert list(said) == ids.tolist()
        got = zip(
            decision.asked.tolist(), decision.ages.tolist(), decision.ticks.tolist(),
            decision.pushed.tolist(), decision.leaving.tolist(), strict=True,
        )  # fmt: skip
        assert [list(each) for each in got] == list(said.values())
        assert dict(zip(decision.evicted_ids.tolist(), decision.evicted_ticks, strict=True)) == dirty  # fmt: skip
        assert decision.evicted_ids.tolist() == sorted(dirty)
        slots = [*decision.slots.tolist(), *decision.evicted_slots.tolist()]
        assert len(set(slots)) == len(slots)
        assert len(fast) <= capacity
        assert fast.num_slots <= capacity + 9
    assert {id: row[1] for id, row in slow.rows.items() if row[1]} == _pending(fast)


def _pending(directory: Directory) -> dict[int, int]:
    flushed = directory.flush()
    assert len(directory.flush().ids) == 0
    return dict(zip(flushed.ids.tolist(), flushed.ticks.tolist(), strict=True))


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_undone_were_never_there_and_a_loaded_directory_goes_on_alike(policy):
    """Undone newest first; then the same batches, or others, decide as if only they had come."""
    directory, stream = Directory(10, 3, 4, policy), batches(240, 9, seed=5)
    for first in range(0, 200, 4):
        before = directory.state()
        seen = [directory.step(ids) for ids in stream[first + 20 : first + 24]]
        with pytest.raises(RuntimeError, match="wanted the newest"):
            directory.undo(seen[0])
        for decision in reversed(seen):
            directory.undo(decision)
        _same(directory.state(), before)
        twin = Directory(10, 3, 4, policy)
        twin.load(before)
        for ids in stream[first : first + 4]:
            one, other = directory.step(ids), twin.step(ids)
            for name in ("asked", "ages", "ticks", "pushed", "leaving", "evicted_ids"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            np.testing.assert_array_equal(one.slots, other.slots)
        _same(directory.state(), twin.state())


def test_a_smaller_capacity_pushes_what_has_to_leave():
    directory = Directory(8, 100, 100)
    directory.step(np.arange(8))
    directory.resize(2)
    decision = directory.step(np.array([-5, 7]))
    assert decision.evicted_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (decision.evicted_ticks == 1).all()
    directory.flush()
    directory.forget()
    assert len(directory) == 0
    assert directory.step(np.array([7])).asked.tolist() == [MISS]


def test_contradicting_numbers_are_refused():
    with pytest.raises(ConfigError, match="wanted 0 or more"):
        Directory(10, -1, 0)
    with pytest.raises(ConfigError, match="wanted lru or lfu"):
        Directory(10, 0, 0, "fifo")
