"""Scores of files: every sample in the order of the input, every bit of every score, the output whole or not there."""

from __future__ import annotations

import errno

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from criteo_files import criteo_lines, write_criteo

from colonnade.batch import Batch
from colonnade.cli.record_files import read_records
from colonnade.cli.score_files import ScoreFile, TableWriter, score_names
from colonnade.cli.score_inputs import open_inputs
from colonnade.data import open_source
from colonnade.data.sets.criteo import CSV_OPTIONS
from colonnade.data.tabular.tables import build_portable_options
from colonnade.errors import ConfigError, DataError, StorageError


def batch(size: int, key=None) -> Batch:
    return Batch(size, dense=torch.zeros(size, 0), ids={}, key=key)


def read(path):
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    return pyarrow.csv.read_csv(path, parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter))


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".tsv"])
def test_scores_come_back_to_the_bit(ending, tmp_path):
    path = tmp_path / f"scores{ending}"
    wanted = [torch.rand(size, 2, dtype=torch.float64) ** 40 for size in (5, 1, 700)]
    keys = [[f"a,{i}\t{size}" for i in range(size)] for size in (5, 1, 700)]
    with ScoreFile(path, ("click", "buy")) as file:
        for scores, key in zip(wanted, keys, strict=True):
            file.add(batch(len(scores), key), scores)
        assert not path.exists()  # before it is whole
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    result = read(path)
    assert result.column_names == ["key", "score_click", "score_buy"]
    assert result["key"].to_pylist() == [item for key in keys for item in key]
    for t, name in enumerate(("score_click", "score_buy")):
        assert np.array_equal(result[name].to_numpy(), torch.cat(wanted)[:, t].numpy())


def test_names_and_no_samples(tmp_path):
    assert score_names(("label",)) == ("score",) == score_names(("click",))
    for ending in (".parquet", ".csv"):
        with ScoreFile(tmp_path / f"none{ending}", ("label",)):
            pass
        result = read(tmp_path / f"none{ending}")
        assert result.column_names == ["score"] and len(result) == 0


def test_nothing_is_left_of_scores_that_fail(tmp_path, monkeypatch):
    (tmp_path / "old.csv").write_text("as it was")
    with pytest.raises(RuntimeError), ScoreFile(tmp_path / "old.csv", ("label",)) as file:
        file.add(batch(2), torch.zeros(2, 1))
        raise RuntimeError
    new = tmp_path / "new.csv"
    with pytest.raises(DataError, match="keys with some"), ScoreFile(new, ("label",)) as file:
        file.add(batch(2), torch.zeros(2, 1))
        file.add(batch(2, torch.arange(2)), torch.zeros(2, 1))
    with pytest.raises(ConfigError, match="gives no score"), ScoreFile(new, ("label",)) as file:
        file.add(batch(2), torch.zeros(2, 8))

    def full(self, table):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.parquet.ParquetWriter, "write_table", full)
    new = tmp_path / "new.parquet"
    with pytest.raises(StorageError, match="No space left"), ScoreFile(new, ("label",)) as file:
        file.add(batch(2), torch.zeros(2, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["old.csv"]
    assert (tmp_path / "old.csv").read_text() == "as it was"


def test_outputs_that_cannot_be_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.parquet, \.csv, \.tsv"):
        ScoreFile(tmp_path / "scores.xlsx", ("label",))
    beyond = tmp_path / "no" / "x.csv"
    with pytest.raises(StorageError, match="could not write"), ScoreFile(beyond, ("label",)):
        pass


def test_ids_with_the_separator_of_lists_are_no_text(tmp_path):
    table = pa.table({"items": [["a", "b|c"], []]})
    with pytest.raises(DataError, match=r"got 'b\|c', wanted ids without \|.* Write .parquet"):
        with TableWriter(tmp_path / "best.csv", table[:0]) as file:
            file.write(table)
    assert list(tmp_path.iterdir()) == []
    with TableWriter(tmp_path / "best.parquet", table[:0]) as file:
        file.write(table)
    assert pa.parquet.read_table(tmp_path / "best.parquet").equals(table)


def test_criteo_lines_are_read_whole_with_labels_or_without(tmp_path):
    write_criteo(tmp_path / "data", 300)
    splits = open_source("criteo", tmp_path / "data", test_fraction=0.4)
    wanted = [*splits.train.batches(60), *splits.test.batches(60)]
    options = build_portable_options(CSV_OPTIONS, splits)
    text = "".join(line.split("\t", 1)[1] + "\n" for line in criteo_lines(300))
    (tmp_path / "bare.txt").write_text(text)
    (tmp_path / "cut.txt").write_text(text.removesuffix("\n"))
    for path in ("data/train.txt", "bare.txt", "cut.txt"):
        source = open_inputs("csv", tmp_path / path, options)
        assert source.num_samples == 300 and source.schema.dense == splits.train.schema.dense
        for result, value in zip(source.batches(60), wanted, strict=True):
            assert result.label is None
            assert torch.equal(result.dense, value.dense)
            assert all(torch.equal(result.ids[n].values, value.ids[n].values) for n in value.ids)
    lines = text.splitlines()
    lines[123] = lines[123].replace("\t", " ", 1)
    (tmp_path / "broken.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 124"):
        list(open_inputs("csv", tmp_path / "broken.txt", options).batches(50))
    (whole,) = open_inputs("criteo", tmp_path / "data", {}).batches(300)
    assert torch.equal(whole.ids["C1"].values[:60], wanted[0].ids["C1"].values)


def test_inputs_that_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown part 'tests'"):
        open_inputs("synthetic", None, {}, part="tests")
    with pytest.raises(ConfigError, match="no validation part"):
        open_inputs("synthetic", None, {"num_train": 1000}, part="validation")
    with pytest.raises(ConfigError, match="unknown source 'netflix'"):
        open_inputs("netflix", None, {})
    with pytest.raises(ConfigError, match="no files of samples by themselves"):
        open_inputs("synthetic", None, {})
    with pytest.raises(ConfigError, match="got no schema"):
        open_inputs("parquet", tmp_path, {})


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_a_time_that_python_cannot_hold_is_named(tmp_path, unit):
    path = tmp_path / "items.parquet"
    times = pa.array([0, 2**50], pa.timestamp(unit))
    pyarrow.parquet.write_table(pa.table({"item": [1, 2], "at": times}), path)
    with pytest.raises(DataError, match=r"items.parquet, column at: got a time out of range"):
        list(read_records(path))
