"""Speed of training embeddings on several hosts, compared with TorchRec, and bytes on the links between the hosts.

Minutes: 30 (quick 3).

Hosts are network namespaces on this machine, 2 or 4 of 2 ranks each, whose uplinks carry 1 or 10 Gbit/s in each
direction (tc tbf); torchrun starts the ranks, gloo connects them. Ids are Criteo-shaped: 26 one-hot fields whose
vocabularies are cut to `MAX_CARDINALITY` rows of 64 elements, in worlds of eight ranks to a quarter, so that all
systems fit 24 GiB; Zipf 1.1; 1024 samples a rank. A step is the exchange alone: lookup, a fixed gradient back, row-wise
Adagrad; no dense network. Rows begin as zeros, so every exact system must come to the same outputs, and is checked.

    torchrec    table-wise, row-wise and its planner's choice, the first and last also with the next batch's ids
                travelling ahead; deduplicated ids of sequences are left out, for they have no kernel for the CPU
    colonnade   every exchange and sharding by force, and `auto`; lossy codecs are apart, no ratio counts them

Both live in the same processes for all their choices, and take turns block by block. All ranks share this machine's
cores: what a step costs in processor time is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import race
from cluster.race import Extent, Question
from harness import run_script
from tables import exchange as tables
from workers.exchange_loop import Case

from colonnade.data.sets.synthetic import CRITEO_CARDINALITIES

BATCH_SIZE = 1024
SKEW = 1.1
MAX_CARDINALITY = 500_000
"""Most rows of a table of `NARROW` elements. Wider tables have fewer in proportion, because all systems are in memory
at once. Worlds of more than `FEW` ranks, whose processes need memory too, divide it by `SHARE_OF_MANY`."""
NARROW = 64
FEW, SHARE_OF_MANY = 4, 4
SEQUENCE_FIELDS = (2, 9)
"""Fields of Criteo that are sequences here: one of millions of values, cut, and one of 93,145."""

TORCHREC: dict[str, dict[str, Any]] = {
    "torchrec table-wise": {"sharding": "table_wise"},
    "torchrec table-wise ahead": {"sharding": "table_wise", "ahead": True},
    "torchrec row-wise": {"sharding": "row_wise"},
    "torchrec planner": {"sharding": "planner"},
    "torchrec planner ahead": {"sharding": "planner", "ahead": True},
}
COLONNADE: dict[str, dict[str, Any]] = {
    "rows row-wise": {"exchange": "rows", "sharding": "row_wise"},
    "rows table-wise": {"exchange": "rows", "sharding": "table_wise"},
    "rows host-wise": {"exchange": "rows", "sharding": "host_wise"},
    "pooled row-wise": {"exchange": "pooled", "sharding": "row_wise"},
    "pooled table-wise": {"exchange": "pooled", "sharding": "table_wise"},
    "pooled host-wise": {"exchange": "pooled", "sharding": "host_wise"},
}


@dataclass(frozen=True)
class Workload:
    name: str
    fields: tuple[int, ...]  # of Criteo's
    dim: int
    lookups: int
    pooled: bool = True


ALL_FIELDS = tuple(range(len(CRITEO_CARDINALITIES)))
WORKLOADS = (
    Workload("D=64", ALL_FIELDS, 64, 1),
    Workload("D=128", ALL_FIELDS, 128, 1),
    Workload("sequences of 50 D=64", SEQUENCE_FIELDS, 64, 50, pooled=False),
    Workload("20-hot D=64", ALL_FIELDS, 64, 20),
)


FULL = Extent(
    ((2, 2), (4, 2)), (1.0, 10.0), WORKLOADS, ((1, 1), (1, 2)), MAX_CARDINALITY, rounds=3, block_seconds=1.0,
    max_steps=8, session_steps=1000,
)  # fmt: skip
QUICK = Extent(
    ((2, 2),),
    (1.0,),
    (WORKLOADS[0], WORKLOADS[2]),
    (),
    20_000,
    rounds=1,
    block_seconds=0.3,
    max_steps=3,
    session_steps=0,
)


def write_case(folder: Path, workload: Workload, num_ranks: int, max_cardinality: int) -> Case:
    """Write the ids of every rank; return the case for the workers."""
    max_rows = (
        max_cardinality * NARROW // workload.dim // (1 if num_ranks <= FEW else SHARE_OF_MANY)
    )
    rows = [min(CRITEO_CARDINALITIES[f], max_rows) for f in workload.fields]
    ids = race.write_ids(folder, rows, num_ranks, BATCH_SIZE * workload.lookups, SKEW)
    return Case(
        ids=str(ids), rows=rows, dim=workload.dim, batch_size=BATCH_SIZE,
        lookups=workload.lookups, pooled=workload.pooled, seed=0,
    )  # fmt: skip


QUESTION = Question(
    "exchange", {"torchrec": TORCHREC, "colonnade": COLONNADE}, write_case, tables.ratios_of,
    tables.print_result, {"batch_size": BATCH_SIZE, "skew": SKEW},
)  # fmt: skip


if __name__ == "__main__":
    run_script(lambda: race.main(QUESTION, __doc__.splitlines()[0], FULL, QUICK))
