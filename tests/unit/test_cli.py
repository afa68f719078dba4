"""The command line: errors are one line and exit status 2, and a refused command changes nothing."""

from __future__ import annotations

import json
import sys

import pytest

from colonnade.cli import main

SMALL = [
    "--set", "data.options.num_train=3000", "--set", "data.options.num_test=500",
    "--set", "data.options.max_cardinality=200", "--set", "train.batch_size=500",
]  # fmt: skip


@pytest.fixture
def colonnade(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["colonnade", *arguments])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["train", "--data", "netflix"],
            "choose from criteo, gowalla, movielens, movielens_retrieval",
        ),
        (["train", "--set", "train.epoch=3"], "did you mean train.epochs"),
        (["train", "--set", "epochs"], "name=value"),
        (["train", "--set", "=3"], "name=value"),
        (["train", "--set", "model.bottom=[-3]"], "model.bottom"),
        (["train", "--set", "rows.lr=inf"], "rows.lr"),
        (["train", "--set", "train.seed=99999999999999999999999"], "train.seed"),
        (["train", "--set", "plan.dram=3XB"], "wanted a size"),
        (["train", "--set", "data.options.num_train=abc"], "num_train"),
        (["train", "--set", "data.options.numtrain=5"], "num_train"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--data", "criteo", "--path", "nowhere"], "nowhere"),
        (["evaluate", "nowhere"], "nowhere"),
        (["bench", "nothing"], "unknown bench"),
    ],
)
def test_errors_are_one_line(colonnade, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, said = colonnade(*arguments)
    assert status == 2
    assert said.startswith("error: ") and said.count("\n") == 1 and words in said, said
    assert list(tmp_path.iterdir()) == []


def test_a_run_its_evaluation_and_going_back(colonnade, tmp_path):
    folder = str(tmp_path / "run")
    status, first, said = colonnade(
        "train", "--run", folder, *SMALL, "--set", "train.commit_steps=2"
    )
    assert status == 0, said
    for words in ("where rows came from", "where the time went", "test auc", "run folder"):
        assert words in first
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6 and 0 < summary["metrics"]["test_auc"] < 1

    status, again, _ = colonnade("train", "--run", folder, *SMALL)  # nothing is left to do
    assert status == 0 and "test auc" in again

    status, evaluated, _ = colonnade("evaluate", folder)
    assert f"auc: {summary['metrics']['test_auc']:.4f}" in evaluated
    status, _, said = colonnade("evaluate", folder, "--at", "3")
    assert status == 2 and "has no commit of step 3" in said
    status, back, _ = colonnade("evaluate", folder, "--at", "4")
    assert status == 0 and "step 4" in back


def test_a_refused_command_changes_nothing(colonnade, tmp_path):
    folder = tmp_path / "run"
    assert colonnade("train", "--run", str(folder), *SMALL)[0] == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for change in (
        "model.dim=3",
        "data.options.seed=5",
        "dense.optimizer=sgd",
        "train.batch_size=7",
    ):
        status, _, said = colonnade("train", "--run", str(folder), *SMALL, "--set", change)
        assert status == 2 and change.split("=")[0] in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_doctor(colonnade):
    status, said, _ = colonnade("doctor")
    assert status == 0 and "native path" in said
