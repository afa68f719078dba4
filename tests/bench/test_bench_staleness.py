"""`bench quality_staleness`: row clocks in one process are those of real ranks, and what is compared is paired."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import quality_staleness as bench  # noqa: E402
from harness import Measured  # noqa: E402
from tables import staleness as tables  # noqa: E402
from tables.pilot import choose_next_rate, read_scored_rates  # noqa: E402
from workers import staleness_copies, staleness_ranks  # noqa: E402
from workers.staleness_model import (  # noqa: E402
    Learning,
    Samples,
    System,
    block_aucs,
    open_stream,
)

from colonnade import Mesh  # noqa: E402
from colonnade.staleness import row_clock  # noqa: E402

SGD, ADAGRAD = (Learning(name, lr, dtype="float64") for name, lr in (("sgd", 1.0), ("adagrad", 0.1)))  # fmt: skip
SYNCHRONOUS = System("synchronous")
CLOCKS = (
    System("short leases", clock=row_clock(5), cached_share=0.2),
    System("long ones", clock=row_clock(11, read_bound=2), cached_share=1.0),
)


def trained(where, learning, system, *mesh, **how):
    """Logits of 12 steps, then test scores."""
    data = open_stream(12 * 512 - 5, 1_000, max_cardinality=200)
    test = list(data.scored(data.splits.test))
    done = where.train(data, learning, system, *mesh, test, keeps_logits=True, **how)
    return torch.cat([*done.logits, done.scores]), done.facts


def on_ranks(mesh):
    return [
        trained(staleness_ranks, learning, system, mesh)[0]
        for learning in (SGD, ADAGRAD)
        for system in CLOCKS
    ]


def test_row_clocks_in_one_process_are_those_of_ranks() -> None:
    results, *_ = run_ranks(3, on_ranks)
    cases = [(learning, system) for learning in (SGD, ADAGRAD) for system in CLOCKS]
    for real, (learning, system) in zip(results, cases, strict=True):
        local, facts = trained(staleness_copies, learning, system, num_ranks=3)
        torch.testing.assert_close(local, real, rtol=1e-9, atol=1e-11)
        assert 0.05 < facts["used without a word"] < 0.95
        late = trained(staleness_ranks, learning, SYNCHRONOUS, Mesh())[0]
        assert float((late - local).abs().max()) > 1e-3, "lateness shows"


@pytest.mark.parametrize("learning", [SGD, ADAGRAD])
def test_without_staleness_they_are_synchronous(learning: Learning) -> None:
    local, facts = trained(staleness_copies, learning, System("none", clock=row_clock(0)))
    assert facts["used without a word"] == 0
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


def test_an_interval_covers_samples_and_seeds() -> None:
    """Interval contains the true difference, 0.01."""
    random, hits, alone = np.random.default_rng(0), 0, 0
    for _ in range(200):
        of_blocks = 0.02 * random.standard_normal(50)
        differences = [
            0.01 + of_blocks + 0.003 * random.standard_normal() + 0.005 * random.standard_normal(50)
            for _ in range(3)
        ]
        mean, half = tables.interval(differences)
        hits += abs(mean - 0.01) <= half
        one, narrow = tables.interval(differences[:1])
        alone += abs(one - 0.01) <= narrow
        assert half > 0 and narrow > 0
    assert hits >= 184  # 190 are expected, or more
    assert 100 < alone < 196  # one seed says nothing of seeds


def test_differences_are_of_the_same_seed_data_and_optimizer() -> None:
    measured = [
        Measured("ml-1m sgd seed 0", "synchronous", "AUC", [0.7, 0.8, 0.9]),
        Measured("ml-1m sgd seed 0", "late", "AUC", [0.6, 0.7, 0.7]),
        Measured("ml-1m sgd seed 1", "late", "AUC", [0.1, 0.1, 0.1]),  # the other is not there yet
        Measured("ml-1m adagrad seed 0", "synchronous", "AUC", [0.9, 0.9, 0.9]),
        Measured("ml-1m sgd pilot", "synchronous", "AUC at 1.0", [0.9]),
        Measured("world", "sgd bounded(4)", "largest gap to 4 ranks", [1e-12]),
        Measured("stream of 10", "ceiling", "AUC", [0.8]),
    ]
    (result,) = tables.differences_of(measured, "ml-1m sgd", "late")
    assert result == pytest.approx([0.1, 0.1, 0.2])
    assert tables.groups_of(measured) == {
        "ml-1m sgd": ["synchronous", "late"],
        "ml-1m adagrad": ["synchronous"],
    }
    ratios = tables.ratios_of(measured)
    assert ratios["auc_lost ml-1m sgd late"] == pytest.approx(0.4 / 3, abs=1e-6)
    assert ratios["world_gap"] == 1e-12 and len(ratios) == 3


def test_the_pilot_stops_between_two_worse_rates() -> None:
    for choices in bench.RATES.values():
        for best in choices:
            rates: dict[float, float] = {}
            while (lr := choose_next_rate(choices, rates)) is not None:
                rates[lr] = -abs(np.log(lr / best))
            assert max(rates, key=lambda rate: rates[rate]) == best
    assert read_scored_rates(
        [Measured("a pilot", "synchronous", "AUC at 0.5", [0.6, 0.8])], "a pilot", "synchronous"
    ) == {0.5: pytest.approx(0.7)}
