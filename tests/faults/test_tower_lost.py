"""A rank of one tower is killed, which alone trained the tower's module: torchrun starts the world again, and it goes
on from the newest checkpoint, to the same bits."""

from __future__ import annotations

import csv
import json

import pytest
from small_run import digest
from test_restart import torchrun
from typer.testing import CliRunner

from colonnade.cli.app import app

SETTINGS = {
    "model.towers": [["C3", "C1"], ["C2", "C4"]],
    "model.tower_dim": 2,
    "plan.exchange": "towers",
    "plan.sharding": "table_wise",
    "plan.towers": 2,
    "train.epochs": 1,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "exchange"), [(2, "towers"), (4, "towers"), (4, "tower_rows")])
def test_a_rank_of_one_tower_is_killed(ranks, exchange, tmp_path):
    settings = SETTINGS | {"plan.exchange": exchange}
    torchrun(tmp_path / "undisturbed", ranks, settings=settings)
    fault = f"rank {ranks - 1} SIGKILL dense 26"
    output = torchrun(tmp_path / "run", ranks, fault, settings=settings)
    assert digest(tmp_path / "run") == digest(tmp_path / "undisturbed")
    assert "started at None" in output and any(
        f"started at {step}" in output for step in (4, 8, 12)
    )
    is_read_on_one_process(tmp_path / "run", tmp_path)


def is_read_on_one_process(run, place):
    """Compare the towers' evaluation with that of one process, from the checkpoint. One process also exports, predicts
    and looks for other towers."""

    def colonnade(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    auc = json.loads((run / "summary.json").read_text())["metrics"]["test_auc"]
    assert f"{auc:.4f}" in colonnade("evaluate", run)
    colonnade("export", run, place / "out")
    for source in (run, place / "out"):
        colonnade("predict", source, "--part", "test", "--output", place / f"{source.name}.csv")
    scores = [list(csv.reader((place / f"{name}.csv").open())) for name in ("run", "out")]
    assert scores[0] == scores[1] and len(scores[0]) > 100
    assert "C1" in colonnade("towers", run, "--towers", 2)
