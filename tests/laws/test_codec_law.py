"""Codecs: what ranks read and what owners add up is off by no more than the exchange declares, and is the same every
time and however rows are dealt."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from plans import by_table, cache_settings
from ranks import run_ranks
from scenario import assert_same_bits, tables
from scenario import train as train_scenario

from colonnade import (
    SGD,
    Adagrad,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.comm.traffic import Traffic
from colonnade.plan.plan import Codecs
from colonnade.staleness import TableCache, row_clock
from colonnade.topology.sharding import replicated, row_wise, table_wise
from colonnade.wire.codec import CODECS, decode_rows, encode_rows

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


CODED = [{"values": "int8", "gradients": "fp16"}, {"values": "bf16", "gradients": "int8"}]


def train_with_codecs_and_caches(mesh):
    """Yield pairs of a run without a cache and one whose cache is never late, for each codec."""
    caches = {table.name: TableCache(5, row_clock(0)) for table in tables() if table.name != "tag"}
    return [
        (
            train_scenario(mesh, codec=codec),
            train_scenario(mesh, codec=codec, caches=caches, cache_tier=tier),
        )
        for codec, tier in zip(CODED, ("dram", "hbm"), strict=True)
    ]


def test_caches_that_are_never_late_have_the_bits_of_coded_rows():
    for pairs in run_ranks(2, train_with_codecs_and_caches):
        for plain, cached in pairs:
            assert_same_bits(plain, cached)


def read_late_copies(mesh, codecs, tier="dram"):
    """Every rank uses rows 0 to 3 in each batch, with gradients that do not depend on them. Return what this rank read
    by step, and the owners' rows at its end."""
    table = Table("a", DIM, rows=ROWS, optimizer=Adagrad(lr=0.5), initializer=Uniform(scale=1.0))
    collection = EmbeddingCollection([table], [Feature("a", "a", pooling="sequence")], seed=5)
    cache = TableCache(ROWS, row_clock(7, 3, 4, 1.0))
    settings = PlanConfig(codec=codecs, cache=cache_settings({"a": cache}, tier))
    collection.open(build_plan([table], mesh.num_ranks, settings), mesh)
    rows = RowOptimizer(collection)
    ids = Ids(torch.arange(4), torch.tensor([0, 4]))
    reads = []
    for step in range(9):
        value = collection(Batch(1, torch.zeros(1, 0), {"a": ids}))["a"]
        reads.append(value.detach().clone())
        (value * gradient_of(step, mesh.rank)[:4]).sum().backward()
        rows.step()
    with rows.synchronized_view():
        return reads, collection.rows("a", torch.arange(4))


@pytest.mark.parametrize("tier", ["dram", "hbm"])
def test_values_are_rounded_when_copies_are_fetched_and_owners_rows_are_not(tier):
    exact, coded, sums = (
        run_ranks(2, read_late_copies, codecs, tier)
        for codecs in ({}, {"values": "int8"}, {"gradients": "int8"})
    )
    for (reads, stored), (others, other_rows) in zip(exact, coded, strict=True):
        assert torch.equal(stored, other_rows)  # gradients do not depend on what was read
        for read, other in zip(reads, others, strict=True):
            bound = read.abs().amax(1, keepdim=True) * CODECS["int8"].nearest_error
            assert ((read - other).abs() <= 1.01 * bound + 1e-6).all()
        int8 = CODECS["int8"]
        rounded = decode_rows(int8, encode_rows(int8, reads[0], (DIM,), None), (DIM,))
        assert torch.equal(others[0], rounded) and not torch.equal(others[0], reads[0])
    for (reads, stored), (others, other_rows) in zip(exact, sums, strict=True):
        for read, other in zip(reads[:4], others[:4], strict=True):
            assert torch.equal(read, other)  # a rank's own copy has its own gradients as they are
        assert not torch.equal(reads[8], others[8])
        torch.testing.assert_close(stored, other_rows, rtol=0.05, atol=0.05)


def count_bytes(mesh):
    """Return the bytes sent by channel with exact messages and coded ones."""
    results = []
    for codecs in ({}, {"values": "int8", "gradients": "int8"}):
        own = replace(mesh, traffic=Traffic())
        read_late_copies(own, codecs)
        results.append([own.traffic.bytes_of(channel) for channel in ("fetch", "push")])
    return results


def test_messages_of_caches_shrink_as_codecs_say():
    """A record has 12 floats of weights and as many of state."""
    for exact, coded in run_ranks(2, count_bytes):
        assert coded[0] / exact[0] == pytest.approx((12 + 4 + 48) / 96, abs=0.01)
        assert coded[1] / exact[1] == pytest.approx((12 + 4) / 48, abs=0.05)
