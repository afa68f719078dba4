"""`bench advise_servers`: the right number is the smallest on the plateau; settings are drawn, and can be predicted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import advise_servers as bench
from harness import Measured
from workers import advise_servers as worker


def rows(case: str, advised: float, seconds: tuple[float, ...]) -> list[Measured]:
    steps = [Measured(case, f"{n} servers", bench.UNIT, [s]) for n, s in enumerate(seconds, 1)]
    return [*steps, Measured(case, bench.ADVISED, "servers", [advised])]


def test_the_right_number_is_the_smallest_on_the_plateau():
    assert bench.choose_right_number((3.0, 1.09, 1.0, 1.2)) == 2
    assert bench.choose_right_number((1.0, 1.0, 1.0, 0.8)) == 4


def test_ratios_count_settings_that_are_complete():
    measured = rows("one", 2, (3.0, 1.0, 1.0, 1.0)) + rows("two", 1, (4.0, 3.0, 1.0, 1.0))
    measured += rows("three", 4, (4.0, 3.0, 1.0, 1.0)) + rows("four", 9, (1.0,))
    assert bench.compute_ratios(measured) == {"servers_within_1": 2, "servers_equal": 1}


def test_drawn_settings_are_the_same_and_have_advice():
    setting = bench.draw_setting(1)
    assert setting == bench.draw_setting(1) != bench.draw_setting(2)
    small = replace(setting, fields=2, batch_size=64, dim=16, sleep=0.05)
    advice = worker.predict(small)
    seconds = 64 * 2 * 16 * 4 / (small.gigabits * 1e9 / 8)
    assert advice["link"] == pytest.approx(seconds / 0.05, rel=0.5)
    assert advice["servers"] >= max(1, advice["link"])
