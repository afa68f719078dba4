"""The directory of a rank's copies: what the contract says, row by row; what it costs; that it follows what changes."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_directory import MOST_TIME, SlowDirectory

from colonnade import _native
from colonnade.cache.directory import (
    HIT,
    POLICIES,
    UNBOUNDED,
    Decision,
    Directory,
    VersionLog,
    shift_batch_numbers,
    surplus_batches,
)
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.staleness import RowClock

ENDS = [-(2**63), -1, 0, 1, 2**62, 2**63 - 1]
FIELDS = (
    "number", "slots", "outcomes", "ages", "ticks", "pushed", "leaving",
    "evicted_ids", "evicted_slots", "evicted_ticks",
)  # fmt: skip


def batch(random: np.random.Generator, limit: int, shift: int) -> np.ndarray:
    """Ascending ids: popular ones, any, and both ends of 64 bits."""
    skewed = (random.pareto(0.7, random.integers(0, limit)).astype(np.int64) + shift) % 97 - 40
    ends = random.choice(np.array(ENDS), random.integers(0, 3))
    return np.unique(np.concatenate([skewed, ends]))


@settings(max_examples=examples(15, 40), deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from([0, 1, 2, 7, 13, 31, 60, 200]),
    read_bound=st.sampled_from([0, 1, 3, UNBOUNDED]),
    write_bound=st.sampled_from([0, 2, 5, UNBOUNDED]),
    write_share=st.sampled_from([1.0, 0.3, 0.05, 0.0]),
    step_bound=st.sampled_from([None, None, 1, 3]),
    limit=st.sampled_from([1, 5, 20, 70]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_decides_row_by_row(
    policy, capacity, read_bound, write_bound, write_share, step_bound, limit, seed
):
    """Decisions and slots, through steps undone, bounds that change, a state loaded into another capacity, hints true
    and false."""
    random = np.random.default_rng(seed)
    rule = write_share, step_bound
    fast = Directory(capacity, RowClock(read_bound, write_bound, *rule), policy)
    slow = SlowDirectory(capacity, read_bound, write_bound, policy, *rule)
    done: list[Decision] = []
    for step in range(60):
        what = random.integers(0, 24)
        if what == 0 and done:
            for _ in range(random.integers(1, min(4, len(done)) + 1)):
                fast.undo_decision(done.pop())
                slow.undo()
        elif what in (1, 2):
            state = fast.export_state()
            if what == 1:
                slow.capacity = int(random.integers(0, 80))
            fast = Directory(slow.capacity, RowClock(read_bound, write_bound, *rule), policy)
            fast.load_state(state)
            assert fast.clock == RowClock(slow.read_bound, slow.write_bound, *rule)
            done, slow.before = [], []
        elif what == 3:
            flushed = fast.flush()
            pending = {i: [r.slot, r.ticks] for i, r in sorted(slow.rows.items()) if r.ticks}
            assert flushed.ids.tolist() == list(pending)
            assert [list(x) for x in zip(flushed.slots, flushed.ticks, strict=True)] == [
                *pending.values()
            ]
            slow.flush(0)
            done, slow.before = [], []
        elif what == 4:
            read, write = (int(random.choice([0, 1, 2, 4, 9, UNBOUNDED])) for _ in range(2))
            pushed = slow.change(slow.capacity, read, write)
            flushed = fast.flush(write)
            assert flushed.ids.tolist() == list(pushed)
            gone = zip(flushed.slots.tolist(), flushed.ticks.tolist(), strict=True)
            assert [list(x) for x in gone] == [*pushed.values()]
            fast.set_clock(RowClock(read, write, *rule))
            done = []
        ids = batch(random, limit, step // 20 * 31)
        next_uses = random.integers(0, 9, len(ids)).astype(np.int32) if random.integers(2) else None
        coming = batch(random, limit, 3) if random.integers(2) else None
        decision = fast.decide_batch(ids, next_uses, coming, 9)
        expected = slow.decide_batch(
            ids.tolist(),
            None if next_uses is None else next_uses.tolist(),
            () if coming is None else coming.tolist(),
            9,
        )
        got = [getattr(decision, name).tolist() for name in FIELDS[1:7]]
        assert [list(row) for row in zip(*got, strict=True)] == list(expected.by_row.values())
        evicted = dict(sorted(expected.evicted.items()))
        assert decision.evicted_ids.tolist() == list(evicted)
        gone = zip(decision.evicted_slots.tolist(), decision.evicted_ticks.tolist(), strict=True)
        assert [list(row) for row in gone] == list(evicted.values())
        assert len(fast) == len(slow.rows) <= slow.capacity
        done.append(decision)
    state = fast.export_state()
    assert state["ids"].tolist() == sorted(slow.rows)
    rows = [slow.rows[i] for i in sorted(slow.rows)]
    for name, wanted in {"slots": "slot", "copied": "copied", "ticks": "ticks"}.items():
        assert state[name].tolist() == [getattr(row, wanted) for row in rows]


@pytest.mark.parametrize("policy", POLICIES)
def test_where_only_the_least_are_kept_in_order_the_least_leave(policy):
    """Sizes at which few cached rows are in the order of who leaves: decisions and slots of the definition."""
    random = np.random.default_rng(5)
    fast, slow = Directory(2000, RowClock(5, 5), policy), SlowDirectory(2000, 5, 5, policy)
    for step in range(66):
        if step == 45:
            slow.capacity = 1300
            state, fast = fast.export_state(), Directory(slow.capacity, RowClock(5, 5), policy)
            fast.load_state(state)
        ids = np.unique((random.pareto(0.5, 400).astype(np.int64) * (step // 25 + 1)) % 20_000)
        next_uses = random.integers(0, 40, len(ids)).astype(np.int32)
        decision, expected = (
            fast.decide_batch(ids, next_uses),
            slow.decide_batch(ids.tolist(), next_uses.tolist()),
        )
        got = [getattr(decision, name).tolist() for name in FIELDS[1:7]]
        assert [list(row) for row in zip(*got, strict=True)] == list(expected.by_row.values())
        assert decision.evicted_ids.tolist() == sorted(expected.evicted)
        if step % 7 == 3:
            fast.undo_decision(decision)
            slow.undo()
        slow.before.clear()
    assert fast.export_state()["ids"].tolist() == sorted(slow.rows)


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_that_threads_share_are_decided_alike(policy):
    """Batches have more rows than one thread takes, and most rows miss."""
    random = np.random.default_rng(9)
    fast, slow = Directory(6000, RowClock(1, 1), policy), SlowDirectory(6000, 1, 1, policy)
    try:
        _native.set_num_threads(3)
        for _ in range(4):
            ids = np.unique((random.pareto(0.4, 12_000) * 999).astype(np.int64) % 50_000)
            next_uses = random.integers(0, 40, len(ids)).astype(np.int32)
            decision, expected = (
                fast.decide_batch(ids, next_uses),
                slow.decide_batch(ids.tolist(), next_uses.tolist()),
            )
            got = [getattr(decision, name).tolist() for name in FIELDS[1:7]]
            assert len(ids) > 4096
            assert [list(row) for row in zip(*got, strict=True)] == list(expected.by_row.values())
            assert decision.evicted_ids.tolist() == sorted(expected.evicted)
            slow.before.clear()
    finally:
        _native.set_num_threads(0)


@pytest.mark.parametrize("capacity", [7, 40, 1500])
def test_the_clock_of_lfu_is_set_back_and_nothing_else_changes(capacity):
    """Near its end, with rows of all ages, some not used for four million half-lives: the decisions of the definition
    before, across and after it, where steps are undone across it too, and where it comes again."""
    random = np.random.default_rng(capacity)
    fast, slow = Directory(capacity, RowClock(5, 5), "lfu"), SlowDirectory(capacity, 5, 5, "lfu")

    def ids() -> np.ndarray:
        return np.unique((random.pareto(0.5, 1 + capacity // 3) * 9).astype(np.int64) % 9000)

    def step() -> Decision:
        drawn = ids()
        decision, expected = fast.decide_batch(drawn), slow.decide_batch(drawn.tolist())
        got = [getattr(decision, name).tolist() for name in FIELDS[1:7]]
        assert [list(row) for row in zip(*got, strict=True)] == list(expected.by_row.values())
        assert decision.evicted_ids.tolist() == sorted(expected.evicted)
        return decision

    for _ in range(2):
        for _ in range(6):
            step()
        state = fast.export_state()
        ahead = MOST_TIME - int(state["time"][0] >> 20) - 700  # two thirds of a half-life are left
        is_old = state["ids"] % 3 == 0
        state["score"] = np.where(is_old, state["score"], state["score"] + ahead)
        state["time"] += ahead << 20
        fast = Directory(capacity, RowClock(5, 5), "lfu")
        fast.load_state(state)
        slow.time += ahead << 20
        for id, score in zip(state["ids"].tolist(), state["score"].tolist(), strict=True):
            slow.rows[id].score = score
        slow.before.clear()
        is_back = False
        for _ in range(6):
            before = fast.export_state()
            decision = step()
            fast.undo_decision(decision)
            slow.undo()
            same_state(fast.export_state(), before)
            flights = [step() for _ in range(3)]
            same_state(fast.export_state(undone_decisions=flights), before)
            is_back |= fast.export_state()["time"][0] < before["time"][0]
            assert fast.export_state()["score"].tolist() == [
                slow.rows[i].score for i in sorted(slow.rows)
            ]
        assert is_back


def same_state(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


@pytest.mark.parametrize("policy", ["lru", "lfu", "lookahead"])
def test_batches_are_counted_from_less_and_nothing_else_changes(policy):
    """A directory at the end of its numbers, and one that goes on from its state with small ones."""
    random, shift = np.random.default_rng(3), surplus_batches(2**28 - 200)
    clock = RowClock(5, 3, 0.4, 2)
    end, begun = Directory(10, clock, policy), Directory(10, clock, policy)

    def draw() -> tuple:
        ids = batch(random, 12, 0)
        return ids, random.integers(0, 9, len(ids)).astype(np.int32), batch(random, 12, 0), 5

    first = (
        shift + 2**19
    )  # a run that continues counts from more than the uses that a row's byte counts
    begun.load_state({**begun.export_state(), "number": np.array([first])})
    for _ in range(30):
        begun.decide_batch(*draw())
    end.load_state(begun.export_state())
    begun = Directory(10, clock, policy)
    begun.load_state(shift_batch_numbers(end.export_state(), policy, shift))
    for _ in range(100):
        drawn = draw()
        one, other = end.decide_batch(*drawn), begun.decide_batch(*drawn)
        assert one.number == other.number + shift
        for name in FIELDS[1:]:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    same_state(shift_batch_numbers(end.export_state(), policy, shift), begun.export_state())
    changes, rows = VersionLog([8]), np.arange(8)
    changes.record_row_changes(0, rows[2:4], shift - 5)
    changes.record_row_changes(0, rows[4:], shift + 7)
    wanted = changes.has_changed_since(0, rows, np.full(8, shift + 7))
    changes.renumber(shift)
    assert changes.has_changed_since(0, rows, np.full(8, 7)).tolist() == wanted.tolist()
    assert wanted.any() and not wanted.all()


@pytest.mark.parametrize("policy", POLICIES)
def test_states_without_the_newest_steps_are_those_of_before_and_the_steps_stand(policy):
    """Save and load a directory with batches in flight: the loaded one decides alike, and drops undo decisions."""
    random = np.random.default_rng(7)
    clock = RowClock(3, 4, 0.5, 2)
    directory = Directory(10, clock, policy)

    def step(directory: Directory, drawn: tuple) -> Decision:
        ids, next_uses, coming = drawn
        return directory.decide_batch(ids, next_uses, coming, 5)

    def draw(shift: int) -> tuple:
        ids = batch(random, 12, shift)
        return ids, random.integers(0, 9, len(ids)).astype(np.int32), batch(random, 12, shift)

    for turn in range(40):
        for _ in range(3):
            step(directory, draw(turn))
        before = directory.export_state()
        drawn = [draw(turn) for _ in range(4)]
        flights = [step(directory, item) for item in drawn]
        after = directory.export_state()
        same_state(directory.export_state(undone_decisions=flights), before)
        same_state(directory.export_state(), after)
        with pytest.raises(RuntimeError, match="wanted the newest"):
            directory.export_state(undone_decisions=[*flights, flights[0]])
        same_state(directory.export_state(), after)
        twin = Directory(10, clock, policy)
        twin.load_state(before)
        for item, decision in zip(drawn, flights, strict=True):
            again = step(twin, item)
            for name in FIELDS:
                np.testing.assert_array_equal(getattr(again, name), getattr(decision, name))
        same_state(twin.export_state(), after)
        for decision in reversed(flights):
            directory.undo_decision(decision)
        same_state(directory.export_state(), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_costs_thirty_bytes(policy):
    """Slots include those of the batch: at its fullest and before, once there are some ten thousand."""
    random = np.random.default_rng(1)
    directory = Directory(200_000, RowClock(50, 50), policy)
    for _ in range(60):
        ids = np.unique((1000 / random.random(12_000) ** 3).astype(np.int64) % 10**9)
        directory.decide_batch(ids, random.integers(0, 30, len(ids)).astype(np.int32))
        if len(directory) > 10_000:
            assert directory.num_bytes <= 30 * directory.num_slots
    assert directory.num_slots < 212_000
    assert len(directory) == 200_000


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_hits_recover_after_what_is_popular_changed(policy):
    """Within 20 batches, to the share of hits of before."""
    random = np.random.default_rng(3)
    order = random.permutation(4000)
    directory = Directory(400, RowClock(UNBOUNDED, UNBOUNDED), policy)
    hits = []
    for step in range(140):
        if step == 100:
            order = random.permutation(4000)
        drawn = order[np.minimum(random.zipf(1.4, 300), 4000) - 1]
        requested = directory.decide_batch(np.unique(drawn)).outcomes
        hits.append(float((requested == HIT).mean()))
    assert hits[100] < 0.5 * np.mean(hits[80:100])
    assert np.mean(hits[120:140]) > 0.95 * np.mean(hits[80:100])


def count_pushes(clock: RowClock, num_rows: int, num_batches: int) -> np.ndarray:
    """Return the number of pushes of each of `num_rows` rows that every batch uses."""
    directory, ids = Directory(num_rows, clock), np.arange(num_rows)
    return sum(directory.decide_batch(ids).pushed.astype(int) for _ in range(num_batches))


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_the_byte_that_counts_uses_is_right_on_average(share):
    """A row that waits for a share of its uses is pushed as often as with an exact count. Errors of single rows stay
    below a tenth."""
    pushes = count_pushes(RowClock(50, UNBOUNDED, share), 50, 20_000)
    exact = waiting = 0
    for use in range(1, 20_001):
        waiting += 1
        if waiting > share * use:
            exact, waiting = exact + 1, 0
    assert abs(pushes.mean() / exact - 1) < 0.02
    assert abs(pushes / exact - 1).max() < 0.1
    # The interval after u uses is floor(u * share / (1 - share)) + 1, so pushes are a harmonic sum.
    ratio = share / (1 - share)
    assert exact == pytest.approx((np.log(ratio * 20_000) + np.euler_gamma) / ratio, rel=0.08)


def test_a_bound_and_a_step_limit_what_a_share_allows():
    assert count_pushes(RowClock(50, 9, 0.5), 1, 4000)[0] == pytest.approx(400, rel=0.02)
    assert count_pushes(RowClock(50, 50, 1.0, 4), 1, 4000)[0] == 800, "at most 4 wait"
    assert count_pushes(RowClock(50, 50, 0.0), 1, 40)[0] == 40


def list_waiting(directory: Directory, batches: list[np.ndarray], row: int) -> tuple[int, int]:
    """Return the most batches that wait in the row after one of `batches`, and the oldest copy of it that is used."""
    waiting, age = 0, 0
    for ids in batches:
        decision = directory.decide_batch(ids)
        (at,) = np.flatnonzero(ids == row)
        if not decision.pushed[at]:
            waiting = max(waiting, int(decision.ticks[at]))
        if decision.outcomes[at] == HIT:
            age = max(age, int(decision.ages[at]))
    return waiting, age


def test_a_row_that_every_batch_uses_stays_within_the_step_bound():
    """Count from its start, where it becomes popular late, and in an older state without counts."""
    clock = RowClock(50, 50, 0.05, 4)
    every, first = [np.array([1])] * 300, [np.array([2])] * 5000
    assert list_waiting(Directory(9, clock), every, 1) == (4, 4)
    late = Directory(9, clock)
    for ids in first:
        late.decide_batch(ids)
    assert list_waiting(late, every, 1) == (4, 4)
    assert list_waiting(late.without_rows(), every, 1) == (4, 4)
    state, old = late.export_state(), Directory(9, clock)
    del state["uses"], state["stamps"]
    old.load_state(state)
    old.decide_batch(np.array([1]))
    assert list_waiting(old, every, 1) == (4, 4)
    # Used by every second batch: it makes twice as many steps in twice as many batches each.
    second = [np.array([2])] * 600
    half = Directory(9, RowClock(50, 50, 1.0, 4))
    for ids in second:
        half.decide_batch(ids)
    ages = set()
    for number in range(600):
        decision = half.decide_batch(np.array([1]) if number % 2 else np.array([2]))
        if number % 2 and decision.outcomes[0] == HIT:
            ages.add(int(decision.ages[0]))
    assert max(ages) == 16


def test_a_state_of_before_uses_were_counted_begins_to_count():
    clock = RowClock(50, 50, 0.05)
    old, new = Directory(9, RowClock(50, 50)), Directory(9, clock)
    for _ in range(30):
        old.decide_batch(np.array([7]))
    state = old.export_state()
    del state["uses"], state["stamps"]
    new.load_state(state)
    decision = new.decide_batch(np.array([7]))
    assert decision.ticks.tolist() == [31]
    assert decision.pushed.tolist() == [True]
    assert new.export_state()["uses"].tolist() == [31]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_shares_are_parts_of_a_whole(share):
    with pytest.raises(ConfigError, match=r"wanted 0 \.\. 1"):
        RowClock(1, 1, share)
    with pytest.raises(ConfigError, match="got step_bound=0, wanted 1 or more"):
        RowClock(1, 1, 1.0, 0)


def test_what_cannot_be_is_refused_and_changes_nothing():
    for capacity in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"got a capacity of {capacity} rows"):
            Directory(capacity, RowClock(0, 0))
    with pytest.raises(ConfigError, match="wanted bounds of at most"):
        Directory(1, RowClock(0, 0)).set_clock(RowClock(1, UNBOUNDED + 1))
    with pytest.raises(ConfigError, match="wanted lru, lfu or lookahead"):
        Directory(1, RowClock(0, 0), "fifo")
    directory = Directory(4, RowClock(1, 1))
    first = directory.decide_batch(np.array([3, 5]))
    for wrong in ([5, 3], [4, 4]):
        with pytest.raises(ValueError, match="wanted ids ascending, each once"):
            directory.decide_batch(np.array(wrong))
    with pytest.raises(ValueError, match="wanted contiguous CPU int64"):
        directory.decide_batch(np.array([1], np.int32))
    with pytest.raises(ValueError, match="next_uses"):
        directory.decide_batch(np.array([1]), np.array([1, 2], np.int32))
    assert directory.number == 1
    second = directory.decide_batch(np.array([3]))
    with pytest.raises(RuntimeError, match="wanted the newest"):
        directory.undo_decision(first)
    directory.undo_decision(second)
    state = directory.export_state()
    with pytest.raises(ValueError, match="wanted one without"):
        directory.load_state(state)
    with pytest.raises(ValueError, match="in a slot of its own"):
        Directory(4, RowClock(1, 1)).load_state({**state, "slots": np.array([1, 1], np.int32)})
    late = Directory(4, RowClock(1, 1))
    late.load_state({**state, "number": np.array([2**28 - 1])})
    with pytest.raises(ColonnadeError, match="start it again"):
        late.decide_batch(np.array([1]))
