"""Measure what a plan or a model's form costs in AUC, in groups of arms that share their base.

Minutes: 600 (quick 10).

A group is a model on a data set; its arms see the same samples in the same order and begin from the same weights of
their seed. The first arm is what the others are compared with, by blocks of test samples and by seeds. Suites:

    cache      DeepFM over rows of one table, four ranks of 128 samples, on MovieLens-1M (seven fields) and on a
               synthetic stream of Criteo's shape (26 fields, Zipf 1.1, seen once): exactly k updates late, and cached
               rows. "default" is the default cache; shares are of plan.cache.write_share, else as the default
    workers    LR, Wide & Deep and DeepFM over ids on a stream of ads, 200 ids a sample: synchronous training, in
               batches of 256 and 4,096, and asynchronous workers of a parameter server (`workers/quality_workers.py`)
    affinity   fields of a flat DLRM, DCN-v2 and DeepFM, grouped by `colonnade towers` on a stream with planted groups
    towers     DLRM and DCN-v2 with four tower modules as `model.tower_ratio` makes them, of fields that `colonnade
               towers` puts together and of fields dealt round, on a stream with planted groups, and on MovieLens-1M
               (`workers/quality_runs.py`)
    theory     logistic regression whose weights are read late, beside what is derived for it
    ids        FM, NFM and DeepFM on MovieLens-1M: pairs of ids or of fields, with bags of genres and of 20 films

One process stands for synchronous ranks (the world law), and for the ranks of a cache: tests compare both with real
ranks in float64. The rows' learning rate is the one at which the base of a group is best in a pilot; of workers, each
arm's own. MovieLens-1M is read from $COLONNADE_DATA, else from ../shared/data beside the checkout; without it, its
groups are left out.

Each arm is written to FILE when it ends, and a call with the same FILE adds the others. `--seeds 0` prints FILE, also
one of the former bench `quality_partials`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch
from harness import ROOT, ArmFile, BenchError, Measured, open_parser, say
from rich.console import Console
from tables import quality as tables
from tables.pilot import find_best_rate
from tables.quality import AUC, SEED
from workers.quality_case import Run
from workers.quality_runs import (
    TOWERS,
    Towers,
    measure_purity,
    train_ids,
    train_towers,
)
from workers.quality_theory import SHARES, STEPS_LATE, train_late
from workers.quality_workers import Order, train_order
from workers.staleness_copies import MOVIELENS, train_plan
from workers.staleness_model import System

from colonnade.errors import ColonnadeError, DataError
from colonnade.plan.towers.affinity import AFFINITIES
from colonnade.staleness import RowClock, row_clock

RATES = {
    "adagrad": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
    "sgd": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "towers": (0.25, 0.5, 1.0, 2.0),
    "ads": (0.0003125, 0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04),
}
"""Learning rates that a pilot may try; it begins in the middle."""


def cached(clock: RowClock, cached_share: float = 1.0) -> System:
    return System(clock=clock, cached_share=cached_share)


PLANS = {
    "synchronous": System(),
    "default": cached(RowClock(50, 50, write_share=0.05, step_bound=4)),
    "share 0.1": cached(RowClock(50, 50, write_share=0.1, step_bound=4)),
    "share 0.2": cached(RowClock(50, 50, write_share=0.2, step_bound=4)),
    "default, no step bound": cached(RowClock(50, 50, write_share=0.05)),
    "row_clock(100)": cached(row_clock(100), 0.1),
    "row_clock(10)": cached(row_clock(10), 0.1),
    "row_clock(100), all rows": cached(row_clock(100)),
    "bounded(1)": System(late=1),
    "bounded(4)": System(late=4),
    "bounded(16)": System(late=16),
}
"""Row clocks: of all rows, or of the tenth used most often."""
ORDERS = {
    "synchronous": Order(),
    "16 x 256": Order(256, workers=16),
    "64 x 256": Order(256, workers=64),
    "synchronous, 256": Order(256),
}
TOWER_ARMS: dict[str, Towers | None] = {"flat": None} | {
    f"{kind} towers CR {ratio}": Towers(kind, ratio)
    for kind, ratio in product(("learned", "striped"), (2, 4))
}
QUICK_SAMPLES = 65_536
FORMER_NAMES = ("quality_partials",)
"""Bench with a result file that this one replaces."""


@dataclass(frozen=True)
class Group:
    """A model on a data set. arms: settings by name, the base first. train: an arm's values by unit, from its settings.
    samples: of a stream; 0: MovieLens-1M. rates: what the pilot may try."""

    suite: str
    name: str
    arms: Mapping[str, Any]
    train: Callable[[Any, Run], Mapping[str, Sequence[float]]]
    samples: int = 0
    rates: Sequence[float] = ()
    seeds: int = 3


def list_groups() -> list[Group]:
    groups = [
        Group(
            "cache", f"{data} {optimizer}", PLANS, partial(train_plan, data, optimizer), samples, RATES[optimizer],
            seeds,
        )
        for data, samples, seeds in ((MOVIELENS, 0, 10), ("stream", 10_000_000, 3))
        for optimizer in ("adagrad", "sgd")
    ]  # fmt: skip
    groups += [
        Group("workers", kind, ORDERS, partial(train_order, kind), 1 << 20, RATES["ads"])
        for kind in ("lr", "wide_deep", "deepfm")
    ]
    kinds = {kind: kind for kind in AFFINITIES}
    groups += [
        Group("affinity", f"fields of {model}", kinds, partial(measure_purity, model), 2_000_000)
        for model in ("dlrm", "dcnv2", "deepfm")
    ]
    groups += [
        Group("towers", name, TOWER_ARMS, partial(train_towers, model, data), samples, rates, seeds)
        for model in ("dlrm", "dcnv2")
        for name, data, samples, rates, seeds in (
            (model, TOWERS, 1_500_000, RATES["towers"], 3),
            (f"{model} on {MOVIELENS}", MOVIELENS, 0, (), 10),
        )
    ]
    late = {f"{steps} steps late": steps for steps in STEPS_LATE}
    groups += [
        Group("theory", f"weights of {alpha:g} of samples", late, partial(train_late, alpha))
        for alpha in SHARES
    ]
    over = {"fields": "fields", "ids": "ids"}
    return groups + [
        Group("ids", f"{model}, genres{films}", over, partial(train_ids, model, length))
        for length, films in ((0, ""), (20, " and 20 films"))
        for model in ("fm", "nfm", "deepfm")
    ]


GROUPS = list_groups()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "few samples: to try, not to quote")
    suites = list(dict.fromkeys(group.suite for group in GROUPS))
    names = [*suites, *(group.name for group in GROUPS)]
    parser.add_argument(
        "--suite", nargs="+", choices=names, default=suites, metavar="NAME",
        help=f"{', '.join(suites)}, or groups by name: {', '.join(names[len(suites) :])}",
    )  # fmt: skip
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="these arms; default: all")
    parser.add_argument("--samples", type=int, help="of streams")
    parser.add_argument("--seeds", type=int, help="how many, 0 ..; default: each group's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no arm after")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    os.environ.setdefault("COLONNADE_DATA", str(ROOT.parent / "shared" / "data"))
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__}
    file = ArmFile(options.json, "quality", tables.ratios_of, versions, FORMER_NAMES)
    for group in GROUPS:
        if {group.suite, group.name} & set(options.suite):
            run_group(file, group, options, end)
    tables.print_result(Console(highlight=False, width=200), file.measured, file.build_report())


def run_group(file: ArmFile, group: Group, options: argparse.Namespace, end: float) -> None:
    """Train the arms that the file lacks, seed by seed, until `end`."""
    samples = group.samples and (
        options.samples or (QUICK_SAMPLES if options.quick else group.samples)
    )
    label = group.name if samples == group.samples else f"{group.name} of {samples:,}"
    if options.quick and not samples:
        label += ", one epoch"
    num_seeds = 1 if options.quick else group.seeds
    seeds = range(num_seeds if options.seeds is None else options.seeds)
    for seed, (arm, settings) in product(seeds, group.arms.items()):
        case = f"{label}{SEED}{seed}"
        is_known = any((m.case, m.system) == (case, arm) for m in file.measured)
        if is_known or (options.arms and arm not in options.arms):
            continue
        if time.monotonic() > end:
            say("stopped early; call again with the same file to go on")
            return
        try:
            run = Run(seed, samples, 0.0, is_quick=options.quick)
            run = replace(run, lr=find_rate(file, group, label, arm, run))
            say(f"{case} {arm}: begins")
            values = group.train(settings, run)
        except DataError as error:
            say(f"{label}: left out, {error}")
            return
        if run.lr:
            values = {**values, "rows lr": [run.lr]}
        file.add([Measured(case, arm, unit, list(numbers)) for unit, numbers in values.items()])
        facts = [f"{unit} {v[0]:.4g}" for unit, v in values.items() if len(v) == 1]
        if AUC in values:
            facts.insert(0, f"AUC {fmean(values[AUC]):.5f}")
        say(f"{case} {arm}: {', '.join(facts)}")


def find_rate(file: ArmFile, group: Group, label: str, arm: str, run: Run) -> float:
    """Return the learning rate at which the group's base, or an arm of workers itself, is best in a pilot; 0 where the
    settings have the rate."""
    if not group.rates:
        return 0.0
    piloted = arm if group.suite == "workers" else next(iter(group.arms))

    def run_pilot(lr: float) -> list[float]:
        pilot = replace(run, seed=0, lr=lr, is_pilot=True)
        aucs = list(group.train(group.arms[piloted], pilot)[AUC])
        say(f"{label} pilot {piloted} lr {lr}: AUC {fmean(aucs):.5f}")
        return aucs

    return find_best_rate(
        file, f"{label} pilot", piloted, group.rates, run_pilot, is_quick=run.is_quick
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the run it was in is not kept")
    except (OSError, BenchError, ColonnadeError) as error:
        sys.exit(f"error: {error}")
