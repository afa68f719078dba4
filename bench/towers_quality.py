"""What do tower modules cost in AUC? DLRM and DCN-v2 with towers beside the flat model, on a stream made for them.

26 fields in eight groups that interact within and with no others; 2, 4 and 8 towers are groups put together, or fields
dealt in turn (striped), or by chance (random), as a short flat run of a factorization machine has them (learned, by the
partitioner of `colonnade towers`), or a file of that command. A tower's module lets D of a field's
`--dim` columns out, for a compression ratio of 1, 2, 4 or 8. Every system sees the same samples once and starts from
the same seed as the flat model it is compared with, so differences are paired by seed; 95 % intervals are Student's.

Runs are kept in the file as they end, and a call with the same file and settings goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from harness import Measured, describe_machine, report, write_report
from rich.console import Console
from rich.table import Table as Grid

import colonnade
from colonnade import Adagrad, Feature, Mesh, RowWiseAdagrad, Table, Uniform, build_plan, fit
from colonnade.data import open_source
from colonnade.data.contract import Splits
from colonnade.errors import ConfigError
from colonnade.models.dcnv2 import DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.models.linear import FM
from colonnade.plan.towers.affinity import Affinity
from colonnade.plan.towers.partition import FeatureLoad, tower_map
from colonnade.topology.towers import Partition, striped
from colonnade.train.metrics import ceiling
from colonnade.train.probe import probe

NAMES = tuple(f"C{f + 1}" for f in range(26))
GROUPS = tuple(NAMES[26 * g // 8 : 26 * (g + 1) // 8] for g in range(8))
"""Neighbours, so that striped towers have some of each."""
CARDINALITIES = tuple((24, 48, 96, 400)[f % 4] for f in range(26))
"""Most pairs of a group's ids are met often."""
STREAM = {"label_model": "pairs", "groups": GROUPS, "cardinalities": CARDINALITIES, "exponent": 0.6}
SETTINGS: dict[str, Any] = {
    "dlrm": {"bottom": (64, 32), "top": (128, 64)},
    "dcnv2": {"cross_layers": 2, "cross_rank": 32, "top": (128, 64)},
}
MODELS = {"dlrm": DLRM, "dcnv2": DCNv2}
ROWS_LR, DENSE_LR, EVALUATE_BATCH = 0.05, 1e-3, 4096
LEARNED, LEARNED_DIM, LEARNED_BATCH, LEARNED_LR = 2_000_000, 16, 1024, 0.05
"""Samples, dim, batch and rate of the flat run that learned towers are made from, chosen at seed 0 by the planted
groups themselves: of nine settings those of 100,000 to 400,000 samples kept 0.17 to 0.47 of the pairs of four towers,
1.5 million 0.63 (0.77 at 8 columns), 2 million 0.87, 0.63 and 0.70 of 2, 4 and 8. Other seeds are the cleaner check."""
PROBED = 8
"""Of its batches."""
STUDENT_95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)  # fmt: skip
"""By degrees of freedom, from 1; beyond, the normal distribution's 1.96 is close."""
UNIT = "AUC"
MAX_LOSS = 0.0005
"""That the issue allows at a ratio of 2."""


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
    """Raises ConfigError for a file that is none."""
    if kind == "planted":
        groups = [GROUPS[8 * t // towers : 8 * (t + 1) // towers] for t in range(towers)]
        return Partition(
            tuple(tuple(name for group in tower for name in group) for tower in groups)
        )
    if kind == "striped":
        return striped(NAMES, towers)
    if kind == "random":
        order = torch.randperm(26, generator=torch.Generator().manual_seed(seed)).tolist()
        return striped([NAMES[f] for f in order], towers)
    if kind == "learned":
        affinity, loads = flat_run(seed)
        return tower_map(
            affinity.matrix(), loads, towers, silent=affinity.silent, seed=seed
        ).partition
    return Partition.from_json(Path(kind).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def flat_run(seed: int) -> tuple[Affinity, list[FeatureLoad]]:
    """How alike fields are to a factorization machine that saw LEARNED samples: it turns vectors of fields together
    whose pairs matter, where models that weigh products afterwards have no reason to."""
    splits = open_source("synthetic", num_train=LEARNED, num_test=0, **STREAM)
    # Small at first: what vectors turn to is then what pairs asked for, not where they began.
    optimizer, scale = Adagrad(lr=LEARNED_LR), Uniform(scale=0.05)
    parts = {"deep": LEARNED_DIM, "wide": 1}
    tables = [
        Table(each.name, parts, rows=each.cardinality, optimizer=optimizer, initializer=scale)
        for each in splits.train.schema.categorical
    ]  # fmt: skip
    features, mesh = [Feature(table.name, table.name) for table in tables], Mesh()
    torch.manual_seed(seed)
    model = FM(tables, features, num_dense=len(splits.train.schema.dense), seed=seed)
    model.embeddings.open(build_plan(tables, 1), mesh)
    fit(
        model, splits, mesh=mesh, batch_size=LEARNED_BATCH, dense_lr=DENSE_LR, quiet=True, seed=seed
    )
    return probe(model.embeddings, splits.train, LEARNED_BATCH, PROBED)


def kept_pairs(found: Partition) -> float:
    """Of all pairs of fields of one planted group, the share that stands in one tower."""
    pairs = [pair for group in GROUPS for pair in combinations(group, 2)]
    return fmean(found.tower_of(one) == found.tower_of(other) for one, other in pairs)


def build(system: System, splits: Splits, dim: int, seed: int) -> torch.nn.Module:
    optimizer = RowWiseAdagrad(lr=ROWS_LR)
    tables = [
        Table(each.name, dim, rows=each.cardinality, optimizer=optimizer, initializer=Uniform(scale=dim**-0.5))
        for each in splits.train.schema.categorical
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


def auc(system: System, splits: Splits, *, dim: int, batch_size: int, seed: int) -> float:
    model, mesh = build(system, splits, dim, seed), Mesh()
    model.embeddings.open(build_plan(model.embeddings.tables, 1), mesh)
    found = fit(
        model, splits, mesh=mesh, batch_size=batch_size, dense_lr=DENSE_LR, quiet=True, seed=seed
    )
    return found.metrics["test_auc"]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval); nan of a single one."""
    count = len(differences)
    if count < 2:
        return fmean(differences), float("nan")
    factor = STUDENT_95[count - 2] if count - 2 < len(STUDENT_95) else 1.96
    return fmean(differences), factor * stdev(differences) / count**0.5


def systems_of(
    models: Sequence[str], towers: Sequence[int], ratios: Sequence[int], partitions: Sequence[str]
) -> list[System]:
    """Flat ones first, for others are compared with them. The first partition is tried at all ratios, others at 2."""
    found = [System(model) for model in models]
    swept, *others = partitions
    found += [System(*each, swept) for each in product(models, towers, ratios)]
    return found + [System(*each, 2, kind) for each in product(models, towers) for kind in others]


def measured_of(found: Mapping[str, Mapping[str, float]]) -> list[Measured]:
    """found: by "model / system", its AUC by seed."""
    return [
        Measured(*name.split(" / "), UNIT, list(by_seed.values()))
        for name, by_seed in found.items()
    ]


def losses_of(found: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """By "model / system": flat less towered AUC, of each seed that both have."""
    losses = {}
    for name, by_seed in found.items():
        flat = found.get(f"{name.split(' / ')[0]} / flat", {})
        if not name.endswith(" / flat"):
            losses[name] = [flat[seed] - each for seed, each in by_seed.items() if seed in flat]
    return {name: each for name, each in losses.items() if each}


def ratios_of(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean loss of AUC of each system; of the worst at a ratio of 1 or 2, with where its interval ends."""
    losses = {name: interval(each) for name, each in losses_of(found).items()}
    ratios = {f"loss {name}": round(mean, 6) for name, (mean, _) in losses.items()}
    known = {name: each for name, each in losses.items() if not isnan(each[1])}
    small = [sum(each) for name, each in known.items() if name.endswith(("CR 1", "CR 2"))]
    return ratios | ({"worst_loss_with_interval_at_cr_2": round(max(small), 6)} if small else {})


def print_result(
    console: Console, found: Mapping[str, Mapping[str, float]], best: float | None = None
) -> None:
    """best: the ceiling, where it is known."""
    grid = Grid(title="test AUC" + (f", ceiling {best:.4f}" if best is not None else ""))
    for number, column in enumerate(("model / system", "mean AUC", "loss", "95 %", "seeds")):
        grid.add_column(column, justify="right" if number else "left")
    losses = losses_of(found)
    for name, by_seed in found.items():
        said = ("", "")
        if name in losses:
            mean, half = interval(losses[name])
            said = (f"{mean:+.5f}", f"{half:.5f}")
        grid.add_row(name, f"{fmean(by_seed.values()):.4f}", *said, str(len(by_seed)))
    console.print(grid)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, help="write runs and losses here; go on with what it has"
    )
    parser.add_argument("--quick", action="store_true", help="few samples and systems: to try it")
    parser.add_argument("--samples", type=int, default=10_000_000, help="trained on, once")
    parser.add_argument("--test-samples", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=5, help="of rows and dense weights: 0 ..")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 2, 4, 8], help="dim / D")
    parser.add_argument(
        "--partitions", nargs="+", default=["planted", "learned", "striped", "random"],
        help="planted, learned, striped, random, or a partition's file; others than the first at ratio 2",
    )  # fmt: skip
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048)
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
    found: dict[str, dict[str, float]] = {}
    together: dict[str, dict[str, float]] = {}  # by partition: pairs of planted groups in one tower
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
        if kept.get("settings") != settings:
            parser.error(
                f"--json {options.json}: has runs of {kept.get('settings')}; give another file"
            )
        found, together = kept["runs"], kept["together"]
    splits = open_source(
        "synthetic", num_train=options.samples, num_test=options.test_samples, **STREAM
    )
    assert splits.test is not None
    best = ceiling(splits.test.batches(EVALUATE_BATCH))["auc"]
    systems = systems_of(options.models, options.towers, options.ratios, options.partitions)
    for seed, system in product(range(options.seeds), systems):
        runs = found.setdefault(f"{system.model} / {system.name}", {})
        if str(seed) in runs:
            continue
        runs[str(seed)] = auc(
            system, splits, dim=options.dim, batch_size=options.batch_size, seed=seed
        )
        console.print(f"{system.model} / {system.name}, seed {seed}: {runs[str(seed)]:.5f}")
        if system.towers:
            share = kept_pairs(partition(system.kind, system.towers, seed))
            places = together.setdefault(f"{system.towers} {system.kind} towers", {})
            places[str(seed)] = round(share, 4)
        if options.json:
            machine = describe_machine(threads=torch.get_num_threads(), ceiling=best)
            result = report(
                "towers_quality", version=colonnade.__version__, machine=machine,
                measured=measured_of(found), ratios=ratios_of(found),
            )  # fmt: skip
            kept = {"settings": settings, "runs": found, "together": together}
            write_report(options.json, {**result, **kept})
    print_result(console, found, best)
    for name, by_seed in together.items():
        console.print(
            f"{name}: {fmean(by_seed.values()):.0%} of the planted groups' pairs together"
        )
    for name, loss in ratios_of(found).items():
        if not name.startswith("loss "):
            console.print(f"{name}: {loss:+.5f} (wanted at most {MAX_LOSS})")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ConfigError) as error:
        sys.exit(f"error: {error}")
