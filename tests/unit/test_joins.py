"""Joins of tables at read time, compared with a join in plain Python that is made before the file is written."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_contract import same

import colonnade
from colonnade.cli.app import run_command
from colonnade.config.run import RunConfig, list_fixed_settings, override_settings
from colonnade.data import (
    infer_schema,
    open_arrow,
    open_csv,
    open_interactions,
    open_parquet,
    open_source,
)
from colonnade.data.tabular.join import format_keys
from colonnade.errors import ConfigError, DataError
from colonnade.predict import Predictor


def write_csv(path, names, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
    return path


def read(splits):
    return [*splits.train.batches(5), *(splits.test.batches(5) if splits.test else ())]


def assert_same(one, other):
    assert one.train.file_schema == other.train.file_schema
    pairs = list(zip(read(one), read(other), strict=True))
    assert pairs and all(same(a, b) for a, b in pairs)


KEYS = st.integers(0, 12)


@settings(max_examples=examples(40, 400), deadline=None)
@given(
    clicks=st.lists(st.tuples(st.integers(0, 1), KEYS | st.none(), KEYS), min_size=9, max_size=40),
    users=st.dictionaries(KEYS, st.tuples(st.integers(18, 90), st.sampled_from("ab")), min_size=1),
    items=st.dictionaries(KEYS, st.floats(0, 9, width=32), min_size=1),
    text=st.booleans(),
    forms=st.tuples(*[st.sampled_from(["csv", "parquet", "table"])] * 3),
    options=st.sampled_from(
        [{}, {"shuffle_window": 7}, {"split_by": "user", "test_fraction": 0.2}]
    ),
)
def test_a_join_reads_what_a_wide_file_has(
    tmp_path_factory, clicks, users, items, text, forms, options
):
    """Keys are integers in one file and texts in the other, where `text` says so: they match by value."""
    folder = tmp_path_factory.mktemp("join")
    clicks = [
        (label, 99 if user is None and options.get("split_by") else user, item)
        for label, user, item in clicks
    ]

    def write(form, name, columns):
        table = pa.table({n: pa.array(*column) for n, column in columns.items()})
        if form == "csv":
            rows = zip(*(column[0] for column in columns.values()), strict=True)
            return write_csv(folder / f"{name}.csv", columns, rows)
        if form == "table":
            return table
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=6)
        return folder / f"{name}.parquet"

    labels, user_column, item_column = map(list, zip(*clicks, strict=True))
    key = pa.string() if text else pa.int64()
    user_keys = [str(user) if text else user for user in users]
    age, city = map(list, zip(*users.values(), strict=True))
    narrow = {
        "label": (labels, pa.int8()),
        "user": (user_column, pa.int64()),
        "item": (item_column, pa.int64()),
    }
    ids = {"type": "category", "dtype": "integer"}
    schema = {
        "label": "label", "user": ids, "item": ids,
        "age": {"type": "number", "missing": 0.0}, "city": {"type": "category", "dtype": "text"},
        "price": {"type": "number", "missing": 0.0},
    }  # fmt: skip
    openers = {"csv": open_csv, "parquet": open_parquet, "table": open_arrow}
    source = write(forms[0], "clicks", narrow)
    user_table = {"user": (user_keys, key), "age": (age, pa.int64()), "city": (city, pa.string())}
    prices = (list(items.values()), pa.float64())
    item_table = {"item": (list(items), pa.int64()), "price": prices}
    join = {
        "user": write(forms[1], "users", user_table),
        "item": write(forms[2], "items", item_table),
    }
    joined = openers[forms[0]](source, schema={"fields": schema}, join=join, **options)
    # The slow twin: look each key up in a dictionary, and write the wide file.
    nobody = (None, None)
    wide = narrow | {
        "age": ([users.get(user, nobody)[0] for user in user_column], pa.int64()),
        "city": ([users.get(user, nobody)[1] for user in user_column], pa.string()),
        "price": ([items.get(item) for item in item_column], pa.float64()),
    }
    twin = openers[forms[0]](write(forms[0], "wide", wide), schema={"fields": schema}, **options)
    assert_same(joined, twin)
    missing = sum(user not in users for user in user_column[: 6 if forms[0] == "parquet" else None])
    assert f"{missing:,} of the first" in joined.notes[0] and "joined by user" in joined.notes[0]


def test_the_schema_is_that_of_the_wide_file(tmp_path):
    rows = [(i % 2, i % 7) for i in range(60)]
    clicks = write_csv(tmp_path / "clicks.csv", ["label", "user"], rows)
    users = write_csv(tmp_path / "users.csv", ["user", "age"], [(i, 20.5 + i) for i in range(7)])
    wide = [(label, user, 20.5 + user) for label, user in rows]
    wide = write_csv(tmp_path / "wide.csv", ["label", "user", "age"], wide)
    assert infer_schema(clicks, join={"user": users}) == infer_schema(wide)
    assert_same(open_csv(clicks, join={"user": users}), open_csv(wide))
    chained = write_csv(
        tmp_path / "ages.csv", ["age", "old"], [(20.5 + i, i // 4) for i in range(7)]
    )
    splits = open_csv(clicks, join={"user": users, "age": chained})
    assert "old" in {field.name for field in splits.train.file_schema.fields}


def test_keys_are_texts_of_their_values():
    def texts(values, kind=None):
        return format_keys("user", pa.array(values, kind)).to_pylist()

    assert texts([1, None, -2]) == ["1", "", "-2"]
    assert texts(["1", "31.0", " 7 ", "007", "", r"\N", None]) == [
        "1",
        "31",
        "7",
        "007",
        "",
        "",
        "",
    ]
    assert texts([31.0, None, 1e15, float("nan")]) == ["31", "", "1000000000000000", ""]
    assert texts(["a", "b", "a"], pa.dictionary(pa.int8(), pa.string())) == ["a", "b", "a"]


BAD = {
    "no key in the samples": ("label,item\n1,2\n", "user,age\n1,2\n", "clicks.csv: got no column 'user', by which"),
    "no key in the table": ("label,user\n1,2\n", "usr,age\n1,2\n", "users.csv: got no column 'user'.*'usr'"),
    "a key twice": ("label,user\n1,2\n", "user,age\n1,2\n3,4\n1,5\n", "users.csv: got '1' twice in the column user"),
    "a key twice, otherwise written": ("label,user\n1,2\n", "user,age\n1,2\n1.0,4\n", "got '1' twice"),
    "no value as a key": ("label,user\n1,2\n", "user,age\n1,2\n,4\n", "users.csv, column user, row 2: got nothing"),
    "no row": ("label,user\n1,2\n", "user,age\n", "users.csv: got no row"),
    "a bad value": ("label,user\n1,2\n", "user,age\n2,x\n", "clicks.csv, line 2, column age: got 'x', wanted a number"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "option", "setting"),
    [
        ("csv", {"join": {"user": "nope.csv"}}, "join.user"),
        ("csv", {"test": "nope.csv"}, "test"),
        ("interactions", {"users": "nope.csv"}, "users"),
        ("interactions", {"items": "nope.csv"}, "items"),
        ("triples", {"validation": "nope.csv"}, "validation"),
    ],
)
def test_a_missing_file_is_named_with_its_setting(data, option, setting, tmp_path):
    (tmp_path / "clicks.csv").write_text("user,item,label\n1,2,0\n1,3,1\n2,3,1\n")
    message = f"nope.csv: no such file or folder, which data.options.{setting} names"
    with pytest.raises(DataError, match=message):
        open_source(data, tmp_path / "clicks.csv", **option)


@pytest.mark.parametrize("name", BAD)
def test_tables_at_fault(name, tmp_path):
    clicks, users, message = BAD[name]
    (tmp_path / "clicks.csv").write_text(clicks)
    (tmp_path / "users.csv").write_text(users)
    fields = {"label": "label", "age": "number"} if "bad" in name else None
    schema = {} if fields is None else {"schema": {"fields": fields}}
    with pytest.raises(DataError, match=message):
        join = {"user": tmp_path / "users.csv"}
        list(open_csv(tmp_path / "clicks.csv", join=join, **schema).train.batches(5))


def test_a_column_of_the_samples_is_not_joined(tmp_path):
    """A file's own column wins, as a record's does; a file with all needs no key. Two tables share no column."""
    users = write_csv(tmp_path / "users.csv", ["user", "age", "city"], [(1, 20, "a"), (2, 30, "b")])
    schema = {"label": {"type": "label", "missing": "unknown"}, "age": {"type": "number", "std": 1},
              "city": {"type": "category", "vocabulary": ["a", "b", "c"]}}  # fmt: skip

    def read_values(names, rows):
        path = write_csv(tmp_path / "clicks.csv", names, rows)
        data = open_csv(path, schema={"fields": schema}, join={"user": users})
        (batch,) = data.train.batches(9)
        return batch.dense.flatten().tolist(), batch.ids["city"].values.tolist(), data.notes

    assert read_values(["label", "user"], [(0, 2), (1, 1)])[:2] == ([30, 20], [1, 0])
    *values, notes = read_values(["label", "user", "age"], [(0, 2, 99), (1, 1, 7)])
    assert values == [[99, 7], [1, 0]]
    assert notes[0].startswith("joined by user: city of ") and notes[0].endswith(
        f"; age is that of {tmp_path / 'clicks.csv'}"
    )
    own = read_values(["city", "label", "age"], [("c", 0, 99), ("b", 1, 7)])
    assert own == ([99, 7], [2, 1], ())
    join = {"user": users, "item": pa.table({"item": [1], "city": ["c"]})}
    with pytest.raises(DataError, match="got a column 'city', which another joined table has too"):
        open_arrow(pa.table({"label": [0, 1], "user": [1, 2], "item": [1, 1]}), join=join)


def test_a_join_of_another_kind_is_refused():
    table = pa.table({"label": [0, 1], "user": [[1], [2]]})
    with pytest.raises(
        DataError, match=r"column user: got list<item: int64>, wanted texts or integers"
    ):
        open_arrow(table, join={"user": pa.table({"user": [1], "age": [2]})})
    with pytest.raises(DataError, match=r"column user: got list.*wanted texts or integers"):
        open_arrow(
            pa.table({"label": [0, 1], "user": [1, 2]}), join={"user": table.drop(["label"])}
        )
    with pytest.raises(
        DataError, match=r"column user: got bytes that are no UTF-8 text, wanted texts"
    ):
        open_arrow(table, join={"user": pa.table({"user": [b"\xff"], "age": [2]})})
    with pytest.raises(ConfigError, match=r"got join='users.csv', wanted tables by key column"):
        open_arrow(table, join="users.csv")


def test_interactions_join_users_by_the_same_rules(tmp_path):
    rows = [(u, i) for u in range(5) for i in range(12)]
    clicks = write_csv(tmp_path / "clicks.csv", ["user", "item"], rows)
    users = write_csv(
        tmp_path / "users.csv", ["user", "age"], [(f"{u}.0", 20 + u) for u in range(4)]
    )
    features = open_interactions(clicks, users=users).train.interactions.users
    plain = write_csv(tmp_path / "plain.csv", ["user", "age"], [(u, 20 + u) for u in range(4)])
    wanted = open_interactions(clicks, users=plain).train.interactions.users
    assert features["age"].values.tolist() == wanted["age"].values.tolist()
    users = write_csv(tmp_path / "users.csv", ["user", "age"], [(1, 2), (1, 3)])
    with pytest.raises(DataError, match=r"users.csv: got '1' twice in the column user"):
        open_interactions(clicks, users=users)


def test_a_table_may_move_while_a_run_is_away():
    """The path of a table is no setting that a run has for life, like the path of the data."""
    names = {
        "data.name": "csv",
        "data.options.join.user_id": "users.csv",
        "data.options.label": "y",
    }
    config = override_settings(RunConfig(), names)
    assert config.data.options["join"] == {"user_id": "users.csv"}
    fixed = list_fixed_settings(config)
    assert "data.options.label" in fixed and not [name for name in fixed if "join" in name]
    moved = override_settings(config, {"data.options.join.item_id": "items.csv"})
    assert moved.data.options["join"] == {"user_id": "users.csv", "item_id": "items.csv"}


def test_a_joined_run_serves_and_exports(tmp_path, monkeypatch, capsys):
    """A record without the columns of a table gets them from it, and its own win; an export has the tables."""
    monkeypatch.chdir(tmp_path)
    rows = [(i * 7 % 2, i % 9, i % 4) for i in range(120)]
    write_csv(tmp_path / "clicks.csv", ["label", "user_id", "item_id"], rows)
    write_csv(tmp_path / "users.csv", ["user_id", "age"], [(u, 20 + u * u) for u in range(8)])
    pq.write_table(
        pa.table({"item_id": range(4), "tags": [["a"], ["b"], [], None]}), "items.parquet"
    )
    tables = [
        "--set",
        "data.options.join.user_id=users.csv",
        "--set",
        "data.options.join.item_id=items.parquet",
    ]
    command = [
        "train",
        "--data",
        "csv",
        "--path",
        "clicks.csv",
        "--run",
        "run",
        "--epochs",
        "1",
        *tables,
    ]
    assert run_command([*command, "--set", "model.dim=4"]) == 0
    assert run_command(["export", "run", "out"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "joined by user_id: age of" in text and "of the first 120 samples have no row" in text
    assert run_command(["predict", "run", "--path", "clicks.csv", "--output", "a.csv"]) == 0
    for name in ("users.csv", "items.parquet"):
        (tmp_path / name).rename(tmp_path / f"{name}.away")
    assert run_command(["predict", "out", "--path", "clicks.csv", "--output", "b.csv"]) == 0
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    wanted = [float(line) for line in (tmp_path / "a.csv").read_text().split()[1:]]
    with Predictor.open("out") as predictor:
        encoder = colonnade.build_encoder(predictor.config, predictor.schema)

        def score(batch):
            ((_, scores),) = predictor.scores([batch])
            return scores.flatten().tolist()

        records = [{"user_id": user, "item_id": str(item)} for _, user, item in rows]
        assert score(encoder.encode(json.loads(json.dumps(records)))) == wanted
        own = {"user_id": 3, "item_id": 1, "age": 20 + 25, "tags": ["a"]}
        other = {"user_id": 3.0, "item_id": 1}
        alone = {"user_id": 3, "item_id": 1, "age": 29, "tags": ["b"]}
        assert score(encoder.encode([other, own])) == score(encoder.encode([alone, own]))
        assert score(encoder.encode([own])) != score(encoder.encode([other]))
        candidates = encoder.encode_candidates(
            {"user_id": 3}, [{"item_id": 1}, {"item_id": 2, "tags": ["a"]}]
        )
        pairs = [other, {"user_id": 3, "item_id": 2, "tags": ["a"]}]
        assert score(candidates) == score(encoder.encode(pairs))
        with pytest.raises(DataError, match="got no column 'user_id', which the model reads"):
            encoder.encode([{"item_id": 1}])
