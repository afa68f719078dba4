"""Bytes and time that a step saves if partial results are sent instead of rows.

Minutes: 60 (quick 3).

Hosts are network namespaces on this machine, as in `bench exchange`: 2 or 4 of 2 ranks each, uplinks of 1 or 10 Gbit/s.
Models are the first operators of LR+FM, Wide&Deep and DeepFM (a first layer 128 wide) over tables of 50,000 rows of D
elements and one weight; 26, 100 and 500 ids a sample (26 x 1, 50 x 2, 100 x 5 fields and ids), Zipf 1.1; 1024 samples
a rank. FM takes bags as variables, or every id (`over ids`: then rows of a field may be split by hash). A step is
lookup, operators, a fixed gradient back to them, SGD; what models have behind them is the same for all, and left out.
Rows begin as zeros, so every system must come to the same outputs, and is checked.

    rows         a parameter server that sends each rank its unique rows, and is sent a sum of gradients for each
    pooled       what owners pool of them
    partials     what owners evaluate of the operators (DES)
    torchrec     pooled, by its kernels, operators in torch; a row and its weight are one row, of a multiple of four

All ranks share this machine's cores: what a step costs in processor time is printed beside it. For 16 to 256 ranks
there are predictions, by the formulas that the measured bytes are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster import race
from cluster.race import Extent, Question
from harness import Measured, run_script
from rich.console import Console
from tables import foretold
from tables import partials as tables
from workers.partials_colonnade import Opened
from workers.partials_loop import OPERATORS, OVER_IDS, ModelCase

BATCH_SIZE = 1024
SKEW = 1.1
ROWS = 50_000

TORCHREC: dict[str, dict[str, Any]] = {
    "torchrec table-wise": {"sharding": "table_wise"},
    "torchrec table-wise ahead": {"sharding": "table_wise", "ahead": True},
    "torchrec row-wise": {"sharding": "row_wise"},
}
COLONNADE: dict[str, dict[str, Any]] = {
    "rows row-wise": {"exchange": "rows", "sharding": "row_wise"},
    "rows table-wise": {"exchange": "rows", "sharding": "table_wise"},
    "pooled row-wise": {"exchange": "pooled", "sharding": "row_wise"},
    "pooled table-wise": {"exchange": "pooled", "sharding": "table_wise"},
    "partials row-wise": {"exchange": "partials", "sharding": "row_wise"},
    "partials table-wise": {"exchange": "partials", "sharding": "table_wise"},
}


@dataclass(frozen=True)
class Workload:
    model: str
    fields: int
    lookups: int
    dim: int

    @property
    def name(self) -> str:
        return f"{self.model} K={self.fields * self.lookups} D={self.dim}"


SHAPES = ((26, 1), (50, 2), (100, 5))
"""Fields, and ids of each."""
FORETOLD = SHAPES[0], SHAPES[2]
"""Cases for more ranks."""
WORKLOADS = tuple(
    Workload(model, *shape, dim) for model in OPERATORS for shape in SHAPES for dim in (8, 16)
) + tuple(
    Workload(model + OVER_IDS, *shape, dim)
    for model in OPERATORS if "fm" in OPERATORS[model]
    for shape in SHAPES if shape[1] > 1
    for dim in (8, 16)
)  # fmt: skip
"""Models, numbers of fields and ids, and dims. Over ids and over fields are the same with one id of a field."""
FULL = Extent(
    ((2, 2), (4, 2)), (1.0, 10.0), WORKLOADS, (), ROWS, rounds=3, block_seconds=0.7, max_steps=8,
    session_steps=0,
)  # fmt: skip
QUICK = Extent(
    ((2, 2),), (1.0,), (WORKLOADS[2], WORKLOADS[8]), (), ROWS // 10, rounds=1, block_seconds=0.3,
    max_steps=3, session_steps=0,
)  # fmt: skip


def write_case(folder: Path, workload: Workload, num_ranks: int, num_rows: int) -> ModelCase:
    """Write the case that the workers read."""
    rows = [num_rows] * workload.fields
    ids = race.write_ids(folder, rows, num_ranks, BATCH_SIZE * workload.lookups, SKEW)
    return ModelCase(
        ids=str(ids), rows=rows, dim=workload.dim,
        batch_size=BATCH_SIZE, lookups=workload.lookups, pooled=True, seed=0, model=workload.model,
    )  # fmt: skip


def predictions(num_rows: int) -> list[dict[str, Any]]:
    """Predict worlds that this machine cannot run."""
    results = []
    for workload in WORKLOADS:
        is_model = workload.model in OPERATORS and workload.dim == 16
        if is_model and (workload.fields, workload.lookups) in FORETOLD:
            case = ModelCase(
                ids="", rows=[num_rows] * workload.fields, dim=workload.dim, batch_size=BATCH_SIZE,
                lookups=workload.lookups, pooled=True, seed=0, model=workload.model,
            )  # fmt: skip
            results += foretold.foretell(
                workload.name,
                Opened.declared(case),
                batch_size=BATCH_SIZE,
                lookups=workload.lookups,
                skew=SKEW,
            )
    return [asdict(workload) for workload in results]


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    tables.print_result(console, measured, result)
    foretold.print_foretold(console, result["machine"]["predictions"])


QUESTION = Question(
    "partials", {"torchrec": TORCHREC, "colonnade": COLONNADE}, write_case, tables.ratios_of,
    print_result, {"batch_size": BATCH_SIZE, "skew": SKEW},
)  # fmt: skip


if __name__ == "__main__":
    facts = {**QUESTION.facts, "predictions": predictions(ROWS)}
    question = replace(QUESTION, facts=facts)
    run_script(lambda: race.main(question, __doc__.splitlines()[0], FULL, QUICK))
