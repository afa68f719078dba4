"""Sizes and places as people write them: `2GiB`, `/data/rows:64GiB`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
         "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def parse_bytes(value: Any) -> Any:
    """`"2GiB"`, `"500 MB"` or a number of bytes. Raises ValueError naming the units."""
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
"""Bytes per second below which a link is a slip of the pen: `5B/s` for `5GB/s`."""


def parse_rate(value: str) -> float:
    """`"1Gbit"`, `"10Gbit/s"`, `"5GB/s"` -> bytes per second. Raises ValueError naming the units, also for a number
    that has none: links are said in bits as often as in bytes."""
    text = value.strip().lower().removesuffix("/s").strip()
    bits = re.fullmatch(r"([\d.]+)\s*([kmgt]?)bits?", text)
    try:
        if bits:
            rate = float(bits[1]) * UNITS[f"{bits[2]}b"] / 8
        else:
            rate = float(parse_bytes(text)) if text.endswith("b") else 0.0
    except ValueError:
        rate = 0.0
    if not rate >= LEAST_RATE:
        raise ValueError(
            f"got {value!r}, wanted a rate such as 1Gbit, 10Gbit or 5GB/s, with its unit and at least 1kB/s"
        )
    return rate


def positive_bytes(value: Any) -> Any:
    """`parse_bytes` of a size that is not nothing. Raises ValueError."""
    count = parse_bytes(value)
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number or count != count // 1 or count < 1:
        raise ValueError(
            f"got {value!r}, wanted a size of at least 1 byte, such as 512MiB or 2GiB; leave it out for no limit"
        )
    return count


@dataclass(frozen=True, slots=True)
class Said:
    """Beside an annotated type: what a person calls its values, in lists of settings."""

    words: str


@dataclass(frozen=True, slots=True)
class Place:
    """A directory and how many bytes of rows each rank may keep there; None: as many as there are."""

    path: str
    bytes: int | None = None


def parse_place(text: str) -> Place:
    """`"/path:64GiB"` or `"/path"`. The path becomes absolute. Raises ValueError."""
    path, colon, size = text.rpartition(":")
    count = None
    if colon and size[:1].isdecimal():
        count = parse_bytes(size)
    elif not colon or size:  # a colon may be part of a name, but not its end
        path = text
    else:
        path = ""
    if not path.strip() or "\0" in path:
        raise ValueError(f"got {text!r}, wanted a directory and a size, such as /data/rows:64GiB")
    if count is not None and count < 1:
        raise ValueError(f"got {text!r}, wanted a size of at least 1 byte, or none: all there is")
    return Place(os.path.abspath(os.path.expanduser(path)), count)


def absolute(text: str) -> str:
    """A place with an absolute path and its size in bytes."""
    place = parse_place(text)
    return place.path if place.bytes is None else f"{place.path}:{place.bytes}"
