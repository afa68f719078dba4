"""Does prediction leave out what evaluation does for training's sake? Samples/s of `Predictor` beside evaluation.

One small run on generated clicks is trained and committed; then the same test samples, made beforehand, are scored in
alternating blocks: `evaluate` on the open run, metrics left out, and `Predictor.scores` on its export. Every
block must give the same bits. `predict_vs_evaluate` is the median over pairs of neighbouring blocks; the target is 1.2.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from harness import Measured, describe_machine, others_share, read_cpu_seconds, write_report
from rich.console import Console

from colonnade import Batch, Mesh, Predictor
from colonnade.config import build_config
from colonnade.data.synthetic import open_synthetic
from colonnade.train.run import Run, open_run

MODELS = ("dlrm", "deepfm", "dcnv2")
BATCH_SIZE = 4096
ROUNDS, SAMPLES = 15, 200_000
QUICK_ROUNDS, QUICK_SAMPLES = 3, 40_000
TRAINED = 400_000
TARGET = 1.2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write cases, raw values and ratios here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to try, not to quote")
    options = parser.parse_args(arguments)
    rounds, samples = (QUICK_ROUNDS, QUICK_SAMPLES) if options.quick else (ROUNDS, SAMPLES)
    console, since = Console(highlight=False), read_cpu_seconds()
    cases, ratios = [], {}
    for model in MODELS:
        pairs = measure(model, rounds, samples)
        for system, values in zip(("predict", "evaluate"), zip(*pairs, strict=True), strict=True):
            cases.append(Measured(model, system, "samples/s", list(values)))
            console.print(f"{model:>8} {system:>9}: {median(values):,.0f} samples/s")
        ratios[model] = median(predict / evaluate for predict, evaluate in pairs)
        console.print(f"{model:>8} predict_vs_evaluate: {ratios[model]:.2f} (target {TARGET})")
    others = others_share(since)
    console.print(f"others on this machine used {others:.0%} of its processors meanwhile")
    if options.json:
        result = {
            "machine": describe_machine(others_share=others),
            "cases": [vars(case) for case in cases],
            "ratios": {f"predict_vs_evaluate {model}": ratio for model, ratio in ratios.items()},
        }
        write_report(options.json, result)


def measure(model: str, rounds: int, samples: int) -> list[tuple[float, float]]:
    """Samples/s (predict, evaluate) by round; the first round warms up and is left out."""
    data = open_synthetic(num_train=TRAINED, num_test=samples)
    config = build_config(
        {"model": {"name": model}, "train": {"batch_size": BATCH_SIZE, "max_steps": TRAINED // BATCH_SIZE},
         "data": {"options": {"num_train": TRAINED, "num_test": 1}}}
    )  # fmt: skip
    batches = list(data.test.batches(BATCH_SIZE))
    pairs = []
    with tempfile.TemporaryDirectory() as place:
        run = open_run(config, Mesh(), Path(place) / "run")
        run.train()
        with Predictor.open(Path(place) / "run") as predictor:
            for number in range(rounds + 1):
                found = {}
                for system in (predicted, evaluated) if number % 2 else (evaluated, predicted):
                    start = time.perf_counter()
                    scores = system(predictor, run, batches)
                    found[system] = (samples / (time.perf_counter() - start), scores)
                if not torch.equal(found[predicted][1], found[evaluated][1]):
                    raise SystemExit(
                        f"{model}: predictions are not evaluation's; no ratio is given"
                    )
                pairs.append((found[predicted][0], found[evaluated][0]))
        run.close()
    return pairs[1:]


def predicted(predictor: Predictor, run: Run, batches: list[Batch]) -> torch.Tensor:
    return torch.cat([scores for _, scores in predictor.scores(iter(batches))])


@torch.no_grad()
def evaluated(predictor: Predictor, run: Run, batches: list[Batch]) -> torch.Tensor:
    """What `train/evaluate.py` does for each batch."""
    model = run.trainer.model.eval()
    return torch.cat([torch.sigmoid(model(batch).double()) for batch in batches])


if __name__ == "__main__":
    main()
