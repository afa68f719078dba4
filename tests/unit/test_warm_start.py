"""A run that starts from another's weights: what is shared comes along, what is new is new, what differs is refused."""

from __future__ import annotations

import pytest
import torch
from own_model import FILMS, OPTIMIZERS, USERS, Net, assert_same, rows_of, source, splits
from ranks import run_ranks
from small_run import CONFIG

import colonnade
from colonnade import Mesh
from colonnade.config.run import build_config, override_settings
from colonnade.data import Splits
from colonnade.errors import CheckpointError, ConfigError
from colonnade.run.run import open_run

FAST = {"batch_size": 50, "quiet": True, "threads": 1}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


@pytest.fixture
def old(tmp_path):
    """A finished run of two epochs."""
    model = Net()
    colonnade.fit(model, splits(), run=tmp_path / "old", epochs=2, **FAST)
    return model, tmp_path / "old"


def start_from(folder, model, data, target, **settings):
    """A new run that ends before its first step."""
    return colonnade.fit(
        model, data, run=target, warm_start=str(folder), max_steps=0, **{**FAST, **settings}
    )


def test_a_table_more(old, tmp_path):
    model, folder = old
    more = Net(seed=3, extra=("more",))
    start_from(folder, more, splits(extra=("more",)), tmp_path / "new")
    rows, wanted = rows_of(more), rows_of(model)
    assert torch.equal(rows["user"], wanted["user"]) and torch.equal(rows["film"], wanted["film"])
    fresh = rows_of(Net(seed=3, extra=("more",)))
    assert torch.equal(rows["more"], fresh["more"])
    assert torch.equal(more.bias.weight, model.bias.weight)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_the_same_optimizer_goes_on_as_if_nothing_had_happened(optimizer, tmp_path):
    """A warm start of the same model trains the bits that one run trains: state and clocks came along."""
    halves = [source(300, seed) for seed in (1, 2)]
    first = Net(optimizer=OPTIMIZERS[optimizer])
    colonnade.fit(first, halves[0], run=tmp_path / "old", dense_optimizer=adam, **FAST)
    second = Net(optimizer=OPTIMIZERS[optimizer], seed=7)
    second.collection.seed = 0  # rows never trained are born alike
    warm = {"warm_start": f"{tmp_path / 'old'}@last", "dense_optimizer": adam}
    colonnade.fit(second, halves[1], run=tmp_path / "new", **warm, **FAST)
    reference = Net(optimizer=OPTIMIZERS[optimizer])
    state = []

    def retained(parameters):
        state.append(adam(parameters))
        if len(state) == 2:
            state[1].load_state_dict(state[0].state_dict())
        return state[-1]

    for half in halves:
        colonnade.fit(reference, half, dense_optimizer=retained, **FAST)
    assert_same(second, reference)


def test_another_optimizer_starts_its_state_anew(old, tmp_path, capsys):
    model, folder = old
    other = Net(optimizer=OPTIMIZERS["adam"], seed=3)
    sgd = {"quiet": False, "dense_optimizer": lambda p: torch.optim.SGD(p, lr=1)}
    start_from(folder, other, splits(), tmp_path / "new", **sgd)
    output = " ".join(capsys.readouterr().out.split())
    assert "the rows of 2 tables" in output
    assert "weights without optimizer state: dense parameters, user, film" in output
    rows, wanted = rows_of(other), rows_of(model)
    trained = colonnade.trained_ids(model.collection, "user")
    assert torch.equal(rows["user"][trained], wanted["user"][trained])


def test_what_was_dropped_and_what_is_new_is_said(tmp_path, capsys):
    extra = splits(extra=("gone",))
    colonnade.fit(Net(extra=("gone",)), extra, run=tmp_path / "old", **FAST)
    start_from(
        tmp_path / "old", Net(extra=("here",)), splits(extra=("here",)), tmp_path / "new", quiet=False
    )  # fmt: skip
    output = " ".join(capsys.readouterr().out.split())
    assert "new: here" in output and "not taken over: gone" in output


def settings_of(**changes):
    return override_settings(
        build_config(CONFIG), {"train.epochs": 1, **{k.replace("__", "."): v for k, v in changes.items()}}
    )  # fmt: skip


def test_what_differs_is_refused_unless_it_is_listed(tmp_path):
    run = open_run(settings_of(), Mesh(), tmp_path / "old")
    run.train()
    run.close()
    wide = {"model__top": [16], "train__warm_start": str(tmp_path / "old")}
    with pytest.raises(CheckpointError, match=r"top\.0\.weight has shape \(8, .* there") as error:
        open_run(settings_of(**wide), Mesh(), tmp_path / "new")
    listed = str(error.value).split("warm_start_skip=")[1]
    skip = [name.strip(" '") for name in listed.strip("[]").split(",")]
    run = open_run(settings_of(**wide, train__warm_start_skip=skip), Mesh(), tmp_path / "new2")
    assert run.trainer.collection.step == 0
    run.train()
    run.close()
    with pytest.raises(CheckpointError, match="C1 has width 4 there, 8 here"):
        open_run(settings_of(model__dim=8, **wide), Mesh(), tmp_path / "new3")
    with pytest.raises(ConfigError, match="'typo' is no table or dense parameter"):
        open_run(settings_of(**wide, train__warm_start_skip=["typo"]), Mesh(), tmp_path / "new4")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_run(settings_of(train__warm_start=str(tmp_path / "none")), Mesh(), tmp_path / "new5")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new2"}  # nothing half-written


def test_a_resumed_run_does_not_start_again(old, tmp_path):
    _, folder = old
    model = Net()
    settings = {"run": tmp_path / "new", "warm_start": f"{folder}@best", **FAST}
    colonnade.fit(model, splits(), epochs=1, **settings)
    again = Net()
    result = colonnade.fit(again, splits(), epochs=1, **settings)
    assert result.outcome.steps == 12 and result.resumed_at == 12  # as the first recorded
    assert_same(model, again)


def warm_on_two(mesh, folder, target):
    model = Net(seed=4)
    start_from(folder, model, splits(), target, mesh=mesh, quiet=False)
    return rows_of(model)


def test_on_two_ranks_each_takes_what_it_owns(old, tmp_path):
    model, folder = old
    wanted = rows_of(model)
    trained = colonnade.trained_ids(model.collection, "film")
    assert len(trained) == FILMS
    for rows in run_ranks(2, warm_on_two, folder, tmp_path / "new"):
        assert torch.equal(rows["film"], wanted["film"]) and len(rows["user"]) == USERS


def test_other_dtypes_are_converted(old, tmp_path):
    model, folder = old
    other = Net("float64", seed=3)
    data = Splits(train=source(100))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        start_from(tmp_path / "nothing", Net(), data, tmp_path / "x")
    start_from(folder, other, data, tmp_path / "new")
    torch.testing.assert_close(rows_of(other)["film"], rows_of(model)["film"].double())
