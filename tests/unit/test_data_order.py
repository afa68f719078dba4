"""Splits by order: `order_by`, `test_after`, `validation_after`, against a sort by numpy, and what is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from colonnade.data import Key, Label, Number, Time, open_source
from colonnade.data.contract import Position
from colonnade.errors import ConfigError, DataError

START = 1_600_000_000
NUM_ROWS = 200
rng = np.random.default_rng(0)
SECONDS = START + 86_400 * rng.integers(0, 90, NUM_ROWS)  # with ties
TABLE = pa.table(
    {
        "label": np.arange(NUM_ROWS) % 2,
        "row": np.arange(NUM_ROWS),
        "user": np.arange(NUM_ROWS) // 10,
        "timestamp": SECONDS,
        "when": pa.array(SECONDS, pa.timestamp("s")),
        "price": SECONDS / 1e5 - 16_040,
    }
)
SCHEMA = [Label("label"), Key("row", dtype="integer"), Number("price", std=1.0)]
HOUR = Time("hour", column="timestamp", part="hour")


def write(folder, kind, table=TABLE):
    """Write a table as two files, of several blocks where the format has them."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate((table.slice(0, 120), table.slice(120))):
        path = folder / f"part_{i}.{kind}"
        if kind == "csv":
            pa.csv.write_csv(part, path)
        else:
            pq.write_table(part, path, row_group_size=30)
    return folder


def rows_of(source, **options):
    return (
        [] if source is None else [r for b in source.batches(7, **options) for r in b.key.tolist()]
    )


def parts_of(splits):
    return [rows_of(part) for part in (splits.train, splits.validation, splits.test)]


def expected_parts(values, low, high):
    """Twin: rows below `low`, from `low` on and from `high` on, in the order of the file."""
    return [
        np.flatnonzero(m).tolist()
        for m in (values < low, (values >= low) & (values < high), values >= high)
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("column", ["timestamp", "when", "price"])
def test_the_last_by_a_column_are_held_out(column, kind, tmp_path):
    folder = write(tmp_path / "data", kind)
    splits = open_source(
        kind, folder, schema=SCHEMA, order_by=column, test_fraction=0.2, validation_fraction=0.1
    )
    ordered = np.sort(SECONDS)
    high = ordered[NUM_ROWS - 40]
    low = ordered[np.searchsorted(ordered, high) - 20]
    parts = parts_of(splits)
    assert parts == expected_parts(SECONDS, low, high)
    # Rows of one time are in one part, so a part may be a little larger.
    assert 40 <= len(parts[2]) < 50 and 20 <= len(parts[1]) < 30
    first = TABLE["price"][int(np.argmax(SECONDS == high))] if column == "price" else high
    words = f"{first.as_py():.15g}" if column == "price" else np.datetime64(int(first), "s")
    assert splits.notes[-1].endswith(f", {len(parts[2])} test (from {words} on)")
    assert f"{len(parts[0])} samples train, {len(parts[1])} validate (from " in splits.notes[-1]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(("column", "cutoffs"), [
    ("timestamp", ("2020-11-01", "2020-11-20T00:00:00Z")),
    ("timestamp", (1_604_188_800, 1_605_830_400.0)),
    ("when", ("2020-11-01 00:00", "2020-11-20")),
    ("price", (1.88800, 18.30400)),
])  # fmt: skip
def test_samples_from_a_cutoff_on_are_held_out(column, cutoffs, kind, tmp_path):
    folder = write(tmp_path / "data", kind)
    low, high = cutoffs
    options = {"order_by": column, "validation_after": low, "test_after": high}
    splits = open_source(kind, folder, schema=SCHEMA, **options)
    values, numbers = SECONDS, (1_604_188_800, 1_605_830_400)
    if column == "price":
        values, numbers = TABLE["price"].to_numpy(), cutoffs
    assert parts_of(splits) == expected_parts(values, *numbers)
    assert all(map(len, parts_of(splits)))


def test_a_part_selected_by_order_is_read_as_any_other(tmp_path):
    """Shuffled in windows, resumed anywhere, divided among ranks."""
    folder = write(tmp_path / "data", "parquet")
    options = {"schema": SCHEMA, "order_by": "when", "test_fraction": 0.3, "shuffle_window": 40}
    source = open_source("parquet", folder, **options).train
    whole = rows_of(source)
    expected = expected_parts(SECONDS, np.inf, np.sort(SECONDS)[140])
    assert sorted(whole) == sorted(set(range(NUM_ROWS)) - set(expected[2])) != whole
    ranks = [source.batches(7, rank=r, num_ranks=3, start=Position(0, 4)) for r in range(3)]
    rest = [row for blocks in zip(*ranks, strict=True) for b in blocks for row in b.key.tolist()]
    assert rest == whole[28:]


def test_times_of_the_test_part_do_not_reach_the_schema(tmp_path):
    folder = write(tmp_path / "data", "parquet")
    age = Number("age", column="when", days_before="newest")
    splits = open_source(
        "parquet", folder, schema=[*SCHEMA, age], order_by="when", test_after="2020-11-01"
    )
    newest = SECONDS[SECONDS < 1_604_188_800].max()
    field = splits.train.file_schema.numbers[1]
    assert field.days_before == str(np.datetime64(int(newest), "s"))
    days = (newest - SECONDS[SECONDS <= newest]) / 86_400
    assert (field.mean, field.std) == pytest.approx((days.mean(), days.std()), rel=1e-3)


@pytest.mark.parametrize(("options", "message"), [
    ({"test_after": "2020-11-01"}, "test_after='2020-11-01' without order_by"),
    ({"order_by": "when", "test_after": "soon"}, "test_after='soon', wanted a number, or a time such as"),
    ({"order_by": "when", "test_after": "2020-11-01", "test_fraction": 0.1}, "both test_after='2020-11-01' and test_f"),
    ({"order_by": "when", "test_after": "2020-11-01", "test": "x"}, "both test_after='2020-11-01' and test='x'"),
    ({"order_by": "when", "split_by": "user", "test_fraction": 0.1}, "got split_by='user' and order_by='when'"),
    ({"order_by": "when", "days": True}, "got days and"),
    ({"order_by": "when", "test_after": "2031-01-01"}, "wanted one with samples at or after it in when"),
    ({"order_by": "when", "test_after": "2020-10-01", "validation_after": "2020-11-01"}, "before the test part"),
    ({"order_by": "when", "test_after": 7}, "got 7 as a cutoff of order_by='when', wanted an ISO time"),
    ({"order_by": "price", "test_after": "2020-10-01"}, "wanted a number, because it holds no times"),
    ({"order_by": "when", "test_after": "1990-01-01"}, "leave no sample to train on"),
    ({"order_by": "wen", "test_fraction": 0.1}, "'wen', which split_by or order_by names; did you mean 'when'"),
    ({"split_by": "when", "test_fraction": 0.1}, "split_by='when', a column of times.*order_by=when"),
    ({"split_by": "timestamp", "test_fraction": 0.1}, "split_by='timestamp', a column of times"),
])  # fmt: skip
def test_splits_that_cannot_be_are_refused(options, message, tmp_path):
    folder = write(tmp_path / "data", "parquet")
    with pytest.raises((ConfigError, DataError), match=message):
        open_source("parquet", folder, schema=SCHEMA, **options)


def test_a_missing_time_is_named_with_its_row(tmp_path):
    (tmp_path / "a.csv").write_text("label,at,row\n1,2024-01-01,1\n0,,2\n1,2024-01-03,3\n")
    for at in ("at", "row"):
        text = (tmp_path / "a.csv").read_text().replace("0,,2", "0,,")
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(DataError, match=f"line 3, column {at}: got nothing, wanted a value"):
            schema = {"fields": {"label": "label", "x": {"type": "number", "column": "label"}}}
            open_source("csv", tmp_path / "a.csv", schema=schema, order_by=at, test_fraction=0.3)


@pytest.mark.parametrize("order", ["by user", "a log, a little late", "one day per file"])
def test_last_rows_that_are_not_the_newest_are_a_warning(order, tmp_path):
    if order == "by user":
        indices = np.arange(NUM_ROWS)
    elif order == "a log, a little late":
        indices = np.argsort(SECONDS + rng.integers(0, 5 * 86_400, NUM_ROWS))
    else:
        days = np.argsort(SECONDS, kind="stable").reshape(-1, 20)
        indices = rng.permuted(days, axis=1).flatten()
    folder = write(tmp_path / "data", "parquet", TABLE.take(indices))
    opened = partial(open_source, "parquet", folder, schema=[*SCHEMA, HOUR], test_fraction=0.1)
    for options in ({"split_by": "user"}, {"order_by": "timestamp"}):
        assert "newest" not in str(opened(**options).notes)
    messages = opened().notes
    if order == "by user":
        (message,) = messages
        assert (
            "are not the newest by 'timestamp'" in message
            and '--set "data.options.order_by=timestamp"' in message
        )
    else:
        assert not messages


def test_a_run_says_once_that_its_last_rows_are_not_the_newest(tmp_path, colonnade):
    folder, run = write(tmp_path / "data", "parquet", TABLE), tmp_path / "run"
    schema = tmp_path / "schema.yaml"
    schema.write_text(
        "fields: {label: label, user: category, hour: {type: time, column: timestamp, part: hour}}"
    )
    texts = colonnade(
        "train", "--path", folder, "--data", "parquet", "--run", run, "--set", f"data.options.schema={schema}", "--set",
        "data.options.test_fraction=0.1", "--set", "train.max_steps=2",
    )  # fmt: skip
    assert texts[0] == 0 and "".join(texts[1:]).count("not the newest") == 1, texts
    texts = colonnade("evaluate", run)
    assert texts[0] == 0 and "newest" not in "".join(texts[1:])
