"""The reading bench reads what it says: files of Criteo's shape, the same samples in both."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import readers
from harness import Measured
from test_data_contract import same

from colonnade.data import open_source
from colonnade.data.criteo import CATEGORIES, DENSE, MISSING_ID
from colonnade.data.synthetic import open_synthetic


def test_files_hold_the_generators_samples(tmp_path):
    readers.write_files(tmp_path, 1000)
    text = open_source("criteo", tmp_path / "train.txt", test_fraction=0.0).train
    columns = open_source("parquet", tmp_path / "train.parquet").train
    (read,), (again,) = text.batches(1000), columns.batches(1000)
    assert same(read, again)
    (made,) = open_synthetic(num_train=1000, num_test=0, max_cardinality=1_000_000).train.batches(
        1000
    )
    assert read.label.tolist() == made.label.tolist()
    for i, name in enumerate(CATEGORIES):
        for row, (found, wanted) in enumerate(
            zip(read.ids[name].values.tolist(), made.ids[name].values.tolist(), strict=True)
        ):
            is_missing = (row + i) % readers.MISSING == 0
            assert found == (MISSING_ID if is_missing else wanted * 0x9E3779B1 % 2**32)
    assert (read.dense[:, 0] == 0).float().mean() > 1 / readers.MISSING - 0.01
    assert read.dense.shape == (1000, len(DENSE)) and read.dense.max() > 5
    size = (tmp_path / "train.txt").stat().st_size / 1000
    assert 200 < size < 300  # bytes of a line; the real ones have 242


def test_ratios_are_of_medians():
    measured = [
        Measured("training", "training", "samples/s", [10.0, 20, 90]),
        Measured("reading", "criteo", "samples/s", [1.0, 30, 40]),
        Measured("reading", "parquet", "samples/s", [80.0, 80, 80]),
    ]
    assert readers.ratios_of(measured) == pytest.approx(
        {"reader_vs_train_criteo": 1.5, "reader_vs_train_parquet": 4}
    )
