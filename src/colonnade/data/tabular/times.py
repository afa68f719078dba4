"""Conversion of times to microseconds since 1970 in UTC: timestamps, dates, ISO texts, Unix seconds.

A time with a zone is converted to UTC; a time without a zone is UTC.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.arrow import is_text_type, is_time

ISO = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?$"
)
ZONE = r":[0-9]{2}.*(Z|[+-][0-9]{2}:?[0-9]{2})$"
SECONDS = r"^-?[0-9]+([.][0-9]*)?$"
MICROS = 1_000_000
DAY = 86_400 * MICROS
PER_UNIT = {"s": MICROS, "ms": 1000, "us": 1}
MAX_SECONDS = 2.0**62 / MICROS
"""Maximal Unix seconds that fit in 64-bit microseconds."""


def convert_to_microseconds(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return microseconds (S,), 0 where missing, and a mask (S,) of the missing ones. Raises pa.ArrowInvalid."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text_type(array.type):
        return _parse_time_texts(array)
    if not is_time(array.type):
        return _read_seconds(array.cast(pa.float64(), safe=False))
    missing = array.is_null().to_numpy(zero_copy_only=False)
    is_days = pa.types.is_date32(array.type)
    counts = array.cast(pa.int32()).cast(pa.int64()) if is_days else array.cast(pa.int64())
    x = pc.fill_null(counts, 0).to_numpy(zero_copy_only=False)
    if is_days:
        return x * DAY, missing
    unit = "ms" if pa.types.is_date64(array.type) else array.type.unit
    return (x // 1000 if unit == "ns" else x * PER_UNIT[unit]), missing


def _parse_time_texts(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    texts = pc.utf8_trim_whitespace(array.cast(pa.string()))
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    is_seconds = pc.match_substring_regex(texts, SECONDS)
    x, missing = _read_seconds(pc.if_else(is_seconds, texts, None).cast(pa.float64()))
    texts = pc.replace_substring_regex(texts, r"([.][0-9]{6})[0-9]+", r"\1")
    has_zone = pc.match_substring_regex(texts, ZONE)
    for zone in (None, "UTC"):
        has_format = pc.invert(pc.or_(is_seconds, has_zone)) if zone is None else has_zone
        times = pc.if_else(has_format, texts, None).cast(pa.timestamp("us", zone)).cast(pa.int64())
        is_read = times.is_valid().to_numpy(zero_copy_only=False)
        x = np.where(is_read, pc.fill_null(times, 0).to_numpy(zero_copy_only=False), x)
        missing = missing & ~is_read
    return x, missing


def _read_seconds(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    x = pc.fill_null(array, np.nan).to_numpy(zero_copy_only=False)
    missing = np.isnan(x)
    if (np.abs(x) > MAX_SECONDS).any():
        raise pa.ArrowInvalid("Unix seconds out of range")
    return np.round(np.where(missing, 0, x) * MICROS).astype(np.int64), missing


def parse_time(text: str) -> int:
    """Parse an ISO time to microseconds since 1970. Raises ValueError."""
    if not re.match(ISO, text):
        raise ValueError(text)
    return int(convert_to_microseconds(pa.array([text]))[0][0])


def format_time(micros: int) -> str:
    """Format microseconds since 1970 as an ISO time in UTC, which `parse_time` reads."""
    return (datetime(1970, 1, 1) + timedelta(microseconds=micros)).isoformat()
