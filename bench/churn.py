"""Churn of pairs of runs that differ in their seed, by halves of the test samples.

Minutes: 8 (quick 2).

    intervals_cover    pairs of runs, of 20, whose 95 % interval of churn on one half of the test samples less churn on
                       the other half holds 0

Runs are DeepFM by default settings on a hundredth of MovieLens-1M as Parquet; each pair halves the test samples anew.
Data come from $COLONNADE_DATA, else from ../shared/data beside the checkout.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness import Measured, describe_machine, open_parser, report, run_script, say
from numpy.typing import NDArray
from own_data import NUM_TEST, read_samples, write_file
from rich.console import Console

from colonnade import Mesh, __version__, measure_churn
from colonnade.cli.churn import Predictions, predict_part
from colonnade.config.run import override_settings
from colonnade.predict.churn import Estimate
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run
from colonnade.train.metrics import compute_log_losses

NUM_PAIRS = 20
SHARE = 0.01
"""Part of the training samples that is trained on."""


def train_and_predict(folder: Path, seed: int) -> Predictions:
    """Train on the files of a folder; predict the test samples at the best step."""
    settings = {
        "data.path": str(folder / "train.parquet"),
        "data.options.test": str(folder / "test.parquet"),
        "train.threads": 1,
        "train.seed": seed,
    }
    config = override_settings(get_preset("parquet", "deepfm"), settings)
    run_folder = folder / f"run{seed}"
    run = open_run(config, Mesh(), run_folder, console=Console(quiet=True))
    try:
        run.train()
    finally:
        run.close()
    return predict_part(run_folder, "test", at=None, group=None)


def measure_halves(
    first: NDArray, second: NDArray, labels: NDArray, seed: int
) -> tuple[Estimate, Estimate]:
    """Measure churn on both halves of the samples, drawn by a seed."""
    order = np.random.RandomState(seed).permutation(len(labels))
    one, other = (
        measure_churn(first[part], second[part], labels[part])["churn"]
        for part in np.array_split(order, 2)
    )
    return one, other


def holds_zero(halves: tuple[Estimate, Estimate]) -> bool:
    """Return whether the 95 % interval of the difference of two independent estimates holds 0."""
    one, other = halves
    width = 1.96 * np.hypot(one.standard_error, other.standard_error)
    return bool(abs(one.value - other.value) <= width)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "three pairs")
    options = parser.parse_args(arguments)
    samples = read_samples("ml-1m")
    order = np.random.RandomState(0).permutation(len(samples))
    num_train = int(0.8 * len(order))
    rows: dict[str, list[float]] = {"churn": [], "log_loss": [], "holds_zero": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_file(samples.take(order[: int(SHARE * num_train)]), folder / "train.parquet")
        write_file(samples.take(order[num_train:][:NUM_TEST]), folder / "test.parquet")
        for pair in range(3 if options.quick else NUM_PAIRS):
            runs = [train_and_predict(folder, seed) for seed in (2 * pair, 2 * pair + 1)]
            first, second = (run.scores[:, 0] for run in runs)
            labels = runs[0].labels[:, 0]
            halves = measure_halves(first, second, labels, pair)
            rows["churn"].append(float(np.abs(first - second).mean()))
            rows["log_loss"].append(float(compute_log_losses(first, labels).mean()))
            rows["holds_zero"].append(float(holds_zero(halves)))
            texts = " and ".join(f"{e.value:.5f} ± {e.standard_error:.5f}" for e in halves)
            say(f"pair {pair}: churn {texts} by halves, log loss {rows['log_loss'][-1]:.4f}")
    measured = [Measured("ml-1m 1%", "deepfm", unit, values) for unit, values in rows.items()]
    report(
        "churn",
        version=__version__,
        machine=describe_machine(threads=1),
        measured=measured,
        ratios={"intervals_cover": sum(rows["holds_zero"])},
        path=options.json,
    )


if __name__ == "__main__":
    run_script(main)
