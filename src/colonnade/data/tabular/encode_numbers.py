"""From Arrow columns to numbers, buckets, labels and weights.

Legend: S samples of a block.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.arrow import is_text
from colonnade.data.tabular.chunk import Floats, Longs
from colonnade.data.tabular.fields import Bucket, Field, Label, Number, Time, Weight
from colonnade.data.tabular.times import DAY, MICROS, parse_time, read_times

FIX = "Repair or remove the row"


class Fault(Exception):
    """A value that does not fit its field; `row` counts from 0 in the block. Becomes a DataError naming the file."""

    def __init__(self, row: int, column: str, got: str, wanted: str, fix: str = FIX) -> None:
        super().__init__(f"row {row}, column {column}: got {got}, wanted {wanted}. {fix}")
        self.row, self.column = row, column
        self.got, self.wanted, self.fix = got, wanted, fix


def encode_number(field: Number, array: pa.Array, out: NDArray[np.float32]) -> None:
    """(S,) into `out`; a missing value without a substitute, or an infinite one, is left there not finite."""
    x = read_numbers(field, array)
    missing = np.isnan(x)
    if field.clip is not None or field.transform is not None:
        # These would hide an infinite value.
        infinite = np.isinf(x)
        if infinite.any():
            raise number_fault(field, array, int(infinite.argmax()))
    if field.clip is not None:
        x = np.clip(x, *field.clip)
    if field.transform == "log1p":
        x = np.log1p(np.maximum(x, 0))
    if field.mean or field.std != 1:
        x = (x - field.mean) / field.std
    with np.errstate(over="ignore"):
        out[:] = x
    if field.missing is not None and missing.any():
        out[missing] = field.missing


def number_fault(field: Number, array: pa.Array, row: int) -> Fault:
    value = read_numbers(field, array.slice(row, 1))[0]
    if np.isnan(value):
        return Fault(row, field.column, "nothing", "a number",
                     f"Say what a missing {field.name} is: `missing: 0.0` is common")  # fmt: skip
    wanted = "a finite number" if np.isinf(value) else "one that float32 holds once transformed"
    return Fault(row, field.column, f"{value:g}", wanted)


def read_numbers(field: Field, array: pa.Array) -> NDArray[np.float64]:
    """(S,) float64, NaN where missing. Text must spell numbers; of times, the days before `days_before`."""
    if isinstance(field, Number) and field.days_before is not None:
        times, missing = check_times(field, array)
        return np.where(missing, np.nan, (parse_time(field.days_before) - times) / DAY)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = parse(field, array, pa.float64(), "a number")
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.null_count:
        array = pc.fill_null(array.cast(pa.float64(), safe=False), np.nan)
    return array.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)


def parse(field: Field, array: pa.Array, kind: pa.DataType, wanted: str) -> pa.Array:
    """Texts -> numbers; an empty text is missing."""
    array = pc.utf8_trim_whitespace(array.cast(pa.string()))
    array = pc.if_else(pc.equal(array, ""), None, array)
    if isinstance(field, Label):
        lower = pc.utf8_lower(array)
        for word, number in (("true", "1"), ("false", "0")):
            array = pc.if_else(pc.equal(lower, word), number, array)
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        for row, text in enumerate(array):
            try:
                text.cast(kind)
            except pa.ArrowInvalid:
                fix = FIX
                if isinstance(field, Label):
                    fix += ", or say which value is 1: `positive: 'yes'`"
                elif isinstance(field, Number | Bucket):
                    fix += ", or declare a category"
                raise Fault(row, field.column, repr(text.as_py())[:60], wanted, fix) from None
        raise


def encode_bucket(field: Bucket, array: pa.Array) -> Longs:
    """(S,): how many boundaries are <= the number; infinite ones lie beyond all."""
    x = read_numbers(field, array)
    ids = np.searchsorted(np.array(field.boundaries), x, side="right").astype(np.int64)
    missing = np.isnan(x)
    if missing.any():
        if field.missing == "error":
            raise missing_fault(field, int(missing.argmax()))
        ids[missing] = len(field.boundaries) + 1
    return ids


def encode_time(field: Time, array: pa.Array) -> Longs:
    """Return (S,) hours of the day or weekdays."""
    times, missing = check_times(field, array)
    hours = times // (3600 * MICROS)
    # 1970 began on a Thursday.
    ids = hours % 24 if field.part == "hour" else (hours // 24 + 3) % 7
    if missing.any():
        if field.missing == "error":
            raise missing_fault(field, int(missing.argmax()))
        ids[missing] = field.num_values
    return ids


def check_times(
    field: Number | Time, array: pa.Array
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return microseconds since 1970 (S,) and which are missing (S,). Raises Fault for the first that is no time."""
    try:
        return read_times(array)
    except pa.ArrowInvalid:
        for row in range(len(array)):
            try:
                read_times(array.slice(row, 1))
            except pa.ArrowInvalid:
                raise Fault(row, field.column, repr(str(array[row]))[:60],
                            "a time such as 2024-05-31T12:00:00, or Unix seconds") from None  # fmt: skip
        raise


def missing_fault(field: Field, row: int) -> Fault:
    return Fault(row, field.column, "nothing", "a value, because the schema says missing: error")


def encode_label(field: Label, array: pa.Array) -> Floats:
    """(S,) float32, NaN where nobody knows."""
    if field.positive is not None:
        x = _is_positive(field, array)
    else:
        x = read_numbers(field, array)
    missing = np.isnan(x)
    if missing.any() and field.missing == "error":
        raise Fault(int(missing.argmax()), field.column, "nothing", "a label",
                    "Remove the row, or declare `missing: unknown`")  # fmt: skip
    if field.at_least is not None:
        x = np.where(missing, np.nan, x >= field.at_least)
    elif field.kind == "binary":
        bad = (x != 0) & (x != 1) & ~missing
        if bad.any():
            row = int(bad.argmax())
            raise Fault(row, field.column, f"{x[row]:g}", "a label that is 0 or 1",
                        "Declare at_least= to make one of a number, or `kind: number` for your own loss")  # fmt: skip
    elif np.isinf(x).any():
        row = int(np.isinf(x).argmax())
        raise Fault(row, field.column, f"{x[row]:g}", "a finite number")
    return x.astype(np.float32)


def _is_positive(field: Label, array: pa.Array) -> NDArray[np.float64]:
    """(S,): 1.0 where the value is the positive one, NaN where there is none."""
    texts = pc.utf8_trim_whitespace(array.cast(pa.string()))
    missing = pc.or_kleene(pc.is_null(texts), pc.equal(texts, "")).fill_null(True)
    found = pc.equal(texts, str(field.positive)).fill_null(False)
    x = found.to_numpy(zero_copy_only=False).astype(np.float64)
    x[missing.to_numpy(zero_copy_only=False)] = np.nan
    return x


def encode_weight(field: Weight, array: pa.Array) -> Floats:
    """(S,) float32."""
    x = read_numbers(field, array)
    bad = ~((x >= 0) & (x < np.finfo(np.float32).max))
    if bad.any():
        row = int(bad.argmax())
        got = "nothing" if np.isnan(x[row]) else f"{x[row]:g}"
        raise Fault(row, field.column, got, "a finite weight of 0 or more")
    return x.astype(np.float32)
