"""Payload counted on the wire equals the prediction made from other batches of the same data, within 2 %."""

from __future__ import annotations

import pytest
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
from colonnade.exchange.codec import EXACT, Codecs
from colonnade.exchange.contract import Load
from colonnade.exchange.packing import measured_id_bytes

NUM_RANKS, SIZE, STEPS = 2, 512, 12
TABLES = [
    Table("big", 8, rows=5000),
    Table("spread", 8, rows=5000),
    Table("open", 4),
    Table("small", 16, rows=40),
]
FEATURES = [Feature(table.name, table.name) for table in TABLES]
SPREAD = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
"""Popular ids of this table lie anywhere, so that a formula foretells their bytes; others' are measured."""


def batch_of(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(step * NUM_RANKS + rank)

    def draw(high):
        return Ids((torch.rand(SIZE, generator=random) ** 4 * high).long())

    ids = {"big": draw(5000), "open": draw(9000), "small": draw(40)}
    ids["spread"] = Ids(SPREAD[draw(5000).values])
    return Batch(SIZE, torch.zeros(SIZE, 0), ids)


def counted_bytes(mesh, codecs):
    collection = EmbeddingCollection(TABLES, FEATURES)
    collection.open(build_plan(TABLES, mesh.num_ranks, codecs=codecs), mesh)
    rows = RowOptimizer(collection)
    for batch in collection.lookahead(batch_of(t, mesh.rank) for t in range(STEPS)):
        sum(value.sum() for value in collection(batch).values()).backward()
        rows.step()
    return dict(mesh.traffic.sent_bytes)


def predicted_bytes(codecs):
    unique, remote, measured = {}, {}, {}
    for table in TABLES:
        counts, others, sizes = [], [], []
        for step in range(100, 100 + STEPS):
            for rank in range(NUM_RANKS):
                ids = batch_of(step, rank).ids[table.name].values.unique()
                owner = torch.as_tensor(_native.owner_of(ids, table.rows or 0, NUM_RANKS))
                counts.append(len(ids))
                others.append(int((owner != rank).sum()))
                sizes.append(measured_id_bytes(ids, table.rows or 0, NUM_RANKS))
        unique[table.name] = sum(counts) / len(counts)
        remote[table.name] = sum(others) / len(others)
        if table.name != "spread":
            measured[table.name] = sum(sizes) / len(sizes)
    widths = {table.name: table.width * table.itemsize for table in TABLES}
    load = Load(unique, remote, widths, measured)
    exchange = (
        EmbeddingCollection(TABLES, FEATURES).open(build_plan(TABLES, codecs=codecs)).exchange
    )
    return exchange.cost(load, World(ranks_per_host=NUM_RANKS)).payload_bytes


@pytest.mark.parametrize("codecs", [EXACT, Codecs("int8", "fp16")], ids=["exact", "coded"])
def test_counted_equals_predicted(codecs):
    everyone = run_ranks(NUM_RANKS, counted_bytes, codecs)
    for key, predicted in predicted_bytes(codecs).items():
        counted = sum(sent.get(key, 0) for sent in everyone) / (NUM_RANKS * STEPS)
        assert abs(counted - predicted) <= 0.02 * predicted, (key, counted, predicted)


def test_one_rank_sends_nothing():
    collection = EmbeddingCollection(TABLES, FEATURES)
    collection(batch_of(0, 0))
    assert not collection.mesh.traffic.sent_bytes
