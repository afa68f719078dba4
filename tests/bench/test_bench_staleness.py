"""`bench quality`, suite cache: one process computes what real ranks do, and counts the rows that they send."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import quality as bench  # noqa: E402
from workers import staleness_copies, staleness_ranks  # noqa: E402
from workers.staleness_model import (  # noqa: E402
    Learning,
    Samples,
    System,
    block_aucs,
    open_stream,
)

from colonnade import Mesh, Table  # noqa: E402
from colonnade.cache.directory import HIT  # noqa: E402
from colonnade.config.plan import CacheConfig  # noqa: E402
from colonnade.plan.caching import build_table_caches  # noqa: E402
from colonnade.staleness import RowClock, row_clock  # noqa: E402

SGD, ADAGRAD = (Learning(name, lr, dtype="float64") for name, lr in (("sgd", 1.0), ("adagrad", 0.1)))  # fmt: skip
SYNCHRONOUS = System()
CLOCKS = (
    System(clock=row_clock(5), cached_share=0.2),
    System(clock=row_clock(11, read_bound=2), cached_share=1.0),
    System(clock=RowClock(4, 50, write_share=0.4, step_bound=3), cached_share=1.0),
)
CASES = ((SGD, CLOCKS[1]), (ADAGRAD, CLOCKS[0]), (ADAGRAD, CLOCKS[2]))


def trained(where, learning, system, *mesh, **how):
    """Logits of 12 steps, then test scores."""
    data = open_stream(12 * 512 - 5, 1_000, max_cardinality=200)
    test = list(data.scored(data.splits.test))
    done = where.train(data, learning, system, *mesh, test, keeps_logits=True, **how)
    return torch.cat([*done.logits, done.scores]), done.facts


def on_ranks(mesh):
    return [trained(staleness_ranks, learning, system, mesh)[0] for learning, system in CASES]


def test_row_clocks_in_one_process_are_those_of_ranks() -> None:
    results, *_ = run_ranks(3, on_ranks)
    for real, (learning, system) in zip(results, CASES, strict=True):
        local, facts = trained(staleness_copies, learning, system, num_ranks=3)
        torch.testing.assert_close(local, real, rtol=1e-9, atol=1e-11)
        assert 0.05 < facts["used without a request"] < 0.95
        late = trained(staleness_ranks, learning, SYNCHRONOUS, Mesh())[0]
        assert float((late - local).abs().max()) > 1e-3, "lateness shows"


@pytest.mark.parametrize("learning", [SGD, ADAGRAD])
def test_without_staleness_they_are_synchronous(learning: Learning) -> None:
    local, facts = trained(staleness_copies, learning, System(clock=row_clock(0)))
    assert facts["used without a request"] == 0
    assert facts["row messages saved"] == 0, "every use fetches its row and sends its gradient"
    one, late = trained(staleness_ranks, learning, SYNCHRONOUS, Mesh())
    torch.testing.assert_close(local, one, rtol=1e-9, atol=1e-11)
    assert late["updates missed"] == 0


def test_a_rank_alone_misses_nothing_of_its_own() -> None:
    local, _ = trained(staleness_copies, SGD, CLOCKS[0], num_ranks=1)
    one, _ = trained(staleness_ranks, SGD, SYNCHRONOUS, Mesh())
    torch.testing.assert_close(local, one, rtol=1e-9, atol=1e-11)


def test_batches_are_the_source_s_whatever_is_read_at_once() -> None:
    data = open_stream(10_000, 100)
    batches = list(data.training(Learning("sgd", 1.0, epochs=2), 512))
    assert [len(batch) for batch in batches] == ([512] * 19 + [272]) * 2
    one = next(iter(data.splits.train.batches(10_000)))
    labels = torch.cat([batch.label for batch in batches])
    assert torch.equal(labels, torch.cat([one.label, one.label]))
    ids = torch.cat([batch.ids for batch in batches[:20]])
    assert torch.equal(ids[:, 2], one.ids["C3"].values + 1460 + 583)
    assert int(ids.max()) < data.num_rows


def test_blocks_that_cannot_be_ranked_count_as_chance() -> None:
    label = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    scores = torch.tensor([0.1, 0.2, 0.3, float("nan")])
    assert block_aucs(scores, [label[:2], label[2:]]) == [1.0, 0.5]
    part = Samples(torch.zeros(4, 0), torch.zeros(4, 1, dtype=torch.int64), label)[1:3]
    assert len(part) == 2 and torch.equal(part.label, label[1:3])


def test_rows_that_are_sent_are_counted() -> None:
    """Two ranks and one row: by hand."""
    from workers.staleness_copies import CachedRows

    rule = SGD.rule
    copies = CachedRows(
        torch.zeros(2, 3), rule, RowClock(2, 1), 2, num_ranks=2, most_lookups=2
    )  # fmt: skip
    first, pair = np.array([0]), np.array([0, 1])
    for ids in [[first, pair]] * 3:
        values, _ = copies.read(ids)
        copies.write(torch.ones_like(values))
    # Three batches of three uses. All are fetched once, sent after the second batch, and wait after the third.
    assert (copies.used, copies.fetches, copies.pushes) == (9, 3, 3)
    assert copies.saved_share() == pytest.approx(1 - (3 + 3 + 3) / 18)
    before = copies.owners.weights.clone()
    rows = copies.synchronized_rows()
    assert torch.equal(copies.owners.weights, before), "scoring changes nothing"
    assert rows[:, 0].tolist() == [-6.0, -3.0]
    assert all((decision.outcomes == HIT).all() for decision in copies.decisions)


def test_a_run_is_scored_along_the_way() -> None:
    data = open_stream(12 * 512 - 5, 1_000, max_cardinality=200)
    test = list(data.scored(data.splits.test))
    labels = [block.label for block in test]
    for where, system, mesh in (
        (staleness_ranks, SYNCHRONOUS, [Mesh()]), (staleness_copies, CLOCKS[2], []),
    ):  # fmt: skip
        done = where.train(data, ADAGRAD, system, *mesh, test, num_scored=5)
        assert list(done.curve) == [3, 5, 8, 10, 12]
        assert done.curve[12] == pytest.approx(np.mean(block_aucs(done.scores, labels)))
        again = where.train(data, ADAGRAD, system, *mesh, test)
        assert torch.equal(again.scores, done.scores) and not again.curve, "scoring changes nothing"


def test_the_default_arm_is_the_default_cache() -> None:
    table = Table("rows", 4, rows=10)
    default = build_table_caches(CacheConfig(), [table])["rows"]
    assert bench.PLANS["default"] == System(clock=default.clock, cached_share=default.rows / 10)
