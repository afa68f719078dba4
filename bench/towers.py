"""Savings of towers and of tower modules if links between hosts are slow.

Minutes: 25 (quick 2).

Hosts are network namespaces on this machine, as in `bench exchange`: 2 or 4 of 2 ranks each, uplinks of 1 Gbit/s or
200 Mbit/s; 26 fields of Criteo's cardinalities, cut, with one id or 20 a sample; D = 64 and 128; 1024 samples a rank.
A step is lookup, a fixed gradient back, row-wise Adagrad; with modules also their products, the sum of their weights'
gradients over all ranks, and SGD.

    torchrec     table-wise and its planner's choice, the next batch's ids travelling ahead
    flat         rows and pooled, whose choices know no towers
    towers       one tower on each host: values cross once, from a rank that has all of its tower (SPTT)
    towers, rows inside   the same, of rows that come together on that rank, each once
    towers CR    and a DLRM's or DCN-v2's tower modules, as `model.tower_ratio: CR` makes them: another model, whose
                 outputs are not compared
    fp16, int8   values and gradients in that codec: ours between towers only, TorchRec's is FBGEMM's

All ranks share this machine's cores: what a step costs in processor time is printed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import exchange
import hybrid
from cluster import race
from cluster.race import Extent, Question
from exchange import ALL_FIELDS, BATCH_SIZE, SKEW, Workload
from harness import run_script
from tables import towers as tables
from tables.towers import CODECS, LOSSY

MAX_CARDINALITY = 200_000
"""Most rows of a table; fewer than in `bench exchange`, because more systems are in memory at once."""
TOWERS: dict[str, dict[str, Any]] = {
    "towers": {"exchange": "towers", "sharding": "table_wise"},
    "towers, rows inside": {"exchange": "tower_rows", "sharding": "table_wise"},
}


def add_codecs(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the systems with each codec."""
    return {
        f"{name.removesuffix(f' {LOSSY}')} {codec} {LOSSY}": {**choice, "codec": codec}
        for name, choice in systems.items()
        for codec in CODECS
    }


def add_modules(ratio: int, model: str) -> dict[str, dict[str, Any]]:
    """Return the exchanges of towers with a model's modules."""
    word = "" if model == tables.MODEL else f" {model}"
    return {
        f"{name} CR {ratio}{word} {LOSSY}": {**choice, "ratio": ratio, "model": model}
        for name, choice in TOWERS.items()
    }


TORCHREC = hybrid.TORCHREC | add_codecs(hybrid.TORCHREC)
COLONNADE = hybrid.SYNCHRONOUS | add_codecs(hybrid.SYNCHRONOUS)
COLONNADE |= {f"{name} table-wise": choice for name, choice in TOWERS.items()}
for ratio in tables.RATIOS:
    COLONNADE |= add_modules(ratio, tables.MODEL)
COLONNADE |= add_modules(4, tables.OTHER_MODEL) | add_codecs(add_modules(4, tables.MODEL))
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
