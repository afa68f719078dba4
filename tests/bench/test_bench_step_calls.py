"""`bench step-calls` must count the calls of a step, and say which world failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import step_calls  # noqa: E402


def test_a_step_of_one_process_is_counted():
    counts = step_calls.count(Path(sys.executable), "1 process")
    assert counts.keys() == {"calls/step", "files"}
    assert 10 <= counts["files"] <= 40 and counts["calls/step"] > counts["files"]


def test_a_world_that_fails_is_named():
    with pytest.raises(step_calls.BenchError, match=r"1 ranks of workers\.step_calls"):
        step_calls.count(Path("/bin/false"), "1 process")
