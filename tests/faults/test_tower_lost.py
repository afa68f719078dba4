"""A rank of one tower is killed, which alone trained the tower's module: torchrun starts the world again, and it goes
on from the newest commit, to the same bits."""

from __future__ import annotations

import pytest
from small_run import digest
from test_restart import torchrun

SETTINGS = {
    "model.towers": [["C3", "C1"], ["C2", "C4"]],
    "model.tower_dim": 2,
    "plan.exchange": "towers",
    "plan.sharding": "table_wise",
    "plan.towers": 2,
    "train.epochs": 1,
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_of_one_tower_is_killed(ranks, tmp_path):
    torchrun(tmp_path / "undisturbed", ranks, settings=SETTINGS)
    fault = f"rank {ranks - 1} SIGKILL dense 20"
    said = torchrun(tmp_path / "run", ranks, fault, settings=SETTINGS)
    assert digest(tmp_path / "run") == digest(tmp_path / "undisturbed")
    assert "started at None" in said and any(f"started at {step}" in said for step in (4, 8, 12))
