"""Ranking quality of synchronous training, compared with asynchronous workers of a parameter server.

LR, Wide & Deep and DeepFM (over ids) on a stream of ads (`workers/ads.py`): 200 ids a sample, popular ones come and go.
Every eighth block of 4,096 samples is never trained, but scored when as many samples have been trained as precede it
outside such blocks; 32 blocks after the last one are scored at the end.

    synchronous     what any number of ranks train with 4,096 samples a step: one process stands for them, for N ranks
                    with batch b train what one trains with N b (the world law; `world_auc_gap` checks it here, for 4
                    ranks with partial results of rows split by hash, in float64). 16 ranks of 256 are these steps
    ..., 256        likewise with 256 samples a step: small batches are a matter of their own
    W x 256         asynchronous workers of a parameter server, simulated: each computes on rows and dense weights as
                    they were when it began with its 256 samples, and takes log-normal time. So W - 1 updates are missed
                    on the mean, in rows and dense weights

All arms train the same samples. The rows' learning rate of each is the best by a pilot on another stream, between two
that are worse. Each arm is written to FILE when it ends; a call with a FILE that has some arms adds the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import fmean

import torch
from harness import ArmFile, BenchError, Measured, json_path, run_module, run_ranks, say
from rich.console import Console
from tables import quality as tables
from tables.pilot import find_best_rate
from tables.quality import AUC, BASE, CEILING, LOSS, MISSED, SMALL, TAIL
from workers.ads import Ads, open_ads
from workers.quality_arms import BLOCK, SCORED_EVERY, Arm, Scores, train

from colonnade.train.metrics import auc

KINDS = ("lr", "wide_deep", "deepfm")
ARMS = (
    Arm(BASE),
    Arm("16 x 256", 256, workers=16),
    Arm("64 x 256", 256, workers=64),
    Arm(SMALL, 256),
)
RATES = (0.0003125, 0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
SEEDS, PILOT_SEED = (0, 1, 2), 1000
BLOCKS, TAIL_BLOCKS, PILOT_BLOCKS = 256, 32, 96
QUICK_BLOCKS, QUICK_TAIL_BLOCKS = 16, 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=json_path, help="write scores, intervals here; go on with those there"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: to try, not to quote")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no arm after")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    extent = (QUICK_BLOCKS, QUICK_TAIL_BLOCKS) if options.quick else (BLOCKS, TAIL_BLOCKS)
    samples = extent[0] * BLOCK
    file = ArmFile(
        options.json, "quality_partials", compute_ratios, {"torch": torch.__version__}, samples=samples
    )  # fmt: skip
    for seed in SEEDS[:1] if options.quick else SEEDS:
        for kind in KINDS:
            for arm in ARMS:
                if time.monotonic() > end:
                    say("stopped early; call again with the same file to go on")
                    return
                run_arm(file, kind, arm, seed, extent, options.quick)
    if not any(m.case == "world" for m in file.measured):
        file.add(world_scores())
    tables.print_result(Console(highlight=False), file.measured, file.build_report())


def run_arm(
    file: ArmFile, kind: str, arm: Arm, seed: int, extent: tuple[int, int], quick: bool
) -> None:
    """One arm, with its pilot before the first seed, unless they are there."""
    case, pilot = f"{kind} seed {seed}", f"{kind} pilot"
    known = {(m.case, m.system, m.unit): m.values for m in file.measured}
    if (case, arm.name, AUC) in known:
        return

    def run_pilot(lr: float) -> list[float]:
        blocks = QUICK_BLOCKS if quick else PILOT_BLOCKS
        stream = open_ads(blocks * BLOCK, seed=PILOT_SEED)
        scores = train(kind, arm, stream, blocks, lr=lr, tail_blocks=0)
        say(f"{pilot} {arm.name} lr {lr}: {late_mean(scores.auc):.4f}, {scores.seconds:.0f} s")
        return scores.auc

    lr = find_best_rate(file, pilot, arm.name, RATES, run_pilot, mean=late_mean, is_quick=quick)
    num_blocks, tail_blocks = extent
    stream = open_ads((num_blocks + tail_blocks) * BLOCK, seed=seed)
    if (case, CEILING, AUC) not in known:
        file.add([Measured(case, CEILING, AUC, ceilings(stream, num_blocks))])
    scores = train(kind, arm, stream, num_blocks, lr=lr, tail_blocks=tail_blocks, seed=seed)
    file.add(measured_of(case, arm.name, lr, scores, num_blocks))
    say(
        f"{case} {arm.name} lr {lr}: AUC {fmean(scores.auc):.4f}, tail {fmean(scores.tail_auc):.4f}, "
        f"{scores.seconds:.0f} s, {num_blocks * BLOCK / scores.seconds:,.0f} samples/s"
    )


def measured_of(case: str, arm: str, lr: float, scores: Scores, num_blocks: int) -> list[Measured]:
    missed = sorted(scores.missed.elements())
    places = [missed[round(part * (len(missed) - 1))] for part in (0, 0.05, 0.5, 0.95, 1)]
    return [
        Measured(case, arm, AUC, scores.auc),
        Measured(case, arm, LOSS, scores.log_loss),
        Measured(case, arm, TAIL, scores.tail_auc),
        Measured(case, arm, MISSED, [fmean(missed)]),
        Measured(
            case, arm, f"{MISSED}: least, 5 %, median, 95 %, most", [float(n) for n in places]
        ),
        Measured(case, arm, "rows lr", [lr]),
        Measured(case, arm, "samples/s", [num_blocks * BLOCK / scores.seconds]),
    ]


def late_mean(values: Sequence[float]) -> float:
    return fmean(values[len(values) // 2 :])


def ceilings(stream: Ads, num_blocks: int) -> list[float]:
    """The AUC of the true probabilities, by scored block."""
    blocks = range(SCORED_EVERY - 1, num_blocks, SCORED_EVERY)
    batches = (stream.read(block * BLOCK, (block + 1) * BLOCK) for block in blocks)
    return [auc(batch.key, batch.label) for batch in batches]


def world_scores() -> list[Measured]:
    """AUCs by step in a world of one and of four with partial results."""
    words, python = ["workers.quality_world"], sys.executable
    results = []
    for name, printed in (
        ("1 rank", run_module(python, words, threads=1)),
        ("4 ranks, partials", run_ranks(python, 4, words)),
    ):
        aucs = json.loads(printed.strip().splitlines()[-1])
        results += [
            Measured("world", name, f"AUC of {kind}", values) for kind, values in aucs.items()
        ]
    return results


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    return tables.ratios_of(measured) | gaps_of(measured)


def gaps_of(measured: Sequence[Measured]) -> dict[str, float]:
    """The largest difference of AUC on any step between one rank and four."""
    by_unit: dict[str, list[list[float]]] = {}
    for m in measured:
        if m.case == "world":
            by_unit.setdefault(m.unit, []).append(m.values)
    gaps = [abs(a - b) for one, four in by_unit.values() for a, b in zip(one, four, strict=True)]
    return {"world_auc_gap": max(gaps)} if gaps else {}


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"error: {error}")
