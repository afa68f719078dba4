"""Type checks of Arrow columns: texts, integers, numbers, times and lists, plain or dictionary-encoded."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

Dtype = Literal["text", "integer"]


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column, or the values of a dictionary-encoded one, are strings or bytes."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
              pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)  # fmt: skip
    return any(check(kind) for check in checks)


def is_integer(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def is_number(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def is_time(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def id_dtype_of(kind: pa.DataType) -> Dtype | None:
    """Return the dtype of the ids that a column of this type (or its lists) holds; None: it holds no ids."""
    if is_list(kind):
        kind = kind.value_type
    return "text" if is_text(kind) else "integer" if is_integer(kind) else None


def replace_null_type(array: pa.Array) -> pa.Array:
    """Cast a column of Arrow's null type to missing texts; return other columns unchanged."""
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    """Return the values of a chunked column as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)
