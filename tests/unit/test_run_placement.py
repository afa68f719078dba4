"""Placement by profile is the default: bits of an even division, a stored profile, and what a run does without one."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest
import torch
from own_model import Net, columns
from ranks import run_ranks
from rich.console import Console

from colonnade import SGD, PlanConfig, Table, build_plan, fit
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import MemoryConfig
from colonnade.config.run import build_config, override_settings
from colonnade.data import open_batches, open_tensors
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.plan.cost.demands import predict_demands
from colonnade.plan.measure.profile import Profile, RunBatches, profile_ids
from colonnade.plan.placement import forecast_batches, is_memory_limited, place_rows
from colonnade.planning import placement, planner
from colonnade.planning.placement import PROFILE_FILE, broadcast_plan_message, read_profile
from colonnade.run.run import open_run
from colonnade.store.budget import slot_bytes
from colonnade.topology.sharding import column_wise
from colonnade.topology.world import World

CONFIG = build_config(
    {
        "data": {"name": "synthetic", "options": {"num_train": 2000, "num_test": 500, "seed": 3}},
        "model": {"name": "dlrm", "dim": 4, "bottom": [8], "top": [8]},
        "plan": {"memory": {"dram": "220KiB"}},
        "train": {"batch_size": 50, "epochs": 1},
    }
)


def train(config, folder, console=None):
    run = open_run(config, Mesh(), folder, console=console or Console(quiet=True))
    try:
        run.train()
        summary = run.summary
        collection = run.trainer.collection
        rows = [collection.rows(table.name, torch.arange(3)) for table in collection.tables]
        return summary, collection.plan, rows
    finally:
        run.close()


@pytest.fixture
def unmeasured(monkeypatch):
    """Placement times neither the disk nor the model."""
    for name in ("measure_device", "run_micro_benchmark", "plan_on_rank_0"):
        monkeypatch.setattr(planner, name, lambda *_, **__: pytest.fail("measured"))


def test_the_default_is_placed_by_a_profile_and_gives_the_bits_of_an_even_division(
    tmp_path, unmeasured
):
    summary, plan, rows = train(CONFIG, tmp_path / "run")
    other, even, even_rows = train(
        override_settings(CONFIG, {"plan.placement": "even"}), tmp_path / "even"
    )
    assert plan.placement == "profiled" and even.placement == "even"
    assert [t.capacity_rows for t in plan.tables] != [t.capacity_rows for t in even.tables]
    assert summary["metrics"] == other["metrics"]
    assert all(torch.equal(a, b) for a, b in zip(rows, even_rows, strict=True))
    assert not (tmp_path / "even" / PROFILE_FILE).exists()


def test_rows_that_all_fit_are_not_profiled(tmp_path, unmeasured, monkeypatch):
    monkeypatch.setattr(placement, "read_sample_batches", lambda *_, **__: pytest.fail("read"))
    for limit in (None, "1GiB"):
        _, plan, _ = train(
            override_settings(CONFIG, {"plan.memory.dram": limit, "train.max_steps": 1}),
            tmp_path / str(limit),
        )
        assert plan.placement == "even" and not (tmp_path / str(limit) / PROFILE_FILE).exists()


def test_a_resumed_run_uses_the_stored_profile(tmp_path, unmeasured, monkeypatch):
    train(override_settings(CONFIG, {"train.max_steps": 20}), tmp_path)
    monkeypatch.setattr(placement, "read_sample_batches", lambda *_, **__: pytest.fail("read"))
    _, plan, _ = train(CONFIG, tmp_path)
    assert plan.placement == "profiled"
    # Other budgets are placed by the same profile.
    _, plan, _ = train(
        override_settings(CONFIG, {"plan.memory.dram": "300KiB", "train.epochs": 2}), tmp_path
    )
    assert sum(table.capacity_rows for table in plan.tables) > 0 and plan.placement == "profiled"


@pytest.mark.parametrize("harm", ["other tables", "more rows", "uneven lists", "torn", "empty"])
def test_a_profile_of_another_model_is_ignored_by_name(harm, tmp_path, unmeasured):
    train(override_settings(CONFIG, {"train.max_steps": 20}), tmp_path)
    path = tmp_path / PROFILE_FILE
    values = json.loads(path.read_text())
    if harm == "other tables":
        values["tables"][0]["name"] = "elsewhere"
    elif harm == "more rows":
        values["tables"][0]["spectrum"] = [[1], [10**9]]
    elif harm == "uneven lists":
        values["tables"][0]["spectrum"] = [[1, 2], [3]]
    elif harm == "empty":
        values["samples"] = 0
    path.write_text("{torn" if harm == "torn" else json.dumps(values))
    with (tmp_path / "log").open("w") as log:
        _, plan, _ = train(CONFIG, tmp_path, Console(file=log, width=500))
    words = (tmp_path / "log").read_text()
    assert "profile.json is ignored, and the data profiled anew" in words
    assert ("elsewhere" in words) == (harm == "other tables")
    assert plan.placement == "profiled"
    tables = [Table(t.name, 4, rows=10**6) for t in plan.tables]
    assert read_profile(tmp_path, tables, values["digest"])[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model.dim": 8},
        {"data.options": {"num_train": 2000, "num_test": 500, "seed": 4}},
        {"data.options": {"num_train": 1000, "num_test": 500, "seed": 3}},
        {},
    ],
    ids=["other dimensions", "other data", "fewer samples", "the same"],
)
def test_a_profile_of_tables_of_the_same_names_is_used_only_for_the_same_data(
    changes, tmp_path, unmeasured
):
    train(override_settings(CONFIG, {"train.max_steps": 2}), tmp_path / "one")
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads((tmp_path / "one" / PROFILE_FILE).read_text())
    (other / PROFILE_FILE).write_text(json.dumps(content))
    with (tmp_path / "log").open("w") as log:
        console = Console(file=log, width=500)
        train(override_settings(CONFIG, {"train.max_steps": 2, **changes}), other, console)
    is_ignored = (
        "profile.json is ignored, and the data profiled anew: it is of tables of the same"
        in (tmp_path / "log").read_text()
    )
    assert is_ignored == bool(changes)
    assert (json.loads((other / PROFILE_FILE).read_text()) != content) == bool(changes)
    # A profile without a digest is of unknown data.
    del content["digest"]
    (other / PROFILE_FILE).write_text(json.dumps(content))
    tables = [Table(stats["name"], 4, rows=10**6) for stats in content["tables"]]
    profile, note = read_profile(other, tables, "another")
    assert profile is None and "of other data" in note


def test_a_data_set_that_may_count_its_batches_is_not_read_for_a_sample(tmp_path, capsys):
    source = open_tensors(**columns(400))
    epochs = []

    def read(epoch):
        epochs.append(epoch)
        return source.batches(64)

    fit(Net(), open_batches(read, source.schema), run=tmp_path, dram="30KiB", batch_size=64)
    assert epochs == [0]
    output = " ".join(capsys.readouterr().out.split())
    assert "a data set of your own may not be read twice" in output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["placement"] == "profiled"  # by the traffic, from the first checkpoint on


def test_a_batch_that_cannot_fit_is_refused_before_anything_is_written(tmp_path, unmeasured):
    config = override_settings(CONFIG, {"plan.memory.dram": "20KiB"})
    with pytest.raises(BudgetExceeded, match=r"plan.memory.dram: got 20,480 bytes"):
        open_run(config, Mesh(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:looking 2 batches ahead")
def test_a_batch_that_cannot_fit_trains_with_its_tables_in_mapped_memory(tmp_path, unmeasured):
    mapped = {"plan.memory.mapped": f"{tmp_path}/mapped:4MiB", "train.max_steps": 3}
    config = override_settings(CONFIG, {"plan.memory.dram": "20KiB", **mapped})
    summary, plan, _ = train(config, tmp_path / "run")
    assert summary["steps"] == 3 and plan.placement == "profiled"
    assert {table.tier for table in plan.tables} == {"dram", "mapped"}
    tiers, sources = summary["tiers"], summary["row_sources"]
    assert list(tiers) == ["dram", "mapped", "ssd"]
    assert tiers["mapped"]["hits"] == sources["mapped"] > 0
    assert tiers["dram"]["hits"] == sources["resident"] > 0
    assert tiers["mapped"]["held_bytes"] > 0
    assert tiers["dram"]["held_bytes"] == summary["resident_bytes"]


ROWS = 4000


def hot_and_cold() -> tuple[list[Table], Profile]:
    """Two tables of one size: one with skewed lookups, one with 1/16 as many, evenly spread."""
    tables = [
        Table("hot", 8, rows=ROWS, optimizer=SGD(lr=0.1)),
        Table("cold", 8, rows=ROWS, optimizer=SGD(lr=0.1)),
    ]
    generator = np.random.default_rng(0)
    hot = np.minimum(generator.zipf(1.2, 16_000) - 1, ROWS - 1)
    cold = generator.integers(0, ROWS, 1000)
    profiles = tuple(
        profile_ids(table.name, ids, 100.0) for table, ids in zip(tables, (hot, cold), strict=True)
    )
    return tables, Profile(1000, 10, profiles, 100)


def place(tables, profile, memory, plan=None):
    plan = plan or build_plan(tables, 1, PlanConfig(memory=memory))
    batches = forecast_batches(plan, batch_size=100, num_samples=None, last_batch=100_000)
    return place_rows(plan, tables, profile, batches, MemoryConfig(**memory).tables)


def test_memory_goes_to_the_hot_table_in_main_and_device_memory():
    tables, profile = hot_and_cold()
    dram = 2 * ROWS * slot_bytes(tables[0]) // 4
    hbm = 2 * ROWS * tables[0].record_bytes // 8
    plan = place(tables, profile, {"dram": dram, "hbm": hbm})
    hot, cold = plan.tables
    assert hot.capacity_rows > 2 * cold.capacity_rows and hot.hbm_rows > 2 * cold.hbm_rows
    assert sum(t.capacity_rows for t in plan.tables) * slot_bytes(tables[0]) <= dram
    assert (hot.hbm_rows + cold.hbm_rows) * tables[0].record_bytes <= hbm
    # Everything fits in main memory: the device's is divided all the same.
    plan = place(tables, profile, {"hbm": hbm})
    assert plan.tables[0].hbm_rows == hot.hbm_rows and not plan.needs_backing
    with pytest.raises(BudgetExceeded, match=r"plan.memory.hbm: got 2,000 bytes"):
        place(tables, profile, {"hbm": 2000})


def place_late(tier: str, late: int, num_bytes: int) -> None:
    """Place rows of batches of 100 rows of each table, in a budget of one tier, with reads that are late."""
    tables, profile = hot_and_cold()
    profile = replace(profile, tables=tuple(replace(t, most_unique=100) for t in profile.tables))
    memory = {tier: num_bytes}
    config = PlanConfig(memory=memory, staleness_steps=late)
    place(tables, profile, memory, build_plan(tables, 1, config))


def find_least_bytes(tier: str, late: int) -> int:
    """Return the smallest budget of a tier that holds the batches which must be in memory at once."""

    def fits(num_bytes: int) -> bool:
        try:
            place_late(tier, late, num_bytes)
        except BudgetExceeded:
            return False
        return True

    return bisect_left(range(1 << 20), True, key=fits)


@pytest.mark.parametrize("tier", ["dram", "hbm"])
def test_steps_that_reads_are_late_are_batches_in_memory(tier):
    least = find_least_bytes(tier, 4)
    assert least > 1.5 * find_least_bytes(tier, 0)
    message = rf"plan.memory.{tier}: got .* for the 5 batches that are read before an update"
    with pytest.raises(BudgetExceeded, match=message):
        place_late(tier, 4, least - 1)


@pytest.mark.parametrize("late", [0, 1, 4])
def test_all_batches_in_flight_have_room_first(late):
    """Batches that are prefetched, the one that is trained, and one for each step that reads are late."""
    tables, profile = hot_and_cold()
    demands = predict_demands(
        tables,
        profile,
        RunBatches(batch_size=100, window=3 + 1 + late, at_once=1 + late, last_batch=100_000),
    )
    rows = [demand.window_rows for demand in demands]
    dram = sum(count * slot_bytes(table) for count, table in zip(rows, tables, strict=True))
    config = PlanConfig(memory={"dram": dram}, lookahead=3, staleness_steps=late)
    plan = place(tables, profile, {"dram": dram}, build_plan(tables, 1, config))
    assert [table.capacity_rows for table in plan.tables] == rows
    assert rows[1] > demands[1].least_rows


def test_slices_on_a_device_take_a_part_of_a_row():
    tables, profile = hot_and_cold()
    sharding = column_wise((0, 1))
    config = PlanConfig(
        memory={"hbm": ROWS * tables[0].record_bytes // 4},
        tables={table.name: {"sharding": sharding} for table in tables},
    )
    plan = place(
        tables,
        profile,
        config.memory.model_dump(),
        build_plan(tables, World(ranks_per_host=2), config),
    )
    assert plan.tables[0].hbm_rows > plan.tables[1].hbm_rows
    assert all(0 < table.hbm_rows <= ROWS for table in plan.tables)


def test_limited_memory_is_recognised():
    tables = [Table("a", 8, rows=100), Table("b", 8)]
    assert not is_memory_limited(build_plan(tables), tables)
    assert is_memory_limited(build_plan(tables, 1, PlanConfig(memory={"dram": 2000})), tables)
    closed = tables[:1]
    size = 100 * closed[0].record_bytes
    for hbm, is_limited in ((size, False), (size - 1, True)):
        plan = build_plan(closed, 1, PlanConfig(memory={"hbm": hbm}))
        assert is_memory_limited(plan, closed) == is_limited


def broadcast(mesh: Mesh, error: str) -> str:
    def make_message() -> dict[str, str]:
        if error:
            raise BudgetExceeded(error)
        return {"from": f"rank {mesh.rank}"}

    try:
        return broadcast_plan_message(mesh, make_message)["from"]
    except ConfigError as raised:
        return str(raised)


def test_all_ranks_get_the_plan_of_rank_0_or_its_error():
    assert run_ranks(2, broadcast, "") == ["rank 0"] * 2
    assert run_ranks(2, broadcast, "too small") == ["rank 0 could not plan: too small"] * 2
    assert broadcast(Mesh(), "") == "rank 0"
    with pytest.raises(BudgetExceeded, match=r"^too small$"):
        broadcast(Mesh(), "too small")
