"""Raw records give the batches that a file with the same rows gives, to the bit."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from criteo_files import criteo_lines, write_criteo
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_data_formats import write_records

from colonnade import Batch, Ids, Mesh, Predictor, build_encoder
from colonnade.config.run import build_config
from colonnade.data import Column, Schema, open_source
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
    Time,
    Weight,
)
from colonnade.errors import DataError
from colonnade.run.run import load_run_config, open_run

TEXTS = [
    "Oslo",
    "Łódź",
    "東京 ",
    " a",
    'with, "all"',
    "two\nlines",
    "e\u0301",
    "\u202eabc",
    "🦊" * 9,
    "null",
    "0",
]
DECLARATION = FileSchema(
    (
        Label("click"),
        Number("price", missing=0.5, transform="log1p", std=1.0),
        Number("score", missing=-1.0, clip=(-5.0, 5.0), mean=0.3, std=1.7),
        Number("days", column="time", days_before="2024-06-01T00:00:00", missing=0.0, std=1.0),
        Category("city"),
        Category("city_rows", column="city", rows=97, namespace=True),
        Category("known", column="city", vocabulary=("Oslo", "東京 "), unknown_rows=3),
        Category("user", dtype="integer"),
        Category("shop", cardinality=50),
        Bag("tags", max_length=3),
        Bag("weighted", dtype="integer", weights="amounts"),
        Sequence("history", dtype="integer", cardinality=100, max_length=8),
        Bucket("age", boundaries=(18, 30, 65)),
        Time("hour", column="time", part="hour"),
        Time("weekday", column="time", part="weekday"),
        Cross("city_age", of=("city", "age"), rows=50),
        Cross("user_hour", of=("user", "hour")),
        Weight("weight"),
        Group("group", column="row", dtype="integer"),
        Key("row", dtype="integer"),
    )
)
TYPES = {
    "click": pa.int8(), "price": pa.float64(), "score": pa.float64(), "age": pa.int32(), "city": pa.string(),
    "user": pa.int64(), "shop": pa.int64(), "tags": pa.list_(pa.string()), "history": pa.list_(pa.int64()),
    "weighted": pa.list_(pa.int64()), "amounts": pa.list_(pa.float64()), "time": pa.string(), "weight": pa.float32(),
    "row": pa.int64(),
}  # fmt: skip


def make_time(rng: random.Random) -> str:
    moment = datetime(2024, 1, 1) + timedelta(
        seconds=rng.randrange(10**7), microseconds=rng.randrange(10**6)
    )
    hours = rng.choice([None, 0, -8, 5.5, 14])
    zone = None if hours is None else timezone(timedelta(hours=hours))
    return rng.choice(
        [moment.replace(tzinfo=zone).isoformat(), str(rng.randrange(2 * 10**9)), "1700000000.25"]
    )


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of every kind, None where missing: unseen ids, long lists, odd texts, times with zones."""
    rng = random.Random(seed)
    rows = []
    for row in range(count):
        weighted = [rng.randrange(-(2**63), 2**63) for _ in range(rng.choice([0, 1, 3, 200]))]
        rows.append({
            "click": rng.randrange(2),
            "price": rng.choice([None, 0.5, 1e-300, -3.0, rng.random() * 10**6]),
            "score": rng.choice([None, 0.1, rng.gauss(0, 9)]),
            "age": rng.choice([None, 18, rng.randrange(90)]),
            "city": rng.choice([None, *TEXTS, f"unseen {rng.random()}"]),
            "user": rng.choice([None, 7, rng.randrange(-(2**63), 2**63)]),
            "shop": rng.choice([None, rng.randrange(50)]),
            "tags": [rng.choice("abcdef") for _ in range(rng.choice([0, 2, 90]))],
            "history": [rng.randrange(100) for _ in range(rng.randrange(30))],
            "weighted": weighted,
            "amounts": [rng.random() for _ in weighted],
            "time": rng.choice([None, make_time(rng)]),
            "weight": rng.randrange(1, 5) / 4,
            "row": row,
        })  # fmt: skip
    return rows


def characters(value: Any) -> str:
    """A value's characters in a CSV file."""
    if isinstance(value, list):
        return "|".join(map(characters, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else value if isinstance(value, str) else repr(value)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([characters(value) for value in row.values()] for row in rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(
        pa.table({name: pa.array([row[name] for row in rows], TYPES[name]) for name in rows[0]}),
        path,
    )
    return path


def encoder_of(kind: str, schema: Any, **options: Any):
    declared = schema.to_dict() if isinstance(schema, FileSchema) else schema
    config = build_config({"data": {"name": kind, "options": {"schema": declared, **options}}})
    return build_encoder(config, Schema((), ()))


def with_nulls(encoder, record: dict[str, Any]) -> dict[str, Any]:
    """A record with null in each column that it does not have."""
    return {column: None for column in encoder.columns} | record


def assert_equal(batch: Batch, wanted: Batch) -> None:
    assert batch.size == wanted.size and list(batch.ids) == list(wanted.ids)
    assert torch.equal(batch.dense, wanted.dense) and batch.dense.dtype == torch.float32
    for name, ids in wanted.ids.items():
        for got, value in zip((batch.ids[name].values, batch.ids[name].offsets, batch.ids[name].weights),
                              (ids.values, ids.offsets, ids.weights), strict=True):  # fmt: skip
            assert (got is None) is (value is None), name
            assert got is None or (got.dtype == value.dtype and torch.equal(got, value)), name


def in_json(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(json.dumps(rows))


@pytest.mark.parametrize(("kind", "write"), [("csv", write_csv), ("parquet", write_parquet)])
def test_records_give_the_batches_of_a_file_with_these_rows(kind, write, tmp_path):
    rows = make_rows(1000)
    source = open_source(kind, write(tmp_path / f"rows.{kind}", rows), schema=DECLARATION).train
    encoder = encoder_of(kind, source.file_schema)
    for step, wanted in enumerate(source.batches(250)):
        records = in_json(rows[250 * step : 250 * (step + 1)])
        assert_equal(encoder.encode(records), wanted)
        # As JSON has no lists of text, the lists may also be texts with their separator.
        for record in records:
            for name in ("tags", "history", "weighted", "amounts"):
                record[name] = characters(record[name])
            record.update({k: v for k, v in record.items() if v is not None})
        assert_equal(encoder.encode(records), wanted)
        bare = [
            {k: v for k, v in r.items() if v is not None and k not in ("click", "weight", "row")}
            for r in records
        ]
        incomplete = next(row for row, record in enumerate(bare) if len(record) < 11)
        with pytest.raises(
            DataError, match=f"^record {incomplete}: got no column .*null is a missing"
        ):
            encoder.encode(bare)
        bare = [with_nulls(encoder, record) for record in bare]
        assert_equal(encoder.encode(bare), wanted)
        one_by_one = [encoder.encode([record]) for record in bare[:40]]
        assert torch.equal(torch.cat([b.dense for b in one_by_one]), wanted.dense[:40])
        for name, ids in wanted.ids.items():
            values = torch.cat([b.ids[name].values for b in one_by_one])
            assert torch.equal(values, ids.values[: len(values)])


@pytest.mark.parametrize("null_values", [[], ["null"]])
def test_texts_of_a_feature_have_the_ids_of_records(null_values):
    encoder = encoder_of("csv", DECLARATION, null_values=null_values)
    assert set(encoder.text_fields) == {"city", "city_rows", "known", "tags"}
    texts = [*TEXTS, "", "Oslo"]
    others = dict.fromkeys(encoder.columns) | {"price": 1.0, "shop": 3}
    batch = encoder.encode([{**others, "city": text} for text in texts])
    for name in ("city", "city_rows", "known"):
        assert encoder.encode_texts(name, texts).tolist() == batch.ids[name].values.tolist()
    batch = encoder.encode([{**others, "tags": [text]} for text in TEXTS[:9]])
    assert encoder.encode_texts("tags", TEXTS[:9]).tolist() == batch.ids["tags"].values.tolist()
    strict = encoder_of(
        "csv", FileSchema((Category("city", vocabulary=("Oslo",), unknown_rows=0),))
    )
    with pytest.raises(DataError, match="input 'city', element 1, column city: got 'Rom', wanted"):
        strict.encode_texts("city", ["Oslo", "Rom"])


@pytest.mark.parametrize(("kind", "write"), [("csv", write_csv), ("parquet", write_parquet)])
def test_records_score_as_predict_and_evaluate_score_a_file(kind, write, tmp_path, colonnade):
    rows = make_rows(1000, seed=5)
    path = write(tmp_path / f"rows.{kind}", make_rows(400))
    options = {"schema": DECLARATION.to_dict()}
    config = build_config({
        "data": {"name": kind, "path": str(path), "options": options}, "model": {"name": "dlrm", "dim": 4},
        "train": {"epochs": 1, "batch_size": 100}, "embedding": {"lr": 0.3},
    })  # fmt: skip
    run = open_run(config, Mesh(), tmp_path / "run")
    run.train()
    run.close()
    unseen = write(tmp_path / f"unseen.{kind}", rows)
    source = open_source(kind, unseen, schema=DECLARATION).train
    run = open_run(load_run_config(tmp_path / "run"), Mesh(), tmp_path / "run", read_only=True)
    with torch.no_grad():
        model = run.trainer.model.eval()
        wanted = torch.cat([torch.sigmoid(model(b).double()) for b in source.batches(250)])
    run.close()
    status, _, text = colonnade(
        "predict", tmp_path / "run", "--path", unseen, "--batch-size", "250", "--output", tmp_path / "out.parquet"
    )  # fmt: skip
    assert status == 0, text
    predicted = pq.read_table(tmp_path / "out.parquet")["score"].to_numpy()
    assert np.array_equal(predicted, wanted[:, 0].numpy()) and len(set(predicted)) > 900
    with Predictor.open(tmp_path / "run") as predictor:
        encoder = build_encoder(predictor.config, predictor.schema)
        records = in_json(rows)
        scores = torch.cat(
            [predictor(encoder.encode(records[at : at + 250])) for at in range(0, 1000, 250)]
        )
    assert torch.equal(scores, wanted)


def test_records_of_tfrecord_and_libsvm_files(tmp_path):
    rng = random.Random(3)
    rows = [
        {"x": rng.random(), "n": rng.randrange(9), "id": rng.randrange(-(2**62), 2**62), "city": rng.choice(TEXTS),
         "bag": [rng.randrange(50) for _ in range(rng.choice([0, 1, 5]))]}
        for _ in range(300)
    ]  # fmt: skip
    path = tmp_path / "rows.tfrecord"
    write_records(
        path, [{k: v if isinstance(v, list) else [v] for k, v in row.items()} for row in rows]
    )
    fields = (
        Number("x", mean=0.37, std=1.9),
        Number("n", std=1.0),
        Category("id"),
        Category("city"),
        Bag("bag"),
    )
    source = open_source("tfrecord", path, schema=FileSchema(fields)).train
    (wanted,) = source.batches(300)
    assert_equal(encoder_of("tfrecord", source.file_schema).encode(in_json(rows)), wanted)

    path = tmp_path / "rows.libsvm"
    rows = [{"features": sorted(rng.sample(range(99), rng.randrange(1, 9)))} for _ in range(100)]
    for row in rows:
        row["values"] = [rng.random() for _ in row["features"]]
    path.write_text("".join(
        "1 " + " ".join(f"{i}:{v!r}" for i, v in zip(r["features"], r["values"], strict=True)) + "\n" for r in rows
    ))  # fmt: skip
    fields = (Label("label"), Bag("features", weights="values", rows=1000))
    source = open_source("libsvm", path, schema=FileSchema(fields)).train
    (wanted,) = source.batches(100)
    assert_equal(encoder_of("libsvm", source.file_schema).encode(in_json(rows)), wanted)


def test_records_of_criteo_files(tmp_path):
    write_criteo(tmp_path, 300)
    source = open_source("criteo", tmp_path, test_fraction=0).train
    (wanted,) = source.batches(300)
    encoder = encoder_of("csv", source.file_schema)
    names = [*source.schema.dense, *wanted.ids]
    records = [dict(zip(names, line.split("\t")[1:], strict=True)) for line in criteo_lines(300)]
    assert_equal(encoder.encode(records), wanted)
    typed = [
        with_nulls(encoder, {k: int(v) if k[0] == "I" else v for k, v in record.items() if v})
        for record in records
    ]
    assert_equal(encoder.encode(typed), wanted)


def test_records_of_other_readers_have_the_names_of_the_schema():
    schema = Schema(
        ("a.b", "n"),
        (
            Column("user"),
            Column("item", 9),
            Column("tags", 5, "bag"),
            Column("h", 9, "sequence", table="item"),
        ),
    )
    for config in (None, build_config({"data": {"name": "synthetic"}})):
        encoder = build_encoder(config, schema)
        assert set(encoder.columns) == {"a.b", "n", "user", "item", "tags", "h"}
        batch = encoder.encode(
            [{"a.b": 0.5, "n": 2, "user": -(2**62), "item": "8", "tags": [1, 4], "h": None}]
        )
        wanted = {"user": Ids(torch.tensor([-(2**62)])), "item": Ids(torch.tensor([8])),
                  "tags": Ids(torch.tensor([1, 4]), torch.tensor([0, 2])),
                  "h": Ids(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))}  # fmt: skip
        assert_equal(batch, Batch(1, torch.tensor([[0.5, 2.0]]), wanted))
        good = {"a.b": 0, "n": 0, "user": 1, "item": 1, "tags": [], "h": []}
        for change, message in (
            ({"item": 9}, r"column item: got 9, wanted an id 0 .. 8"),
            ({"user": None}, r"column user: got nothing, wanted an integer"),
            ({"n": None}, r"column n: got nothing, wanted a number"),
            ({"user": "u1"}, r"column user: got 'u1', wanted an integer"),
            ({"user": 1.5}, r"column user: got '1.5', wanted an integer"),
            ({"usr": 1}, r"record 0: got a column 'usr', .*did you mean 'user'"),
        ):
            with pytest.raises(DataError, match=message):
                encoder.encode([{**good, **change}])


def test_a_selection_of_columns():
    schema = Schema(("q", "x"), (Column("user"), Column("item", 9)))
    encoder = build_encoder(None, schema).select(["x", "user"])
    assert encoder.columns == ("user", "x") and "item" in encoder.ignored
    batch = encoder.encode([{"user": 3, "x": 2, "item": "not read"}])
    assert torch.equal(batch.dense, torch.tensor([[0.0, 2.0]])) and list(batch.ids) == ["user"]


def expand(batch: Batch) -> Batch:
    """The batch with the shared features of one sample repeated for each."""
    if batch.size == 1:
        return batch
    n = batch.size

    def repeat(ids: Ids) -> Ids:
        if ids.offsets is None:
            return Ids(ids.values.expand(n).contiguous()) if len(ids.values) == 1 else ids
        if len(ids.offsets) != 2:
            return ids
        weights = None if ids.weights is None else ids.weights.repeat(n)
        return Ids(ids.values.repeat(n), torch.arange(n + 1) * len(ids.values), weights)

    dense = batch.dense.expand(n, -1).contiguous()
    return replace(batch, dense=dense, ids={name: repeat(ids) for name, ids in batch.ids.items()})


USERS = [
    (), ("city",), ("user", "time"), ("age", "tags"), ("weighted",), ("amounts", "score"), ("price", "score", "time"),
    ("price", "score", "time", "city", "user", "history", "weighted", "amounts", "age", "tags", "shop"),
]  # fmt: skip


@pytest.mark.parametrize("names", USERS, ids="+".join)
def test_candidates_of_a_user_are_records_with_the_users_columns(names):
    encoder = encoder_of("csv", DECLARATION)
    rows = [
        {k: v for k, v in row.items() if k in encoder.columns}
        for row in make_rows(60, seed=len(names))
    ]
    user = {name: rows[0][name] for name in names}
    items = [{k: v for k, v in row.items() if k not in user} for row in rows]
    if {"weighted", "amounts"} & {*names} and not {"weighted", "amounts"} <= {*names}:
        size = len(user.get("weighted", user.get("amounts")))
        for item in items:  # as many weights as ids
            item.update(
                {"amounts": [0.5] * size} if "weighted" in names else {"weighted": [4] * size}
            )
    batch = encoder.encode_candidates(user, items)
    assert_equal(expand(batch), encoder.encode([{**item, **user} for item in items]))
    shared = {
        n
        for n, ids in batch.ids.items()
        if len(ids.values if ids.offsets is None else ids.offsets[1:]) == 1
    }
    assert ("city" in shared) is ("city" in names) and ("shop" in shared) is ("shop" in names)
    assert ("city_age" in shared) is {"city", "age"}.issubset(names)
    assert ("weighted" in shared) is {"weighted", "amounts"}.issubset(names)
    assert (len(batch.dense) == 1) is {"price", "score", "time"}.issubset(names)


def test_columns_that_are_null_in_the_user_are_missing_once():
    encoder = encoder_of("csv", DECLARATION)
    user = {column: None for column in encoder.columns if column != "city"} | {"user": 3}
    cities = [{"city": "Oslo"}, {"city": None}, {"city": "x"}]
    batch = encoder.encode_candidates(user, cities)
    assert_equal(expand(batch), encoder.encode([user | city for city in cities]))
    assert len(batch.ids["shop"].values) == 1 and batch.dense.shape == (1, 3)


def test_an_absent_column_is_refused_as_in_a_file(tmp_path):
    encoder = encoder_of("csv", DECLARATION)
    whole = with_nulls(encoder, {})
    for column in set(encoder.columns) - {"tags", "history", "weighted", "amounts"}:
        rest = {name: value for name, value in whole.items() if name != column}
        with pytest.raises(
            DataError, match=f"^record 1: got no column '{column}', which the model"
        ):
            encoder.encode([whole, rest])
        with pytest.raises(DataError, match=f"^candidate 0: got no column '{column}' in it or in"):
            encoder.encode_candidates(rest, [{}])
        assert encoder.encode_candidates(rest, [{column: None}]).size == 1
    for nothing in ({}, {"click": 1}):
        with pytest.raises(DataError, match=r"^record 0: got no column"):
            encoder.encode([nothing])
        with pytest.raises(DataError, match=r"^candidate 0: got no column"):
            encoder.encode_candidates({}, [nothing])


def test_a_model_of_numbers_alone_and_one_without():
    encoder = encoder_of(
        "csv", FileSchema((Number("a", std=1.0), Number("b", missing=0.0, std=1.0)))
    )
    assert encoder.encode([{"a": 1, "b": None}] * 2).dense.tolist() == [[1, 0], [1, 0]]
    candidates = [{"b": 1}, {"b": None}]
    assert encoder.encode_candidates({"a": 1}, candidates).dense.tolist() == [[1, 1], [1, 0]]
    assert encoder.encode_candidates({"a": 1, "b": 3}, [{}, {}]).dense.tolist() == [[1, 3]]
    encoder = encoder_of("csv", FileSchema((Category("a"), Category("b"))))
    assert encoder.encode([{"a": 1, "b": None}] * 2).dense.shape == (2, 0)


FIELDS = [
    Number("x", missing=-7.0, std=1.0), Number("x", missing=0.0, transform="log1p", std=1.0), Category("x"),
    Category("x", dtype="integer"), Category("x", dtype="boolean"), Category("x", cardinality=40),
    Category("x", vocabulary=(1, 12)), Category("x", vocabulary=("true", "12", "a", "0.5")), Bag("x"),
    Bag("x", dtype="integer"), Sequence("x", cardinality=40, max_length=2), Bucket("x", boundaries=(0.5, 12)),
    Time("x", part="hour", unit="s"), Number("x", days_before="2024-06-01", missing=0.0, unit="s", std=1.0),
    Time("x", part="weekday", unit="ms"), Time("x", part="weekday", unit="ns"),
    Time("x", part="weekday", unit="yyyymmdd"), Category("x", missing="error"),
]  # fmt: skip
TIMES = st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1)).map(
    datetime.isoformat
) | st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1)).map(
    lambda t: t.isoformat(" ") + "+05:30"
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-50, 50) | st.integers(-(2**70), 2**70) | st.floats()
    | st.floats(-50, 50).map(float.__round__).map(float)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\0"), max_size=12)
    | st.sampled_from(["12", " 12", "12 ", "1e3", "1.5", "31.0", "0x10", "+5", "-0", "nan", "NaN", "inf", "TRUE", "NA",
                       "", " ", "\t", "\u00a05", "a|b", "3||4", "|", "1e400", "1_000", "007", ".5", "5.", "2024-01-02",
                       "2024-13-02", "2024-01-02T25:00", "20240531", "1717156800000"])
    | TIMES
)  # fmt: skip
ELEMENTS = st.lists(
    (st.integers(-50, 50) | st.floats(-9, 9) | st.text("ab1.", min_size=1) | st.booleans()),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(300, 1000), deadline=None)
@given(st.sampled_from(FIELDS), SCALARS | ELEMENTS, st.sampled_from([(), ("NA", "-7", "12.0")]))
@example(Number("x", missing=0.0, std=1.0), 10**400, ())
@example(Bucket("x", boundaries=(0.5,)), float("inf"), ())
@example(Category("x", dtype="integer"), 2**63, ())
@example(Number("x", missing=0.0, std=1.0), True, ())
@example(Number("x", missing=0.0, std=1.0), "\xa00\x0c", ())
@example(Time("x", part="hour", unit="s"), 1e-5, ())
@example(Time("x", part="hour", unit="ns"), 1717156800000000001, ())
@example(Time("x", part="weekday", unit="yyyymmdd"), 20240531, ())
@example(Time("x", part="weekday", unit="yyyymmdd"), 20240231, ())
def test_a_value_is_what_a_csv_file_with_its_characters_gives(
    tmp_path_factory, field, value, null_values
):
    if isinstance(value, list) and not isinstance(field, Bag | Sequence):
        with pytest.raises(DataError, match="column x: got a list"):
            encoder_of("csv", FileSchema((field,))).encode([{"x": value}])
        return
    is_integer = getattr(field, "declared_dtype", None) == "integer"
    if is_integer and bool in map(type, value if isinstance(value, list) else [value]):
        with pytest.raises(DataError, match=r"column x: got (true|false), wanted .*an integer"):
            encoder_of("csv", FileSchema((field,))).encode([{"x": value}])
        return
    path = tmp_path_factory.getbasetemp() / "value.csv"
    try:
        write_csv(path, [{"x": value, "y": 0}])
        source = open_source(
            "csv", path, schema=FileSchema((field,)), null_values=null_values
        ).train
        (wanted,) = source.batches(1)
    except (DataError, ValueError):
        wanted = None
    encoder = encoder_of("csv", FileSchema((field,)), null_values=list(null_values))
    for records in ([{"x": value}], [{"x": value}, {"x": value}]):
        if wanted is None:
            with pytest.raises(DataError, match="column x: got"):
                encoder.encode(records)
        else:
            batch = encoder.encode(records)
            assert torch.equal(batch.dense, wanted.dense.repeat(len(records), 1))
            for name, ids in wanted.ids.items():
                assert torch.equal(batch.ids[name].values, ids.values.repeat(len(records)))


@settings(max_examples=examples(100, 600), deadline=None)
@given(st.sampled_from(FIELDS), st.lists(SCALARS | ELEMENTS, min_size=2, max_size=6))
def test_a_record_does_not_depend_on_the_others(field, values):
    encoder = encoder_of("csv", FileSchema((field,)))
    batches, is_bad = [], False
    for value in values:
        try:
            batches.append(encoder.encode([{"x": value}]))
        except DataError:
            is_bad = True
    if is_bad:
        with pytest.raises(DataError):
            encoder.encode([{"x": value} for value in values])
        return
    together = encoder.encode([{"x": value} for value in values])
    assert torch.equal(together.dense, torch.cat([b.dense for b in batches]))
    for name, ids in together.ids.items():
        assert torch.equal(ids.values, torch.cat([b.ids[name].values for b in batches]))
        assert torch.equal(ids.counts, torch.cat([b.ids[name].counts for b in batches]))


def test_python_values_are_their_json():
    encoder = encoder_of("parquet", DECLARATION)
    moment = datetime(2024, 5, 31, 12, tzinfo=timezone(timedelta(hours=2)))
    plain = {
        "price": 2.5,
        "user": 7,
        "time": moment.isoformat(),
        "history": [1, 2],
        "tags": ["a"],
        "city": "x",
    }
    python = {"price": np.float32(2.5), "user": np.int64(7), "time": moment, "history": np.array([1, 2]),
              "tags": (np.str_("a"),), "city": np.str_("x")}  # fmt: skip
    python, plain = (with_nulls(encoder, record) for record in (python, plain))
    assert_equal(encoder.encode([python]), encoder.encode([plain]))


def test_unsigned_ids_and_booleans_of_typed_files(tmp_path):
    values = [0, 2**63 - 1, 2**63 + 1, 2**64 - 1]
    table = pa.table({"id": pa.array(values, pa.uint64()), "is_new": [True, False, None, True]})
    pq.write_table(table, tmp_path / "rows.parquet")
    fields = FileSchema((Category("id"), Number("is_new", missing=0.5, std=1.0)))
    source = open_source("parquet", tmp_path / "rows.parquet", schema=fields).train
    (wanted,) = source.batches(4)
    records = [
        {"id": i, "is_new": b} for i, b in zip(values, [True, False, None, True], strict=True)
    ]
    assert_equal(encoder_of("parquet", source.file_schema).encode(records), wanted)


GOOD = {"price": 1, "user": 3}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "got no record, wanted at least one. Send"),
        ({"user": 3}, "got an object, wanted a list of records. Send"),
        ("abc", "got 'abc', wanted a list of records. Send"),
        ([GOOD, 3], r"record 1: got 3, wanted an object. Send the columns by name: \{\"price\": ..., "),
        ([GOOD, {"prise": 3}], r"record 1: got a column 'prise', which .*; did you mean 'price'\?"),
        ([{3: 3}], "record 0: got 3 as the name of a column, wanted text. Send"),
        ([GOOD, {"price": "abc"}], "record 1, column price: got 'abc', wanted a number. Send"),
        ([GOOD, {"price": {}}], "record 1, column price: got an object, wanted a number. Send"),
        ([GOOD, {"price": [1]}], "record 1, column price: got a list of 1 values, wanted a number. Send"),
        ([{"price": True}], "record 0, column price: got true, wanted a number. Send"),
        ([{"user": True}], "record 0, column user: got true, wanted an integer. Send"),
        ([{"history": [False]}], "record 0, column history: got false, wanted a list, and each of its elements an"),
        ([{"price": float("inf")}], "record 0, column price: got inf, wanted a finite number. Send"),
        ([GOOD, {"user": 2**64}], "record 1, column user: got '18446744073709551616', wanted an integer. Send"),
        ([GOOD, {"user": 2**63}], "record 1, column user: got -9223372036854775808, wanted another id, because"),
        ([{"city": ["a"]}], "record 0, column city: got a list of 1 values, wanted one text or number. Send"),
        ([{"city": "\ud800"}], r"column city: got '\\ud800', wanted text without lone surrogates. Send"),
        ([{"city": "x" * 70_000}], "column city: got a text of 70,000 bytes, wanted at most 65,536 bytes, as"),
        ([GOOD, {"tags": [["a"]]}], "record 1, column tags: got a list of 1 values, wanted a list, and each of"),
        ([GOOD, {"history": [1, 2, 100]}], "record 1, column history: got 100, wanted an id 0 .. 99. Send"),
        ([GOOD, {"weighted": [1, 2], "amounts": [1]}], "1, column amounts: got 1 weights, wanted one for each of 2"),
        ([{"time": "yesterday"}], "record 0, column time: got 'yesterday', wanted a time such as"),
        ([{"time": 1717156800000}], "column time: got '1717156800000', wanted a time .* of the years 1 to 9999"),
        ([{"price": 10**400}], "record 0, column price: got an integer of 1329 bits, wanted a number"),
    ],
)  # fmt: skip
def test_bad_records_are_named(records, message):
    encoder = encoder_of("csv", DECLARATION)
    if isinstance(records, list):
        records = [with_nulls(encoder, r) if isinstance(r, dict) else r for r in records]
    with pytest.raises(DataError, match=message):
        encoder.encode(records)


REST = {column: None for column in encoder_of("csv", DECLARATION).columns if column != "price"}


@pytest.mark.parametrize(
    ("user", "candidates", "message"),
    [
        (
            REST,
            [{"price": 1}, {"price": 1, "user": 2}],
            "candidate 1, column user: got it in the user too, wanted it in one",
        ),
        (3, [{}], "user: got 3, wanted an object. Send"),
        ({"usr": 3}, [{}], "user: got a column 'usr', .*did you mean 'user'"),
        ({}, [], "got no candidate, wanted at least one. Send"),
        ({"price": "abc"}, [REST], "user, column price: got 'abc', wanted a number. Send"),
        (
            REST,
            [{"price": 1}, {"price": "abc"}],
            "candidate 1, column price: got 'abc', wanted a number. Send",
        ),
    ],
)
def test_bad_candidates_are_named(user, candidates, message):
    with pytest.raises(DataError, match=message):
        encoder_of("csv", DECLARATION).encode_candidates(user, candidates)
