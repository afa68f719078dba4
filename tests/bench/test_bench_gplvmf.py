"""Bench gplvmf: drawn ratings have the noise that they say, and ratios mean what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import gplvmf as bench
from harness import Measured

from colonnade.data import open_csv


def test_ratios():
    def rows(suite, system, unit, *values):
        return [Measured(f"{suite} {i}", system, unit, [value]) for i, value in enumerate(values)]

    measured = [
        *rows("food", "GPLVMF", "rmse", 0.9, 0.94),
        *rows("food", "GPLVMF", "mae", 0.7),
        *rows("folds", "GPLVMF", "rmse", 0.9, 0.92, 5.0),
        *rows("folds", "GPFM", "rmse", 1.0, 0.82),
        *rows("truth", "GPLVMF", "rmse", 0.4, 0.5),
        *rows("truth", "FM", "rmse", 0.6, 0.7),
    ]
    relevances = (0.5, 0.2), (0.3, 0.4), (0.1, 0.01)
    for unit, values in zip(bench.RELEVANCES, relevances, strict=True):
        measured += rows("truth", "GPLVMF", unit, *values)
    assert bench.compute_ratios(measured) == pytest.approx(
        {
            "rmse_food": 0.92,
            "mae_food": 0.7,
            "rmse_vs_gpfm": 1.0,
            "noise_gap_of_fm": 0.15 / 0.35,
            "relevance_ratio": 3.0,
        }
    )


def test_drawn_ratings_have_noise_of_the_deviation_it_says(tmp_path):
    rows = np.array(bench.draw_ratings(3))
    assert len(rows) == 7200 and set(rows[:, 3]) == {0, 1, 2, 3}
    bench.NOISE, noise = 0.0, bench.NOISE
    try:
        exact = np.array(bench.draw_ratings(3))
    finally:
        bench.NOISE = noise
    assert np.array_equal(rows[:, :5], exact[:, :5])
    assert np.std(rows[:, 5] - exact[:, 5]) == pytest.approx(noise, rel=0.05)
    columns = ("user", "item", "place", "shuffled", "hour", "rating")
    train, test = rows[:90].tolist(), rows[90:99].tolist()
    bench.write_files(tmp_path, columns, train, test, ["hour"])
    data = open_csv(
        tmp_path / "train.csv",
        schema=tmp_path / "schema.yaml",
        test=tmp_path / "test.csv",
        group_by="user",
    )
    assert data.train.schema.dense[0] == "hour" and data.test.num_samples == 9


def test_arms_of_food_and_folds_need_their_data(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "FOOD", tmp_path)
    with pytest.raises(bench.BenchError, match="COLONNADE_DATA"):
        bench.measure_arm(tmp_path, "food", 0, "GPLVMF", True)
    assert len(bench.list_arms(False)) == 5 + 15 + 10 and len(bench.list_arms(True)) == 5
