"""A rank whose program fails alone while rows travel ahead ends at once, and the others hear of it."""

from __future__ import annotations

import time

import pytest
from ranks import run_ranks
from scenario import features, global_batch, share_of, tables

from colonnade import EmbeddingCollection, RowOptimizer, build_plan
from colonnade.errors import PeerLost


def fail(mesh, where):
    """What became of it, and how long the end took."""
    collection = EmbeddingCollection(tables(), features(), seed=3)
    collection.open(build_plan(collection.tables, mesh.num_ranks, rows_ahead=True), mesh)
    rows = RowOptimizer(collection)
    batches = collection.lookahead(
        share_of(global_batch(t, 23), mesh.rank, mesh.num_ranks) for t in range(20)
    )
    said, began = "", 0.0

    def reach(place, step):
        nonlocal began
        if (place, step, mesh.rank) == (where, 5, 1):
            began = time.monotonic()
            raise ZeroDivisionError

    try:
        for step, batch in enumerate(batches):
            reach("before forward", step)
            total = sum(value.sum() for value in collection(batch).values())
            reach("after forward", step)
            total.backward()
            began = time.monotonic()
            rows.step()
    except (PeerLost, ZeroDivisionError) as error:
        said = f"{type(error).__name__}: {error}"
    if mesh.rank == 1:
        batches.close()
        mesh.presence.stop(said)  # as a program that ends by this error does
    took = time.monotonic() - began
    if mesh.rank == 0:
        batches.close()
    return said, took, collection.ahead.num_rows


@pytest.mark.parametrize("where", ["before forward", "after forward"])
def test_a_rank_that_fails_alone(where):
    (heard, waited, ahead), (said, took, _) = run_ranks(2, fail, where)
    assert ahead > 0
    assert said.startswith("ZeroDivisionError") and took < 20
    assert heard.startswith("PeerLost") and "lost rank 1" in heard and waited < 40
