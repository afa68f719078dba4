"""Ranks that were started differently are refused on every rank, before anything is written, with who has what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from own_model import Net, source
from ranks import console_of, run_ranks
from small_run import CONFIG

import colonnade
from colonnade.comm.differences import find_disagreements, format_ranks
from colonnade.config.run import build_config, override_settings
from colonnade.data import Splits, open_source
from colonnade.errors import WorldError
from colonnade.run.run import open_run


def test_who_has_what_is_said_with_the_fewest_first():
    expected = [
        {"train.lr": 0.05, "same": 1},
        {"train.lr": 0.05, "same": 1},
        {"train.lr": 0.1, "same": 1},
    ]
    assert find_disagreements(expected) == ["rank 2 has train.lr=0.1, ranks 0, 1 have 0.05"]
    assert find_disagreements([{"a": 1}, {}]) == ["rank 0 has a=1, rank 1 has none"]
    assert find_disagreements([{}, {}, {"a": None}]) == ["rank 2 has a=null, ranks 0, 1 have none"]
    assert find_disagreements([{"a": 1}, {"a": 1.0}, {"a": 2}])[0].endswith("rank 2 has 2")
    assert find_disagreements([{"a": float("nan")}] * 3) == []


def test_many_ranks_are_said_as_runs():
    assert format_ranks([5]) == "rank 5"
    assert format_ranks([*range(63), *range(64, 128)]) == "ranks 0-62, 64-127"
    assert format_ranks(range(0, 100, 2)).endswith("12, 14 and 42 more")


SETTINGS = build_config(CONFIG)


def refused(mesh, folder, config=SETTINGS, data=None) -> str:
    with pytest.raises(WorldError) as error:
        open_run(config, mesh, folder, data=data, console=console_of(mesh))
    assert not folder.exists() or not any(folder.iterdir())
    return str(error.value)


def started_differently(mesh, place) -> list[str]:
    """Return the error of this rank in each case; rank 2 is the other one."""
    other, folder = mesh.rank == 2, Path(place) / f"run-{mesh.rank}"
    results = []
    config = override_settings(
        SETTINGS, {"train.batch_size": 200, "embedding.lr": 0.5} if other else {}
    )
    results.append(refused(mesh, folder, config))

    data = open_source("synthetic", **SETTINGS.data.options)
    shorter = open_source("synthetic", **{**SETTINGS.data.options, "num_train": 1400})
    results.append(refused(mesh, folder, data=shorter if other else data))

    columns = data.train.schema.categorical
    schema = replace(
        data.train.schema, categorical=(*columns[:-1], replace(columns[-1], cardinality=9))
    )
    if other:
        kind = type("Other", (type(data.train),), {"schema": schema, "__slots__": ()})
        object.__setattr__(data.train, "__class__", kind)
    results.append(refused(mesh, folder, data=data))
    for settings in (
        {"dense_optimizer": lambda p: torch.optim.SGD(p, lr=0.5 if other else 0.1)},
        {"loss": lambda output, _: output[:, 0]} if other else {},
        {"data": Splits(source(50), test=source(20)) if other else source(50)},
        {"model": Net(extra=("more",) * other)},
        {"epochs": 3 if other else 2},
    ):
        with pytest.raises(WorldError) as error:
            arguments = {"model": Net(), "data": source(50), **settings}
            colonnade.fit(run=folder, mesh=mesh, **arguments)
        assert not folder.exists()
        results.append(str(error.value))
    return results


def test_every_rank_names_the_difference_and_the_ranks(tmp_path):
    reported = run_ranks(3, started_differently, str(tmp_path))
    assert reported[0] == reported[1] == reported[2]
    settings, samples, schema, optimizer, loss, parts, model, epochs = reported[0]
    assert "rank 2 has embedding.lr=0.5, ranks 0, 1 have null" in settings
    assert "rank 2 has train.batch_size=200, ranks 0, 1 have 100" in settings
    assert "rank 2 has samples.train=1400, ranks 0, 1 have 1500" in samples
    assert ".cardinality=9, ranks 0, 1 have 3000" in schema
    assert "rank 2 has dense_group.0.lr=0.5, ranks 0, 1 have 0.1" in optimizer
    assert 'rank 2 has objective="MeanLoss", ranks 0, 1 have "Probability"' in loss
    assert "rank 2 has samples.test=20, ranks 0, 1 have none" in parts
    assert "more" in model and "rank 2" in model
    assert "rank 2 has train.epochs=3, ranks 0, 1 have 2" in epochs
