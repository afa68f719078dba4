"""bounded(k): the read for step t sees exactly the updates of steps <= t-1-k. unbounded: how many it sees is measured,
and every update is applied once."""

from __future__ import annotations

import time
from collections import Counter
from threading import Semaphore

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
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.consistency import CONSISTENCIES, consistency
from colonnade.errors import ConfigError

STEPS = 12


def updates_seen(staleness: int, lookahead: int) -> list[int]:
    """Each step adds one to a single row, so what a read shows is how many updates it saw."""
    table = Table("count", 1, rows=1, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))
    collection = EmbeddingCollection([table], [Feature("one", "count")])
    plan = build_plan(collection.tables, lookahead=lookahead, staleness_steps=staleness)
    collection.open(plan, Mesh())
    rows = RowOptimizer(collection)
    seen = []
    zero = torch.zeros(1, dtype=torch.int64)
    batches = (Batch(1, torch.zeros(1, 0), {"one": Ids(zero)}) for _ in range(STEPS))
    for batch in collection.lookahead(batches):
        value = collection(batch)["one"]
        seen.append(int(value.item()))
        (-value).sum().backward()
        rows.step()
    assert int(collection.rows("count", zero).item()) == STEPS  # evaluation sees every update
    return seen


@pytest.mark.parametrize("lookahead", [0, 1, 2, 7])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5, STEPS, STEPS + 3])
def test_reads_see_exactly_what_is_promised(staleness, lookahead):
    promised = consistency(staleness)
    wanted = [max(0, promised.newest_visible(step) + 1) for step in range(STEPS)]
    assert updates_seen(staleness, lookahead) == wanted


def test_bounded_zero_is_synchronous():
    bounded = CONSISTENCIES["bounded"](0)
    synchronous = CONSISTENCIES["synchronous"]()
    for step in range(5):
        assert bounded.newest_visible(step) == synchronous.newest_visible(step) == step - 1


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_same_bound_gives_the_same_bits(staleness):
    one = train(Mesh(), staleness=staleness, lookahead=1)
    other = train(Mesh(), staleness=staleness, lookahead=4, evaluate_every=1)
    assert_same_bits(one, other)


def late_ranks(mesh: Mesh) -> list:
    """Of two bounds: trained as it comes; with every update waited for by an evaluation; and the counts of one row."""
    found: list = []
    for late in ({"staleness": 2}, {"staleness": 4, "late": {"item": 2, "wide": 3}}):
        found.append([train(mesh, lookahead=5, evaluate_every=e, **late) for e in (0, 1)])
    return [*found, under_way(mesh, 2), under_way(mesh, 3)]


def under_way(mesh: Mesh, staleness: int) -> dict:
    """Updates under way after each step; what its read saw; what any rank reads in the end."""
    table = Table("count", 1, rows=1, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))
    collection = EmbeddingCollection([table], [Feature("one", "count")])
    plan = build_plan(
        collection.tables, mesh.num_ranks, lookahead=staleness + 1, staleness_steps=staleness
    )
    collection.open(plan, mesh)
    rows, zero = RowOptimizer(collection), torch.zeros(1, dtype=torch.int64)
    found: dict = {"left": [], "seen": []}
    coming = collection.lookahead(
        Batch(1, torch.zeros(1, 0), {"one": Ids(zero)}) for _ in range(STEPS)
    )
    for batch in coming:
        value = collection(batch)["one"]
        found["seen"].append(round(value.item()))
        (-value).sum().div(mesh.num_ranks).backward()
        rows.step()
        found["left"].append(len(collection.updates))
        if len(found["seen"]) == STEPS // 2:
            assert len(coming.fetched) == staleness and len(collection.updates) == 1
    return found | {
        "last": round(collection.rows("count", zero).item()),
        "missed": collection.missed,
    }


def test_updates_under_way_change_no_bit():
    """Ranks whose updates travel while the next step computes read what they do where each is waited for, and what one
    rank does, for which nothing travels."""
    first, second = run_ranks(2, late_ranks)
    for one, other in zip(first[:2], second[:2], strict=True):
        assert_same_bits(*one)
        assert_same_bits(one[0], other[0])
    assert_close(first[0][0], train(Mesh(), lookahead=5, staleness=2), 1e-10)
    for staleness, found in ((2, first[2]), (3, first[3])):
        assert found["seen"] == [max(0, step - staleness) for step in range(STEPS)]
        assert found["last"] == STEPS
        assert found["missed"] == Counter(min(step, staleness) for step in range(STEPS))
        assert max(found["left"]) == 2 and min(found["left"]) == 1


def test_another_bound_gives_another_model():
    one, other = train(Mesh(), staleness=1), train(Mesh(), staleness=2)
    assert not torch.equal(one.rows["user"], other.rows["user"])


def test_stale_reads_need_the_lookahead():
    collection = EmbeddingCollection([Table("t", 2)], [Feature("f", "t")])
    collection.open(build_plan(collection.tables, staleness_steps=1), Mesh())
    batch = Batch(1, torch.zeros(1, 0), {"f": Ids(torch.zeros(1, dtype=torch.int64))})
    with pytest.raises(ConfigError, match="lookahead"):
        collection(batch)


def reads_of(mesh: Mesh, lookahead: int, exchange: str = "rows", *, fresh: bool = False) -> dict:
    """What reads of a row that grows by one each step missed, and what the collection counted. fresh: a batch comes
    when the step before it is over; else the next step begins when as many are ready as may be."""
    table = Table("count", 1, rows=1, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))
    collection = EmbeddingCollection([table], [Feature("one", "count", pooling="sum")])
    collection.open(
        build_plan(
            collection.tables,
            mesh.num_ranks,
            lookahead=lookahead,
            staleness_steps="unbounded",
            exchange=exchange,
        ),
        mesh,
    )
    rows, seen, zero = RowOptimizer(collection), [], torch.zeros(1, dtype=torch.int64)
    one = Batch(1, torch.zeros(1, 0), {"one": Ids(zero)})
    is_over, held = Semaphore(1), []

    def batches():
        for _ in range(STEPS):
            if fresh:
                is_over.acquire()
            yield one

    coming = collection.lookahead(batches())
    for step, batch in enumerate(coming):
        held.append(len(coming.fetched))
        value = collection(batch)["one"]
        seen.append(step - round(value.item()))
        (-value).sum().div(mesh.num_ranks).backward()
        rows.step()
        is_over.release()
        wanted = 0 if fresh else min(lookahead, STEPS - step - 1)
        deadline = time.monotonic() + 60
        while len(coming.fetched) + coming._num_ready() < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
    collection.eval()
    with torch.no_grad():
        last = collection(one)["one"].item()
    return {"seen": seen, "missed": collection.missed, "held": held, "last": last}


@pytest.mark.parametrize("lookahead", [1, 3, 50])
def test_unbounded_reads_are_late_as_it_happens_and_counted(lookahead):
    found = reads_of(Mesh(), lookahead)
    assert Counter(found["seen"]) == found["missed"]
    assert min(found["seen"]) == 0 and max(found["held"]) <= lookahead - 1
    # All that could be read was; whether that is in the first step or the second, is a matter of timing.
    assert min(lookahead - 1, STEPS - 2) <= max(found["seen"]) <= min(lookahead - 1, STEPS - 1)
    assert found["last"] == pytest.approx(STEPS), "evaluation sees every update"


def test_unbounded_reads_are_fresh_where_batches_come_one_by_one():
    found = reads_of(Mesh(), 3, fresh=True)
    assert found["missed"] == {0: STEPS} and found["seen"] == [0] * STEPS


def unbounded_ranks(mesh: Mesh) -> list:
    every = [reads_of(mesh, 4, exchange) for exchange in ("rows", "pooled")]
    trained = train(mesh, staleness="unbounded", lookahead=3, evaluate_every=1)
    return [*every, trained]


def test_ranks_agree_which_batches_are_read():
    every = run_ranks(2, unbounded_ranks)
    for one, other in zip(*(found[:2] for found in every), strict=True):
        assert one == other, "both ranks read at the same time"
        assert Counter(one["seen"]) == one["missed"] and max(one["seen"]) == 3
        assert one["last"] == pytest.approx(STEPS)
    assert_same_bits(every[0][2], every[1][2])


@pytest.mark.filterwarnings("ignore:looking 8 batches ahead")
def test_unbounded_reads_within_a_budget_that_holds_few_batches(tmp_path):
    found = train(
        Mesh(), staleness="unbounded", dram_bytes=30_000, folder=tmp_path, lookahead=8, size=40
    )
    assert all(torch.isfinite(torch.tensor(found.losses)))


def test_unbounded_needs_batches_that_are_ready():
    table = Table("t", 2)
    with pytest.raises(ConfigError, match="lookahead=0"):
        build_plan([table], lookahead=0, staleness_steps="unbounded")
    plan = build_plan([table], staleness_steps="unbounded")
    assert type(plan).from_json(plan.to_json()) == plan
