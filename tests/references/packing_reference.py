"""Numbers and lists of ids as they travel, slowly: the definition of `_native.pack_ids` and its kin.

The format is told in native/packing.h. Python integers throughout, a number at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.ops.reference import mix64

BLOCK = 128
WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class IdSpace:
    """Ids of a table that one owner has: rows 0 = open table; the owner is `place` of `num_owners`."""

    rows: int
    num_owners: int
    place: int

    def row_of(self, row_id: int) -> int:
        return row_id // self.num_owners

    def id_of(self, row: int) -> int:
        turn = _mixed([row])[0] % self.num_owners
        return row * self.num_owners + (self.place - turn) % self.num_owners

    @property
    def first_hash(self) -> int:
        return -(-(self.place * WORD) // self.num_owners)


def pack_varint(value: int) -> bytes:
    packed = bytearray()
    while value >= 0x80:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def pack_numbers(values: Sequence[int]) -> bytes:
    """Pack numbers 0 .. 2^64 - 1."""
    packed = bytearray()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        width = max(block).bit_length()
        whole = sum(value << width * i for i, value in enumerate(block))
        packed.append(width)
        packed += whole.to_bytes(-(-len(block) * width // 8), "little")
    return bytes(packed)


def pack_list(ids: Sequence[int], space: IdSpace, is_ascending: bool) -> bytes:
    head = pack_varint(len(ids))
    if not ids:
        return head
    if space.rows:
        rows = [space.row_of(id_) for id_ in ids]
        return head + pack_numbers(_distances(rows, 0) if is_ascending else rows)
    least = min(ids)
    listed = pack_numbers([id_ - least for id_ in ids])
    if is_ascending:
        hashed = pack_numbers(_distances(_mixed(ids), space.first_hash))
        if len(hashed) <= len(listed) + 1:
            return head + b"\0" + hashed
    zigzag = 2 * least if least >= 0 else -2 * least - 1
    return head + b"\1" + pack_varint(zigzag) + listed


def unpack_list(data: bytes, space: IdSpace, is_ascending: bool) -> tuple[list[int], int]:
    """Return (ids, bytes read) of the output of `pack_list`. It trusts the message; the native reader does not."""
    count, at = _varint(data, 0)
    if not count:
        return [], at
    if space.rows:
        numbers, at = unpack_numbers(data, at, count)
        rows = _sums(numbers, 0) if is_ascending else numbers
        return [space.id_of(row) for row in rows], at
    kind, at = data[at], at + 1
    if kind == 0:
        numbers, at = unpack_numbers(data, at, count)
        return [_unmixed(number) for number in _sums(numbers, space.first_hash)], at
    zigzag, at = _varint(data, at)
    least = zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
    numbers, at = unpack_numbers(data, at, count)
    return [least + number for number in numbers], at


def unpack_numbers(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    numbers: list[int] = []
    while len(numbers) < count:
        length, width = min(BLOCK, count - len(numbers)), data[at]
        size = -(-length * width // 8)
        whole = int.from_bytes(data[at + 1 : at + 1 + size], "little")
        numbers += [whole >> width * i & ((1 << width) - 1) for i in range(length)]
        at += 1 + size
    return numbers, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _distances(values: Iterable[int], first: int) -> list[int]:
    results, following = [], first
    for value in values:
        results.append(value - following)
        following = value + 1
    return results


def _sums(distances: Iterable[int], first: int) -> list[int]:
    results, following = [], first
    for distance in distances:
        results.append(following + distance)
        following = results[-1] + 1
    return results


def _mixed(values: Sequence[int]) -> list[int]:
    signed = [value - WORD if value >= WORD // 2 else value for value in values]
    words: Tensor = mix64(torch.tensor(signed, dtype=torch.int64))
    return [value % WORD for value in words.tolist()]


def _unmixed(x: int) -> int:
    """The id whose hash is x: the steps of mix64 backwards."""
    x = (x ^ x >> 31 ^ x >> 62) * 0x319642B2D24D8EC3 % WORD
    x = (x ^ x >> 27 ^ x >> 54) * 0x96DE1B173F119089 % WORD
    x = x ^ x >> 30 ^ x >> 60
    return x - WORD if x >= WORD // 2 else x
