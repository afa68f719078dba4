"""bounded(k): the read for step t sees exactly the updates of steps <= t-1-k."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, train

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.errors import ConfigError

STEPS = 12


def updates_seen(staleness: int, lookahead: int) -> list[int]:
    """Each step adds one to a single row, so what a read shows is how many updates it saw."""
    table = Table("count", 1, rows=1, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))
    collection = EmbeddingCollection([table], [Feature("one", "count")])
    plan = build_plan(
        collection.tables, 1, PlanConfig(lookahead=lookahead, staleness_steps=staleness)
    )
    collection.open(plan, Mesh())
    rows = RowOptimizer(collection)
    outputs = []
    zero = torch.zeros(1, dtype=torch.int64)
    batches = (Batch(1, torch.zeros(1, 0), {"one": Ids(zero)}) for _ in range(STEPS))
    for batch in collection.lookahead(batches):
        value = collection(batch)["one"]
        outputs.append(int(value.item()))
        (-value).sum().backward()
        rows.step()
    assert int(collection.rows("count", zero).item()) == STEPS  # evaluation sees every update
    return outputs


@pytest.mark.parametrize("lookahead", [0, 1, 2, 7])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5, STEPS, STEPS + 3])
def test_reads_see_exactly_what_is_promised(staleness, lookahead):
    wanted = [max(0, step - staleness) for step in range(STEPS)]
    assert updates_seen(staleness, lookahead) == wanted


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_same_bound_gives_the_same_bits(staleness):
    one = train(Mesh(), staleness=staleness, lookahead=1)
    other = train(Mesh(), staleness=staleness, lookahead=4, evaluate_every=1)
    assert_same_bits(one, other)


def late_ranks(mesh: Mesh) -> list:
    """Train under two bounds, undisturbed and with evaluations that wait for every update; also return counts of one
    row."""
    results: list = []
    for late in ({"staleness": 2}, {"staleness": 4, "late": {"item": 2, "wide": 3}}):
        results.append([train(mesh, lookahead=5, evaluate_every=e, **late) for e in (0, 1)])
    return [*results, under_way(mesh, 2), under_way(mesh, 3)]


def under_way(mesh: Mesh, staleness: int) -> dict:
    """Updates under way after each step; what its read saw; what any rank reads in the end."""
    table = Table("count", 1, rows=1, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))
    collection = EmbeddingCollection([table], [Feature("one", "count")])
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(lookahead=staleness + 1, staleness_steps=staleness),
    )
    collection.open(plan, mesh)
    rows, zero = RowOptimizer(collection), torch.zeros(1, dtype=torch.int64)
    results: dict = {"left": [], "seen": []}
    coming = collection.lookahead(
        Batch(1, torch.zeros(1, 0), {"one": Ids(zero)}) for _ in range(STEPS)
    )
    for batch in coming:
        value = collection(batch)["one"]
        results["seen"].append(round(value.item()))
        (-value).sum().div(mesh.num_ranks).backward()
        rows.step()
        results["left"].append(collection.pipeline.updates.num_pending)
        if len(results["seen"]) == STEPS // 2:
            assert len(coming.fetched) == staleness and collection.pipeline.updates.num_pending == 1
    return results | {
        "last": round(collection.rows("count", zero).item()),
        "missed": collection.pipeline.missed,
    }


def test_updates_under_way_change_no_bit():
    """Ranks whose updates travel while the next step computes read what they do where each is waited for, and what one
    rank does, for which nothing travels."""
    first, second = run_ranks(2, late_ranks)
    for one, other in zip(first[:2], second[:2], strict=True):
        assert_same_bits(*one)
        assert_same_bits(one[0], other[0])
    assert_close(first[0][0], train(Mesh(), lookahead=5, staleness=2), 1e-10)
    for staleness, result in ((2, first[2]), (3, first[3])):
        assert result["seen"] == [max(0, step - staleness) for step in range(STEPS)]
        assert result["last"] == STEPS
        assert result["missed"] == Counter(min(step, staleness) for step in range(STEPS))
        assert max(result["left"]) == 2 and min(result["left"]) == 1


def test_another_bound_gives_another_model():
    one, other = train(Mesh(), staleness=1), train(Mesh(), staleness=2)
    assert not torch.equal(one.rows["user"], other.rows["user"])


def test_stale_reads_need_the_lookahead():
    collection = EmbeddingCollection([Table("t", 2)], [Feature("f", "t")])
    collection.open(build_plan(collection.tables, 1, PlanConfig(staleness_steps=1)), Mesh())
    batch = Batch(1, torch.zeros(1, 0), {"f": Ids(torch.zeros(1, dtype=torch.int64))})
    with pytest.raises(ConfigError, match="lookahead"):
        collection(batch)
