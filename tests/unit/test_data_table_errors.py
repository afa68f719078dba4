"""Errors for CSV and Parquet files and options at fault: one line with file, row and column, never a traceback."""

from __future__ import annotations

import gzip
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table_files import DECLARATION, samples, write_csv, write_parquet

from colonnade.data import open_source
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Category,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Weight,
)
from colonnade.errors import ColonnadeError, ConfigError, DataError

NUMBER = [Number("a", missing=0.0, std=1.0)]
COUNT = [Category("a", dtype="integer")]
TEXT = [Category("a")]


def fault(kind, path, schema, **options) -> str:
    """The message that opening and reading everything ends in: one line."""
    with pytest.raises(ColonnadeError) as caught:
        splits = open_source(kind, path, schema=schema, **options)
        for part in (splits.train, splits.validation, splits.test):
            if part is not None:
                list(part.batches(7))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900, text
    return text


CSV = {
    # contents, schema, what is said
    "a number": ("a,b\n1,2\nx,3\n", NUMBER, "line 3, column a: got 'x', wanted a number"),
    "an integer": ("a\n1\n2.5\n", COUNT, "line 3, column a: got '2.5', wanted an integer"),
    "an integer too long": (
        "a\n1\n92233720368547758080\n",
        COUNT,
        "line 3, column a: got '9223372",
    ),
    "a date": ("a\n2024-01-01\n", NUMBER, "line 2, column a: got '2024-01-01', wanted a number"),
    "a comma as decimal point": ("a;b\n1,5;2\n", NUMBER, "line 2, column a: got '1,5'"),
    "infinite": ("a\n1\ninf\n", NUMBER, "line 3, column a: got inf, wanted a finite number"),
    "infinite, clipped": (
        "a\n-inf\n",
        [Number("a", clip=(0, 1), std=1.0)],
        "got -inf, wanted a finite",
    ),
    "infinite, through log1p": (
        "a\n1\n-inf\n",
        [Number("a", transform="log1p", std=1.0)],
        "line 3, column a: got -inf, wanted a finite",
    ),
    "beyond float32": ("a\n1e300\n", NUMBER, "got 1e+300, wanted one that float32 holds"),
    "missing number": (
        "a,b\n1,\n,2\n",
        [Number("a", std=1.0)],
        "line 3, column a: got nothing, wanted a number. Say",
    ),
    "missing category": (
        'a\nx\n""\n',
        [Category("a", missing="error")],
        "line 3, column a: got nothing, wanted a value",
    ),
    "missing bucket": (
        "a,b\n,1\n",
        [Bucket("a", boundaries=[1], missing="error")],
        "line 2, column a: got nothing",
    ),
    "missing label": (
        "a,y\n1,1\n1,\n",
        [*NUMBER, Label("y")],
        "line 3, column y: got nothing, wanted a label",
    ),
    "a label of 2": (
        "a,y\n1,1\n1,2\n",
        [*NUMBER, Label("y")],
        "line 3, column y: got 2, wanted a label that is 0 or 1",
    ),
    "a label in words": (
        "a,y\n1,yes\n",
        [*NUMBER, Label("y")],
        "line 2, column y: got 'yes', wanted a number",
    ),
    "infinite label": (
        "a,y\n1,inf\n",
        [*NUMBER, Label("y", kind="number")],
        "line 2, column y: got inf",
    ),
    "negative weight": (
        "a,w\n1,1\n1,-1\n",
        [*NUMBER, Weight("w")],
        "line 3, column w: got -1, wanted a finite weight",
    ),
    "missing weight": (
        "a,w\n1,\n",
        [*NUMBER, Weight("w")],
        "line 2, column w: got nothing, wanted a finite weight",
    ),
    "infinite weight": (
        "a,w\n1,inf\n",
        [*NUMBER, Weight("w")],
        "line 2, column w: got inf, wanted a finite weight",
    ),
    "missing group": ("a,g\n1,\n", [*NUMBER, Group("g")], "line 2, column g: got nothing"),
    "missing key": (
        "a,g\n1,x\n2,\n",
        [*NUMBER, Key("g", dtype="text")],
        "line 3, column g: got nothing",
    ),
    "an id beyond": (
        "a\n1\n3\n",
        [Category("a", cardinality=3)],
        "line 3, column a: got 3, wanted an id 0 .. 2",
    ),
    "a negative id": (
        "a\n-1\n",
        [Category("a", cardinality=3)],
        "line 2, column a: got -1, wanted an id 0 .. 2",
    ),
    "outside the vocabulary": (
        "a\nx\nz\n",
        [Category("a", vocabulary=["x"], unknown_rows=0)],
        "line 3, column a: got 'z', wanted one of the 1 values",
    ),
    "outside, in a bag": (
        "a\nx\nx|x|z\n",
        [Bag("a", vocabulary=["x"], unknown_rows=0)],
        "line 3, column a: got 'z'",
    ),
    "an integer in a sequence": (
        "a\n1|2\n3|x\n",
        [Sequence("a", dtype="integer")],
        "line 3, column a: got 'x', wanted an integer",
    ),
    "missing in a bag": (
        "a\nx|x\nx||x\n",
        [Bag("a", missing="error")],
        "line 3, column a: got nothing",
    ),
    "a number where text is read too": (
        "a\n1\nx\n",
        [*NUMBER, Category("b", column="a")],
        "line 3, column a: got 'x', wanted a number",
    ),
    "too few columns": (
        "a,b\n1,2\n3\n",
        NUMBER,
        "line 3: got 1 columns in '3', wanted 2 as the header has them",
    ),
    "too many columns": ("a,b\n1,2\n3,4,5\n", NUMBER, "line 3: got 3 columns in '3,4,5', wanted 2"),
    "an empty line": (
        "a,b\n1,2\n\n3,4\n",
        NUMBER,
        "line 3: got an empty line, wanted a row. Remove it",
    ),
    "an empty line, windows": ("a,b\r\n1,2\r\n\r\n3,4\r\n", NUMBER, "line 3: got an empty line"),
    "empty lines at the end": ("a,b\n1,2\n\n", NUMBER, "line 3: got an empty line"),
    "not utf-8": (
        b"a,b\n1,2\n3,\xe9t\xe9\n",
        [Category("b")],
        "line 3, column b: got the bytes e9 74 e9, wanted UTF-8",
    ),
    "a header not utf-8": (b"a,\xe9\n1,2\n", NUMBER, "line 1: got the bytes e9, wanted UTF-8"),
    "utf-16": ("a\n1\n".encode("utf-16"), NUMBER, "got UTF-16 text, wanted UTF-8"),
    "packed": (gzip.compress(b"a\n1\n"), NUMBER, "got a gzip file"),
    "parquet by mistake": (
        b"PAR1abc",
        NUMBER,
        "got a Parquet file, wanted text. Open it as parquet",
    ),
    "binary": (b"a\0b\n1\n", NUMBER, "got a binary file"),
    "empty": ("", NUMBER, "got an empty file, wanted a header and rows"),
    "only a header": ("a,b\n", NUMBER, "got no row, wanted at least one"),
    "only a header without newline": ("a,b", NUMBER, "got no row, wanted at least one"),
    "an empty header": ("\n1\n", NUMBER, "line 1: got an empty line, wanted a header"),
    "no such column": (
        "price,b\n1,2\n",
        [Number("prise", std=1.0)],
        "got no column 'prise', which the field 'prise' reads; did you mean 'price'",
    ),
    "one name twice": (
        "a,b,a\n1,2,3\n",
        NUMBER,
        "got two columns named 'a', wanted each name once",
    ),
    "an open quote": (
        'a,b\n1,"x\n2,y\n',
        NUMBER,
        'got a quote that is never closed (an odd number of ", the last in line 2)',
    ),
    "quotes within": (
        'a,b\n1,5" nail\n2,6" nail\n3,7\n',
        NUMBER,
        "a quote inside a field that does not begin with one",
    ),
    "a quoted line end before the fault": (
        'a,b\n1,"x\ny\n\nz"\n2,"\n"\nq,3\n',
        NUMBER,
        "line 8, column a: got 'q'",
    ),
    "windows line ends": ("a,b\r\n1,2\r\nx,3\r\n", NUMBER, "line 3, column a: got 'x'"),
    "a byte order mark": (b"\xef\xbb\xbfa,b\n1,2\nx,3\n", NUMBER, "line 3, column a: got 'x'"),
}


@pytest.mark.parametrize("name", CSV)
def test_csv_at_fault(name, tmp_path, monkeypatch):
    """The same is said wherever blocks begin and end."""
    contents, schema, text = CSV[name]
    path = tmp_path / "a.csv"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    delimiter = {"delimiter": ";"} if name.startswith("a comma") else {}
    # Another kind of file is known by its first bytes.
    for block_bytes in (1 << 20, 13, 8, 5, 4, 3):
        monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", block_bytes)
        message = fault("csv", path, schema, **delimiter)
        assert message.startswith(str(path)) and text in message, (block_bytes, message)


GOOD_CSV = {
    "windows line ends": (b"a,b\r\n1,x\r\n2,y\r\n", {}),
    "no newline at the end": (b"a,b\n1,x\n2,y", {}),
    "a byte order mark": (b"\xef\xbb\xbfa,b\n1,x\n2,y\n", {}),
    "quotes": (b'"a","b"\n"1","x"\n2,"y"\n', {}),
    "a quoted header of two lines": (b'a,"b\n",c\n1,,x\n2,,y\n', {}),
    "blanks around numbers": (b"a,b\n 1 ,x\n2 ,y\n", {}),
    "no header": (b"1,x\n2,y\n", {"names": ["a", "b"]}),
    "another delimiter": (b"a:b\n1:x\n2:y\n", {"delimiter": ":"}),
    "semicolons": (b"a;b\n1;x\n2;y,z\n", {}),
    "tabs": (b"a\tb\n1\tx;;\n2\ty\n", {}),
    "bars": (b"a|b\n1|x\n2|y\n", {}),
    "blanks": (b"a b\n1 x\n2 y\n", {}),
    "semicolons, and commas in a quoted header": (b'a;"b, c, d"\n1;x\n2;y\n', {}),
    "a list in the first line and no header": (b"1,x|y|z\n2,y\n", {"names": ["a", "b"]}),
    "columns that nobody reads": (b"z,a,b\nq,1,x\n\xc3\xa9,2,y\n", {}),
    "stray quotes": (b'a,b\n1,5" nail\n2,"6\n', {"quote": None}),
    "other quotes": (b"a,b\n1,'x,y'\n2,\"\n", {"quote": "'"}),
    "other words for missing": (b"a,m\n1,NA\n2,-\n", {"null_values": ["NA", "-"]}),
}


@pytest.mark.parametrize("block_bytes", [3, 5, 8, 1 << 20])
@pytest.mark.parametrize("name", GOOD_CSV)
def test_csv_of_every_manner(name, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", block_bytes)
    contents, options = GOOD_CSV[name]
    (tmp_path / "a.csv").write_bytes(contents)
    schema = [Number("a", std=1.0)]
    if "null_values" in options:
        schema.append(Number("m", missing=9.0, std=1.0))
    (batch,) = open_source("csv", tmp_path, schema=schema, **options).train.batches(9)
    assert batch.dense[:, 0].tolist() == [1, 2]
    assert batch.dense.shape[1] == 1 or batch.dense[:, 1].tolist() == [9, 9]


def test_a_delimiter_is_recognised_in_each_file(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb,c\n1\tx,y\n")
    (tmp_path / "b.csv").write_text('"b,c";a\nx,y;2\n')
    schema = [Number("a", std=1.0), Category("b,c")]
    splits = open_source("csv", tmp_path, schema=schema)
    (batch,) = splits.train.batches(9)
    assert batch.dense.tolist() == [[1], [2]]
    assert len(set(batch.ids["b,c"].values.tolist())) == 1
    assert splits.notes == (r"a.tsv: the delimiter is '\t' (another: --delimiter)",)


PARQUET = {
    "no such column": (
        {"price": [1.0]},
        [Number("prise", std=1.0)],
        "got no column 'prise', which the field 'prise' reads; did you mean 'price'",
    ),
    "text for a number": (
        {"a": ["x"]},
        NUMBER,
        "row 0, column a: got 'x', wanted a number. Repair or remove the row, or declare a category",
    ),
    "a list for a number": ({"a": [[1.0]]}, NUMBER, "wanted numbers"),
    "fractions for a category": (
        {"a": [1.5]},
        TEXT,
        "column a: got double, wanted text or integers",
    ),
    "a list for a category": (
        {"a": [["x"]]},
        TEXT,
        "wanted one value per row, because the field 'a' is a category. Declare a bag",
    ),
    "a struct": ({"a": [{"x": 1}]}, TEXT, "wanted text or integers"),
    "a date": ({"a": pa.array([0], pa.date32())}, TEXT, "got date32[day], wanted text or integers"),
    "integers for text": ({"a": [1]}, [Category("a", dtype="text")], "got int64, wanted text"),
    "integers for a text vocabulary": (
        {"a": [1]},
        [Category("a", vocabulary=["x"])],
        "got int64, wanted text",
    ),
    "one number for a bag": ({"a": [1]}, [Bag("a")], "wanted lists, or text with a separator"),
    "fractions in a bag": ({"a": [[1.5]]}, [Bag("a")], "wanted text or integers"),
    "a list for a label": ({"a": [1.0], "y": [[1]]}, [*NUMBER, Label("y")], "column y: got list"),
    "text for a label": (
        {"a": [1.0], "y": ["yes"]},
        [*NUMBER, Label("y")],
        "row 0, column y: got 'yes', wanted a number. Repair or remove the row, or say which",
    ),
    "text for cardinality": (
        {"a": ["x"]},
        [Category("a", cardinality=3)],
        "row 0, column a: got 'x', wanted an integer",
    ),
    "fractions for integers": (
        {"a": [None, 1.0, 1.5]},
        COUNT,
        "row 2, column a: got 1.5, wanted an integer of 64 bits",
    ),
    "infinite for integers": (
        {"a": [1.0, float("inf")]},
        COUNT,
        "row 1, column a: got inf, wanted",
    ),
    "null": (
        {"a": [1.0, None]},
        [Number("a", std=1.0)],
        "row 1, column a: got nothing, wanted a number",
    ),
    "NaN": (
        {"a": [1.0, float("nan")]},
        [Number("a", std=1.0)],
        "row 1, column a: got nothing, wanted a number",
    ),
    "infinite": ({"a": [1.0, float("inf")]}, NUMBER, "row 1, column a: got inf"),
    "null category": (
        {"a": ["x", None]},
        [Category("a", missing="error")],
        "row 1, column a: got nothing",
    ),
    "null coded category": (
        {"a": pa.array(["x", None]).dictionary_encode()},
        [Category("a", missing="error")],
        "row 1, column a: got nothing",
    ),
    "an id beyond": (
        {"a": [1, 5]},
        [Category("a", cardinality=5)],
        "row 1, column a: got 5, wanted an id 0 .. 4",
    ),
    "a list id beyond": (
        {"a": [[1, 2], [], [2, 5]]},
        [Bag("a", cardinality=5)],
        "row 2, column a: got 5",
    ),
    "outside": (
        {"a": ["x", "z"]},
        [Category("a", vocabulary=["x"], unknown_rows=0)],
        "row 1, column a: got 'z'",
    ),
    "outside, coded": (
        {"a": pa.array(["x", "x", "z"]).dictionary_encode()},
        [Category("a", vocabulary=["x"], unknown_rows=0)],
        "row 2, column a: got 'z'",
    ),
    "a label of 2": (
        {"a": [1.0, 1.0], "y": [1, 2]},
        [*NUMBER, Label("y")],
        "row 1, column y: got 2, wanted a label that is 0 or 1",
    ),
    "null label": (
        {"a": [1.0, 1.0], "y": [1, None]},
        [*NUMBER, Label("y")],
        "row 1, column y: got nothing",
    ),
    "negative weight": (
        {"a": [1.0, 1.0], "w": [1, -1]},
        [*NUMBER, Weight("w")],
        "row 1, column w: got -1",
    ),
    "null group": (
        {"a": [1.0, 1.0], "g": [1, None]},
        [*NUMBER, Group("g")],
        "row 1, column g: got nothing",
    ),
    "no row": ({"a": pa.array([], pa.float64())}, NUMBER, "got no row, wanted at least one"),
}


@pytest.mark.parametrize("row_group_size", [1, 100])
@pytest.mark.parametrize("name", PARQUET)
def test_parquet_at_fault(name, row_group_size, tmp_path):
    columns, schema, text = PARQUET[name]
    path = tmp_path / "a.parquet"
    # Rows are counted through the file, whatever the groups.
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    message = fault("parquet", path, schema)
    assert message.startswith(str(path)) and text in message, message


def test_one_name_twice(tmp_path):
    table = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "got two columns named 'a'" in fault("parquet", tmp_path, NUMBER)


def test_files_that_differ_name_the_odd_one(tmp_path):
    pq.write_table(pa.table({"a": ["x"], "b": [1.0]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [7], "b": [1.0]}), tmp_path / "2.parquet")
    message = fault("parquet", tmp_path, TEXT)
    assert "2.parquet, column a: got int64, wanted text" in message
    pq.write_table(pa.table({"b": [1.0]}), tmp_path / "2.parquet")
    assert "2.parquet: got no column 'a'" in fault("parquet", tmp_path, TEXT)
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("b,c\n1,2\n")
    assert "2.csv: got no column 'a'" in fault("csv", tmp_path, NUMBER)
    # Other columns, and their order, do not matter.
    (tmp_path / "2.csv").write_text("b,c,a\n1,2,3\n")
    assert open_source("csv", tmp_path, schema=NUMBER).train.num_samples == 2


def test_other_files_are_held_to_the_same_schema(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("b\n1\n")
    message = fault("csv", tmp_path / "a.csv", NUMBER, test=tmp_path / "b.csv")
    assert "b.csv: got no column 'a'" in message


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_paths_at_fault(kind, tmp_path):
    assert "no such file or folder" in fault(kind, tmp_path / "no", NUMBER)
    assert "no file matches this pattern" in fault(kind, tmp_path / "*.x", NUMBER)
    assert f"a folder without a file that ends in .{kind}" in fault(kind, tmp_path, NUMBER)
    with pytest.raises(ConfigError, match="path"):
        open_source(kind)
    assert "got an empty list of paths" in fault(kind, [], NUMBER)
    assert "got path=[1], wanted a file, a folder" in fault(kind, [1], NUMBER)
    assert "got path=7, wanted a file, a folder" in fault(kind, 7, NUMBER)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_fraction": 1.0}, "test_fraction=1.0, wanted a number of 0 or more, below 1"),
        ({"test_fraction": "half"}, "test_fraction='half'"),
        ({"validation_fraction": -0.1}, "validation_fraction=-0.1"),
        ({"test_fraction": 0.6, "validation_fraction": 0.5}, "nothing is left to train on"),
        ({"test_fraction": 0.9}, "leave no sample to train on, of 3"),
        ({"days": True, "test_fraction": 0.5}, "got days and a fraction"),
        ({"days": "yes"}, "got days='yes'"),
        ({"shuffle_window": -1}, "shuffle_window=-1, wanted greater than or equal to 0"),
        ({"shuffle_window": 1.5}, "shuffle_window=1.5, wanted a whole number"),
        ({"shuffle_window": True}, "shuffle_window=True"),
        ({"threads": 0}, "threads=0, wanted greater than or equal to 1"),
        ({"seed": "x"}, "seed='x'"),
        ({"split_by": 3}, "split_by=3, wanted the name of a column"),
        ({"split_by": "citi", "test_fraction": 0.5}, "'citi', which split_by or order_by names; did you mean 'city'"),
        ({"label": "click"}, "got both schema and label='click'"),
    ],
)  # fmt: skip
def test_options_at_fault(kind, options, message, tmp_path):
    write = write_csv if kind == "csv" else write_parquet
    path = write(tmp_path / f"a.{kind}", samples(3))
    if options == {"test_fraction": 0.9}:
        path = write(tmp_path / f"a.{kind}", samples(3))
        options = {"test_fraction": 0.99}
    assert message in fault(kind, path, DECLARATION, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": ";;"}, "delimiter=';;', wanted one ASCII character"),
        ({"delimiter": 7}, "delimiter=7"),
        ({"delimiter": "\n"}, "delimiter='\\n'"),
        ({"quote": ""}, "quote=''"),
        ({"quote": ","}, "got delimiter and quote both ','"),
        ({"quote": ",", "delimiter": ","}, "got delimiter and quote both ','"),
        ({"names": "a"}, "names='a', wanted a list of texts"),
        ({"names": [1]}, "names=[1], wanted a list of texts"),
        ({"names": ["a"]}, "line 1: got 9 columns"),
        ({"names": ["a"] * 9}, "two columns named 'a'"),
        ({"null_values": "NA"}, "null_values='NA', wanted a list of texts"),
    ],
)
def test_csv_options_at_fault(options, message, tmp_path):
    path = write_csv(tmp_path / "a.csv", samples(3))
    schema = NUMBER if "names" in options else DECLARATION
    assert message in fault("csv", path, schema, **options)


def test_a_missing_split_key_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("a,u\n1,x\n2,\n")
    message = fault("csv", tmp_path, NUMBER, split_by="u", test_fraction=0.5)
    assert "line 3, column u: got nothing" in message


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_that_changes_while_it_is_read(kind, tmp_path):
    write = write_csv if kind == "csv" else write_parquet
    path = write(tmp_path / f"a.{kind}", samples(30))
    source = open_source(kind, path, schema=DECLARATION).train
    write(path, samples(31))
    with pytest.raises(DataError, match="has changed since"):
        list(source.batches(5))
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        list(source.batches(5))


def test_a_fault_is_raised_when_its_turn_comes(tmp_path, monkeypatch):
    """Not before: the batches ahead of it can be trained on, and a resumed run meets it again."""
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 60)
    monkeypatch.setattr("colonnade.data.tabular.source.READ_SAMPLES", 1)
    lines = [str(i) for i in range(200)]
    lines[150] = "x"
    (tmp_path / "a.csv").write_text("a\n" + "\n".join(lines) + "\n")
    batches = open_source("csv", tmp_path, schema=NUMBER).train.batches(10)
    read = [next(batches).size for _ in range(12)]
    assert read == [10] * 12
    with pytest.raises(DataError, match="line 152, column a: got 'x'"):
        list(batches)


@pytest.mark.parametrize("length", [0, 1, 4, 8, 100, -1, -4, -8, -9, -100])
def test_parquet_cut_short(length, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", samples(50))
    path.write_bytes(path.read_bytes()[:length])
    message = fault("parquet", path, DECLARATION)
    assert message.startswith(f"{path}: cannot be read as Parquet")


def test_parquet_with_a_page_destroyed(tmp_path):
    """Zeros over the first pages: the footer is fine, so the fault shows when they are read."""
    path = write_parquet(tmp_path / "a.parquet", samples(50), compression="snappy")
    stored = bytearray(path.read_bytes())
    stored[4:200] = bytes(196)
    path.write_bytes(stored)
    message = fault("parquet", path, DECLARATION)
    assert message.startswith(f"{path}, row group 0 (row 0 on): cannot be read")


@settings(max_examples=examples(20, 60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_csv_with_bytes_changed_is_read_or_refused(tmp_path_factory, seed):
    """Whatever a few bytes become: batches, or one clear line."""
    rng = random.Random(seed)
    path = write_csv(tmp_path_factory.mktemp("f") / "a.csv", samples(12, seed))
    stored = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(stored))
        stored[at : at + rng.randrange(2)] = bytes(
            rng.choice(b'",\n\r\0\xff|x1') for _ in range(rng.randrange(3))
        )
    path.write_bytes(stored)
    try:
        list(open_source("csv", path, schema=DECLARATION).train.batches(5))
    except ColonnadeError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))
        if "cannot be read" in str(error):
            assert "from line" in str(error)
