"""Any record is encoded, or refused by a DataError that names it and says what to do."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from colonnade import build_encoder
from colonnade.config.run import build_config
from colonnade.data import Column, Schema
from colonnade.errors import DataError

FIELDS = {
    "price": {"type": "number", "missing": 0.0, "transform": "log1p"},
    "score": {"type": "number"},
    "days": {"type": "number", "column": "time", "days_before": "2024-06-01"},
    "city": {"type": "category"},
    "known": {"type": "category", "vocabulary": ["a", "b"], "unknown_rows": 0, "missing": "error"},
    "user": {"type": "category", "dtype": "integer"},
    "shop": {"type": "category", "cardinality": 50},
    "tags": {"type": "bag", "max_length": 3},
    "weighted": {"type": "bag", "dtype": "integer", "weights": "amounts"},
    "history": {"type": "sequence", "dtype": "integer", "cardinality": 100},
    "age": {"type": "bucket", "boundaries": [18, 30]},
    "hour": {"type": "time", "part": "hour", "column": "time"},
    "city_age": {"type": "cross", "of": ["city", "age"], "rows": 50},
    "click": {"type": "label"},
}
GOOD = {"price": 2.5, "score": 1, "time": "2024-05-01T10:00:00+02:00", "city": "Oslo", "known": "a", "user": 7,
        "shop": 3, "tags": ["x"], "weighted": [1, 2], "amounts": [0.5, 1], "history": [4, 5], "age": 20}  # fmt: skip
NAMES = [*GOOD, "click", "prise", "", "\ud800", "city\n", "x" * 10_000, "🦊"]
SHAPE = r"^((record|candidate) \d+|user)(, column .+)?: got .+(wanted|which the model) .+|^got .+wanted .+"


def nest(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def make_value(rng: random.Random) -> Any:
    """A value of any kind, most of them bad."""
    text = rng.choice(
        [
            "a",
            "é",
            "\0",
            "\ud800",
            "\udfff\ud800",
            "\n",
            '"',
            "|",
            ",",
            "nan",
            "1e400",
            "-",
            "9" * 30,
            " ",
        ]
    )
    return rng.choice([
        lambda: None, lambda: rng.random() < 0.5, lambda: rng.randrange(-(2**64), 2**64), lambda: 10**5000,
        lambda: -(2 ** rng.randrange(60, 5000)), lambda: float("nan"), lambda: float("inf"), lambda: -float("inf"),
        lambda: rng.gauss(0, 1) * 10.0 ** rng.randrange(-300, 300), lambda: text * rng.randrange(1, 50), lambda: text,
        lambda: nest(rng.choice([1, 3, 5000])), lambda: {}, lambda: {"a": nest(2000)}, lambda: [{}], lambda: [[1], 2],
        lambda: [None, True, 1.5, "a", 2**70], lambda: [text, text], lambda: [float("nan")], lambda: [10**400],
        lambda: [0] * 5000, lambda: "|" * 3000, lambda: b"bytes", lambda: object(), lambda: {1, 2}, lambda: (1, 2),
        lambda: 1j, lambda: range(3), lambda: type, lambda: "2024-13-45T99:99", lambda: "0x10",
    ])()  # fmt: skip


def make_record(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return make_value(rng)
    record: dict[Any, Any] = dict(GOOD)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(NAMES) if rng.random() < 0.2 else rng.choice([*GOOD])
        if rng.random() < 0.1:
            record.pop(name, None)
        elif rng.random() < 0.02:
            record[rng.choice([3, None, 1.5, True, (1,)])] = 0
        else:
            record[name] = make_value(rng)
    return record


def build(kind: str):
    if kind == "schema":
        columns = (
            Column("user"),
            Column("city", 9),
            Column("tags", 5, "bag"),
            Column("history", 9, "sequence"),
        )
        return build_encoder(None, Schema(("price", "score"), columns))
    options = {"schema": {"fields": FIELDS}}
    return build_encoder(build_config({"data": {"name": kind, "options": options}}), Schema((), ()))


@pytest.mark.parametrize(
    "kind",
    [
        "csv",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("parquet", "tfrecord")),
        "schema",
    ],
)
def test_any_record_is_encoded_or_refused(kind):
    encoder, rng = build(kind), random.Random(kind)
    refused = 0
    for number in range(2000):
        record = make_record(rng)
        try:
            if number % 4 == 3 and isinstance(record, dict):
                cut = {k: record.pop(k) for k in list(record) if rng.random() < 0.5}
                encoder.encode_candidates(cut, [record, {}] if number % 8 == 3 else [record])
            else:
                encoder.encode([record] if number % 4 else [GOOD, record])
        except DataError as error:
            refused += 1
            text = str(error)
            assert re.search(SHAPE, text, re.DOTALL), text
            assert len(text) < 1500, len(text)
            text.encode()  # a server can send it
    assert refused > 500


def test_long_texts_and_lists_take_no_long_time():
    encoder = build("csv")
    started = time.process_time()
    values = ("9" * 10_000_000, ["9" * 10_000_000], "\ud800" * 10_000_000)
    for name in ("score", "time", "city", "user", "amounts"):
        for value in values:
            try:
                encoder.encode([{**GOOD, name: value}])
            except DataError as error:
                assert len(str(error)) < 1500
    with pytest.raises(DataError, match="got a column 'xxxx"):
        encoder.encode([{**GOOD, "x" * 10_000_000: 1}])
    assert time.process_time() - started < 10


def test_values_that_json_may_have():
    """Results of Python's parser for texts that other parsers refuse."""
    encoder = build("csv")
    for text, is_good in (
        ('{"score": NaN}', False), ('{"score": 1e400}', False), ('{"score": -Infinity}', False),
        ('{"age": 1e400}', True), ('{"tags": [["a"]]}', False),
        ('{"user": 9223372036854775808}', False), ('{"user": 1e18}', True), ('{"user": 1.0}', True),
        ('{"user": true}', False), ('{"score": true}', False), ('{"city": "\\ud800"}', False),
        ('{"tags": []}', True), ('{"weighted": [], "amounts": null}', True), ('{"weighted": [1]}', False),
    ):  # fmt: skip
        record = {**GOOD, **json.loads(text)}
        if is_good:
            assert encoder.encode([record]).size == 1
        else:
            with pytest.raises(DataError, match=r"^record 0, column "):
                encoder.encode([record])
