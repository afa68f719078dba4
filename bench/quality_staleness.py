"""Measure what late reads cost in AUC: exactly k updates late, and late by row clocks, beside synchronous training.

A DeepFM over rows of one table, four ranks of 128 samples, on MovieLens-1M (seven fields) and on a synthetic stream of
Criteo's shape (26 fields, Zipf 1.1, seen once).

    synchronous          what any ranks train together: one process with 512 samples stands for them (the world law)
    bounded(k)           PERSIA's: the rows of each batch were read exactly k updates earlier; likewise
    row_clock(s)         HET's: four ranks keep copies, of a tenth of the rows (those used most often), that miss at
                         most s batches of each other rank; as many for reads as for writes. "all kept": of all rows
    row_clock(unbounded) copies that are never asked for again and never sent while they stay

Dense weights are those of the step in all of them. Row clocks of four ranks are computed in one process, too
(`workers/staleness_copies.py`). Before anything else both are held against four real ranks, in float64: `world_gap`
is the largest difference of any logit of any step, or of a test score at the end.

Everything sees the same samples in the same order and begins as the synchronous run of its seed. The rows' learning
rate is the one at which synchronous training is best in a pilot, by validation samples. A FILE that holds some runs
already is gone on with: each is written when it ends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from harness import ArmFile, BenchError, Measured, json_path, run_ranks, say
from rich.console import Console
from tables import staleness as tables
from tables.pilot import find_best_rate
from tables.staleness import AUC, BASE, CEILING, SEED
from torch import Tensor
from workers import staleness_copies, staleness_ranks
from workers.staleness_model import (
    RANKS,
    Data,
    Learning,
    Samples,
    System,
    Trained,
    block_aucs,
    open_movielens,
    open_stream,
)

from colonnade.cache.directory import UNBOUNDED
from colonnade.comm.mesh import Mesh
from colonnade.errors import DataError
from colonnade.staleness import RowClock, row_clock
from colonnade.train.metrics import best_possible_metrics

NEVER = RowClock(UNBOUNDED, UNBOUNDED)
SYSTEMS = (
    System(BASE),
    System("bounded(4)", late=4),
    System("row_clock(100)", clock=row_clock(100)),
    System("row_clock(unbounded)", clock=NEVER),
    System("bounded(16)", late=16),
    System("bounded(1)", late=1),
    System("row_clock(10)", clock=row_clock(10)),
    System("row_clock(10000)", clock=row_clock(10_000)),
    System("row_clock(100), all kept", clock=row_clock(100), cached_share=1.0),
    System("row_clock(unbounded), all kept", clock=NEVER, cached_share=1.0),
)
RATES = {
    "adagrad": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
    "sgd": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
}
"""Learning rates that a pilot may try; it begins in the middle."""
MOVIELENS, STREAM = DATA = ("ml-1m", "stream")
MOVIELENS_EPOCHS = 2
PILOT_SAMPLES, PILOT_WORLD = 1_000_000, 1000
WORLD = "world"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=json_path, help="write scores here; go on with those there")
    parser.add_argument("--quick", action="store_true", help="few samples: to try, not to quote")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--samples", type=int, default=10_000_000, help="of the stream")
    parser.add_argument("--test-samples", type=int, default=500_000, help="of the stream")
    parser.add_argument("--seeds", type=int, default=3, help="0 ..")
    options = parser.parse_args(arguments)
    if options.quick:
        options.data, options.seeds = [STREAM], 1
        options.samples, options.test_samples = 20_480, 5_000
    torch.set_num_threads(1)
    systems = [system for system in SYSTEMS if system.name in options.systems]
    file = ArmFile(
        options.json, "quality_staleness", tables.ratios_of, {"torch": torch.__version__}
    )
    if not any(m.case == WORLD for m in file.measured):
        file.add(world_gaps())
    sizes = options.samples, options.test_samples
    for name, optimizer in product(options.data, options.optimizers):
        learning = pilot(file, name, optimizer, sizes)
        for seed, system in product(range(options.seeds), systems):
            run(file, name, learning(seed), system, sizes)
    tables.print_result(Console(highlight=False, width=200), file.measured, file.build_report())


def label_of(name: str, samples: int) -> str:
    """Label a data set and the part of it that is trained."""
    return name if name == MOVIELENS else f"{name} of {samples:,}"


def run(
    file: ArmFile,
    name: str,
    learning: Learning,
    system: System,
    sizes: tuple[int, int],
) -> None:
    """One system from one seed, unless it is there."""
    label = label_of(name, sizes[0])
    case = f"{label} {learning.optimizer}{SEED}{learning.seed}"
    known = {(m.case, m.system) for m in file.measured if m.unit == AUC}
    if (case, system.name) in known:
        return
    data = opened(name, sizes, learning.seed)
    if name != MOVIELENS and (label, CEILING) not in {(m.case, m.system) for m in file.measured}:
        assert data.splits.test is not None
        best = best_possible_metrics(data.splits.test.batches(8192))["auc"]
        file.add([Measured(label, CEILING, AUC, [best])])
    test = test_blocks(name, sizes)
    done = train(data, learning, system, test)
    aucs = block_aucs(done.scores, [block.label for block in test])
    facts = {**done.facts, "rows lr": learning.lr}
    file.add(
        [Measured(case, system.name, AUC, aucs)]
        + [Measured(case, system.name, unit, [fact]) for unit, fact in facts.items()]
    )
    text = ", ".join(f"{unit} {fact:.4g}" for unit, fact in facts.items())
    say(f"{case} {system.name}: AUC {fmean(aucs):.5f}, {text}")


def train(data: Data, learning: Learning, system: System, test: Sequence[Samples]) -> Trained:
    if system.clock is not None:
        return staleness_copies.train(data, learning, system, test)
    return staleness_ranks.train(data, learning, system, Mesh(), test)


@cache
def opened(name: str, sizes: tuple[int, int], seed: int) -> Data:
    """Open a data set; the stream is the same for every seed."""
    return open_movielens(seed) if name == MOVIELENS else open_stream(*sizes)


@cache
def test_blocks(name: str, sizes: tuple[int, int]) -> list[Samples]:
    """The same whatever the seed."""
    data = opened(name, sizes, 0)
    assert data.splits.test is not None
    return list(data.scored(data.splits.test))


def pilot(
    file: ArmFile,
    name: str,
    optimizer: str,
    sizes: tuple[int, int],
) -> Callable[[int], Learning]:
    """Return the learning by seed: at the rate that is best on validation samples for synchronous training. Of the
    stream, another world's samples, and fewer."""
    samples = min(sizes[0], PILOT_SAMPLES)
    case = f"{label_of(name, samples)} {optimizer} pilot"
    epochs = MOVIELENS_EPOCHS if name == MOVIELENS else 1

    def run_pilot(lr: float) -> list[float]:
        if name == MOVIELENS:
            data = opened(name, sizes, 0)
            part = data.splits.validation
        else:
            data = open_stream(samples, samples // 10, seed=PILOT_WORLD)
            part = data.splits.test
        assert part is not None
        blocks = list(data.scored(part))
        done = train(data, Learning(optimizer, lr, epochs), SYSTEMS[0], blocks)
        aucs = block_aucs(done.scores, [block.label for block in blocks])
        say(f"{case} lr {lr}: AUC {fmean(aucs):.5f}")
        return aucs

    best = find_best_rate(file, case, BASE, RATES[optimizer], run_pilot)
    return lambda seed: Learning(optimizer, best, epochs, seed)


def world_gaps() -> list[Measured]:
    """Return by system the largest difference of a logit between four ranks and one process, in float64."""
    real, results = real_ranks(), []
    data = staleness_ranks.world_data()
    assert data.splits.test is not None
    test = list(data.scored(data.splits.test))
    for learning, system in product(staleness_ranks.WORLD_LEARNING, staleness_ranks.WORLD):
        if system.clock is None:
            done = staleness_ranks.train(data, learning, system, Mesh(), test, keeps_logits=True)
        else:
            done = staleness_copies.train(data, learning, system, test, keeps_logits=True)
        name = f"{learning.optimizer} {system.name}"
        gap = float((torch.cat([*done.logits, done.scores]) - real[name]).abs().max())
        results.append(Measured(WORLD, name, f"largest gap to {RANKS} ranks", [gap]))
        say(f"{name}: one process and {RANKS} ranks differ by {gap:.1e} at most")
    return results


def real_ranks() -> dict[str, Tensor]:
    """Run four ranks of `staleness_ranks.WORLD`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.pt"
        run_ranks(sys.executable, RANKS, ["workers.staleness_ranks", file])
        return torch.load(file)


if __name__ == "__main__":
    try:
        main()
    except (BenchError, DataError) as error:
        sys.exit(f"error: {error}")
