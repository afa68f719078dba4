"""A run goes on under other shardings, and in other worlds, to the bits of one that was never changed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from plans import by_table
from ranks import console_of, run_ranks
from safetensors.torch import load_file
from small_run import CONFIG, digest, opened

from colonnade import Mesh
from colonnade.checkpoint.completeness import verify_checkpoint
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.checkpoint.stores import list_store_folders
from colonnade.config.plan import PlanConfig
from colonnade.config.run import build_config, override_settings
from colonnade.models.build import build_model
from colonnade.plan.plan import Plan
from colonnade.planning import planner
from colonnade.publish.model_writer import export_run
from colonnade.run import run as runs
from colonnade.store.log.backing import LogBacking
from colonnade.topology.sharding import (
    Sharding,
    build_hot_rows,
    column_wise,
    host_wise,
    replicated,
    row_wise,
    table_wise,
)
from colonnade.topology.world import World

KINDS = {
    "row_wise": lambda t, n: row_wise(n),
    "table_wise": lambda t, n: table_wise(t % n),
    "last": lambda t, n: table_wise(n - 1),
    "replicated": lambda t, n: replicated(n),
    "mixed": lambda t, n: [
        row_wise(n),
        host_wise(World(num_hosts=n), t % n),
        table_wise(0),
    ][t % 3],
    "columns": lambda t, n: column_wise(range(n)),
    "cut": lambda t, n: [
        column_wise(range(n)),
        row_wise(n),
        table_wise(0),
        column_wise([0, n - 1]),
    ][t],
    "grid": lambda t, n: Sharding("grid", tuple(range(n)), 2),
    "hot": lambda t, n: [
        hot(row_wise(n), n, range(9)),
        hot(table_wise(n - 1), n, range(0, 900, 30)),
        row_wise(n),
        hot(row_wise(n), n, range(100)),
    ][t],
    "others hot": lambda t, n: [
        row_wise(n),
        hot(row_wise(n), n, range(0, 900, 20)),
        hot(table_wise(0), n, [6]),
        hot(row_wise(n), n, range(100)),
    ][t],
}


def hot(sharding, num_ranks, ids):
    return replace(sharding, hot=build_hot_rows(ids, num_ranks)) if num_ranks > 1 else sharding


DATA = {"num_train": 500, "num_test": 100, "cardinalities": [50, 900, 7, 3000]}
SHORT = {**CONFIG, "data": {"name": "synthetic", "options": DATA}}
SMALL = {"plan.memory.dram": 60_000, "train.checkpoint_steps": 3}
OPEN = {
    **SMALL,
    "embedding.admission.updates": 2,
    "embedding.admission.expected_ids": 2000,
    "embedding.eviction.age_steps": 4,
}


def go_on(mesh, folder, kind, epochs, settings=None, **arguments):
    """Train until `epochs` are done, with tables sharded so."""
    config = override_settings(build_config(SHORT), {**(settings or SMALL), "train.epochs": epochs})

    def settle_plan(wanted, tables, world):
        shardings = {table.name: KINDS[kind](t, world.num_ranks) for t, table in enumerate(tables)}
        return PlanConfig(memory={"dram": wanted.memory.dram}, tables=by_table(sharding=shardings))

    before, runs.resolve_plan_config = runs.resolve_plan_config, settle_plan
    try:
        run = runs.open_run(
            config, mesh, Path(folder), data=opened(config), console=console_of(mesh), **arguments
        )
    finally:
        runs.resolve_plan_config = before
    with_rows = [isinstance(item, LogBacking) for item in run.checkpoints.backings]
    if arguments.get("read_only"):
        result = run.trainer.evaluate(run.trainer.data.test)
    else:
        result = run.train()
    run.close()
    return result, with_rows


def two_ranks(mesh, folder):
    for kind, epochs in (("row_wise", 1), ("last", 2), ("replicated", 3)):
        _, with_rows = go_on(mesh, folder / "changing", kind, epochs)
        if kind == "last":
            assert with_rows == [mesh.rank == 1] * 4  # no file where there are no rows
    go_on(mesh, folder / "same", "row_wise", 3)


def open_tables(mesh, folder):
    for epochs, kind in enumerate(("mixed", "replicated", "table_wise"), 1):
        go_on(mesh, folder / "changing", kind, epochs, OPEN)
    go_on(mesh, folder / "same", "table_wise", 3, OPEN)


def three_ranks(mesh, folder):
    go_on(mesh, folder / "changing", "mixed", 4)
    go_on(mesh, folder / "same", "row_wise", 4)


def test_changing(tmp_path):
    run_ranks(2, two_ranks, tmp_path)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")
    results = set()
    for name in ("changing", "same"):  # what checkpoints no longer need is gone
        folder = tmp_path / name
        retained = [read_header(folder, step) for step in list_checkpoints(folder)]
        wanted = {str(home.path) for header in retained for home in list_store_folders(header)}
        places = [path.relative_to(folder / "rows") for path in (folder / "rows").glob("*/*")]
        assert {str(path) for path in places} == wanted
        results |= wanted
        for step in list_checkpoints(folder):
            assert all(item.problem == "" for item in verify_checkpoint(folder, step))
    assert "copy-1/003" in results and "1-of-2/003" in results
    run_ranks(3, three_ranks, tmp_path)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")
    # Read in place by one rank, and adopted by it.
    output = go_on(Mesh(), tmp_path / "changing", "row_wise", 4, read_only=True)
    assert output[0] == go_on(Mesh(), tmp_path / "same", "row_wise", 4, read_only=True)[0]
    for name in ("changing", "same"):
        go_on(Mesh(), tmp_path / name, "table_wise", 5)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")


@pytest.mark.slow
def test_changing_open_tables(tmp_path):
    """State of admission and eviction moves with the rows."""
    run_ranks(2, open_tables, tmp_path)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")


def test_going_back_gives_up_what_lies_where_rows_are_to_go(tmp_path):
    """The checkpoint of another sharding that was kept so far ends; one that is not in the way stays."""
    go_on(Mesh(), tmp_path, "row_wise", 1)
    assert list_checkpoints(tmp_path) == [3, 5]
    go_on(Mesh(), tmp_path, "replicated", 1)  # nothing is trained, nothing is saved
    assert list_checkpoints(tmp_path) == [3, 5]
    go_on(
        Mesh(), tmp_path, "replicated", 1, {**SMALL, "train.epochs": 2, "train.checkpoint_steps": 5}
    )
    go_on(Mesh(), tmp_path, "replicated", 2, {**SMALL, "train.checkpoint_steps": 5})
    assert list_checkpoints(tmp_path) == [5, 10]
    assert {h.path.parts[0] for h in list_store_folders(read_header(tmp_path, 5))} == {"0-of-1"}
    assert {h.path.parts[0] for h in list_store_folders(read_header(tmp_path, 10))} == {"copy-0"}
    go_on(Mesh(), tmp_path, "row_wise", 3, {**SMALL, "train.keep_checkpoints": 3})
    assert 5 not in list_checkpoints(tmp_path)  # it was in the way
    for item in verify_checkpoint(tmp_path, 10):
        assert item.problem == ""


ADAM = {**SMALL, "embedding.optimizer": "adam", "model.dim": 7, "model.bottom": [7]}
"""Two numbers of state for each column; 7 columns are cut into 3 and 4."""
LEAVES = {**OPEN, "embedding.optimizer": "adagrad"}


def cut_and_joined(mesh, folder):
    for epochs, kind in enumerate(("row_wise", "columns", "cut"), 1):
        go_on(mesh, folder / "changing", kind, epochs, ADAM)
    go_on(mesh, folder / "same", "row_wise", 3, ADAM)


def cut_and_leaving(mesh, folder):
    """Slices forget the same rows, and what is remembered of them goes with them."""
    for epochs, kind in enumerate(("last", "columns", "last"), 1):
        go_on(mesh, folder / "leaving", kind, epochs, LEAVES)
    go_on(mesh, folder / "stayed", "last", 3, LEAVES)


def on_a_grid(mesh, folder):
    go_on(mesh, folder / "changing", "grid", 4, ADAM)
    go_on(mesh, folder / "same", "row_wise", 4, ADAM)


def as_exported(folder, place):
    """Ids and weights of an export by file; the header also names the run's checkpoint."""
    export_run(folder, place)
    return {
        path.name: {name: values.numpy().tobytes() for name, values in load_file(path).items()}
        for path in sorted(place.glob("rows-*"))
    }


def check_cut(folder):
    """All that a checkpoint of slices holds is read, whole and as it was written."""
    changing, same = folder / "changing", folder / "same"
    assert digest(changing) == digest(same)
    step = list_checkpoints(changing)[-1]
    verified = list(verify_checkpoint(changing, step))
    assert all(item.problem == "" for item in verified)
    assert {len(home.path.name) for home in list_store_folders(read_header(changing, step))} >= {
        len("000-0-3")
    }
    assert as_exported(changing, folder / f"out-{step}") == as_exported(
        same, folder / f"old-{step}"
    )
    output = go_on(Mesh(), changing, "row_wise", 3, ADAM, read_only=True)
    assert output[0] == go_on(Mesh(), same, "row_wise", 3, ADAM, read_only=True)[0]


def test_rows_are_cut_and_joined(tmp_path):
    run_ranks(2, cut_and_joined, tmp_path)
    check_cut(tmp_path)


@pytest.mark.slow
def test_grids_are_cut_joined_and_copied(tmp_path):
    run_ranks(2, cut_and_joined, tmp_path)
    run_ranks(4, on_a_grid, tmp_path, ranks_per_host=2)
    check_cut(tmp_path)
    # A copy elsewhere has the slices, too; one rank alone joins them.
    mirrored = {**ADAM, "train.mirror": f"file://{tmp_path}/mirror"}
    for name in ("changing", "same"):
        go_on(Mesh(), tmp_path / name, "table_wise", 5, mirrored if name == "changing" else ADAM)
    go_on(Mesh(), tmp_path / "fetched", "table_wise", 5, mirrored)
    assert (
        digest(tmp_path / "changing") == digest(tmp_path / "same") == digest(tmp_path / "fetched")
    )


@pytest.mark.slow
def test_slices_forget_alike(tmp_path):
    run_ranks(2, cut_and_leaving, tmp_path)
    assert digest(tmp_path / "leaving") == digest(tmp_path / "stayed")


def hot_and_cold(mesh, folder):
    for epochs, kind in enumerate(("hot", "hot", "others hot", "columns"), 1):
        go_on(mesh, folder / "changing", kind, epochs, ADAM)
    go_on(mesh, folder / "changing", "hot", 5, ADAM)
    go_on(mesh, folder / "same", "row_wise", 5, ADAM)


def hot_on_three(mesh, folder):
    go_on(mesh, folder / "changing", "others hot", 6, ADAM)
    go_on(mesh, folder / "same", "row_wise", 6, ADAM)


def check_hot(folder):
    """All that a checkpoint of hot and cold rows holds is read, as it was written, and by one rank."""
    changing, same = folder / "changing", folder / "same"
    assert digest(changing) == digest(same)
    step = list_checkpoints(changing)[-1]
    assert all(item.problem == "" for item in verify_checkpoint(changing, step))
    assert as_exported(changing, folder / f"out-{step}") == as_exported(same, folder / f"old-{step}")  # fmt: skip
    output = go_on(Mesh(), changing, "hot", 5, ADAM, read_only=True)
    assert output[0] == go_on(Mesh(), same, "row_wise", 5, ADAM, read_only=True)[0]
    return {str(home.path) for home in list_store_folders(read_header(changing, step))}


@pytest.mark.slow
def test_rows_become_hot_and_cold(tmp_path):
    """Rows become hot from whole rows, from slices of columns, from other hot rows; to another world, and to one
    rank."""
    run_ranks(2, hot_and_cold, tmp_path)
    result = check_hot(tmp_path)
    assert {path[:16] for path in result} >= {"0-of-2/000-cold-", "0-of-1/001-cold-", "1-of-2/002"}
    assert sum("-hot-" in path for path in result) == 6  # a copy on each rank
    run_ranks(3, hot_on_three, tmp_path)
    check_hot(tmp_path)
    for name in ("changing", "same"):
        go_on(Mesh(), tmp_path / name, "row_wise", 7, ADAM)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")


def chosen_hot(mesh, folder, epochs, settings):
    """A run whose configuration asks for hot rows; the lists of its plan."""
    config = override_settings(build_config(SHORT), {**SMALL, **settings, "train.epochs": epochs})
    run = runs.open_run(config, mesh, Path(folder), data=opened(config), console=console_of(mesh))
    run.train()
    run.close()
    tables = run.trainer.collection.plan.tables
    return {table.name: table.sharding.hot.ids for table in tables if table.sharding.hot}


def configured(mesh, folder):
    names = [table.name for table in tables_of(SHORT)]
    wanted = {
        f"plan.tables.{names[1]}.replicated_rows": 60,
        f"plan.tables.{names[3]}.replicated_rows": 40,
    }
    auto = {**wanted, "plan.exchange": "auto", "plan.sharding": "auto"}
    with quickly_measured():
        return plans_of_hot_rows(mesh, folder, names, wanted, auto)


@contextmanager
def quickly_measured():
    """Plans time small files for a moment."""
    before = planner.measure_device
    planner.measure_device = partial(before, scratch_bytes=8 << 20, seconds=0.003, widths=(16,))
    try:
        yield
    finally:
        planner.measure_device = before


def plans_of_hot_rows(mesh, folder, names, wanted, auto):
    first = chosen_hot(mesh, folder / "hot", 1, wanted)
    # A list that was made otherwise: the run goes on with it.
    go_on(mesh, folder / "said", "others hot", 1)
    went_on = chosen_hot(mesh, folder / "said", 2, {f"plan.tables.{names[3]}.replicated_rows": 100})
    again = chosen_hot(mesh, folder / "hot", 2, wanted)
    last = chosen_hot(mesh, folder / "hot", 3, auto)
    go_on(mesh, folder / "same", "row_wise", 3)
    return names, first, again, last, went_on


def tables_of(settings):
    config = build_config(settings)
    model = build_model(opened(config).train.schema, config)
    return model.embeddings.tables


@pytest.mark.slow
def test_a_configuration_asks_for_hot_rows(tmp_path):
    names, first, again, last, went_on = run_ranks(2, configured, tmp_path)[0]
    assert {name: len(ids) for name, ids in first.items()} == {names[1]: 60, names[3]: 40}
    assert first == again
    assert set(last) <= {names[1], names[3]}  # not where copies of all rows were chosen
    assert went_on == {names[3]: tuple(range(100))}
    assert digest(tmp_path / "hot") == digest(tmp_path / "same")
    plan = Plan.from_json((tmp_path / "hot" / "plan.json").read_text())
    assert {
        table.name: table.sharding.hot.ids for table in plan.tables if table.sharding.hot
    } == last
    alone = {f"plan.tables.{names[1]}.replicated_rows": 60}
    assert chosen_hot(Mesh(), tmp_path / "hot", 4, alone) == {}
