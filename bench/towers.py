"""Savings of towers and of tower modules if links between hosts are slow.

Minutes: 25 (quick 2).

Hosts are network namespaces on this machine, as in `bench exchange`: 2 or 4 of 2 ranks each, uplinks of 1 Gbit/s or
200 Mbit/s; 26 fields of Criteo's cardinalities, cut, with one id or 20 a sample; D = 64 and 128; 1024 samples a rank.
A step is lookup, a fixed gradient back, row-wise Adagrad; with modules also their products, the sum of their weights'
gradients over all ranks, and SGD.

    torchrec     table-wise, without and with the next batch's ids travelling ahead
    flat         rows and pooled, whose choices know no towers
    towers       one tower on each host: values cross once, from a rank that has all of its tower (SPTT)
    towers, rows inside   the same, of rows that come together on that rank, each once
    towers CR    and a module lets every CR-th column out: another model, whose outputs are not compared

All ranks share this machine's cores: what a step costs in processor time is printed beside it.
"""

from __future__ import annotations

from typing import Any

import exchange
from cluster import race
from cluster.race import Extent, Question
from exchange import ALL_FIELDS, BATCH_SIZE, MAX_CARDINALITY, SKEW, Workload
from harness import run_script
from tables import towers as tables

TORCHREC: dict[str, dict[str, Any]] = {
    "torchrec table-wise": {"sharding": "table_wise"},
    "torchrec table-wise ahead": {"sharding": "table_wise", "ahead": True},
}
COLONNADE: dict[str, dict[str, Any]] = {
    "rows row-wise": {"exchange": "rows", "sharding": "row_wise"},
    "rows table-wise": {"exchange": "rows", "sharding": "table_wise"},
    "pooled table-wise": {"exchange": "pooled", "sharding": "table_wise"},
    "towers table-wise": {"exchange": "towers", "sharding": "table_wise"},
    "towers, rows inside table-wise": {"exchange": "tower_rows", "sharding": "table_wise"},
    **{
        f"{name} CR {ratio} lossy": {
            "exchange": exchange,
            "sharding": "table_wise",
            "ratio": ratio,
        }
        for name, exchange in (("towers", "towers"), ("towers, rows inside", "tower_rows"))
        for ratio in tables.RATIOS
    },
}
WORKLOADS = (
    Workload("D=64", ALL_FIELDS, 64, 1),
    Workload("D=128", ALL_FIELDS, 128, 1),
    Workload("20-hot D=64", ALL_FIELDS, 64, 20),
)
FULL = Extent(
    ((2, 2), (4, 2)), (0.2, 1.0), WORKLOADS, (), MAX_CARDINALITY, rounds=3, block_seconds=1.0,
    max_steps=8, session_steps=0,
)  # fmt: skip
QUICK = Extent(
    ((2, 2),), (0.2,), WORKLOADS[:1], (), 20_000, rounds=1, block_seconds=0.3, max_steps=3,
    session_steps=0,
)  # fmt: skip
QUESTION = Question(
    "towers", {"torchrec": TORCHREC, "colonnade": COLONNADE}, exchange.write_case, tables.ratios_of,
    tables.print_result, {"batch_size": BATCH_SIZE, "skew": SKEW},
)  # fmt: skip


if __name__ == "__main__":
    run_script(lambda: race.main(QUESTION, __doc__.splitlines()[0], FULL, QUICK))
