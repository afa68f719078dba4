"""A run that times candidate plans at its start trains the bits of the plan that stays, and nothing else changes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import console_of, run_ranks

from colonnade import EmbeddingCollection, Plan, dense_state_dict
from colonnade.config.run import build_config, override_settings
from colonnade.errors import PeerLost
from colonnade.planning import choices, planner, timing
from colonnade.planning.measure import measure_device
from colonnade.run.run import open_run

STEPS = 20
QUICK = {"scratch_bytes": 8 << 20, "seconds": 0.003, "widths": (16,)}
"""Short measurement of the disk and the processor."""
CONFIG = build_config(
    {
        "data": {
            "name": "synthetic",
            "options": {"num_train": 32 * (STEPS + 6), "num_test": 200, "seed": 3},
        },
        "model": {"name": "fm", "dim": 4},
        "plan": {"exchange": "auto", "sharding": "auto"},
        "train": {"batch_size": 32, "checkpoint_steps": 8, "evaluate_steps": 0},
    }
)
COUNTED = ("route", "fetch", "push", "dense")
"""Channels on which only training sends."""
SLOW_SECONDS = 0.15
"""Seconds that a step of the planner's choice takes at least while it is timed."""
forward = EmbeddingCollection.forward


def is_planned_choice(plan: Plan) -> bool:
    """Return whether a plan is the planner's choice, and not measured yet."""
    return plan.comparison is not None and plan.comparison.plans[0].measured_seconds is None


def slow_forward(collection, batch):
    if is_planned_choice(collection.plan):
        time.sleep(SLOW_SECONDS)
    return forward(collection, batch)


def refuse_timing(*_, **__):
    raise AssertionError("plans were timed")


@contextmanager
def quick_planning():
    """Time short turns in short runs, and neither links nor disks for long."""
    with (
        patch.object(timing, "MAX_SECONDS", 0.3),
        patch.object(timing, "MIN_RUN_STEPS", 0),
        patch.object(planner, "measure_links", lambda mesh: mesh.world),
        patch.object(planner, "measure_device", partial(measure_device, **QUICK)),
    ):
        yield


def train(mesh, folder, settings, *, slow=False, timed=True):
    """Train, and return this rank's bits, bytes sent, and plan."""
    config = override_settings(CONFIG, settings)
    before = {name: mesh.traffic.bytes_of(name) for name in COUNTED}
    with (
        quick_planning(),
        patch.object(EmbeddingCollection, "forward", slow_forward if slow else forward),
        patch.object(
            timing,
            "keep_fastest_plan",
            timing.keep_fastest_plan if timed else refuse_timing,
        ),
    ):
        run = open_run(config, mesh, Path(folder), console=console_of(mesh))
    try:
        random_state = torch.get_rng_state()
        outcome = run.train()
        sent = {name: mesh.traffic.bytes_of(name) - before[name] for name in COUNTED}
        collection = run.trainer.collection
        rows = {}
        for table in collection.tables:
            for block in collection.scan(table.name):
                for row_id, weights in zip(block.ids.tolist(), block.weights, strict=True):
                    rows[table.name, row_id] = weights.numpy().tobytes()
        dense = {n: v.numpy().tobytes() for n, v in dense_state_dict(run.trainer.model).items()}
        bits = rows, dense, outcome.metrics, random_state.numpy().tobytes(), sent
        return bits, collection.plan.to_json()
    finally:
        run.close()


def force(plan_text: str) -> dict:
    """Return settings that name every sharding and exchange of a plan."""
    tables = Plan.from_json(plan_text).tables
    return {
        "plan.tables": {
            table.name: {"sharding": table.sharding.to_dict()}
            | ({} if table.sharding.is_replicated else {"exchange": table.exchange})
            for table in tables
        }
    }


def train_all(mesh, folder):
    chosen = train(mesh, f"{folder}/chosen", {}, slow=True)
    forced = train(mesh, f"{folder}/forced", force(chosen[1]), timed=False)
    train(mesh, f"{folder}/resumed", {"train.max_steps": STEPS}, slow=True)
    resumed = train(mesh, f"{folder}/resumed", {}, timed=False)
    plan_of_resumed = Plan.from_json(resumed[1])
    whole = train(mesh, f"{folder}/whole", force(resumed[1]), timed=False)
    return chosen, forced, resumed[0][:3], whole[0][:3], plan_of_resumed.comparison


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_run_has_the_bits_of_the_plan_that_stays(num_ranks, tmp_path):
    everyone = run_ranks(num_ranks, train_all, str(tmp_path))
    for chosen, forced, resumed, whole, comparison in everyone:
        assert chosen[0] == forced[0]  # timed steps left no bytes in the run's counts
        assert resumed[:2] == whole[:2] and resumed[2] == whole[2]
        plan = Plan.from_json(chosen[1])
        assert plan.comparison.chosen != 0  # the planner's choice was made slow
        stayed = plan.comparison.plans[plan.comparison.chosen]
        assert stayed.exchanges == plan.describe_exchanges()
        measured = [p.measured_seconds for p in plan.comparison.plans if p.measured_seconds]
        assert stayed.measured_seconds == min(measured) and len(measured) > 1
        assert plan.comparison.plans[0].measured_seconds > SLOW_SECONDS
        assert Plan.from_json(forced[1]).comparison is None
        assert comparison.chosen != 0 and comparison.plans[0].measured_seconds > SLOW_SECONDS
    written = Plan.from_json((tmp_path / "chosen" / "plan.json").read_text())
    assert written == Plan.from_json(everyone[0][0][1])
    assert not list(tmp_path.rglob(".timing*"))


OTHER_SETTINGS = {
    "in files": {"plan.memory.dram": "150KiB", "plan.staleness_steps": 1},
    "servers": {"plan.servers": 1, "train.accumulate": 2, "plan.codec.dense": "int8"},
    "hot rows": {"plan.tables": {"C3": {"replicated_rows": 20}}, "plan.sharding": "row_wise"},
}


def train_other(mesh, folder, name):
    with patch.object(choices, "NUM_RUNNERS_UP", 2):
        settings = {**OTHER_SETTINGS[name], "train.checkpoint_steps": 0}
        return train(mesh, f"{folder}/run", settings, slow=True)[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "in files" else pytest.mark.slow)
        for name in OTHER_SETTINGS
    ],
)
def test_files_servers_and_hot_rows_are_timed_alike(name, tmp_path):
    everyone = run_ranks(3, train_other, str(tmp_path), name)
    assert everyone[0] == everyone[1] == everyone[2]
    comparison = Plan.from_json(everyone[0]).comparison
    assert comparison.chosen != 0 and comparison.plans[0].measured_seconds > SLOW_SECONDS
    assert not list(tmp_path.rglob(".timing*"))


def fail_alone(mesh, folder):
    def failing_forward(collection, batch):
        if mesh.rank == 1:
            raise RuntimeError("memory of rank 1 is full")
        return forward(collection, batch)

    began = time.monotonic()
    with quick_planning(), patch.object(EmbeddingCollection, "forward", failing_forward):
        try:
            open_run(CONFIG, mesh, Path(folder), console=console_of(mesh))
        except (RuntimeError, PeerLost) as error:
            if mesh.rank == 1:
                mesh.peer_monitor.announce_end(str(error))  # as its process would end
            return type(error).__name__, str(error), time.monotonic() - began
    return None


@pytest.mark.slow
def test_a_rank_that_fails_while_plans_are_timed_ends_the_others(tmp_path):
    # A planner's micro benchmark runs on rank 0 alone, which does not fail.
    first, second = run_ranks(2, fail_alone, str(tmp_path / "run"), fresh=True)
    assert second[0] == "RuntimeError"
    assert first[0] == "PeerLost" and "memory of rank 1 is full" in first[1]
    assert first[2] < 60
    assert not list(tmp_path.rglob("plan.json"))
