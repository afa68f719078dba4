"""libsvm, libfm, libffm and TFRecord files, read as the tables that they are."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import random
import struct
import subprocess
import sys
from dataclasses import fields
from inspect import signature

import numpy as np
import pyarrow as pa
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.data import SOURCES, infer_schema, open_source
from colonnade.data.tabular import times
from colonnade.data.tabular.fields import Bag, Category, Group, Key, Label, Number, Sequence
from colonnade.data.tabular.formats import FORMATS, TableFormat, ValueRules
from colonnade.data.tabular.hashing import hash_text
from colonnade.data.tabular.source import ReaderOptions
from colonnade.data.tabular.tables import detect_file_format, read_first_rows_and_schema
from colonnade.data.tabular.tfrecord import masked_crc, parse_example
from colonnade.errors import ColonnadeError, ConfigError, DataError


def read_all(path, **options):
    (batch,) = open_source(detect_file_format(path), path, **options).train.batches(10**6)
    return batch


def fault(path, **options) -> str:
    """Return the one line that opening and reading end in."""
    with pytest.raises(ColonnadeError) as caught:
        list(open_source(detect_file_format(path), path, **options).train.batches(7))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900, text
    return text


def bags(ids):
    """Return the ids of each sample, with weights where there are any."""
    values = ids.values.tolist()
    if ids.weights is not None:
        values = list(zip(values, ids.weights.tolist(), strict=True))
    return [values[a:b] for a, b in itertools.pairwise(ids.offsets.tolist())]


# --- libsvm ------------------------------------------------------------------------------------------------


def test_libsvm_is_a_bag_with_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.libsvm.BLOCK_BYTES", 20)
    path = tmp_path / "a.libsvm"
    path.write_text("+1 1:0.5 7:1 9:2.5\n-1  2:1\t7:1 # a comment\r\n-1\n+1 18446744:1e-3")
    assert infer_schema(path).fields == (
        Label("label", at_least=1.0),
        Bag("features", dtype="integer", weights="values"),
    )
    batch = read_all(path)
    assert bags(batch.ids["features"]) == [
        [(1, 0.5), (7, 1.0), (9, 2.5)], [(2, 1.0), (7, 1.0)], [], [(18446744, np.float32(1e-3))],
    ]  # fmt: skip
    assert batch.label.flatten().tolist() == [1, 0, 0, 1]
    shuffled = open_source("libsvm", path, shuffle_window=3).train
    assert pickle.loads(pickle.dumps(shuffled)).num_samples == 4
    output = [bag for part in shuffled.batches(2) for bag in bags(part.ids["features"])]
    assert sorted(output) == sorted(bags(batch.ids["features"]))


def test_libfm_of_ones_has_no_weights(tmp_path):
    path = tmp_path / "a.libfm"
    path.write_text("5 0:1 3:1\n3 1:1 2:1\n4 1:1 3:1\n")
    with pytest.raises(ConfigError, match=r"at_least: 4"):
        open_source("libsvm", path)
    schema = {"label": {"type": "label", "at_least": 4.0}, "features": {"type": "bag"}}
    batch = read_all(path, schema={"fields": schema})
    assert batch.ids["features"].weights is None
    assert bags(batch.ids["features"]) == [[0, 3], [1, 2], [1, 3]]
    path.write_text("1 0:1 3:1\n0 1:1 2:1\n0 1:1 2:0.5\n")
    message = fault(path, schema={"fields": schema})
    assert "line 3, column features: got '2:0.5', wanted the value 1" in message
    schema["features"]["weights"] = "values"
    assert bags(read_all(path, schema={"fields": schema}).ids["features"])[2] == [
        (1, 1.0),
        (2, 0.5),
    ]


def test_libffm_is_a_bag_of_each_field(tmp_path):
    path = tmp_path / "a.ffm"
    path.write_text("1 0:10:1 2:30:1 2:31:1\n0 2:32:1 0:11:1\n")
    assert [field.name for field in infer_schema(path).fields] == ["label", "field_0", "field_2"]
    schema = open_source("libsvm", path).train.file_schema
    batch = read_all(path)
    assert bags(batch.ids["field_0"]) == [[10], [11]]
    assert bags(batch.ids["field_2"]) == [[30, 31], [32]]
    path.write_text("0 0:12:1\n")  # field 2 is absent from this file
    assert bags(read_all(path, schema=schema).ids["field_2"]) == [[]]
    path.write_text("0 0:12:3\n0 4:1:1\n")
    fields = infer_schema(path).fields
    assert fields[1] == Bag("field_0", dtype="integer", weights="values_0")


def test_a_query_of_libsvm_is_the_group(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.libsvm.BLOCK_BYTES", 30)
    path = tmp_path / "a.libsvm"
    path.write_text("1 qid:7 1:0.5 3:1\n0\tqid:7\n0  qid:900 2:1 # qid:3\n1 qid:12 1:1")
    group = Group("qid", dtype="integer")
    bag = Bag("features", dtype="integer", weights="values")
    assert infer_schema(path).fields == (Label("label"), group, bag)
    batch = read_all(path)
    assert batch.group.tolist() == [7, 7, 900, 12]
    assert [[i for i, _ in bag] for bag in bags(batch.ids["features"])] == [[1, 3], [], [2], [1]]
    path.write_text("1 qid:7 0:10:1\n0 qid:8 2:30:1\n")
    assert read_all(path).group.tolist() == [7, 8]
    assert bags(read_all(path).ids["field_2"]) == [[], [30]]


LIBSVM = {
    "no value": ("1 1:1\n1 2\n", "line 2, column features: got '2', wanted index:value"),
    "three parts": ("1 1:1\n1 2:3:4\n", "line 2, column features: got '2:3:4', wanted index:value"),
    "two parts of libffm": ("1 1:1:1\n1 2:3\n", "line 2, column features: got '2:3', wanted field:index"),
    "an index in words": ("1 1:1\n1 x:1\n", "line 2, column features: got 'x:1', wanted an integer"),
    "a query in a later line": ("1 1:1\n1 qid:1 1:1\n", "line 2, column features: got 'qid:1', wanted an integer"),
    "no query in a later line": ("1 qid:1 1:1\n1 1:1\n", "line 2, column qid: got '1 1:1', wanted qid:NUMBER after"),
    "a query in words": ("1 qid:x 1:1\n", "line 1, column qid: got '1 qid:x 1:1', wanted qid:NUMBER after the label"),
    "a value in words": ("1 1:1\n1 2:x\n", "line 2, column features: got '2:x', wanted a number"),
    "an infinite value": ("1 1:2\n1 2:inf\n", "line 2, column values: got inf, wanted a finite weight"),
    "an empty line": ("1 1:1\n\n1 1:1\n", "line 2, column label: got an empty line"),
    "a label in words": ("yes 1:1\n", "column label: got string as the label"),
    "no text": ("1 1:1\n1 2:\xff\n", "line 2, column features: got"),
    "empty": ("", "got an empty file"),
    "binary": ("\0\1\2", "binary file"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBSVM)
def test_libsvm_at_fault(name, tmp_path):
    content, text = LIBSVM[name]
    path = tmp_path / "a.libsvm"
    path.write_bytes(content.encode("latin1"))
    schema = {"label": "label", "features": {"type": "bag", "weights": "values"}}
    is_inferred = name in ("a label in words",) or "libffm" in name
    options = {} if is_inferred else {"schema": {"fields": schema}}
    assert str(path) in fault(path, **options) and text in fault(path, **options)


@settings(max_examples=examples(20, 40), deadline=None)
@given(text=st.text(st.sampled_from("01 :#-.\nx\t"), max_size=40))
def test_any_libsvm_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("svm") / "a.libsvm"
    path.write_text(text)
    schema = {"label": "label", "features": {"type": "bag", "weights": "values"}}
    try:
        batch = read_all(path, schema={"fields": schema})
    except (DataError, ConfigError) as error:
        assert str(path) in str(error)
    else:
        assert batch.size == len(text.removesuffix("\n").split("\n"))


# --- TFRecord ----------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value %= 1 << 64
    result = b""
    while value > 127:
        result += bytes([value & 127 | 128])
        value >>= 7
    return result + bytes([value])


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features) -> bytes:
    """Serialize as TensorFlow does; a feature is a list of texts, floats or integers."""
    entries = b""
    for name, values in features.items():
        if values and isinstance(values[0], str):
            number, data = 1, b"".join(message(1, value.encode()) for value in values)
        elif values and isinstance(values[0], float):
            number, data = 2, message(1, struct.pack(f"<{len(values)}f", *values))
        else:
            number, data = 3, message(1, b"".join(map(varint, values)))
        entries += message(1, message(1, name.encode()) + message(2, message(number, data)))
    return message(1, entries)


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def write_records(path, rows):
    path.write_bytes(b"".join(record(example(row)) for row in rows))
    return path


# What protobuf itself writes.
REFERENCE = bytes.fromhex(
    "0a660a130a0463697479120b0a090a07c581c3b364c5ba0a200a0369647312191a170a15f9ffffffffffffffff01ac0280808080808080"
    "80400a0e0a056c6162656c12051a030a01010a0a0a046e6f6e6512021a000a110a0178120c120a0a080000003f000000c0"
)


def test_an_example_is_what_protobuf_writes():
    assert parse_example(REFERENCE) == {
        "city": ("bytes", ["Łódź".encode()]),
        "ids": ("integers", [-7, 300, 2**62]),
        "label": ("integers", [1]),
        "none": ("integers", []),
        "x": ("floats", [0.5, -2.0]),
    }
    unpacked = varint(1 << 3) + varint(5) + varint(1 << 3) + varint(6)
    feature = message(1, message(1, b"a") + message(2, message(3, unpacked)))
    assert parse_example(message(1, feature)) == {"a": ("integers", [5, 6])}


def test_the_checksum_is_masked_crc32c():
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32


ROWS = [
    {"label": [i % 2], "user": [100 + i % 5], "x": [i + 0.5], "city": [f"c{i % 3}"],
     "tags": ["a", "b"][: i % 3], "items": list(range(i % 4)), "rare": [1.0] if i % 2 else []}
    for i in range(40)
]  # fmt: skip


def test_a_tfrecord_is_a_table(tmp_path, monkeypatch):
    path = write_records(tmp_path / "a.tfrecord", ROWS)
    fields = {field.name: field for field in infer_schema(path).fields}
    assert fields["user"] == Category("user", dtype="integer")
    assert fields["items"] == Bag("items", dtype="integer")
    assert fields["tags"] == Bag("tags", dtype="text") and isinstance(fields["x"], Number)
    monkeypatch.setattr("colonnade.data.tabular.tfrecord.BLOCK_BYTES", 300)
    schema = [
        Label("label"), Number("x", std=1), Number("rare", missing=-1.0, std=1), Category("user"), Sequence("items"),
        Bag("tags"), Key("city"),
    ]  # fmt: skip
    source = open_source("tfrecord", path, schema=schema, shuffle_window=0).train
    assert len(source.files.lengths) > 3
    (batch,) = pickle.loads(pickle.dumps(source)).batches(99)
    assert batch.dense.tolist() == [[i + 0.5, 1.0 if i % 2 else -1.0] for i in range(40)]
    assert batch.ids["user"].values.tolist() == [100 + i % 5 for i in range(40)]
    assert bags(batch.ids["items"]) == [list(range(i % 4)) for i in range(40)]
    assert batch.key.tolist() == [f"c{i % 3}" for i in range(40)]
    assert [len(bag) for bag in bags(batch.ids["tags"])] == [min(i % 3, 2) for i in range(40)]

    assert bags(batch.ids["tags"])[2] == [hash_text(b"a"), hash_text(b"b")]


def test_a_list_of_numbers_beside_a_list_of_ids_has_its_weights(tmp_path):
    rows = [
        {"label": [i % 2], "ids": list(range(i % 4)), "values": [0.5 * k for k in range(i % 4)],
         "other": [1.0] * (i % 3), "tags": ["a", "b", "c"][: i % 4 and 2], "scores": [2.0] * (i % 4 and 2)}
        for i in range(20)
    ]  # fmt: skip
    path = write_records(tmp_path / "a.tfrecord", rows)
    splits = open_source("tfrecord", path)
    fields = {field.name: field for field in splits.train.file_schema.fields}
    assert fields["ids"] == Bag("ids", dtype="integer", weights="values")
    assert fields["tags"] == Bag("tags", dtype="text", weights="scores")
    assert "values has the weights of ids; scores has the weights of tags" in splits.notes[0]
    assert "left out: other (no field reads list<" in splits.notes[0]
    (batch,) = splits.train.batches(20)
    assert bags(batch.ids["ids"])[3] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    rows[7]["values"] = rows[7]["values"][1:]
    write_records(path, rows)
    assert infer_schema(path).fields[1] == Bag("ids", dtype="integer")
    for row in rows:
        row |= {"values": [0.5] * len(row["ids"]), "others": list(row["ids"])}
    write_records(path, rows)  # of which ids?
    assert {field.weights for field in infer_schema(path).fields if isinstance(field, Bag)} == {
        "",
        "scores",
    }


class Latin1(str):
    """Text that a record holds in another encoding than UTF-8."""

    def encode(self, *_) -> bytes:
        return super().encode("latin-1")


def test_bytes_that_are_no_text_are_ids_where_a_schema_says_so(tmp_path):
    rows = [{"label": [i % 2], "user": [i % 3], "city": [Latin1("Malm\xf6")]} for i in range(9)]
    path = write_records(tmp_path / "a.tfrecord", rows)
    head = read_first_rows_and_schema(path)
    assert head.left_out == {
        "city": "bytes that are no UTF-8 text; declare a category to read them as ids"
    }
    schema = [Label("label"), Category("city")]
    (batch,) = open_source("tfrecord", path, schema=schema).train.batches(9)
    assert batch.ids["city"].values.tolist() == [hash_text(b"Malm\xf6")] * 9


def test_a_tfrecord_at_fault(tmp_path):
    path = write_records(tmp_path / "a.tfrecord", ROWS)
    whole = path.read_bytes()
    schema = {"schema": [Label("label"), Category("user"), Number("x")]}
    path.write_bytes(whole[:-3])
    assert f"{path}, record 39: got 3 bytes less" in fault(path, **schema)
    size = len(record(example(ROWS[0])))
    for at, message in (
        (3, "record 0: got a length that does not fit its checksum"),
        (size + 2, "record 1: got a length that does not fit its checksum"),
        (size + 20, "record 1, column -: got bytes that do not fit their checksum"),
    ):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert f"{path}, {message}" in fault(path, **schema)
    path.write_bytes(gzip.compress(whole))
    assert "got a gzip file" in fault(path, **schema)
    path.write_bytes(b"")
    assert "got no row" in fault(path)
    path.write_bytes(record(b"\xff\xff"))
    assert "record 0, column -: got no tf.train.Example (" in fault(path)
    other = [*ROWS[:2], {"label": [1], "user": ["x"], "x": [1.0]}]
    message = fault(write_records(path, other), **schema)
    assert (
        "record 2, column user: got bytes, wanted integers, as in the first records" in message
        or ("got text" in message)
    )
    message = fault(write_records(path, [{"label": [1], "user": [1, 2], "x": [1.0]}]), **schema)
    assert "column user: got list<item: int64>, wanted one value per row" in message
    message = fault(write_records(path, [{"label": [1], "x": [1.0]}]), **schema)
    assert "got no column 'user'" in message
    message = fault(write_records(path, [*ROWS[:3], {"user": [1], "x": [1.0]}]), **schema)
    assert "record 3, column label: got nothing, wanted a label" in message


def test_a_tfrecord_with_flipped_bits_is_refused(tmp_path):
    whole = write_records(tmp_path / "a.tfrecord", ROWS[:5]).read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        at = rng.randrange(len(whole))
        changed = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        (tmp_path / "a.tfrecord").write_bytes(changed)
        assert str(tmp_path) in fault(tmp_path / "a.tfrecord")


@settings(max_examples=examples(20, 60), deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes_are_an_example_or_refused(data):
    try:
        parse_example(data)
    except ValueError as error:
        assert "\n" not in str(error)


def test_a_libsvm_file_trains_and_scores(tmp_path):
    """End to end, from the command line."""
    from colonnade.cli.app import run_command

    rng = random.Random(0)
    lines = []
    for _ in range(300):
        ids = rng.sample(range(50), 3)
        lines.append(f"{int(ids[0] % 2)} " + " ".join(f"{i}:{rng.random():.2f}" for i in ids))
    path = tmp_path / "a.libsvm"
    path.write_text("\n".join(lines) + "\n")
    folder = str(tmp_path / "run")
    size = ("--set", "train.batch_size=50", "--set", "model.dim=4")
    assert (
        run_command(["train", "--data", "libsvm", "--path", str(path), "--run", folder, *size]) == 0
    )
    scores = tmp_path / "scores.csv"
    assert run_command(["predict", folder, "--path", str(path), "--output", str(scores)]) == 0
    assert len(scores.read_text().splitlines()) == 301


@pytest.mark.parametrize("unit", times.TICKS)
def test_times_end_with_the_year_9999(unit):
    ticks = times.TICKS[unit]
    for second, inside in ((times.FIRST_SECOND, 0), (times.END_SECOND, -1)):
        last = second * ticks + inside
        if abs(last) < 2**63:
            micros = times.convert_to_microseconds(pa.array([last]), unit)[0].tolist()
            assert micros == [last * times.MICROS // ticks]
            with pytest.raises(pa.ArrowInvalid, match="years 1 to 9999"):
                times.convert_to_microseconds(pa.array([last + (1 if inside else -1)]), unit)
        with pytest.raises(pa.ArrowInvalid, match="years 1 to 9999"):
            times.convert_to_microseconds(pa.array([second * 1.001 * ticks]), unit)


# --- the table of formats -----------------------------------------------------------------------------------


def test_every_source_is_opened_by_a_function_of_its_name():
    assert {name: opener.__name__ for name, opener in SOURCES.items()} == {
        name: f"open_{name}" for name in SOURCES
    }


@pytest.mark.parametrize("name", FORMATS)
def test_readers_of_all_formats_take_the_same_options(name):
    shared = {field.name: field.default for field in fields(ReaderOptions)}
    options = signature(SOURCES[name]).parameters
    assert {option: options[option].default for option in shared} == shared
    with pytest.raises(TypeError, match="shuffle_windows"):
        SOURCES[name]("file", shuffle_windows=3)


USE_NEW_FORMAT = """
import json, sys, types
from pathlib import Path
from colonnade.data.tabular import formats

name = "colonnade.data.tabular.columnar"
module = sys.modules[name] = types.ModuleType(name)
exec(Path(sys.argv[1]).read_text(), module.__dict__)
formats.FORMATS["columnar"] = formats.TableFormat(
    "columnar", (".columnar",), formats.ValueRules(number_pattern=formats.NUMBER)
)
from colonnade.cli.app import run_command
for command in json.loads(sys.argv[2]):
    assert run_command(command) == 0, command
"""
NEW_READER = """
from colonnade.data.tabular.csv import open_csv_file
from colonnade.data.tabular.opening import build_opener

def open_columnar_file(path):
    return open_csv_file(path, delimiter=";")

open_columnar = build_opener("columnar", open_columnar_file, "Open files with semicolons.")
"""


@pytest.mark.slow
def test_a_format_needs_its_reader_and_one_line_in_the_table(tmp_path):
    """Inspect, train and score files of a new format with nothing else changed; `--help` names it."""
    path = tmp_path / "rows.columnar"
    rows = [f"{i % 2};{'ab'[i % 2]};{i % 5}" for i in range(60)]
    path.write_text("\n".join(["label;kind;item_id", *rows]) + "\n")
    reader = tmp_path / "reader.py"
    reader.write_text(NEW_READER)
    run = str(tmp_path / "run")
    scores = tmp_path / "scores.csv"
    commands = [
        ["train", "--help"],
        ["settings", "data.options.columnar"],
        ["inspect", str(path)],
        ["train", "--data", "columnar", "--path", str(path), "--run", run, "--epochs", "1"],
        ["predict", run, "--path", str(path), "--output", str(scores)],
    ]
    done = subprocess.run(
        [sys.executable, "-c", USE_NEW_FORMAT, str(reader), json.dumps(commands)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert len(scores.read_text().splitlines()) == 61
    assert ", columnar," in done.stdout and "validation_fraction" in done.stdout


def test_a_format_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "colonnade.data.tabular.missing", None)
    format = TableFormat("missing", (".missing",), ValueRules(), extra="missing-reader")
    with pytest.raises(ConfigError, match=r"pip install 'colonnade\[missing-reader\]'"):
        _ = format.open
