"""`colonnade convert`: the columns say what the text says, and nothing is half-written, whatever happens."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from criteo_files import criteo_lines, write_criteo

from colonnade.cli import main
from colonnade.data import convert as module
from colonnade.data.convert import open_criteo_conversion, write_parquet
from colonnade.data.criteo import CATEGORIES, DENSE, MISSING_ID, open_criteo
from colonnade.errors import DataError, StorageError


@pytest.fixture
def colonnade(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["colonnade", "convert", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_columns_are_the_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_LINES", 70)
    lines = criteo_lines(300, seed=4)
    (tmp_path / "train.txt").write_text("\n".join(lines))
    write_parquet(open_criteo_conversion(tmp_path), tmp_path / "out.parquet", rows_per_group=64)
    file = pq.ParquetFile(tmp_path / "out.parquet")
    groups = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
    assert groups == [64, 64, 64, 64, 44]
    found = file.read().to_pydict()
    for i, line in enumerate(lines):
        label, *fields = line.split("\t")
        assert found["label"][i] == int(label)
        for name, field in zip(DENSE, fields[:13], strict=True):
            assert found[name][i] == (int(field) if field else None)
        for name, field in zip(CATEGORIES, fields[13:], strict=True):
            assert found[name][i] == (int(field, 16) if field else MISSING_ID)
    assert b"I1: {type: number" in file.schema_arrow.metadata[module.SCHEMA_KEY]


def test_the_ids_are_those_of_the_reader(tmp_path):
    write_criteo(tmp_path, 200)
    write_parquet(open_criteo_conversion(tmp_path), tmp_path / "out.parquet")
    (batch,) = open_criteo(tmp_path, test_fraction=0).train.batches(200)
    table = pq.read_table(tmp_path / "out.parquet")
    for name in CATEGORIES:
        assert torch.equal(torch.tensor(table[name].to_numpy()), batch.ids[name].values)


def test_the_command_writes_once_and_says_so(colonnade, tmp_path):
    folder, target = write_criteo(tmp_path / "in", 50), tmp_path / "out.parquet"
    status, out, _ = colonnade("criteo", folder, target, "--rows-per-group", 20)
    assert status == 0 and "50 rows, 40 columns" in out
    written = target.read_bytes()
    status, _, said = colonnade("criteo", folder, target)
    assert status == 2 and "is there already; give another name, or --force" in said
    assert target.read_bytes() == written
    assert colonnade("criteo", folder, target, "--force")[0] == 0
    assert pq.ParquetFile(target).num_row_groups == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.parquet"]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("nowhere", "out.parquet", "nowhere"),
        ("in", "in", "got a directory"),
        ("in", "no/out.parquet", "there is no folder"),
        ("in/train.txt", "in/train.txt", "got the text file itself"),
        ("bad.txt", "out.parquet", "bad.txt, line 61, column I2: got 'x', wanted an integer"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    colonnade, tmp_path, monkeypatch, source, target, words
):
    monkeypatch.setattr(module, "CHUNK_LINES", 20)
    write_criteo(tmp_path / "in", 50)
    lines = criteo_lines(70)
    lines[60] = "\t".join(["0", "1", "x", *lines[60].split("\t")[3:]])
    (tmp_path / "bad.txt").write_text("\n".join(lines) + "\n")
    before = sorted(tmp_path.rglob("*"))
    status, _, said = colonnade("criteo", tmp_path / source, tmp_path / target, "--force")
    assert status == 2 and said.startswith("error: ") and said.count("\n") == 1 and words in said, (
        said
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path):
    def tables():
        yield table
        raise KeyboardInterrupt

    write_criteo(tmp_path, 50)
    target = tmp_path / "out.parquet"
    conversion = open_criteo_conversion(tmp_path)
    write_parquet(conversion, target)
    written, table = target.read_bytes(), pq.read_table(target)
    broken = module.Conversion(conversion.source, conversion.schema, 99, tables(), {})
    with pytest.raises(KeyboardInterrupt):
        write_parquet(broken, target, overwrite=True, rows_per_group=10)
    assert target.read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "train.txt"]


def test_a_full_disk_is_said_and_nothing_stays(tmp_path, monkeypatch):
    def full(self, table, rows):
        raise OSError(28, "No space left on device")

    write_criteo(tmp_path, 50)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StorageError, match=r"out.parquet: cannot be written \(No space left"):
        write_parquet(open_criteo_conversion(tmp_path), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]


def test_memory_holds_a_row_group_not_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_LINES", 1000)
    write_criteo(tmp_path, 20_000)
    held = []
    write_parquet(
        open_criteo_conversion(tmp_path),
        tmp_path / "out.parquet",
        rows_per_group=1000,
        on_rows=lambda rows: held.append(pa.total_allocated_bytes()),
    )
    assert len(held) == 20 and max(held[10:]) < 2 * max(held[2:10])


def test_a_stream_that_ends_in_an_error_of_data_names_the_line(tmp_path):
    (tmp_path / "train.txt").write_text("\n".join([*criteo_lines(10), "0\t1"]) + "\n")
    with pytest.raises(DataError, match="line 11: got 2 columns"):
        write_parquet(open_criteo_conversion(tmp_path), tmp_path / "out.parquet")
