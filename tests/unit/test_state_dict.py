"""state_dict: the dense network and a token of the commit that holds the rows; never rows."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from own_model import Net, assert_same, rows_of, source, splits

import colonnade
from colonnade.errors import CheckpointError

FAST = {"batch_size": 50, "quiet": True, "threads": 1}
TOKEN = "inner.rows._extra_state"


def saved(model):
    """As torch.save and torch.load (weights only) carry it."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.fixture
def run(tmp_path):
    model = Net()
    colonnade.fit(model, splits(), run=tmp_path / "run", epochs=2, **FAST)
    return model, tmp_path / "run"


def test_a_state_dict_holds_no_rows(run):
    model, _ = run
    state = saved(model)
    assert set(state) == {TOKEN, "bias.weight", "bias.bias"}
    assert b'"step": 24' in bytes(state[TOKEN].numpy())
    assert state[TOKEN].numel() < 100


def test_it_goes_with_the_rows_it_names(run):
    model, folder = run
    state = saved(model)
    later = Net(seed=5)
    later.load_state_dict(state)  # before the rows are there: checked when they come
    assert colonnade.load_run(later, folder, at="last") == 24
    again = Net()
    colonnade.load_run(again, folder, at="last")
    again.load_state_dict(state)
    assert_same(model, later)
    assert_same(model, again)


def test_other_rows_are_refused(run, tmp_path):
    model, folder = run
    state = saved(model)
    older = Net()
    colonnade.load_run(older, folder, at="12")
    with pytest.raises(CheckpointError, match=r"commit of step 24 .* the rows here are step 12 of"):
        older.load_state_dict(state)
    early = Net()
    early.load_state_dict(state)
    with pytest.raises(CheckpointError, match="open that run at step 24"):
        colonnade.load_run(early, folder, at="12")
    without = Net()
    without.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"are no commit"):
        without.collection.open()
    fresh = Net()
    fresh.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"are no commit"):  # before a step is made
        colonnade.fit(fresh, splits(), run=tmp_path / "fresh", epochs=1, **FAST)
    another = Net()
    colonnade.fit(another, splits(), run=tmp_path / "another", epochs=2, **FAST)
    with pytest.raises(CheckpointError, match="rows here are step 24 of run"):
        another.load_state_dict(state)


def test_rows_that_were_not_committed_are_warned_of():
    trained = Net()
    colonnade.fit(trained, source(100), **FAST)
    state = saved(trained)
    with pytest.warns(UserWarning, match="after 2 steps whose rows were not committed"):
        Net().load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.load_state_dict(state)  # back into the model it came from
        Net().load_state_dict(saved(Net()))  # nothing was trained, nothing is lost


def test_dense_weights_alone_can_be_had(run):
    model, _ = run
    state = {name: value for name, value in saved(model).items() if name != TOKEN}
    other = Net(seed=5)
    before = rows_of(other)
    assert other.load_state_dict(state, strict=False).missing_keys == [TOKEN]
    assert torch.equal(other.bias.weight, model.bias.weight)
    assert torch.equal(rows_of(other)["user"], before["user"])
