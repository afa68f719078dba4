"""Checks that the columns of a file suit its schema, made before a sample is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from colonnade.data.tabular.arrow_types import (
    id_dtype_of,
    is_integer,
    is_list,
    is_number_type,
    is_text_type,
    is_time,
)
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Category,
    DeclaredField,
    Dtype,
    Group,
    Key,
    Label,
    Number,
    Weight,
    list_names,
    reads_times,
    suggest_name,
)
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.errors import DataError

IdentifierField = Category | Bag | SequenceField | Group | Key
"""Fields with values that are texts or integers."""


def check_required_columns(
    path: Path, column_names: Sequence[str], file_schema: FileSchema, split_column: str | None
) -> None:
    """Raise DataError for a repeated column name, and for a missing column that the schema or the split reads."""
    existing = set(column_names)
    check_unique_column_names(path, column_names)
    for field in file_schema.fields:
        for column in field.columns:
            if column not in existing:
                raise DataError(
                    f"{path}: got no column {column!r}, which the field {field.name!r} reads; "
                    f"{suggest_name(column, list(column_names))}"
                )
    if split_column is not None and split_column not in existing:
        raise DataError(
            f"{path}: got no column {split_column!r}, which split_by or order_by names; "
            f"{suggest_name(split_column, list(column_names))}"
        )


def check_unique_column_names(path: Path, column_names: Sequence[str]) -> None:
    """Raise DataError for a repeated column name."""
    unique: set[str] = set()
    for name in column_names:
        if name in unique:
            raise DataError(
                f"{path}: got two columns named {name!r}, wanted each name once. Rename one of them; the columns are "
                f"{list_names(list(column_names))}"
            )
        unique.add(name)


def resolve_dtypes(
    file_schema: FileSchema, column_dtypes: Mapping[str, Dtype | None]
) -> FileSchema:
    """Return the schema with every `dtype` set. `column_dtypes`: of the file's columns, None if unknown."""
    fields: list[DeclaredField] = []
    for field in file_schema.fields:
        if isinstance(field, IdentifierField) and field.dtype is None:
            declared = None if isinstance(field, Group | Key) else field.declared_dtype
            field = replace(field, dtype=declared or column_dtypes.get(field.column) or "text")
        fields.append(field)
    return replace(file_schema, fields=tuple(fields))


def check_column_types(
    path: Path, column_types: Mapping[str, pa.DataType], file_schema: FileSchema
) -> None:
    """Raise DataError for a column with a type that its field cannot read. Every `dtype` of the schema is set.

    column_types: of the columns that have one; texts are checked when they are read."""
    for field in file_schema.fields:
        for column in column_types.keys() & set(field.columns):
            is_weights = isinstance(field, Bag) and column == field.weights
            check = _weights_type_problem if is_weights else _find_type_problem
            wanted, fix = check(field, column_types[column])
            if wanted:
                raise DataError(
                    f"{path}, column {column}: got {column_types[column]}, wanted {wanted}, because the field "
                    f"{field.name!r} is a {type(field).__name__.lower()}. {fix}"
                )


def _weights_type_problem(_: DeclaredField, arrow_type: pa.DataType) -> tuple[str, str]:
    suits = is_text_type(arrow_type) or (
        is_list(arrow_type) and is_number_type(arrow_type.value_type)
    )
    return ("", "") if suits else ("lists of numbers", "Read another column")


def _find_type_problem(field: DeclaredField, arrow_type: pa.DataType) -> tuple[str, str]:
    """Return ("", "") if the type suits the field, else the wanted type and the fix, for a message."""
    if pa.types.is_null(arrow_type):
        return "", ""  # all values are missing
    if isinstance(field, Label) and field.positive is not None:
        suits = is_text_type(arrow_type) or is_integer(arrow_type)
        return ("", "") if suits else ("texts or integers", "Leave positive out")
    if reads_times(field):
        suits = is_time(arrow_type) or is_text_type(arrow_type) or is_number_type(arrow_type)
        return ("", "") if suits else ("times", "Read another column")
    if isinstance(field, Number | Bucket | Label | Weight):
        if is_number_type(arrow_type) or is_text_type(arrow_type):
            return "", ""
        fix = "Declare a time, or give days_before" if is_time(arrow_type) else "Convert the column"
        return "numbers", f"{fix}, or read another column"
    assert isinstance(field, IdentifierField)
    return _find_id_type_problem(field, arrow_type)


def _find_id_type_problem(field: IdentifierField, arrow_type: pa.DataType) -> tuple[str, str]:
    """Return what `_check_type` does, for a field of ids and a column that is not all null."""
    is_list_field = isinstance(field, Bag | SequenceField)
    if is_list(arrow_type) and not is_list_field:
        return "one value per row", "Declare a bag or a sequence"
    if is_list_field and not is_list(arrow_type) and not is_text_type(arrow_type):
        return "lists, or text with a separator", "Declare a category"
    if is_list(arrow_type) and pa.types.is_null(arrow_type.value_type):
        return "", ""  # all lists are empty
    holds = id_dtype_of(arrow_type)
    if holds is None:
        values = arrow_type.value_type if is_list(arrow_type) else arrow_type
        is_real = pa.types.is_floating(values) or pa.types.is_decimal(values)
        if is_real and field.dtype == "integer":
            return "", ""  # every value is checked to be whole when it is read
        fix = "Numbers become ids with a bucket field or, if all are whole, with `dtype: integer`"
        return "text or integers", fix
    if holds != "text" and field.dtype == "text":
        return "text", "Declare `dtype: integer`, or convert the column"
    return "", ""
