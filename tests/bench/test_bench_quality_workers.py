"""`bench quality`, suite workers: one stream of ads for all, and workers that miss what they should."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

from workers import quality_workers  # noqa: E402
from workers.ads import EACH, FIELDS, LIFE_BITS, Ads, open_ads  # noqa: E402
from workers.quality_case import Run  # noqa: E402
from workers.quality_workers import Order, train, train_order  # noqa: E402

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
    quality_workers._race(model, collection, batches, num_workers, 0, gradients, step, missed)
    assert applied == 200 == collection.rows("count", zero).item() == model.weight.item()
    assert Counter(update - value for update, value in enumerate(outputs)) == missed
    assert len(missed) > 3, "they race"
    whole = sorted(missed.elements())[num_workers:-num_workers]
    assert np.mean(whole) == pytest.approx(num_workers - 1, abs=0.25)


@pytest.mark.parametrize("kind", ["lr", "wide_deep", "deepfm"])
def test_one_worker_is_synchronous(stream: Ads, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(quality_workers, "BLOCK", 64)
    one, other, asynchronous = (
        train(kind, order, stream, 16, lr=0.01, tail_blocks=1)
        for order in (Order(64), Order(64, workers=1), Order(64, workers=3))
    )
    assert one.auc == other.auc and one.tail_auc == other.tail_auc
    assert len(one.auc) == 2 and one.auc[1:] != asynchronous.auc[1:]
    assert one.missed == other.missed == {0: 14}


def test_an_arm_has_every_score_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_workers, "BLOCK", 64)
    values = train_order("lr", Order(64), Run(seed=3, samples=32 * 64, lr=0.01))
    lengths = {unit: len(numbers) for unit, numbers in values.items()}
    assert lengths == {
        "AUC": 4, "AUC, second half": 2, "AUC of the tail": 4, "log loss": 4, "updates missed": 1, "ceiling": 1,
    }  # fmt: skip
    pilot = train_order("lr", Order(64), Run(seed=3, samples=32 * 64, lr=0.01, is_pilot=True))
    assert list(pilot) == ["AUC"] and len(pilot["AUC"]) == 2
    assert pilot["AUC"] != values["AUC, second half"], "a pilot has a stream of its own"
