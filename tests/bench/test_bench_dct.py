"""Ratios of `bench dct`, and of `bench advise_batch`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import advise_batch
import dct
from harness import Measured


def test_ratios_of_quality_bytes_and_seconds():
    aucs = {"exact": [0.8, 0.7], "int8": [0.8, 0.69], "thresholded": [0.79, 0.7, 0.1]}
    seconds = {"exact": [2.0], "int8": [1.3], "thresholded": [1.0]}
    sent = {"exact": [100.0], "int8": [25.0], "thresholded": [0.0]}
    case = dct.name_case(50)
    measured = [Measured("ml-1m", codec, "AUC", values) for codec, values in aucs.items()]
    measured += [Measured(case, codec, "s", values) for codec, values in seconds.items()]
    measured += [Measured(case, codec, "bytes", values) for codec, values in sent.items()]
    ratios = dct.compute_ratios([*measured, *dct.count_bytes()])
    assert ratios["auc_lost_99_ml1m"] == pytest.approx(0.005)
    assert ratios["auc_lost_99_ml1m_int8"] == pytest.approx(0.005)
    assert (ratios["vs_int8"], ratios["vs_exact"]) == (1.3, 2.0)
    assert ratios["vs_int8_bound"] == pytest.approx(0.625 / 0.5)
    assert ratios["bytes_saved_99"] > 90 and ratios["bytes_saved_5000_steps"] > 40
    assert "vs_int8_80" not in ratios and "auc_lost_99_stream" not in ratios


def test_the_loss_of_the_advised_batch_is_compared_with_the_lowest():
    losses = {"512": [0.52], "1024": [0.51], advise_batch.ADVISED: [0.515]}
    measured = [Measured("ml-1m", name, "log loss", values) for name, values in losses.items()]
    ratios = advise_batch.compute_ratios(measured)
    assert ratios == {"loss_at_advised_batch": pytest.approx(0.005)}
