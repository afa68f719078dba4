"""Cost of tower modules in AUC. DLRM and DCN-v2 with towers beside the flat model, on a stream made for them.

26 fields in eight groups that interact within and with no others; 2, 4 and 8 towers are groups put together, or fields
dealt in turn (striped), or by chance (random), as a short flat run of a factorization machine has them (learned, by the
partitioner of `colonnade towers`), or a file of that command. A tower's module lets D of a field's
`--dim` columns out, for a compression ratio of 1, 2, 4 or 8. Every system sees the same samples once, begins from
the same seed as the flat model it is compared with and scores the same blocks of test samples; 95 % intervals are
Student's, of blocks and seeds (`bench/tables/intervals.py`).

To tell losses of 0.0005 apart, the flat model must come close to the ceiling and its seeds close to each other. So

* what is planted can be learned: two numbers of each id, whose products within a group are half of the logit's
  variance, its own effect, and numbers; three of 16 columns hold an id's, so a ratio of 8 (two columns) has to lose,
  and one of 4 has a single column to spare;
* fields have 12 to 96 ids of skewed popularity, and the logit's standard deviation is 2 (ceiling 0.871), not 1.36;
* rows are trained with Adagrad by element (at 1.5 million samples the flat DLRM is 0.0058 below the ceiling, with
  `rowwise_adagrad` 0.0131), dense weights at 3e-3, in batches of 1,024, and rates fall evenly to zero.

Products of small vectors are learned slowly at first, by towers through a layer more, so what they lose depends on how
long and how fast all is trained (`ROWS_LR`): the number of samples is part of a figure.

Runs are kept in the file as they end, and a call with the same file and settings goes on behind them; `--seeds 0`
prints what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import describe_machine, report, write_report
from rich.console import Console
from tables.tower_losses import measured_of, print_result, ratios_of, runs_of
from workers.scored_blocks import block_aucs, block_ceiling, check_whole

import colonnade
from colonnade import Adagrad, Feature, Mesh, Table, Uniform, build_plan, fit
from colonnade.cli.feature_sample import measure_affinity
from colonnade.data import open_source
from colonnade.data.contract import Splits
from colonnade.errors import ConfigError
from colonnade.models.dcn import DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.models.linear import FactorizationMachine
from colonnade.plan.towers.affinity import Affinity
from colonnade.plan.towers.partition import FeatureLoad, build_tower_map
from colonnade.topology.towers import Partition, build_round_robin_partition

NAMES = tuple(f"C{f + 1}" for f in range(26))
GROUPS = tuple(NAMES[26 * g // 8 : 26 * (g + 1) // 8] for g in range(8))
"""Neighbours, so that striped towers have some of each."""
CARDINALITIES = tuple((12, 24, 48, 96)[f % 4] for f in range(26))
STREAM: dict[str, Any] = {
    "label_model": "pairs", "groups": GROUPS, "cardinalities": CARDINALITIES, "exponent": 0.6, "signal": 2.0,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dlrm": {"bottom": (64, 32), "top": (64, 32)},
    "dcnv2": {"cross_layers": 2, "cross_rank": 32, "top": (64, 32)},
}
MODELS = {"dlrm": DLRM, "dcnv2": DCNv2}
ROWS_LR, DENSE_LR = 0.4, 3e-3
"""Learning rate of rows, chosen by one run of DLRM each (1.5 million samples, seed 0), AUC below the ceiling: flat
0.0090 at 0.1, 0.0059 at 0.2 and 0.0058 at 0.4; 4 planted towers of CR 2 0.0279, 0.0147 and 0.0065. So 0.4 is as good as
any for the flat model, and both have a rate that suits them; at the first, towers would lose by learning later."""
FALLING = {"name": "linear"}
"""Decay to zero with the last step, so that a run does not end in the noise of its last batches."""
LEARNED, LEARNED_DIM, LEARNED_BATCH, LEARNED_LR = 1_000_000, 16, 1024, 0.05
"""Samples, dim, batch and rate of the flat run that learned towers are made from, chosen at seed 1 by the planted
groups themselves: of the pairs of 2, 4 and 8 towers it kept 0.87, 0.83 and 0.93; with half the samples 0.80, 0.70 and
0.37; at twice the rate 0.87, 0.80 and 0.70. Other seeds are the cleaner check."""
PROBED = 8
"""Number of batches that measure the affinity of fields."""


@dataclass(frozen=True, slots=True)
class System:
    """A model, flat (no towers) or with tower modules."""

    model: str
    towers: int = 0
    ratio: int = 1
    kind: str = ""

    @property
    def name(self) -> str:
        if not self.towers:
            return "flat"
        return f"{self.towers} {self.kind} towers CR {self.ratio}"


def partition(kind: str, towers: int, seed: int = 0) -> Partition:
    """Build the partition of a kind. Raises ConfigError for a file that is no partition."""
    if kind == "planted":
        groups = [GROUPS[8 * t // towers : 8 * (t + 1) // towers] for t in range(towers)]
        return Partition(
            tuple(tuple(name for group in tower for name in group) for tower in groups)
        )
    if kind == "striped":
        return build_round_robin_partition(NAMES, towers)
    if kind == "random":
        order = torch.randperm(26, generator=torch.Generator().manual_seed(seed)).tolist()
        return build_round_robin_partition([NAMES[f] for f in order], towers)
    if kind == "learned":
        affinity, loads = flat_run(seed)
        return build_tower_map(
            affinity.matrix(), loads, towers, silent=affinity.silent, seed=seed
        ).partition
    return Partition.from_json(Path(kind).read_text(encoding="utf-8"))


@cache
def flat_run(seed: int) -> tuple[Affinity, list[FeatureLoad]]:
    """Train a factorization machine on LEARNED samples and measure the affinity of fields. It aligns vectors of fields
    whose pairs matter; models that weigh products afterwards have no reason to."""
    splits = open_source("synthetic", num_train=LEARNED, num_test=0, **STREAM)
    # Small at first: what vectors turn to is then what pairs asked for, not where they began.
    optimizer, scale = Adagrad(lr=LEARNED_LR), Uniform(scale=0.05)
    parts = {"deep": LEARNED_DIM, "wide": 1}
    tables = [
        Table(item.name, parts, rows=item.cardinality, optimizer=optimizer, initializer=scale)
        for item in splits.train.schema.categorical
    ]  # fmt: skip
    features, mesh = [Feature(table.name, table.name) for table in tables], Mesh()
    torch.manual_seed(seed)
    model = FactorizationMachine(
        tables, features, num_dense=len(splits.train.schema.dense), bags=(), seed=seed
    )
    model.embeddings.open(build_plan(tables, 1), mesh)
    done = fit(
        model, splits, mesh=mesh, batch_size=LEARNED_BATCH, dense_lr=DENSE_LR, quiet=True, seed=seed
    )
    check_whole(done.outcome)
    return measure_affinity(model.embeddings, splits.train, LEARNED_BATCH, PROBED)


def kept_pairs(result: Partition) -> float:
    """Return the share of pairs of one planted group that are in one tower."""
    pairs = [pair for group in GROUPS for pair in combinations(group, 2)]
    return fmean(result.tower_of(one) == result.tower_of(other) for one, other in pairs)


def build(system: System, splits: Splits, dim: int, seed: int) -> torch.nn.Module:
    optimizer = Adagrad(lr=ROWS_LR)
    tables = [
        Table(item.name, dim, rows=item.cardinality, optimizer=optimizer, initializer=Uniform(scale=dim**-0.5))
        for item in splits.train.schema.categorical
    ]  # fmt: skip
    features = [Feature(table.name, table.name) for table in tables]
    towers: dict[str, Any] = {}
    if system.towers:
        chosen = partition(system.kind, system.towers, seed)
        towers = {"towers": chosen, "tower_dim": max(1, dim // system.ratio)}
    torch.manual_seed(seed)
    num_dense = len(splits.train.schema.dense)
    return MODELS[system.model](
        tables, features, num_dense=num_dense, seed=seed, **SETTINGS[system.model], **towers
    )


def trained(system: System, splits: Splits, *, dim: int, batch_size: int, seed: int) -> list[float]:
    """The AUC of each block of test samples."""
    model, mesh = build(system, splits, dim, seed), Mesh()
    model.embeddings.open(build_plan(model.embeddings.tables, 1), mesh)
    done = fit(
        model, splits.train, mesh=mesh, batch_size=batch_size, dense_lr=DENSE_LR,
        dense_schedule=FALLING, row_schedule=FALLING, quiet=True, seed=seed,
    )  # fmt: skip
    check_whole(done.outcome)
    assert splits.test is not None
    return block_aucs(model, splits.test, mesh)


def systems_of(
    models: Sequence[str], towers: Sequence[int], ratios: Sequence[int], partitions: Sequence[str]
) -> list[System]:
    """Flat ones first, for others are compared with them. The first partition is tried at all ratios, others at 2."""
    results = [System(model) for model in models]
    swept, *others = partitions
    results += [System(*item, swept) for item in product(models, towers, ratios)]
    return results + [System(*item, 2, kind) for item in product(models, towers) for kind in others]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, help="write runs and losses here; go on with what it has"
    )
    parser.add_argument("--quick", action="store_true", help="few samples and systems: to try it")
    parser.add_argument("--samples", type=int, default=10_000_000, help="trained on, once")
    parser.add_argument("--test-samples", type=int, default=1_000_000)
    parser.add_argument(
        "--seeds", type=int, default=5, help="of rows and dense weights: 0 ..; 0 prints the file"
    )
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 2, 4, 8], help="dim / D")
    parser.add_argument(
        "--partitions", nargs="+", default=["planted", "learned", "striped", "random"],
        help="planted, learned, striped, random, or a partition's file; others than the first at ratio 2",
    )  # fmt: skip
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1024)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if options.quick:
        options.samples, options.test_samples, options.seeds = 20_000, 5_000, 2
        options.towers, options.ratios = [2], [2]
    if bad := [ratio for ratio in options.ratios if options.dim % ratio]:
        parser.error(f"--ratios {bad[0]}: wanted divisors of --dim {options.dim}")
    settings = {
        name: getattr(options, name) for name in ("samples", "test_samples", "dim", "batch_size")
    }
    runs: dict[str, dict[str, list[float]]] = {}
    together: dict[str, dict[str, float]] = {}  # by partition: pairs of planted groups in one tower
    best: float | None = None
    if options.json and options.json.exists():
        retained = json.loads(options.json.read_text())
        if retained.get("settings") != settings:
            parser.error(
                f"--json {options.json}: has runs of {retained.get('settings')}; give another file"
            )
        runs, together, best = runs_of(retained["cases"]), retained["together"], retained["ceiling"]
    splits = open_source(
        "synthetic", num_train=options.samples, num_test=options.test_samples, **STREAM
    )
    assert splits.test is not None
    if best is None:
        best = block_ceiling(splits.test)
    systems = systems_of(options.models, options.towers, options.ratios, options.partitions)
    for seed, system in product(range(options.seeds), systems):
        name = f"{system.model} / {system.name}"
        if str(seed) in runs.get(name, {}):
            continue
        blocks = trained(system, splits, dim=options.dim, batch_size=options.batch_size, seed=seed)
        runs.setdefault(name, {})[str(seed)] = blocks
        console.print(f"{name}, seed {seed}: {fmean(blocks):.5f}")
        if system.towers:
            share = kept_pairs(partition(system.kind, system.towers, seed))
            places = together.setdefault(f"{system.towers} {system.kind} towers", {})
            places[str(seed)] = round(share, 4)
        if options.json:
            result = report(
                "towers_quality", version=colonnade.__version__,
                machine=describe_machine(threads=torch.get_num_threads()),
                measured=measured_of(runs), ratios=ratios_of(runs),
            )  # fmt: skip
            retained = {"settings": settings, "ceiling": best, "together": together}
            write_report(options.json, {**result, **retained})
    print_result(console, runs, best)
    for name, shares in together.items():
        console.print(f"{name}: {fmean(shares.values()):.0%} of the planted groups' pairs together")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the run it was in is not kept")
    except (OSError, ConfigError) as error:
        sys.exit(f"error: {error}")
