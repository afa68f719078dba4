"""Payload that a choice foretells from a profile equals what is counted on other batches, within 2 %, by purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    Table,
    World,
    build_plan,
)
from colonnade.plan.choice import Forced, choose
from colonnade.plan.flows import PURPOSES
from colonnade.plan.loads import table_loads
from colonnade.plan.profile import profile
from colonnade.topology.sharding import column_wise, replicated, row_wise, table_wise
from colonnade.topology.traffic import Traffic

SIZE, STEPS, RANKS = 900, 10, 3
TABLES = [
    Table("big", 8, rows=5000, optimizer=SGD(lr=0.1)),
    Table("open", 4),
    Table("small", 16, rows=40, optimizer=SGD(lr=0.1)),
    Table("bags", 7, rows=3000, optimizer=SGD(lr=0.1)),
]
FEATURES = [
    Feature("big", "big"), Feature("open", "open"), Feature("small", "small"),
    Feature("again", "big"), Feature("bags", "bags", pooling="mean"),
]  # fmt: skip
FORCED = {
    "rows": {},
    "rows, dealt otherwise": {
        "big": Forced("table_wise", "rows", (1,)), "small": Forced("table_wise", "rows", (2,)),
    },
    "copies beside rows and pooled": {
        "small": Forced("replicated", "replicated"),
        "bags": Forced("table_wise", "pooled", (0,)), "open": Forced("row_wise", "pooled"),
    },
    "columns": {
        "big": Forced("column_wise", "rows", (0, 1, 2)),
        "small": Forced("column_wise", "rows", (0, 2)),
        "bags": Forced("column_wise", "pooled", (0, 1, 2)),
    },
}  # fmt: skip
EVERYWHERE = Forced("row_wise", "rows")


def batch_of(step: int, size: int = SIZE) -> Batch:
    random = torch.Generator().manual_seed(step)

    def draw(high, count=size):
        # Popular ids are spread over a table, and those of the open one over all numbers: bytes of others are not
        # foretold, but measured.
        spread = torch.randperm(high, generator=torch.Generator().manual_seed(high))
        return spread[(torch.rand(count, generator=random) ** 4 * high).long()]

    lengths = torch.randint(0, 12, (size,), generator=random)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = {"big": Ids(draw(5000)), "open": Ids(draw(9000) * -7046029254386353131), "small": Ids(draw(40)),
           "again": Ids(draw(5000)), "bags": Ids(draw(3000, int(ends[-1])), ends)}  # fmt: skip
    return Batch(size, torch.zeros(size, 0), ids)


def shardings_of(forced):
    kinds = {"row_wise": lambda said: row_wise(RANKS), "table_wise": lambda said: table_wise(*said.ranks),
             "column_wise": lambda said: column_wise(said.ranks),
             "replicated": lambda said: replicated(RANKS)}  # fmt: skip
    return {name: kinds[said.kind](said) for name, said in forced.items()}


def counted(mesh):
    """By case: bytes by (purpose, link), this rank's of all steps."""
    found = {}
    for case, forced in FORCED.items():
        alone = replace(mesh, traffic=Traffic())
        collection = EmbeddingCollection(TABLES, FEATURES)
        exchanges = {name: said.exchange for name, said in forced.items()}
        plan = build_plan(
            TABLES, mesh.num_ranks, shardings=shardings_of(forced), exchanges=exchanges
        )
        collection.open(plan, alone)
        rows = RowOptimizer(collection)
        mine = (batch_of(1000 + RANKS * t + mesh.rank, SIZE // RANKS) for t in range(STEPS))
        for batch in collection.lookahead(mine):
            sum(value.sum() for value in collection(batch).values()).backward()
            rows.step()
        found[case] = dict(alone.traffic.sent_bytes)
    return found


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(RANKS, counted)


@pytest.mark.parametrize("case", FORCED)
def test_what_a_choice_foretells_is_counted(everyone, case):
    found = profile(TABLES, FEATURES, [batch_of(step) for step in range(30)])
    world = World(ranks_per_host=RANKS)
    loads = table_loads(TABLES, FEATURES, found, world, batch_size=SIZE, last_batch=100)
    forced = {table.name: FORCED[case].get(table.name, EVERYWHERE) for table in TABLES}
    choice = choose(loads, world, forced=forced)
    for purpose in PURPOSES:
        sent = sum(each[case].get((purpose, "local"), 0) for each in everyone) / (RANKS * STEPS)
        assert choice.sent[purpose, "local"] == pytest.approx(sent, rel=0.02), purpose
        assert choice.sent[purpose, "remote"] == 0
