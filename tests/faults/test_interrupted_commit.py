"""A commit that takes long says what for, and a second signal ends the process in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from small_run import CONFIG

from colonnade.checkpoint import commits
from colonnade.checkpoint.commits import slow_words
from colonnade.checkpoint.header import committed_steps
from colonnade.comm.mesh import Mesh
from colonnade.config.run import build_config
from colonnade.run.run import open_run
from colonnade.store.writer import LogWriter

PROGRAM = """
import sys
from pathlib import Path
from colonnade import Mesh
from colonnade.cli import ranks
from colonnade.checkpoint import commits
from colonnade.config import plan as plan_config
from colonnade.config import run as config
from colonnade.run import interrupt
from rich.console import Console
from small_run import CONFIG

plan_config.LEAST_RATE = 1
commits.SLOW_SECONDS, interrupt.REPEAT_SECONDS = 0.3, 0.0
slow = config.override(config.build_config(CONFIG), {"plan.write_budget": 1, "train.max_steps": 3})
ranks.train(slow, Path(sys.argv[1]), 1, Console(width=400))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_a_commit_that_would_take_for_ever(number, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = []
    try:
        for line in child.stdout:
            said.append(line)
            if "waiting for a commit" in line:
                break
        child.send_signal(number)
        time.sleep(0.5)
        assert child.poll() is None  # the first asks for a commit, which is under way
        began = time.monotonic()
        child.send_signal(number)
        rest, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert time.monotonic() - began < 15
    assert "bytes of rows wait in memory to be written, at plan.write_budget of 1 " in said[-1]
    assert "waiting" not in rest  # said once
    assert child.returncode not in (0, -signal.SIGKILL)
    assert committed_steps(tmp_path / "run") == []
    run = open_run(build_config(CONFIG), Mesh(), tmp_path / "run")  # nothing torn, nobody's lock
    assert run.resumed_at is None
    run.close()


def test_what_a_slow_commit_waits_for():
    writer = LogWriter(bytes_per_second=2_000_000)
    assert "0 bytes" in slow_words([writer]) and "budget" not in slow_words([writer])
    source = type("Source", (), {"pending_bytes": 50_000_000, "has_work": False})()
    writer.add(source)
    assert "50,000,000 bytes" in slow_words([writer]) and " 25 s more" in slow_words([writer])
    writer._budget.bytes_per_second = None
    assert "as fast as the disk" in slow_words([writer])
    writer.remove(source)
    assert commits.SLOW_SECONDS == 10
