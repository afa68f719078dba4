"""Conversion of times to microseconds since 1970 in UTC: timestamps, dates, texts, numbers of a declared unit.

A time with a zone is converted to UTC; a time without a zone is UTC. Times are of the years 1 to 9999.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.arrow_types import MISSING_NUMBER, is_integer, is_text_type, is_time

Unit = Literal["s", "ms", "us", "ns", "yyyymmdd"]
TIME_TEXT = (
    r"^([0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}[.][0-9]{2}[.][0-9]{4})"
    r"([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?$"
)
"""ISO time, or one with a date such as 31.05.2024, day first."""
ZONE = r":[0-9]{2}.*(Z|[+-][0-9]{2}:?[0-9]{2})$"
NUMBER = r"^-?[0-9]+([.][0-9]*)?([eE][+]?[0-9]+)?$"
CALENDAR_DATE = r"^([0-9]{4})([0-9]{2})([0-9]{2})([.]0*)?$"
MICROS = 1_000_000
DAY = 86_400 * MICROS
TICKS: dict[Unit, int] = {"s": 1, "ms": 1000, "us": MICROS, "ns": 1000 * MICROS}
"""Ticks per second by unit."""
UNITS = {
    "s": "Unix seconds", "ms": "Unix milliseconds", "us": "Unix microseconds", "ns": "Unix nanoseconds",
    "yyyymmdd": "a date such as 20240531",
}  # fmt: skip
"""Words for the numbers of a unit."""
FIRST_SECOND = -62_135_596_800
END_SECOND = 253_402_300_800
"""Unix seconds from which on the year is 1, and 10000."""
PLAUSIBLE_SECONDS = (1e8, 1e10)
"""Unix seconds of 1973 to 2286."""
PLAUSIBLE_DATES = (19_000_101, 21_000_101)
FIRST_VALUES = 1 << 15
"""Number of values of a block by which the unit of a column is found."""


def convert_to_microseconds(
    array: pa.Array, unit: Unit = "s"
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return microseconds (S,), 0 where missing, and a mask (S,) of the missing ones. Raises pa.ArrowInvalid.

    unit: of numbers, also of those written as text.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text_type(array.type):
        return _parse_time_texts(array, unit)
    if not is_time(array.type):
        if unit == "yyyymmdd":
            return _parse_time_texts(array.cast(pa.string()), unit)
        return _read_numbers(array, unit)
    if pa.types.is_date32(array.type):
        seconds = pc.multiply(array.cast(pa.int32()).cast(pa.int64()), DAY // MICROS)
        return _read_numbers(seconds, "s")
    return _read_numbers(
        array.cast(pa.int64()), "ms" if pa.types.is_date64(array.type) else array.type.unit
    )


def _parse_time_texts(array: pa.Array, unit: Unit) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    texts = pc.utf8_trim_whitespace(array.cast(pa.string()))
    texts = pc.if_else(pc.match_substring_regex(texts, MISSING_NUMBER), None, texts)
    if unit == "yyyymmdd":
        texts = pc.replace_substring_regex(texts, CALENDAR_DATE, r"\1-\2-\3")
    texts = pc.replace_substring_regex(texts, r"^([0-9]{2})[.]([0-9]{2})[.]([0-9]{4})", r"\3-\2-\1")
    is_number = pc.match_substring_regex(texts, NUMBER)
    numbers = pc.if_else(is_number, texts, None)
    try:
        numbers = numbers.cast(pa.int64())
    except pa.ArrowInvalid:
        numbers = numbers.cast(pa.float64())
    x, missing = _read_numbers(numbers, unit)
    texts = pc.replace_substring_regex(texts, r"([.][0-9]{6})[0-9]+", r"\1")
    has_zone = pc.match_substring_regex(texts, ZONE)
    for zone in (None, "UTC"):
        has_format = pc.invert(pc.or_(is_number, has_zone)) if zone is None else has_zone
        times = pc.if_else(has_format, texts, None).cast(pa.timestamp("us", zone)).cast(pa.int64())
        micros, is_unread = _read_numbers(times, "us")
        x = np.where(is_unread, x, micros)
        missing = missing & is_unread
    return x, missing


def _read_numbers(array: pa.Array, unit: Unit) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Convert numbers of a unit, integers exactly. Raises pa.ArrowInvalid beyond the years 1 to 9999."""
    is_whole = is_integer(array.type)
    array = array.cast(pa.int64() if is_whole else pa.float64(), safe=is_whole)
    x = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    missing = array.is_null().to_numpy(zero_copy_only=False) | np.isnan(x)
    if unit == "yyyymmdd" and not missing.all():
        raise pa.ArrowInvalid("not a calendar date")
    ticks = 1 if unit == "yyyymmdd" else TICKS[unit]
    x = np.where(missing, 0, x)
    with np.errstate(invalid="ignore"):
        seconds = x // ticks
    if not ((seconds >= FIRST_SECOND) & (seconds < END_SECOND)).all():
        raise pa.ArrowInvalid("not of the years 1 to 9999")
    if x.dtype != np.int64:
        return np.round(x * (MICROS / ticks)).astype(np.int64), missing
    return (x * (MICROS // ticks) if ticks <= MICROS else x // (ticks // MICROS)), missing


def find_time_unit(array: pa.Array) -> tuple[Unit, float] | None:
    """Return the unit that suits most numbers of a column, and the share that it suits; None if no value is known.

    Seconds to nanoseconds suit numbers from 1973 to 2286, yyyymmdd dates from 1900 to 2099. ("s", 0) if none suits,
    and if the column holds no numbers.
    """
    texts = pc.utf8_trim_whitespace(array.drop_null()[:FIRST_VALUES].cast(pa.string()))
    if len(texts) == 0:
        return None
    numbers = texts.filter(pc.match_substring_regex(texts, NUMBER)).cast(pa.float64())
    x = numbers.to_numpy(zero_copy_only=False)
    suits: dict[Unit, NDArray[np.bool_]] = {
        unit: (x >= PLAUSIBLE_SECONDS[0] * ticks) & (x < PLAUSIBLE_SECONDS[1] * ticks)
        for unit, ticks in TICKS.items()
    }
    month = x // 100 % 100
    day = x % 100
    is_date = (x >= PLAUSIBLE_DATES[0]) & (x < PLAUSIBLE_DATES[1]) & (month >= 1) & (month <= 12)
    suits["yyyymmdd"] = is_date & (day >= 1) & (day <= 31)
    shares = {unit: float(mask.sum()) / max(len(x), 1) for unit, mask in suits.items()}
    best = max(shares, key=lambda unit: shares[unit])
    return best, shares[best]


def parse_time(text: str) -> int:
    """Parse a time written as text to microseconds since 1970. Raises ValueError."""
    if not re.match(TIME_TEXT, text):
        raise ValueError(text)
    return int(convert_to_microseconds(pa.array([text]))[0][0])


def describe_parts(
    split: str, unit: str, sizes: Sequence[int], first_keys: Sequence[float], *, has_times: bool
) -> str:
    """Describe a split in a line.

    sizes: numbers of `unit` in the training, validation and test parts; first_keys: the microseconds since 1970
    (`has_times`), or the number, from which on the validation and test parts are; -inf: there is none.
    """
    beginnings = [
        f" (from {format_time(int(key)) if has_times else f'{key:.15g}'} on)"
        if size and np.isfinite(key)
        else ""
        for size, key in zip(sizes[1:], first_keys, strict=True)
    ]
    return (
        f"split {split}: {sizes[0]:,} {unit} train, {sizes[1]:,} validate{beginnings[0]}, "
        f"{sizes[2]:,} test{beginnings[1]}"
    )


def format_time(micros: int) -> str:
    """Format microseconds since 1970 as an ISO time in UTC, which `parse_time` reads."""
    return (datetime(1970, 1, 1) + timedelta(microseconds=micros)).isoformat()
