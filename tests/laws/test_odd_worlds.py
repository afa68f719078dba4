"""The world law where numbers do not fit: fewer samples than ranks, fewer rows than ranks, nothing looked up at all."""

from __future__ import annotations

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from torch import nn

from colonnade import (
    Adam,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    Uniform,
    build_plan,
)
from colonnade.topology.sharding import replicated, table_wise
from colonnade.train.dense import DenseGradients

SIZES = [1, 17, 0, 2, 6, 1]  # samples of a step, over all ranks
EDGES = [0, 2**63 - 1, -(2**63), -1, 1, 77]
"""Ids of the open table."""


def tables():
    start = Uniform(scale=0.5)
    return [
        Table("single", 3, rows=1, optimizer=RowWiseAdagrad(lr=0.1), initializer=start, dtype="float64"),
        Table("few", 3, rows=2, optimizer=Adam(lr=0.01, eps=1e-3), initializer=start, dtype="float64"),
        Table("open", 3, optimizer=RowWiseAdagrad(lr=0.1), initializer=start, dtype="float64"),
    ]  # fmt: skip


FEATURES = [
    Feature("single", "single"),
    Feature("few", "few"),
    Feature("edge", "open"),
    Feature("edges", "open", pooling="mean"),
    Feature("nothing", "few", pooling="sum"),  # of most steps: no sample has any
]
POOLED = dict.fromkeys(("single", "few", "open"), "pooled")


def plans(num_ranks):
    last = table_wise(num_ranks - 1)
    everywhere = dict.fromkeys(POOLED, replicated(num_ranks))
    return {
        "rows": {},
        "pooled": {"exchanges": POOLED},
        "partials": {"exchanges": dict.fromkeys(POOLED, "partials")},
        "towers": {"exchanges": dict.fromkeys(POOLED, "towers")},
        "tower_rows": {"exchanges": dict.fromkeys(POOLED, "tower_rows")},
        "one rank": {"shardings": dict.fromkeys(POOLED, last)},
        "one rank, pooled": {"shardings": dict.fromkeys(POOLED, last), "exchanges": POOLED},
        "replicated": {"shardings": everywhere, "exchanges": dict.fromkeys(POOLED, "replicated")},
        "mixed": {
            "shardings": {"single": replicated(num_ranks), "few": last},
            "exchanges": {"single": "replicated", "open": "pooled"},
        },
    }


def share(step: int, rank: int, num_ranks: int) -> Batch:
    """Samples are dealt from the last rank on, so that the first has none first."""
    size = SIZES[step]
    random = torch.Generator().manual_seed(step)
    edges = torch.tensor(EDGES)
    one = torch.randint(len(EDGES), (size,), generator=random)
    several = torch.randint(len(EDGES), (size, 3), generator=random)
    counts = torch.randint(4, (size,), generator=random)
    few = torch.randint(2, (size,), generator=random)
    own = range(num_ranks - 1 - rank, size, num_ranks)

    def bag(rows: list[torch.Tensor]) -> Ids:
        offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        return Ids(torch.cat([torch.empty(0, dtype=torch.int64), *rows]), offsets)

    chosen = torch.tensor(list(own), dtype=torch.int64)
    return Batch(
        len(own),
        torch.zeros(len(own), 0),
        {
            "single": Ids(torch.zeros(len(own), dtype=torch.int64)),
            "few": Ids(few[chosen]),
            "edge": Ids(edges[one[chosen]]),
            "edges": bag([edges[several[i][: counts[i]]] for i in own]),
            "nothing": bag([few[i : i + 1] if step == 4 else few[:0] for i in own]),
        },
        label=(one[chosen] % 2).double()[:, None],
    )


def train(mesh, shardings=None, exchanges=None):
    collection = EmbeddingCollection(tables(), FEATURES, seed=5)
    torch.manual_seed(5)
    top = nn.Linear(3, 1, dtype=torch.float64)
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(lookahead=2, tables=by_table(sharding=shardings, exchange=exchanges)),
    )
    collection.open(plan, mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(top.parameters()), mesh)
    dense.build_buckets()
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    steps = (share(t, mesh.rank, mesh.num_ranks) for t in range(len(SIZES)))
    for batch in collection.lookahead(steps):
        dense.zero_gradients()
        looked_up = collection(batch)
        logits = top(torch.stack([looked_up[f.name] for f in FEATURES]).sum(0))
        entropy = nn.functional.binary_cross_entropy_with_logits
        loss = entropy(logits, batch.label, reduction="sum") / max(batch.world_weight, 1e-12)
        loss.backward()
        assert dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)[0]
        rows.step(agreed=True)
        optimizer.step()
    ids = {"single": torch.zeros(1, dtype=torch.int64), "few": torch.arange(2)}
    ids["open"] = torch.tensor(EDGES)
    results = {name: collection.rows(name, which) for name, which in ids.items()}
    return results | {name: value.clone() for name, value in top.state_dict().items()}


def train_by_every_plan(mesh):
    return {name: train(mesh, **plan) for name, plan in plans(mesh.num_ranks).items()}


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 7))]
)
def test_odd_worlds(num_ranks):
    wanted = train(Mesh())
    for of_rank in run_ranks(num_ranks, train_by_every_plan):
        for name, result in of_rank.items():
            for what, value in result.items():
                apart = (value - wanted[what]).abs().max()
                assert torch.allclose(value, wanted[what], rtol=1e-10, atol=1e-12), (
                    name,
                    what,
                    apart,
                )
