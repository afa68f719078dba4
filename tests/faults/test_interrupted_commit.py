"""A checkpoint that takes long says what for, and a second signal ends the process in bounded time."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from ranks import start_child
from rich.console import Console
from small_run import CONFIG

from colonnade.checkpoint import checkpoints
from colonnade.checkpoint.checkpoints import describe_slow_checkpoint
from colonnade.checkpoint.header import list_checkpoints
from colonnade.cli import ranks
from colonnade.comm.mesh import Mesh
from colonnade.config import plan as plan_config
from colonnade.config.run import build_config, override_settings
from colonnade.run.run import open_run
from colonnade.store.log.writer import LogWriter
from colonnade.train import interrupt


def train_slowly(folder):
    """Train with a checkpoint that would take for ever; do what the command does, in a process that was forked for
    it."""
    sys.stdout.reconfigure(line_buffering=True)
    plan_config.LEAST_RATE = 1
    checkpoints.SLOW_SECONDS, interrupt.REPEAT_SECONDS = 0.3, 0.0
    slow = override_settings(build_config(CONFIG), {"plan.write_budget": 1, "train.max_steps": 3})
    ranks.train(slow, Path(folder), 1, Console(width=400))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_a_checkpoint_that_would_take_for_ever(number, tmp_path):
    child = start_child(tmp_path / "output", os.environ, train_slowly, str(tmp_path / "run"))
    try:
        while "waiting for a checkpoint" not in child.read_output():
            assert child.code is None, child.read_output()
            time.sleep(0.05)
        child.send(number)
        time.sleep(0.5)
        assert child.code is None  # the first asks for a checkpoint, which is under way
        began = time.monotonic()
        child.send(number)
        child.wait(30)
        code = child.code
    finally:
        child.kill()
    assert time.monotonic() - began < 15
    assert (
        "bytes of rows wait in memory to be written, at plan.write_budget of 1 "
        in child.read_output()
    )
    assert child.read_output().count("waiting for a checkpoint") == 1
    assert code not in (None, 0, -signal.SIGKILL)
    assert list_checkpoints(tmp_path / "run") == []
    run = open_run(build_config(CONFIG), Mesh(), tmp_path / "run")  # nothing torn, nobody's lock
    assert run.resumed_at is None
    run.close()


def test_what_a_slow_checkpoint_waits_for():
    writer = LogWriter(bytes_per_second=2_000_000)
    text = describe_slow_checkpoint([writer])
    assert "0 bytes" in text and "budget" not in text
    source = type("Source", (), {"pending_bytes": 50_000_000, "has_work": False})()
    writer.add_source(source)
    text = describe_slow_checkpoint([writer])
    assert "50,000,000 bytes" in text and " 25 s more" in text
    writer._budget.bytes_per_second = None
    assert "as fast as the disk" in describe_slow_checkpoint([writer])
    writer.remove_source(source)
    assert checkpoints.SLOW_SECONDS == 10
