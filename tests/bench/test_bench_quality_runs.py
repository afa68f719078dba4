"""`bench quality`, suites towers and ids: runs differ by their form alone, and the best epoch is scored."""

import os
import signal
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from movielens_files import write_movielens

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

from workers import quality_runs as runs  # noqa: E402
from workers.quality_case import Run  # noqa: E402
from workers.quality_runs import GROUPS, MOVIELENS, NAMES, SIDED, TOWERS, Towers  # noqa: E402

from colonnade import Mesh  # noqa: E402
from colonnade.data import open_source  # noqa: E402
from colonnade.topology.towers import Partition  # noqa: E402
from colonnade.train.metrics import auc  # noqa: E402


@pytest.fixture(autouse=True)
def no_cached_runs():
    caches = (runs.open_stream, runs.open_sided, runs.train_flat, runs.open_films)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.fixture
def movielens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_movielens(tmp_path / "ml-1m")
    monkeypatch.setenv("COLONNADE_DATA", str(tmp_path))


RUN = Run(seed=0, samples=3 * 1024, lr=0.4)


def test_a_flat_model_and_towers_differ_by_their_modules_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both models have modules of the ratio, and DLRM's top network is that of its fewer vectors."""
    models, real = [], runs.train_run
    monkeypatch.setattr(runs, "train_run", lambda *item: models.append(real(*item)) or models[-1])
    for name in ("dlrm", "dcnv2"):
        for towers in (None, Towers("striped", 4)):
            values = runs.train_towers(name, TOWERS, towers, RUN)
            assert set(values) == {"AUC", "planted pairs together" if towers else "ceiling"}
    for flat, narrow in ((models[0][1], models[1][1]), (models[2][1], models[3][1])):
        consumers = narrow.embeddings.declaration.consumers
        assert len(consumers) == 4 == runs.NUM_TOWERS
        assert all(4 <= consumer.interaction.ratio < 5 for consumer in consumers.values())
        assert flat.embeddings.tables[0].width == narrow.embeddings.tables[0].width == 16


def test_the_stream_of_towers_has_a_ceiling_and_another_world_for_pilots() -> None:
    """The stream has four whole groups, a ceiling, and another world for pilots."""
    splits, ceiling = runs.open_sided(20_000)
    assert list(splits.train.columns.ids) == [*chain(*SIDED)] and 0.90 < ceiling < 0.94
    assert splits.train.num_samples == 20_000 and splits.test.num_samples == 5_000
    again, _ = runs.open_sided(20_000, 1)
    assert not torch.equal(again.train.columns.label, splits.train.columns.label)


def test_the_best_epoch_is_scored(movielens: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real, results = runs.block_aucs, []
    monkeypatch.setattr(
        runs, "block_aucs", lambda *item: results.append(real(*item)) or results[-1]
    )
    ends, fit = [], runs.fit
    monkeypatch.setattr(
        runs, "fit", lambda *item, **more: ends.append(fit(*item, **more)) or ends[-1]
    )
    config = runs.movielens_config("dlrm", 0, **{"train.epochs": 3})
    aucs, _ = runs.train_run(config, open_source("movielens", seed=0))
    assert len(results) == 3 and aucs in results
    assert fmean(aucs) == pytest.approx(ends[0].metrics["test_auc"], abs=1e-5)


def test_learned_towers_reuse_the_flat_run(
    movielens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = [], runs.train_run
    monkeypatch.setattr(runs, "train_run", lambda *item: calls.append(1) or real(*item))
    run = Run(seed=0, is_quick=True)
    for model in ("dlrm", "dcnv2"):
        values = [
            runs.train_towers(model, MOVIELENS, towers, run)["AUC"]
            for towers in (None, Towers("learned", 2), Towers("striped", 4))
        ]
        assert all(0 <= score <= 1 for score in chain(*values))
    assert len(calls) == 6


@pytest.mark.parametrize("history", [0, 2])
def test_ids_and_fields_see_the_same_samples(movielens: None, history: int) -> None:
    values = [
        runs.train_ids("fm", history, over, Run(seed=0, is_quick=True))["AUC"]
        for over in ("ids", "fields")
    ]
    assert len(values[0]) == len(values[1])
    data, plain = runs.open_films(0, history), open_source("movielens", seed=0)
    if not history:
        assert data.train.num_samples == plain.train.num_samples
        return
    assert data.train.num_samples < plain.train.num_samples
    assert data.test.num_samples == plain.test.num_samples
    bag = next(column for column in data.train.schema.categorical if column.name == "history")
    assert (bag.kind, bag.table) == ("bag", "movie")
    batch = next(iter(data.test.batches(100)))
    assert int(batch.ids["history"].offsets.diff().max()) <= history


def test_blocks_of_scores_are_those_of_all_samples() -> None:
    """Model scores by the first number alone."""

    class First(torch.nn.Module):
        def forward(self, batch: object) -> torch.Tensor:
            assert not self.training
            return batch.dense[:, :1]

    test = open_source("synthetic", num_train=10, num_test=10_049, **runs.STREAM).test
    model = First()
    result = runs.block_aucs(model, test, Mesh())
    whole = test.read(0, 10_000)
    wanted = [
        auc(whole.dense[200 * k : 200 * (k + 1), 0], whole.label[200 * k : 200 * (k + 1)])
        for k in range(50)
    ]
    assert result == pytest.approx(wanted, abs=1e-6) and model.training


def test_a_run_that_was_stopped_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """fit returns after a signal, with a model that has seen a part of the samples."""
    splits = runs.open_stream(200_000)
    read, requests = type(splits.train).read, []

    def interrupted(source: object, begin: int, end: int) -> object:
        requests.append(begin)
        if len(requests) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(source, begin, end)

    monkeypatch.setattr(type(splits.train), "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.measure_purity("dlrm", "interactions", Run(seed=0, samples=200_000))
    assert len(requests) < 100


def test_learned_towers_are_those_of_the_partitioner() -> None:
    _, network, data = runs.train_flat("dlrm", TOWERS, RUN)
    sample = runs.measure_fields(network, data)
    assert sample.affinity.shape == (24, 24) and sample.num_samples == 2048
    assert tuple(load.name for load in sample.loads) == NAMES[:24]
    assert sorted(runs.build_towers(data, sample, 0).features) == sorted(NAMES[:24])
    striped = runs.build_towers(data, None, 0)
    assert all(len({striped.tower_of(name) for name in group[:4]}) == 4 for group in SIDED)
    # Fields that are alike stand together.
    group = np.array([next(g for g, one in enumerate(SIDED) if name in one) for name in NAMES[:24]])
    alike = replace(sample, affinity=np.where(group[:, None] == group, 0.8, 0.1))
    learned = runs.build_towers(data, alike, 0)
    assert runs.share_of_pairs_together(learned) == 1 > runs.share_of_pairs_together(striped)


def test_purity_is_the_share_of_fields_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = [list(group) for group in GROUPS]
    towers[0][0], towers[7][0] = towers[7][0], towers[0][0]
    result = SimpleNamespace(partition=Partition(tuple(map(tuple, towers))), agreement=0.5)
    monkeypatch.setattr(runs, "build_tower_map", lambda *arguments, **settings: result)
    values = runs.measure_purity("dlrm", "interactions", Run(seed=0, samples=3 * 1024))
    assert values["purity"] == [24 / 26] and values["agreement"] == [0.5]


@pytest.mark.slow
def test_planted_groups_are_learned() -> None:
    _, network, data = runs.train_flat("dlrm", TOWERS, replace(RUN, samples=500_000))
    learned = runs.build_towers(data, runs.measure_fields(network, data), 0)
    assert runs.share_of_pairs_together(learned) > 0.8
