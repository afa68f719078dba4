"""A link is cut while a run trains: its ranks give up, torchrun starts them again, and it ends in the same bits."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hosts_here import PATHS, ROOT, need_hosts, open_hosts, torchrun
from small_run import digest

from colonnade.checkpoint.header import list_checkpoints

SCRIPT = ROOT / "tests" / "faults" / "small_run.py"
SETTINGS = {"plan.staleness_steps": 1, "plan.memory.dram": 90_000, "train.epochs": 2}
SLOW_GIGABITS = 0.004
"""A step then takes long enough to be cut."""
LIMIT_SECONDS = 5
"""Seconds that a rank is waited for."""


def run(folder: Path, *, cut_after: int | None) -> str:
    """Two hosts of one rank train; after that checkpoint the second host's link goes down, until both ranks have
    noticed.
    What all said."""
    logs = folder.parent / f"{folder.name}-logs"
    logs.mkdir()
    with open_hosts(2, gigabits=SLOW_GIGABITS) as hosts:
        script = [str(SCRIPT), str(folder), json.dumps(SETTINGS)]
        env = {**PATHS, "LIMIT": str(LIMIT_SECONDS)}
        job = torchrun(hosts, 1, script, folder=logs, env=env, max_restarts=3)
        if cut_after is not None:
            wait_for(lambda: list_checkpoints(folder)[-1:] >= [cut_after], job)
            hosts.cut(1)
            wait_for(lambda: all("lost" in log.read_text() for log in job.logs), job)
            hosts.mend(1)
        assert job.wait(150) == [0, 0], job.tail()
    return "\n".join(log.read_text() for log in job.logs)


def wait_for(condition, job) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, job.tail()
        assert all(agent.poll() is None for agent in job.agents), job.tail()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_link_is_cut(tmp_path):
    need_hosts()
    run(tmp_path / "whole", cut_after=None)
    output = run(tmp_path / "cut", cut_after=8)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    again = [int(step) for step in re.findall(r"^started at (\d+)$", output, re.MULTILINE)]
    assert len(again) >= 2 and min(again) >= 8, "both ranks go on from a checkpoint"
