"""Codecs: what ranks read and what owners add up is off by no more than the exchange declares, and is the same every
time and however rows are dealt."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from plans import by_table
from ranks import run_ranks

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.plan.plan import Codecs
from colonnade.topology.sharding import replicated, row_wise, table_wise
from colonnade.wire.codec import CODECS

NUM_RANKS, SIZE, STEPS, DIM, ROWS = 3, 40, 2, 12, 60
NAMES = ("bf16", "fp16", "int8")
IDS = torch.arange(ROWS)


def batch_of(step, rank):
    random = torch.Generator().manual_seed(100 * step + rank)

    def draw():
        return Ids(torch.randint(0, ROWS, (SIZE,), generator=random))

    return Batch(SIZE, torch.zeros(SIZE, 0), {"a": draw(), "b": draw()})


def gradient_of(step, rank):
    random = torch.Generator().manual_seed(7000 + 100 * step + rank)
    return torch.randn(SIZE, DIM, generator=random) * 10.0 ** torch.randint(
        -6, 2, (SIZE, 1), generator=random
    )


def train(mesh, codecs, exchange, sharding):
    """Values read in each step, and rows before and after each, all of table "a"."""
    tables = [
        Table("a", DIM, rows=ROWS, optimizer=SGD(lr=1.0)),
        Table("b", 4, optimizer=SGD(lr=1.0)),
    ]
    collection = EmbeddingCollection(tables, [Feature("a", "a"), Feature("b", "b")], seed=5)
    shardings = {name: sharding for name in ("a", "b")}
    plan = build_plan(
        tables,
        mesh.num_ranks,
        PlanConfig(exchange=exchange, codec=asdict(codecs), tables=by_table(sharding=shardings)),
    )
    collection.open(plan, mesh)
    rows, outputs = RowOptimizer(collection), []
    for step in range(STEPS):
        before = collection.rows("a", IDS)
        result = collection(batch_of(step, mesh.rank))
        read = result["a"].detach().clone()
        torch.autograd.backward(
            [result["a"], result["b"]], [gradient_of(step, mesh.rank), torch.ones_like(result["b"])]
        )
        rows.step()
        outputs.append((before, read, collection.rows("a", IDS)))
    sent = {p: mesh.traffic.bytes_of(p) for p in ("fetch", "push")}
    mesh.traffic.sent_bytes.clear()
    return outputs, collection.exchange.exactness, sent


def all_cases(mesh):
    results = {}
    for name in ("exact", *NAMES):
        codecs = Codecs(name, name)
        for exchange in ("rows", "pooled", "partials"):
            results[name, exchange] = train(mesh, codecs, exchange, row_wise(NUM_RANKS))
        results[name, "again"] = train(mesh, codecs, "rows", row_wise(NUM_RANKS))
        results[name, "one"] = train(mesh, codecs, "rows", table_wise(1))
        results[name, "copies"] = train(mesh, codecs, "rows", replicated(NUM_RANKS))
    return results


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(NUM_RANKS, all_cases)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exchange", ["rows", "pooled", "partials"])
def test_no_further_off_than_declared(everyone, name, exchange):
    exactness = everyone[0][name, exchange][1]
    codec = CODECS[name]
    assert exactness.kind == "lossy" and exactness.max_error == codec.random_error
    largest_error = 0.0
    for step in range(STEPS):
        before, _, after = everyone[0][name, exchange][0][step]
        allowed, wanted = torch.zeros(ROWS), before.clone()
        for rank, results in enumerate(everyone):
            read = results[name, exchange][0][step][1]
            ids, gradient = batch_of(step, rank).ids["a"].values, gradient_of(step, rank)
            off = (read - before[ids]).abs().amax(1)
            assert bool((off <= codec.nearest_error * before[ids].abs().amax(1)).all())
            largest_error = max(largest_error, float(off.max()))
            sums = torch.zeros(ROWS, DIM).index_add_(0, ids, gradient)
            wanted -= sums
            # Rows travel one gradient each; pooled, each lookup's value does.
            allowed_share = (
                sums.abs().amax(1)
                if exchange == "rows"
                else torch.zeros(ROWS).index_add_(0, ids, gradient.abs().amax(1))
            )
            allowed += codec.random_error * allowed_share
        off = (after - wanted).abs().amax(1)
        assert bool((off <= allowed + 1e-5 * wanted.abs().amax(1) + 1e-7).all())
        largest_error = max(largest_error, float(off.max()))
    assert largest_error > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time_and_however_rows_are_dealt(everyone, name):
    for results in everyone:
        first = results[name, "rows"][0]
        for other in ("again", "one", "copies"):
            for actual, expected in zip(first, results[name, other][0], strict=True):
                assert all(map(torch.equal, actual, expected)), other


@pytest.mark.parametrize("name", NAMES)
def test_bytes_shrink_as_told(everyone, name):
    codec = CODECS[name]
    for exchange in ("rows", "pooled", "partials"):
        for results in everyone:
            exact, coded = results["exact", exchange][2], results[name, exchange][2]
            for channel in ("fetch", "push"):
                least = codec.row_bytes([DIM], torch.float32) / (4 * DIM)
                most_bytes = codec.row_bytes([4], torch.float32) / 16
                assert least <= coded[channel] / exact[channel] <= most_bytes
