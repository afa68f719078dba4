"""Declared schemas: the same from Python, plain values and YAML; what cannot work is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_files import DECLARATION

from colonnade.data import load_file_schema
from colonnade.data.contract import Column, Schema
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
from colonnade.errors import ConfigError

names = st.text(min_size=1, max_size=8).filter(lambda name: "." not in name)
reals = st.floats(-1e6, 1e6)


def ids(draw):
    """Settings of a field of ids that go together."""
    how = draw(st.sampled_from(["open", "rows", "cardinality", "texts", "integers"]))
    settings = {"missing": draw(st.sampled_from(["row", "error"]))}
    if how in ("rows", "cardinality"):
        settings[how] = draw(st.integers(1, 2**40))
    if how == "texts":
        settings["vocabulary"] = draw(
            st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True)
        )
    if how == "integers":
        settings["vocabulary"] = draw(
            st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4, unique=True)
        )
    if "vocabulary" in settings:
        settings["unknown_rows"] = draw(st.integers(0, 9))
    return settings


@st.composite
def declarations(draw):
    fields = []
    for name in draw(st.lists(names, min_size=2, max_size=7, unique=True)):
        column = {"column": draw(names)}
        kind = draw(st.sampled_from(["number", "category", "bag", "sequence", "bucket", "label"]))
        if kind == "number":
            low = draw(reals)
            fields.append(
                Number(
                    name,
                    **column,
                    missing=draw(reals | st.none()),
                    clip=draw(st.just((low, low + 1)) | st.none()),
                    transform=draw(st.sampled_from([None, "log1p"])),
                    mean=draw(reals),
                    std=draw(st.floats(1e-3, 1e3)),
                )
            )
        elif kind == "category":
            fields.append(Category(name, **column, **ids(draw)))
        elif kind in ("bag", "sequence"):
            several = Bag if kind == "bag" else Sequence
            length = draw(st.none() | st.integers(1, 9))
            keep = draw(st.sampled_from(["first", "last"]))
            settings = {"separator": draw(st.text(min_size=1, max_size=2)), "keep": keep}
            fields.append(several(name, **column, **ids(draw), **settings, max_length=length))
        elif kind == "bucket":
            edges = sorted(draw(st.sets(reals, min_size=1, max_size=4)))
            fields.append(Bucket(name, **column, boundaries=edges))
        else:
            fields.append(Label(name, **column, at_least=draw(st.none() | reals)))
    fields.append(Number("one more", column="x"))
    if len({field.name for field in fields}) < len(fields):
        fields.pop()
        fields.append(Number("one more still", column="x"))
    crossable = [field.name for field in fields if isinstance(field, Category | Bucket)]
    if len(crossable) >= 2:
        fields.append(Cross("crossed over all", of=crossable, rows=draw(st.none() | st.just(5))))
    return FileSchema(fields)


@given(declarations())
def test_plain_values_json_and_yaml_give_it_back(declaration):
    assert FileSchema.from_dict(declaration.to_dict()) == declaration
    assert FileSchema.from_dict(json.loads(json.dumps(declaration.to_dict()))) == declaration
    assert FileSchema.from_yaml(declaration.to_yaml()) == declaration


def test_yaml_has_one_line_per_field_and_only_what_was_said():
    text = FileSchema(
        [Label("click"), Number("price", missing=0.0), Category("user", column="user_id")]
    ).to_yaml()
    assert text == (
        "hash_version: 1\n"
        "encoding_version: 3\n"
        "fields:\n"
        "  click: {type: label}\n"
        "  price: {type: number, missing: 0.0}\n"
        "  user: {type: category, column: user_id}\n"
    )


def test_the_schema_of_batches():
    assert DECLARATION.schema == Schema(
        dense=("price",),
        categorical=(
            Column("city"),
            Column("city_rows", 7),
            Column("known", 2 + 2 + 1),  # two values, two rows for others, one for missing
            Column("user"),
            Column("tags", kind="bag"),
            Column("history", 101, kind="sequence"),
            Column("age", 5),  # three boundaries: four buckets, one for missing
            Column("city_age", 50),
        ),
        labels=("click",),
    )
    assert DECLARATION.inputs().schema == Schema(
        DECLARATION.schema.dense, DECLARATION.schema.categorical, ()
    )


def test_fields_may_share_a_table():
    shared = FileSchema([Category("seen", table="item"), Bag("bought", table="item")])
    assert [column.table for column in shared.schema.categorical] == ["item", "item"]


def test_fields_that_share_no_value_may_share_a_table_and_encode_differently():
    FileSchema(
        [
            Category("a", dtype="integer", table="t", rows=9, namespace=True),
            Category("b", dtype="text", table="t", rows=9, namespace=True),
            Category("c", dtype="integer", table="t", rows=9),
            Cross("d", of=("a", "b"), table="t", rows=9),
            Category("hour", cardinality=24, missing="error"),
            Time("at", part="hour", missing="error", table="hour"),
        ]
    )


def test_a_schema_may_be_given_in_any_form(tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text(DECLARATION.to_yaml(), encoding="utf-8")
    forms = [DECLARATION, DECLARATION.fields, list(DECLARATION.fields), DECLARATION.to_dict()]
    forms += [path, str(path)]
    assert all(load_file_schema(form) == DECLARATION for form in forms)
    assert load_file_schema({"fields": {"price": "number"}}).fields == (Number("price"),)


REFUSED = {
    "got missing='x'": lambda: Number("a", missing="x"),
    "field 'a': got missing=nan": lambda: Number("a", missing=float("nan")),
    "got rows=True": lambda: Category("a", rows=True),
    "got rows=0": lambda: Category("a", rows=0),
    "got rows=2.5": lambda: Category("a", rows=2.5),
    "got rows='10'": lambda: Category("a", rows="10"),
    "both rows and cardinality": lambda: Category("a", rows=3, cardinality=2),
    "both cardinality and vocabulary": lambda: Category("a", vocabulary=["x"], cardinality=2),
    "both texts and integers": lambda: Category("a", vocabulary=["x", 1]),
    "'x' twice": lambda: Category("a", vocabulary=["x", "y", "x"]),
    "a vocabulary with no value": lambda: Category("a", vocabulary=[]),
    "got '' in the vocabulary": lambda: Category("a", vocabulary=[""]),
    "got vocabulary=[True]": lambda: Category("a", vocabulary=[True]),
    "the vocabulary holds integer values": lambda: Category("a", vocabulary=[1], dtype="text"),
    "ids are integers": lambda: Category("a", cardinality=3, dtype="text"),
    "got unknown_rows=2": lambda: Category("a", unknown_rows=2),
    "got missing='drop'": lambda: Category("a", missing="drop"),
    "got dtype='int'": lambda: Category("a", dtype="int"),
    "in rising order": lambda: Bucket("a", boundaries=[2, 1]),
    "at least one number": lambda: Bucket("a", boundaries=[]),
    "got std=0": lambda: Number("a", std=0),
    "got clip=(2.0, 1.0)": lambda: Number("a", clip=(2, 1)),
    "got clip=(1,)": lambda: Number("a", clip=(1,)),
    "got transform='log'": lambda: Number("a", transform="log"),
    "got max_length=0": lambda: Bag("a", max_length=0),
    "at least one character": lambda: Bag("a", separator=""),
    "got keep='newest'": lambda: Sequence("a", keep="newest"),
    "two or more different fields": lambda: Cross("a", of=("b", "b")),
    "got at_least='four'": lambda: Label("a", at_least="four"),
    "one without a dot": lambda: Number("a.b"),
    "field '': got this name": lambda: Number(""),
    "field 3: got name=3, wanted text": lambda: Number(3),
    "nothing that a model can read": lambda: FileSchema([Label("y")]),
    "two fields named 'a'": lambda: FileSchema([Number("a"), Category("a")]),
    "2 fields of type weight (v, w)": lambda: FileSchema([Number("a"), Weight("v"), Weight("w")]),
    "2 fields of type group": lambda: FileSchema([Number("a"), Group("v"), Group("w")]),
    "2 fields of type key": lambda: FileSchema([Number("a"), Key("v"), Key("w")]),
    "got 'price' as a field": lambda: FileSchema(["price"]),
    "hash_version=2, wanted 1": lambda: FileSchema([Number("a")], 2),
    "no field 'bb'; did you mean 'b'": lambda: FileSchema(
        [Category("a"), Category("b"), Cross("c", of=("a", "bb"))]
    ),
    "got 'n', a number, wanted categories": lambda: FileSchema(
        [Category("a"), Number("n"), Cross("c", of=("a", "n"))]
    ),
    "got 3 rows and an open table": lambda: FileSchema(
        [Category("a", rows=3), Category("b", table="a")]
    ),
    "got unit='ms'; it is for times: give days_before": lambda: Number("a", unit="ms"),
    "got unit='h'": lambda: Time("a", part="hour", unit="h"),
    "got padding='0'; wanted a value of dtype integer": lambda: Bag("a", dtype="integer", padding="0"),
    "got padding=0; wanted a value of dtype text": lambda: Bag("a", dtype="text", padding=0),
    "got null_values=('NA',); in integers NULL": lambda: Category("a", cardinality=3, null_values=["NA"]),
    "got null_values=None and null_values=('NA',), wanted the same": lambda: FileSchema(
        [Category("a"), Bag("b", null_values=["NA"], table="a")]
    ),
    "encoding_version=2, wanted 3": lambda: FileSchema([Number("a")], 1, 2),
    "fields 'film' and 'watched' share the table 'film': got dtype=integer and dtype=text": lambda: FileSchema(
        [Category("film", dtype="integer"), Bag("watched", dtype="text", table="film")]
    ),
    "got dtype=integer and dtype=text, wanted the same": lambda: FileSchema(
        [Category("a", vocabulary=[1, 2]), Category("b", vocabulary=["1", "2"], table="a")]
    ),
    "got vocabulary=('new', 'sale') and vocabulary=('sale', 'new')": lambda: FileSchema(
        [Category("a", vocabulary=["new", "sale"]), Bag("b", vocabulary=["sale", "new"], table="a")]
    ),
    "got rows=4 and rows=None, wanted the same": lambda: FileSchema(
        [Category("a", rows=4, dtype="integer"), Sequence("b", cardinality=3, table="a")]
    ),
    "got unknown_rows=1 and unknown_rows=2": lambda: FileSchema(
        [Category("a", vocabulary=["x"]),
         Category("b", vocabulary=["x"], unknown_rows=2, missing="error", table="a")]
    ),
    "got boundaries=(1.0,) and boundaries=(2.0,)": lambda: FileSchema(
        [Bucket("a", boundaries=[1]), Bucket("b", boundaries=[2], table="a")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused(message):
    with pytest.raises(ConfigError) as caught:
        REFUSED[message]()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


REFUSED_YAML = {
    "wanted a mapping with `fields:`": "- price",
    "wanted one line per field": "fields:\n",
    "wanted one line per field, such as": "fields: [price]",
    "no setting 'feilds'; did you mean 'fields'": "feilds: {}",
    "wanted settings with a type": "fields: {price: {missing: 0}}",
    "field 'price': got None": "fields: {price: }",
    "got type 'numbr'; did you mean 'number'": "fields: {price: numbr}",
    "got type 3": "fields: {price: {type: 3}}",
    "no setting 'mising'; did you mean 'missing'": "fields: {p: {type: number, mising: 0.0}}",
    "a bucket needs boundaries": "fields: {p: {type: bucket}}",
    "a field named 3 (int)": "fields: {3: number}",
    "a field named True (bool)": "fields: {yes: number}",
    "the key 'a' twice": "fields:\n  a: number\n  a: category\n",
    "the key 'type' twice": "fields: {a: {type: number, type: number}}",
    "not YAML": "fields: {a: [}",
    "hash_version='one'": "hash_version: one\nfields: {a: number}",
    "hash_version=True": "hash_version: true\nfields: {a: number}",
    "got rows=-1": "fields: {a: {type: category, rows: -1}}",
    "got missing='0,5'": "fields: {a: {type: number, missing: '0,5'}}",
    "found character that cannot start any token": "fields:\n\ta: number",
    "could not determine a constructor": "fields: !!python/object:os.system {}",
    "unhashable": "fields: {[1]: number}",
}


@pytest.mark.parametrize("message", REFUSED_YAML)
def test_a_schema_file_at_fault_is_named(message, tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text(REFUSED_YAML[message], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_file_schema(path)
    assert message in str(caught.value) and str(caught.value).startswith(f"schema {path}: ")
    assert "\n" not in str(caught.value)


def test_a_schema_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*leave schema out to infer one"):
        load_file_schema(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="got a folder, wanted a regular file"):
        load_file_schema(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        load_file_schema(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match="got schema=7"):
        load_file_schema(7)
