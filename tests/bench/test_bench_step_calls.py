"""`bench step-calls` must count a step's calls, and the same ones every time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import step_calls  # noqa: E402


def test_a_step_of_one_process_is_counted():
    """About: how far ahead the lookahead's thread is differs."""
    first, again = (step_calls.count(Path(sys.executable), "1 process") for _ in range(2))
    assert first.keys() == {"calls/step", "files"}
    assert first["files"] == again["files"] and 10 <= first["files"] <= 40
    assert first["calls/step"] == pytest.approx(again["calls/step"], rel=0.05)


def test_a_world_that_fails_is_named():
    with pytest.raises(step_calls.BenchError, match="1 process: "):
        step_calls.count(Path("/bin/false"), "1 process")
