"""A scaled loss: torch's rule, the same bits by powers of two, and what is skipped where gradients overflow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import cache_settings
from ranks import console_of, run_ranks
from small_run import CONFIG, digest, opened
from test_run import poisoned

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.config.run import build_config, override_settings
from colonnade.errors import NonFiniteError
from colonnade.report.pages import build_headline
from colonnade.report.reading import read_run_folder
from colonnade.run.run import open_run
from colonnade.staleness import TableCache, row_clock
from colonnade.train import loss_scale as module
from colonnade.train.loss_scale import LossScale, build_loss_scale
from colonnade.train.metrics_file import FILE_NAME, read_metrics_lines

SHORT = {"train.epochs": 1, "train.max_steps": 9, "train.checkpoint_steps": 0}
CLIPPED = {"train.accumulate": 4, "embedding.clip_norm": 0.02, "dense.clip_norm": 0.05}
ROLES = {"plan.servers": 1, "plan.staleness_steps": 2, "plan.codec.dense": "bf16"}


def train(mesh, folder, overrides):
    config = override_settings(build_config(CONFIG), SHORT | overrides)
    run = open_run(config, mesh, folder, data=opened(config), console=console_of(mesh))
    outcome = run.train()
    run.close()
    return outcome, run.trainer.loss_scale


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=14), st.integers(1, 4))
def test_the_rule_is_that_of_torch(finite, grown_after):
    scaler = torch.amp.GradScaler("cpu", growth_interval=grown_after)
    weight = torch.zeros(1, requires_grad=True)
    optimizer, own_part = torch.optim.SGD([weight]), build_loss_scale("dynamic")
    scaler.scale(weight.sum())  # it begins here
    for is_finite in finite:
        weight.grad = torch.tensor([1.0 if is_finite else math.inf])
        scaler.step(optimizer)
        scaler.update()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "GROWTH_INTERVAL", grown_after)
            assert own_part.record_good_step() is None if is_finite else own_part.lower()
        assert own_part.value == scaler.get_scale()


def test_a_scale_that_stays_and_one_that_cannot_fall():
    fixed = build_loss_scale(8.0)
    assert not fixed.lower() and fixed.value == 8 and fixed.state() is None
    assert build_loss_scale(None).value == 1
    least = LossScale(module.MIN_SCALE, is_dynamic=True)
    assert not least.lower() and least.value == 1
    least.restore((4.0, 7))
    assert least.state() == (4.0, 7)


@pytest.mark.parametrize("message", [{}, CLIPPED])
def test_powers_of_two_change_no_bit(message, tmp_path):
    for number, scale in enumerate((None, 1024, "dynamic")):
        outcome, _ = train(Mesh(), tmp_path / str(number), message | {"train.loss_scale": scale})
        assert outcome.skipped == 0
        assert digest(tmp_path / str(number)) == digest(tmp_path / "0")
    assert ("loss scale", "65,536", "0 steps skipped") in build_headline(
        read_run_folder(tmp_path / "2")
    )


def of_roles(mesh, folder):
    for scale in (None, 4096):
        train(mesh, folder / str(scale), ROLES | {"train.loss_scale": scale})


@pytest.mark.slow
def test_nor_beside_servers_with_gradients_that_are_late_and_coded(tmp_path):
    run_ranks(3, of_roles, tmp_path)
    assert digest(tmp_path / "4096") == digest(tmp_path / "None")


def test_steps_that_overflow_are_skipped_until_they_do_not(tmp_path, monkeypatch):
    """A run that is cut after some of them goes on with the scale that it had."""
    monkeypatch.setattr(module, "INITIAL_SCALE", 2.0**132)
    dynamic = {"train.loss_scale": "dynamic"}
    whole, scale = train(Mesh(), tmp_path / "whole", dynamic)
    assert 4 <= whole.skipped < whole.steps == 9
    assert scale.value == 2.0 ** (132 - whole.skipped)
    assert scale.good_steps == whole.steps - whole.skipped
    train(Mesh(), tmp_path / "cut", dynamic | {"train.max_steps": 3})
    _, again = train(Mesh(), tmp_path / "cut", dynamic)
    assert again == scale and digest(tmp_path / "cut") == digest(tmp_path / "whole")
    lines = [
        line for line in read_metrics_lines(tmp_path / "cut" / FILE_NAME) if line["kind"] == "train"
    ]
    assert lines[-1]["loss_scale"] == scale.value


def test_a_loss_that_is_not_finite_ends_the_run_as_ever():
    config = override_settings(build_config(CONFIG), SHORT | {"train.loss_scale": "dynamic"})
    run = open_run(config, Mesh(), None, data=poisoned(3))
    with pytest.raises(NonFiniteError, match=r"step 3 .*nothing of this step was applied"):
        run.train()
    assert run.trainer.loss_scale.value == module.INITIAL_SCALE


def test_half_precision_learns(tmp_path):
    half = {"train.autocast": "float16", "train.loss_scale": "dynamic"}
    outcome, _ = train(Mesh(), None, half | {"train.max_steps": None})
    other, _ = train(Mesh(), None, {"train.max_steps": None})
    assert outcome.metrics["test_log_loss"] == pytest.approx(
        other.metrics["test_log_loss"], abs=0.01
    )


def train_with_cached_rows(mesh, folder):
    """Return by scale the numbers of skipped steps and of steps, in runs of which one is cut after some skipped
    steps."""
    cache = {"plan.cache": {"size": 60, "staleness": 12, "write_share": 1.0}, "plan.lookahead": 2}
    results = {}
    for scale in (None, 4096.0, 1e-3):
        results[scale], _ = train(mesh, folder / str(scale), cache | {"train.loss_scale": scale})
    module.INITIAL_SCALE, initial = 2.0**132, module.INITIAL_SCALE
    dynamic = cache | {"train.loss_scale": "dynamic"}
    results["whole"], scale = train(mesh, folder / "whole", dynamic)
    train(mesh, folder / "cut", dynamic | {"train.max_steps": results["whole"].skipped - 1})
    assert train(mesh, folder / "cut", dynamic)[1] == scale
    module.INITIAL_SCALE = initial
    return {name: (outcome.skipped, outcome.steps) for name, outcome in results.items()}


@pytest.mark.slow
def test_gradients_that_wait_at_cached_rows_were_divided_by_their_own_scale(tmp_path):
    """A scale that changes while they wait, and steps that are skipped, change nothing of them."""
    results = run_ranks(2, train_with_cached_rows, tmp_path)[0]
    assert digest(tmp_path / "4096.0") == digest(tmp_path / "None")
    assert digest(tmp_path / "0.001") != digest(tmp_path / "None")  # to rounding
    skipped, steps = results["whole"]
    assert 3 <= skipped < steps == 9
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def scale_each_step(mesh):
    """Return a row's weight after steps with a scale of their own."""
    embeddings = EmbeddingCollection(
        [
            Table(
                "item",
                1,
                rows=4,
                optimizer=SGD(lr=1.0),
                initializer=Uniform(scale=0.0),
                dtype="float64",
            )
        ],
        [Feature("item", "item")],
    )
    cache = TableCache(4, row_clock(50, 25, 25, 1.0))
    plan = build_plan(
        embeddings.tables, mesh.world, PlanConfig(cache=cache_settings({"item": cache}))
    )
    embeddings.open(plan, mesh)
    rows = RowOptimizer(embeddings)
    for scale in (2.0**10, 2.0, 2.0**-3):
        batch = Batch(1, torch.zeros(1, 0), {"item": Ids(torch.tensor([mesh.rank]))})
        (embeddings(batch)["item"].sum() * scale).backward()
        rows.scale_grad_(1 / scale)
        rows.step()
    with rows.synchronized_view():
        return embeddings.rows("item", torch.arange(2)).flatten().tolist()


def test_a_factor_is_that_of_its_own_step():
    assert run_ranks(2, scale_each_step) == [[-3.0, -3.0]] * 2
