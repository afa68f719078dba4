"""Ratios of `bench codistill`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import codistill
from harness import Measured


def test_churn_is_compared_at_equal_log_loss():
    values = {
        codistill.ALONE: ([0.05, 0.07], 0.51),
        "weight 1": ([0.054, 0.054], 0.5104),
        "weight 2": ([0.048, 0.048], 0.5114),
        "weight 4": ([0.03, 0.03], 0.52),
        f"weight 2{codistill.MEAN}": ([0.03, 0.03], 0.505),
    }
    measured = [
        Measured("ml-1m", system, unit, numbers)
        for system, (churn, loss) in values.items()
        for unit, numbers in (("churn", churn), ("log loss", [loss]))
    ]
    ratios = codistill.compute_ratios(measured)
    assert ratios["reduced_equal_loss"] == pytest.approx(0.1)
    assert ratios["reduced_loss_0015"] == pytest.approx(0.2)
    assert ratios["reduced_equal_loss_mean"] == pytest.approx(0.5)
    assert "reduced_stream" not in ratios
    worse = codistill.compute_ratios(
        [m for m in measured if m.system in (codistill.ALONE, "weight 4")]
    )
    assert worse["reduced_equal_loss"] == 0


def test_steps_are_counted_to_the_best_loss_of_one_group():
    curves = {
        "one": [(7, 0.6), (14, 0.5), (21, 0.55)],
        "double 1": [(3, 0.7), (12, 0.5)],
        "double 2": [(3, 0.7), (6, 0.51)],
        "two": [(7, 0.49)],
    }
    measured = codistill.summarize_curves(curves)
    ratios = codistill.compute_ratios(measured)
    assert ratios == {"steps_of_one_group": 0.5, "steps_of_double_batch": pytest.approx(12 / 14)}
    assert {m.system: m.values for m in measured if m.unit == "steps"}["double 2"] == [float("inf")]
