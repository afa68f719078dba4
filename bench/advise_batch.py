"""Train MovieLens-1M with the batch that `colonnade plan --advise` advises, and with seven others.

Minutes: 12 (quick 2).

    loss_at_advised_batch    test log loss with the advised batch less the lowest of seven batch sizes, at equal samples

A run of the preset with two micro-batches a step measures the gradient noise scale; the batch is advised from its
folder, for one rank. Runs of `EPOCHS` epochs follow, with the preset's other settings. Each run is written to FILE when
it ends, and a call with the same FILE adds the others. Data come from $COLONNADE_DATA, else from ../shared/data.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import (
    ROOT,
    ArmFile,
    BenchError,
    Measured,
    open_parser,
    run_module,
    run_script,
    say,
    train_run,
)

from colonnade.plan.advice import BatchCost

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
EPOCHS = 2
MEASURED_SIZE = 2048
"""Batch of the run that measures the noise."""
CASE, ADVISED = "ml-1m", "advised"


def train(run: Path, batch_size: int, **more: int) -> float:
    """Train the preset into a run folder; return the test log loss. more: settings of `train`."""
    values = {"batch_size": batch_size, "epochs": EPOCHS, "patience": 0, **more}
    settings = {f"train.{name}": value for name, value in values.items()}
    return train_run(run, ["--data", "movielens"], settings)["test_log_loss"]


def advise_batch(folder: Path) -> float:
    """Return the advised batch from a run that measures the noise."""
    run = folder / "noise"
    train(run, MEASURED_SIZE, accumulate=2)
    words = [
        "colonnade",
        "plan",
        "--data",
        "movielens",
        "--set",
        f"train.batch_size={MEASURED_SIZE}",
    ]
    words += ["--run", str(run), "--advise", "--hosts-up-to", "1", "--json"]
    advice = json.loads(run_module(sys.executable, words, threads=1))
    noise = advice["noise"]["samples"]
    if noise is None:
        raise BenchError("the noise of all batches together hides the gradient")
    return BatchCost(**advice["batch"]).best_batch(noise)


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    losses = {m.system: m.median for m in measured if m.unit == "log loss"}
    advised = losses.pop(ADVISED, None)
    if advised is None or not losses:
        return {}
    return {"loss_at_advised_batch": advised - min(losses.values())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "two sizes: to try, not to quote")
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLONNADE_DATA", str(ROOT.parent / "shared" / "data"))
    file = ArmFile(options.json, "advise_batch", compute_ratios, {"torch": torch.__version__})
    sizes = dict(zip(map(str, SIZES), SIZES, strict=True))
    with tempfile.TemporaryDirectory() as name:
        known = {m.system: m for m in file.measured}
        if ADVISED not in known:
            sizes[ADVISED] = round(advise_batch(Path(name)))
            say(f"advised: {sizes[ADVISED]:,} samples")
        for system, size in list(sizes.items())[-2 if options.quick else 0 :]:
            if system in known:
                continue
            loss = train(Path(name) / system, size)
            file.add(
                [
                    Measured(CASE, system, "log loss", [loss]),
                    Measured(CASE, system, "samples", [size]),
                ]
            )
            say(f"{system}: {size:,} samples, log loss {loss:.4f}")
    for ratio, value in compute_ratios(file.measured).items():
        say(f"{ratio}: {value:.4f}")


if __name__ == "__main__":
    run_script(main)
