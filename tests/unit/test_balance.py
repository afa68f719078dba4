"""Memory follows the traffic at commits: where it pays, within the budget, and ever less often where it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colonnade import Table
from colonnade.plan.placement import MemoryBalancer, describe_slot_changes
from colonnade.store import traffic as traffic_module
from colonnade.store.budget import slot_bytes
from colonnade.store.traffic import MIN_BATCHES, TrafficSample

ROWS = 20_000
TABLES = {0: Table("a", 8, rows=ROWS), 1: Table("b", 8, rows=ROWS)}
EVEN = {0: ROWS // 8, 1: ROWS // 8}


def record(traffic: TrafficSample, hot: int, batches: int, seed: int) -> None:
    """One table has 1,000 skewed lookups a batch, the other 60 that are evenly spread."""
    random = np.random.default_rng(seed)
    for _ in range(batches):
        ids = [np.unique(random.integers(0, ROWS, 60)), np.unique(random.integers(0, ROWS, 60))]
        ids[hot] = np.unique(np.minimum(random.zipf(1.1, 1000) - 1, ROWS - 1))
        offsets = torch.tensor([0, len(ids[0]), len(ids[0]) + len(ids[1])])
        traffic.add(torch.from_numpy(np.concatenate(ids)), offsets)


def choose(balancer, capacities, hot, step, batches=100):
    traffic = TrafficSample(2)
    record(traffic, hot, batches, step)
    return balancer.choose(capacities, capacities, traffic, step)


def test_memory_goes_where_the_traffic_is_and_stays_there():
    balancer = MemoryBalancer(TABLES, window=3, at_once=1)
    chosen = choose(balancer, EVEN, 0, 1000)
    assert chosen[0] > 1.5 * EVEN[0] and sum(chosen.values()) <= sum(EVEN.values())
    for step in range(2000, 6000, 1000):
        assert choose(balancer, chosen, 0, step) == {}
    moved = choose(balancer, chosen, 1, 7000)
    assert moved[1] > 1.5 * EVEN[1] and sum(moved.values()) <= sum(EVEN.values())
    words = describe_slot_changes(list(TABLES.values()), chosen, moved)
    assert (
        words.startswith("memory moves with the traffic: rows of ")
        and f"b {chosen[1]:,} ->" in words
    )


@pytest.mark.slow
def test_traffic_that_moves_every_time_costs_ever_fewer_changes():
    balancer, capacities, changes = MemoryBalancer(TABLES, window=3, at_once=1), EVEN, []
    for number in range(60):
        chosen = choose(balancer, capacities, number % 2, 1000 * (number + 1))
        if chosen:
            changes.append(number)
            capacities = chosen
    assert 2 <= len(changes) <= 8, changes
    gaps = np.diff(changes)
    assert gaps[-1] > 4 * gaps[0], changes
    # Once a change has paid off, the next one is not delayed.
    hot = int(np.argmin([capacities[0], capacities[1]]))
    steps = range(100_000, 200_000, 1000)
    settled = next(chosen for step in steps if (chosen := choose(balancer, capacities, hot, step)))
    assert choose(balancer, settled, hot, 201_000) == {}
    assert choose(balancer, settled, 1 - hot, 202_000)


def test_a_change_that_moves_more_than_it_saves_is_not_made():
    balancer = MemoryBalancer(TABLES, window=3, at_once=1)
    traffic = TrafficSample(2)
    record(traffic, 0, MIN_BATCHES, 0)
    assert balancer.choose(EVEN, EVEN, traffic, 1000) == {}
    assert traffic.num_batches == 0  # judged
    record(traffic, 0, MIN_BATCHES - 1, 0)
    assert balancer.choose(EVEN, EVEN, traffic, 1000) == {}
    assert (
        traffic.num_batches == MIN_BATCHES - 1
    )  # too few to judge: they count for the next commit
    assert choose(MemoryBalancer({0: TABLES[0]}, 3, 1), EVEN, 0, 1000) == {}
    # Nothing is resident yet: moving costs nothing.
    record(traffic, 0, 20, 0)
    assert balancer.choose(EVEN, {0: 0, 1: 0}, traffic, 1000)


def test_a_table_at_its_limit_leaves_the_memory_to_the_others():
    limit = EVEN[0] + 1000
    balancer = MemoryBalancer(TABLES, window=3, at_once=1, limits={0: limit, 1: ROWS})
    chosen = choose(balancer, EVEN, 0, 1000)
    assert chosen[0] == limit
    assert sum(EVEN.values()) - 2 <= sum(chosen.values()) <= sum(EVEN.values())
    assert choose(balancer, chosen, 0, 2000) == {}


def test_batches_that_need_more_than_predicted_leave_memory_as_it_is():
    tight = {0: 300, 1: 40}
    assert choose(MemoryBalancer(TABLES, window=3, at_once=1), tight, 0, 1000) == {}


def test_a_sample_is_bounded_and_spread_over_all_batches(monkeypatch):
    monkeypatch.setattr(traffic_module, "MAX_IDS", 1000)
    traffic = TrafficSample(2)
    for number in range(500):
        traffic.add(torch.full((20,), number), torch.tensor([0, 5, 20]))
    assert traffic.num_batches == 500
    batches = traffic.by_table()[1]
    numbers = [int(ids[0]) for ids in batches]
    assert all(len(ids) == 15 for ids in batches) and 25 <= len(batches) <= 50
    assert len(set(np.diff(numbers))) == 1 and numbers[-1] > 450
    traffic.clear()
    assert traffic.num_batches == 0 and traffic.num_sampled == 0


def test_a_sample_of_large_batches_is_enough_to_divide_memory_by(monkeypatch):
    monkeypatch.setattr(traffic_module, "MAX_IDS", 100)
    traffic = TrafficSample(2)
    record(traffic, 0, 100, 0)
    assert len(traffic.by_table()[0][0]) > 100
    assert MIN_BATCHES <= traffic.num_sampled <= 2 * MIN_BATCHES
    chosen = choose(MemoryBalancer(TABLES, window=3, at_once=1), EVEN, 0, 1000)
    assert chosen[0] > 1.5 * EVEN[0] and sum(chosen.values()) <= sum(EVEN.values())


def test_an_empty_table_has_a_demand():
    traffic, tables = TrafficSample(3), TABLES | {2: Table("c", 8)}
    for number in range(20):
        ids = torch.arange(number, number + 300)
        traffic.add(ids, torch.tensor([0, 300, 300, 300]))
    capacities = {0: 400, 1: 1000, 2: 1000}
    chosen = MemoryBalancer(tables, 3, 1).choose(
        capacities, dict.fromkeys(capacities, 0), traffic, 20
    )
    total = sum(rows * slot_bytes(tables[t]) for t, rows in chosen.items())
    assert total <= sum(rows * slot_bytes(tables[t]) for t, rows in capacities.items())


@pytest.mark.parametrize("count", [1, 5])
def test_a_description_names_the_tables_that_change_most(count):
    tables = [Table(f"t{t}", 8) for t in range(6)]
    after = {t: 100 - 10 * (count - t) if t < count else 100 for t in range(6)}
    words = describe_slot_changes(tables, dict.fromkeys(range(6), 100), after)
    assert ("and 1 other tables" in words) == (count == 5) and "t0 100 ->" in words
