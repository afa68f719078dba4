"""A run goes on under other shardings, and in other worlds, to the bits of one that was never changed."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks
from small_run import CONFIG, digest, opened

from colonnade import Mesh
from colonnade.config import build_config, override
from colonnade.plan.plan import build_plan
from colonnade.store.log import LogBacking
from colonnade.topology.sharding import host_wise, replicated, row_wise, table_wise
from colonnade.topology.world import World
from colonnade.train import run as runs
from colonnade.train.commits import committed_steps, read_header
from colonnade.train.stores import homes
from colonnade.train.verification import verify_commit

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
}
DATA = {"num_train": 500, "num_test": 100, "cardinalities": [50, 900, 7, 3000]}
SHORT = {**CONFIG, "data": {"name": "synthetic", "options": DATA}}
SMALL = {"plan.memory.dram": 60_000, "train.commit_steps": 3}
OPEN = {
    **SMALL,
    "rows.admission.updates": 2,
    "rows.admission.expected_ids": 2000,
    "rows.eviction.age_steps": 4,
}


def go_on(mesh, folder, kind, epochs, settings=None, **arguments):
    """Train until `epochs` are done, with tables sharded so."""
    config = override(build_config(SHORT), {**(settings or SMALL), "train.epochs": epochs})

    def plan_of(wanted, tables, world):
        num_ranks = world.num_ranks
        shardings = {table.name: KINDS[kind](t, num_ranks) for t, table in enumerate(tables)}
        return build_plan(tables, num_ranks, dram_bytes=wanted.memory.dram, shardings=shardings)

    before, runs.plan_of = runs.plan_of, plan_of
    try:
        run = runs.open_run(config, mesh, Path(folder), data=opened(config), **arguments)
    finally:
        runs.plan_of = before
    with_rows = [isinstance(each, LogBacking) for each in run.commits.backings]
    if arguments.get("read_only"):
        found = run.trainer.evaluate(run.trainer.data.test)
    else:
        found = run.train()
    run.close()
    return found, with_rows


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
    found = set()
    for name in ("changing", "same"):  # what commits no longer need is gone
        folder = tmp_path / name
        kept = [read_header(folder, step) for step in committed_steps(folder)]
        wanted = {str(home.path) for header in kept for home in homes(header)}
        places = [path.relative_to(folder / "rows") for path in (folder / "rows").glob("*/*")]
        assert {str(path) for path in places} == wanted
        found |= wanted
        for step in committed_steps(folder):
            assert all(each.problem == "" for each in verify_commit(folder, step))
    assert "copy-1/003" in found and "1-of-2/003" in found
    run_ranks(3, three_ranks, tmp_path)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")
    # Read in place by one rank, and adopted by it.
    seen = go_on(Mesh(), tmp_path / "changing", "row_wise", 4, read_only=True)
    assert seen[0] == go_on(Mesh(), tmp_path / "same", "row_wise", 4, read_only=True)[0]
    for name in ("changing", "same"):
        go_on(Mesh(), tmp_path / name, "table_wise", 5)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")


def test_changing_open_tables(tmp_path):
    """What admission and eviction remember goes with the rows."""
    run_ranks(2, open_tables, tmp_path)
    assert digest(tmp_path / "changing") == digest(tmp_path / "same")


def test_going_back_gives_up_what_lies_where_rows_are_to_go(tmp_path):
    """The commit of another sharding that was kept so far ends; one that is not in the way stays."""
    go_on(Mesh(), tmp_path, "row_wise", 1)
    assert committed_steps(tmp_path) == [3, 5]
    go_on(Mesh(), tmp_path, "replicated", 1)  # nothing is trained, nothing is committed
    assert committed_steps(tmp_path) == [3, 5]
    go_on(Mesh(), tmp_path, "replicated", 1, {**SMALL, "train.epochs": 2, "train.commit_steps": 5})
    go_on(Mesh(), tmp_path, "replicated", 2, {**SMALL, "train.commit_steps": 5})
    assert committed_steps(tmp_path) == [5, 10]
    assert {h.path.parts[0] for h in homes(read_header(tmp_path, 5))} == {"0-of-1"}
    assert {h.path.parts[0] for h in homes(read_header(tmp_path, 10))} == {"copy-0"}
    go_on(Mesh(), tmp_path, "row_wise", 2)
    assert committed_steps(tmp_path) == [10]
    for each in verify_commit(tmp_path, 10):
        assert each.problem == ""
