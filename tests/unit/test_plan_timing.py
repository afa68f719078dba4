"""Candidate plans of a run: a bounded time measures them, and the fastest stays."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from colonnade import PlanConfig, Table, build_plan, row_wise, table_wise
from colonnade.comm.mesh import Mesh
from colonnade.plan.comparison import (
    ComparedPlan,
    PlanComparison,
    describe_exchanges,
    order_plans_to_time,
)
from colonnade.plan.plan import Plan
from colonnade.planning import timing
from colonnade.planning.planner import fix_choices, read_recorded_plan
from colonnade.planning.timing import choose_plan, count_plans_to_time, time_in_turns
from colonnade.topology.world import World

WORLD = World(ranks_per_host=2)
TABLES = [Table("item", 4, rows=50), Table("user", 4, rows=50)]
AUTO = PlanConfig(exchange="auto", sharding="auto")
COMPARED = PlanComparison(
    (ComparedPlan("rows row_wise", 0.01, 0.03), ComparedPlan("pooled table_wise", 0.012, 0.02)), 1
)


@pytest.mark.parametrize(
    ("predicted", "run_steps", "count"),
    [
        ([0.01, 0.012, 0.019], None, 3),
        ([0.01, 0.012, 0.021], None, 2),  # further off than predictions are wrong
        ([0.01, 0.03], None, 0),  # one candidate
        ([0.01], None, 0),
        ([0.01, 0.012], timing.MIN_RUN_STEPS - 1, 0),
        ([0.01, 0.012], timing.MIN_RUN_STEPS, 2),
        ([0.3, 0.35, 0.4], None, 2),  # slow steps: two take 8 s
        ([2.0, 2.0], None, 0),
        ([2.0, 2.0], 10_000, 2),  # of hours, half a minute
    ],
)
def test_plans_are_timed_where_it_can_matter(predicted, run_steps, count):
    assert count_plans_to_time(predicted, run_steps) == count


@pytest.mark.parametrize(
    ("exchanges", "seconds", "order"),
    [
        ("rrrpx", [0.17, 0.171, 0.172, 0.18, 0.2], [0, 3, 4, 1, 2]),
        ("rpprx", [0.17, 0.2, 0.19, 0.18, 0.5], [0, 2, 3, 1, 4]),  # x is too far behind
        ("rr", [0.2, 0.1], [0, 1]),  # by a later prediction
        ("r", [0.1], [0]),
    ],
)
def test_each_exchange_is_timed_before_variants_of_one(exchanges, seconds, order):
    assert order_plans_to_time([[name, name, "other"] for name in exchanges], seconds) == order


class Clock:
    """Candidates whose steps take the seconds that are given, and that count their steps."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.steps, self.turns = seconds, [0] * len(seconds), []

    def candidates(self):
        def train(number):
            def steps_of(warm_up, steps, start):
                start()
                self.steps[number] += warm_up + steps
                self.turns.append(number)
                return steps * self.seconds[number]

            return steps_of

        return [train(number) for number in range(len(self.seconds))]

    @property
    def total(self) -> float:
        return sum(n * s for n, s in zip(self.steps, self.seconds, strict=True))


def test_candidates_take_turns_and_hopeless_ones_get_no_third():
    clock = Clock(0.030, 0.028, 0.2)
    assert time_in_turns(clock.candidates(), Mesh()) == pytest.approx([0.030, 0.028, 0.2])
    assert clock.turns == [0, 1, 2, 0, 1, 2, *[0, 1] * timing.NUM_TURNS]
    assert clock.total < 2 * timing.MAX_SECONDS


def test_an_excluded_candidate_stays_behind_on_a_machine_that_slows_down():
    clock = Clock(0.030, 0.028, 0.2)
    turns = [
        lambda *steps, train=train: (10 if len(clock.turns) >= 6 else 1) * train(*steps)
        for train in clock.candidates()
    ]
    assert time_in_turns(turns, Mesh()) == pytest.approx([0.30, 0.28, 2.0])


def test_plans_with_mapped_memory_are_not_timed():
    """Every copy would reserve the files anew."""
    compared = [SimpleNamespace(predicted_seconds=0.01)] * 2
    comparison = SimpleNamespace(plans=compared)
    plan = SimpleNamespace(comparison=comparison, hbm_bytes=None, mapped=object())
    assert choose_plan(SimpleNamespace(console=None), [plan, plan], None) is plan


@pytest.mark.parametrize("seconds", [1e-5, 0.1, 0.4, 3.0])
def test_time_and_steps_are_bounded(seconds):
    clock = Clock(seconds, 1.1 * seconds)
    time_in_turns(clock.candidates(), Mesh())
    fewest = timing.FEWEST_STEPS * 2.1 * seconds
    assert clock.total <= timing.MAX_SECONDS * 1.2 + 3 * fewest
    longest = timing.MAX_TURN_STEPS + timing.WARM_UP_STEPS
    assert max(clock.steps) <= (timing.NUM_TURNS + 2) * longest


def test_one_hopeful_candidate_needs_no_third_turn():
    clock = Clock(0.01, 0.02)
    time_in_turns(clock.candidates(), Mesh())
    assert clock.turns == [0, 1, 0, 1]


def test_a_comparison_says_what_was_measured_and_what_was_predicted():
    first, *others = COMPARED.describe()
    assert first == (
        "plan: pooled table_wise, measured the fastest, though another one was predicted faster"
    )
    assert others[0] == "  rows row_wise: measured 30 ms a step, predicted 10 ms"
    only = PlanComparison((ComparedPlan("rows row_wise", 0.01),))
    assert only.describe() == ["plan: rows row_wise, by prediction"]
    options = [("rows", "row_wise"), ("replicated", "replicated"), ("rows", "row_wise")]
    assert describe_exchanges(options) == "rows row_wise (2 tables), replicated (1 tables)"


def recorded_in(folder, **changes) -> Plan:
    settings = {
        "item": {"sharding": row_wise(2), "exchange": "rows"},
        "user": {"sharding": table_wise(1), "exchange": "pooled"},
    }
    plan = build_plan(TABLES, WORLD, PlanConfig(tables=settings))
    plan = replace(plan, comparison=COMPARED, **changes)
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    return plan


def test_a_recorded_choice_is_kept_where_it_fits(tmp_path):
    plan = recorded_in(tmp_path)
    assert read_recorded_plan(tmp_path, TABLES, WORLD, AUTO) == plan
    fixed = build_plan(TABLES, WORLD, fix_choices(AUTO, plan))
    assert fixed.tables == plan.tables
    own = {"exchange": "pooled", "ranks": [1], "sharding": "table_wise"}
    agreeing = PlanConfig(exchange="auto", sharding="auto", tables={"user": own})
    assert read_recorded_plan(tmp_path, TABLES, WORLD, agreeing) == plan


@pytest.mark.parametrize(
    ("world", "tables", "config"),
    [
        (World(ranks_per_host=4), TABLES, AUTO),
        (WORLD, TABLES[:1], AUTO),
        (WORLD, TABLES, PlanConfig(exchange="rows", sharding="auto")),
        (WORLD, TABLES, PlanConfig(exchange="auto", sharding="row_wise")),
        (
            WORLD,
            TABLES,
            PlanConfig(
                exchange="auto",
                sharding="auto",
                tables={"user": {"sharding": "table_wise", "ranks": [0]}},
            ),
        ),
        (WORLD, TABLES, PlanConfig(exchange="auto", sharding="auto", towers=2)),
    ],
)
def test_a_recorded_choice_of_other_settings_is_not_kept(world, tables, config, tmp_path):
    recorded_in(tmp_path)
    assert read_recorded_plan(tmp_path, tables, world, config) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("comparison"),
        lambda values: values["comparison"].update(chosen=2),
        lambda values: values["comparison"].update(plans=3),
        lambda values: values["comparison"]["plans"][0].update(unknown=1),
        lambda values: values["tables"][0].pop("sharding"),
    ],
)
def test_a_damaged_or_forced_record_is_not_kept(damage, tmp_path):
    recorded_in(tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    damage(values)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert read_recorded_plan(tmp_path, TABLES, WORLD, AUTO) is None
    (tmp_path / "plan.json").write_text("{torn")
    assert read_recorded_plan(tmp_path, TABLES, WORLD, AUTO) is None
    assert read_recorded_plan(None, TABLES, WORLD, AUTO) is None
