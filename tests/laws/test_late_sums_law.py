"""Sums of dense gradients that come after the next batch was fetched: the bits of a run that waits for them.

Two ranks, each a host of its own, so that the ranks' word travels beside sums; these are made late.
"""

from __future__ import annotations

import time

import pytest
import torch
from ranks import run_ranks
from small_run import CONFIG, digest, opened

from colonnade.config import build_config, override
from colonnade.data import Splits
from colonnade.errors import DataError
from colonnade.train import dense as dense_module
from colonnade.train.dense import DenseGradients
from colonnade.train.run import open_run
from colonnade.train.trainer import Trainer

STEPS, CUT, BAD = 9, 5, 3
SHORT = {
    "train.epochs": 1, "train.max_steps": STEPS, "train.commit_steps": 4, "train.evaluate_steps": 6,
    "train.on_non_finite": "skip", "dense.schedule": {"name": "cosine", "total_steps": 20},
    "rows.schedule": {"name": "linear", "total_steps": 20},
}  # fmt: skip
CASES = {
    "rows": {},
    "stale": {"plan.staleness_steps": 2},
    "towers": {"plan.exchange": "towers", "plan.towers": 2},
    "copies": {"plan.cache": {"size": 60, "staleness": 4, "policy": "lfu"}, "train.on_non_finite": "stop"},
}  # fmt: skip
GO_ON = ("rows", "copies")
"""Cases of a run that is committed and goes on."""
WAIT = {
    "weights": {"model.name": "dcn", "model.bottom": None, "plan.exchange": "substitute"},
    "coded": {"plan.wire.dense": "int8"},
    "clipped": {"dense.clip_norm": 0.1},
    "several": {"train.accumulate": 2},
}  # fmt: skip


class Spoilt:
    """A source whose batch of step BAD holds NaN, or cannot be read."""

    def __init__(self, source, error=None):
        self.source, self.error = source, error
        self.schema, self.num_samples = source.schema, source.num_samples

    def batches(self, batch_size, *, start=None, **where):
        first = 0 if start is None else start.step
        for t, batch in enumerate(self.source.batches(batch_size, start=start, **where), first):
            if t == BAD and self.error is not None:
                raise self.error
            if t == BAD:
                batch.dense = torch.full_like(batch.dense, float("nan"))
            yield batch


def train(mesh, folder, said, spoilt=(), error=None):
    """The run. spoilt: ranks whose source is."""
    config = override(build_config(CONFIG), SHORT | said)
    data = opened(config)
    if mesh.rank in spoilt:
        data = Splits(train=Spoilt(data.train, error), test=data.test)
    run = open_run(config, mesh, folder, data=data)
    try:
        run.train()
    except DataError:
        assert error is not None
    run.close()
    return run


def both_orders(mesh, folder):
    """Collective: how many steps of each case were late."""
    dense_module.ALONE_BYTES = 8
    sum_bucket, hear = dense_module.sum_bucket, DenseGradients.hear
    late = []

    def slowly(*of):
        time.sleep(0.02)
        sum_bucket(*of)

    def noted(dense):
        said = hear(dense)
        late.append(dense.is_underway)
        return said

    dense_module.sum_bucket, DenseGradients.hear = slowly, noted
    may_be_late, found = Trainer._may_be_late, {}
    for name, said in CASES.items():
        late.clear()
        nan = (1,) if name in ("rows", "towers") else ()
        if name in GO_ON:
            train(mesh, folder / f"{name} late", {**said, "train.max_steps": CUT}, nan)
        train(mesh, folder / f"{name} late", said, nan)
        found[name] = sum(late)
        Trainer._may_be_late = lambda trainer: False
        train(mesh, folder / f"{name} waits", said, nan)
        Trainer._may_be_late = may_be_late
    for name, said in WAIT.items():
        late.clear()
        train(mesh, None, {**said, "train.max_steps": 2})
        found[name] = sum(late)
    return found, after_an_error(mesh)


def after_an_error(mesh):
    """Collective: whether dense weights are as they should be where a batch cannot be read."""
    found = train(mesh, None, {}, (0, 1), DataError("got a torn file"))
    step = found.trainer.collection.step
    wanted = train(mesh, None, {"train.max_steps": step})
    states = [run.trainer.model.state_dict() for run in (wanted, found)]
    return all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    return folder, run_ranks(2, both_orders, folder, ranks_per_host=1)


@pytest.mark.parametrize("name", CASES)
def test_late_sums_change_no_bit(told, name):
    folder, ((late, _), (of_other, _)) = told
    skipped = name in ("rows", "towers")
    assert late == of_other
    assert late[name] == STEPS - skipped
    assert digest(folder / f"{name} late") == digest(folder / f"{name} waits")


def test_who_needs_the_sums_waits(told):
    assert all(late[name] == 0 for late, _ in told[1] for name in WAIT), told[1]


def test_an_error_leaves_no_half_of_a_step(told):
    assert all(is_whole for _, is_whole in told[1])
