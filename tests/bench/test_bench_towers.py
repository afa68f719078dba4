"""`bench towers` must say whose predictions were off, and by how much."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

from harness import Measured, read_measured  # noqa: E402
from tables.towers import ratios_of  # noqa: E402

SYSTEMS = {
    "pooled table-wise": (100.0, 133.0),
    "towers table-wise": (200.0, 180.0),
    "towers CR 2 lossy": (50.0, 40.0),
}


def test_predictions_are_judged_by_what_they_are_of() -> None:
    measured = [Measured("2x2 uplink", name, "MB/step", [1.0]) for name in SYSTEMS]
    for name, (took, text) in SYSTEMS.items():
        measured += [Measured("2x2", name, "ms/step", [took])]
        measured += [Measured("2x2 predicted", name, "ms/step", [text])]
    ratios = ratios_of(measured)
    worst = {
        what: ratios[f"predicted_time_error_of_{what}"] for what in ("flat", "towers", "modules")
    }
    assert worst == pytest.approx({"flat": 0.33, "towers": 0.1, "modules": 0.2})
    assert ratios["predicted_time_error"] == pytest.approx(0.33)
    assert ratios["towers_cr2_vs_best_flat"] == pytest.approx(2.0)


def test_what_was_recorded_is_what_its_raw_values_say() -> None:
    file = BENCH / "results" / "towers.json"
    reported = json.loads(file.read_text(encoding="utf-8"))["ratios"]
    assert ratios_of(read_measured(file, "towers")) == pytest.approx(reported, rel=1e-6)
