"""Predictions of a plan follow from measurements, by arithmetic that a person can do."""

from __future__ import annotations

import pytest

from colonnade import Table
from colonnade.plan.cost.memory import MemoryDemand, TableMemory
from colonnade.plan.cost.prediction import (
    AMPLIFICATION,
    LinkCosts,
    MeasuredCosts,
    PredictedRun,
    StepCosts,
    choose_lookahead_depth,
    predict_speed,
)
from colonnade.plan.measure.device import PAGE, Device, DirectoryRate

TABLE = Table("t", 16, rows=1000)  # record 76 bytes, framed 16 + 80
DEMAND = MemoryDemand("t", 92, 10, 1000, (0.0, 1000.0), (50.0, 0.0), 100.0, 4.0)


def device(pages: float, latency: float = 1e-4) -> Device:
    return Device(2, (), (DirectoryRate("/d", True, 1e9, "ring", pages, latency, 1e-6),))


def foretell(rows=500, *, step=1e-3, moved=1e-6, pages=1e6, **settings):
    placed = [TableMemory("t", rows, DEMAND.reads_at(rows))]
    costs = StepCosts(step_seconds=step, first_use_seconds=2e-6, moved_seconds=moved)
    links = settings.pop("links", None) or LinkCosts()
    run = PredictedRun(**{"batch_size": 200, "num_batches": 100, **settings})
    measured = MeasuredCosts(costs, device(pages), links)
    return predict_speed([TABLE], [DEMAND], placed, [2.0], measured, run)


def test_all_in_memory_takes_the_steps_own_time():
    result = foretell(1000)
    assert result.processor_seconds == pytest.approx(1e-3 + 4 * 2e-6)
    assert result.samples_per_second == result.all_in_memory == pytest.approx(200 / (1e-3 + 8e-6))
    assert result.hit_rate == 1 and result.limit == "processor: the model itself"
    assert result.written_per_second == 0


def test_reads_and_evictions_take_the_processors_time():
    result = foretell(500)
    moved = (
        25 + 25 + 4 - 5
    )  # reads, and evictions: what comes goes, but for the slots that were free
    assert result.processor_seconds == pytest.approx(1e-3 + 8e-6 + moved * 1e-6)
    assert result.reads_per_sample == pytest.approx(25 / 200)
    assert result.hit_rate == pytest.approx(0.75)
    (table,) = result.tables
    assert table.bytes_per_sample == pytest.approx(2 * 64 + 2 * 100 / 200 * 76)
    assert foretell(500, moved=1e-4).limit.startswith("processor, 83% of it moving")


def test_a_slow_disk_limits():
    result = foretell(500, pages=1000)
    assert result.limit == "random reads of the disk"
    written = (25 + 4 - 5) * 88 * AMPLIFICATION
    seconds = 25 * (1 + 87 / PAGE) / 1000 + written / 1e9
    assert result.samples_per_second == pytest.approx(200 / seconds)
    assert result.device_seconds == pytest.approx(seconds)


def test_a_write_budget_limits():
    result = foretell(500, write_budget=1000)
    assert result.limit == "the write budget"
    assert result.written_per_second == pytest.approx(1000)


def test_ranks_work_side_by_side():
    one, two = foretell(500), foretell(500, num_ranks=2)
    assert two.samples_per_second == one.samples_per_second
    assert two.reads_per_sample == 2 * one.reads_per_sample  # of half the samples


def test_lookahead_is_as_deep_as_reads_are_slow():
    placed, costs = [TableMemory("t", 500, 25.0)], StepCosts(step_seconds=1e-3)
    assert choose_lookahead_depth(placed, costs, None) == 2
    assert choose_lookahead_depth([TableMemory("t", 1000, 0.0)], costs, device(1e6)) == 2
    assert choose_lookahead_depth(placed, costs, device(1e6)) == 3
    assert (
        choose_lookahead_depth(placed, costs, device(25 / 4e-3)) == 7
    )  # four steps of reads and a little
    assert choose_lookahead_depth(placed, costs, device(1.0)) == 64
    assert choose_lookahead_depth(placed, costs, device(1.0), 5) == 5
