"""`bench advise`: efficiencies are compared, not seconds; and a prediction covers all numbers of hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import advise
from harness import Measured
from workers import advise as worker


def test_ratios_compare_efficiencies_and_the_fastest_hosts():
    """Predictions that are half as slow everywhere have the same efficiency. At the other link four hosts are predicted
    to be the fastest, and are the slowest."""
    seconds = {
        "10 Gbit/s": ({1: 4.0, 2: 2.0, 4: 1.0}, {1: 8.0, 2: 4.0, 4: 2.0}),
        "1 Gbit/s": ({1: 4.0, 2: 4.0, 4: 2.0}, {1: 4.0, 2: 4.0, 4: 5.0}),
    }
    measured = [
        Measured(f"{link}, {hosts} hosts", system, advise.UNIT, [value])
        for link, pair in seconds.items()
        for system, by_hosts in zip(("predicted", "measured"), pair, strict=True)
        for hosts, value in by_hosts.items()
    ]
    ratios = advise.compute_ratios(measured)
    assert ratios["efficiency_error_worst"] == pytest.approx(0.5 - 0.2)
    assert ratios["efficiency_error_median"] == 0
    assert ratios["fastest_right"] == 0.5


def test_a_sleeping_model_is_predicted_on_all_hosts(monkeypatch):
    monkeypatch.setattr(worker, "BATCH_SIZE", 128)
    predicted = worker.predict(10.0)
    assert list(predicted) == list(advise.HOSTS)
    assert predicted[1] > worker.STEP_SLEEP + 128 * worker.SAMPLE_SLEEP
    assert predicted[2] > worker.STEP_SLEEP + 64 * worker.SAMPLE_SLEEP
