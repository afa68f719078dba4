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
from workers.quality_runs import GROUPS, NAMES, Towers  # noqa: E402

from colonnade import Mesh  # noqa: E402
from colonnade.data import open_source  # noqa: E402
from colonnade.models.build import build_model  # noqa: E402
from colonnade.topology.towers import Partition  # noqa: E402
from colonnade.train.metrics import auc  # noqa: E402


@pytest.fixture(autouse=True)
def no_cached_runs():
    caches = (runs.open_stream, runs.train_flat, runs.train_movielens_flat, runs.open_films)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.fixture
def movielens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_movielens(tmp_path / "ml-1m")
    monkeypatch.setenv("COLONNADE_DATA", str(tmp_path))


def test_planted_towers_are_whole_groups() -> None:
    assert tuple(chain(*GROUPS)) == NAMES
    for number in (2, 4, 8):
        groups = runs.planted_groups(number)
        planted = runs.build_towers(Towers(number, "planted"), groups, None, 0)
        assert len(planted.towers) == number and planted.features == NAMES
        assert all(len({planted.tower_of(name) for name in group}) == 1 for group in GROUPS)
        striped = runs.build_towers(Towers(number, "striped"), groups, None, 0)
        assert runs.share_of_pairs_together(planted) == 1 > runs.share_of_pairs_together(striped)


def test_models_of_a_seed_differ_by_their_towers_alone() -> None:
    schema = runs.open_stream(1000).train.schema
    planted = runs.build_towers(Towers(2, "planted"), runs.planted_groups(2), None, 0)
    flat, same, half = (
        build_model(schema, runs.stream_config("dlrm", 3, **settings))
        for settings in ({}, runs.tower_settings(planted, 1), runs.tower_settings(planted, 2))
    )
    assert torch.equal(flat.bottom[0].weight, same.bottom[0].weight)
    assert torch.equal(flat.top[0].weight, same.top[0].weight)
    declaration = half.embeddings.declaration
    assert half.dim == 8 and declaration.consumers["tower0"].interaction.ratio == 2
    assert same.embeddings.declaration.consumers["tower1"].interaction.ratio == 1


def test_every_field_of_movielens_is_in_one_tower(movielens: None) -> None:
    names = [value.name for value in open_source("movielens").train.schema.categorical]
    for number, towers in runs.NATURAL.items():
        assert len(towers) == number and sorted(chain(*towers)) == sorted(names)
        natural = runs.build_towers(Towers(number, "natural"), towers, None, 0)
        assert [list(tower) for tower in natural.towers] == towers


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
    values = [
        runs.train_movielens_towers(towers, run)["AUC"]
        for towers in (None, Towers(2, "learned"), Towers(2, "striped"))
    ]
    assert len(calls) == 3 and all(0 <= score <= 1 for score in chain(*values))


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
    assert runs.block_ceiling(test) > np.mean(result)


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
        runs.train_stream_towers("dlrm", None, Run(seed=0, samples=200_000))
    assert len(requests) < 100


def test_learned_towers_are_those_of_the_partitioner() -> None:
    sample = runs.measure_fields(*runs.train_flat("dlrm", 0, 3 * 1024)[1:])
    assert sample.affinity.shape == (26, 26) and sample.num_samples == 2048
    assert tuple(load.name for load in sample.loads) == NAMES
    groups = runs.planted_groups(2)
    learned = runs.build_towers(Towers(2, "learned"), groups, sample, 0)
    assert sorted(learned.features) == sorted(NAMES)
    # Fields that are alike stand together.
    planted = runs.build_towers(Towers(2, "planted"), groups, None, 0)
    group = np.array([planted.tower_of(name) for name in NAMES])
    alike = replace(sample, affinity=np.where(group[:, None] == group, 0.8, 0.1))
    assert runs.build_towers(Towers(2, "learned"), groups, alike, 0) == planted


def test_purity_is_the_share_of_fields_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = [list(group) for group in GROUPS]
    towers[0][0], towers[7][0] = towers[7][0], towers[0][0]
    result = SimpleNamespace(partition=Partition(tuple(map(tuple, towers))), agreement=0.5)
    monkeypatch.setattr(runs, "build_tower_map", lambda *arguments, **settings: result)
    values = runs.measure_purity("dlrm", "interactions", Run(seed=0, samples=3 * 1024))
    assert values["purity"] == [24 / 26] and values["agreement"] == [0.5]


@pytest.mark.slow
def test_planted_groups_are_learned() -> None:
    groups = runs.planted_groups(4)
    probe = runs.measure_fields(*runs.train_flat("dlrm", 0, 300_000)[1:])
    learned = runs.build_towers(Towers(4, "learned"), groups, probe, 0)
    assert runs.share_of_pairs_together(learned) > 0.8
