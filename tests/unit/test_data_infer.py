"""Schemas that nobody declared: the same from CSV and Parquet; times, keys, headers."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.data import infer_schema, open_arrow, open_source
from colonnade.data.tabular.fields import Bag, Category, Group, Key, Label, Number, Sequence, Time
from colonnade.data.tabular.narrow import find_narrowest_type
from colonnade.data.tabular.tables import build_portable_options, read_first_rows_and_schema
from colonnade.data.tabular.times import TICKS
from colonnade.errors import ConfigError, DataError

WHEN = datetime.datetime(2024, 3, 1, 22, 30)
"""A Friday."""


def write_both(folder, table):
    """Write one table as CSV and as Parquet, in that order."""
    pa.csv.write_csv(table, folder / "a.csv")
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    return folder / "a.csv", folder / "a.parquet"


def assert_same(folder, table):
    """Assert that both files have one schema and one batch; return the schema."""
    paths = write_both(folder, table)
    sources = [open_source(path.suffix[1:], path).train for path in paths]
    assert sources[0].file_schema == sources[1].file_schema
    assert infer_schema(paths[0]) == infer_schema(paths[1]) == sources[0].file_schema
    text, typed = (next(iter(source.batches(len(table)))) for source in sources)
    torch.testing.assert_close(text.dense, typed.dense, rtol=0, atol=0)
    torch.testing.assert_close(text.label, typed.label, rtol=0, atol=0, equal_nan=True)
    for name, ids in typed.ids.items():
        assert text.ids[name].values.tolist() == ids.values.tolist(), name
    return {field.name: field for field in sources[0].file_schema.fields}


def gaps(values):
    """Every third value is missing."""
    return [None if i % 3 == 2 else value for i, value in enumerate(values)]


COLUMNS = {
    "integers": ([3, 1, 4, 1], pa.int64(), Category("a", dtype="integer")),
    "integers with gaps": (gaps([3, 1, 4, 1]), pa.int32(), Category("a", dtype="integer")),
    "integers beside NaN": ([3.0, 1.0, float("nan"), 7.0], pa.float64(), Category("a", dtype="integer")),
    "whole floats": ([3.0, -0.0, 1e15, 5.0], pa.float64(), Category("a", dtype="integer")),
    "fractions": ([3.0, 0.5, 1e18, -2.0], pa.float64(), Number),
    "fractions with gaps": (gaps([0.5, 2.0, 3.0, 7.0]), pa.float64(), Number),
    "decimals": ([decimal.Decimal("1.50"), decimal.Decimal("2.00")] * 2, pa.decimal128(8, 2), Number),
    "whole decimals": ([decimal.Decimal("1.00"), decimal.Decimal("2.00")] * 2, pa.decimal128(8, 2),
                       Category("a", dtype="integer")),
    "booleans": ([True, False, True, False], pa.bool_(), Category("a", dtype="boolean")),
    "booleans with gaps": (gaps([True, False, True, False]), pa.bool_(), Category("a", dtype="boolean")),
    "texts": (["Oslo", "", None, "Łódź, a"], pa.string(), Category("a", dtype="text")),
    "leading zeros": (["007", "12", "7", None], pa.string(), Category("a", dtype="text")),
    "digits as text": (["17", "12", "7", None], pa.string(), Category("a", dtype="integer")),
    "fractions as text": (["1.5", "12", ".5", None], pa.string(), Number),
    "twenty digits": (["1" * 20, "12", "7", None], pa.string(), Category("a", dtype="text")),
    "integers beside NA": (["3", "NA", "1", "4"], pa.string(), Category("a", dtype="integer")),
    "fractions beside NULL": (["3.5", "NULL", "1", "4"], pa.string(), Number),
    "texts beside NA": (["x", "NA", "y", "z"], pa.string(), Category("a", dtype="text")),
    "NA alone": (["NA", "NA", None, "NA"], pa.string(), Category("a", dtype="text")),
    "nothing": ([None] * 4, pa.int64(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_csv_and_parquet_infer_one_schema(name, tmp_path):
    values, kind, expected = COLUMNS[name]
    fields = assert_same(
        tmp_path,
        pa.table({"label": [0, 1, 1, 0], "x": [0.5, 1, 2, 3], "a": pa.array(values, kind)}),
    )
    field = fields.get("a")
    assert type(field) is expected if isinstance(expected, type) else field == expected


TIMES = {
    "seconds": pa.timestamp("s"),
    "nanoseconds": pa.timestamp("ns"),
    "a zone": pa.timestamp("us", tz="America/New_York"),
    "UTC": pa.timestamp("ms", tz="UTC"),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_become_hour_and_weekday(name, tmp_path):
    times = [WHEN, WHEN + datetime.timedelta(hours=36), None, WHEN - datetime.timedelta(days=1)]
    table = pa.table({"label": [0, 1, 1, 0], "when": pa.array(times, TIMES[name])})
    assert list(assert_same(tmp_path, table)) == ["label", "when_hour", "when_weekday"]
    for path in write_both(tmp_path, table):
        (batch,) = open_source(path.suffix[1:], path).train.batches(9)
        assert batch.ids["when_hour"].values.tolist() == [22, 10, 24, 22]
        assert batch.ids["when_weekday"].values.tolist() == [4, 6, 7, 3]


LISTS = {
    "digits": (["1|2", "3", "", "12|7|9"], "|", "integer"),
    "digits and gaps": (["1||2", "3|4", None, "5|6"], "|", "integer"),
    "leading zeros": (["01|2", "3|4", "5|6", "7|8"], "|", "text"),
    "a word": (["1|2", "3|x", "5|6", "7|8"], "|", "text"),
    "words": (["new|sale", "new", "sale|new", "a|b"], "|", "text"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_digits_is_one_of_integers_as_a_column_of_digits_is(name, tmp_path):
    lists, separator, dtype = LISTS[name]
    fields = assert_same(tmp_path, pa.table({"label": [0, 1, 1, 0], "a": lists}))
    assert fields["a"] == Bag("a", dtype=dtype)
    text = "a:token_seq\tlabel:label\n" + "".join(
        f"{(value or '').replace(separator, ' ')}\t{i % 2}\n" for i, value in enumerate(lists)
    )
    (tmp_path / "a.inter").write_text(text)
    source = open_source("csv", tmp_path / "a.inter").train
    assert source.file_schema.fields[1] == Sequence("a", dtype=dtype, separator=" ")


def test_an_item_and_its_history_have_one_row_by_value(tmp_path):
    (tmp_path / "views.csv").write_text(
        "film,watched,label\n" + "".join(f"{i},{i + 1}|{i + 2},{i % 2}\n" for i in range(50))
    )
    schema = infer_schema(tmp_path / "views.csv").to_dict()
    schema["fields"]["watched"]["table"] = "film"
    (batch,) = open_source("csv", tmp_path / "views.csv", schema=schema).train.batches(50)
    films, watched = batch.ids["film"].values, batch.ids["watched"].values
    assert films.tolist() == list(range(50)) and watched.tolist()[:4] == [1, 2, 2, 3]
    schema["fields"]["watched"]["dtype"] = "text"
    with pytest.raises(ConfigError, match="'film' and 'watched' share the table"):
        open_source("csv", tmp_path / "views.csv", schema=schema)
    # A dtype that only the file decides: text in a CSV file.
    del schema["fields"]["watched"]["dtype"]
    with pytest.raises(ConfigError, match="got dtype=integer and dtype=text"):
        open_source("csv", tmp_path / "views.csv", schema=schema)


def test_dates_have_no_hour(tmp_path):
    dates = [datetime.date(2024, 3, 1), datetime.date(1969, 12, 31)]
    dotted = [f"{date:%d.%m.%Y}" for date in dates]
    kinds = (pa.date32(), dates), (pa.date64(), dates), (pa.string(), list(map(str, dates)))
    for kind, values in (*kinds, (pa.string(), dotted)):
        table = pa.table({"label": [0, 1], "day": pa.array(values, kind)})
        assert list(assert_same(tmp_path, table)) == ["label", "day_weekday"]
        (batch,) = open_source("parquet", tmp_path / "a.parquet").train.batches(9)
        assert batch.ids["day_weekday"].values.tolist() == [4, 2]


def test_columns_that_look_like_something_else_are_reported(tmp_path):
    """CSV and Parquet files give the same lines, when a run begins and in inspect."""
    columns = {
        "click": [0, 0, 0, 0],
        "is_purchased": [True, False, None, True],
        "clicks": [0, 1, 0, 1],
        "rating": [0, 5, 1, 1],
        "price": ["3,14", "12", None, "1.000,5"],
        "day": ["08/03/2025", "3/12/2025 10:00", None, "08/03/2025"],
        "version": ["1.2.3", "1.2.4", "10.1.1", "1.2.3"],
        "pair": ["1,2,3", "4,5,6", "4,5,6", "1,2,3"],
        "code": ["007", "12", "13", "013"],
    }
    for path in write_both(tmp_path, pa.table(columns)):
        notes = open_source(path.suffix[1:], path).notes[1:]
        assert [note.split(" is ")[0].split(" has ")[0] for note in notes] == [
            "the label click",
            "is_purchased looks like an outcome, too, and",
            "price",
            "day",
        ]
        assert "is 0 in all of the first 4 rows" in notes[0]
        assert "`is_purchased: {type: label}`" in notes[1]
        assert "'3,14', which look like numbers with a decimal comma" in notes[2]
        assert "'08/03/2025', which look like dates" in notes[3]
        assert read_first_rows_and_schema(path).notes == notes
    lists = pa.table({"label": [0, 1], "user": [1, 2], "liked_items": [[1], [0]], "like": [0.5, 0]})
    assert len(open_arrow(lists).notes) == 1
    typed = "click:label,buy:label,like:category\n1,0,1\n0,1,0\n"
    (tmp_path / "typed.csv").write_text(typed)
    assert len(open_source("csv", tmp_path / "typed.csv").notes) == 1


def test_a_first_line_of_data_is_no_header(tmp_path):
    for text, options in (
        ("1,170,24\n0,3,5\n", {}),
        ("1,170,24\n0,3,5\n", {"label": "click"}),
        ("1,1,24\n0,3,5\n", {}),
        ("1,170,24\n0,3,5\n", {"schema": [Label("click"), Category("user")]}),
    ):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(
            (ConfigError, DataError), match=r"The first line looks like data: if .*--names"
        ):
            open_source("csv", tmp_path / "a.csv", **options)


@pytest.mark.parametrize("name", ["timestamp", "created_at", "event_time", "clickTime", "ts"])
def test_unix_times_are_times_where_the_name_says_so(name, tmp_path):
    seconds = np.array([1_709_332_200, 1_709_332_200 + 7200])  # WHEN
    for unit, ticks in TICKS.items():
        times = (seconds * ticks).tolist()
        fields = assert_same(tmp_path, pa.table({"label": [0, 1], name: times, "price": times}))
        assert fields[f"{name}_hour"] == Time(f"{name}_hour", column=name, part="hour", unit=unit)
        assert isinstance(fields["price"], Category)
        (batch,) = open_source("csv", tmp_path / "a.csv").train.batches(9)
        assert batch.ids[f"{name}_hour"].values.tolist() == [22, 0]
    durations = pa.table({"label": [0, 1], name: [30, 90]})
    assert list(assert_same(tmp_path, durations)) == ["label", name]


def test_calendar_dates_are_times_where_the_name_says_so(tmp_path):
    table = pa.table({"label": [0, 1, 1], "date": [20240301, None, 20240303], "n": [20240301] * 3})
    fields = assert_same(tmp_path, table)
    assert list(fields) == ["label", "date_weekday", "n"]
    assert fields["date_weekday"].unit == "yyyymmdd" and isinstance(fields["n"], Category)
    (batch,) = open_source("csv", tmp_path / "a.csv").train.batches(9)
    assert batch.ids["date_weekday"].values.tolist() == [4, 7, 6]


WEEKDAY = {"type": "time", "part": "weekday"}
UNITS = {
    "seconds": ([86400 * 20000], "s", 4),
    "milliseconds": ([0, 86400 * 20000_000, 86400 * 20000_000], "ms", 3),  # 0 is 1970 in any unit
    "microseconds": ([86400 * 20000 * 10**6], "us", 4),
    "nanoseconds": ([86400 * 20000 * 10**9 - 1], "ns", 3),
    "dates": ([20240604], "yyyymmdd", 1),
    "dates beside gaps": ([20240604.0, float("nan")], "yyyymmdd", 1),
    "small numbers": ([3600, 7200], "s", 3),
    "texts": (["2024-06-04"], "s", 1),
}


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_of_a_declared_time_is_found_once_and_recorded(name, tmp_path):
    values, unit, weekday = UNITS[name]
    paths = write_both(tmp_path, pa.table({"at": values}))
    for path in paths:
        source = open_source(path.suffix[1:], path, schema={"fields": {"at": WEEKDAY}}).train
        recorded = source.file_schema.to_dict()
        assert recorded["fields"]["at"] == {**WEEKDAY, "unit": unit}
        assert next(iter(source.batches(9))).ids["at"].values[0] == weekday
        # Under the recorded schema the unit stays, whatever other files hold.
        pq.write_table(pa.table({"at": [86400 * 10**9]}), tmp_path / "b.parquet")
        again = open_source("parquet", tmp_path / "b.parquet", schema=recorded).train
        assert again.file_schema.to_dict() == recorded


OUTSIDE = {
    "milliseconds as seconds": (pa.array([1717156800000]), "s", "1717156800000"),
    "year 10000": (pa.array([253_402_300_800]), "s", "253402300800"),
    "no date": (pa.array([20240231]), "yyyymmdd", "20240231"),
    "zero as a date": (pa.array([0]), "yyyymmdd", "0"),
    "infinite": (pa.array([float("inf")]), "s", "inf"),
    "date32 overflow": (pa.array([2**31 - 1], pa.int32()).cast(pa.date32()), None, "<value out"),
    "a timestamp in 11476": (pa.array([3 * 10**17], pa.timestamp("us")), None, "11476-08-15"),
    "timestamp overflow": (pa.array([10**15], pa.timestamp("s")), None, "<value out of range"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_time_outside_the_years_of_its_unit_is_refused_by_name(name, tmp_path):
    values, unit, got = OUTSIDE[name]
    pq.write_table(pa.table({"at": values}), tmp_path / "a.parquet")
    field = Time("at", part="hour", unit=unit)
    message = f"row 0, column at: got '{got}.*, wanted a time such as .* of the years 1 to 9999"
    with pytest.raises(DataError, match=message):
        list(open_source("parquet", tmp_path / "a.parquet", schema=[field]).train.batches(9))
    table = read_first_rows_and_schema(tmp_path / "a.parquet")
    assert "no column named label" in table.problem  # instead of a crash


def test_fields_of_one_column_have_one_unit(tmp_path):
    pq.write_table(pa.table({"at": [20240604]}), tmp_path / "a.parquet")
    hour, age = (
        Time("hour", column="at", part="hour"),
        Number("age", column="at", days_before="2024-06-05"),
    )
    for unit in ("yyyymmdd", "ms"):
        fields = [hour, dataclasses.replace(age, unit=unit)]
        source = open_source("parquet", tmp_path / "a.parquet", schema=fields).train
        assert [field.unit for field in source.file_schema.fields] == [unit] * 2
    with pytest.raises(
        ConfigError, match="got unit=s, wanted ms as another field of the column 'at'"
    ):
        fields = [dataclasses.replace(age, unit="ms"), dataclasses.replace(hour, unit="s")]
        open_source("parquet", tmp_path / "a.parquet", schema=fields)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_table_has_one_schema(data, tmp_path_factory):
    """Table has columns of every type, with missing values anywhere."""
    size = data.draw(st.integers(1, 12))
    times = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
    kinds = {
        "i": (pa.int64(), st.integers(-(2**63) + 1, 2**63 - 1)),
        "f": (pa.float64(), st.floats(allow_nan=True, allow_infinity=False, width=32)),
        "w": (pa.float64(), st.integers(-(2**52), 2**52).map(float)),
        "b": (pa.bool_(), st.booleans()),
        "s": (pa.string(), st.text(st.sampled_from("aZ 0,\"'é|-:"), max_size=5)),
        "z": (pa.string(), st.integers(0, 99).map(lambda i: f"{i:03}")),
        "t": (pa.timestamp("us"), times),
        "o": (pa.timestamp("ms", tz="Asia/Kolkata"), times),
        "d": (pa.date32(), st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))),
    }
    columns = {"label": [i % 2 for i in range(size)], "x": [i + 0.5 for i in range(size)]}
    for name, (kind, values) in kinds.items():
        drawn = data.draw(st.lists(st.none() | values, min_size=size, max_size=size))
        columns[name] = pa.array(drawn, kind)
    assert_same(tmp_path_factory.mktemp("both"), pa.table(columns))


# --- times that are recorded -------------------------------------------------------------------------------


def test_the_newest_time_is_the_training_samples(tmp_path):
    """Newest time is recorded, so that other files are read with the same one."""
    times = [WHEN + datetime.timedelta(days=i) for i in range(10)]
    table = pa.table({"label": [0, 1] * 5, "when": times})
    age = Number("when_age", column="when", days_before="newest", missing=0.0, transform="log1p")
    for path in write_both(tmp_path, table):
        options = {
            "test_fraction": 0.2,
            "validation_fraction": 0.1,
            "schema": [Label("label"), age],
        }
        splits = open_source(path.suffix[1:], path, **options)
        (age,) = splits.train.file_schema.numbers
        assert age.days_before == "2024-03-07T22:30:00"
        lasting = build_portable_options(options, splits)
        assert lasting["schema"]["fields"]["when_age"]["days_before"] == "2024-03-07T22:30:00"
        pq.write_table(table.slice(0, 2), tmp_path / "later.parquet")
        (batch,) = open_source(
            "parquet", tmp_path / "later.parquet", schema=lasting["schema"]
        ).train.batches(9)
        first = next(iter(splits.train.batches(2)))
        assert batch.dense.tolist() == first.dense.tolist()


def test_a_declared_age(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,t\n1,2024-03-01T00:00:00+02:00\n0,\n1,1709164800\n")
    schema = {
        "y": "label",
        "t": {
            "type": "number",
            "days_before": datetime.date(2024, 3, 1),
            "missing": -1.0,
            "std": 1.0,
        },
    }
    (batch,) = open_source("csv", path, schema={"fields": schema}).train.batches(9)
    assert batch.dense.flatten().tolist() == pytest.approx([2 / 24, -1.0, 1.0])
    with pytest.raises(ConfigError, match="got days_before='soon'"):
        Number("t", days_before="soon")
    path.write_text("y,t\n1,2024-03-01\n0,yesterday\n")
    splits = open_source("csv", path, schema={"fields": schema})
    with pytest.raises(
        DataError, match=r"line 3, column t: got 'yesterday', wanted a time such as"
    ):
        list(splits.train.batches(9))
    path.write_text("y,t\n1,\n0,\n")
    schema["t"]["days_before"] = "newest"
    with pytest.raises(ConfigError, match="got no time in any training sample"):
        open_source("csv", path, schema={"fields": schema})


# --- keys --------------------------------------------------------------------------------------------------


def test_columns_unique_in_nearly_every_row_are_keys(tmp_path):
    n = 1500
    rng = np.random.default_rng(0)
    columns = {
        "label": rng.integers(0, 2, n), "user_id": rng.integers(0, 90, n), "row": np.arange(n),
        "session": [f"s{i}" for i in range(n)], "order_id": rng.permutation(n), "views": rng.permutation(n) ** 2,
        "x": rng.normal(size=n),
    }  # fmt: skip
    columns["session"][7] = columns["session"][8]
    fields = assert_same(tmp_path, pa.table(columns))
    assert fields["order_id"] == Key("order_id", dtype="integer")
    assert isinstance(fields["views"], Number) and isinstance(fields["user_id"], Category)
    assert "session" not in fields and "row" not in fields
    head = read_first_rows_and_schema(tmp_path / "a.csv")
    assert head.left_out == dict.fromkeys(("row", "session"), "different in nearly every row")
    del columns["order_id"]
    assert assert_same(tmp_path, pa.table(columns))["row"] == Key("row", dtype="integer")
    few = pa.table({name: values[:60] for name, values in columns.items()})
    assert isinstance(assert_same(tmp_path, few)["session"], Category)


def test_an_empty_header_cell_is_a_key(tmp_path):
    """So pandas writes its index."""
    path = tmp_path / "a.csv"
    path.write_text(",label,city\n0,1,Oslo\n1,0,Bern\n")
    splits = open_source("csv", path)
    assert splits.train.file_schema.find_field(Key) == Key("column_0", dtype="integer")
    (batch,) = splits.train.batches(9)
    assert batch.key.tolist() == [0, 1] and list(batch.ids) == ["city"]
    path.write_text(",label,,city\n0,1,,Oslo\n1,0,,Bern\n")
    assert [f.name for f in infer_schema(path).fields] == ["label", "column_0", "city"]
    pq.write_table(pa.table({"": [1, 2], "label": [0, 1], "x": [0.5, 1]}), tmp_path / "a.parquet")
    assert [f.name for f in infer_schema(tmp_path / "a.parquet").fields] == ["label", "x"]


def test_counts_are_categories_and_numbers(tmp_path):
    """Most values are small and few are large; ids and codes of one size are categories alone."""
    n = 3000
    rng = np.random.default_rng(0)
    counts = rng.geometric(0.3, n) - 1
    counts[::100] = rng.integers(50, 900, n // 100)
    columns = {
        "label": rng.integers(0, 2, n), "views": counts, "views_id": counts, "user": rng.integers(0, 900, n),
        "age": rng.integers(18, 80, n), "few": rng.geometric(0.3, n) % 7, "balance": counts - 2,
    }  # fmt: skip
    fields = assert_same(tmp_path, pa.table(columns))
    names = list(columns)
    assert list(fields) == [*names[:2], "views_number", *names[2:], "balance_number"]
    assert all(isinstance(fields[name], Category) for name in [*columns][1:])
    number = fields["views_number"]
    assert isinstance(number, Number) and number.column == "views" and number.transform == "log1p"
    assert fields["balance_number"].transform is None  # some are negative
    with_gaps = columns | {"views": pa.array(counts, mask=counts == 0)}
    assert [*assert_same(tmp_path, pa.table(with_gaps))][:4] == [*fields][:4]


# --- types in the header -----------------------------------------------------------------------------------


def test_a_header_may_give_types(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "user:category,age:number,bought:label,at:time,who:group\n7,30,1,2024-03-01,a\n8,31,0,,b\n"
    )
    by_name = {field.name: field for field in infer_schema(path).fields}
    assert by_name["user"] == Category("user", dtype="integer")
    assert isinstance(by_name["age"], Number) and by_name["bought"] == Label("bought")
    assert by_name["who"] == Group("who", dtype="text") and "at_weekday" in by_name
    (batch,) = open_source("csv", path).train.batches(9)
    assert batch.ids["user"].values.tolist() == [7, 8] and batch.label.flatten().tolist() == [1, 0]


def test_recbole_files_are_read(tmp_path):
    path = tmp_path / "ml.inter"
    path.write_text(
        "user_id:token\titems:token_seq\tlabel:float\tv:float_seq\n1\ta b\t1\t1 2\n2\tb\t0\t3\n"
    )
    assert infer_schema(path).fields == (
        Label("label"),
        Category("user_id", dtype="integer"),
        Sequence("items", dtype="text", separator=" "),
    )
    (batch,) = open_source("csv", path).train.batches(9)
    assert batch.ids["items"].offsets.tolist() == [0, 2, 3]


def test_a_header_with_an_unknown_type_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user:category,age:numbr,y:label\n7,30,1\n")
    with pytest.raises(DataError, match=r"a.csv, line 1, column age: got the type 'numbr'"):
        open_source("csv", path)
    path.write_text("user:category,age:number,y:label\n7,old,1\n")
    with pytest.raises(ConfigError, match="column age: got string, wanted numbers as its header"):
        open_source("csv", path)
    path.write_text("12:30,label\n7,1\n8,0\n")  # not every cell has a type: plain names
    assert [f.name for f in infer_schema(path).fields] == ["label", "12:30"]


TEXTS = st.one_of(
    st.integers(-(2**66), 2**66).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.sampled_from(["", "007", "-0", "1e5", ".5", "5.", "+3", "nan", "true", "1_0", "0x1", "é"]),
)


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_the_narrowest_type_represents_every_text(texts):
    """Integers are written as such; numbers have no leading zeros, and a double holds them."""
    arrow_type = find_narrowest_type(pa.array(texts))
    values = pa.array(texts).cast(arrow_type).to_pylist()
    for text, value in zip(texts, values, strict=True):
        if arrow_type == pa.int64():
            assert str(value) == text or (value == 0 and text == "-0")
        elif arrow_type == pa.float64():
            assert value == float(text) or text == "nan"
            assert "." in text or "e" in text or len(text.strip("+-")) <= 16
            assert not re.match(r"[+-]?0[0-9]", text)
