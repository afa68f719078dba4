"""Every exchange equals exchange/reference.py at the exactness it declares."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from scenario import Net, all_rows, features, global_batch, probe_ids, share_of, tables

from colonnade import Concat, Mesh, RowOptimizer, build_plan
from colonnade.exchange import EXCHANGES
from colonnade.exchange.layout import declare
from colonnade.exchange.reference import ReferenceRows
from colonnade.interaction import FM

SIZES = [9, 4, 0, 1, 13]


def declaration(dtype):
    fields = ["user.deep", "item", "seen", "tags"]
    consumers = {"fm": (FM(), fields), "deep": (Concat(), fields[::-1])}
    return declare(tables(dtype), features(), consumers)


def gradient_like(output, step, rank, i):
    random = torch.Generator().manual_seed(step * 100 + rank * 10 + i)
    return torch.randn(output.shape, generator=random, dtype=output.dtype)


def run_exchange(mesh, name, dtype, staleness):
    """Outputs of every step as this rank saw them, and all rows at the end."""
    collection = Net(dtype).embeddings
    collection.open(
        build_plan(collection.tables, mesh.num_ranks, exchange=name, staleness_steps=staleness),
        mesh,
    )
    rows = RowOptimizer(collection)
    seen = []
    batches = (share_of(global_batch(t, n), mesh.rank, mesh.num_ranks) for t, n in enumerate(SIZES))
    for step, batch in enumerate(collection.lookahead(batches)):
        ticket = batch.ticket
        collection(batch)
        outputs = collection.exchange.pooled(ticket)
        seen.append(outputs)
        ticket.gradients.append(
            [gradient_like(output, step, mesh.rank, i) for i, output in enumerate(outputs)]
        )
        rows.step()
    return seen, all_rows(collection)


CASES = [(dtype, staleness) for dtype in ("float32", "float64") for staleness in (0, 1, 2)]


def run_cases(mesh, name):
    return [run_exchange(mesh, name, dtype, staleness) for dtype, staleness in CASES]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(EXCHANGES))
def test_equals_reference(name, num_ranks):
    assert EXCHANGES[name].exactness.kind == "bitwise"
    everyone = (
        [run_cases(Mesh(), name)] if num_ranks == 1 else run_ranks(num_ranks, run_cases, name)
    )
    for case, (dtype, staleness) in enumerate(CASES):
        check(dtype, staleness, [results[case] for results in everyone])


def check(dtype, staleness, results):
    """results by rank: (outputs of every step, all rows at the end), against the twin's, to the bit."""
    num_ranks = len(results)
    twin, pending = ReferenceRows(declaration(dtype), seed=3), []
    for step, size in enumerate(SIZES):
        shares = [share_of(global_batch(step, size), r, num_ranks) for r in range(num_ranks)]
        # bounded(k): the read for step t sees the updates of steps <= t - 1 - k.
        while len(pending) > staleness:
            twin.apply(*pending.pop(0))
        gradients = []
        for rank, share in enumerate(shares):
            outputs = twin.outputs(share)
            for mine, theirs in zip(outputs, results[rank][0][step], strict=True):
                assert torch.equal(mine, theirs), (
                    f"{dtype}, k={staleness}, step {step}, rank {rank}"
                )
            gradients.append([gradient_like(o, step, rank, i) for i, o in enumerate(outputs)])
        pending.append((shares, gradients))
    for late in pending:
        twin.apply(*late)
    for table in twin.declaration.tables:
        wanted = torch.stack([twin.row(table, i) for i in probe_ids()[table.name].tolist()])
        for _, rows in results:
            assert torch.equal(wanted, rows[table.name]), f"rows of {table.name}"
