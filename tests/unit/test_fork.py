"""Forks of a predictor: the same bits, then lives of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import served
import torch
from in_process import publish, score_step

from colonnade import ConfigError, Predictor
from colonnade.checkpoint.header import list_checkpoints
from colonnade.embedding import find_collection


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    served.train(folder / "run", folder / "published")
    return folder


@pytest.fixture(scope="module")
def batch():
    return served.samples()[0]


def change_rows(predictor: Predictor, table: int, ids: list[int], gone: list[int]) -> None:
    """Change rows of a table to ones, and delete others."""
    width = find_collection(predictor.model).tables[table].width
    weights = torch.ones(len(ids), width)
    predictor.rows.apply_delta(
        table, torch.tensor(ids), weights, torch.tensor(gone, dtype=torch.int64)
    )


def test_a_fork_has_newer_and_deleted_rows_and_changes_alone(trained, batch):
    with Predictor.open(trained / "run") as predictor:
        ids = batch.ids["C2"].values.unique().tolist()
        before = predictor(batch)
        change_rows(predictor, 1, ids[:5], ids[5:9])
        changed = predictor(batch)
        assert not torch.equal(changed, before)
        fork = predictor.fork()
        assert torch.equal(fork(batch), changed) and fork.step == predictor.step
        assert fork.rows.newer_bytes == predictor.rows.newer_bytes > 0
        # Deleted rows come back, and changed ones are deleted, in the fork alone.
        change_rows(fork, 1, ids[5:20], ids[:3])
        assert torch.equal(predictor(batch), changed)
        own = fork(batch)
        assert not torch.equal(own, changed)
        change_rows(predictor, 1, ids[:40], [])
        assert torch.equal(fork(batch), own)
        with torch.inference_mode():
            next(predictor.model.parameters()).zero_()
        assert torch.equal(fork(batch), own)
    assert torch.equal(fork(batch), own)  # the first one is closed
    second = fork.fork()
    fork.close()
    assert torch.equal(second(batch), own)
    with pytest.raises(ConfigError, match="closed"):
        fork(batch)
    with pytest.raises(ConfigError, match="closed"):
        fork.fork()
    second.close()


def test_forks_follow_a_publication_by_themselves(trained, batch, tmp_path):
    """Deltas and a new base are loaded by the fork; the predictor stays until it is refreshed."""
    steps, live = list_checkpoints(trained / "run"), tmp_path / "live"
    publish(trained, live, steps[0])
    expected = {step: score_step(trained, batch, step) for step in steps}
    with Predictor.open(live) as predictor:
        assert not predictor.has_update()
        publish(trained, live, steps[1])
        assert predictor.has_update() and predictor.step == steps[0]
        with predictor.fork() as fork:
            assert torch.equal(fork(batch), expected[steps[0]])
            assert fork.refresh() == 1 and not fork.has_update()
            publish(trained, live, steps[2])
            with fork.fork() as second:
                assert second.refresh() == 1
                assert torch.equal(second(batch), expected[steps[2]])
            assert torch.equal(fork(batch), expected[steps[1]])
        assert torch.equal(predictor(batch), expected[steps[0]])
        assert predictor.refresh() == 2 and torch.equal(predictor(batch), expected[steps[2]])
        shutil.rmtree(live)
        served.train(tmp_path / "run", live)
        with pytest.raises(Exception, match="wanted run"):
            predictor.has_update()


def test_a_run_has_no_updates(trained):
    with Predictor.open(trained / "run") as predictor:
        with pytest.raises(ConfigError, match="is no publication"):
            predictor.has_update()
        predictor.config = None
        with pytest.raises(ConfigError, match="no configuration"):
            predictor.fork()
