"""Parsers of sizes, rates and storage locations in the form people write: `2GiB`, `10Gbit`, `/data/rows:64GiB`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_byte_size(value: Any) -> Any:
    """Parse a size such as `"2GiB"` or `"500 MB"` into bytes; return a number unchanged. Raises ValueError, which names
    the units."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace("_", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"got {value!r}, wanted a size such as 512MiB, 2GiB or a number of bytes"
        ) from None


LEAST_RATE = 1e3
"""Slowest link rate accepted, in bytes per second; a slower one is taken for a typing error, `5B/s` for `5GB/s`."""


def parse_byte_rate(value: str) -> float:
    """Parse a rate such as `"1Gbit"`, `"10Gbit/s"` or `"5GB/s"` into bytes per second.

    Raises ValueError, which names the units, also for a number without a unit: link rates are written in bits as often
    as in bytes."""
    text = value.strip().lower().removesuffix("/s").strip()
    bits = re.fullmatch(r"([\d.]+)\s*([kmgt]?)bits?", text)
    try:
        if bits:
            rate = float(bits[1]) * UNITS[f"{bits[2]}b"] / 8
        else:
            rate = float(parse_byte_size(text)) if text.endswith("b") else 0.0
    except ValueError:
        rate = 0.0
    if not rate >= LEAST_RATE:
        raise ValueError(
            f"got {value!r}, wanted a rate such as 1Gbit, 10Gbit or 5GB/s, with its unit and at least 1kB/s"
        )
    return rate


def parse_positive_bytes(value: Any) -> Any:
    """Parse a size of at least 1 byte, as `parse_byte_size` does. Raises ValueError."""
    count = parse_byte_size(value)
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number or count != count // 1 or count < 1:
        raise ValueError(
            f"got {value!r}, wanted a size of at least 1 byte, such as 512MiB or 2GiB; leave it out for no limit"
        )
    return count


@dataclass(frozen=True, slots=True)
class SettingWords:
    """Annotation of a setting's type: words that describe its values in lists of settings."""

    words: str


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Storage location: a directory, and the number of bytes of rows that each rank may store there. None: no limit."""

    path: str
    bytes: int | None = None


def parse_storage_location(text: str) -> StorageLocation:
    """Parse `"/path:64GiB"` or `"/path"` into a storage location with an absolute path. Raises ValueError."""
    path, colon, size = text.rpartition(":")
    count = None
    if colon and size[:1].isdecimal():
        count = parse_byte_size(size)
    elif not colon or size:  # a name may contain a colon, but not end with one
        path = text
    else:
        path = ""
    if not path.strip() or "\0" in path:
        raise ValueError(f"got {text!r}, wanted a directory and a size, such as /data/rows:64GiB")
    if count is not None and count < 1:
        raise ValueError(f"got {text!r}, wanted a size of at least 1 byte, or no size for no limit")
    return StorageLocation(os.path.abspath(os.path.expanduser(path)), count)


def make_location_absolute(text: str) -> str:
    """Return the text of a storage location with its path made absolute and its size in bytes."""
    location = parse_storage_location(text)
    return location.path if location.bytes is None else f"{location.path}:{location.bytes}"


def format_digits(value: float) -> str:
    """Format a number with three significant digits and no exponent: 0.012345 -> "0.0123", 1024 -> "1,020"."""
    return f"{float(f'{value:.3g}'):,.12g}"


def format_bytes(value: float | None) -> str:
    """Format a number of bytes in binary units; "-" if unknown."""
    if value is None:
        return "-"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            size = value / 1024**power
            return f"{format_digits(size) if size < 1000 else f'{size:,.0f}'} {unit}"
    return f"{value:.0f} B"
