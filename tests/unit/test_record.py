"""Metrics of a run: they agree with the trainer's own counters, survives kills, and costs next to nothing."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from rich.console import Console
from small_run import CONFIG

from colonnade import Batch, Mesh
from colonnade.config.run import build_config, override_settings
from colonnade.data.contract import Position
from colonnade.errors import StorageError
from colonnade.machine import collect_machine_facts
from colonnade.report.reading import read_run_folder, sum_metrics_lines
from colonnade.run.run import open_run
from colonnade.store.contract import TierCounts
from colonnade.train.metrics_file import drop_metrics_after_step, read_metrics_lines
from colonnade.train.progress import Progress, _choose_progress_columns
from colonnade.train.record import Counters, Record, TierActivity


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run, and the run object after its training."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run = open_run(
        override_settings(build_config(CONFIG), {"plan.memory.dram": 30_000}), Mesh(), folder
    )
    run.trainer.progress.every = 2
    with pytest.MonkeyPatch.context() as patch:  # lines by steps alone, however fast they are
        patch.setattr("colonnade.train.progress.MIN_SECONDS", 0.0)
        run.train()
    run.close()
    return folder, run


def test_lines_add_up_to_the_counters(finished):
    folder, run = finished
    record, trainer = read_run_folder(folder), run.trainer
    assert record.status == "finished" and record.step == 30
    sources = trainer.collection.store.sources
    sums = sum_metrics_lines(record, "rows")
    assert (
        sums["resident"] == sources.resident and sums["read"] == sources.read + sources.copied > 0
    )
    assert sums["born"] == sources.born
    assert sums["evicted"] == sources.evicted_clean + sources.evicted_dirty > 0
    phases = sum_metrics_lines(record, "phases")
    total = phases.pop("total")
    for name, seconds in phases.items():
        assert seconds == pytest.approx(trainer.phases.seconds[name], rel=1e-9)
    assert sum(phases.values()) <= total
    for line in record.lines_of_kind("train"):
        assert line["lr"] == {"rows": 0.02, "dense": 0.001} and line["samples_per_second"] > 0
    assert record.lines_of_kind("train")[-1]["step"] == 30
    assert [line["epoch"] for line in record.lines_of_kind("evaluate")] == [1, 2, 2]  # test


def test_tiers_add_up_to_the_stores_own_counts(finished):
    folder, run = finished
    record, store = read_run_folder(folder), run.trainer.collection.store
    sources, summary = store.sources, json.loads((folder / "summary.json").read_text())["tiers"]
    lines = record.lines_of_kind("tiers")
    assert len(lines) >= 15 and list(lines[0]["tiers"]) == ["dram", "ssd"]

    def total(tier, name):
        return sum(line["tiers"][tier][name] for line in lines)

    assert total("dram", "hits") == sources.resident == summary["dram"]["hits"]
    assert total("dram", "misses") == sources.read + sources.copied + sources.born
    assert total("ssd", "hits") >= sources.read + sources.copied > 0  # evaluation reads too
    assert 0 < total("ssd", "written_bytes") <= summary["ssd"]["lifetime_bytes"]
    assert total("ssd", "written_bytes") >= total("ssd", "payload_bytes") > 0
    # Rows that wait to be written live in no file yet: collection may have just moved them.
    live = sum(len(backing) * backing.files.shape.stride for backing in run.checkpoints.backings)
    ids = sum(len(backing) * 8 for backing in run.checkpoints.backings)  # in key lists, at most
    assert 0 < live <= summary["ssd"]["live_bytes"] <= live + ids
    assert summary["ssd"]["held_bytes"] > 0
    for line in lines:
        assert 0 <= line["waited"] <= line["seconds"] and "hit_rate" not in line["tiers"]["ssd"]


def test_the_line_of_tiers_is_short():
    dram = TierCounts(hits=931, misses=69)
    ssd = TierCounts(hits=60, misses=9, reads=2400, read_bytes=20_000_000, written_bytes=8_000_000)
    gained = TierActivity(2.0, 0.04, {"dram": dram, "ssd": ssd}, {"dram": 0, "ssd": 10})
    assert gained.format_activity() == "dram 93.1 % | ssd 1.2k reads/s 14 MB/s | wait 2 %"
    assert gained.to_dict()["ssd"]["lifetime_bytes"] == 10
    idle = TierActivity(
        1.0, 0.0, {"dram": TierCounts(), "ssd": TierCounts()}, {"dram": 0, "ssd": 0}
    )
    assert idle.format_activity() == "dram - | ssd 0 reads/s 0.0 MB/s | wait 0 %"


def test_no_words_of_tiers_where_all_rows_are_in_memory(tmp_path):
    out = io.StringIO()
    run = open_run(
        override_settings(build_config(CONFIG), {"train.max_steps": 3}),
        Mesh(),
        None,
        console=Console(file=out),
    )
    assert Counters(run.trainer).collect_tiers() is None
    run.train()
    assert "dram" not in out.getvalue()


def test_traffic_and_tables_are_counted(finished):
    folder, run = finished
    record = read_run_folder(folder)
    batch = next(iter(run.trainer.data.train.batches(100)))
    traffic = record.lines_of_kind("traffic")[0]
    for name in batch.ids:
        assert traffic["lookups"][name] == 100
        assert 1 <= traffic["unique"][name] <= 100
    watched = Counters(run.trainer).collect_traffic(batch)
    assert watched["unique"] == {n: len(set(ids.values.tolist())) for n, ids in batch.ids.items()}
    tables = record.lines_of_kind("tables")[-1]["tables"]
    store = run.trainer.collection.store
    for t, table in enumerate(run.trainer.collection.tables):
        result = tables[table.name]
        assert result["rows_in_memory"] == store.native.num_rows(t)
        assert result["bytes_in_memory"] == result["rows_in_memory"] * table.record_bytes
    assert record.summary["tables"]["C4"]["rows_in_files"] > 0
    facts = json.loads((folder / "machine.json").read_text())
    assert set(facts) == {"format", "version", *collect_machine_facts(folder)}


def test_lines_are_json_for_anyone(finished):
    folder, _ = finished
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_lines_of_steps_that_happen_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [{"step": step, "kind": "train", "loss": 0.5} for step in (10, 20, 30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole) + '{"step": 40, "ki')
    assert read_metrics_lines(path) == whole
    drop_metrics_after_step(path, 20)
    assert read_metrics_lines(path) == whole[:2] and path.read_text().endswith("\n")
    drop_metrics_after_step(tmp_path / "none", 3)
    assert read_metrics_lines(tmp_path / "none") == []


def progress(tmp_path, console, **settings) -> Progress:
    return Progress(total_steps=100, console=console, folder=tmp_path, **settings)


def batch(size: int = 8) -> Batch:
    return Batch(size, dense=torch.zeros(size, 0), ids={}, position=Position())


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    result = progress(tmp_path, Console(file=io.StringIO()), every=1)
    result.start_reporting(0)
    result.report_step(1, float("nan"), batch(), 1)
    result.close({})
    (line,) = read_metrics_lines(tmp_path / "metrics.jsonl")
    assert line["loss"] is None and line["kind"] == "train"


def test_a_file_gets_plain_lines_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.train.progress.PLAIN_SECONDS", 0.0)
    monkeypatch.setattr("colonnade.train.progress.MIN_SECONDS", 0.0)
    text = io.StringIO()
    result = progress(tmp_path, Console(file=text, force_terminal=False), every=10)
    result.start_reporting(0)
    for step in range(1, 101):
        result.report_step(step, 0.5, batch(), 2)
    result.report_evaluation(100, 1, {"test_auc": 0.75, "test_num_samples": 3.0})
    result.close({})
    lines = text.getvalue().splitlines()
    assert len(lines) == 11 and "\x1b" not in text.getvalue()
    assert lines[0].startswith("step 10/100  epoch 1  loss 0.5000  ")
    assert lines[-1] == "epoch 1: test auc 0.7500"


def test_a_resumed_run_reports_the_steps_of_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.train.progress.MIN_SECONDS", 0.0)
    steps = {}
    for first in (0, 35):
        folder = tmp_path / str(first)
        folder.mkdir()
        result = progress(folder, Console(file=io.StringIO()), every=20)
        result.start_reporting(first)
        for step in range(first + 1, 61):
            result.report_step(step, 0.5, batch(), 1)
        result.close({})
        lines = read_metrics_lines(folder / "metrics.jsonl")
        steps[first] = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == {0: [20, 40, 60], 35: [40, 60]}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [({"validation_mrr": 0.25, "validation_hits@1": 0.125, "validation_mean rank": 12.5},
      "validation mrr 0.2500  validation hits@1 0.1250  validation mean rank 12.5000"),
     ({"validation_auc": 0.75, "validation_auc_buy": 0.5, "validation_num_samples_buy": 3.0},
      "validation auc 0.7500  validation auc buy 0.5000"),
     ({"validation_recall@10": 0.25, "validation_ndcg@20": 0.5},
      "validation recall@10 0.2500  validation ndcg@20 0.5000"),
     ({"validation_in_order": 0.75}, "validation in order 0.7500")],
)  # fmt: skip
def test_every_objectives_metrics_are_printed(tmp_path, metrics, shown):
    text = io.StringIO()
    result = progress(tmp_path, Console(file=text, force_terminal=False), every=10)
    result.start_reporting(0)
    result.report_evaluation(100, 1, metrics)
    result.close({})
    assert text.getvalue() == f"epoch 1: {shown}\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_bars_fit_the_terminal(width, tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    result = progress(tmp_path, console, every=1)
    result.start_reporting(0)
    for step in range(1, 50):
        result.report_step(step, 0.25, batch(4096), 1)
    shown = [result._bars.get_renderable()]
    result.close({})
    with console.capture() as capture:
        console.print(*shown)
    lines = capture.get().splitlines()
    assert len(lines) == 1 and len(lines[0]) <= width and len(_choose_progress_columns(width)) >= 3
    result._bars.text = "dram 93.1 % | ssd 1.2k reads/s 14 MB/s | wait 2 %"
    with console.capture() as capture:
        console.print(result._bars.get_renderable())
    lines = capture.get().splitlines()
    assert len(lines) == 2 and len(lines[1]) <= width and lines[1].startswith("dram 93.1 %")


def test_a_step_costs_microseconds(tmp_path):
    """Without the lines, which time limits to one in MIN_SECONDS."""
    result = progress(tmp_path, Console(file=io.StringIO()))
    result.start_reporting(0)
    loss, one = 0.5, batch()
    best = np.inf
    for _ in range(5):
        started = time.perf_counter()
        for step in range(1001, 2000):
            result.report_step(2 * step + 1, loss, one, 1)
        best = min(best, (time.perf_counter() - started) / 999)
    result.close({})
    assert best < 50e-6  # 1 % of a step of 5 ms; measured 2 us


def test_tensorboard_reads_what_was_recorded(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (
        0,
        2,
    ):  # the second call goes on from step 2: what the first said of step 3 is void
        record = Record(tmp_path)
        record.open_files(first)
        for step in range(first + 1, 4):
            record.write_line(step, "train", {"loss": step + first / 10, "lr": {"item": 0.5}})
        record.close(0, {})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(e.step, round(e.value, 3)) for e in board.Scalars("train/loss")]
    assert values == [(1, 1.0), (2, 2.0), (3, 3.2)]
    assert board.Scalars("train/lr/item")[0].value == 0.5


def test_a_full_disk_names_the_file_and_no_thread_speaks(tmp_path, capfd):
    record = Record(tmp_path)
    record.open_files(0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(StorageError, match=r"metrics\.jsonl: could not write"):
            for step in range(1, 100):
                record.write_line(step, "train", {"loss": 0.5})
        with suppress(StorageError):
            record.close(0, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert capfd.readouterr() == ("", "")


def test_tensorboard_is_imported_only_where_there_is_a_folder():
    code = (
        "import sys, io; from rich.console import Console; from colonnade.train.progress import Progress; "
        "p = Progress(total_steps=1, console=Console(file=io.StringIO())); p.start_reporting(0); p.close({}); "
        "assert not any(n.startswith('tensorboard') for n in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
