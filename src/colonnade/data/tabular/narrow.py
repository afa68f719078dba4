"""Conversion of columns to the narrowest type that holds their values, the same for text and typed files."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from colonnade.data.tabular.arrow_types import MISSING_NUMBER, is_text_type, is_time
from colonnade.data.tabular.fields import NULL_VALUES
from colonnade.data.tabular.times import TIME_TEXT, convert_to_microseconds

BLANKS = " \t"
INTEGER = r"^-?(0|[1-9][0-9]{0,18})$"
NUMBER = (
    r"^[+-]?(((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
    r"|[nN][aA][nN]|[iI][nN][fF]([iI][nN][iI][tT][yY])?)$"
)
LONG = r"^[+-]?[0-9]{16,}$"
BOOLEAN = r"^([tT][rR][uU][eE]|[fF][aA][lL][sS][eE])$"
EXACT = 2.0**53
"""Bound below which whole floats are exact integers."""


def narrow_column(array: pa.Array) -> pa.Array:
    """Convert a column to null, int64, bool, double, timestamp[us] or string, whichever holds all its values.

    Empty texts, NULL_VALUES and NaN become null (in numbers and times, MISSING_NUMBER), whole floats integers, times
    UTC. Columns of other types are returned unchanged.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text_type(array.type):
        try:
            array = _narrow_texts(array.cast(pa.string()))
        except pa.ArrowInvalid:  # not UTF-8
            return array
    elif is_time(array.type):
        try:
            array = _to_timestamps(array)
        except pa.ArrowInvalid:  # not of the years 1 to 9999
            return array
    elif pa.types.is_integer(array.type):
        try:
            array = array.cast(pa.int64())
        except pa.ArrowInvalid:  # unsigned, beyond 63 bits
            return array
    elif pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if pa.types.is_floating(array.type):
        array = _narrow_floats(array)
    return pa.nulls(len(array)) if array.null_count == len(array) else array


def _narrow_texts(texts: pa.Array) -> pa.Array:
    missing = pc.is_in(texts, pa.array(["", *NULL_VALUES]))
    texts = pc.if_else(missing, None, texts) if pc.any(missing).as_py() else texts
    trimmed = pc.utf8_trim(texts, BLANKS)
    trimmed = pc.if_else(pc.match_substring_regex(trimmed, MISSING_NUMBER), None, trimmed)
    if trimmed.null_count == len(trimmed):
        return texts
    arrow_type = find_narrowest_type(trimmed)
    if arrow_type == pa.string():
        if matches_all(trimmed, BOOLEAN):
            return pc.utf8_lower(trimmed).cast(pa.bool_())
        if matches_all(trimmed, TIME_TEXT):
            try:
                return _to_timestamps(trimmed)
            except pa.ArrowInvalid:  # month 13
                return texts
        return texts
    return trimmed.cast(arrow_type)


def count_missing_words(array: pa.Array) -> dict[str, int]:
    """Count the values of a narrowed column that are categories as text and would be missing in numbers."""
    if array.type != pa.string():
        return {}
    words = array.filter(pc.match_substring_regex(array, MISSING_NUMBER))
    return {item["values"]: item["counts"] for item in words.value_counts().to_pylist()}


def _narrow_floats(array: pa.Array) -> pa.Array:
    x = array.to_numpy(zero_copy_only=False)
    missing = np.isnan(x)
    values = x[~missing]
    is_whole = bool(((values == np.round(values)) & (np.abs(values) < EXACT)).all())
    if not is_whole:
        return pa.array(x, mask=missing)
    return pa.array(np.where(missing, 0, x).astype(np.int64), mask=missing)


def _to_timestamps(array: pa.Array) -> pa.Array:
    times, missing = convert_to_microseconds(array)
    return pa.array(times, mask=missing).cast(pa.timestamp("us"))


def find_narrowest_type(texts: pa.Array | pa.ChunkedArray) -> pa.DataType:
    """Return int64, double or string: the first that represents these trimmed texts exactly."""
    texts = texts.drop_null()
    if matches_all(texts, INTEGER) and can_parse_texts(texts, pa.int64()):
        return pa.int64()
    is_number = matches_all(texts, NUMBER) and can_parse_texts(texts, pa.float64())
    is_long = is_number and pc.any(pc.match_substring_regex(texts, LONG)).as_py()
    return pa.float64() if is_number and not is_long else pa.string()


def matches_all(texts: pa.Array | pa.ChunkedArray, pattern: str) -> bool:
    """Return whether every text matches; nulls do. Tries 64 texts first, because most columns are not numbers."""
    for sample in (texts[:64], texts):
        if not pc.all(pc.match_substring_regex(sample, pattern), min_count=0).as_py():
            return False
    return True


def can_parse_texts(texts: pa.Array | pa.ChunkedArray, arrow_type: pa.DataType) -> bool:
    """Return whether every text can be parsed as `kind`."""
    try:
        texts.cast(arrow_type)
    except pa.ArrowInvalid:
        return False
    return True
