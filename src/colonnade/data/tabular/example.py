"""Features of a serialized tf.train.Example: as much of protobuf's wire format as that takes.

Example  { Features features = 1; }
Features { map<string, Feature> feature = 1; }     an entry is { string key = 1; Feature value = 2; }
Feature  { BytesList = 1 | FloatList = 2 | Int64List = 3; }     each { repeated value = 1; }, numbers packed or not
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

FORMS = {1: "bytes", 2: "floats", 3: "integers"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def parse_example(data: bytes) -> dict[str, tuple[str, list[Any]]]:
    """Return form ("bytes", "floats", "integers") and values by feature. Raises ValueError."""
    features: dict[str, tuple[str, list[Any]]] = {}
    for entry in _messages(data, 1):
        for pair in _messages(entry, 1):
            keys = list(_messages(pair, 1))
            name = keys[-1].decode() if keys else ""
            form, values = "", []
            for feature in _messages(pair, 2):
                for number, wire, value in _fields(feature):
                    if number in FORMS and wire == BYTES:
                        form, values = FORMS[number], _values(FORMS[number], value)
            features[name] = form, values
    return features


def _values(form: str, data: bytes) -> list[Any]:
    values: list[Any] = []
    for number, wire, value in _fields(data):
        if number != 1:
            continue
        if form == "bytes" and wire == BYTES:
            values.append(value)
        elif form == "floats" and wire in (BYTES, FIXED32):
            if len(value) % 4:
                raise ValueError("floats of no whole length")
            values += struct.unpack(f"<{len(value) // 4}f", value)
        elif form == "integers" and wire == VARINT:
            values.append(_signed(value))
        elif form == "integers" and wire == BYTES:
            at = 0
            while at < len(value):
                integer, at = _varint(value, at)
                values.append(_signed(integer))
        else:
            raise ValueError(f"wire type {wire} in a list of {form}")
    return values


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the messages and texts of one field."""
    for number, wire, value in _fields(data):
        if number == wanted:
            if wire != BYTES:
                raise ValueError(f"wire type {wire} in field {number}")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value) of every field: an integer for a varint, else bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value: Any
            value, at = _varint(data, at)
        else:
            if wire == BYTES:
                size, at = _varint(data, at)
            elif wire in (FIXED64, FIXED32):
                size = 8 if wire == FIXED64 else 4
            else:
                raise ValueError(f"wire type {wire}")
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("a field that goes beyond the end")
        yield number, wire, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of up to 64 bits, and where it ends."""
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("an integer that goes beyond the end")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
    raise ValueError("an integer of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
