"""Every rank's training thread makes the same calls in the same order, whatever the rank has."""

from __future__ import annotations

import torch
from plans import by_table
from ranks import run_ranks

from colonnade import (
    EmbeddingCollection,
    Feature,
    MaxRowsEviction,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.batch import Batch, Ids
from colonnade.comm.mesh import THREADS, TRAINING
from colonnade.topology.sharding import table_wise

TABLES = [Table("kept", 4, eviction=MaxRowsEviction(rows=8)), Table("whole", 4, rows=50)]
FEATURES = [Feature(table.name, table.name) for table in TABLES]


def calls_of(mesh: Mesh, staleness: int) -> list[str]:
    """Train some steps where one rank alone has a table that forgets; return the training thread's calls."""
    calls, begin = [], Mesh._begin_call

    def record(self, channel, start, *scope):
        if THREADS[channel] == TRAINING:
            calls.append(self.prefix + self.call_name(channel, *scope))
        return begin(self, channel, start, *scope)

    shardings = {"kept": table_wise(1), "whole": table_wise(0)}
    plan = build_plan(
        TABLES,
        mesh.num_ranks,
        PlanConfig(staleness_steps=staleness, tables=by_table(sharding=shardings)),
    )
    collection = EmbeddingCollection(TABLES, FEATURES).open(plan, mesh)
    rows = RowOptimizer(collection)
    generator = torch.Generator().manual_seed(mesh.rank)
    batches = [
        Batch(4, None, {t.name: Ids(torch.randint(50, (4,), generator=generator)) for t in TABLES})
        for _ in range(8)
    ]
    Mesh._begin_call = record
    try:
        for batch in collection.lookahead(batches):
            sum(output.sum() for output in collection(batch).values()).backward()
            rows.step()
    finally:
        Mesh._begin_call = begin
    return calls


def test_ranks_call_in_one_order():
    for staleness in (0, 1, 2, 4):
        first, *others = run_ranks(3, calls_of, staleness)
        assert "fetch" in first and "push" in first
        for other in others:
            assert other == first, staleness
