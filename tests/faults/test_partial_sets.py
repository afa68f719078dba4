"""A checkpoint that is not whole, of several runs, or not seen by all ranks is refused everywhere, by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ranks import console_of, run_ranks
from small_run import CONFIG

from colonnade import Mesh
from colonnade.checkpoint.completeness import check_folder_is_shared
from colonnade.config.run import build_config, override_settings
from colonnade.errors import CheckpointError, WorldError
from colonnade.run.run import open_run

SETTINGS = override_settings(
    build_config(CONFIG), {"train.max_steps": 4, "data.options.num_train": 500}
)


def trained(mesh, *folders):
    """Runs of two ranks; a third one's set of tricks is tried on them by both."""
    for folder in folders:
        run = open_run(SETTINGS, mesh, Path(folder), console=console_of(mesh))
        run.train()
        run.close()
    whole, other = map(Path, folders)
    lines = []
    for trick in (lose_rank, swap_ranks, of_another_run, lose_state, lose_table):
        place = whole.with_name(trick.__name__)
        if mesh.rank == 0:
            shutil.copytree(whole, place)
            trick(place, other)
        mesh.barrier()
        with pytest.raises(CheckpointError) as refused:
            open_run(SETTINGS, mesh, place, console=console_of(mesh))
        lines.append(str(refused.value))
    own = whole.with_name(f"mine-{mesh.rank}")
    with pytest.raises(WorldError) as refused:
        open_run(SETTINGS, mesh, own, console=console_of(mesh))
    lines.append(str(refused.value))
    check_folder_is_shared(whole, mesh)
    return lines, sorted(path.name for path in own.iterdir()) if own.exists() else []


def dealt_by_table(mesh, folder):
    """A run whose tables lie on either of two ranks, in folders of one name; one table of each is lost in turn."""
    settings = override_settings(SETTINGS, {"plan.sharding": "table_wise"})
    run = open_run(settings, mesh, Path(folder), console=console_of(mesh))
    run.train()
    last = {table.sharding.ranks: t for t, table in enumerate(run.trainer.collection.plan.tables)}
    run.close()
    place, lines = Path(folder) / "rows" / "0-of-1", []
    for table in (place / f"{t:03d}" for t in last.values()):
        mesh.barrier()
        if mesh.rank == 0:
            table.rename(place.with_name("away"))
        mesh.barrier()
        with pytest.raises(CheckpointError) as refused:
            open_run(settings, mesh, Path(folder), console=console_of(mesh))
        lines.append(str(refused.value))
        mesh.barrier()
        if mesh.rank == 0:
            place.with_name("away").rename(table)
    return set(last), lines


def test_tables_of_several_ranks_in_folders_of_one_name_are_missed(tmp_path):
    for owners, messages in run_ranks(2, dealt_by_table, str(tmp_path / "run")):
        assert owners == {(0,), (1,)}
        assert all("rows/0-of-1 is not what this run saved there" in item for item in messages)


def lose_rank(place, other):
    shutil.rmtree(place / "rows" / "1-of-2")


def swap_ranks(place, other):
    (place / "rows" / "1-of-2").rename(place / "rows" / "x")
    (place / "rows" / "0-of-2").rename(place / "rows" / "1-of-2")
    (place / "rows" / "x").rename(place / "rows" / "0-of-2")


def of_another_run(place, other):
    shutil.rmtree(place / "rows" / "0-of-2")
    shutil.copytree(other / "rows" / "0-of-2", place / "rows" / "0-of-2")


def lose_state(place, other):
    (place / "checkpoints" / f"{4:012d}" / "rank-1").unlink()


def lose_table(place, other):
    shutil.rmtree(place / "rows" / "1-of-2" / "002")


def test_partial_sets_are_refused_on_every_rank(tmp_path):
    reported = run_ranks(2, trained, str(tmp_path / "whole"), str(tmp_path / "other"))
    assert reported[0][0][:-1] == reported[1][0][:-1]
    lost, swapped, mixed, stateless, tableless, blind = reported[0][0]
    assert "the checkpoint of step 4 is not whole: rows/1-of-2 is missing" in lost
    assert "rows/0-of-2 is not what this run saved there" in swapped
    assert "rows/1-of-2 is not what this run saved there" in swapped
    assert "rows/0-of-2 is not what this run saved there" in mixed and "1-of-2" not in mixed
    assert f"checkpoints/{4:012d}/rank-1 is missing" in stateless
    assert "rows/1-of-2 is not what this run saved there" in tableless
    assert "rank 1 on " in blind and "cannot see the run folder of rank 0" in blind
    assert [files for _, files in reported] == [[], []]
    # Another number of ranks reads all of them: it refuses the same.
    with pytest.raises(CheckpointError, match="rows/1-of-2 is missing"):
        open_run(SETTINGS, Mesh(), tmp_path / "lose_rank")
    with pytest.raises(CheckpointError, match="not what this run saved"):
        open_run(SETTINGS, Mesh(), tmp_path / "of_another_run")
    run = open_run(SETTINGS, Mesh(), tmp_path / "whole")
    assert run.resumed_at == 4
    run.close()
