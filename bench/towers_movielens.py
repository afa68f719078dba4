"""Cost of tower modules in AUC on real data. MovieLens-1M, its preset's DLRM: flat, and with 2 and 4 towers.

Its eight fields are put together by what they tell of, people or films (natural), dealt in turn (striped), or as the
partitioner of `colonnade towers` has them of the flat model of the same seed (learned). A tower's module lets dim / CR
columns of a field out. What is trained is what the command line trains:

    colonnade train --data movielens --set model.towers=2 --set model.tower_dim=8

and the epoch that is scored is the best by validation samples. Rates stay, unlike in `towers_quality`: falling evenly
to zero over 3, 4 or 5 epochs they left the flat model of seed 0 at 0.807 to 0.810 by validation, for what rows learn by
heart then stays. Everything of a seed sees the same samples in the same order, and all score the same test samples;
95 % intervals are Student's, of blocks of those and of seeds (`bench/tables/intervals.py`).

Runs are kept in the file as they end, and a call with the same file and settings goes on behind them; `--seeds 0`
prints what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import describe_machine, report, write_report
from rich.console import Console
from tables.tower_losses import measured_of, print_result, ratios_of, runs_of
from torch import nn
from towers_quality import System
from workers.scored_blocks import BLOCKS, block_aucs, check_whole

import colonnade
from colonnade.cli.feature_sample import measure_affinity
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig, override_settings
from colonnade.data.contract import Source
from colonnade.errors import ColonnadeError
from colonnade.plan.towers.partition import build_tower_map
from colonnade.run.defaults import get_preset
from colonnade.run.run import TrainingRun, open_run
from colonnade.train.objective import Probability

DATA, MODEL = "movielens", "dlrm"
NATURAL = {
    2: [["user", "sex", "age", "occupation", "zip3"], ["movie", "year", "genres"]],
    4: [["user"], ["sex", "age", "occupation", "zip3"], ["movie"], ["year", "genres"]],
}
KINDS = ("natural", "learned", "striped")
PROBED = 8
"""Batches that learned towers are made from."""
Towers = list[list[str]]


def config_of(system: System, towers: Towers | int | None, *, seed: int, epochs: int) -> RunConfig:
    """Return the configuration as from the command line."""
    config = override_settings(
        get_preset(DATA, MODEL),
        {
            "train.seed": seed, "data.options": {"seed": seed}, "train.epochs": epochs, "train.patience": 0,
            "train.threads": 1, "train.test_at": "evaluations",
        },
    )  # fmt: skip
    if towers is None:
        return config
    dim = (config.model.dim or 0) // system.ratio
    return override_settings(config, {"model.towers": towers, "model.tower_dim": dim})


class Blocks(Probability):
    """Remembers the blocks of each evaluation, which are those of a run's best epoch by its test AUC."""

    def __init__(self, test: Source) -> None:
        self.test = test
        self.by_auc: dict[float, list[float]] = {}

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        result = super().evaluate(model, source, batch_size, mesh)
        if source is self.test:
            self.by_auc[result["auc"]] = block_aucs(model, source, mesh)
        return result


def trained(run: TrainingRun) -> list[float]:
    """The AUC of each block of test samples after the best epoch."""
    assert run.trainer.data.test is not None
    run.trainer.objective = blocks = Blocks(run.trainer.data.test)
    done = run.train()
    check_whole(done)
    return blocks.by_auc[done.metrics["test_auc"]]


def learned(run: TrainingRun, number: int, seed: int) -> Towers:
    """Learn towers from the similarity of fields' vectors in a finished run."""
    trainer = run.trainer
    affinity, loads = measure_affinity(
        trainer.collection, trainer.data.train, run.config.train.batch_size, PROBED
    )
    result = build_tower_map(affinity.matrix(), loads, number, silent=affinity.silent, seed=seed)
    return [list(tower) for tower in result.partition.towers]


def systems_of(towers: Sequence[int], ratios: Sequence[int], kinds: Sequence[str]) -> list[System]:
    """The flat one first, for others are compared with it."""
    return [System(MODEL)] + [System(MODEL, *item) for item in product(towers, ratios, kinds)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write runs here; go on with what it has")
    parser.add_argument("--quick", action="store_true", help="one epoch of one seed: to try it")
    parser.add_argument("--seeds", type=int, default=5, help="0 ..; 0 prints the file")
    parser.add_argument("--epochs", type=int, default=get_preset(DATA, MODEL).train.epochs)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4], choices=NATURAL)
    parser.add_argument("--ratios", type=int, nargs="+", default=[2], help="dim / D")
    parser.add_argument("--partitions", nargs="+", default=list(KINDS), choices=KINDS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.epochs = 1, 1
    console = Console(highlight=False)
    settings = {"epochs": options.epochs, "blocks": BLOCKS}
    runs: dict[str, dict[str, list[float]]] = {}
    grouped: dict[str, dict[str, Towers]] = {}  # learned towers, by their number and seed
    if options.json and options.json.exists():
        retained = json.loads(options.json.read_text())
        if retained.get("settings") != settings:
            parser.error(
                f"--json {options.json}: has runs of {retained.get('settings')}; give another file"
            )
        runs, grouped = runs_of(retained["cases"]), retained["learned"]
    systems = systems_of(options.towers, options.ratios, options.partitions)
    for seed, system in product(range(options.seeds), systems):
        name = f"{MODEL} / {system.name}"
        if str(seed) in runs.get(name, {}):
            continue
        towers: Any = system.towers or None
        if system.kind == "natural":
            towers = NATURAL[system.towers]
        elif system.kind == "learned":
            towers = grouped[str(system.towers)][str(seed)]
        run = open_run(config_of(system, towers, seed=seed, epochs=options.epochs), Mesh(), None)
        blocks = trained(run)
        runs.setdefault(name, {})[str(seed)] = blocks
        console.print(f"{name}, seed {seed}: {fmean(blocks):.5f}")
        if not system.towers:
            for number in NATURAL:
                grouped.setdefault(str(number), {})[str(seed)] = learned(run, number, seed)
        if options.json:
            result = report(
                "towers_movielens", version=colonnade.__version__, machine=describe_machine(threads=1),
                measured=measured_of(runs), ratios=ratios_of(runs),
            )  # fmt: skip
            write_report(options.json, {**result, "settings": settings, "learned": grouped})
    print_result(console, runs)
    for number, by_seed in grouped.items():
        console.print(f"{number} learned towers, by seed: {by_seed}", markup=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the run it was in is not kept")
    except (OSError, ColonnadeError) as error:
        sys.exit(f"error: {error}")
