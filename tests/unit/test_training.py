"""Decisions of a run while it trains: when to evaluate and stop, which checkpoint is best, how large a step is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from own_model import OPTIMIZERS, Net, assert_same, rows_of, source, splits
from ranks import run_ranks
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau

import colonnade
from colonnade import Mesh
from colonnade.checkpoint.checkpoints import steps_to_keep
from colonnade.checkpoint.header import explain_chosen_step, list_checkpoints, resolve_step
from colonnade.config.run import ScheduleConfig, build_config
from colonnade.data import Splits
from colonnade.errors import CheckpointError, ConfigError, NonFiniteError
from colonnade.train.best import Best
from colonnade.train.schedules import compute_learning_rate_factor
from colonnade.train.trainer import average_daily_metrics

FAST = {"batch_size": 50, "quiet": True, "threads": 1}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


# ---- evaluating, stopping, keeping


class Scripted:
    """An objective whose validation score is what the script says, evaluation by evaluation."""

    monitor = "auc"

    def __init__(self, scores):
        self.scores = list(scores)
        self.num_evaluations = 0

    def loss(self, model, batch, mesh):
        return model(batch).sum() / max(batch.world_weight, 1e-12)

    def evaluate(self, model, source, batch_size, mesh):
        self.num_evaluations += 1
        return {"auc": self.scores[self.num_evaluations - 1], "num_samples": 1.0}


def validated():
    return Splits(train=source(600, 1), validation=source(50, 2))


def test_early_stopping_names_the_best_step(tmp_path):
    script = Scripted([0.5, 0.6, 0.7, 0.7, 0.65, 0.69, 0.9])
    result = colonnade.fit(
        Net(), validated(), objective=script, run=tmp_path, epochs=9, patience=3, keep_checkpoints=2, **FAST
    )  # fmt: skip
    assert result.outcome.stopped_early and result.outcome.best_step == 36
    assert result.outcome.steps == 72 and script.num_evaluations == 6
    assert result.metrics["validation_auc"] == 0.7
    assert list_checkpoints(tmp_path) == [36, 60, 72]  # the best beside the newest two
    assert [resolve_step(tmp_path, at) for at in ("best", "last", "60", None)] == [36, 72, 60, 36]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 12; it has \[36, 60, 72\]"):
        resolve_step(tmp_path, 12)


def test_patience_goes_on_where_it_was(tmp_path):
    """Stopped by hand after every epoch, a run stops early where an undisturbed one does."""
    scores = [0.5, 0.6, 0.55, 0.58, 0.57]
    for epochs in range(1, 6):
        script = Scripted(scores[epochs - 1 :])
        result = colonnade.fit(
            Net(), validated(), objective=script, run=tmp_path, epochs=epochs, patience=3, **FAST
        )
        assert result.outcome.stopped_early == (epochs == 5)
    assert (result.outcome.steps, result.outcome.best_step) == (12, 24)
    again = colonnade.fit(
        Net(), validated(), objective=Scripted([]), run=tmp_path, epochs=9, patience=3, **FAST
    )
    assert again.outcome == result.outcome  # as recorded
    more = colonnade.fit(
        Net(), validated(), objective=Scripted([0.9]), run=tmp_path, epochs=6, patience=4, **FAST
    )
    assert (more.outcome.steps, more.outcome.best_step) == (12, 72)


class TwoScores(Scripted):
    """`scores`: (auc, log loss) of each evaluation of the validation part."""

    def evaluate(self, model, source, batch_size, mesh):
        auc, log_loss = self.scores[self.num_evaluations]
        self.num_evaluations += 1
        return {"auc": auc, "log_loss": log_loss, "num_samples": 1.0}


TWO_SCORES = [(0.5, 0.6), (0.6, 0.5), (0.7, 0.55), (0.8, 0.58), (0.9, 0.9)]


@pytest.mark.parametrize(
    ("monitor", "min_delta", "best", "steps"),
    [(None, 0.0, 60, 60), ("auc", 0.0, 60, 60), ("log_loss", 0.0, 24, 48), ("log_loss", 0.2, 12, 36)],
)  # fmt: skip
def test_monitor_chooses_the_best_step_and_ends_the_run(tmp_path, monitor, min_delta, best, steps):
    fitted = colonnade.fit(
        Net(), validated(), objective=TwoScores(TWO_SCORES), run=tmp_path, epochs=5, patience=2,
        monitor=monitor, min_delta=min_delta, **FAST,
    )  # fmt: skip
    assert (fitted.outcome.best_step, fitted.outcome.steps) == (best, steps)
    assert resolve_step(tmp_path, None) == best
    assert explain_chosen_step(tmp_path, best) == f"best of validation {monitor or 'auc'}".replace(
        "_", " "
    )
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"]["monitor"] == (
        monitor or "auc"
    )


def test_an_unknown_monitor_is_refused_with_the_metrics_there_are():
    message = r"monitor=f1, wanted a metric of the validation part: auc, expected_calibration_error, .*log_loss"
    with pytest.raises(ConfigError, match=message):  # before training
        colonnade.fit(Net(), validated(), monitor="f1", **FAST)
    with pytest.raises(ConfigError, match=r"monitor=num_samples, wanted .*: auc, log_loss$"):
        colonnade.fit(
            Net(), validated(), objective=TwoScores(TWO_SCORES), monitor="num_samples", **FAST
        )


def test_scores_of_another_monitor_are_forgotten(tmp_path):
    colonnade.fit(
        Net(), validated(), objective=TwoScores(TWO_SCORES[:2]), run=tmp_path, epochs=2, **FAST
    )
    more = colonnade.fit(
        Net(), validated(), objective=TwoScores(TWO_SCORES[2:3]), run=tmp_path, epochs=3,
        monitor="log_loss", **FAST,
    )  # fmt: skip
    assert more.outcome.best_step == 36  # 0.55 is not compared with an AUC of 0.6


def test_no_validation_part_means_the_last_step(tmp_path):
    fitted = colonnade.fit(
        Net(), Splits(train=source(600, 1), test=source(50, 2)), run=tmp_path, epochs=2, **FAST
    )
    assert fitted.outcome.best_step is None and resolve_step(tmp_path, None) == 24
    assert explain_chosen_step(tmp_path, 24) == "last; no validation part"


def test_min_delta_and_less_is_better():
    best = Best("validation_loss", min_delta=0.1)
    received = [
        best.record_evaluation({"validation_loss": s}, t)
        for t, s in enumerate([1.0, 0.95, 0.85, math.nan])
    ]
    assert received == [True, False, True, False]
    assert (best.score, best.step, best.num_since) == (0.85, 2, 1)


class TwoLabels(Scripted):
    """Two labels, the second one named as metrics whose lower values are better, or that are counts."""

    metrics = ("auc", "log_loss")

    def __init__(self, scores, label):
        super().__init__(scores)
        self.label = label

    def evaluate(self, model, source, batch_size, mesh):
        score = super().evaluate(model, source, batch_size, mesh)["auc"]
        return {"auc": 0.5, f"auc_{self.label}": score, "num_samples": 1.0}


@pytest.mark.parametrize("label", ["data_loss", "error", "entropy", "num_clicks", "calibration"])
def test_a_label_of_any_name_is_monitored_by_its_metrics_direction(tmp_path, label):
    data = validated()
    schema = replace(data.train.schema, labels=("click", label))
    data = Splits(*(replace(part, schema=schema) for part in (data.train, data.validation)))
    script = TwoLabels([0.6, 0.7, 0.65], label)
    result = colonnade.fit(
        Net(), data, objective=script, run=tmp_path, epochs=3, monitor=f"auc_{label}", **FAST
    )
    assert result.outcome.best_step == 24
    assert result.metrics[f"validation_auc_{label}"] == 0.7


def test_a_metric_without_a_value_ends_no_run():
    best = Best("validation_auc")
    for step in range(5):  # a validation part of one class
        assert not best.record_evaluation({"validation_auc": math.nan, "epoch": step}, step)
    assert best.num_since == 0 and best.metrics["epoch"] == 4
    assert best.record_evaluation({"validation_auc": 0.5}, 5)


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=20), st.integers(1, 3))
def test_the_best_is_the_first_maximum(scores, cut):
    best = Best("auc")
    for step, score in enumerate(scores):
        best.record_evaluation({"auc": score}, step)
        if step % cut == 0:  # a checkpoint and a resume in between change nothing
            state, best = best.state(), Best("auc")
            best.restore(state)
    known = [score for score in scores if not math.isnan(score)]
    assert best.score == (max(known) if known else None)
    assert best.step == (scores.index(max(known)) if known else None)


def test_evaluations_between_epochs(tmp_path):
    script = Scripted([0.5, 0.9, 0.8, 0.7, 0.6])
    result = colonnade.fit(
        Net(), validated(), objective=script, run=tmp_path, evaluate_steps=5, **FAST
    )
    assert script.num_evaluations == 3  # steps 5, 10 and the epoch's end, 12
    assert result.outcome.best_step == 10
    assert list_checkpoints(tmp_path) == [10, 12]  # 5 was best once, and is neither now


def test_kept_checkpoints_are_pruned_with_their_rows(tmp_path):
    script = Scripted([0.9, 0.1, 0.2, 0.3])
    colonnade.fit(
        Net(), validated(), objective=script, run=tmp_path, epochs=4, keep_checkpoints=1, **FAST
    )
    assert list_checkpoints(tmp_path) == steps_to_keep(tmp_path, 1) == [12, 48]
    manifests = sorted(path.name for path in (tmp_path / "rows").rglob("manifest-*"))
    assert manifests == 2 * ["manifest-12.json"] + 2 * ["manifest-48.json"]
    assert colonnade.load_checkpoint(Net(), tmp_path, at="best") == 12


def stopping_on_two(mesh, folder):
    script = Scripted([0.5, 0.4, 0.3, 0.9])
    result = colonnade.fit(
        Net(),
        validated(),
        objective=script,
        mesh=mesh,
        run=folder,
        epochs=9,
        patience=2,
        **FAST | {"quiet": False},
    )
    return result.outcome.steps, result.outcome.best_step


def test_ranks_stop_together(tmp_path):
    assert run_ranks(2, stopping_on_two, tmp_path) == [(36, 12), (36, 12)]


# ---- accumulation and clipping


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("clips", [{}, {"embedding_clip_norm": 0.05, "dense_clip_norm": 0.1}])
def test_micro_batches_train_what_one_batch_trains(optimizer, clips):
    models = [Net("float64", OPTIMIZERS[optimizer]) for _ in range(3)]
    for model, parts in zip(models, (1, 5, 50), strict=True):
        colonnade.fit(
            model, source(130), epochs=2, accumulate=parts, dense_optimizer=sgd, **clips, **FAST
        )
    assert models[0].collection.step == models[1].collection.step == 6  # a smaller last one each
    for other in models[1:]:
        assert_same(models[0], other, rtol=1e-5, atol=1e-7)  # labels and weights are float32


def test_accumulation_goes_on_in_an_epoch(tmp_path):
    settings = {**FAST, "accumulate": 5, "dense_optimizer": sgd}
    straight, model = Net(), Net()
    colonnade.fit(straight, source(430), epochs=2, **settings)
    for limit in (3, 11, 18):  # 9 steps an epoch
        model = Net()
        colonnade.fit(model, source(430), run=tmp_path, epochs=2, max_steps=limit, **settings)
    assert_same(straight, model)
    with pytest.raises(ConfigError, match="wanted a divisor of batch_size=50"):
        colonnade.fit(Net(), source(430), **{**settings, "accumulate": 7})


def clipped(mesh, clips):
    model = Net("float64", OPTIMIZERS["sgd"])
    colonnade.fit(
        model,
        source(430),
        mesh=mesh,
        dense_optimizer=sgd,
        accumulate=2,
        **clips,
        **FAST | {"quiet": False},
    )
    return rows_of(model), model.bias.state_dict()


def test_clipping_keeps_the_world_law_and_does_something():
    clips = {"embedding_clip_norm": 0.02, "dense_clip_norm": 0.05, "embedding_clip_value": 0.01}
    rows, dense = clipped(Mesh(), clips)
    free_rows, free_dense = clipped(Mesh(), {})
    assert not torch.allclose(rows["user"], free_rows["user"])
    assert not torch.allclose(dense["weight"], free_dense["weight"])
    for other_rows, other_dense in run_ranks(2, clipped, clips):
        for name, value in rows.items():
            torch.testing.assert_close(value, other_rows[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(dense, other_dense, rtol=1e-9, atol=1e-12)


def test_dense_clipping_is_torchs():
    from colonnade.train.dense import DenseGradients

    one, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    dense = DenseGradients(list(one.parameters()), Mesh())
    dense.build_buckets()
    for model in (one, other):
        torch.manual_seed(0)
        for parameter in model.parameters():
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.copy_(gradient)
    dense.reduce(finite=True, stop=True)  # the signals are no gradient
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    assert dense.clip_norm(0.5) == pytest.approx(float(norm), rel=1e-6)
    for actual, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_a_norm_that_overflows_is_refused_or_skipped():
    def huge(output, batch):
        return output[:, 0] * 1e300

    model = Net("float64", OPTIMIZERS["sgd"])
    before = rows_of(model)
    result = colonnade.fit(
        model, source(100), loss=huge, embedding_clip_norm=1.0, on_non_finite="skip", **FAST
    )
    assert result.outcome.skipped == 2
    for name, value in rows_of(model).items():
        assert torch.equal(value, before[name])
    with pytest.raises(NonFiniteError):
        colonnade.fit(Net("float64"), source(100), loss=huge, embedding_clip_norm=1.0, **FAST)


# ---- learning rates


def test_factors_of_the_learning_rate():
    linear = ScheduleConfig(name="linear", warmup_steps=4, total_steps=14, final=0.5)
    assert [compute_learning_rate_factor(linear, 14, s) for s in (0, 3, 4, 9, 14, 99)] == [
        0.25,
        1,
        1,
        0.75,
        0.5,
        0.5,
    ]
    cosine = ScheduleConfig(name="cosine", final=0.2)
    assert compute_learning_rate_factor(cosine, 10, 5) == pytest.approx(0.6)
    exponential = ScheduleConfig(name="exponential", final=0.01)
    assert compute_learning_rate_factor(exponential, 10, 5) == pytest.approx(0.1)
    assert compute_learning_rate_factor(ScheduleConfig(warmup_steps=2), 0, 9) == 1.0
    with pytest.raises(ConfigError, match="wanted more than 0 for exponential"):
        build_config({"dense": {"schedule": {"name": "exponential"}}})
    with pytest.raises(ConfigError, match=r"did you mean dense\.schedule\.warmup_steps"):
        build_config({"dense": {"schedule": {"warmup": 3}}})


class Unknown:
    """A source that does not say how long it is."""

    def __init__(self, inner):
        self.inner, self.schema, self.num_samples = inner, inner.schema, None

    def batches(self, *args, **where):
        return self.inner.batches(*args, **where)


def test_a_schedule_needs_a_length():
    settings = {"dense_schedule": {"name": "linear"}}
    config = build_config({"dense": {"schedule": settings["dense_schedule"]}})
    with pytest.raises(ConfigError, match="total_steps"):
        colonnade.fit(Net(), Splits(train=Unknown(source(100))), config=config, **FAST)
    colonnade.fit(Net(), Splits(train=Unknown(source(100))), config=config, max_steps=2, **FAST)


SCHEDULES = {
    "config": {
        "config": build_config(
            {
                "embedding": {"schedule": {"name": "linear", "warmup_steps": 3}},
                "dense": {"schedule": {"name": "cosine", "final": 0.1}},
            }
        )
    },
    "settings": {
        "row_schedule": {"name": "exponential", "final": 0.1},
        "dense_schedule": {"name": "linear", "warmup_steps": 5},
    },
    "torch": {
        "dense_schedule": lambda optimizer: CosineAnnealingLR(optimizer, T_max=24),
        "row_schedule": lambda optimizer: MultiStepLR(optimizer, [5, 15], gamma=0.3),
    },
    "cycle": {
        "dense_schedule": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=30),
    },
    "plateau": {
        "row_schedule": lambda optimizer: ReduceLROnPlateau(optimizer, "min", 0.5, patience=0),
        "evaluate_steps": 2,
    },
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_change_the_run_and_go_on_with_it(name, tmp_path):
    straight, plain, model = Net(), Net(), Net()
    wanted = dict.fromkeys(("dense_optimizer",), sgd) | {"epochs": 2, **FAST}
    colonnade.fit(straight, splits(), **SCHEDULES[name], **wanted)
    colonnade.fit(plain, splits(), **wanted)
    assert not torch.allclose(rows_of(straight)["user"], rows_of(plain)["user"])
    for limit in (4, 14, 24):
        # A run that ends early has another length: say it, as a resumed run of the same length would.
        model = Net()
        stopped = stop_at(limit)
        colonnade.fit(model, splits(), run=tmp_path, objective=stopped, **SCHEDULES[name], **wanted)
    assert_same(straight, model)


def stop_at(limit):
    """Trains as Probability does, and asks to stop as Ctrl-C does, in step `limit`."""
    import inspect

    from colonnade.train.objective import Probability
    from colonnade.train.trainer import Trainer

    class Stopping(Probability):
        def loss(self, model, batch, mesh):
            frame = inspect.currentframe().f_back
            trainer = frame.f_locals["self"]
            assert isinstance(trainer, Trainer)
            trainer.stop_requested |= trainer.collection.step + 1 == limit
            return super().loss(model, batch, mesh)

    return Stopping()


def test_the_rate_that_a_run_starts_with_may_change_when_it_goes_on(tmp_path):
    """A schedule that is a function of the step starts from this run's learning rate."""
    config = SCHEDULES["config"]["config"]
    rates = []

    def spy(parameters):
        rates.append(torch.optim.SGD(parameters, lr=0.1 * (1 + len(rates))))
        return rates[-1]

    for epochs in (1, 2):
        colonnade.fit(
            Net(), splits(), run=tmp_path, config=config, dense_optimizer=spy, epochs=epochs,
            **FAST,
        )  # fmt: skip
    assert rates[1].param_groups[0]["initial_lr"] == pytest.approx(0.2)
    assert rates[1].param_groups[0]["lr"] == pytest.approx(0.2 * 0.1)  # the end of the cosine


# ---- day by day


def test_days_are_tested_before_they_are_trained(tmp_path):
    data = splits(days=4)
    result = colonnade.fit(Net(), data, progressive=True, run=tmp_path / "run", **FAST)
    assert result.outcome.steps == sum(-(-day.num_samples // 50) for day in data.days)
    # By hand: train day 0; score day 1; train it; ...
    model, days = Net(), []
    dense_state = {}
    for number, day in enumerate(data.days):
        if number:
            metrics = colonnade.train.metrics.evaluate(model, day, 50, Mesh())
            days.append({"day": number, **metrics})
        train_by_hand(model, day, number, dense_state)
    assert result.metrics["days_auc"] == pytest.approx(
        average_daily_metrics(days)["days_auc"], abs=1e-6
    )
    assert result.metrics["days_num_samples"] == sum(day.num_samples for day in data.days[1:])
    assert [day["day"] for day in result.outcome.days] == [1, 2, 3]
    for actual, expected in zip(result.outcome.days, days, strict=True):
        assert actual == pytest.approx(expected, abs=1e-6)


def train_by_hand(model, day, number, state):
    from colonnade import RowOptimizer
    from colonnade.data import Position
    from colonnade.train.objective import weighted_loss

    rows = state.setdefault("rows", RowOptimizer(model.collection))
    dense = state.setdefault("dense", torch.optim.Adam(model.parameters(), lr=1e-3))
    for batch in model.collection.lookahead(day.batches(50, start=Position(number, 0))):
        dense.zero_grad()
        weighted_loss(model(batch), batch).backward()
        rows.step()
        dense.step()


def test_days_go_on_where_a_run_was_stopped(tmp_path):
    data, settings = splits(days=4), {"progressive": True, **FAST}
    straight = Net()
    whole = colonnade.fit(straight, data, **settings)
    for limit in (2, 7, 11, None):
        model = Net()
        result = colonnade.fit(model, data, run=tmp_path, max_steps=limit, **settings)
    assert_same(straight, model)
    assert result.metrics == whole.metrics
    with pytest.raises(ConfigError, match="this data set has none"):
        colonnade.fit(Net(), splits(), progressive=True, **FAST)


def test_pooled_days_are_the_days_samples_together():
    days = [
        {"day": 1, "log_loss": 0.5, "auc": math.nan, "num_samples": 10.0},
        {"day": 2, "log_loss": 0.8, "auc": 0.7, "num_samples": 30.0},
    ]
    result = average_daily_metrics(days)
    assert result["days_log_loss"] == pytest.approx((5 + 24) / 40)
    assert result["days_auc"] == pytest.approx(0.7) and result["days_num_samples"] == 40
    assert average_daily_metrics([]) == {}
