"""Lookups on their way to the ranks that pool them, slowly: the definition of `_native.pack_bag_lookups` and
`join_bags`.

The format is told in native/bags.h. Python integers throughout, a lookup at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from references.packing_reference import (
    IdSpace,
    _mixed,
    _varint,
    pack_list,
    pack_numbers,
    pack_varint,
    unpack_list,
    unpack_numbers,
)

from colonnade.hops.message_bytes import LENGTH_BITS as BITS

WEIGHTED = 128
LISTED, DISTINCT = b"\0", b"\1"


@dataclass(frozen=True, slots=True)
class Column:
    """Lookups of one feature, those whose rows one owner has."""

    table: int
    bags: Sequence[Sequence[int]]  # ids, by sample
    weights: Sequence[bytes] | None = None  # elements, by lookup
    codes: Sequence[int] | None = None  # by lookup; all columns of a message have them, or none

    @property
    def ids(self) -> list[int]:
        return [item for bag in self.bags for item in bag]


def pack_bags(columns: Sequence[Column], size: int, spaces: Mapping[int, IdSpace]) -> bytes:
    """The message of a rank with so many samples to one owner. spaces: by table, the owner's share."""
    has_codes = any(column.codes is not None for column in columns)
    result = pack_varint(size) + bytes([has_codes])
    for column in columns:
        result += _packed_lengths([len(bag) for bag in column.bags], column.weights is not None)
    for table in sorted({column.table for column in columns}):
        listed = [id_ for column in columns if column.table == table for id_ in column.ids]
        if listed:
            result += _packed_ids(listed, spaces[table])
    result += b"".join(element for column in columns for element in column.weights or ())
    if has_codes:
        result += pack_numbers([code for column in columns for code in column.codes or ()])
    return result


def unpack_bags(
    data: bytes, tables: Sequence[int], spaces: Mapping[int, IdSpace], itemsize: int
) -> list[Column]:
    """Unpack the arguments of `pack_bag_lookups`. It trusts the message; the native reader does not."""
    size, at = _varint(data, 0)
    has_codes, at = data[at], at + 1
    lengths, is_weighted = [], []
    for _ in tables:
        head, at = data[at], at + 1
        is_weighted.append(bool(head & WEIGHTED))
        bits = head & ~WEIGHTED
        if bits:
            num_bytes = -(-size * bits // 8)
            whole = int.from_bytes(data[at : at + num_bytes], "little")
            lengths.append([whole >> bits * i & ((1 << bits) - 1) for i in range(size)])
            at += num_bytes
        else:
            equal, at = _varint(data, at)
            lengths.append([equal] * size)
    of_table = {}
    for table in sorted(set(tables)):
        count = sum(sum(item) for t, item in zip(tables, lengths, strict=True) if t == table)
        if count:
            kind, at = data[at : at + 1], at + 1
            ids, read = unpack_list(data[at:], spaces[table], kind == DISTINCT)
            at += read
            if kind == DISTINCT:
                which, at = unpack_numbers(data, at, count)
                ids = [ids[index] for index in which]
            of_table[table] = iter(ids)
    bags = [
        [[next(of_table[table]) for _ in range(length)] for length in item]
        for table, item in zip(tables, lengths, strict=True)
    ]
    weights: list[list[bytes] | None] = []
    for item, has_weights in zip(lengths, is_weighted, strict=True):
        end = at + sum(item) * itemsize * has_weights
        weights.append(
            [data[i : i + itemsize] for i in range(at, end, itemsize)] if has_weights else None
        )
        at = end
    codes: list[list[int] | None] = [None] * len(tables)
    if has_codes:
        all_codes, at = unpack_numbers(data, at, sum(map(sum, lengths)))
        codes_left = iter(all_codes)
        codes = [[next(codes_left) for _ in range(sum(item))] for item in lengths]
    assert at == len(data)
    return [Column(*item) for item in zip(tables, bags, weights, codes, strict=True)]


def _packed_lengths(lengths: Sequence[int], is_weighted: bool) -> bytes:
    flag = WEIGHTED * is_weighted
    if len(set(lengths)) < 2:
        return bytes([flag]) + pack_varint(lengths[0] if lengths else 0)
    bits = next(bits for bits in BITS if max(lengths) < 2**bits)
    whole = sum(length << bits * i for i, length in enumerate(lengths))
    return bytes([flag | bits]) + whole.to_bytes(-(-len(lengths) * bits // 8), "little")


def _packed_ids(listed: Sequence[int], space: IdSpace) -> bytes:
    if space.rows:
        unique = sorted(set(listed), key=space.row_of)
    else:
        different = list(set(listed))
        unique = [item for _, item in sorted(zip(_mixed(different), different, strict=True))]
    number = {item: i for i, item in enumerate(unique)}
    packed_codes = LISTED + pack_list(listed, space, False)
    distinct = DISTINCT + pack_list(unique, space, True)
    distinct += pack_numbers([number[item] for item in listed])
    return min(packed_codes, distinct, key=len)
