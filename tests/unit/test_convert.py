"""`colonnade convert`: the columns say what the text says, and nothing is half-written, whatever happens."""

from __future__ import annotations

import csv
import math
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from criteo_files import criteo_lines, write_criteo
from hypothesis import given
from hypothesis import strategies as st
from test_data_contract import same

from colonnade.data import open_source
from colonnade.data.sets.criteo import CATEGORIES, CSV_OPTIONS, DENSE, NAMES, open_criteo
from colonnade.data.tabular import convert as module
from colonnade.data.tabular.convert import open_csv_conversion, write_parquet_file
from colonnade.data.tabular.declaration import SCHEMA_KEY
from colonnade.errors import DataError, StorageError

SYNTAX = {"delimiter": "\t", "quote": None, "names": NAMES}


def open_conversion(folder):
    """Open the conversion of the folder's train.txt."""
    return open_csv_conversion(folder / "train.txt", **SYNTAX)


def test_columns_are_the_fields(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 10_000)
    lines = criteo_lines(300, seed=4)
    (tmp_path / "train.txt").write_text("\n".join(lines))
    write_parquet_file(open_conversion(tmp_path), tmp_path / "out.parquet", rows_per_group=64)
    file = pq.ParquetFile(tmp_path / "out.parquet")
    groups = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
    assert groups == [64, 64, 64, 64, 44]
    result = file.read().to_pydict()
    for i, line in enumerate(lines):
        label, *fields = line.split("\t")
        assert result["label"][i] == int(label)
        for name, field in zip(DENSE, fields[:13], strict=True):
            assert result[name][i] == (int(field) if field else None)
        for name, field in zip(CATEGORIES, fields[13:], strict=True):
            assert result[name][i] == (field or None)


def test_the_file_gives_the_batches_of_the_text(tmp_path):
    write_criteo(tmp_path, 200)
    target = tmp_path / "out.parquet"
    write_parquet_file(open_conversion(tmp_path), target, rows_per_group=70)
    text = open_criteo(tmp_path, test_fraction=0).train
    columns = open_source("parquet", target, schema=CSV_OPTIONS["schema"]).train
    pairs = zip(columns.batches(48), text.batches(48), strict=True)
    assert all(same(a, b) for a, b in pairs)


def test_a_typed_header_is_the_schema_of_the_file(tmp_path):
    (tmp_path / "in.csv").write_text("y:label,user:token\n1,7\n0,8\n")
    write_parquet_file(open_csv_conversion(tmp_path / "in.csv"), tmp_path / "out.parquet")
    assert b"y: {type: label" in pq.read_schema(tmp_path / "out.parquet").metadata[SCHEMA_KEY]


def test_a_footer_whose_schema_is_broken_is_named(tmp_path):
    table = pa.table({"label": [0, 1], "x": [1, 2]})
    pq.write_table(
        table.replace_schema_metadata({SCHEMA_KEY: b"fields: 3"}), tmp_path / "x.parquet"
    )
    with pytest.raises(DataError, match=r"x.parquet: its footer declares .*Give one with schema"):
        open_source("parquet", tmp_path / "x.parquet")
    schema = {"fields": {"label": "label", "x": "category"}}
    assert open_source("parquet", tmp_path / "x.parquet", schema=schema).train.num_samples == 2


FIELDS = st.one_of(
    st.integers(-(2**66), 2**66).map(str),
    st.integers(-50, 50).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.sampled_from(["", "007", "-0", "1e5", ".5", "5.", "+3", " 4", "nan", "true", "1_0", "0x1"]),
    st.text('ab,"\n é', max_size=4),
)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 5]), FIELDS), min_size=1, max_size=12), st.data())
def test_no_value_of_a_csv_file_is_changed(tmp_path_factory, rows, data):
    """Whatever is in a column: its type holds every value as it was."""
    folder = tmp_path_factory.mktemp("csv")
    texts = [field for _, field in rows]
    with (folder / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_MINIMAL)
        writer.writerows([("x", "y"), *((text, i) for i, text in enumerate(texts))])
    write_parquet_file(open_csv_conversion(folder / "in.csv"), folder / "out.parquet")
    table = pq.read_table(folder / "out.parquet")
    kind, result = table.schema.field("x").type, table["x"].to_pylist()
    assert table["y"].to_pylist() == list(range(len(rows)))
    for text, value in zip(texts, result, strict=True):
        if text == "":
            assert value is None
        elif kind == pa.string():
            assert value == text
        elif kind == pa.int64():
            assert str(value) == text.strip() or (value == 0 and text == "-0")
        else:
            assert value == float(text) or math.isnan(float(text))
            assert "." in text or "e" in text.lower() or len(text.strip("+-")) <= 16
            assert not re.match(r"[+-]?0[0-9]", text)


def test_a_type_fits_all_blocks(tmp_path, monkeypatch):
    """Types of the last block count, too, and a schema of kinds is what a person would choose."""
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 64)
    lines = [f"{i},{i},{i},{i:03}" for i in range(50)]
    (tmp_path / "in.csv").write_text("\n".join(["a,b,c,d", *lines, "7,2.5,NA,7"]) + "\n")
    types_ = []
    conversion = open_csv_conversion(tmp_path / "in.csv", on_rows=lambda *rows: types_.append(rows))
    assert [str(field.type) for field in conversion.schema] == [
        "int64",
        "double",
        "string",
        "string",
    ]
    assert len(types_) > 5 and sum(rows for rows, _ in types_) == 51 == types_[0][1]
    declared_conversion = open_csv_conversion(tmp_path / "in.csv", null_values=["NA"])
    assert str(declared_conversion.schema.field("c").type) == "int64"


def test_csv_on_the_command_line(colonnade, tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.parquet"
    source.write_text("1\t'a\tb'\n2\tNA\n")
    options = ["--delimiter", "tab", "--quote", "'", "--names", "x,y", "--null", "NA"]
    status, out, _ = colonnade("convert", "csv", source, target, *options)
    assert status == 0 and "2 rows, 2 columns" in out
    assert pq.read_table(target).to_pylist() == [{"x": 1, "y": "a\tb"}, {"x": 2, "y": None}]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (b"a,b\n1,2\n3\n", [], "in.csv, line 3: got 1 columns"),
        (b"a,a\n1,2\n", [], "two columns named 'a'"),
        (b"a,b\n", [], "got no row after the header"),
        (b"", [], "empty"),
        (b"a,b\n1,\xff\n", [], "line 2, column b: got the bytes ff, wanted UTF-8"),
        (b"a,b\n1,2\n", ["--delimiter", ";;"], "delimiter=';;', wanted one ASCII character"),
        (b"a,b\n1,2\n", ["--names", "x"], "line 1: got 2 columns"),
    ],
)
def test_errors_of_csv_are_one_line_and_leave_nothing(colonnade, tmp_path, text, options, words):
    (tmp_path / "in.csv").write_bytes(text)
    status, _, output = colonnade(
        "convert", "csv", tmp_path / "in.csv", tmp_path / "out.parquet", *options
    )
    assert (
        status == 2 and output.startswith("error: ") and output.count("\n") == 1 and words in output
    ), output
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_the_command_writes_once_and_says_so(colonnade, tmp_path):
    source = write_criteo(tmp_path / "in", 50) / "train.txt"
    target = tmp_path / "out.parquet"
    options = ("--delimiter", "tab", "--quote", "", "--names", ",".join(NAMES))
    command = ("convert", "csv", source, target, *options)
    status, out, _ = colonnade(*command, "--rows-per-group", 20)
    assert status == 0 and "50 rows, 40 columns" in out
    written = target.read_bytes()
    status, _, output = colonnade(*command)
    assert status == 2 and "is there already; give another name, or --force" in output
    assert target.read_bytes() == written
    assert colonnade(*command, "--force")[0] == 0
    assert pq.ParquetFile(target).num_row_groups == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.parquet"]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("nowhere", "out.parquet", "nowhere"),
        ("in/train.txt", "in", "got a directory"),
        ("in/train.txt", "no/out.parquet", "there is no folder"),
        ("in/train.txt", "in/train.txt", "got the text file itself"),
        ("bad.txt", "out.parquet", "bad.txt, line 61: got 41 columns"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    colonnade, tmp_path, monkeypatch, source, target, words
):
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 2000)
    write_criteo(tmp_path / "in", 50)
    lines = criteo_lines(70)
    lines = ["\t".join(NAMES), *lines]
    lines[60] += "\t1"
    (tmp_path / "bad.txt").write_text("\n".join(lines) + "\n")
    before = sorted(tmp_path.rglob("*"))
    status, _, output = colonnade(
        "convert", "csv", tmp_path / source, tmp_path / target, "--force", "--delimiter", "tab"
    )
    assert (
        status == 2 and output.startswith("error: ") and output.count("\n") == 1 and words in output
    ), output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path):
    def tables():
        yield table
        raise KeyboardInterrupt

    write_criteo(tmp_path, 50)
    target = tmp_path / "out.parquet"
    conversion = open_conversion(tmp_path)
    write_parquet_file(conversion, target)
    written, table = target.read_bytes(), pq.read_table(target)
    broken = module.Conversion(conversion.source, conversion.schema, 99, tables(), {})
    with pytest.raises(KeyboardInterrupt):
        write_parquet_file(broken, target, overwrite=True, rows_per_group=10)
    assert target.read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "train.txt"]


def test_a_full_disk_is_said_and_nothing_stays(tmp_path, monkeypatch):
    def full(self, table, rows):
        raise OSError(28, "No space left on device")

    write_criteo(tmp_path, 50)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StorageError, match=r"out.parquet: cannot be written \(No space left"):
        write_parquet_file(open_conversion(tmp_path), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]


def test_memory_holds_a_row_group_not_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 250_000)
    write_criteo(tmp_path, 20_000)
    stored = []
    write_parquet_file(
        open_conversion(tmp_path),
        tmp_path / "out.parquet",
        rows_per_group=1000,
        on_rows=lambda rows: stored.append(pa.total_allocated_bytes()),
    )
    assert len(stored) == 18 and max(stored[10:]) < 2 * max(stored[2:10])


def test_a_stream_that_ends_in_an_error_of_data_names_the_line(tmp_path):
    (tmp_path / "train.txt").write_text("\n".join([*criteo_lines(10), "0\t1"]) + "\n")
    with pytest.raises(DataError, match="line 11: got 2 columns"):
        write_parquet_file(open_conversion(tmp_path), tmp_path / "out.parquet")
