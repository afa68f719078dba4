"""Whether the columns of a file are what a declaration reads of them, said before a sample is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from colonnade.data.tabular.arrow import dtype_in, is_integer, is_list, is_number, is_text, is_time
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Category,
    Dtype,
    Field,
    Group,
    Key,
    Label,
    Number,
    Time,
    Weight,
    nearest,
)
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.errors import DataError

Named = Category | Bag | SequenceField | Group | Key
"""Fields whose values are texts or integers."""


def check_names(
    path: Path, names: Sequence[str], declaration: Declaration, split_by: str | None
) -> None:
    """Raises DataError for a name that is there twice, and for a column that is not there."""
    there = set(names)
    refuse_repeated(path, names)
    for field in declaration.fields:
        for column in field.columns:
            if column not in there:
                raise DataError(
                    f"{path}: got no column {column!r}, which the field {field.name!r} reads; "
                    f"{nearest(column, list(names))}"
                )
    if split_by is not None and split_by not in there:
        raise DataError(
            f"{path}: got no column {split_by!r}, which split_by names; {nearest(split_by, list(names))}"
        )


def refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Raises DataError."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(
                f"{path}: got two columns named {name!r}, wanted each name once. Rename one of them"
            )
        seen.add(name)


def settle(declaration: Declaration, found: Mapping[str, Dtype | None]) -> Declaration:
    """The declaration with every `dtype` said. `found`: what the columns hold, None where nobody knows."""
    fields: list[Field] = []
    for field in declaration.fields:
        if isinstance(field, Named) and field.dtype is None:
            field = replace(field, dtype=_dtype_asked(field) or found.get(field.column) or "text")
        fields.append(field)
    return replace(declaration, fields=tuple(fields))


def _dtype_asked(field: Named) -> Dtype | None:
    """What the declaration of its ids says that the values are."""
    if isinstance(field, Group | Key):
        return None
    if field.cardinality is not None:
        return "integer"
    if field.vocabulary is not None:
        return "text" if isinstance(field.vocabulary[0], str) else "integer"
    return None


def check_types(path: Path, types: Mapping[str, pa.DataType], declaration: Declaration) -> None:
    """`declaration` settled. Raises DataError for a column whose type its field cannot read."""
    for field in declaration.fields:
        for column in field.columns:
            is_weights = isinstance(field, Bag) and column == field.weights
            wanted, fix = (_wanted_weights if is_weights else _wanted)(field, types[column])
            if wanted:
                raise DataError(
                    f"{path}, column {column}: got {types[column]}, wanted {wanted}, because the field "
                    f"{field.name!r} is a {type(field).__name__.lower()}. {fix}"
                )


def _wanted_weights(_: Field, kind: pa.DataType) -> tuple[str, str]:
    suits = is_text(kind) or (is_list(kind) and is_number(kind.value_type))
    return ("", "") if suits else ("lists of numbers", "Read another column")


def _wanted(field: Field, kind: pa.DataType) -> tuple[str, str]:
    """("", "") where the type suits the field; else what would, and what to do."""
    if pa.types.is_null(kind):
        return "", ""  # all values are missing
    if isinstance(field, Label) and field.positive is not None:
        is_named = is_text(kind) or is_integer(kind)
        return ("", "") if is_named else ("texts or integers", "Leave positive out")
    if isinstance(field, Time) or (isinstance(field, Number) and field.days_before is not None):
        suits = is_time(kind) or is_text(kind) or is_number(kind)
        return ("", "") if suits else ("times", "Read another column")
    if isinstance(field, Number | Bucket | Label | Weight):
        if is_number(kind) or is_text(kind):
            return "", ""
        fix = "Declare a time, or give days_before" if is_time(kind) else "Convert the column"
        return "numbers", f"{fix}, or read another column"
    assert isinstance(field, Named)
    return _wanted_of_ids(field, kind)


def _wanted_of_ids(field: Named, kind: pa.DataType) -> tuple[str, str]:
    """Return what `_wanted` does, for a field of ids whose column has some value."""
    several = isinstance(field, Bag | SequenceField)
    if is_list(kind) and not several:
        return "one value per row", "Declare a bag or a sequence"
    if several and not is_list(kind) and not is_text(kind):
        return "lists, or text with a separator", "Declare a category"
    if is_list(kind) and pa.types.is_null(kind.value_type):
        return "", ""  # all lists are empty
    holds = dtype_in(kind)
    if holds is None:
        values = kind.value_type if is_list(kind) else kind
        is_real = pa.types.is_floating(values) or pa.types.is_decimal(values)
        if is_real and field.dtype == "integer":
            return "", ""  # each is checked to be whole
        fix = "Numbers become ids with a bucket field or, if all are whole, with `dtype: integer`"
        return "text or integers", fix
    if holds == "integer" and field.dtype == "text":
        return "text", "Declare `dtype: integer`, or convert the column"
    return "", ""
