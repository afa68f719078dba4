"""`bench quality_partials`: one stream for all, workers that miss what they should, paired intervals."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import quality_partials as bench  # noqa: E402
from harness import ArmFile, BenchError, Measured  # noqa: E402
from tables import quality  # noqa: E402
from tables.pilot import choose_next_rate, find_best_rate  # noqa: E402
from workers import quality_arms  # noqa: E402
from workers.ads import EACH, FIELDS, LIFE_BITS, Ads, open_ads  # noqa: E402
from workers.quality_arms import Arm, train  # noqa: E402

from colonnade import (  # noqa: E402
    SGD,
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
from colonnade.train.metrics import auc  # noqa: E402


@pytest.fixture(scope="module")
def stream() -> Ads:
    return open_ads(1 << 22)


def test_a_sample_is_a_pure_function_of_its_number(stream: Ads) -> None:
    whole, part = stream.read(1000, 3000), stream.read(1700, 1900)
    assert len(whole.ids) == FIELDS and len(whole.ids["A1"].values) == 2000 * EACH
    assert torch.equal(whole.label[700:900], part.label)
    assert torch.equal(whole.key[700:900], part.key)
    for name, ids in part.ids.items():
        assert torch.equal(whole.ids[name].values[700 * EACH : 900 * EACH], ids.values)
    ranks = [next(stream.batches(2000, rank=r, num_ranks=4)) for r in range(4)]
    labels = torch.cat([batch.label for batch in ranks])
    assert torch.equal(labels, stream.read(0, 2000).label)


def test_popular_ids_come_and_go_and_the_ceiling_stays(stream: Ads) -> None:
    life, outputs = 1 << LIFE_BITS, []
    for first in (0, life // 4, life + 20_000, 3 * life):
        batch = stream.read(first, first + 20_000)
        outputs.append(set(batch.ids["A3"].values.tolist()))
        assert auc(batch.key, batch.label) == pytest.approx(0.79, abs=0.02)
        assert float(batch.label.mean()) == pytest.approx(0.25, abs=0.02)
    shares = [len(outputs[0] & later) / len(outputs[0]) for later in outputs[1:]]
    assert 0.3 < shares[0] < 0.75, "after a quarter of a life"
    assert shares[1:] == [0, 0], "nobody lives longer"


class Counts(nn.Module):
    """A row and a dense weight that grow by one with every update."""

    def __init__(self) -> None:
        super().__init__()
        table = Table("count", 1, rows=1, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))
        self.embeddings = EmbeddingCollection([table], [Feature("one", "count")])
        self.weight = nn.Parameter(torch.zeros(1))


def test_a_worker_computes_on_what_was_there_when_it_began() -> None:
    model, num_workers, outputs, applied = Counts(), 5, [], 0
    collection = model.embeddings
    collection.open(build_plan(collection.tables, 1, PlanConfig(lookahead=0, staleness_steps=1)))
    rows, dense = RowOptimizer(collection), torch.optim.SGD(model.parameters(), lr=1.0)
    zero = torch.zeros(1, dtype=torch.int64)
    batches = (Batch(1, torch.zeros(1, 0), {"one": Ids(zero)}) for _ in range(200))

    def gradients(batch: Batch) -> None:
        dense.zero_grad()
        value = collection(batch)["one"]
        assert value.item() == model.weight.item()
        outputs.append(int(value.item()))
        (-value.sum() - model.weight.sum()).backward()

    def step(_: int) -> None:
        nonlocal applied
        rows.step()
        dense.step()
        applied += 1

    missed: Counter[int] = Counter()
    quality_arms._race(model, collection, batches, num_workers, 0, gradients, step, missed)
    assert applied == 200 == collection.rows("count", zero).item() == model.weight.item()
    assert Counter(update - value for update, value in enumerate(outputs)) == missed
    assert len(missed) > 3, "they race"
    whole = sorted(missed.elements())[num_workers:-num_workers]
    assert np.mean(whole) == pytest.approx(num_workers - 1, abs=0.25)


@pytest.mark.parametrize("kind", bench.KINDS)
def test_one_worker_is_synchronous(stream: Ads, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(quality_arms, "BLOCK", 64)
    one, other, asynchronous = (
        train(kind, arm, stream, 16, lr=0.01, tail_blocks=1)
        for arm in (Arm("one", 64), Arm("other", 64, workers=1), Arm("late", 64, workers=3))
    )
    assert one.auc == other.auc and one.tail_auc == other.tail_auc
    assert len(one.auc) == 2 and one.auc[1:] != asynchronous.auc[1:]
    assert one.missed == other.missed == {0: 14}


def test_an_interval_covers_what_it_should() -> None:
    random, hits = np.random.default_rng(0), 0
    for _ in range(60):
        blocks = [0.01 + 0.1 * random.standard_normal(80) for _ in range(2)]
        mean, low, high = quality.interval(blocks)
        assert low < mean < high
        hits += low <= 0.01 <= high
    assert hits >= 51  # 57 are expected
    assert quality.interval([np.full(30, 0.25)]) == pytest.approx((0.25, 0.25, 0.25))


def test_differences_are_of_the_same_seed_and_model() -> None:
    measured = [
        Measured("fm seed 0", "synchronous", "AUC", [0.7, 0.8]),
        Measured("fm seed 0", "late", "AUC", [0.6, 0.6]),
        Measured("fm seed 1", "late", "AUC", [0.1, 0.1]),  # the other has not been trained yet
        Measured("fm pilot", "late", "AUC at 0.01", [0.1]),
        Measured("deepfm seed 0", "synchronous", "AUC", [0.9, 0.9]),
    ]
    (result,) = quality.differences_of(measured, "fm", "late", "AUC")
    assert result == pytest.approx([0.1, 0.2])
    ratios = quality.ratios_of(measured)
    assert ratios["auc_lost fm late against synchronous"] == pytest.approx(0.15)
    assert ratios["late_auc_lost fm late against synchronous"] == pytest.approx(0.2)
    assert quality.bases_of("64 x 256") == ["synchronous", "synchronous, 256"]
    assert not any("deepfm" in name for name in ratios)


def test_the_pilot_stops_between_two_worse_rates() -> None:
    def climb(best: float) -> dict[float, float]:
        rates: dict[float, float] = {}
        while (lr := choose_next_rate(bench.RATES, rates)) is not None:
            rates[lr] = -abs(np.log(lr / best))
        return rates

    for best in bench.RATES:
        rates = climb(best)
        assert max(rates, key=lambda lr: rates[lr]) == best
    assert len(climb(bench.RATES[len(bench.RATES) // 2])) == 3


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    def open_file(path: Path | None, name: str = "quality_partials", samples: int = 64) -> ArmFile:
        return ArmFile(path, name, bench.compute_ratios, {"torch": "1"}, samples=samples)

    path = tmp_path / "result.json"
    rows = [
        Measured("fm seed 0", "synchronous", "AUC", [0.5]),
        Measured("world", "1 rank", "AUC of fm", [0.5, 0.75]),
        Measured("world", "4 ranks, partials", "AUC of fm", [0.5, 0.5]),
    ]
    open_file(path).add(rows[:1])
    file = open_file(path)
    assert file.measured == rows[:1]
    file.add(rows[1:])
    assert open_file(path).measured == rows
    result = json.loads(path.read_text())
    assert result["bench"] == "quality_partials" and result["ratios"] == {"world_auc_gap": 0.25}
    assert result["machine"].items() >= {"samples": 64, "versions": {"torch": "1"}}.items()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(BenchError, match="other extent"):
        open_file(path, samples=65)
    with pytest.raises(BenchError, match="holds quality_partials"):
        open_file(path, "quality_staleness")
    assert open_file(tmp_path / "none.json").measured == open_file(None).measured == []


def test_a_pilot_goes_on_with_the_rates_of_the_file() -> None:
    file = ArmFile(None, "quality_partials", lambda _: {}, {})
    tried: list[float] = []

    def run_pilot(lr: float) -> list[float]:
        tried.append(lr)
        return [0.0, -abs(np.log(lr / 0.02))]

    choices = (0.01, 0.02, 0.04, 0.08)
    arguments = file, "fm pilot", "synchronous", choices, run_pilot
    assert find_best_rate(*arguments, is_quick=True) == 0.04 and tried == [0.04]
    assert find_best_rate(*arguments) == 0.02 and tried == [0.04, 0.02, 0.01]
    assert find_best_rate(*arguments) == 0.02 and len(tried) == 3
    assert [m.unit for m in file.measured] == ["AUC at 0.04", "AUC at 0.02", "AUC at 0.01"]
    # The mean decides: here that of the first values, which are all equal, so that the first one is the best.
    assert find_best_rate(*arguments, mean=lambda values: values[0], is_quick=True) == 0.04
