"""CSV and Parquet files at fault, and schemas that do not fit them or make no sense."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
from case import Case, train

SCHEMA = """\
fields:
  click: {type: label}
  price: {type: number, missing: 0.0}
  user: {type: category}
  city: {type: category, vocabulary: [Bern, Rome], unknown_rows: 0, missing: error}
  age: {type: bucket, boundaries: [18, 30, 60]}
  tags: {type: bag, separator: "|"}
"""
HEADER = "click,price,user,city,age,tags"
ROW = "1,2.5,u1,Bern,33,a|b"
AT = 4  # the line at fault, the header being line 1
FAST = ("train.batch_size=2", "data.options.test_fraction=0")


def _csv(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _lines(bad: str, at: int = AT) -> tuple[str, ...]:
    lines = [HEADER, *[ROW] * 8]
    lines[at - 1] = bad
    return tuple(lines)


def _run(data: str, path: str, *settings: str) -> tuple[str, ...]:
    return train(data, path, *FAST, "data.options.schema=schema.yaml", *settings)


def cases() -> list[Case]:
    return [*_csv_fields(), *_csv_shapes(), *_csv_files(), *_schemas(), *_parquets(), *_options()]


def _csv_fields() -> list[Case]:
    bad = {
        "click": ["", "2", "-1", "yes", "nan", "inf"],
        "price": ["x", "1,5x", "--1", "inf", "0x10", "1 2", "$3"],
        "city": ["", "Paris", "bern", " Bern"],
        "age": ["old", "3o", "1.2.3"],
    }
    listed = []
    for column, values in bad.items():
        for value in values:
            fields = dict(zip(HEADER.split(","), ROW.split(","), strict=True)) | {column: value}
            line = ",".join(f'"{v}"' if "," in v else v for v in fields.values())
            files = {"a.csv": _csv(*_lines(line)), "schema.yaml": SCHEMA.encode()}
            listed.append(
                Case(
                    f"csv {column} {value!a}",
                    _run("csv", "a.csv"),
                    ("a.csv", f"line {AT}", column, "got", "wanted"),
                    files,
                    may_leave=("run",),
                )
            )
    return listed


def _csv_shapes() -> list[Case]:
    shapes = {
        "too few fields": "1,2.5,u1,Bern,33",
        "too many fields": ROW + ",x",
        "tabs": ROW.replace(",", "\t"),
        "one field": "1",
        "an open quote": '1,2.5,"u1,Bern,33,a',
    }
    listed = []
    for name, line in shapes.items():
        for at in (2, AT, 9):
            files = {"a.csv": _csv(*_lines(line, at)), "schema.yaml": SCHEMA.encode()}
            listed.append(
                Case(
                    f"csv {name} at line {at}",
                    _run("csv", "a.csv"),
                    # An open quote takes the rest of the file with it: where it began, nobody can say.
                    ("a.csv", "quote" if name == "an open quote" else f"line {at}"),
                    files,
                    may_leave=("run",),
                )
            )
    return listed


def _csv_files() -> list[Case]:
    good = _csv(HEADER, *[ROW] * 8)
    contents = {
        "empty": (b"", "empty"),
        "header only": (_csv(HEADER), "a.csv"),
        "no such column": (_csv(HEADER.replace("price", "prise"), *[ROW] * 8), "price"),
        "a column twice": (_csv(HEADER.replace("user", "price"), *[ROW] * 8), "price"),
        "gzip by content": (b"\x1f\x8b\x08\x00" + b"x" * 50, "a.csv"),
        "utf-16": (good.decode().encode("utf-16"), "a.csv"),
        "invalid utf-8": (good.replace(b"u1", b"\xff\xfe", 1), "a.csv"),
        "binary": (bytes(range(256)), "a.csv"),
        "number signs": (good.replace(b",", b"#"), "a.csv"),
    }
    listed = [
        Case(
            f"csv file {name}",
            _run("csv", "a.csv"),
            (word,),
            {"a.csv": content, "schema.yaml": SCHEMA.encode()},
            may_leave=("run",),
        )
        for name, (content, word) in contents.items()
    ]
    schema = {"schema.yaml": SCHEMA.encode()}
    listed += [
        Case("csv nowhere", _run("csv", "nowhere.csv"), ("nowhere.csv",), schema),
        Case("csv folder without files", _run("csv", "data"), ("data",), schema | {"data/x.txt": b"1"}),
        Case("csv without a schema file", _run("csv", "a.csv"), ("schema.yaml",), {"a.csv": good}),
        Case("csv files of two headers", _run("csv", "data"), ("b.csv",), schema | {"data/a.csv": good, "data/b.csv": _csv("x,y", "1,2")}, may_leave=("run",)),
        Case("csv whose label nobody named", train("csv", "a.csv"), ("label",), {"a.csv": _csv("a,b", "1,2", "3,4")}),
        Case("csv whose label is no column", train("csv", "a.csv", "data.options.label=clik"), ("click",), {"a.csv": good}),
        Case("csv whose label is text", train("csv", "a.csv", "data.options.label=user"), ("user",), {"a.csv": good}),
        Case("csv given as parquet", _run("parquet", "a.csv"), ("a.csv",), schema | {"a.csv": good}),
    ]  # fmt: skip
    return listed


def _schemas() -> list[Case]:
    schemas = {
        "unknown type": ("fields: {x: {type: numbr}}", "number"),
        "no type": ("fields: {x: {}}", "type"),
        "unknown setting": ("fields: {price: {type: number, mising: 0}}", "missing"),
        "no fields": ("hash_version: 1", "fields"),
        "fields is a list": ("fields: [price]", "fields"),
        "empty": ("", "schema"),
        "not yaml": ("fields: {", "YAML"),
        "a field twice": ("fields:\n  a: {type: label}\n  a: {type: number}", "twice"),
        "an unknown hash": (SCHEMA + "hash_version: 99\n", "hash_version"),
        "nothing to read": ("fields: {click: {type: label}}", "schema"),
        "negative rows": ("fields: {user: {type: category, rows: -1}}", "rows"),
        "rows and vocabulary": ("fields: {user: {type: category, rows: 5, vocabulary: [a]}}", "vocabulary"),
        "empty vocabulary": ("fields: {user: {type: category, vocabulary: []}}", "vocabulary"),
        "vocabulary of two kinds": ("fields: {user: {type: category, vocabulary: [a, 1]}}", "vocabulary"),
        "falling boundaries": ("fields: {age: {type: bucket, boundaries: [3, 2]}}", "boundaries"),
        "no boundaries": ("fields: {age: {type: bucket}}", "boundaries"),
        "cross of one": ("fields: {user: {type: category}, c: {type: cross, of: [user]}}", "of"),
        "cross of nothing": ("fields: {user: {type: category}, c: {type: cross, of: [user, usr]}}", "usr"),
        "cross of a number": ("fields: {user: category, price: {type: number}, c: {type: cross, of: [user, price]}}", "price"),
        "std 0": ("fields: {price: {type: number, std: 0}}", "std"),
        "clip reversed": ("fields: {price: {type: number, clip: [3, 1]}}", "clip"),
        "unknown transform": ("fields: {price: {type: number, transform: sqrt}}", "transform"),
        "max_length 0": ("fields: {tags: {type: bag, max_length: 0}}", "max_length"),
        "keep middle": ("fields: {tags: {type: sequence, keep: middle}}", "keep"),
        "two weights": ("fields: {user: category, a: {type: weight}, b: {type: weight}}", "weight"),
        "shared table of two sizes": ("fields: {user: {type: category, rows: 5, table: t}, city: {type: category, rows: 6, table: t}}", "table"),
        "a dot in a name": ("fields: {a.b: {type: number}}", "a.b"),
        "a name that is a number": ("fields: {3: {type: number}}", "3"),
        "a column that is not there": ("fields: {click: {type: label}, usr: {type: category}}", "user"),
    }  # fmt: skip
    good = _csv(HEADER, *[ROW] * 8)
    return [
        Case(
            f"schema {name}",
            _run("csv", "a.csv"),
            (word,),
            {"a.csv": good, "schema.yaml": text.encode()},
        )
        for name, (text, word) in schemas.items()
    ]


def _parquet(**changes: object) -> bytes:
    columns = {
        "click": pa.array([0, 1] * 4, pa.int8()),
        "price": pa.array([0.5, 1.5] * 4),
        "user": pa.array(["u1", "u2"] * 4),
        "city": pa.array(["Bern", "Rome"] * 4),
        "age": pa.array([20, 40] * 4),
        "tags": pa.array([["a"], ["b", "c"]] * 4),
    } | changes
    out = io.BytesIO()
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), out)
    return out.getvalue()


def _parquets() -> list[Case]:
    good = _parquet()
    contents = {
        "empty": (b"", ("a.parquet",)),
        "text": (b"click,price\n1,2\n", ("a.parquet",)),
        "cut": (good[:-50], ("a.parquet",)),
        "cut to a half": (good[: len(good) // 2], ("a.parquet",)),
        "magic only": (b"PAR1PAR1", ("a.parquet",)),
        "no rows": (_parquet(**{name: pa.array([], kind) for name, kind in (("click", pa.int8()), ("price", pa.float64()), ("user", pa.string()), ("city", pa.string()), ("age", pa.int64()), ("tags", pa.list_(pa.string())))}), ("a.parquet",)),
        "no price": (_parquet(price=None), ("price",)),
        "price is text": (_parquet(price=pa.array(["x"] * 8)), ("a.parquet", "price")),
        "price is a list": (_parquet(price=pa.array([[1.0]] * 8)), ("a.parquet", "price")),
        "price is infinite": (_parquet(price=pa.array([1.0] * 5 + [float("inf")] * 3)), ("a.parquet", "row 5", "price")),
        "click is 2": (_parquet(click=pa.array([0, 1, 2, 0, 1, 0, 1, 0])), ("a.parquet", "row 2", "click")),
        "click is null": (_parquet(click=pa.array([0, 1, 0, None] * 2)), ("a.parquet", "row 3", "click")),
        "click is text": (_parquet(click=pa.array(["no"] * 8)), ("a.parquet", "click")),
        "city is unknown": (_parquet(city=pa.array(["Bern"] * 7 + ["Oslo"])), ("a.parquet", "row 7", "city", "Oslo")),
        "city is null": (_parquet(city=pa.array(["Bern"] * 6 + [None] * 2)), ("a.parquet", "row 6", "city")),
        "user is a float": (_parquet(user=pa.array([0.5] * 8)), ("a.parquet", "user")),
        "user is a date": (_parquet(user=pa.array([0] * 8, pa.date32())), ("a.parquet", "user")),
        "tags are floats": (_parquet(tags=pa.array([[0.5]] * 8)), ("a.parquet", "tags")),
        "tags are structs": (_parquet(tags=pa.array([{"a": 1}] * 8)), ("a.parquet", "tags")),
    }  # fmt: skip
    listed = [
        Case(
            f"parquet {name}",
            _run("parquet", "a.parquet"),
            words,
            {"a.parquet": content, "schema.yaml": SCHEMA.encode()},
            may_leave=("run",),
        )
        for name, (content, words) in contents.items()
    ]
    middle = len(good) // 3
    flipped = good[:middle] + bytes(byte ^ 0xFF for byte in good[middle : middle + 40]) + good[middle + 40 :]  # fmt: skip
    files = {"a.parquet": flipped, "schema.yaml": SCHEMA.encode()}
    listed.append(
        Case("parquet flipped", _run("parquet", "a.parquet"), ("a.parquet",), files, ("run",))
    )
    two = {"d/a.parquet": good, "d/b.parquet": _parquet(user=pa.array([1, 2] * 4)), "schema.yaml": SCHEMA.encode()}  # fmt: skip
    listed.append(Case("parquet of two types", _run("parquet", "d"), ("user",), two, ("run",)))
    return listed


def _options() -> list[Case]:
    files = {"a.csv": _csv(HEADER, *[ROW] * 8), "schema.yaml": SCHEMA.encode()}
    return [
        Case(f"csv option {setting}", _run("csv", "a.csv", f"data.options.{setting}"), (word,), files)
        for setting, word in (
            ("shuffle_window=-1", "shuffle_window"),
            ("shuffle_window=x", "shuffle_window"),
            ("test_fraction=1", "test_fraction"),
            ("test_fraction=x", "test_fraction"),
            ("validation_fraction=-0.5", "validation_fraction"),
            ("threads=0", "threads"),
            ("seed=-1", "seed"),
            ("days=perhaps", "days"),
            ("delimiter=ab", "delimiter"),
            ("delimeter=;", "delimiter"),
            ("split_by=nobody", "nobody"),
            ("test=nowhere.csv", "nowhere.csv"),
            ("validation=nowhere.csv", "nowhere.csv"),
        )
    ]  # fmt: skip
