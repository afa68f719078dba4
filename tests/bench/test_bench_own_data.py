"""Bench own_data: files of each format hold the same samples, and figures mean what they say."""

import sys
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import own_data as bench

from colonnade.data import open_source

SAMPLES = pa.table(
    {
        "label": pa.array([i % 2 for i in range(40)]),
        "n": pa.array([None if i % 5 == 0 else i for i in range(40)], pa.int64()),
        "user": [f"u{i % 3}" for i in range(40)],
        "genres": [["a|b", "c", None][i % 3] for i in range(40)],
    }
)


@pytest.mark.parametrize("kind", ["csv", "parquet", "libsvm", "tfrecord"])
def test_every_format_is_read(kind, tmp_path):
    path = tmp_path / f"train.{kind}"
    samples = bench.convert_to_categories(SAMPLES) if kind == "libsvm" else SAMPLES
    bench.write_file(samples, path)
    (batch,) = open_source(kind, path).train.batches(40)
    assert batch.label[:, 0].tolist() == SAMPLES["label"].to_pylist()
    if kind == "libsvm":
        assert bench.list_tokens(SAMPLES)[0] == ["n=", "user=u0", "genres=a", "genres=b"]
        assert [row[0] for row in bench.list_tokens(samples)[:3]] == ["n=", "n=2", "n=3"]
        assert batch.ids["features"].offsets.diff().tolist()[:3] == [4, 3, 3]
    (batch,) = open_source(
        "csv", write(tmp_path), schema=bench.declare_schema(SAMPLES)
    ).train.batches(40)
    assert batch.dense.shape == (40, 1)


def write(folder):
    bench.write_file(SAMPLES, folder / "declared.csv")
    return folder / "declared.csv"


def test_the_figure_is_the_upper_end_of_the_interval():
    assert bench.upper_end([0.01]) == 0.01
    assert bench.upper_end([0.0, 0.02]) == pytest.approx(0.01 + 12.706 * 0.01, rel=1e-3)
    assert set(bench.MODELS) == {"lr", "fm", "nfm", "wide_deep", "deepfm", "dlrm", "dcn", "dcnv2"}
