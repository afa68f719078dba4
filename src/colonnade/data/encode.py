"""From Arrow columns of a file to the numbers that a declaration makes of them.

Legend: S samples of a block, E elements of its lists.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.chunk import Bags, Chunk, Floats, Longs, gather
from colonnade.data.declaration import Declaration
from colonnade.data.fields import (
    Bag,
    Bucket,
    Category,
    Cross,
    Dtype,
    Field,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Weight,
)
from colonnade.data.hashing import MISSING_ID, cross_ids, hash_texts, rows_of, text_buffers

FIX = "Repair or remove the row"


class Fault(Exception):
    """A value that does not fit its field; `row` counts from 0 in the block. Becomes a DataError naming the file."""

    def __init__(self, row: int, column: str, got: str, wanted: str, fix: str = FIX) -> None:
        super().__init__(f"row {row}, column {column}: got {got}, wanted {wanted}. {fix}")
        self.row, self.column = row, column
        self.got, self.wanted, self.fix = got, wanted, fix


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


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def encode(
    declaration: Declaration,
    columns: Mapping[str, pa.Array],
    num_samples: int,
    *,
    split_by: str | None = None,
) -> Chunk:
    """Of one block. `columns`: arrays of length S, by column of the file. Raises Fault at the first value at fault."""
    columns = {name: _typed(array) for name, array in columns.items()}
    numbers = declaration.numbers
    dense = np.empty((num_samples, len(numbers)), dtype=np.float32)
    for j, field in enumerate(numbers):
        encode_number(field, columns[field.column], dense[:, j])
    if not np.isfinite(dense).all():
        row, j = np.argwhere(~np.isfinite(dense))[0]
        raise _number_fault(numbers[j], columns[numbers[j].column], int(row))

    ids: dict[str, Longs | Bags] = {}
    for each in declaration.categorical:
        if isinstance(each, Cross):
            continue
        array = columns[each.column]
        if isinstance(each, Bucket):
            ids[each.name] = encode_bucket(each, array)
        elif isinstance(each, Category):
            ids[each.name] = encode_ids(each, array)
        else:
            ids[each.name] = encode_several(each, array)
    for each in declaration.categorical:
        if isinstance(each, Cross):
            crossed = cross_ids([ids[part] for part in each.of])  # type: ignore[misc]
            ids[each.name] = crossed if each.rows is None else rows_of(crossed, each.rows)

    label = None
    if declaration.labels:
        label = np.empty((num_samples, len(declaration.labels)), dtype=np.float32)
        for j, task in enumerate(declaration.labels):
            label[:, j] = encode_label(task, columns[task.column])
    weight, group, key = (declaration.one(kind) for kind in (Weight, Group, Key))
    return Chunk(
        dense,
        tuple(ids[each.name] for each in declaration.categorical),
        label,
        None if weight is None else encode_weight(weight, columns[weight.column]),
        None if group is None else encode_name(group, columns[group.column]),
        None if key is None else encode_name(key, columns[key.column]),
        None if split_by is None else encode_part(split_by, columns[split_by]),
    )


def _typed(array: pa.Array) -> pa.Array:
    """A column of nulls only is one of missing texts."""
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def encode_number(field: Number, array: pa.Array, out: NDArray[np.float32]) -> None:
    """(S,) into `out`; a missing value without a substitute, or an infinite one, is left there not finite."""
    x = read_numbers(field, array)
    missing = np.isnan(x)
    if field.clip is not None:
        # Clipping must not hide an infinite value.
        infinite = np.isinf(x)
        if infinite.any():
            raise _number_fault(field, array, int(infinite.argmax()))
        x = np.clip(x, *field.clip)
    if field.transform == "log1p":
        x = np.log1p(np.maximum(x, 0))
    if field.mean or field.std != 1:
        x = (x - field.mean) / field.std
    with np.errstate(over="ignore"):
        out[:] = x
    if field.missing is not None and missing.any():
        out[missing] = field.missing


def read_numbers(field: Field, array: pa.Array) -> NDArray[np.float64]:
    """(S,) float64, NaN where missing. Text must spell numbers."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = _parse(field, array, pa.float64(), "a number")
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.null_count:
        array = pc.fill_null(array.cast(pa.float64(), safe=False), np.nan)
    return array.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)


def _parse(field: Field, array: pa.Array, kind: pa.DataType, wanted: str) -> pa.Array:
    """Texts -> numbers; an empty text is missing."""
    array = pc.utf8_trim_whitespace(array.cast(pa.string()))
    array = pc.if_else(pc.equal(array, ""), None, array)
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        for row, text in enumerate(array):
            try:
                text.cast(kind)
            except pa.ArrowInvalid:
                raise Fault(row, field.column, repr(text.as_py())[:60], wanted) from None
        raise


def _number_fault(field: Number, array: pa.Array, row: int) -> Fault:
    value = read_numbers(field, array.slice(row, 1))[0]
    if np.isnan(value):
        return Fault(row, field.column, "nothing", "a number",
                     f"Say what a missing {field.name} is: `missing: 0.0` is common")  # fmt: skip
    wanted = "a finite number" if np.isinf(value) else "one that float32 holds once transformed"
    return Fault(row, field.column, f"{value:g}", wanted)


def encode_bucket(field: Bucket, array: pa.Array) -> Longs:
    """(S,): how many boundaries are <= the number; infinite ones lie beyond all."""
    x = read_numbers(field, array)
    ids = np.searchsorted(np.array(field.boundaries), x, side="right").astype(np.int64)
    missing = np.isnan(x)
    if missing.any():
        if field.missing == "error":
            raise _missing_fault(field, int(missing.argmax()))
        ids[missing] = len(field.boundaries) + 1
    return ids


def _missing_fault(field: Field, row: int) -> Fault:
    return Fault(row, field.column, "nothing", "a value, because the schema says missing: error")


def encode_ids(field: Category | Bag | Sequence, array: pa.Array) -> Longs:
    """(S,) rows or open ids of single values, or (E,) of a list's elements."""
    if pa.types.is_dictionary(array.type):
        return _encode_dictionary(field, array)
    if field.dtype == "integer" and is_text(array.type):
        array = _parse(field, array, pa.int64(), "an integer")
    missing = _is_missing(array)
    if missing is not None and field.missing == "error":
        raise _missing_fault(field, int(missing.argmax()))
    if field.vocabulary is not None:
        ids = _look_up(field, array, missing)
        missing_id = len(field.vocabulary) + field.unknown_rows
    elif field.cardinality is not None:
        ids = _integers(array)
        missing_id = field.cardinality
        if missing is not None:
            ids[missing] = 0
        outside = (ids < 0) | (ids >= field.cardinality)
        if outside.any():
            row = int(outside.argmax())
            raise Fault(row, field.column, str(array[row].as_py()), f"an id 0 .. {field.cardinality - 1}",
                        "Raise the cardinality, or declare rows= to hash")  # fmt: skip
    else:
        ids = open_ids(array)
        missing_id = MISSING_ID
    if missing is not None:
        ids[missing] = missing_id
    return ids if field.rows is None else rows_of(ids, field.rows)


def _encode_dictionary(field: Category | Bag | Sequence, array: pa.DictionaryArray) -> Longs:
    """Each distinct value is encoded once. A value that nobody refers to is at no fault."""
    if array.null_count or len(array.dictionary) > len(array) or field.missing == "error":
        return encode_ids(field, array.dictionary_decode())
    try:
        by_entry = encode_ids(field, array.dictionary)
    except Fault:
        return encode_ids(field, array.dictionary_decode())
    return by_entry.take(array.indices.to_numpy(zero_copy_only=False))


def _is_missing(array: pa.Array) -> NDArray[np.bool_] | None:
    """(S,) nulls and empty texts; None: there are none."""
    missing = None
    if is_text(array.type):
        offsets, _ = text_buffers(array)
        missing = offsets[1:] == offsets[:-1]
    if array.null_count:
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        missing = nulls if missing is None else missing | nulls
    return missing if missing is not None and missing.any() else None


def _integers(array: pa.Array) -> Longs:
    """(S,) a fresh array; what is null is any number. An unsigned one beyond 2**63 wraps around."""
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    return np.array(array.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def open_ids(array: pa.Array) -> Longs:
    """(S,) a fresh array: integers as they are, texts hashed; what is missing has any id."""
    return hash_texts(array) if is_text(array.type) else _integers(array)


def _look_up(
    field: Category | Bag | Sequence, array: pa.Array, missing: NDArray[np.bool_] | None
) -> Longs:
    assert field.vocabulary is not None
    if is_text(array.type):
        array = array.cast(pa.large_string())
        known = pa.array(field.vocabulary, pa.large_string())
    else:
        # As signed 64-bit numbers on both sides, as ids are everywhere.
        array, known = pa.array(_integers(array)), pa.array(field.vocabulary, pa.int64())
    found = pc.index_in(array, value_set=known)
    ids = np.array(pc.fill_null(found, -1).to_numpy(zero_copy_only=False)).astype(np.int64)
    unknown = ids < 0
    if missing is not None:
        unknown &= ~missing
    if unknown.any():
        if field.unknown_rows == 0:
            row = int(unknown.argmax())
            raise Fault(row, field.column, repr(array[row].as_py())[:60],
                        f"one of the {len(known)} values of the vocabulary",
                        "Add it, or give unknown values rows with unknown_rows: 1")  # fmt: skip
        ids[unknown] = len(known)
        if field.unknown_rows > 1:
            strange = array.filter(pa.array(unknown))
            ids[unknown] += rows_of(open_ids(strange), field.unknown_rows)
    return ids


def encode_several(field: Bag | Sequence, array: pa.Array) -> Bags:
    """Lists, or texts cut at the separator; a missing one has no element."""
    lists = _lists(field, array)
    lengths = np.array(pc.fill_null(pc.list_value_length(lists), 0).to_numpy()).astype(np.int64)
    elements = _typed(lists.flatten())  # skips what lies under a null list
    ends = np.cumsum(lengths)
    begins = ends - lengths
    if field.max_length is not None and len(lengths) and lengths.max() > field.max_length:
        kept = np.minimum(lengths, field.max_length)
        begins = begins if field.keep == "first" else ends - kept
        places = gather(np.arange(len(elements)), begins, kept)
        elements, offsets = elements.take(pa.array(places.values)), places.offsets
    else:
        offsets = np.append(begins, ends[-1:] if len(ends) else [0])
    try:
        return Bags(encode_ids(field, elements), offsets)
    except Fault as fault:
        fault.row = int(np.searchsorted(offsets, fault.row, side="right")) - 1
        raise


def _lists(field: Bag | Sequence, array: pa.Array) -> pa.Array:
    if is_list(array.type):
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    text = array.cast(pa.string())
    # An empty text is no element, not one empty element.
    given = pc.if_else(pc.equal(text, ""), None, text)
    return pc.split_pattern(given, field.separator)


def encode_label(field: Label, array: pa.Array) -> Floats:
    """(S,) float32, NaN where nobody knows."""
    x = read_numbers(field, array)
    missing = np.isnan(x)
    if missing.any() and field.missing == "error":
        raise Fault(int(missing.argmax()), field.column, "nothing", "a label",
                    "Remove the row, or declare `missing: unknown`")  # fmt: skip
    if field.at_least is not None:
        x = np.where(missing, np.nan, x >= field.at_least)
    elif field.kind == "binary":
        bad = (x < 0) | (x > 1)
        if bad.any():
            row = int(bad.argmax())
            raise Fault(row, field.column, f"{x[row]:g}", "a label from 0 to 1",
                        "Declare at_least= to make one of a number, or `kind: number`")  # fmt: skip
    elif np.isinf(x).any():
        row = int(np.isinf(x).argmax())
        raise Fault(row, field.column, f"{x[row]:g}", "a finite number")
    return x.astype(np.float32)


def encode_weight(field: Weight, array: pa.Array) -> Floats:
    """(S,) float32."""
    x = read_numbers(field, array)
    bad = ~((x >= 0) & (x < np.finfo(np.float32).max))
    if bad.any():
        row = int(bad.argmax())
        got = "nothing" if np.isnan(x[row]) else f"{x[row]:g}"
        raise Fault(row, field.column, got, "a finite weight of 0 or more")
    return x.astype(np.float32)


def encode_name(field: Group | Key, array: pa.Array) -> Longs:
    """(S,) ids; none may be missing."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if field.dtype == "integer" and is_text(array.type):
        array = _parse(field, array, pa.int64(), "an integer")
    missing = _is_missing(array)
    if missing is not None:
        raise Fault(int(missing.argmax()), field.column, "nothing", "a value")
    return open_ids(array)


def encode_part(column: str, array: pa.Array) -> Longs:
    """(S,) ids by which samples are dealt to splits."""
    return encode_name(Key("part", column=column), _typed(array))


def dtype_in(kind: pa.DataType) -> Dtype | None:
    """What ids a column of this type holds; None: none."""
    if is_list(kind):
        kind = kind.value_type
    return "text" if is_text(kind) else "integer" if is_integer(kind) else None
