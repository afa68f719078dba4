"""`data.last_batch`: what becomes of a last batch that is smaller than the others, in training."""

from __future__ import annotations

import pytest
import torch
from own_model import Net, assert_same, rows_of, source
from ranks import run_ranks
from torch import nn

import colonnade
from colonnade import Mesh
from colonnade.config.run import RunConfig, override_settings
from colonnade.data import Splits, open_batches
from colonnade.errors import CheckpointError, ConfigError
from colonnade.planning.placement import count_epoch_steps, count_run_steps, predict_last_step

FAST = {"batch_size": 20, "quiet": True, "threads": 1}


class Normalized(Net):
    """Network with a BatchNorm, which refuses to train on one sample."""

    def __init__(self, **changes):
        super().__init__(**changes)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, batch):
        batch.dense = self.norm(batch.dense)
        return super().forward(batch)


def test_batch_norm_trains_where_no_sample_is_left_alone():
    assert colonnade.fit(Normalized(), source(61), last_batch="merge", **FAST).outcome.steps == 3
    assert colonnade.fit(Normalized(), source(61), last_batch="drop", **FAST).outcome.samples == 60
    with pytest.raises(
        ConfigError, match=r"a batch of 1 sample on rank 0.*data\.last_batch to merge"
    ):
        colonnade.fit(Normalized(), source(61), **FAST)
    parts = {**FAST, "accumulate": 2, "last_batch": "merge"}
    assert colonnade.fit(Normalized(), source(61), **parts).outcome.samples == 61


def fit_on_ranks(mesh, last_batch, settings, kind=Net, num_samples=63):
    model = kind(dtype="float64")
    result = colonnade.fit(
        model, source(num_samples, 1), mesh=mesh, last_batch=last_batch, **{**FAST, **settings}
    )
    return result.outcome.steps, rows_of(model), model.bias.state_dict()


@pytest.mark.parametrize("last_batch", ["drop", "merge"])
@pytest.mark.parametrize("servers", [0, 1])
def test_ranks_train_what_one_trains(last_batch, servers):
    """Also where servers count the steps by themselves."""
    steps, rows, dense = fit_on_ranks(Mesh(), last_batch, {"epochs": 2})
    assert steps == 6
    results = run_ranks(2 + servers, fit_on_ranks, last_batch, {"epochs": 2, "servers": servers})
    assert [result[0] for result in results] == [6] * (2 + servers)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(results[0][1], rows, **close)
    torch.testing.assert_close(results[0][2], dense, **close)


def test_batch_norm_trains_on_ranks():
    """The last batch would leave one rank without a sample, and one with a single one."""
    run_ranks(2, fit_on_ranks, "merge", {}, Normalized, 61)


@pytest.mark.parametrize("last_batch", ["drop", "merge"])
def test_a_run_resumes_to_the_same_bits(last_batch, tmp_path):
    data, settings = Splits(train=source(63, 1)), {**FAST, "last_batch": last_batch, "epochs": 2}
    whole, resumed = Net(), Net()
    colonnade.fit(whole, data, **settings)
    for max_steps in (2, 3, 5):
        colonnade.fit(Net(), data, run=tmp_path, max_steps=max_steps, **settings)
    colonnade.fit(resumed, data, run=tmp_path, **settings)
    assert resumed.collection.step == whole.collection.step == 6
    assert_same(whole, resumed)


def test_a_run_goes_on_with_its_own_last_batches(tmp_path):
    settings = {**FAST, "run": tmp_path}
    colonnade.fit(Net(), source(63), max_steps=2, last_batch="merge", **settings)
    with pytest.raises(CheckpointError, match=r"data\.last_batch='merge'"):
        colonnade.fit(Net(), source(63), last_batch="drop", **settings)


def test_what_leaves_no_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"got data\.last_batch=drop and 19 samples, fewer than the 20"
    ):
        colonnade.fit(Net(), source(19), last_batch="drop", **FAST)
    assert colonnade.fit(Net(), source(19), last_batch="merge", **FAST).outcome.samples == 19
    own = open_batches([], source(20).schema)
    with pytest.raises(ConfigError, match="a data set that makes its own batches, wanted keep"):
        colonnade.fit(Net(), own, last_batch="drop", **FAST)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
@pytest.mark.parametrize("num_samples", [20, 21, 39, 40, 46])
def test_steps_are_counted_in_advance(accumulate, last_batch, num_samples):
    settings = {**FAST, "accumulate": accumulate}
    result = colonnade.fit(Net(), source(num_samples), last_batch=last_batch, **settings)
    config = override_settings(
        RunConfig(),
        {"train.batch_size": 20, "train.accumulate": accumulate, "data.last_batch": last_batch},
    )
    assert count_epoch_steps(config, num_samples) == result.outcome.steps


@pytest.mark.parametrize(("epochs", "max_steps"), [(0, None), (2, None), (2, 3)])
def test_the_planner_counts_the_steps_that_a_run_trains(epochs, max_steps):
    """Also with 0 epochs, which the placement of rows once counted as one."""
    data = Splits(train=source(63))
    settings = {"epochs": epochs, "max_steps": max_steps}
    result = colonnade.fit(Net(), data, **FAST, **settings)
    config = override_settings(
        RunConfig(),
        {"train.batch_size": 20, "train.epochs": epochs, "train.max_steps": max_steps},
    )
    assert count_run_steps(config, data) == result.outcome.steps
    assert predict_last_step(config, data, 0, 1) == max(result.outcome.steps, 1)


def test_the_steps_of_days_are_counted_day_by_day():
    data = Splits(train=source(63), days=(source(30), source(33)))
    config = override_settings(RunConfig(), {"train.batch_size": 20, "train.progressive": True})
    assert count_run_steps(config, data) == 4
