"""Sums over hosts of several ranks are first formed inside each host:
the same training, and as many bytes over an uplink as the formula says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from scenario import global_batch, share_of
from test_partials_law import CASES, WIDE, Case, close, our_features, tables, train

from colonnade import (
    Concat,
    EmbeddingCollection,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Sum,
    build_plan,
)

HOSTS, LOCAL = 2, 2
MIXED = Case(  # sums that all ranks have a share of beside fields that lie on one
    {"sums": (Sum(), ("seen", "tags", "item")), "deep": (Concat(), ("user.deep",)), **WIDE},
    "row_wise",
    ("sums",),
    {"user": "pooled", "item": "partials", "tag": "partials", "wide": "partials"},
)
LAWS = {
    "whole tables": (CASES["whole tables"], 0),
    "split tables": (CASES["split tables"], 0),
    "read ahead": (CASES["split tables"], 2),
    "pooled": (replace(CASES["split tables"], exchanges=dict.fromkeys(CASES["split tables"].exchanges, "pooled")), 0),
    "mixed": (MIXED, 0),
}  # fmt: skip


def train_all(mesh):
    return [
        train(
            mesh, case, exchanges=case.exchanges, shardings=case.shardings_in(mesh.num_ranks),
            staleness=staleness,
        )
        for case, staleness in LAWS.values()
    ]  # fmt: skip


def test_equals_one_rank():
    everyone = run_ranks(HOSTS * LOCAL, train_all, ranks_per_host=LOCAL)
    for number, (name, (case, staleness)) in enumerate(LAWS.items()):
        wanted, rows, _ = train(Mesh(), case, staleness=staleness)
        for step, outputs in enumerate(wanted):
            for key, value in outputs.items():
                result = torch.cat([rank[number][0][step][key] for rank in everyone])
                close(result, value, f"{name}, step {step}, {key}")
        for table, value in rows.items():
            for rank in everyone:
                close(rank[number][1][table], value, f"{name}, {table}")


SIZE = 24
"""Samples of all ranks."""
COUNTED = {("partials", "exact"): 8, ("pooled", "exact"): 8, ("partials", "bf16"): 2}
"""Exchange and codec: bytes of a float that crosses."""


def one_step(mesh, exchange, codec):
    """Bytes sent, outputs, and floats of a sample that owners have shares of."""
    case = CASES["split tables"]
    consumers = {"sums": (Sum(), ("seen", "tags", "item")), **WIDE}
    collection = EmbeddingCollection(tables("float64"), our_features(), consumers=consumers, seed=3)
    collection.open(
        build_plan(
            collection.tables,
            mesh.num_ranks,
            PlanConfig(
                codec={"values": codec, "gradients": codec},
                tables=by_table(exchange=dict.fromkeys(case.exchanges, exchange)),
            ),
        ),
        mesh,
    )
    rows = RowOptimizer(collection)
    batch = share_of(global_batch(3, SIZE), mesh.rank, mesh.num_ranks)
    before = dict(mesh.traffic.sent_bytes)
    result = collection(batch)
    wanted = [result[name] for name in consumers]
    sum(value.square().sum() for value in wanted).backward()
    rows.step()
    sent = {key: count - before.get(key, 0) for key, count in mesh.traffic.sent_bytes.items()}
    width = sum(part.layout.arriving.width for part in collection.exchange.parts)
    return sent, {name: result[name].detach() for name in consumers}, width


def steps(mesh):
    return [one_step(mesh, *item) for item in COUNTED]


def test_bytes_between_hosts_are_those_of_the_formula():
    everyone = run_ranks(HOSTS * LOCAL, steps, ranks_per_host=LOCAL)
    exact = torch.cat([rank[0][1]["sums"] for rank in everyone])
    for number, (what, item) in enumerate(COUNTED.items()):
        payload = SIZE * everyone[0][number][2] * item  # of all ranks' samples, to one other host
        for channel in ("fetch", "push"):
            sent = sum(rank[number][0].get((channel, "remote"), 0) for rank in everyone)
            assert sent == (HOSTS - 1) * payload, f"{what}, {channel}"
        result = torch.cat([rank[number][1]["sums"] for rank in everyone])
        limit = 2**-8 if item == 2 else 1e-10
        largest = exact.abs().amax(1, keepdim=True)
        assert ((result - exact).abs() <= limit * HOSTS * largest).all(), what


@pytest.mark.parametrize("exchange", ["pooled", "partials"])
def test_one_host_or_one_rank_each_has_nothing_to_add_first(exchange):
    for ranks_per_host in (1, 2):
        results = run_ranks(2, one_step, exchange, "exact", ranks_per_host=ranks_per_host)
        remote = sum(rank[0].get(("fetch", "remote"), 0) for rank in results)
        assert bool(remote) == (ranks_per_host == 1)


def test_partials_are_narrower_than_values():
    partials, pooled, _ = steps(Mesh())
    assert partials[2] < pooled[2]
