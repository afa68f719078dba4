"""GPLVMF on ratings of food in contexts, beside GPFM and a factorization machine; and on ratings of known truth.

Minutes: 20 (quick 2).

    rmse_food, mae_food    RMSE and MAE on the test file of the food ratings, mean of `SEEDS` seeds
    rmse_vs_gpfm           RMSE over that of GPFM (no prior, all else equal), mean of five folds of all food ratings
    rmse_vs_fm             RMSE over that of a factorization machine, likewise
    noise_gap_of_fm        ratings drawn from the model with noise of deviation 0.3: RMSE less 0.3, over that of a
                           factorization machine, mean of five seeds
    relevance_ratio        the same ratings: relevance of a context that matters over that of one that does not, the
                           least of the contexts and seeds

GPLVMF and GPFM train as `colonnade train --model gplvmf` does, with no other setting. The factorization machine is the
library's own with squared error; of `FM_SETTINGS` it takes those with the least error on a tenth of the training
ratings. 8 % of the food ratings in the test file are copies of training ratings. Each arm is written to FILE when it
ends, and a call with the same FILE adds the others. Food comes from $COLONNADE_DATA, else from ../shared/data.
"""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from harness import ROOT, ArmFile, BenchError, Measured, open_parser, run_script, say, train_run

import colonnade
from colonnade import Adam, Feature, Table, Uniform
from colonnade.data import open_csv
from colonnade.models import FactorizationMachine

FOOD = Path(os.environ.get("COLONNADE_DATA", ROOT.parent / "shared" / "data")) / "food"
FOOD_COLUMNS = ("user", "dish", "hungry", "hunger", "rating")
SEEDS = 5
FOLDS = 5
NOISE = 0.3
FM_SETTINGS = ((2, 0.02), (2, 0.005), (8, 0.02), (8, 0.005))
"""Width and learning rate."""
SYSTEMS = ("GPLVMF", "GPFM", "FM")
RELEVANCES = ("relevance_place", "relevance_hour", "relevance_shuffled")

Rows = list[tuple[float, ...]]


def read_food(part: str) -> Rows:
    """Read the ratings of the file `part`: numbers from 1 on, and the rating."""
    path = FOOD / f"demo_{part}.csv"
    if not path.exists():
        raise BenchError(f"{path} is absent; set COLONNADE_DATA to the folder that holds food")
    with path.open() as file:
        return [tuple(map(float, row)) for row in csv.reader(file)]


def draw_ratings(seed: int, num_users: int = 120, num_ratings: int = 60) -> Rows:
    """Draw ratings of 30 items by users, each with a function of its own of the item, the place (of 4) and the hour;
    another context, of 4 values, changes nothing."""
    draw = np.random.default_rng(seed)
    size, frequencies = num_users * num_ratings, 500
    user = np.repeat(np.arange(num_users), num_ratings)
    item, place, shuffled = (draw.integers(0, n, size) for n in (30, 4, 4))
    hour = draw.uniform(0, 24, size)
    x = np.column_stack(
        [
            draw.normal(size=(30, 2))[item],
            draw.normal(size=(4, 1))[place],
            (hour - 12) / math.sqrt(48),
        ]
    )
    # Random features of the kernel exp(-distance^2 / 2): functions of a Gaussian process (Rahimi and Recht 2007).
    features = math.sqrt(2 / frequencies) * np.cos(
        x @ draw.normal(size=(4, frequencies)) + draw.uniform(0, 2 * math.pi, frequencies)
    )
    function = (features * draw.normal(size=(num_users, frequencies))[user]).sum(1)
    bias = 0.5 * (draw.normal(size=num_users)[user] + draw.normal(size=30)[item])
    rating = 3 + bias + function + NOISE * draw.normal(size=size)
    rows = list(zip(*(c.tolist() for c in (user, item, place, shuffled, hour, rating)), strict=True))  # fmt: skip
    return [rows[i] for i in draw.permutation(size)]


def write_files(
    folder: Path, columns: Sequence[str], train: Rows, test: Rows, numbers: Sequence[str] = ()
) -> None:
    """Write train.csv, test.csv and schema.yaml; the last column is the rating, `numbers` are real-valued contexts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        with (folder / f"{name}.csv").open("w") as file:
            csv.writer(file).writerows([columns, *rows])
    fields = [f"  {c}: {{type: {'number' if c in numbers else 'category'}}}" for c in columns[:-1]]
    text = "\n".join(["fields:", *fields, f"  {columns[-1]}: {{type: label, kind: number}}"])
    (folder / "schema.yaml").write_text(text + "\n")


def train_processes(folder: Path, system: str, seed: int) -> dict[str, float]:
    """Train GPLVMF or GPFM on a folder's files by default settings; return the metrics of the test file."""
    words = ["--data", "csv", "--path", str(folder / "train.csv"), "--model", "gplvmf"]
    settings = {
        "data.options.schema": folder / "schema.yaml",
        "data.options.test": folder / "test.csv",
        "train.seed": seed,
        "train.checkpoint_seconds": 0,
    }
    settings |= {"model.prior": "false"} if system == "GPFM" else {}
    metrics = train_run(folder / f"run-{system}-{seed}", words, settings)
    return {name.removeprefix("test_"): value for name, value in metrics.items()}


def train_machine(folder: Path, seed: int) -> dict[str, float]:
    """Train factorization machines of all FM_SETTINGS; return the RMSE of the test file by the best of them."""
    results = []
    for dim, lr in FM_SETTINGS:
        data = open_csv(
            folder / "train.csv", schema=folder / "schema.yaml", test=folder / "test.csv",
            validation_fraction=0.1, shuffle_window=1 << 17, seed=seed,
        )  # fmt: skip
        columns = data.train.schema.categorical
        parts, initial = {"deep": dim, "wide": 1}, {"deep": Uniform(scale=0.1), "wide": Uniform(scale=0.0)}  # fmt: skip
        tables = [Table(c.name, parts, optimizer=Adam(lr=lr), initializer=initial) for c in columns]
        features = [Feature(c.name, c.name) for c in columns]
        torch.manual_seed(seed)
        model = FactorizationMachine(tables, features, num_dense=len(data.train.schema.dense), seed=seed)  # fmt: skip
        mean = fmean(float(b.label.mean()) for b in data.train.batches(1 << 20))

        def compute_error(logits, batch, mean=mean):
            return (logits[:, 0] + mean - batch.label[:, 0]).square()

        result = colonnade.fit(
            model, data, loss=compute_error, batch_size=64, epochs=60, patience=4, dense_lr=lr, quiet=True,
            test_at="evaluations",
        )  # fmt: skip
        results.append((result.metrics["validation_loss"], result.metrics["test_loss"]))
    return {"rmse": math.sqrt(min(results)[1])}


def list_arms(quick: bool) -> list[tuple[str, int, str]]:
    """List the arms (suite, seed or fold, system)."""
    folds, seeds, systems = (1, 1, SYSTEMS[:2]) if quick else (FOLDS, SEEDS, SYSTEMS)
    food = [("food", seed, "GPLVMF") for seed in range(seeds)]
    truth = [("truth", seed, s) for seed in range(seeds) for s in ("GPLVMF", "FM")]
    return food + [("folds", fold, s) for fold in range(folds) for s in systems] + truth


def measure_arm(folder: Path, suite: str, number: int, system: str, quick: bool) -> list[Measured]:
    """Write the files of an arm, train and measure."""
    if suite == "truth":
        columns = ("user", "item", "place", "shuffled", "hour", "rating")
        rows = draw_ratings(number, *((30, 20) if quick else ()))
        cut = len(rows) * 4 // 5
        write_files(folder, columns, rows[:cut], rows[cut:], ["hour"])
    elif suite == "folds":
        rows = read_food("train") + read_food("test")
        order = np.random.default_rng(0).permutation(len(rows)).tolist()
        parts = [
            [rows[i] for k, i in enumerate(order) if (k % FOLDS == number) == is_test]
            for is_test in (False, True)
        ]
        write_files(folder, FOOD_COLUMNS, *parts)
    else:
        write_files(folder, FOOD_COLUMNS, read_food("train"), read_food("test"))
    metrics = train_machine(folder, number) if system == "FM" else train_processes(folder, system, number)  # fmt: skip
    names = ("rmse", "mae", "nlpd", *RELEVANCES)
    case = f"{suite} {number}"
    return [Measured(case, system, name, [metrics[name]]) for name in names if name in metrics]


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    """Compute the ratios of all arms that are there."""
    values = {(m.case, m.system, m.unit): m.median for m in measured}

    def collect(suite: str, system: str, unit: str) -> list[float]:
        cases = [f"{suite} {number}" for number in range(max(SEEDS, FOLDS))]
        return [values[case, system, unit] for case in cases if (case, system, unit) in values]

    ratios = {}
    for unit in ("rmse", "mae"):
        if food := collect("food", "GPLVMF", unit):
            ratios[f"{unit}_food"] = fmean(food)
    for system, name in (("GPFM", "rmse_vs_gpfm"), ("FM", "rmse_vs_fm")):
        if other := collect("folds", system, "rmse"):
            ratios[name] = fmean(collect("folds", "GPLVMF", "rmse")[: len(other)]) / fmean(other)
    if machine := collect("truth", "FM", "rmse"):
        own = collect("truth", "GPLVMF", "rmse")[: len(machine)]
        ratios["noise_gap_of_fm"] = (fmean(own) - NOISE) / (fmean(machine) - NOISE)
    columns = [collect("truth", "GPLVMF", name) for name in RELEVANCES]
    if columns[0]:
        pairs = zip(*columns, strict=True)
        ratios["relevance_ratio"] = min(min(p, h) / max(s, 1e-9) for p, h, s in pairs)
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "one seed and one fold, few ratings: to try")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    file = ArmFile(options.json, "gplvmf", compute_ratios, {"torch": torch.__version__})
    known = {(m.case, m.system) for m in file.measured}
    for suite, number, system in list_arms(options.quick):
        if (f"{suite} {number}", system) in known:
            continue
        with tempfile.TemporaryDirectory() as name:
            rows = measure_arm(Path(name), suite, number, system, options.quick)
        file.add(rows)
        say(f"{suite} {number} {system}: " + ", ".join(f"{m.unit} {m.median:.4f}" for m in rows))
    for ratio, value in compute_ratios(file.measured).items():
        say(f"{ratio}: {value:.4f}")


if __name__ == "__main__":
    run_script(main)
