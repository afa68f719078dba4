"""Metrics of the test part: when they are computed, of which step, and by fixed blocks of samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from own_model import Net, columns, source
from ranks import run_ranks

import colonnade
from colonnade import Mesh
from colonnade.config.run import override_settings
from colonnade.data import Splits, open_tensors
from colonnade.data.contract import Position
from colonnade.models.ranking import NUM_BLOCKS, BlockedMetrics
from colonnade.run.defaults import get_preset
from colonnade.run.run import load_run_config, open_run
from colonnade.train.metrics import auc, evaluate
from colonnade.train.metrics_file import read_metrics_lines
from colonnade.train.objective import Probability


def write_csv(path: Path, num_samples: int, seed: int) -> Path:
    random = np.random.RandomState(seed)
    user, item, label = random.randint(0, 50, (3, num_samples))
    lines = [f"u{u},i{i},{int(y < 20 + u % 9)}" for u, i, y in zip(user, item, label, strict=True)]
    path.write_text("user,item,label\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def config(tmp_path):
    """Settings under which validation gets worse after the first epochs."""
    train, test = (
        write_csv(tmp_path / "train.csv", 2500, 1),
        write_csv(tmp_path / "test.csv", 700, 2),
    )
    settings = {
        "data.path": str(train), "data.options.test": str(test), "train.epochs": 5, "train.batch_size": 250,
        "embedding.lr": 2.0, "embedding.initial_accumulator": 1e-4, "model.top": [8], "train.threads": 1,
    }  # fmt: skip
    return override_settings(get_preset("csv"), settings)


def train(mesh, config, folder):
    run = open_run(config, mesh, folder)
    try:
        return run.train()
    finally:
        run.close()


def lines_of(folder, kind):
    return [line for line in read_metrics_lines(folder / "metrics.jsonl") if line["kind"] == kind]


def evaluate_saved(folder, step):
    run = open_run(load_run_config(folder), Mesh(), folder, read_only=True, at=step)
    try:
        return run.trainer.evaluate(run.trainer.data.test)
    finally:
        run.close()


def test_the_best_step_is_tested_once_at_the_end(config, tmp_path):
    folder = tmp_path / "run"
    outcome = train(Mesh(), config, folder)
    assert outcome.best_step is not None and outcome.best_step < outcome.steps
    lines = [line for line in lines_of(folder, "evaluate") if "test_auc" in line]
    assert [line["step"] for line in lines] == [outcome.best_step]
    wanted = evaluate_saved(folder, outcome.best_step)
    for name in ("auc", "log_loss", "num_samples"):
        assert outcome.metrics[f"test_{name}"] == lines[0][f"test_{name}"] == wanted[name]
    summary = (folder / "summary.json").read_bytes()
    assert json.loads(summary)["metrics"]["test_auc"] == wanted["auc"]
    (folder / "summary.json").unlink()  # as a run killed before it was over
    assert train(Mesh(), config, folder).metrics == outcome.metrics


def test_every_evaluation_is_tested_where_that_is_asked_for(config, tmp_path):
    config = override_settings(config, {"train.test_at": "evaluations"})
    outcome = train(Mesh(), config, tmp_path / "run")
    lines = lines_of(tmp_path / "run", "evaluate")
    assert len(lines) == outcome.steps // 9 > 1 and all("test_auc" in line for line in lines)
    (best,) = (line for line in lines if line["step"] == outcome.best_step)
    assert outcome.metrics["test_auc"] == best["test_auc"]


def test_ranks_test_the_best_step_too(config, tmp_path):
    alone = train(Mesh(), config, tmp_path / "alone")
    outcomes = run_ranks(2, train, config, tmp_path / "run")
    assert outcomes[0].best_step == alone.best_step < alone.steps
    assert outcomes[0].metrics == outcomes[1].metrics
    assert outcomes[0].metrics["test_auc"] == pytest.approx(alone.metrics["test_auc"], abs=1e-3)
    blocks = [lines_of(tmp_path / name, "test_blocks") for name in ("alone", "run")]
    assert [line["step"] for (line,) in blocks] == [alone.best_step] * 2
    assert blocks[0][0]["digest"] == blocks[1][0]["digest"]


class Counted(Probability):
    """Counts the evaluations of each source; scores of the validation part are as the script says."""

    def __init__(self, data, scores):
        self.data, self.scores, self.tests = data, list(scores), 0

    def evaluate(self, model, source, batch_size, mesh):
        result = super().evaluate(model, source, batch_size, mesh)
        if source is self.data.test:
            self.tests += 1
            return result
        return result | {"auc": self.scores.pop(0)}


@pytest.mark.parametrize(("scores", "tests"), [([0.5, 0.6, 0.55, 0.4], 2), (None, 1)])
def test_a_model_of_ones_own_is_tested_at_each_best_score(tmp_path, scores, tests):
    validation = None if scores is None else source(50, 2)
    data = Splits(train=source(600, 1), validation=validation, test=source(100, 3))
    objective = Counted(data, scores or [])
    result = colonnade.fit(
        Net(),
        data,
        objective=objective,
        run=tmp_path,
        epochs=4,
        batch_size=50,
        quiet=True,
        threads=1,
    )
    assert objective.tests == tests
    step = result.outcome.best_step or 48
    lines = [line for line in lines_of(tmp_path, "evaluate") if line["step"] == step]
    assert [line["test_auc"] for line in lines if "test_auc" in line] == [
        result.metrics["test_auc"]
    ]


class Scores(torch.nn.Module):
    def forward(self, batch):
        return (batch.dense[:, :1] + batch.dense[:, 1:]).double()


def blocks_of(mesh, batch_size, seed):
    data = open_tensors(**columns(3001, seed), name="own")
    metrics = evaluate(Scores(), data, batch_size, mesh)
    assert isinstance(metrics, BlockedMetrics)
    return metrics.compute_blocks()


def assert_same_blocks(blocks, other):
    """Scores may differ in their last bit, because a batch's last samples are computed one by one."""
    assert (
        blocks["digest"] == other["digest"] and blocks["metrics"].keys() == other["metrics"].keys()
    )
    for name, values in blocks["metrics"].items():
        assert values == pytest.approx(other["metrics"][name], rel=1e-12, nan_ok=True), name


def test_blocks_depend_on_the_samples_alone():
    one = blocks_of(Mesh(), 100, 5)
    for other in (blocks_of(Mesh(), 64, 5), *run_ranks(3, blocks_of, 128, 5)):
        assert_same_blocks(other, one)
    assert blocks_of(Mesh(), 100, 6)["digest"] != one["digest"]
    sizes = one["metrics"]["num_samples"]
    assert len(sizes) == NUM_BLOCKS and sum(sizes) == 3001 and max(sizes) - min(sizes) <= 4
    data = open_tensors(**columns(3001, 5), name="own")
    (batch,) = data.batches(3001, start=Position(0, 0))
    numbers = np.arange(3001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(58)
    scores = torch.sigmoid(Scores()(batch))[:, 0].numpy()
    wanted = [auc(scores[numbers == b], batch.label[:, 0].numpy()[numbers == b]) for b in range(64)]
    assert one["metrics"]["auc"] == pytest.approx(wanted)
