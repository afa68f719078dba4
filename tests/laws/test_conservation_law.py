"""Pushed updates are applied exactly once, for any interleaving, eviction or shard count."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from scenario import Net, all_rows, global_batch, open_backings, probe_ids, share_of

from colonnade import (
    SGD,
    EmbeddingCollection,
    Feature,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)

STEPS, SIZE = 9, 29


def counting(mesh, dram_bytes, staleness, lookahead, folder, accumulate=1):
    """Rows start at zero and each lookup adds one: afterwards a row is the number of its lookups."""
    count = {"optimizer": SGD(lr=1.0), "initializer": Uniform(scale=0.0), "dtype": "float64"}
    tables = [
        Table("user", 5, rows=53, **count),
        Table("item", 5, **count),
        Table("tag", 5, rows=11, **count),
        Table("wide", 3, **count),
    ]
    features = [
        Feature("user", "user"),
        Feature("item", "item"),
        Feature("seen", "item"),
        Feature("history", "wide", pooling="sequence"),
    ]
    collection = EmbeddingCollection(tables, features, seed=1)
    plan = build_plan(
        tables,
        mesh.num_ranks,
        PlanConfig(memory={"dram": dram_bytes}, staleness_steps=staleness, lookahead=lookahead),
    )
    backings = open_backings(folder, mesh, collection.tables) if dram_bytes else []
    collection.open(plan, mesh, backings=backings)
    rows = RowOptimizer(collection)
    batches = (share_of(global_batch(t, SIZE), mesh.rank, mesh.num_ranks) for t in range(STEPS))
    for step, batch in enumerate(collection.lookahead(batches)):
        result = collection(batch)
        sum(-value.sum() for value in result.values()).backward()
        if (step + 1) % accumulate == 0:
            rows.step()
    result = all_rows(collection)
    for backing in backings:
        backing.close()
    return result


@pytest.fixture(scope="module")
def lookups():
    """Count the lookups of each probe id in all batches, by table."""
    counts = {name: torch.zeros(len(ids)) for name, ids in probe_ids().items()}
    readers = {"user": ["user"], "item": ["item", "seen"], "wide": ["history"]}
    for step in range(STEPS):
        batch = global_batch(step, SIZE)
        for table, features in readers.items():
            place = {int(i): k for k, i in enumerate(probe_ids()[table])}
            for feature in features:
                for row_id in batch.ids[feature].values.tolist():
                    counts[table][place[row_id]] += 1
    return counts


def check(result, counts):
    for table, rows in result.items():
        wanted = counts[table].double()[:, None].expand_as(rows)
        assert torch.equal(rows, wanted), table


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("dram_bytes", "staleness", "lookahead"),
    [(None, 0, 2), (100_000, 0, 0), (100_000, 0, 3), (100_000, 2, 2), (None, 4, 1)],
)
def test_one_rank(lookups, dram_bytes, staleness, lookahead, accumulate, tmp_path):
    result = counting(Mesh(), dram_bytes, staleness, lookahead, tmp_path, accumulate)
    check(result, lookups)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_ranks(lookups, num_ranks, tmp_path):
    for results in run_ranks(num_ranks, counting, 100_000, 1, 2, tmp_path, 3):
        check(results, lookups)


def test_a_dropped_batch_leaves_nothing():
    model = Net()
    collection = model.embeddings.open()
    before = all_rows(collection)
    rows = RowOptimizer(collection)
    model(global_batch(0, 20)).sum().backward()
    rows.zero_grad()
    collection.discard_batches()
    rows.step()
    for name, value in all_rows(collection).items():
        assert torch.equal(value, before[name])
