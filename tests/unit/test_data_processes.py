"""Reader processes: the batches of the source itself, in its order, whatever happens to the processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from criteo_files import criteo_lines
from hypothesis import given
from hypothesis import strategies as st
from noted_batches import Noted, read_and_sleep, wait_for_a_stopped_reader
from ranks import preloaded_context, start_child
from test_data_contract import open_columns, same

from colonnade import Mesh
from colonnade.batch import Batch, Ids
from colonnade.config.run import build_config, override_settings
from colonnade.data import Position, open_source, processes
from colonnade.data.processes import ProcessSource, pack_batches, unpack_batches
from colonnade.data.sets.criteo import open_criteo
from colonnade.errors import ConfigError, DataError, ReaderLost
from colonnade.run.run import open_run


@given(st.lists(st.integers(0, 5), max_size=4), st.booleans())
def test_a_block_gives_back_what_was_packed(sizes, shared):
    def bag(size):
        offsets = torch.arange(size + 1) * 2
        return Ids(torch.arange(2 * size), offsets, torch.rand(2 * size, dtype=torch.float64))

    batches = [
        Batch(
            size,
            torch.rand(size, 3),
            {"one": Ids(torch.arange(size)), "bag": bag(size)},
            label=torch.rand(size, 2) if size % 2 else None,
            key=torch.rand(size, dtype=torch.float64) if size % 2 else None,
        )
        for size in sizes
    ]
    block = pack_batches(batches, shared=shared)
    assert all(same(a, b) for a, b in zip(unpack_batches(block), batches, strict=True))
    starts = [
        t.data_ptr() % 8 for b in unpack_batches(block) for t in (b.dense, b.ids["one"].values)
    ]
    assert not any(starts)


def test_processes_read_what_the_source_reads(monkeypatch, forked):
    """Runs of 2 steps on 2 processes; an epoch that ends inside a run; bags, weights, groups."""
    monkeypatch.setattr(processes, "RUN_SAMPLES", 7)
    source = open_columns()
    wanted = list(source.batches(7, rank=1, num_ranks=2, start=Position(3, 1)))
    result = ProcessSource(source, 2).batches(7, rank=1, num_ranks=2, start=Position(3, 1))
    assert all(same(a, b) for a, b in zip(result, wanted, strict=True))


def test_an_epoch_of_nothing_and_bad_arguments(forked):
    source = ProcessSource(open_source("synthetic", num_train=20, max_cardinality=9).train, 1)
    assert source.num_samples == 20 and len(source.schema.categorical) == 26
    assert list(source.batches(10, start=Position(0, 2))) == []  # an end at once
    with pytest.raises(ConfigError, match="batch_size=0"):
        source.batches(0)
    with pytest.raises(ConfigError, match="num_processes=0"):
        ProcessSource(source.source, 0).batches(4)


def test_an_error_is_raised_here_when_its_batch_has_its_turn(tmp_path, monkeypatch, forked):
    monkeypatch.setattr(processes, "RUN_SAMPLES", 64)
    lines = criteo_lines(200)
    lines[150] = lines[150] + "\tmore"
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    source = open_criteo(tmp_path, test_fraction=0).train

    def read(of) -> tuple[list[Batch], str]:
        batches = []
        with pytest.raises(DataError) as caught:
            for batch in of.batches(16):
                batches.append(batch)
        assert type(caught.value) is DataError
        return batches, str(caught.value)

    (result, text), (wanted, words) = read(ProcessSource(source, 2)), read(source)
    assert text == words and "line 151" in text
    assert all(same(a, b) for a, b in zip(result, wanted, strict=True))


class Peculiar(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_errors_travel_as_they_are_or_are_quoted():
    plain = processes._make_error_picklable(DataError("file, line 3"))
    assert type(plain) is DataError and str(plain) == "file, line 3"
    quoted = processes._make_error_picklable(Peculiar(1, 2))
    assert type(quoted) is RuntimeError and str(quoted) == "Peculiar: 1 and 2"


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def forked(monkeypatch):
    """Have readers forked with torch imported: for tests of what they read, not of how they start."""
    preloaded_context()
    monkeypatch.setattr(processes, "START_METHOD", "forkserver")


@pytest.fixture
def readers_of():
    """Find the processes that a test has started: ranks of earlier tests may stand by."""
    before = multiprocessing.active_children()
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


def test_readers_are_ahead_by_a_bound_outlive_ctrl_c_and_are_missed_when_killed(
    tmp_path, monkeypatch, readers_of
):
    monkeypatch.setattr(processes, "RUN_SAMPLES", 3)
    batches = ProcessSource(Noted(tmp_path), 2).batches(1)
    assert float(next(batches).dense) == 0
    limit = (
        3 * 2 * (processes.RUNS_AHEAD + 1)
    )  # a run in the queue's hands may have been asked for again
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 3 * 2 * processes.RUNS_AHEAD)
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) <= limit

    readers = readers_of()
    assert len(readers) == 2
    for reader in readers:
        os.kill(reader.pid, signal.SIGINT)
    assert [float(next(batches).dense) for _ in range(40)] == list(range(1, 41))

    os.kill(readers[0].pid, signal.SIGKILL)
    with pytest.raises(ReaderLost, match=str(readers[0].pid)):
        list(batches)


def test_a_run_with_readers_is_the_run_without(tmp_path, forked):
    values = {
        "data": {"options": {"num_train": 600, "num_test": 100, "cardinalities": [50, 9]}},
        "model": {"dim": 4, "bottom": [4], "top": [4]},
        "train": {"batch_size": 100, "threads": 1, "max_steps": 3},
    }
    results = []
    for readers, steps in ((0, [None]), (1, [3, None])):
        for limit in steps:
            folder = tmp_path / str(readers)
            changes = {"data.readers": readers, "train.max_steps": limit}
            run = open_run(override_settings(build_config(values), changes), Mesh(), folder)
            metrics = run.train().metrics
            run.close()
        weights = {name: v.tolist() for name, v in run.trainer.model.named_parameters()}
        results.append((metrics, weights))
    assert results[0] == results[1]


def test_a_reader_that_is_stopped_is_named_once(tmp_path, monkeypatch, capfd, readers_of, forked):
    monkeypatch.setattr(processes, "RUN_SAMPLES", 1)
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.2)
    monkeypatch.setattr(processes, "CHECK_SECONDS", 0.05)
    batches = ProcessSource(Noted(tmp_path), 1).batches(1)
    next(batches)
    (reader,) = readers_of()
    os.kill(reader.pid, signal.SIGSTOP)
    threading.Timer(0.6, os.kill, (reader.pid, signal.SIGCONT)).start()
    assert [float(next(batches).dense) for _ in range(40)] == list(range(1, 41))
    batches.close()
    output = capfd.readouterr().err
    assert (
        output.count("reader process that is stopped")
        == output.count(f"kill -CONT {reader.pid}")
        == 1
    )


LEAVE = """
import sys
from pathlib import Path
from noted_batches import wait_for_a_stopped_reader
if __name__ == "__main__":
    wait_for_a_stopped_reader(Path(sys.argv[1]), "leave")
"""


def test_closing_ends_a_reader_that_is_stopped(tmp_path):
    """Close a lookahead whose thread waits for the reader, after a Ctrl-C."""
    notes, output = tmp_path / "notes", tmp_path / "output"
    notes.mkdir()
    child = start_child(output, os.environ, wait_for_a_stopped_reader, notes, "close")
    try:
        assert child.wait(60) == 0, child.read_output()
    finally:
        child.kill()
    assert child.read_output().split() == ["False", "False"]


@pytest.mark.slow
def test_a_reader_that_is_stopped_keeps_nobody_from_ending(tmp_path):
    """End a new interpreter whose lookahead nobody closes."""
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    notes.mkdir()
    script.write_text(LEAVE)
    places = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run(
        [sys.executable, str(script), str(notes)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_readers_end_with_a_killed_parent_also_one_that_is_stopped(tmp_path):
    notes, output = tmp_path / "notes", tmp_path / "output"
    notes.mkdir()
    parent = start_child(output, os.environ, read_and_sleep, notes)
    wait_until(lambda: parent.read_output().endswith("\n") or parent.code is not None)
    assert parent.code is None, parent.read_output()
    readers = [int(pid) for pid in parent.read_output().split()]
    try:
        assert len(readers) == 2
        parent.kill()
        assert parent.wait(30) == -signal.SIGKILL
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in readers), 30)
    finally:
        parent.kill()
        for pid in readers:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
