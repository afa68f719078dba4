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
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from harness import (
    BENCH,
    BenchError,
    Measured,
    describe_machine,
    json_path,
    others_share,
    read_cpu_seconds,
    read_measured,
    report,
    say,
    write_report,
)
from rich.console import Console
from tables import quality as tables
from tables.quality import AUC, BASE, CEILING, LOSS, MISSED, SMALL, TAIL
from workers.ads import Ads, open_ads
from workers.quality_arms import BLOCK, SCORED_EVERY, Arm, Scores, train

import colonnade
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
    measured = read_measured(options.json, "quality_partials", samples=samples)
    before = read_cpu_seconds()

    def result() -> dict:
        share = round(others_share(before), 2)
        versions = {"torch": torch.__version__}
        return report(
            "quality_partials",
            version=colonnade.__version__,
            machine=describe_machine(
                threads=1, others_share=share, versions=versions, samples=samples
            ),
            measured=measured,
            ratios=tables.ratios_of(measured) | gaps_of(measured),
        )

    def keep(actual: Sequence[Measured]) -> None:
        measured.extend(actual)
        if options.json:
            part = options.json.with_suffix(".part")
            write_report(part, result())
            os.replace(part, options.json)

    for seed in SEEDS[:1] if options.quick else SEEDS:
        for kind in KINDS:
            for arm in ARMS:
                if time.monotonic() > end:
                    say("stopped early; call again with the same file to go on")
                    return
                run_arm(measured, keep, kind, arm, seed, extent, options.quick)
    if not any(m.case == "world" for m in measured):
        keep(world_scores())
    tables.print_result(Console(highlight=False), measured, result())


def run_arm(
    measured: Sequence[Measured],
    keep: Callable[[Sequence[Measured]], None],
    kind: str,
    arm: Arm,
    seed: int,
    extent: tuple[int, int],
    quick: bool,
) -> None:
    """One arm, with its pilot before the first seed, unless they are there."""
    case, pilot = f"{kind} seed {seed}", f"{kind} pilot"
    known = {(m.case, m.system, m.unit): m.values for m in measured}
    if (case, arm.name, AUC) in known:
        return
    while (lr := next_rate(rates := scored_rates(measured, pilot, arm.name), quick)) is not None:
        blocks = QUICK_BLOCKS if quick else PILOT_BLOCKS
        stream = open_ads(blocks * BLOCK, seed=PILOT_SEED)
        scores = train(kind, arm, stream, blocks, lr=lr, tail_blocks=0)
        keep([Measured(pilot, arm.name, f"AUC at {lr}", scores.auc)])
        say(f"{pilot} {arm.name} lr {lr}: {late_mean(scores.auc):.4f}, {scores.seconds:.0f} s")
    lr = max(rates, key=lambda rate: rates[rate])
    num_blocks, tail_blocks = extent
    stream = open_ads((num_blocks + tail_blocks) * BLOCK, seed=seed)
    if (case, CEILING, AUC) not in known:
        keep([Measured(case, CEILING, AUC, ceilings(stream, num_blocks))])
    scores = train(kind, arm, stream, num_blocks, lr=lr, tail_blocks=tail_blocks, seed=seed)
    keep(measured_of(case, arm.name, lr, scores, num_blocks))
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


def scored_rates(measured: Sequence[Measured], pilot: str, arm: str) -> dict[float, float]:
    """Return the mean AUC of the pilot's second half by learning rate."""
    return {
        float(m.unit.removeprefix("AUC at ")): late_mean(m.values)
        for m in measured
        if (m.case, m.system) == (pilot, arm)
    }


def next_rate(rates: Mapping[float, float], quick: bool = False) -> float | None:
    """Return the rate that the pilot tries next: neighbours of the best, until it has two that are worse. None: no
    other."""
    if not rates:
        return RATES[len(RATES) // 2]
    at = RATES.index(max(rates, key=lambda rate: rates[rate]))
    near = [RATES[i] for i in (at - 1, at + 1) if 0 <= i < len(RATES)]
    return None if quick else next((rate for rate in near if rate not in rates), None)


def ceilings(stream: Ads, num_blocks: int) -> list[float]:
    """The AUC of the true probabilities, by scored block."""
    blocks = range(SCORED_EVERY - 1, num_blocks, SCORED_EVERY)
    batches = (stream.read(block * BLOCK, (block + 1) * BLOCK) for block in blocks)
    return [auc(batch.key, batch.label) for batch in batches]


def world_scores() -> list[Measured]:
    """AUCs by step in a world of one and of four with partial results."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    results = []
    for name, how in (("1 rank", []), ("4 ranks, partials", run)):
        done = subprocess.run(
            [sys.executable, *how, "-m", "workers.quality_world"],
            cwd=BENCH, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchError(f"{name}: status {done.returncode}; {done.stderr.strip()[-2000:]}")
        aucs = json.loads(done.stdout.strip().splitlines()[-1])
        results += [
            Measured("world", name, f"AUC of {kind}", values) for kind, values in aucs.items()
        ]
    return results


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
