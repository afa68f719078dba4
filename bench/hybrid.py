"""Time for rows between hosts that bounded staleness hides behind dense work.

Minutes: 25 (quick 2).

Hosts are network namespaces on this machine, 2 of 2 ranks, uplinks of 200 Mbit/s, 1 and 10 Gbit/s; 26 one-hot fields
of Criteo's cardinalities, cut, D = 64, Zipf 1.1, 1024 samples a rank, as in `bench exchange`. Beside the exchange each
rank takes an MLP of three layers over its fields forward and back: of 0 units (the exchange alone), and of as many as
make computing about as long as communicating at one of the rates.

    colonnade   every synchronous plan, and the same plans bounded(1) and bounded(4)
    torchrec    table-wise and its planner's choice, ids of the next batch ahead

    overlap_won    (t_sync - t) / (t_sync - max(compute, communication)) of the best bounded plan: 1 where the shorter
                   of the two is hidden. t_sync: our best synchronous plan; compute: its step between links that are
                   not shaped; communication: its step with no dense work. Of cases where the two are alike
    overlap_reached    the same, where the bound is at least what a step needs of the processors, too (those of our
                   synchronous step's processes, over the cores): all ranks share them, and what computing and
                   communicating both need of a processor cannot overlap. What the kernel does for links beside the
                   processes is not in it, so less can be reached
    hybrid_vs_sync_best    t_sync / t
    time_to_score_bounded4    time in which synchronous training has its last AUC over that in which reads four steps
                   late have it: t_sync / t times their steps by `bench quality` (`quality_late.json`: the stream of 10
                   million samples). Of cases where the two are alike
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import exchange
from cluster import race
from cluster.race import Extent, Question
from exchange import ALL_FIELDS, BATCH_SIZE, MAX_CARDINALITY, SKEW, Workload
from harness import Measured, run_script
from tables import hybrid as tables
from workers.hybrid_dense import HybridCase

LATE = (1, 4)
TORCHREC: dict[str, dict[str, Any]] = {
    "torchrec table-wise ahead": {"sharding": "table_wise", "ahead": True},
    "torchrec planner ahead": {"sharding": "planner", "ahead": True},
}
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "rows row-wise": {"exchange": "rows", "sharding": "row_wise"},
    "rows table-wise": {"exchange": "rows", "sharding": "table_wise"},
    "pooled table-wise": {"exchange": "pooled", "sharding": "table_wise"},
}
COLONNADE = SYNCHRONOUS | {
    f"{tables.LATE}({k}) {name}": {**choice, "late": k}
    for k in LATE
    for name, choice in SYNCHRONOUS.items()
}


@dataclass(frozen=True)
class Dense(Workload):
    hidden: int = 0


def dense(hidden: int) -> Dense:
    return Dense(tables.name_of(hidden), ALL_FIELDS, 64, 1, hidden=hidden)


FULL = Extent(
    ((2, 2),), (0.2, 1.0, 10.0), tuple(map(dense, (0, 32, 96, 256))), (), MAX_CARDINALITY, rounds=5,
    block_seconds=2.0, max_steps=20, session_steps=0,
)  # fmt: skip
QUICK = Extent(
    ((2, 2),), (1.0,), tuple(map(dense, (0, 96))), (), 20_000, rounds=1, block_seconds=0.5,
    max_steps=4, session_steps=0,
)  # fmt: skip


def write_case(folder: Path, workload: Dense, num_ranks: int, max_cardinality: int) -> HybridCase:
    """Write the case that the workers read."""
    case = exchange.write_case(folder, workload, num_ranks, max_cardinality)
    return HybridCase(**asdict(case), hidden=workload.hidden)


def counted(name: str, case: HybridCase) -> list[Measured]:
    return [Measured(name + tables.CORES, "machine", "processors", [float(os.cpu_count() or 1)])]


QUESTION = Question(
    "hybrid", {"torchrec": TORCHREC, "colonnade": COLONNADE}, write_case, tables.ratios_of,
    tables.print_result, {"batch_size": BATCH_SIZE, "skew": SKEW}, counted,
)  # fmt: skip


if __name__ == "__main__":
    run_script(lambda: race.main(QUESTION, __doc__.splitlines()[0], FULL, QUICK))
