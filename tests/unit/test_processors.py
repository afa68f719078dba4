"""Processors that a process may use, and that threads which wait do not use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colonnade import Mesh, machine, processors
from colonnade.data.contract import Splits
from colonnade.data.processes import read_in_processes
from colonnade.errors import ConfigError
from colonnade.machine import check_worker_count
from colonnade.processors import (
    count_usable_processors,
    limit_openmp_spinning,
    read_processor_quota,
)
from colonnade.run.run import set_num_threads

FIRST = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
UNLIMITED = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}


def write_group(root: Path, folder: str, files: dict[str, str]) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name).write_text(text)


def test_the_least_quota_of_all_levels_counts(tmp_path):
    write_group(tmp_path, "a", {"cpu.max": "250000 100000\n"})
    write_group(tmp_path, "a/b", {"cpu.max": "50000 100000\n"})
    write_group(tmp_path, "a/b/c", {"cpu.max": "max 100000\n"})
    assert read_processor_quota("0::/a/b/c\n", str(tmp_path)) == 0.5
    assert read_processor_quota("0::/a\n", str(tmp_path)) == 2.5
    assert read_processor_quota("0::/\n", str(tmp_path)) is None
    assert read_processor_quota("", str(tmp_path)) is None


def test_groups_of_version_1_and_a_container_that_sees_its_hosts_path(tmp_path):
    groups = "4:memory:/x\n2:cpu,cpuacct:/docker/abc\n1:cpuset:/\n0::/\n"
    write_group(tmp_path, "cpu", FIRST)
    assert read_processor_quota(groups, str(tmp_path)) == 1.5
    write_group(tmp_path, "cpu", UNLIMITED)
    assert read_processor_quota(groups, str(tmp_path)) is None


@pytest.mark.parametrize(
    ("quota", "wanted"), [(None, 4), (0.25, 1), (1.0, 1), (1.5, 2), (3.0, 3), (64.0, 4)]
)
def test_a_quota_bounds_the_processors_rounded_up(monkeypatch, quota, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(processors, "read_processor_quota", lambda _: quota)
    assert count_usable_processors() == wanted


def test_more_threads_than_a_machine_can_start_are_refused(monkeypatch):
    """OpenMP ends the process when it cannot start one."""
    monkeypatch.setattr(machine, "count_usable_processors", lambda: 4)
    wanted = "got 1,000,000, wanted at most 256 on this machine of 4 usable processors"
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=f"train.threads: {wanted}"):
        set_num_threads(1_000_000, Mesh())
    with pytest.raises(ConfigError, match=f"data.readers: {wanted}"):
        read_in_processes(Splits(object()), 1_000_000)
    assert torch.get_num_threads() == before
    assert check_worker_count("train.threads", 256) == 256
    monkeypatch.setattr(machine, "count_usable_processors", lambda: 96)
    assert check_worker_count("train.threads", 768) == 768


def run(code: str) -> list[str]:
    """Run code in a process without settings of OpenMP; returns its words."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_setting_of_the_user_says_how_threads_wait():
    for name in processors.WAIT_SETTINGS:
        environment = {name: "1"}
        limit_openmp_spinning(environment)
        assert environment == {name: "1"}
    environment = {}
    limit_openmp_spinning(environment)
    assert environment == processors.WAITING


WAITS = """
import os, time
{first}
import torch
torch.set_num_threads(2)
values = torch.zeros(1 << 20)
values.add_(1.0)
spent = 0.0
for _ in range(20):
    values.add_(1.0)
    before = time.process_time()
    time.sleep(0.02)
    spent += time.process_time() - before
print(spent)
"""


@pytest.mark.slow
def test_threads_without_work_soon_sleep_in_processes_that_load_colonnade_first():
    ours, default = (
        float(run(WAITS.format(first=f"import {name}"))[0]) for name in ("colonnade", "time")
    )
    assert ours < 0.1 * default + 0.04, f"{ours} s and by default {default} s of 0.4 s"


def test_the_command_and_what_it_starts_say_how_threads_wait():
    """Ranks and readers are children of the command."""
    code = """
import os, subprocess, sys
import colonnade.cli
assert "torch" not in sys.modules
child = "import os; print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""
    assert run(code) == list(processors.WAITING.values())
