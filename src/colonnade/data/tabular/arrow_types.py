"""Type checks of Arrow columns: texts, integers, numbers, times and lists, plain or dictionary-encoded."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

Dtype = Literal["text", "integer", "boolean"]
MISSING_NUMBER = r"^(?i:|null|\\n|na|none|nan)$"
"""Texts that are missing values where numbers or times are read, after trimming."""


def is_text_type(arrow_type: pa.DataType) -> bool:
    """Return whether a column, or the values of a dictionary-encoded one, are strings or bytes."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
    )
    return any(check(arrow_type) for check in checks)


def is_integer(arrow_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return pa.types.is_integer(arrow_type) or pa.types.is_boolean(arrow_type)


def is_number_type(arrow_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return (
        is_integer(arrow_type)
        or pa.types.is_floating(arrow_type)
        or pa.types.is_decimal(arrow_type)
    )


def is_time(arrow_type: pa.DataType) -> bool:
    return pa.types.is_timestamp(arrow_type) or pa.types.is_date(arrow_type)


def is_list(arrow_type: pa.DataType) -> bool:
    return (
        pa.types.is_list(arrow_type)
        or pa.types.is_large_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )


def id_dtype_of(arrow_type: pa.DataType) -> Dtype | None:
    """Return the dtype of the ids that a column of this type (or its lists) holds; None: it holds no ids."""
    if is_list(arrow_type):
        arrow_type = arrow_type.value_type
    if pa.types.is_boolean(arrow_type):
        return "boolean"
    return "text" if is_text_type(arrow_type) else "integer" if is_integer(arrow_type) else None


def replace_views(schema: pa.Schema) -> pa.Schema:
    """Return a schema with texts in place of views of texts, which few functions of Arrow read, also in lists and
    dictionaries."""
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}

    def replace_type(arrow_type: pa.DataType) -> pa.DataType:
        if pa.types.is_dictionary(arrow_type):
            values = replace_type(arrow_type.value_type)
            return pa.dictionary(arrow_type.index_type, values, arrow_type.ordered)
        if is_list(arrow_type) and replace_type(arrow_type.value_type) != arrow_type.value_type:
            return pa.large_list(replace_type(arrow_type.value_type))
        return plain.get(arrow_type, arrow_type)

    fields = [field.with_type(replace_type(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def replace_null_type(array: pa.Array) -> pa.Array:
    """Cast a column of Arrow's null type to missing texts; return other columns unchanged."""
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    """Return the values of a chunked column as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)
