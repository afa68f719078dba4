"""Thresholded sums of dense gradients beside exact and int8 sums: quality, bytes and seconds.

Minutes: 70 (quick 3).

    auc_lost_99_stream      test AUC of exact sums less that of thresholded ones at 1 %, mean of seeds: DLRM on a
                            synthetic stream of 10 million samples, two ranks, batches of 2,000
    auc_lost_99_ml1m        the same: DLRM on MovieLens-1M, batches of 600, 5,000 steps; .._int8: of int8 sums
    bytes_saved_99          bytes of exact sums over those of thresholded ones, of the tensors that are coded in a
                            network of 1.2 million weights, on two ranks, after the warm-up; .._ml1m: of all tensors of
                            the network of MovieLens-1M
    bytes_saved_5000_steps  the same, of the whole run of 5,000 steps
    vs_int8                 seconds of a step of int8 sums over those of thresholded ones: 2 x 2 ranks, 100 Mbit/s,
                            sums that take half of an exact step; vs_int8_bound: by bytes alone, if nothing of the sums
                            is hidden by backward; vs_exact: of exact sums; .._80: sums that take 80 % of an exact step
    selection_of_copy       seconds to copy as many bytes as the native pass of a message moves over those of the pass

Hosts are network namespaces. Seeds are trained by `colonnade train` with two ranks. Each run is written to FILE when
it ends, and a call with the same FILE adds the others. Data come from $COLONNADE_DATA, else from ../shared/data.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import torch
from cluster.hosts import open_hosts
from cluster.launch import torchrun
from harness import ROOT, ArmFile, BenchError, Measured, open_parser, run_script, say, train_run
from workers.dct_ranks import CODECS, NONE, WIDTHS

from colonnade import _native
from colonnade.plan.names import Thresholding
from colonnade.wire.dense_sums import MIN_THRESHOLDED, coded_buffer_bytes
from colonnade.wire.thresholded import ThresholdedShares, split_into_blocks

RULE = Thresholding(keep=0.01, keep_steps=1000)
RUNS: dict[str, tuple[str, dict[str, int]]] = {
    "stream": ("synthetic", {"data.options.num_train": 10_000_000, "train.batch_size": 2000}),
    "ml-1m": ("movielens", {"train.batch_size": 600, "train.max_steps": 5000, "train.epochs": 10}),
}
"""Data and settings of runs by case."""
NUM_SEEDS = 3
SPEED, SELECTION = "1.2 million weights", "1 Mi elements"
NUM_ELEMENTS = 1 << 20
GIGABITS = 0.1
PERCENTS = {50: "", 80: "_80"}
"""Parts of an exact step that sums take, with the ends of ratios' names."""


def train(case: str, codec: str, seed: int, quick: bool) -> dict[str, float]:
    """Train one run of two ranks; return its test metrics."""
    data, settings = RUNS[case]
    more = {"plan.codec.dense": codec, "train.seed": seed, "train.patience": 0}
    if quick:
        more |= {"train.max_steps": 200, "plan.codec.dense_keep": 0.3}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--data", data, "--ranks", "2"]
        return train_run(Path(folder) / "run", words, settings | more)


def name_case(percent: int) -> str:
    return f"{SPEED}, 2x2 {GIGABITS:g} Gbit/s, sums {percent} %"


def measure_steps(rounds: int, steps: int, percent: int) -> list[Measured]:
    """Time steps of all codecs between hosts. percent: part of an exact step that sums take."""
    with tempfile.TemporaryDirectory() as name, open_hosts(2, gigabits=GIGABITS) as hosts:
        path = Path(name) / "result.json"
        job = torchrun(
            hosts, 2, ["-m", "workers.dct_ranks", *map(str, (path, rounds, steps, percent))],
            folder=Path(name), cwd=Path(__file__).parent, env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if any(job.wait(1000)):
            raise BenchError(f"steps: {job.tail()}")
        result = json.loads(path.read_text())
    case = name_case(percent)
    measured = [Measured(case, system, "s", values) for system, values in result["seconds"].items()]
    measured += [
        Measured(case, system, "bytes", [size]) for system, size in result["bytes"].items()
    ]
    return [*measured, Measured(case, NONE, "samples", [result["batch"]])]


def time_selection(rounds: int) -> list[Measured]:
    """Time the native pass of one message, and a copy of as many bytes: it reads two arrays and writes one."""
    blocks = split_into_blocks([NUM_ELEMENTS], 1)
    shares = ThresholdedShares(Thresholding(0.01, 0), blocks, range(1))
    gradients = [torch.randn(NUM_ELEMENTS) for _ in range(4)]
    for step in range(100):  # until the controller has settled
        shares.encode_with_residuals(gradients[step % 4], 1.0, step)
    slots = shares.slots
    passed = torch.zeros_like(slots)
    message = torch.empty(int(slots.sum()), dtype=torch.int32)
    residual, new = shares.residual.view(-1), torch.empty(NUM_ELEMENTS)
    source = torch.randn(3 * NUM_ELEMENTS // 2)
    target = torch.empty_like(source)
    seconds: dict[str, list[float]] = {"pass": [], "copy": []}
    for turn in range(rounds):
        start = time.perf_counter()
        _native.encode_thresholded(
            gradients[turn % 4], residual, 1.0, shares.starts, slots, shares.thresholds, turn, new, passed, message
        )  # fmt: skip
        middle = time.perf_counter()
        target.copy_(source)
        seconds["pass"].append(middle - start)
        seconds["copy"].append(time.perf_counter() - middle)
    return [Measured(SELECTION, name, "s", values) for name, values in seconds.items()]


def coded_bytes(sizes: Sequence[int], step: int) -> float:
    return float(coded_buffer_bytes(RULE, sizes, 2, step))


def count_bytes() -> list[Measured]:
    """Count the bytes of sums by formulas, which a law compares with those sent."""
    sizes = [n * m for n, m in zip(WIDTHS, (*WIDTHS[1:], 1), strict=True)]
    coded = [size for size in sizes if size >= MIN_THRESHOLDED]
    exact = 4.0 * sum(coded)
    run = fmean(coded_bytes(coded, step) for step in range(5000))
    return [
        Measured("bytes", "exact", "bytes", [exact]),
        Measured("bytes", "thresholded", "bytes", [coded_bytes(coded, 5000)]),
        Measured("bytes", "thresholded, 5,000 steps", "bytes", [run]),
    ]


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    values = {(m.case, m.system, m.unit): m.values for m in measured}
    ratios = {}
    for case, name in (("stream", "stream"), ("ml-1m", "ml1m")):
        for codec, suffix in (("thresholded", ""), ("int8", "_int8")):
            exact, coded = (values.get((case, system, "AUC"), []) for system in ("exact", codec))
            if pairs := list(zip(exact, coded, strict=False)):
                ratios[f"auc_lost_99_{name}{suffix}"] = fmean(a - b for a, b in pairs)
    if ("bytes", "exact", "bytes") in values:
        exact, after, run = (
            values["bytes", system, "bytes"][0]
            for system in ("exact", "thresholded", "thresholded, 5,000 steps")
        )
        ratios |= {"bytes_saved_99": exact / after, "bytes_saved_5000_steps": exact / run}
    for percent, suffix in PERCENTS.items():
        if (name_case(percent), "exact", "s") not in values:
            continue
        exact, int8, ours = (median(values[name_case(percent), codec, "s"]) for codec in CODECS)
        sent = {codec: values[name_case(percent), codec, "bytes"][0] for codec in CODECS}
        parts = {codec: size / sent["exact"] * percent / 100 for codec, size in sent.items()}
        bound = (1 - percent / 100 + parts["int8"]) / (1 - percent / 100 + parts["thresholded"])
        ratios |= {
            f"vs_int8{suffix}": int8 / ours,
            f"vs_int8_bound{suffix}": bound,
            f"vs_exact{suffix}": exact / ours,
        }
    if (SELECTION, "pass", "s") in values:
        copy, native = (median(values[SELECTION, system, "s"]) for system in ("copy", "pass"))
        ratios["selection_of_copy"] = copy / native
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "200 steps of one seed: to try, not to quote")
    parts = (*RUNS, "steps", "selection")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="of the bench")
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLONNADE_DATA", str(ROOT.parent / "shared" / "data"))
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    file = ArmFile(options.json, "dct", compute_ratios, {"torch": torch.__version__})
    file.add(count_bytes())
    if "selection" in options.parts:
        file.add(time_selection(100 if options.quick else 1000))
    if "steps" in options.parts:
        for percent in PERCENTS:
            known = {m.case for m in file.measured}
            if name_case(percent) not in known:
                file.add(measure_steps(*((1, 2) if options.quick else (5, 3)), percent))
    for seed in range(1 if options.quick else NUM_SEEDS):
        for case in filter(options.parts.__contains__, RUNS):
            for codec in CODECS:
                known = {(m.case, m.system): m.values for m in file.measured if m.unit == "AUC"}
                if len(known.get((case, codec), ())) > seed:
                    continue
                metrics = train(case, codec, seed, options.quick)
                aucs = [*known.get((case, codec), ()), metrics["test_auc"]]
                file.add([Measured(case, codec, "AUC", aucs)])
                say(f"{case} seed {seed} {codec}: AUC {aucs[-1]:.5f}")
    for name, value in compute_ratios(file.measured).items():
        say(f"{name}: {value:.5g}")


if __name__ == "__main__":
    run_script(main)
