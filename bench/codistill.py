"""Churn of codistilled pairs beside one model's, and steps of two groups beside one group's.

Minutes: 150 (quick 8).

    reduced_equal_loss    part of one model's churn that codistillation saves, at no more than 0.0005 more log loss:
                          MovieLens-1M, mean of three pairs of retrainings with other seeds, the best of the weights;
                          .._mean: of the mean of both groups' predictions, which no single model serves
    reduced_loss_0015     the same, at no more than 0.0015 more
    reduced_stream        the same as reduced_equal_loss, on one pass over a synthetic stream whose ids have a
                          hundred samples or more
    steps_of_one_group    steps of two groups of batch 16,384 on disjoint halves of MovieLens-1M until the validation
                          log loss is the best of one group on all of it, over the steps of that group
    steps_of_double_batch the same for one group of twice the batch, with the best of three learning rates

Churn is of group 0 of two pairs, or of two models, at the step of the best validation log loss: later steps fit worse
and churn more. Beside the pairs is one model whose labels are mixed with the mean
label, with weight 0.1: a control of what the peer's predictions say. Each pair is written to FILE when it ends, and a
call with the same FILE adds the others; `--cases` takes a part. Data come from $COLONNADE_DATA, else from
../shared/data.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from harness import ROOT, ArmFile, Measured, open_parser, run_module, run_script, say
from numpy.typing import NDArray
from own_data import read_samples, write_file
from rich.console import Console
from torch import Tensor, nn

from colonnade import Batch, Mesh, measure_churn
from colonnade.cli.churn import predict_part
from colonnade.config.run import load_config, override_settings
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run
from colonnade.train.metrics_file import read_metrics_lines
from colonnade.train.objective import Probability, weighted_loss

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ml-1m": (
        "movielens", {"train.epochs": 4, "train.patience": 0, "train.monitor": "log_loss"}
    ),
    "stream": (
        "synthetic",
        {
            "data.options.num_train": 2_000_000, "data.options.num_test": 100_000,
            "data.options.cardinalities": [1000] * 8, "train.batch_size": 2000,
        },
    ),
}  # fmt: skip
"""Data and settings of churn by case."""
WEIGHTS = (1.0, 2.0, 4.0)
EVERY_STEPS = 50
NUM_PAIRS = 3
ALONE, MEAN, SMOOTHED = "one model", ", mean of both", "smoothed labels"
SMOOTHING = 0.1
RATIOS = {
    "reduced_equal_loss": ("ml-1m", 0.0005),
    "reduced_loss_0015": ("ml-1m", 0.0015),
    "reduced_stream": ("stream", 0.0005),
}
"""Case and largest additional log loss by ratio."""
SPEED, BATCH, SPEED_EPOCHS, EVALUATE_STEPS, SPEED_INTERVAL = "halves", 16_384, 12, 7, 14
RATES = (1.0, 1.41, 2.0)
"""Factors of the learning rates for twice the batch."""
Part = NDArray[np.float64]


def train(run: Path, words: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Train into a folder, of a run or of a pair, with one thread for each rank."""
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = ["colonnade", "train", *words, "--run", str(run), *options]
    run_module(sys.executable, command, name="colonnade train", threads=1)


class Smoothed(Probability):
    """Cross entropy of labels that are mixed with the mean label of their batch."""

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        assert batch.label is not None
        label = (batch.label + SMOOTHING * batch.label.mean(0)) / (1 + SMOOTHING)
        return weighted_loss(model(batch), replace(batch, label=label))


def train_smoothed(run_folder: Path, data: str, settings: Mapping[str, Any]) -> None:
    """Train one model on smoothed labels."""
    config = override_settings(get_preset(data), {**settings, "train.threads": 1})
    run = open_run(config, Mesh(), run_folder, console=Console(quiet=True))
    run.trainer.objective = Smoothed()
    try:
        run.train()
    finally:
        run.close()


def predict_test(run: Path) -> tuple[Part, Part]:
    """Return probabilities and labels of the test part, (S,)."""
    predicted = predict_part(run, "test", at=None, group=None)
    return predicted.scores[:, 0], predicted.labels[:, 0].astype(float)


def measure_pair(
    case: str, system: str, weight: float | None, pair: int, settings: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Train twice with other seeds; return churn and mean log loss, also of the means of both groups.

    weight: of the peer; None: single models."""
    data, own_settings = CASES[case]
    results: list[list[Part]] = []
    labels = np.empty(0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(2):
            run = Path(name) / str(number)
            values = {**own_settings, **settings, "train.seed": 4 * pair + 2 * number}
            if weight is not None:
                values["train.codistill"] = {
                    "groups": 2, "every_steps": EVERY_STEPS, "weight": weight
                }  # fmt: skip
            if system == SMOOTHED:
                train_smoothed(run, data, values)
            else:
                train(run, ["--data", data], values)
            folders = [run] if weight is None else [run / "group-0", run / "group-1"]
            predicted = [predict_test(folder) for folder in folders]
            labels = predicted[0][1]
            results.append([scores for scores, _ in predicted])
    measured = {"": measure_two(results[0][0], results[1][0], labels)}
    if weight is not None:
        means = [(of_pair[0] + of_pair[1]) / 2 for of_pair in results]
        measured[MEAN] = measure_two(means[0], means[1], labels)
    return measured


def measure_two(first: Part, second: Part, labels: Part) -> tuple[float, float]:
    """Return churn and mean log loss of two models."""
    measured = measure_churn(first, second, labels)
    return (
        measured["churn"].value,
        (measured["log loss 1"].value + measured["log loss 2"].value) / 2,
    )


def read_curve(run: Path) -> list[tuple[int, float]]:
    """Return steps and validation log losses of a run."""
    lines = read_metrics_lines(run / "metrics.jsonl")
    return [
        (line["step"], line["validation_log_loss"]) for line in lines if "validation_log_loss" in line
    ]  # fmt: skip


def find_steps(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """Return the first step with at most this loss; NaN if there is none."""
    return next((float(step) for step, value in curve if value <= loss), math.nan)


def write_halves(folder: Path) -> None:
    """Write the samples of MovieLens-1M: to train on as a whole and in halves, and to validate."""
    samples = read_samples("ml-1m")
    order = np.random.RandomState(0).permutation(len(samples))
    tenth = len(order) // 10
    whole = order[tenth:]
    parts = {"validation": order[:tenth], "all": whole, "half0": whole[::2], "half1": whole[1::2]}
    for name, indices in parts.items():
        write_file(samples.take(pa.array(indices)), folder / f"{name}.parquet")


def measure_speed(folder: Path, epochs: int) -> dict[str, list[tuple[int, float]]]:
    """Train one group, one of twice the batch, and two on halves; return curves by system."""
    write_halves(folder)
    settings = {
        "data.options.validation": str(folder / "validation.parquet"), "train.batch_size": BATCH,
        "train.epochs": epochs, "train.patience": 0, "train.evaluate_steps": EVALUATE_STEPS,
    }  # fmt: skip
    train(folder / "one", ["--data", "parquet", "--path", str(folder / "all.parquet")], settings)
    # All others get its settings, schema and all.
    config = load_config(folder / "one" / "config.yaml")
    curves = {"one": read_curve(folder / "one")}
    yaml = str(folder / "one" / "config.yaml")
    for rate in RATES:
        run = folder / f"double {rate:g}"
        more = {
            "train.batch_size": 2 * BATCH, "train.evaluate_steps": max(1, EVALUATE_STEPS // 2),
            "embedding.lr": rate * config.embedding.learning_rate,
            "dense.lr": rate * config.dense.learning_rate,
        }  # fmt: skip
        train(run, [yaml], more)
        curves[run.name] = read_curve(run)

    def train_half(group: int) -> None:
        more = {
            "data.path": str(folder / f"half{group}.parquet"), "train.epochs": 2 * epochs,
            "train.seed": group, "train.codistill.peer": f"../group-{1 - group}",
            "train.codistill.every_steps": SPEED_INTERVAL,
        }  # fmt: skip
        train(folder / f"group-{group}", [yaml], more)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_half, range(2)))
    curves["two"] = read_curve(folder / "group-0")
    return curves


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    means = {(m.case, m.system, m.unit): fmean(m.values) for m in measured}
    ratios: dict[str, float] = {}
    for name, (case, margin) in RATIOS.items():
        churn, loss = (means.get((case, ALONE, unit)) for unit in ("churn", "log loss"))
        for suffix in ("", MEAN):
            systems = [f"weight {weight:g}{suffix}" for weight in WEIGHTS]
            pairs = [
                (means[case, system, "churn"], means[case, system, "log loss"])
                for system in systems
                if (case, system, "churn") in means
            ]
            if churn is not None and loss is not None and pairs:
                # 0: no weight is as good, so that single models would be trained.
                best = min([churn, *(value for value, of in pairs if of <= loss + margin)])
                ratios[f"{name}{'_mean' if suffix else ''}"] = 1 - best / churn
    steps = {system: value for (case, system, unit), value in means.items() if unit == "steps"}
    if "two" in steps:
        ratios["steps_of_one_group"] = steps["two"] / steps["one"]
        ratios["steps_of_double_batch"] = steps["double"] / steps["one"]
    return ratios


def summarize_curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[Measured]:
    """Return the steps of each system until the best loss of one group, and all systems' best losses."""
    best = {system: min(value for _, value in curve) for system, curve in curves.items()}
    steps = {system: find_steps(curve, best["one"]) for system, curve in curves.items()}
    doubles = [value for system, value in steps.items() if system.startswith("double")]
    # A batch that never gets there counts as infinitely slow.
    steps["double"] = min((value for value in doubles if not math.isnan(value)), default=math.inf)
    rows = [
        Measured(SPEED, system, "steps", [math.inf if math.isnan(value) else value])
        for system, value in steps.items()
    ]
    return [*rows, *(Measured(SPEED, name, "log loss", [value]) for name, value in best.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "one pair of two epochs, one weight")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, SPEED], default=[*CASES, SPEED])
    parser.add_argument("--weights", nargs="+", type=float, choices=WEIGHTS, default=WEIGHTS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLONNADE_DATA", str(ROOT.parent / "shared" / "data"))
    file = ArmFile(options.json, "codistill", compute_ratios, {"torch": torch.__version__})
    weights = options.weights[:1] if options.quick else options.weights
    systems = {ALONE: None, SMOOTHED: None, **{f"weight {weight:g}": weight for weight in weights}}
    quick = {"ml-1m": {"train.epochs": 1}, "stream": {"data.options.num_train": 200_000}}
    for pair in range(1 if options.quick else NUM_PAIRS):
        for case in (case for case in CASES if case in options.cases):
            for system, weight in systems.items():
                known = {(m.case, m.system, m.unit): m.values for m in file.measured}
                if len(known.get((case, system, "churn"), [])) > pair:
                    continue
                settings = quick[case] if options.quick else {}
                rows = []
                for suffix, values in measure_pair(case, system, weight, pair, settings).items():
                    for unit, value in zip(("churn", "log loss"), values, strict=True):
                        earlier = known.get((case, system + suffix, unit), [])
                        rows.append(Measured(case, system + suffix, unit, [*earlier, value]))
                    say(
                        f"{case}, pair {pair}, {system}{suffix}: churn {values[0]:.4f}, log loss {values[1]:.4f}"
                    )
                file.add(rows)
    if SPEED in options.cases and not any(m.case == SPEED for m in file.measured):
        with tempfile.TemporaryDirectory() as name:
            file.add(
                summarize_curves(measure_speed(Path(name), 2 if options.quick else SPEED_EPOCHS))
            )
    for ratio, value in compute_ratios(file.measured).items():
        say(f"{ratio}: {value:.3f}")


if __name__ == "__main__":
    run_script(main)
