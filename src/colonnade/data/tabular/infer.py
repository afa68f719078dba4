"""Inference of a file schema from the first rows: a guess that the user can print, read and correct."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from colonnade.data.contract import LABELS
from colonnade.data.tabular.arrow_types import (
    id_dtype_of,
    is_integer,
    is_list,
    is_number_type,
    is_text_type,
    is_time,
)
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import convert_to_numbers
from colonnade.data.tabular.fields import (
    Bag,
    Category,
    DeclaredField,
    Dtype,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Time,
    Weight,
    list_names,
    suggest_name,
)
from colonnade.data.tabular.narrow import matches_all, narrow_column
from colonnade.data.tabular.times import DAY, Unit, find_time_unit
from colonnade.errors import ConfigError

INFER_ROWS = 1 << 15
"""Number of rows of the first file from which a schema is inferred."""
ID_WORDS = ("id", "key", "code", "hash", "uuid")
TIME_WORDS = ("timestamp", "time", "at", "ts", "date", "datetime", "epoch")
"""Last words of the names of columns in which integers may be times."""
LOG_ABOVE = 20.0
"""Maximum above which numbers that are never negative are transformed by log1p."""
COUNT_MEDIAN = 0.05
"""Share of their range below which the median of integers lies that look like counts. Numbers of ids in order of
frequency look the same, so counts stay a category, too."""
UNIQUE_ROWS = 100
"""Minimal number of values of a unique column."""
UNIQUE_SHARE = 0.999
"""Minimal share of distinct values in a unique column."""
OUTCOME_WORDS = frozenset(
    "purchase purchased buy bought conversion converted install installed like liked follow share rating response "
    "outcome".split()
).union(LABELS)
"""Words in the names of columns of 0 and 1 that are probably outcomes, as the label is."""
COMMA_NUMBER = r"^\s*[+-]?([0-9]+|[0-9]{1,3}([.][0-9]{3})+)(,[0-9]+)?\s*$"
ODD_DATE = (
    r"^\s*([0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{4}|[0-9]{4}[./-][0-9]{1,2}[./-][0-9]{1,2}"
    r"|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2})(\s.*)?$"
)
LOOKALIKES = (
    (COMMA_NUMBER, ",", "numbers with a decimal comma", "3.14"),
    (ODD_DATE, "", "dates", "2024-05-31 or 31.05.2024"),
)
"""Texts that are probably something else: the pattern of all values, a part of some, what they are, how to write it."""
WEIGHTS = "weights: "
"""Prefix of the type of a column of weighted ids; the name of the column of weights follows."""
VALUES = "values"
"""Type of a column of weights."""
UNNAMED = "unnamed"
"""Type of a column with an empty header cell, as pandas writes its index."""
TYPES = {
    "number": "number", "float": "number", "category": "category", "token": "category", "bag": "bag",
    "sequence": "sequence", "token_seq": "token_seq", "float_seq": "float_seq", "time": "time", "label": "label",
    "key": "key", "group": "group", "weight": "weight",
}  # fmt: skip
"""Types that a header may give (`user:category`), including RecBole's."""


@dataclass(frozen=True, slots=True)
class InferredSchema:
    """Guess of a file schema. `left_out`: the reason for each column that no field reads."""

    file_schema: FileSchema
    left_out: dict[str, str]
    notes: tuple[str, ...] = ()
    """Lines about columns that are perhaps not what they are taken for."""

    def __str__(self) -> str:
        weights = [
            f"{field.weights} has the weights of {field.column}"
            for field in self.file_schema.fields
            if isinstance(field, Bag) and field.weights
        ]
        reasons = [f"{name} ({reason})" for name, reason in self.left_out.items()]
        left_out = [f"left out: {', '.join(reasons[:5])}"] if reasons else []
        fields = f"schema inferred from the first rows: {len(self.file_schema.fields)} fields"
        return "; ".join([fields, *weights, *left_out])


def infer_fields(
    path: Path,
    columns: Mapping[str, pa.Array],
    label: str | None,
    types: Mapping[str, str] | None = None,
) -> InferredSchema:
    """Infer fields from the first values of each column, in the narrowest type that holds them (`narrow_column.py`):

    fractions            a number, through log1p if it is large and never negative; if values are missing, also a
                         number that is 1 where they are
    times                hour and weekday as ids: timestamps, dates, ISO texts, and integers (seconds to nanoseconds
                         since 1970, or 20240531) in columns named like `timestamp`, `created_at`
    text                 an open category; if many values contain a |, a bag, of integers if all its elements are
    integers, booleans   an open category; but a number if more than half of 1,000 or more rows are distinct
                         and the name does not contain id, key, code or hash; both if they look like counts, most
                         of them small and few large
    unique in nearly     text, integers named as ids, row numbers: the key. One column at most, preferably one named
    every row            as an id; others are skipped
    lists of these       an open bag
    anything else        skipped (structs, lists of floats, bytes, only missing values)

    types  by column, one of TYPES if the file's header gives it, or UNNAMED

    Raises ConfigError if no column is the label, or its values are not 0 and 1.
    """
    types = dict(types or {})
    labels = [name for name, kind in types.items() if kind == "label"] if label is None else []
    labels = labels or [_choose_label_column(path, columns, label)]
    narrowed = {name: narrow_column(array) for name, array in columns.items()}
    fields: list[DeclaredField] = [
        _infer_label_field(path, name, narrowed[name]) for name in labels
    ]
    others = {name: array for name, array in narrowed.items() if name not in labels}
    notes = [
        line
        for name, array in narrowed.items()
        if name in labels or name not in types  # the header says what the others are
        for line in _describe_doubt(name, array, name in labels)
    ]
    if "key" not in types.values() and (key := _choose_key_column(others, types)) is not None:
        types[key] = "key"
    left_out = {}
    for name, array in others.items():
        kind = types.get(name) if name else UNNAMED
        inferred = infer_column_fields(path, name, array, kind)
        if isinstance(inferred, str):
            left_out[name] = inferred
        else:
            fields += inferred
    return InferredSchema(FileSchema(tuple(fields)), left_out, tuple(notes))


def _describe_doubt(name: str, array: pa.Array, is_label: bool) -> Iterator[str]:
    """Yield a line about a label with one value, and about a column that is read as something else than it looks."""
    if is_label:
        if pc.count_distinct(array).as_py() == 1:
            yield (
                f"the label {name} is {int(array.drop_null()[0].as_py())} in all of the first {len(array):,} rows: one "
                "class teaches a model nothing. Read rows of both"
            )
    elif array.type == pa.string():
        for pattern, part, meaning, example in LOOKALIKES:
            if (
                examples := array.filter(pc.match_substring(array, part))[:1].to_pylist()
            ) and matches_all(array, pattern):
                yield (
                    f"{name} has values such as {examples[0]!r}, which look like {meaning} and are read as "
                    f"text; write them as {example}"
                )
    elif (
        OUTCOME_WORDS & {*split_name(name)}
        and array.type in (pa.bool_(), pa.int64())
        and {*pc.unique(array).to_pylist()} <= {0, 1, None}
    ):
        yield (
            f"{name} looks like an outcome, too, and is read as a feature; if it is known only after the label, save "
            f"the schema of colonnade inspect and, in it, remove its line, or make it `{name}: {{type: label}}` to "
            "train on both (data.options.schema)"
        )


def _choose_label_column(
    path: Path, columns: Mapping[str, pa.Array], requested_label: str | None
) -> str:
    by_name = {name.lower(): name for name in reversed(list(columns))}
    chosen = requested_label or next((by_name[name] for name in LABELS if name in by_name), None)
    if chosen is None:
        raise ConfigError(
            f"{path}: got no column named {', '.join(LABELS)}, wanted to know the label. Say which column it is "
            f"with label (--label NAME), or, if users chose items, read them with --data interactions; the columns are "
            f"{list_names(list(columns))}"
        )
    if chosen not in columns:
        raise ConfigError(
            f"{path}: got no column {chosen!r}, which label names; {suggest_name(chosen, list(columns))}"
        )
    return chosen


def _infer_label_field(path: Path, name: str, array: pa.Array) -> Label:
    if not is_number_type(array.type):
        raise ConfigError(
            f"{path}, column {name}: got {array.type} as the label, wanted 0 and 1. Name another column, or declare a "
            f"schema with `{name}: {{type: label, positive: 'yes'}}`, which says which value is 1"
        )
    plain = Label(_field_name(name), column=name)
    x = convert_to_numbers(plain, array)
    labels = x[~np.isnan(x)]
    if len(labels) < len(x):
        plain = replace(plain, missing="unknown")
    if np.isin(labels, (0, 1)).all():
        return plain
    if np.isin(labels, (-1, 1)).all():
        return replace(plain, at_least=1.0)
    raise ConfigError(
        f"{path}, column {name}: got labels from {labels.min():g} to {labels.max():g}, wanted 0 and 1. Declare a "
        f"schema with `{name}: {{type: label, at_least: {np.median(labels):g}}}`, which says from where on it is 1, or "
        f"for gplvmf with `{name}: {{type: label, kind: number}}`"
    )


def _choose_key_column(
    columns: Mapping[str, pa.Array], header_types: Mapping[str, str]
) -> str | None:
    """Return the column on which predictions are joined: an id, else any unique column, else one without a name."""
    priorities = {}
    for name, array in columns.items():
        if array.null_count or not name or _key_dtype(array) is None:
            continue
        if header_types.get(name) == UNNAMED:
            priorities[name] = 2
        elif name not in header_types and _is_key_column(name, array):
            priorities[name] = 0 if _is_id(name) else 1
    return min(priorities, key=lambda name: priorities[name], default=None)


def _is_key_column(name: str, array: pa.Array) -> bool:
    """Return whether a column identifies rows: unique text, ids or row numbers."""
    if not _is_unique(array) or find_integer_time_unit(name, array):
        return False
    if is_text_type(array.type):
        return not _has_separator(array)
    x = array.drop_null().to_numpy(zero_copy_only=False)
    return _is_id(name) or bool((np.diff(x) == 1).all())


def _is_unique(array: pa.Array) -> bool:
    count = len(array) - array.null_count
    return count >= UNIQUE_ROWS and pc.count_distinct(array).as_py() >= UNIQUE_SHARE * count


def _key_dtype(array: pa.Array) -> Dtype | None:
    """Return the dtype of keys with these values; None if they cannot be keys."""
    return (
        None if pa.types.is_boolean(array.type) or is_list(array.type) else id_dtype_of(array.type)
    )


def infer_column_fields(
    path: Path, name: str, array: pa.Array, header_type: str | None = None
) -> list[DeclaredField] | str:
    """Infer the fields of a narrowed column by the rules of `infer_fields`, or return why there are none."""
    if header_type is None:
        return _infer_fields_from_values(name, array)
    return _build_fields_from_header(path, header_type, name, array)


def _infer_fields_from_values(
    column_name: str, arrow_column: pa.Array
) -> list[DeclaredField] | str:
    """Return the fields of a column by its values, or the reason why there are none."""
    kind = arrow_column.type
    field_name = _field_name(column_name)
    if pa.types.is_null(kind):
        return "no value in the first rows"
    if is_list(kind):
        dtype = id_dtype_of(kind)
        return (
            f"no field reads {kind}"
            if dtype is None
            else [Bag(field_name, column=column_name, dtype=dtype)]
        )
    if is_time(kind):
        return _infer_time_fields(column_name, arrow_column)
    if _key_dtype(arrow_column) is not None and _is_key_column(column_name, arrow_column):
        return "different in nearly every row"
    if pa.types.is_boolean(kind):
        return [Category(field_name, column=column_name, dtype="boolean")]
    if kind == pa.string() and _has_separator(arrow_column):
        return [Bag(field_name, column=column_name, dtype=_infer_list_dtype(arrow_column, "|"))]
    if kind == pa.string():
        return [Category(field_name, column=column_name, dtype="text")]
    if is_integer(kind):
        if find_integer_time_unit(column_name, arrow_column):
            return _infer_time_fields(column_name, arrow_column)
        is_few = (
            len(arrow_column) < 1000
            or pc.count_distinct(arrow_column).as_py() <= len(arrow_column) / 2
        )
        if _is_id(column_name) or (is_few and not _is_unique(arrow_column)):
            return _infer_integer_fields(column_name, arrow_column)
    elif pa.types.is_binary(kind):
        return "bytes that are no UTF-8 text; declare a category to read them as ids"
    elif not is_number_type(kind):
        return f"no field reads {kind}"
    return _infer_number_fields(column_name, arrow_column)


def _build_fields_from_header(
    path: Path, header_type: str, column_name: str, arrow_column: pa.Array
) -> list[DeclaredField] | str:
    """Return the fields of a column by the type in its header, or the reason why there are none."""
    field_name = _field_name(column_name)
    dtype = _key_dtype(arrow_column) or "text"
    if header_type == "number":
        if not (is_number_type(arrow_column.type) or pa.types.is_null(arrow_column.type)):
            raise ConfigError(
                f"{path}, column {column_name}: got {arrow_column.type}, wanted numbers as its header says. "
                f"Write {column_name}:category, "
                "or repair the column"
            )
        return _infer_number_fields(column_name, arrow_column)
    if header_type == "category":
        is_boolean = pa.types.is_boolean(arrow_column.type)
        return [Category(field_name, column=column_name, dtype="boolean" if is_boolean else dtype)]
    if header_type == "time":
        return _infer_time_fields(column_name, arrow_column)
    if header_type == "bag":
        return [Bag(field_name, column=column_name, dtype=_infer_list_dtype(arrow_column, "|"))]
    if header_type in ("sequence", "token_seq"):
        separator = "|" if header_type == "sequence" else " "
        dtype = _infer_list_dtype(arrow_column, separator)
        return [Sequence(field_name, column=column_name, dtype=dtype, separator=separator)]
    if header_type == VALUES:
        return []
    if header_type.startswith(WEIGHTS):
        return [
            Bag(
                field_name,
                column=column_name,
                dtype=id_dtype_of(arrow_column.type) or "integer",
                weights=header_type.removeprefix(WEIGHTS),
            )
        ]
    if header_type == "key":
        return [Key(field_name, column=column_name, dtype=dtype)]
    if header_type == "group":
        return [Group(field_name, column=column_name, dtype=dtype)]
    if header_type == "weight":
        return [Weight(field_name, column=column_name)]
    return "no name" if header_type == UNNAMED else f"no field reads {header_type}"


def _infer_time_fields(name: str, array: pa.Array) -> list[DeclaredField]:
    """Return fields for hour, unless all times are dates, and weekday. An age would be constant in all later files."""
    field_name = _field_name(name)
    weekday = Time(f"{field_name}_weekday", column=name, part="weekday")
    is_dates = find_integer_time_unit(name, array) == "yyyymmdd" or (
        pa.types.is_timestamp(array.type)
        and not (array.drop_null().cast(pa.int64()).to_numpy(zero_copy_only=False) % DAY).any()
    )
    hour = Time(f"{field_name}_hour", column=name, part="hour")
    return [weekday] if is_dates else [hour, weekday]


def _infer_number_fields(name: str, array: pa.Array) -> list[DeclaredField]:
    """Return a number and, if values are missing, one that says so."""
    number = Number(_field_name(name), column=name, missing=0.0)
    x = convert_to_numbers(number, array)
    present = x[np.isfinite(x)]
    if len(present) and present.min() >= 0 and present.max() > LOG_ABOVE:
        number = replace(number, transform="log1p")
    if not np.isnan(x).any() or not len(present):
        return [number]
    flag = Number(f"{number.name}_missing", column=name, transform="is_missing")
    return [number, flag]


def _infer_integer_fields(name: str, array: pa.Array) -> list[DeclaredField]:
    """Return a category and, if its values look like counts, a number."""
    category = Category(_field_name(name), column=name, dtype="integer")
    x = array.drop_null().to_numpy(zero_copy_only=False)
    spread = float(x.max()) - float(x.min())
    is_count = spread > LOG_ABOVE and np.median(x) - x.min() < COUNT_MEDIAN * spread
    if _is_id(name) or not is_count:
        return [category]
    number, *_ = _infer_number_fields(name, array)
    return [category, replace(number, name=f"{number.name}_number")]


def _has_separator(texts: pa.Array) -> bool:
    num_separated = pc.sum(pc.match_substring(texts, "|")).as_py() or 0
    return num_separated > 0.1 * max(len(texts) - texts.null_count, 1)


def _infer_list_dtype(array: pa.Array, separator: str) -> Dtype:
    """Return the dtype of lists written as text: that of a column of their elements."""
    if array.type == pa.string():
        array = narrow_column(pc.split_pattern(array, separator).flatten())
    return _key_dtype(array) or "text"


def find_integer_time_unit(name: str, array: pa.Array) -> Unit | None:
    """Return the unit in which all integers of a column with the name of a time are times; None if there is none."""
    if not pa.types.is_integer(array.type) or split_name(name)[-1] not in TIME_WORDS:
        return None
    unit, share = find_time_unit(array) or ("s", 0.0)
    return unit if share == 1 else None


def _is_id(name: str) -> bool:
    return any(part in ID_WORDS for part in split_name(name)) or name.lower().endswith("id")


def split_name(name: str) -> list[str]:
    """Split `created_at`, `created-at` and `createdAt` alike."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]", "_", name).lower().split("_")


def _field_name(name: str) -> str:
    return name.replace(".", "_")
