"""Payload counted on the wire equals the prediction made from other batches of the same data, within 2 %."""

from __future__ import annotations

import torch
from ranks import run_ranks

from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    Table,
    World,
    _native,
    build_plan,
)
from colonnade.exchange.contract import Load

NUM_RANKS, SIZE, STEPS = 2, 512, 12
TABLES = [Table("big", 8, rows=5000), Table("open", 4), Table("small", 16, rows=40)]
FEATURES = [Feature(name, name) for name in ("big", "open", "small")]


def batch_of(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(step * NUM_RANKS + rank)

    def draw(high):
        return Ids((torch.rand(SIZE, generator=random) ** 4 * high).long())

    return Batch(
        SIZE, torch.zeros(SIZE, 0), {"big": draw(5000), "open": draw(9000), "small": draw(40)}
    )


def counted_bytes(mesh):
    collection = EmbeddingCollection(TABLES, FEATURES)
    collection.open(build_plan(TABLES, mesh.num_ranks), mesh)
    rows = RowOptimizer(collection)
    for batch in collection.lookahead(batch_of(t, mesh.rank) for t in range(STEPS)):
        sum(value.sum() for value in collection(batch).values()).backward()
        rows.step()
    return dict(collection.exchange.traffic.sent_bytes)


def predicted_bytes():
    unique, remote = {}, {}
    for table in TABLES:
        counts, others = [], []
        for step in range(100, 100 + STEPS):
            for rank in range(NUM_RANKS):
                ids = batch_of(step, rank).ids[table.name].values.unique()
                owner = torch.as_tensor(_native.owner_of(ids, table.rows or 0, NUM_RANKS))
                counts.append(len(ids))
                others.append(int((owner != rank).sum()))
        unique[table.name] = sum(counts) / len(counts)
        remote[table.name] = sum(others) / len(others)
    load = Load(unique, remote, {table.name: table.width * table.itemsize for table in TABLES})
    exchange = EmbeddingCollection(TABLES, FEATURES).open().exchange
    return exchange.cost(load, World(ranks_per_host=NUM_RANKS)).payload_bytes


def test_counted_equals_predicted():
    everyone = run_ranks(NUM_RANKS, counted_bytes)
    for purpose, predicted in predicted_bytes().items():
        counted = sum(sent[purpose] for sent in everyone) / (NUM_RANKS * STEPS)
        assert abs(counted - predicted) <= 0.02 * predicted, (purpose, counted, predicted)


def test_one_rank_sends_nothing():
    collection = EmbeddingCollection(TABLES, FEATURES)
    collection(batch_of(0, 0))
    assert not collection.exchange.traffic.sent_bytes
