"""CSV and Parquet against a slow reading of the same samples; how files are parted and mixed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from bisect import bisect_right

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table_files import DECLARATION, cut, samples, write_csv, write_folder, write_parquet

from colonnade.data import Position, infer_schema, open_source
from colonnade.data.counter import mix_words, stream_key
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Category,
    Cross,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Weight,
)
from colonnade.data.tabular.hashing import MISSING_ID, hash_text
from colonnade.data.tabular.source import TableSource
from colonnade.data.tabular.tables import build_portable_options, detect_file_format
from colonnade.errors import ConfigError, DataError
from colonnade.serve.records import _build_file_encoder

WRITE = {"csv": write_csv, "parquet": write_parquet}


@pytest.fixture(params=WRITE)
def kind(request, monkeypatch):
    """Formats, read in blocks of a few rows."""
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 400)
    return request.param


# --- one value at a time ---------------------------------------------------------------------------------


def mixed(word: int) -> int:
    return int(mix_words(np.array([word % 2**64], np.uint64))[0])


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def id_of(field, value) -> int:
    """The definition of fields.py, for one value."""
    raw = hash_text(value.encode()) if isinstance(value, str) else value
    if value is None or value == "":
        if field.vocabulary is not None:
            return len(field.vocabulary) + field.unknown_rows
        if field.cardinality is not None:
            return field.cardinality
        raw = MISSING_ID
    elif field.vocabulary is not None:
        if value in field.vocabulary:
            return field.vocabulary.index(value)
        return len(field.vocabulary) + mixed(raw) % field.unknown_rows
    return raw if field.rows is None else mixed(raw) % field.rows


def read_slowly(declaration, rows):
    """Return the value of each sample by field name, ids as lists for bags and sequences."""
    read = {}
    for field in declaration.fields:
        values = [row.get(field.column) for row in rows]
        if isinstance(field, Number):
            read[field.name] = [number_of(field, value) for value in values]
        elif isinstance(field, Category):
            read[field.name] = [id_of(field, value) for value in values]
        elif isinstance(field, Bag | Sequence):
            limit = field.max_length or 10**9
            retained = [
                value[:limit] if field.keep == "first" else value[-limit:] for value in values
            ]
            read[field.name] = [[id_of(field, item) for item in value] for value in retained]
        elif isinstance(field, Bucket):
            n = len(field.boundaries)
            read[field.name] = [
                n + 1 if value is None else bisect_right(field.boundaries, value)
                for value in values
            ]
        elif isinstance(field, Cross):
            parts = zip(*(read[name] for name in field.of), strict=True)
            keys = [stream_key(*(part % 2**64 for part in item)) for item in parts]
            read[field.name] = [
                signed(key) if field.rows is None else mixed(key) % field.rows for key in keys
            ]
        elif isinstance(field, Label | Weight):
            read[field.name] = values
        else:
            is_key = isinstance(field, Key)  # as it stands in the file
            read[field.name] = [
                hash_text(v.encode()) if isinstance(v, str) and not is_key else v for v in values
            ]
    return read


def number_of(field, value) -> float:
    if value is None:
        return field.missing
    if field.clip is not None:
        value = min(max(value, field.clip[0]), field.clip[1])
    if field.transform == "log1p":
        value = math.log1p(max(value, 0))
    return (value - (field.mean or 0)) / (field.std or 1)


def listed(ids) -> list:
    if ids.offsets is None:
        return ids.values.tolist()
    ends = ids.offsets.tolist()
    return [ids.values[a:b].tolist() for a, b in itertools.pairwise(ends)]


def check(batch, declaration, rows):
    read = read_slowly(declaration, rows)
    assert batch.size == len(rows)
    for j, field in enumerate(declaration.numbers):
        expected = torch.tensor(read[field.name], dtype=torch.float32)
        torch.testing.assert_close(batch.dense[:, j], expected, rtol=1e-6, atol=1e-6)
    for field in declaration.categorical:
        assert listed(batch.ids[field.name]) == read[field.name], field.name
    for j, field in enumerate(declaration.labels):
        assert batch.label[:, j].tolist() == read[field.name]
    for kind, got in ((Weight, batch.sample_weight), (Group, batch.group), (Key, batch.key)):
        field = declaration.find_field(kind)
        assert (got is None) == (field is None)
        if field is not None:
            assert got.tolist() == read[field.name]


def test_values_are_those_of_the_slow_definition(tmp_path, kind):
    folder = write_folder(tmp_path, kind, 87)
    (batch,) = open_source(kind, folder, schema=DECLARATION).train.batches(100)
    check(batch, DECLARATION, samples(87))


OTHERS = {
    "plain numbers": [Number("price", missing=-1.0, std=1.0), Number("weight", std=1.0)],
    "clipped, shifted": [Number("price", missing=0.5, clip=(1, 100), mean=3.0, std=2.0)],
    "one column, twice": [Number("age", missing=0.0, std=1.0), Category("age_id", column="age", dtype="integer")],
    "integers, known": [Category("user", vocabulary=(-9 * 10**17, 0, 10**17))],
    "integers, hashed": [Category("user", dtype="integer", rows=5)],
    "texts, known, many rows for others": [Category("city", vocabulary=("Oslo",), unknown_rows=3)],
    "last of a bag": [Bag("tags", max_length=2, keep="last", rows=11)],
    "first of a sequence": [Sequence("history", dtype="integer", max_length=1, keep="first")],
    "known in a bag": [Bag("tags", vocabulary=("a", "b", "c"))],
    "open cross": [Category("city"), Category("user", dtype="integer"), Cross("x", of=("city", "user"))],
    "key and group of text": [Number("weight", std=1.0), Key("k", column="tags_text"), Group("g", column="tags_text")],
    "two tasks": [Number("price", missing=0.0, std=1.0), Label("click"), Label("again", column="click")],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_declarations(name, tmp_path, kind):
    fields = [f for f in OTHERS[name] if f.column != "tags_text"]
    fields += [
        dataclasses.replace(f, column="city") for f in OTHERS[name] if f.column == "tags_text"
    ]
    rows = [
        row for row in samples(40, seed=5) if "k" not in {f.name for f in fields} or row["city"]
    ]
    path = WRITE[kind](tmp_path / f"a.{kind}", rows)
    declaration = FileSchema(fields)
    (batch,) = open_source(kind, path, schema=declaration).train.batches(100)
    check(batch, declaration, rows)


@settings(max_examples=examples(10, 30), deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
def test_csv_and_parquet_give_the_same_batch(tmp_path_factory, seed, count):
    folder, rows = tmp_path_factory.mktemp("both"), samples(count, seed)
    for kind, write in WRITE.items():
        (batch,) = open_source(
            kind, write(folder / f"a.{kind}", rows), schema=DECLARATION
        ).train.batches(99)
        check(batch, DECLARATION, rows)


def test_a_text_has_one_id_however_parquet_holds_it(tmp_path):
    texts = ["Oslo", None, "", "Łódź", "Oslo", "a much longer text than eight bytes"] * 3
    kinds = [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ]
    expected = [id_of(Category("city"), text) for text in texts]
    for how in ([], ["city"]):
        for i, arrow in enumerate(kinds):
            path = tmp_path / f"{i}.parquet"
            plain = pa.array(texts).cast(arrow)
            pq.write_table(pa.table({"city": plain}), path, use_dictionary=how)
            (batch,) = open_source("parquet", path, schema=[Category("city")]).train.batches(99)
            assert batch.ids["city"].values.tolist() == expected, arrow


@pytest.mark.parametrize(
    "arrow",
    [
        pa.int8(),
        pa.uint16(),
        pa.int64(),
        pa.uint64(),
        pa.bool_(),
        pa.dictionary(pa.int8(), pa.int32()),
    ],
    ids=str,
)
def test_integers_of_every_width_are_ids_as_they_are(arrow, tmp_path):
    values = [1, 0, None, 1]
    column = pa.array(values).cast(pa.int32() if pa.types.is_dictionary(arrow) else arrow)
    column = column.dictionary_encode() if pa.types.is_dictionary(arrow) else column
    pq.write_table(
        pa.table({"a": column, "n": pa.array(values).cast(pa.float32())}), tmp_path / "a.parquet"
    )
    (batch,) = open_source(
        "parquet",
        tmp_path,
        schema=[
            Category("a"),
            Number("n", missing=7.0, std=1.0),
            Bucket("b", column="a", boundaries=[1]),
        ],
    ).train.batches(9)
    assert batch.ids["a"].values.tolist() == [1, 0, MISSING_ID, 1]
    assert batch.ids["b"].values.tolist() == [1, 0, 2, 1]
    assert batch.dense[:, 0].tolist() == [1, 0, 7, 1]


def test_columns_with_a_dot_in_their_names(tmp_path):
    """Parquet's own reader takes a dot for the path into a struct."""
    columns = {"a": [1.0, 2.0], "a.b": [3.0, 4.0], "s": [{"x": 1}, {"x": 2}], "c.d.e": ["x", "y"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    schema = [
        Number("ab", column="a.b", std=1.0),
        Number("a", std=1.0),
        Category("c", column="c.d.e"),
    ]
    (batch,) = open_source("parquet", tmp_path, schema=schema).train.batches(9)
    assert batch.dense.tolist() == [[3, 1], [4, 2]]
    assert batch.ids["c"].values.tolist() == [hash_text(b"x"), hash_text(b"y")]


def test_whole_floats_are_ids_where_the_schema_says_integers(tmp_path):
    """Pandas makes floats of integers with missing values."""
    columns = {"a": [1.0, None, float("nan"), -3.0], "b": [[2.0], [], None, [None, 5.0]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    schema = [Category("a", dtype="integer"), Bag("b", cardinality=9)]
    (batch,) = open_source("parquet", tmp_path, schema=schema).train.batches(9)
    assert batch.ids["a"].values.tolist() == [1, MISSING_ID, MISSING_ID, -3]
    assert listed(batch.ids["b"]) == [[2], [], [], [5]]


def test_labels_that_are_true_and_false(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,vip,x\ntrue,true,1.5\nFalse,false,2.5\nTRUE,,4.5\n")
    (batch,) = open_source("csv", path).train.batches(9)
    assert batch.label.flatten().tolist() == [1, 0, 1]
    ids = batch.ids["vip"].values.tolist()
    assert ids == [1, 0, MISSING_ID]
    path.write_text("label,x\ntrue,1.5\n 0 ,2.5\n1.0,2.5\n,0\n")
    schema = [Label("label", missing="unknown"), Number("x", std=1.0)]
    (batch,) = open_source("csv", path, schema=schema).train.batches(9)
    torch.testing.assert_close(
        batch.label.flatten(), torch.tensor([1, 0, 1.0, math.nan]), equal_nan=True
    )


IDS = [-1, -(2**63) + 1, 0, 2**63 - 1, None]
UNSIGNED = [0, 2**63 + 1, 7, 2**64 - 1, None]


@pytest.mark.parametrize(("values", "arrow"), [(IDS, pa.int64()), (UNSIGNED, pa.uint64())])
def test_integer_ids_are_64_bits_in_every_format_and_in_records(values, arrow, tmp_path):
    pq.write_table(
        pa.table(
            {
                "one": pa.array(values, arrow),
                "list": pa.array([[value] for value in values], pa.list_(arrow)),
                "text": ["" if value is None else str(value) for value in values],
            }
        ),
        tmp_path / "a.parquet",
    )
    (tmp_path / "a.csv").write_text(
        "one,list,text\n" + "".join(f"{v},{v},{v}\n".replace("None", "") for v in values)
    )
    known = dict(dtype="integer", vocabulary=[values[1], 5])
    fields = [
        Category("one", dtype="integer"), Bag("list", dtype="integer"), Sequence("text", dtype="integer"),
        Category("known", column="one", **known),
    ]  # fmt: skip
    expected = [MISSING_ID if value is None else signed(value) for value in values]
    options = {"schema": FileSchema(fields).to_dict()}
    (parquet,) = open_source("parquet", tmp_path / "a.parquet", **options).train.batches(9)
    (csv,) = open_source("csv", tmp_path / "a.csv", **options).train.batches(9)
    records = [
        {"one": value, "list": [value], "text": "" if value is None else str(value)}
        for value in values
    ]
    encoders = [_build_file_encoder(kind, options) for kind in WRITE]
    for batch in (parquet, csv, *(encoder.encode(records) for encoder in encoders)):
        assert batch.ids["one"].values.tolist() == expected
        for name in ("list", "text"):
            assert listed(batch.ids[name]) == [[value] for value in expected[:-1]] + [[]]
        assert batch.ids["known"].values.tolist() == [2, 0, 2, 2, 3]


@pytest.mark.parametrize("value", [-(2**63), 2**63])
def test_the_id_of_missing_values_is_refused_by_name(value, tmp_path):
    fields = [Category("a", dtype="integer")]
    arrow = pa.int64() if value < 0 else pa.uint64()
    pq.write_table(pa.table({"a": pa.array([7, value], arrow)}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(f"a\n7\n{value}\n")
    encoder = _build_file_encoder("csv", {"schema": FileSchema(fields).to_dict()})
    readers = [
        lambda kind=kind: list(
            open_source(kind, tmp_path / f"a.{kind}", schema=fields).train.batches(9)
        )
        for kind in WRITE
    ]
    for read in (*readers, lambda: encoder.encode([{"a": 7}, {"a": value}])):
        with pytest.raises(DataError, match=r"(line 3|row 1|record 1), column a: got -?9223372036"):
            read()


def test_a_key_does_not_wrap_around(tmp_path):
    (tmp_path / "a.csv").write_text(f"k,x\n{2**63 + 1},1\n")
    schema = [Key("k", dtype="integer"), Number("x", std=1.0)]
    with pytest.raises(DataError, match=f"line 2, column k: got '{2**63 + 1}', wanted an integer"):
        list(open_source("csv", tmp_path / "a.csv", schema=schema).train.batches(9))


def test_a_vocabulary_may_hold_null(tmp_path):
    (tmp_path / "a.csv").write_text("a,x\nNULL,1\n,1\n")
    schema = [Category("a", vocabulary=["NULL", "b"]), Number("x", std=1.0)]
    (batch,) = open_source("csv", tmp_path / "a.csv", schema=schema).train.batches(9)
    assert batch.ids["a"].values.tolist() == [0, 3]


def test_decimal_ids_are_exact(tmp_path):
    values = pa.array([2**62 + 1, None], pa.decimal128(38, 0))
    pq.write_table(pa.table({"a": values}), tmp_path / "a.parquet")
    fields = [Category("a", dtype="integer")]
    (batch,) = open_source("parquet", tmp_path / "a.parquet", schema=fields).train.batches(9)
    assert batch.ids["a"].values.tolist() == [2**62 + 1, MISSING_ID]


def test_lists_of_every_kind_and_their_missing_elements(tmp_path):
    rows = [["a", None, "", "NULL"], [], None, ["b", "a"]]
    columns = {
        "list": pa.array(rows),
        "large": pa.array(rows, pa.large_list(pa.large_string())),
        "text": pa.array(["a|||NULL", "", None, "b|a"]),
        "coded": pa.array(["a|||NULL", "", None, "b|a"]).dictionary_encode(),
        "fixed": pa.array([["a", ""], ["b", "a"], None, ["a", None]], pa.list_(pa.string(), 2)),
        "none": pa.array([[], [], None, []]),
        "nothing": pa.nulls(4),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    declaration = FileSchema([Bag(name, vocabulary=("a", "b")) for name in columns])
    (batch,) = open_source("parquet", tmp_path, schema=declaration).train.batches(9)
    a, b = 0, 1
    for name in ("list", "large", "text", "coded"):
        assert listed(batch.ids[name]) == [[a], [], [], [b, a]], name
    assert listed(batch.ids["fixed"]) == [[a], [b, a], [], [a]]
    assert listed(batch.ids["none"]) == listed(batch.ids["nothing"]) == [[]] * 4
    strict = [Bag("list", vocabulary=("a", "b"), missing="error")]
    with pytest.raises(DataError, match="row 0, column list: got nothing"):
        list(open_source("parquet", tmp_path, schema=strict).train.batches(9))


PADDED = {
    "integers": (pa.array([[0, 0, 3, 5], [0, 0, 0, 0], None, [7, 3, 5, 9]]), 0),
    "fixed size": (
        pa.array([[0, 0, 3, 5], [0] * 4, None, [7, 3, 5, 9]], pa.list_(pa.int64(), 4)),
        0,
    ),
    "negative": (pa.array([[-1, -1, 3, 5], [-1], [], [7, 3, 5, 9]]), -1),
    "floats": (pa.array([[0.0, 0.0, 3.0, 5.0], [0.0], [float("nan")], [7.0, 3.0, 5.0, 9.0]]), 0),
    "text": (pa.array(["0|0|3|5", "0", "", "7|3|5|9"]), 0),
    "floats as text": (pa.array(["0.0|0|3|5.0", "0", "", "7|3|5|9"]), 0),
    "words": (pa.array([["<pad>", "3", "5"], ["<pad>"], None, ["7", "3", "5", "9"]]), "<pad>"),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_no_item(name, tmp_path):
    lists, padding = PADDED[name]
    weights = [[0.5 * i for i in range(len(v or []))] for v in lists.to_pylist()]
    pq.write_table(pa.table({"h": lists, "w": weights}), tmp_path / "a.parquet")
    known = [3, 5, 7, 9] if padding != "<pad>" else ["3", "5", "7", "9"]
    fields = [
        Sequence("h", vocabulary=known, padding=padding, unknown_rows=0),
        Sequence("newest", column="h", vocabulary=known, padding=padding, max_length=1),
        Sequence("oldest", column="h", vocabulary=known, padding=padding, max_length=1, keep="first"),
    ]  # fmt: skip
    if not pa.types.is_string(lists.type):
        fields.append(Bag("weighted", column="h", vocabulary=known, padding=padding, weights="w"))
    (batch,) = open_source("parquet", tmp_path, schema=fields).train.batches(9)
    assert listed(batch.ids["h"]) == [[0, 1], [], [], [2, 0, 1, 3]]
    assert listed(batch.ids["newest"]) == [[1], [], [], [3]]
    assert listed(batch.ids["oldest"]) == [[0], [], [], [2]]
    if len(fields) == 4:
        start = len(lists[0]) - 2
        expected = [0.5 * start, 0.5 * start + 0.5, 0.0, 0.5, 1.0, 1.5]
        assert batch.ids["weighted"].weights.tolist() == expected
    records = [{"h": value} for value in lists.to_pylist()]
    encoder = _build_file_encoder("parquet", {"schema": FileSchema(fields[:1]).to_dict()})
    assert listed(encoder.encode(records).ids["h"]) == [[0, 1], [], [], [2, 0, 1, 3]]


WORDS = ["NULL", r"\N", "NA", "None", "nan", "null"]


@pytest.mark.parametrize("word", WORDS)
def test_missing_values_as_text(word, tmp_path, kind):
    """Missing in numbers, in times and in integers; in texts only NULL and \\N."""
    lines = [f"u{i % 3},{i % 5}.5,{i % 5},2024-05-0{i % 9 + 1},{i % 2}" for i in range(30)]
    lines[1] = ",".join([word] * 4 + ["1"])
    (tmp_path / "a.csv").write_text("\n".join(["u,x,n,at,label", *lines]) + "\n")
    options = {"null_values": []} if kind == "csv" else {}
    path = tmp_path / "a.csv"
    if kind == "parquet":
        text = [
            dict(zip(("u", "x", "n", "at", "label"), line.split(","), strict=True))
            for line in lines
        ]
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(text), path)
    source = open_source(kind, path, **options).train
    fields = {field.name: field for field in source.file_schema.fields}
    assert (
        isinstance(fields["x"], Number)
        and fields["n"].dtype == "integer"
        and "at_weekday" in fields
    )
    (batch,) = source.batches(30)
    is_missing = word in ("NULL", r"\N")
    expected = MISSING_ID if is_missing else hash_text(word.encode())
    assert batch.ids["u"].values[1] == expected
    assert batch.ids["n"].values[1] == MISSING_ID and batch.ids["at_weekday"].values[1] == 7
    assert batch.dense[1, 0] == 0.0
    record = {"u": word, "x": word, "n": word, "at": word}
    encoder = _build_file_encoder(kind, {"schema": source.file_schema.to_dict()})
    served = encoder.encode([record])
    assert {name: ids.values.tolist() for name, ids in served.ids.items()} == {
        name: ids.values[1:2].tolist() for name, ids in batch.ids.items()
    }
    # A field may say which texts are missing.
    declared = [Category("u", null_values=[word])]
    (batch,) = open_source(kind, path, schema=declared).train.batches(30)
    assert batch.ids["u"].values[1] == MISSING_ID


def test_a_label_that_is_null_is_unknown_instead_of_negative(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,yes\n2,NULL\n3,no\n")
    label = Label("y", positive="yes", missing="unknown")
    schema = [label, Number("x", std=1.0)]
    (batch,) = open_source("csv", tmp_path / "a.csv", schema=schema).train.batches(9)
    wanted = torch.tensor([1.0, math.nan, 0.0])
    torch.testing.assert_close(batch.label.flatten(), wanted, equal_nan=True)


def test_missing_labels_and_thresholds(tmp_path):
    write = pa.table({"x": [1.0, 2.0, 3.0], "rating": [5, None, 3], "bought": [True, False, None]})
    pq.write_table(write, tmp_path / "a.parquet")
    labels = [
        Label("liked", column="rating", at_least=4, missing="unknown"),
        Label("stars", column="rating", kind="number", missing="unknown"),
        Label("bought", missing="unknown"),
    ]
    (batch,) = open_source(
        "parquet", tmp_path, schema=[Number("x", std=1.0), *labels]
    ).train.batches(9)
    expected = torch.tensor([[1, 5, 1], [math.nan, math.nan, 0], [0, 3, math.nan]])
    torch.testing.assert_close(batch.label, expected, equal_nan=True)


# --- files ------------------------------------------------------------------------------------------------


def order_of(source, epoch=0, **options) -> list[int]:
    return [
        row
        for batch in source.batches(7, start=Position(epoch), **options)
        for row in batch.key.tolist()
    ]


def test_files_are_read_in_natural_order(tmp_path, kind):
    write, ending = WRITE[kind], kind
    for day, rows in zip((1, 2, 10), cut(samples(60), 3), strict=True):
        write(tmp_path / f"day_{day}" / f"a.{ending}", rows)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "day_1" / f".hidden.{ending}").write_text("not a table")
    (tmp_path / "_old").mkdir()
    (tmp_path / "_old" / f"a.{ending}").write_text("not a table")
    paths = [
        tmp_path,
        str(tmp_path / "day_*"),
        str(tmp_path / "day_*" / f"*.{ending}"),
        [tmp_path / "day_1", tmp_path / "day_2", tmp_path / "day_10" / f"a.{ending}"],
    ]
    for path in paths:
        assert order_of(open_source(kind, path, schema=DECLARATION).train) == list(range(60))
    assert detect_file_format(tmp_path) == kind


def test_days_are_files_or_folders_in_order(tmp_path, kind):
    parts = cut(samples(60), 4)
    for name, rows in zip(("day_1/a", "day_1/b", "day_2/c/a", "day_10"), parts, strict=True):
        WRITE[kind](tmp_path / f"{name}.{kind}", rows)
    (tmp_path / "day_3").mkdir()
    sizes = [len(rows) for rows in parts]
    folders = [sizes[0] + sizes[1], sizes[2], sizes[3]]
    expected = {
        str(tmp_path): folders,
        str(tmp_path / "day_*"): folders,
        str(tmp_path / "**" / f"*.{kind}"): sizes,
        (tmp_path / "day_1", str(tmp_path / f"day_10.{kind}")): [folders[0], sizes[3]],
    }
    for path, counts in expected.items():
        splits = open_source(kind, path, schema=DECLARATION, days=True)
        assert [day.num_samples for day in splits.days] == counts
        read = [row for day in splits.days for row in order_of(day)]
        assert read == order_of(splits.train) == sorted(read)


def test_the_last_samples_are_held_out(tmp_path, kind):
    folder = write_folder(tmp_path, kind, 60)
    splits = open_source(
        kind, folder, schema=DECLARATION, test_fraction=0.2, validation_fraction=0.1
    )
    parts = [order_of(part) for part in (splits.train, splits.validation, splits.test)]
    assert parts == [list(range(42)), list(range(42, 48)), list(range(48, 60))]


def test_files_of_their_own_are_held_out(tmp_path, kind):
    one, two = cut(samples(60), 2)
    train = WRITE[kind](tmp_path / "train" / f"a.{kind}", one)
    test = WRITE[kind](tmp_path / "test" / f"b.{kind}", two)
    splits = open_source(kind, train, schema=DECLARATION, test=str(test), validation=test.parent)
    assert order_of(splits.train) == [row["row"] for row in one]
    assert order_of(splits.test) == order_of(splits.validation) == [row["row"] for row in two]
    assert splits.test.schema == splits.train.schema


def test_a_key_is_in_one_part_only(tmp_path, kind):
    folder = write_folder(tmp_path, kind, 200)
    splits = open_source(
        kind, folder, schema=DECLARATION, split_by="user", test_fraction=0.3, validation_fraction=0.3,
        shuffle_window=20,
    )  # fmt: skip
    parts = [splits.train, splits.validation, splits.test]
    users = [{g for b in part.batches(50) for g in b.group.tolist()} for part in parts]
    assert all(users) and len(set.union(*users)) == sum(map(len, users)) == 18
    rows = [order_of(part) for part in parts]
    assert sorted(itertools.chain(*rows)) == list(range(200))
    assert rows[1] == sorted(rows[1]) and rows[0] != sorted(rows[0])
    again = open_source(
        kind, folder, schema=DECLARATION, split_by="user", test_fraction=0.3, seed=9
    )
    assert order_of(again.test) == rows[2]


# --- shuffling --------------------------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_of_its_own(tmp_path, kind):
    folder = write_folder(tmp_path, kind, 120)
    source = open_source(kind, folder, schema=DECLARATION, shuffle_window=40).train
    first, second = order_of(source), order_of(source, epoch=1)
    assert sorted(first) == sorted(second) == list(range(120))
    assert first != second and first != list(range(120))
    assert order_of(source) == first
    other = open_source(kind, folder, schema=DECLARATION, shuffle_window=40, seed=1).train
    assert order_of(other) != first


@settings(max_examples=examples(20, 40), deadline=None)
@given(
    count=st.integers(1, 70), window=st.integers(0, 90), batch=st.integers(1, 40), ranks=st.integers(1, 5),
    step=st.integers(0, 6), epoch=st.integers(0, 3), threads=st.integers(1, 3), files=st.integers(1, 3),
    fraction=st.sampled_from([0, 0.4]),
)  # fmt: skip
def test_any_window_ranks_and_position(
    tmp_path_factory, count, window, batch, ranks, step, epoch, threads, files, fraction
):
    folder = write_folder(tmp_path_factory.mktemp("w"), "parquet", count, files)
    options = {"schema": DECLARATION, "shuffle_window": window, "test_fraction": fraction}
    splits = open_source("parquet", folder, threads=threads, **options)
    source = splits.train
    whole = order_of(source, epoch)
    assert sorted(whole) == list(range(count - round(count * fraction)))
    if splits.test is not None:
        assert sorted(whole + order_of(splits.test)) == list(range(count))
    readers = [
        source.batches(batch, rank=rank, num_ranks=ranks, start=Position(epoch, step))
        for rank in range(ranks)
    ]
    rest = [row for blocks in zip(*readers, strict=True) for b in blocks for row in b.key.tolist()]
    assert rest == whole[step * batch :]


def test_left_alone_readers_end_their_threads(tmp_path, kind):
    import threading

    folder = write_folder(tmp_path, kind, 120)
    source = open_source(kind, folder, schema=DECLARATION, shuffle_window=20, threads=2).train
    before = threading.active_count()
    batches = source.batches(5)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_no_more_than_two_windows_are_read_ahead(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, "parquet", 200, files=1)
    source = open_source("parquet", folder, schema=DECLARATION, shuffle_window=20).train
    read = []
    original = TableSource._read_piece
    monkeypatch.setattr(
        TableSource, "_read_piece", lambda self, piece: read.append(piece) or original(self, piece)
    )
    batches = source.batches(10)
    next(batches)
    # A window is two row groups of ten samples; one window is held and one is coming.
    assert len(read) <= 4
    list(batches)
    assert sorted(read) == list(range(20))


@pytest.mark.parametrize("window", [0, 20])
def test_a_position_is_reached_without_reading_what_is_before_it(window, tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.source.READ_SAMPLES", 20)
    folder = write_folder(tmp_path, "parquet", 200, files=1)
    source = open_source("parquet", folder, schema=DECLARATION, shuffle_window=window).train
    whole = order_of(source)
    read = []
    original = TableSource._read_piece

    def count(self, piece):
        read.append(piece)
        return original(self, piece)

    monkeypatch.setattr(TableSource, "_read_piece", count)
    (batch,) = source.batches(10, start=Position(0, 19))
    assert batch.key.tolist() == whole[190:]
    assert len(read) == 2  # one window of two row groups


def test_a_source_travels_to_another_process(tmp_path, kind):
    folder = write_folder(tmp_path, kind, 50)
    source = open_source(kind, folder, schema=DECLARATION, shuffle_window=20).train
    assert order_of(pickle.loads(pickle.dumps(source))) == order_of(source)


# --- a schema that nobody declared -------------------------------------------------------------------------


def test_an_inferred_schema_reads_the_file(tmp_path, kind):
    folder = write_folder(tmp_path, kind, 200)
    declaration = infer_schema(folder)
    by_name = {field.name: field for field in declaration.fields}
    assert by_name["click"] == Label("click")
    price = by_name["price"]
    assert price == Number("price", missing=0.0, transform="log1p", mean=price.mean, std=price.std)
    assert price.std not in (None, 1) and by_name["price_missing"].transform == "is_missing"
    assert by_name["city"] == Category("city", dtype="text")
    assert by_name["user"] == Category("user", dtype="integer")
    assert by_name["tags"] == Bag("tags", dtype="text")
    assert isinstance(by_name["weight"], Number) and by_name["weight"].std != 1
    source = open_source(kind, folder, schema=declaration).train
    assert source.file_schema == declaration
    assert sum(batch.size for batch in source.batches(64)) == 200
    assert open_source(kind, folder).train.file_schema == declaration


def test_integers_are_categories_unless_they_are_nearly_all_different(tmp_path):
    n = 1200
    views = [i * i for i in range(n)]
    columns = {"y": [0.0, 1.0] * (n // 2), "views": views, "item_id": [i // 2 for i in range(n)]}
    columns |= {"day": [i % 7 for i in range(n)], "vector": [[1.0, 2.0]] * n}
    table = pa.table(columns | {"span": pa.array([0] * n, pa.duration("s"))})
    pq.write_table(table, tmp_path / "a.parquet")
    kinds = {field.name: type(field) for field in infer_schema(tmp_path).fields}
    assert kinds == {"y": Label, "views": Number, "item_id": Category, "day": Category}


@pytest.mark.parametrize(
    ("columns", "label", "message"),
    [
        ({"a": [1.0]}, None, "no column named label, click"),
        ({"a": [1.0], "bought": [1]}, "bougt", "did you mean 'bought'"),
        ({"a": [1.0], "rating": [1, 5, 3]}, "rating", "at_least: 3"),
        ({"a": [1.0], "label": ["yes"]}, None, "got string as the label"),
        ({"label": [1.0]}, None, "nothing that a model can read"),
    ],
)
def test_what_cannot_be_inferred_is_said(columns, label, message, tmp_path):
    size = max(map(len, columns.values()))
    table = pa.table({name: (values * size)[:size] for name, values in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError) as caught:
        infer_schema(tmp_path, label)
    assert message in str(caught.value)


def test_lasting_options_open_the_same_data(tmp_path, kind, monkeypatch):
    one, two = cut(samples(60), 2)
    train = WRITE[kind](tmp_path / f"a.{kind}", one)
    WRITE[kind](tmp_path / f"b.{kind}", two)
    monkeypatch.chdir(tmp_path)
    options = {"label": "click", "test": f"b.{kind}", "shuffle_window": 20}
    splits = open_source(kind, train, **options)
    lasting = build_portable_options(options, splits)
    assert "label" not in lasting and lasting["shuffle_window"] == 20
    monkeypatch.chdir("/")
    again = open_source(kind, train, **lasting)
    assert again.train.file_schema == splits.train.file_schema
    assert build_portable_options(lasting, again) == lasting
    assert again.test.num_samples == len(two)
    synthetic = open_source("synthetic", num_train=5)
    assert build_portable_options({"num_train": 5}, synthetic) == {"num_train": 5}


def test_files_without_labels_are_read_as_inputs(tmp_path, kind):
    rows = samples(20)
    full = WRITE[kind](tmp_path / f"a.{kind}", rows)
    declaration = open_source(kind, full, schema=DECLARATION).train.file_schema
    inputs = declaration.inputs()
    (batch,) = open_source(kind, full, schema=inputs).train.batches(99)
    assert batch.label is None and batch.sample_weight is None
    check(batch, inputs, rows)


def test_a_kind_that_its_name_does_not_say(tmp_path):
    (tmp_path / "data.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"--data csv or --data arrow or --data parquet"):
        detect_file_format(tmp_path / "data.bin")
    with pytest.raises(DataError, match="without a file that ends in"):
        detect_file_format(tmp_path)


def test_a_label_may_be_a_word(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("answer,x\nyes,1\n no ,2\n,3\n")
    schema = [Label("answer", positive="yes", missing="unknown"), Number("x", std=1.0)]
    (batch,) = open_source("csv", path, schema=schema).train.batches(9)
    torch.testing.assert_close(
        batch.label.flatten(), torch.tensor([1, 0, math.nan]), equal_nan=True
    )
    with pytest.raises(ConfigError, match="one of at_least and positive"):
        Label("answer", positive="yes", at_least=1.0)


def test_inferred_ids_lose_nothing(tmp_path):
    """Leading zeros and integers of 20 digits are texts; integers that pandas wrote as floats are integers."""
    path = tmp_path / "a.csv"
    path.write_text(f"label,zip,user_id,big\n1,00501,3.0,{10**20}\n0,501,4.0,5\n1,7,,7\n")
    results = {f.name: f for f in infer_schema(path).fields}
    assert [results[name].dtype for name in ("zip", "user_id", "big")] == [
        "text",
        "integer",
        "text",
    ]
    (batch,) = open_source("csv", path).train.batches(9)
    assert len(set(batch.ids["zip"].values.tolist())) == 3
    assert batch.ids["user_id"].values.tolist() == [3, 4, MISSING_ID]


# --- numbers: scale and missing values -----------------------------------------------------------------------


def write_prices(path, kind, prices):
    if kind == "csv":
        lines = [f"{i % 2},{'' if p is None else p}" for i, p in enumerate(prices)]
        path.write_text("label,price\n" + "\n".join(lines) + "\n")
    else:
        labels = [i % 2 for i in range(len(prices))]
        pq.write_table(pa.table({"label": labels, "price": prices}), path)
    return path


@pytest.mark.parametrize("transform", [None, "log1p"])
def test_a_declared_number_is_standardised_as_an_inferred_one(transform, tmp_path, kind):
    """The training rows alone decide; a missing value is the mean."""
    scale = 1000.0 if transform else 1.0
    prices = [None if i % 7 == 3 else scale * (0.25 + i % 9) for i in range(100)]
    prices[80:] = [1e6] * 20  # held out
    path = write_prices(tmp_path / f"a.{kind}", kind, prices)
    declared = [Label("label"), Number("price", missing=0.0, transform=transform)]
    source = open_source(kind, path, schema=declared, test_fraction=0.2).train
    x = np.array([np.nan if p is None else p for p in prices[:80]])
    x = np.log1p(x) if transform else x
    expected = np.nan_to_num((x - np.nanmean(x)) / np.nanstd(x))
    (batch,) = source.batches(80)
    assert batch.dense[:, 0].numpy() == pytest.approx(expected, abs=2e-3)
    again = open_source(kind, path, schema=source.file_schema.to_dict()).train
    assert again.file_schema == source.file_schema
    as_it_is = [Number("price", missing=0.0, transform=transform, std=1.0)]
    (batch,) = open_source(kind, path, schema=as_it_is, test_fraction=0.2).train.batches(80)
    assert batch.dense[:, 0].tolist() == np.nan_to_num(x).astype(np.float32).tolist()


def test_a_model_sees_that_a_number_is_missing(tmp_path, kind):
    path = write_prices(tmp_path / f"a.{kind}", kind, [1.5, None, 3.25, 4.5])
    source = open_source(kind, path).train
    (batch,) = source.batches(9)
    assert source.schema.dense == ("price", "price_missing")
    assert batch.dense[:, 1].tolist() == [0.0, 1.0, 0.0, 0.0] and batch.dense[1, 0] == 0.0
    encoder = _build_file_encoder(kind, {"schema": source.file_schema.to_dict()})
    assert encoder.encode([{"price": None}]).dense.tolist() == [[0.0, 1.0]]
    assert encoder.encode([{"price": 1.5}]).dense[0].tolist() == batch.dense[0].tolist()
    with pytest.raises(ConfigError, match="got transform='is_missing'; it reads no value"):
        Number("price", transform="is_missing", missing=0.0)


@pytest.mark.parametrize("prices", [[5.0, 5.0], [None, None], [1e300, -1e300], [1e9, 1e9 + 1]])
def test_numbers_of_any_spread_have_a_finite_scale(prices, tmp_path):
    path = write_prices(tmp_path / "a.parquet", "parquet", pa.array(prices, pa.float64()))
    schema = [Number("price", missing=0.0)]
    source = open_source("parquet", path, schema=schema).train
    (field,) = source.file_schema.numbers
    assert math.isfinite(field.mean) and 0 < field.std < math.inf
    if prices[0] != 1e300:
        (batch,) = source.batches(9)
        assert batch.dense.flatten().tolist() == ([-1.0, 1.0] if prices[0] == 1e9 else [0.0, 0.0])
