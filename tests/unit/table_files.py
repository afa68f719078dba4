"""One small data set as CSV and as Parquet: numbers, texts, integers, bags, sequences, missing values."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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

CITIES = ["Oslo", "Bergen", "Łódź", "a city, with a comma", 'one with "quotes"', "two\nlines"]
TYPES = {
    "click": pa.int8(), "price": pa.float64(), "age": pa.int32(), "city": pa.string(), "user": pa.int64(),
    "tags": pa.list_(pa.string()), "history": pa.list_(pa.int64()), "weight": pa.float32(), "row": pa.int64(),
}  # fmt: skip
DECLARATION = FileSchema(
    (
        Label("click"),
        Number("price", missing=0.0, transform="log1p", std=1.0),
        Category("city"),
        Category("city_rows", column="city", rows=7),
        Category("known", column="city", vocabulary=("Oslo", "Bergen"), unknown_rows=2),
        Category("user", dtype="integer"),
        Bag("tags", max_length=3),
        Sequence("history", dtype="integer", cardinality=100, max_length=4),
        Bucket("age", boundaries=(18, 30, 65)),
        Cross("city_age", of=("city", "age"), rows=50),
        Weight("weight"),
        Group("group", column="user", dtype="integer"),
        Key("row", dtype="integer"),
    )
)


def samples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Plain values, None where missing; `row` numbers the samples."""
    rng = random.Random(seed)
    return [
        {
            "click": rng.randrange(2),
            "price": rng.choice([None, 0.5, float(rng.randrange(10**6)) / 8]),
            "age": rng.choice([None, rng.randrange(90)]),
            "city": rng.choice([None, *CITIES]),
            "user": rng.randrange(-9, 9) * 10**17,
            "tags": [rng.choice("abcdef") for _ in range(rng.randrange(6))],
            "history": [rng.randrange(100) for _ in range(rng.randrange(7))],
            "weight": rng.randrange(1, 5) / 4,
            "row": row,
        }
        for row in range(count)
    ]


def cut(rows: list[dict[str, Any]], files: int) -> list[list[dict[str, Any]]]:
    """`rows` as the contents of some files, of unequal sizes."""
    ends = [len(rows) * (i + 1) ** 2 // files**2 for i in range(files)]
    return [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def write_parquet(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in TYPES.items()}
    pq.write_table(pa.table(columns), path, **({"row_group_size": 10} | settings))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    def text(value: Any) -> Any:
        return "|".join(map(str, value)) if isinstance(value, list) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TYPES)
        writer.writerows([text(row[name]) for name in TYPES] for row in rows)
    return path


def write_folder(folder: Path, kind: str, count: int, files: int = 3) -> Path:
    """`folder`, with so many files part-1 .. of `count` samples together."""
    write = write_parquet if kind == "parquet" else write_csv
    for i, rows in enumerate(cut(samples(count), files), 1):
        write(folder / f"part-{i}.{kind}", rows)
    return folder
