"""Any memory budget, lookahead depth and number of threads gives the bits of all rows in memory."""

from __future__ import annotations

import re
import signal

import numpy as np
import pytest
import torch
from forked_run import finish, run_to_end, start
from rich.console import Console
from scenario import STAYS, assert_same_bits, tables, train
from small_run import CONFIG, digest

from colonnade import Mesh, PlanConfig, _native, build_plan
from colonnade.config.run import build_config, override_settings
from colonnade.errors import BudgetExceeded
from colonnade.plan.placement import MemoryBalancer
from colonnade.run.run import open_run
from colonnade.store.budget import slot_bytes

BUDGETS = [None, 1 << 20, 60_000, 30_000]
SIZES = [23, 1, 0, 37, 23, 23, 2, 23]


@pytest.fixture(scope="module", params=["float32", "float64"])
def all_in_memory(request):
    return request.param, train(Mesh(), sizes=SIZES, dtype=request.param)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize("dram_bytes", BUDGETS)
def test_budget_and_lookahead(all_in_memory, dram_bytes, lookahead, tmp_path):
    dtype, wanted = all_in_memory
    result = train(
        Mesh(),
        sizes=SIZES,
        dtype=dtype,
        dram_bytes=dram_bytes,
        lookahead=lookahead,
        folder=tmp_path,
        evaluate_every=3,
    )
    assert_same_bits(wanted, result)


def test_the_smallest_budget_above_does_evict():
    """Otherwise the test above tests nothing."""
    plan = build_plan(tables(), 1, PlanConfig(memory={"dram": BUDGETS[-1]}))
    assert any(table.capacity_rows < 100 for table in plan.tables)
    assert plan.needs_backing


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(all_in_memory, threads):
    dtype, wanted = all_in_memory
    before = _native.num_threads()
    _native.set_num_threads(threads)
    try:
        assert_same_bits(wanted, train(Mesh(), sizes=SIZES, dtype=dtype))
    finally:
        _native.set_num_threads(before)


@pytest.mark.parametrize("staleness", [1, 3])
def test_budget_under_staleness(staleness, tmp_path):
    wanted = train(Mesh(), sizes=SIZES, staleness=staleness)
    result = train(
        Mesh(), sizes=SIZES, staleness=staleness, dram_bytes=100_000, folder=tmp_path, lookahead=1
    )
    assert_same_bits(wanted, result)


@pytest.mark.parametrize("stays", list(STAYS))
@pytest.mark.parametrize("staleness", [0, 2])
def test_budget_and_lookahead_where_rows_come_and_go(stays, staleness, tmp_path):
    settings = {"sizes": SIZES, "stays": stays, "staleness": staleness}
    wanted = train(Mesh(), **settings)
    for number, (dram_bytes, lookahead) in enumerate([(30_000, 0), (60_000, 5), (None, 1)]):
        if staleness and dram_bytes == 30_000:
            dram_bytes = 100_000
        result = train(
            Mesh(),
            dram_bytes=dram_bytes,
            lookahead=lookahead,
            folder=tmp_path / str(number),
            evaluate_every=2,
            **settings,
        )
        assert_same_bits(wanted, result)
    other = train(Mesh(), sizes=SIZES, staleness=staleness)
    assert not torch.equal(other.rows["item"], wanted.rows["item"])  # rows did come and go


def test_a_budget_below_one_batch_is_refused_and_names_the_table(tmp_path):
    with pytest.raises(BudgetExceeded, match=r"'user'.* budget holds \d+ ") as caught:
        train(Mesh(), sizes=[200], dram_bytes=2_000, folder=tmp_path)
    # Nothing is in flight: what cannot help is not advised.
    message = str(caught.value)
    assert (
        "lower the batch size" in message
        and "lookahead" not in message
        and "in flight" not in message
    )
    result = re.search(
        r"needs (\d+) rows .* holds (\d+) \(([\d,]+) bytes\).* needs ([\d,]+) bytes", message
    )
    needed, stored, held_bytes, bytes_that_do = (int(n.replace(",", "")) for n in result.groups())
    assert bytes_that_do * stored == held_bytes * needed


def test_different_seeds_differ():
    """The comparison can fail: another number of steps is another model."""
    one, other = train(Mesh(), steps=2), train(Mesh(), steps=3)
    assert not torch.equal(one.rows["user"], other.rows["user"])


@pytest.fixture
def moving(monkeypatch):
    """Move memory between tables at every commit, to another division; return the steps."""
    moves = []

    def choose(balancer, capacities, num_resident, traffic, step):
        budget = sum(rows * slot_bytes(balancer.tables[t]) for t, rows in capacities.items())
        parts = np.random.default_rng(step).dirichlet([1.0] * len(capacities))
        sizes = {t: slot_bytes(balancer.tables[t]) for t in capacities}
        free = budget - sum(ROWS_OF_A_BATCH * size for size in sizes.values())
        moves.append(step)
        assert all(balancer.limits[t] >= rows for t, rows in capacities.items())
        return {
            t: ROWS_OF_A_BATCH + int(part * free) // sizes[t]
            for t, part in zip(capacities, parts, strict=True)
        }

    monkeypatch.setattr(MemoryBalancer, "choose", choose)
    return moves


ROWS_OF_A_BATCH = 100
MOVING = {"plan.memory.dram": 60_000, "train.checkpoint_steps": 3}


@pytest.mark.parametrize(
    ("hints", "level"),
    [
        pytest.param(False, 0, marks=pytest.mark.slow),
        pytest.param(True, 0, marks=pytest.mark.slow),
        (False, 20_000),
    ],
)
def test_memory_that_moves_at_every_commit(hints, level, tmp_path, moving):
    """The bits are those of all rows in memory, and of a run that is killed anywhere and resumes. level: bytes of
    mapped memory for evicted rows."""
    run_to_end(tmp_path / "all", {"train.checkpoint_steps": 3})
    wanted = digest(tmp_path / "all")
    mapped = f"{tmp_path}/mapped:{level}" if level else None
    settings = MOVING | {"data.next_use_hints": hints, "plan.memory.mapped": mapped}
    config = override_settings(build_config(CONFIG), settings)
    with (tmp_path / "log").open("w") as log:
        run = open_run(config, Mesh(), tmp_path / "here", console=Console(file=log, width=200))
        try:
            run.train()
        finally:
            run.close()
    assert digest(tmp_path / "here") == wanted
    assert len(moving) >= 8
    assert (tmp_path / "log").read_text().count("memory moves with the traffic") >= 8
    for kill_at in (60, 150):
        folder = tmp_path / f"killed at {kill_at}"
        (child,) = children = start(folder, settings, kill_at=kill_at)
        finish(children)
        assert child.code == -signal.SIGKILL
        run_to_end(folder, settings)
        assert digest(folder) == wanted
