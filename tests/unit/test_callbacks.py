"""Callbacks and metrics of a user: when they are called and with what, that they change no bits, and their errors."""

from __future__ import annotations

import json
import signal
import time
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from own_model import Net, assert_same, rows_of, splits
from ranks import run_ranks
from torch import nn

import colonnade
from colonnade import Callback, CallbackError
from colonnade.checkpoint.header import list_checkpoints
from colonnade.errors import ConfigError, PeerLost
from colonnade.train.callbacks import METHODS

SETTINGS = {"epochs": 2, "batch_size": 50, "threads": 1, "quiet": True}


class Noted(Callback):
    """Keeps every event by method, and does what a callback must not be able to do to a run."""

    def __init__(self, fails_in="", stops_at=None):
        self.events = []
        self.fails_in = fails_in
        self.stops_at = stops_at

    def note(self, method, event):
        torch.manual_seed(3)
        torch.rand(5)
        self.events.append((method, event.step, event.epoch, dict(event.metrics), event.folder))
        event.metrics.clear()
        event.metrics["validation_auc"] = 9.0
        if method == self.fails_in and (event.step >= 7 or method == "on_start"):
            raise KeyError("no such tracker")
        return event.step == self.stops_at if method == "on_evaluate" else None

    def of(self, method):
        return [event for event in self.events if event[0] == method]


for name in METHODS:
    setattr(Noted, name, lambda self, event, name=name: self.note(name, event))


class Dropped(Net):
    """Net with a loss that depends on torch's random generator."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dropout = nn.Dropout(0.3)

    def forward(self, batch):
        return self.dropout(super().forward(batch))


def trained(folder, *callbacks, **settings):
    torch.manual_seed(0)
    model = Dropped()
    result = colonnade.fit(
        model, splits(), run=folder, callbacks=callbacks, **{**SETTINGS, **settings}
    )
    return model, result


def test_callbacks_change_no_bits_and_hear_of_everything(tmp_path):
    plain, without = trained(tmp_path / "plain", keep_checkpoints=99)
    noted = Noted()
    model, result = trained(tmp_path / "noted", noted, noted, keep_checkpoints=99)
    assert_same(plain, model)
    assert result.metrics == without.metrics
    steps = noted.of("on_step")
    assert steps[::2] == steps[1::2]  # twice the same callback, with equal events
    assert [event[1] for event in steps[::2]] == list(range(1, 25))
    assert [event[2] for event in steps[::2]] == [0] * 11 + [1] * 12 + [2]
    assert all(list(event[3]) == ["loss"] for event in steps)
    assert {event[4] for event in noted.events} == {tmp_path / "noted"}
    evaluated = noted.of("on_evaluate")[::2]
    assert [event[1:3] for event in evaluated] == [(12, 1), (24, 2)]
    lines = [json.loads(t) for t in (tmp_path / "noted/metrics.jsonl").read_text().splitlines()]
    recorded = [line for line in lines if line.get("kind") == "evaluate"][:2]
    for event, line in zip(evaluated, recorded, strict=True):
        assert event[3].items() <= line.items() and "validation_auc" in event[3]
    saved = [event[1] for event in noted.of("on_checkpoint")[::2]]
    assert saved == list_checkpoints(tmp_path / "noted") == [12, 24]
    assert noted.of("on_start")[0][1:4] == (0, 0, {})
    assert noted.of("on_end")[0][1:4] == (24, 2, result.metrics)
    assert noted.events[0][0] == "on_start" and noted.events[-1][0] == "on_end"


def test_a_log_is_what_tensorboard_shows(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    noted = Noted()
    trained(tmp_path, noted)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    logged = defaultdict(list)
    for _, step, _, metrics, _ in noted.of("on_log"):
        for tag, value in metrics.items():
            logged[tag].append((step, pytest.approx(value)))
    assert logged == {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }
    assert "train/loss" in logged and "evaluate/test_auc" in logged


def test_callbacks_of_a_run_without_folder_get_the_same_numbers(tmp_path):
    noted, other = Noted(), Noted()
    trained(tmp_path, noted, test_at="evaluations")
    trained(None, other, test_at="evaluations")
    for method in ("on_step", "on_evaluate", "on_end"):
        assert [e[:4] for e in noted.of(method)] == [e[:4] for e in other.of(method)]
    names = [{name for event in one.of("on_log") for name in event[3]} for one in (noted, other)]
    assert {"train/loss", "evaluate/validation_auc", "train/lr/rows"} <= names[1] <= names[0]
    assert not other.of("on_checkpoint") and other.events[0][4] is None


@pytest.mark.parametrize("method", METHODS)
def test_a_failing_callback_is_named_and_the_run_goes_on_after_it(method, tmp_path):
    plain, without = trained(tmp_path / "plain")
    failing, other = Noted(fails_in=method), Noted()
    with pytest.raises(CallbackError, match=rf"Noted\.{method}: got KeyError: 'no such tracker'"):
        trained(tmp_path / "failed", failing, other)
    if method not in ("on_start", "on_end"):
        assert [event[3] for event in other.of("on_end")] == [{}]
    noted = Noted()
    model, result = trained(tmp_path / "failed", noted)
    assert_same(plain, model)
    assert result.metrics == without.metrics
    resumed_at = result.resumed_at or 0
    assert [event[1] for event in noted.of("on_step")] == list(range(resumed_at + 1, 25))
    assert noted.of("on_start")[0][1:3] == (resumed_at, resumed_at // 12)


def test_an_error_of_training_is_raised_and_callbacks_end(tmp_path):
    def fails(outputs, batch):
        raise ZeroDivisionError("in the loss")

    noted = Noted(fails_in="on_end")
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        trained(tmp_path, noted, loss=fails)
    assert [event[0] for event in noted.events if event[0] != "on_log"] == ["on_start", "on_end"]


def test_ctrl_c_saves_and_the_same_call_goes_on(tmp_path):
    class Interrupting(Callback):
        def on_step(self, event):
            if event.step == 3:
                signal.raise_signal(signal.SIGINT)

    noted = Noted()
    _, result = trained(tmp_path / "cut", Interrupting(), noted)
    assert result.outcome.stopped and result.outcome.steps == 4
    assert [event[1] for event in noted.of("on_checkpoint")] == [4]
    assert noted.events[-1][:2] == ("on_end", 4)
    model, result = trained(tmp_path / "cut")
    assert result.resumed_at == 4
    assert_same(model, trained(None)[0])


def test_true_of_an_evaluation_stops_early(tmp_path):
    _, result = trained(tmp_path, Noted(stops_at=12), Noted())
    assert result.outcome.stopped_early and not result.outcome.stopped
    assert result.outcome.steps == 12 and list_checkpoints(tmp_path) == [12]
    assert {"validation_auc", "test_auc"} <= {*result.metrics}
    model, result = trained(tmp_path)  # nothing else says that it is over
    assert result.resumed_at == 12 and not result.outcome.stopped_early
    assert_same(model, trained(None)[0])


def test_a_finished_run_calls_nothing(tmp_path):
    trained(tmp_path)
    noted = Noted()
    trained(tmp_path, noted)
    assert not noted.events


def on_two_ranks(mesh, folder, fails_in, stops_at):
    noted = Noted(fails_in, stops_at)
    model = Net("float64")
    # Ranks other than 0 need none; what they pass is not called.
    callbacks = [noted] if mesh.rank < 2 else []
    try:
        result = colonnade.fit(
            model, splits(), run=folder, callbacks=callbacks, mesh=mesh, **SETTINGS
        )
        ended = result.outcome.steps, result.outcome.stopped_early, result.metrics
    except (CallbackError, PeerLost) as error:
        mesh.peer_monitor.announce_end(str(error))  # as a process that ends does
        return type(error).__name__, str(error), len(noted.events)
    return ended, rows_of(model), len(noted.events)


def test_two_ranks_call_on_rank_0_and_stop_together(tmp_path):
    plain = run_ranks(2, on_two_ranks, tmp_path / "plain", "", None)
    stopped = run_ranks(2, on_two_ranks, tmp_path / "stopped", "", 12)
    assert plain[0][0][:2] == plain[1][0][:2] == (24, False)
    assert stopped[0][0] == stopped[1][0] and stopped[0][0][:2] == (12, True)
    assert [result[2] > 0 for result in plain + stopped] == [True, False] * 2
    went_on = run_ranks(2, on_two_ranks, tmp_path / "stopped", "", None)
    assert went_on[1][0][2] == plain[1][0][2]
    for name, rows in went_on[0][1].items():
        assert torch.equal(rows, plain[0][1][name])


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_end"])
def test_a_failing_callback_ends_two_ranks_that_both_name_it(method, tmp_path):
    failed = run_ranks(2, on_two_ranks, tmp_path, method, None, fresh=True)
    assert [name for name, _, _ in failed] == ["CallbackError", "PeerLost"]
    for _, message, _ in failed:
        assert f"Noted.{method}: got KeyError" in message
    result = run_ranks(2, on_two_ranks, tmp_path, "", None)
    assert result[0][0][2] == result[1][0][2] and "test_auc" in result[1][0][2]


class Slow(Callback):
    """Callback that notes when steps with checkpoints begin."""

    def __init__(self):
        self.times = {}

    def on_step(self, event):
        time.sleep(0.03)
        self.times[event.step] = time.monotonic()


def with_checkpoints_by_time(mesh, folder):
    slow = Slow()
    settings = {**SETTINGS, "epochs": 1, "checkpoint_seconds": 0.1, "keep_checkpoints": 99}
    colonnade.fit(Net(), splits(), run=folder, mesh=mesh, callbacks=[slow], **settings)
    return slow.times


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpoints_by_time_come_at_the_same_step_on_all_ranks(num_ranks, tmp_path):
    times = run_ranks(num_ranks, with_checkpoints_by_time, tmp_path)[0]
    saved = list_checkpoints(tmp_path)
    assert len(saved) > 2 and saved[-1] == 12  # 12 steps take 0.36 s at least
    # The clock is read a little before a step's callbacks.
    assert all(times[b] - times[a] > 0.07 for a, b in pairwise(saved[:-1]))


class Misspelt:
    def on_epoch_end(self, event): ...


@pytest.mark.parametrize("bad", [Misspelt(), Noted, object(), print])
def test_what_is_no_callback_is_refused(bad, tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks: got .*wanted objects with any of on_start"):
        trained(tmp_path / "run", bad)
    assert not (tmp_path / "run").exists()


def test_a_callback_or_a_metric_by_itself_is_refused():
    for settings, text in (
        ({"callbacks": Noted()}, "callbacks: got .*Noted.*, wanted a list"),
        ({"metrics": [brier]}, "metrics: got .*brier.*, wanted a mapping"),
    ):
        with pytest.raises(ConfigError, match=text):
            colonnade.fit(Net(), splits(), **SETTINGS, **settings)


# Metrics.


def brier(scores, labels):
    return float((scores - labels).square().mean())


def spoil(scores, labels):
    """Change the arguments and the random generator, which nothing notices."""
    torch.manual_seed(4)
    scores.zero_()
    labels.zero_()
    return torch.tensor(0.5)


def ranked(scores, labels):
    return colonnade.train.metrics.auc(scores, labels)


METRICS = {"spoiled": spoil, "brier": brier, "ranked": ranked}


def with_metrics(mesh, **settings):
    torch.manual_seed(0)
    model = Dropped(dtype="float64")
    result = colonnade.fit(model, splits(), mesh=mesh, **{**SETTINGS, **settings})
    return result.metrics, result.outcome.best_step, rows_of(model)


def on_two_ranks_with_metrics(mesh):
    return with_metrics(mesh, metrics=METRICS)


def test_metrics_are_those_of_all_samples_on_any_number_of_ranks():
    plain = with_metrics(colonnade.Mesh())
    one = with_metrics(colonnade.Mesh(), metrics=METRICS)
    assert plain[0].items() <= one[0].items() and plain[1] == one[1]
    for name, rows in plain[2].items():
        assert torch.equal(rows, one[2][name])
    for part in ("validation", "test"):
        assert one[0][f"{part}_ranked"] == one[0][f"{part}_auc"]
        assert one[0][f"{part}_spoiled"] == 0.5
        assert 0.01 < one[0][f"{part}_brier"] < 0.3
    two = run_ranks(2, on_two_ranks_with_metrics)
    assert two[0][0] == two[1][0]
    assert two[0][0]["test_ranked"] == two[0][0]["test_auc"]


def test_a_metric_monitors_in_its_direction():
    settings = {"metrics": METRICS, "monitor": "brier", "epochs": 4}
    noted = Noted()
    metrics, best_step, _ = with_metrics(None, monitor_mode="min", callbacks=[noted], **settings)
    scores = {event[1]: event[3]["validation_brier"] for event in noted.of("on_evaluate")}
    assert best_step == min(scores, key=scores.get)
    assert metrics["validation_brier"] == min(scores.values())
    noted = Noted()
    _, best_step, _ = with_metrics(None, monitor_mode="max", callbacks=[noted], **settings)
    scores = {event[1]: event[3]["validation_brier"] for event in noted.of("on_evaluate")}
    assert best_step == max(scores, key=scores.get)
    with pytest.raises(ConfigError, match=r"monitor=brier of your metrics, wanted monitor_mode"):
        with_metrics(None, **settings)
    with pytest.raises(ConfigError, match=r"train\.monitor=briar, wanted .*brier, .*spoiled"):
        with_metrics(None, **{**settings, "monitor": "briar"})


def absolute(outputs, batch):
    return (outputs[:, 0] - batch.label[:, 0]).abs()


def test_metrics_of_a_loss_get_what_the_model_gives():
    def mean_absolute(scores, labels):
        return (scores - labels).abs().mean()

    metrics, _, _ = with_metrics(None, loss=absolute, metrics={"mae": mean_absolute})
    assert metrics["validation_mae"] == pytest.approx(metrics["validation_loss"], rel=1e-6)
    assert metrics["test_mae"] == pytest.approx(metrics["test_loss"], rel=1e-6)
    with pytest.raises(
        ConfigError, match=r"metrics: got \(50, 2\) of the model for labels \(50, 1\)"
    ):
        colonnade.fit(Pairs(), splits(), loss=absolute, metrics={"mae": mean_absolute}, **SETTINGS)


class Pairs(Net):
    def forward(self, batch):
        return super().forward(batch).expand(-1, 2)


class Own:
    monitor = "loss"

    def loss(self, model, batch, mesh): ...

    def evaluate(self, model, source, batch_size, mesh): ...


def test_metrics_that_cannot_be_are_refused():
    for settings, text in (
        ({"metrics": {"auc": brier}}, r"metrics\['auc'\], which the objective has already"),
        ({"metrics": {"b": brier}, "objective": Own()}, "metrics with a Own, wanted an objective"),
    ):
        with pytest.raises(ConfigError, match=text):
            with_metrics(None, **settings)
    for metric, text in (
        (lambda s, t: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda s, t: s, "RuntimeError|ValueError"),
        (lambda s: 1.0, "TypeError"),
    ):
        with pytest.raises(CallbackError, match=rf"metrics\['bad'\]: got ({text})"):
            with_metrics(None, metrics={"bad": metric})


def test_each_task_has_the_metric():
    from colonnade.data import open_tensors
    from colonnade.train.objective import Probability, add_metrics

    ids = torch.arange(40) % 7
    label = torch.stack([(ids > 3).float(), (ids % 2).float()], 1)
    label[::5, 1] = torch.nan
    data = open_tensors({"a": ids}, label=label, label_names=("click", "buy"))

    class Two(nn.Module):
        def forward(self, batch):
            return torch.stack([batch.ids["a"].values.float() - 3] * 2, 1)

    functions = {"count": lambda s, t: len(s), "mean": lambda s, t: t.mean()}
    objective = add_metrics(Probability(), functions)
    metrics = objective.evaluate(Two(), data, 16, colonnade.Mesh())
    assert metrics["count"] == 40 and metrics["count_buy"] == 32
    assert metrics["mean_buy"] == pytest.approx(label[:, 1].nanmean().item())
