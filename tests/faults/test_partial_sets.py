"""A commit that is not whole, of several runs, or not seen by all ranks is refused everywhere, by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import CONFIG

from colonnade import Mesh
from colonnade.config import build_config, override
from colonnade.errors import CheckpointError, WorldError
from colonnade.train.run import open_run
from colonnade.train.wholeness import check_shared

SETTINGS = override(build_config(CONFIG), {"train.max_steps": 4, "data.options.num_train": 500})


def trained(mesh, *folders):
    """Runs of two ranks; a third one's set of tricks is tried on them by both."""
    for folder in folders:
        run = open_run(SETTINGS, mesh, Path(folder))
        run.train()
        run.close()
    whole, other = map(Path, folders)
    said = []
    for trick in (lose_rank, swap_ranks, of_another_run, lose_state, lose_table):
        place = whole.with_name(trick.__name__)
        if mesh.rank == 0:
            shutil.copytree(whole, place)
            trick(place, other)
        mesh.barrier()
        with pytest.raises(CheckpointError) as refused:
            open_run(SETTINGS, mesh, place)
        said.append(str(refused.value))
    mine = whole.with_name(f"mine-{mesh.rank}")
    with pytest.raises(WorldError) as refused:
        open_run(SETTINGS, mesh, mine)
    said.append(str(refused.value))
    check_shared(whole, mesh)
    return said, sorted(path.name for path in mine.iterdir()) if mine.exists() else []


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
    (place / "commits" / f"{4:012d}" / "rank-1").unlink()


def lose_table(place, other):
    shutil.rmtree(place / "rows" / "1-of-2" / "002")


def test_partial_sets_are_refused_on_every_rank(tmp_path):
    told = run_ranks(2, trained, str(tmp_path / "whole"), str(tmp_path / "other"))
    assert told[0][0][:-1] == told[1][0][:-1]
    lost, swapped, mixed, stateless, tableless, blind = told[0][0]
    assert "the commit of step 4 is not whole: rows/1-of-2 is missing" in lost
    assert "rows/0-of-2 is not what this run committed there" in swapped
    assert "rows/1-of-2 is not what this run committed there" in swapped
    assert "rows/0-of-2 is not what this run committed there" in mixed and "1-of-2" not in mixed
    assert f"commits/{4:012d}/rank-1 is missing" in stateless
    assert "rows/1-of-2 is not what this run committed there" in tableless
    assert "rank 1 on " in blind and "cannot see the run folder of rank 0" in blind
    assert [files for _, files in told] == [[], []]
    # Another number of ranks reads all of them: it refuses the same.
    with pytest.raises(CheckpointError, match="rows/1-of-2 is missing"):
        open_run(SETTINGS, Mesh(), tmp_path / "lose_rank")
    with pytest.raises(CheckpointError, match="not what this run committed"):
        open_run(SETTINGS, Mesh(), tmp_path / "of_another_run")
    run = open_run(SETTINGS, Mesh(), tmp_path / "whole")
    assert run.resumed_at == 4
    run.close()
