"""What an Arrow column holds: texts, integers, numbers, lists; in a dictionary or plain."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

Dtype = Literal["text", "integer"]


def is_text(kind: pa.DataType) -> bool:
    """Of a column or, of a dictionary, its values."""
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


def dtype_in(kind: pa.DataType) -> Dtype | None:
    """What ids a column of this type holds; None: none."""
    if is_list(kind):
        kind = kind.value_type
    return "text" if is_text(kind) else "integer" if is_integer(kind) else None


def typed(array: pa.Array) -> pa.Array:
    """A column of nulls only is one of missing texts."""
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """The values in one piece."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)
