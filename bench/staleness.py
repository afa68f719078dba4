"""Time a step between hosts where ranks cache rows under row clocks, beside steps without a cache.

Minutes: 45 (quick 2).

Hosts are network namespaces on this machine, 2 of 2 ranks, uplinks of 200 Mbit/s, 1 and 10 Gbit/s. Wide & Deep, DeepFM
and DCN with 13 dense columns and an MLP of 64, 32 over 26 one-hot fields of Criteo's cardinalities, cut; GraphSAGE with
two hops of 4 neighbours over a million nodes, drawn by the same power law; D = 64, SGD, 1024 samples a rank, and HET's
128; a step is all of it, the sums of dense gradients over the ranks included.

    no cache           HET's exchange without one: every batch asks for its different rows, and sends their gradients;
                       nothing of it ahead of the step
    rows row-wise      the same with ids of coming batches ahead: our default
    auto               what is foretold to be fastest between these links, without copies
    row_clock default  plan.cache as it is by default: all rows, staleness=100, write_share=0.05
    row_clock(s)       staleness=s, write_share=1, no step_bound, lfu; copies of all rows
    .. dense int8      the same, and no cache, with plan.codec.dense=int8

A write share sends a row the less often the longer a run has used it; so the default cache is timed after 500 steps.
Two streams, both Zipf 1.1: "mixed", where all ranks draw from all rows, and "own", where in the fields of many rows
each rank has rows of its own (samples dealt out by user or region). Faster links than 200 Mbit/s: "mixed" with Wide &
Deep and 1024 samples alone. Copies are filled before anything is timed, and every block is as long as the period after
which copies are asked for and sent, many of them in the same batch.

    default_vs_no_cache       time of a step without a cache over that with the default cache: worst model of 1024
                              samples a rank at the slowest rate; .._128: of 128 samples; .._int8: int8 dense gradients
    row_clock_vs_no_cache     time of a step without a cache over that of the fastest row clock
    row_clock_vs_sync_best    the same for the fastest system without a cache

All ranks share this machine's cores: what a step costs in processor time is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cluster import race
from cluster.race import Extent, Question, Steps
from harness import run_script
from numpy.typing import NDArray
from tables import clock as tables
from tables.clock import CLOCK, DEFAULT, INT8, NO_CACHE
from workers.staleness_colonnade import GRAPH, GRAPH_LOOKUPS, ClickCase

from colonnade.data.sets.synthetic import CRITEO_CARDINALITIES

SKEW = 1.1
DIM = 64
ROWS = 50_000
NODES_OF_ROWS = 20
"""Nodes of a graph for each row of the largest field."""
LARGE = 10_000
"""Rows of a field from which on ranks may have ids of their own."""
BOUNDS = (10, 100)
HISTORY, BLOCK = 153, 12
"""Steps: those that fill copies, those of a block; each at most `Extent.max_steps`."""
LONG_HISTORY = 500
"""Steps before the default cache is timed, which sends rows more often at first."""
PERIOD = 51


def steps_of(system: str) -> Steps:
    """Return the steps of a case. Row clocks have whole periods: owners hear of a row that is always used every s / 2 +
    1 batches, and of many of them at once."""
    if system.startswith(DEFAULT):
        return Steps(LONG_HISTORY, PERIOD)
    if system.startswith(CLOCK):
        bound = next(s for s in BOUNDS if system == f"{CLOCK}({s})")
        return Steps(HISTORY, max(BLOCK, bound // 2 + 1))
    return Steps(0, BLOCK)


def copies(staleness: int) -> dict[str, Any]:
    cache = {
        "staleness": staleness,
        "policy": "lfu",
        "write_share": 1,
        "step_bound": None,
    }
    return {"exchange": "rows", "sharding": "row_wise", "cache": cache}


WITHOUT: dict[str, Any] = {"exchange": "rows", "sharding": "row_wise", "lookahead": 0}
BY_DEFAULT: dict[str, Any] = {"exchange": "rows", "sharding": "row_wise", "cache": {}}
COLONNADE: dict[str, dict[str, Any]] = {
    NO_CACHE: WITHOUT,
    NO_CACHE + INT8: {**WITHOUT, "dense": "int8"},
    "rows row-wise": {"exchange": "rows", "sharding": "row_wise"},
    DEFAULT: BY_DEFAULT,
    DEFAULT + INT8: {**BY_DEFAULT, "dense": "int8"},
    **{f"{CLOCK}({s})": copies(s) for s in BOUNDS},
}


@dataclass(frozen=True)
class Workload:
    name: str
    has_own: bool = False
    batch_size: int = 1024
    model: str = "wide_deep"
    num_batches: int = 1024
    """Batches of each rank before they repeat."""


FULL = Extent(
    ((2, 2),), (0.2, 1.0, 10.0),
    (
        Workload("mixed"), Workload("own", has_own=True), Workload("mixed DeepFM", model="deepfm"),
        Workload("mixed DCN", model="dcn"), Workload("mixed GraphSAGE", model=GRAPH),
        Workload("mixed 128 samples", batch_size=128),
        Workload("mixed 128 samples DeepFM", batch_size=128, model="deepfm"),
        Workload("mixed 128 samples DCN", batch_size=128, model="dcn"),
        Workload("mixed 128 samples GraphSAGE", batch_size=128, model=GRAPH),
    ),
    (), ROWS, rounds=3, block_seconds=0.0, max_steps=LONG_HISTORY, session_steps=0,
    rates={
        name: (0.2,)
        for name in (
            "own", "mixed DeepFM", "mixed DCN", "mixed GraphSAGE", "mixed 128 samples", "mixed 128 samples DeepFM",
            "mixed 128 samples DCN", "mixed 128 samples GraphSAGE",
        )
    },
)  # fmt: skip
QUICK = Extent(
    ((2, 2),), (0.2,), (Workload("mixed", batch_size=128, num_batches=128),), (), ROWS // 10, rounds=1,
    block_seconds=0.0, max_steps=6, session_steps=0,
)  # fmt: skip


def write_case(folder: Path, workload: Workload, num_ranks: int, max_rows: int) -> ClickCase:
    """Write the case that the workers read."""
    is_graph = workload.model == GRAPH
    rows = [min(cardinality, max_rows) for cardinality in CRITEO_CARDINALITIES]
    if is_graph:
        rows = [NODES_OF_ROWS * max_rows]
    size, lookups = workload.batch_size, GRAPH_LOOKUPS if is_graph else 1
    path = race.write_ids(folder, rows, num_ranks, size * lookups, SKEW, workload.num_batches)
    if workload.has_own:
        give_own(np.load(path, mmap_mode="r+"), rows, LARGE)
    return ClickCase(
        ids=str(path), rows=rows, dim=DIM, batch_size=size, lookups=lookups, pooled=not is_graph,
        seed=0, model=workload.model,
    )  # fmt: skip


def give_own(ids: NDArray[np.int64], rows: list[int], least: int) -> None:
    """ids (N, R, F, B), changed in place: in fields of `least` rows or more, rank r of R uses those with id % R = r."""
    num_ranks = ids.shape[1]
    for f, count in enumerate(rows):
        if count >= least:
            for rank in range(num_ranks):
                local = ids[:, rank, f]
                own = local - local % num_ranks + rank
                local[:] = np.where(own < count, own, rank)


QUESTION = Question(
    "staleness", {"colonnade": COLONNADE}, write_case, tables.ratios_of, tables.print_result,
    {"skew": SKEW, "dim": DIM}, steps_of=steps_of,
)  # fmt: skip


if __name__ == "__main__":
    run_script(lambda: race.main(QUESTION, __doc__.splitlines()[0], FULL, QUICK))
