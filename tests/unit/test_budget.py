"""The budget of a test (`tests/budget.py`) is enforced, and counts processes that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from budget import processor_seconds

TESTS = Path(__file__).resolve().parents[1]
BURN = "import time\nwhile time.process_time() < 0.5: pass\n"
CONFTEST = """
import budget
budget.MOST_SECONDS = 0.3
from budget import pytest_runtest_makereport, pytest_runtest_protocol
"""
CASES = f"""
import subprocess, sys, time, pytest

def burn():
    subprocess.run([sys.executable, "-S", "-c", {BURN!r}], check=True)

@pytest.fixture
def expensive():
    burn()

def test_short(): pass
def test_asleep(): time.sleep(0.5)
def test_child(): burn()
def test_fixture(expensive): pass
@pytest.mark.slow
def test_slow(): burn()
"""


def test_a_test_that_uses_more_than_its_budget_fails(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    words = ["-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    run = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stdout
    lines = [line for line in run.stdout.splitlines() if line.startswith("ERROR ")]
    failed = {line.partition("::")[2].split()[0] for line in lines}
    assert failed == {"test_child", "test_fixture"}, run.stdout
    assert "s of processor time" in run.stdout and "wanted at most 0.3 s" in run.stdout


def test_what_a_running_process_uses_is_counted():
    before = processor_seconds()
    with subprocess.Popen([sys.executable, "-S", "-c", BURN + "print(flush=True)\ninput()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        running = processor_seconds() - before
        child.communicate(b"\n")
    ended = processor_seconds() - before
    assert 0.45 < running <= ended + 0.02
