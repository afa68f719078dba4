"""Ids on their way to the owners: what a request looks like, and how many bytes it will take.

A request, one from each rank to each:
    1 byte    1: codes of `Batch.next_use` follow
    T lists   the unique rows asked for, table by table (`_native.pack_ids`, ascending): local rows of a vocabulary,
              hashes of an open table, as bit-packed distances
    numbers   a code for each id, where they follow
For other messages: `_native.pack_ids` packs ids as listed, too, where they may come twice
and in any order (local rows at the width of the widest of 128); `_native.pack_numbers` packs counts, lengths of bags
and other small numbers. The format is told in native/packing.h, its slow twin is packing_reference.py.

Legend: T tables, N ranks, P ids asked of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import WorldError

FLAG_BYTES = 1
BLOCK = 128


@dataclass(frozen=True, slots=True)
class ReceivedRequests:
    """What all ranks asked of this one."""

    ids: Tensor  # (P,) int64, rank by rank, table by table
    counts: np.ndarray  # (N, T) int64
    codes: Tensor | None  # (P,) uint8; None: no rank knows. 0 for ids of ranks that do not


def pack_requests(
    ids: Tensor,
    firsts: np.ndarray,
    lasts: np.ndarray,
    rows: Tensor,
    num_owners: Tensor,
    places: np.ndarray,
    *,
    codes: Tensor | None,
) -> list[np.ndarray]:
    """By rank, uint8. ids (U,), and codes of them; firsts, lasts (N, T): the ids that rank n has of table t; places
    (N, T): as which of the table's owners, -1 for none; rows, num_owners (T,) int64."""
    num_ranks, num_tables = firsts.shape
    lists, ends = _native.pack_ids(
        ids, _flatten(firsts), _flatten(lasts), rows.repeat(num_ranks), num_owners.repeat(num_ranks),
        _flatten(places.clip(0)), True,
    )  # fmt: skip
    packed, flag = np.asarray(lists), np.array([codes is not None], np.uint8)
    borders = [0, *np.asarray(ends)[num_tables - 1 :: num_tables].tolist()]
    messages = []
    for rank in range(num_ranks):
        parts = [flag, packed[borders[rank] : borders[rank + 1]]]
        if codes is not None:
            bounds = zip(firsts[rank].tolist(), lasts[rank].tolist(), strict=True)
            known = torch.cat([codes[first:last] for first, last in bounds])
            parts.append(np.asarray(_native.pack_numbers(known.long())))
        messages.append(np.concatenate(parts))
    return messages


def unpack_requests(
    messages: Sequence[np.ndarray], rows: Tensor, num_owners: Tensor, places: Tensor
) -> ReceivedRequests:
    """messages: by rank, of `pack_requests`; places (T,): this rank's. Raises WorldError naming the rank whose message
    is none."""
    found = []
    for rank, message in enumerate(messages):
        try:
            found.append(_unpack(message, rows, num_owners, places))
        except ValueError as error:
            raise WorldError(
                f"rank {rank} sent {len(message)} bytes that are no request for rows ({error}); all ranks must run one "
                "version of Colonnade on one model"
            ) from None
    codes = None
    if any(each.codes is not None for each in found):
        zeros = [torch.zeros(len(each.ids), dtype=torch.uint8) for each in found]
        known = zip((each.codes for each in found), zeros, strict=True)
        codes = torch.cat([zero if code is None else code for code, zero in known])
    ids, counts = [each.ids for each in found], [each.counts for each in found]
    return ReceivedRequests(torch.cat(ids), np.concatenate(counts), codes)


def _unpack(
    message: np.ndarray, rows: Tensor, num_owners: Tensor, places: Tensor
) -> ReceivedRequests:
    """One rank's. Raises ValueError."""
    if len(message) < FLAG_BYTES or message[0] > 1:
        raise ValueError(f"got {message[:FLAG_BYTES].tolist()} at its beginning, wanted [0] or [1]")
    rest, codes = message[FLAG_BYTES:], None
    ids, counts, used = _native.unpack_ids(rest, rows, num_owners, places.clamp(min=0), True)
    rest = rest[used:]
    if bool((np.asarray(counts)[places.numpy() < 0] > 0).any()):
        raise ValueError("got ids of a table that has no rows here")
    if message[0]:
        numbers, used = _native.unpack_numbers(rest, len(ids))
        rest, numbers = rest[used:], torch.as_tensor(numbers)
        if bool((numbers >> 8).any()):
            raise ValueError("got a code of more than 8 bits")
        codes = numbers.to(torch.uint8)
    if len(rest):
        raise ValueError(f"got {len(rest)} bytes after its end")
    return ReceivedRequests(torch.as_tensor(ids), np.asarray(counts)[None, :], codes)


def expected_list_bytes(count: float, rows: int, num_owners: int) -> float:
    """Bytes of a list that asks an owner for `count` of its rows, every set of so many being as likely: what hashed ids
    come to, and popular ids that are spread over a table; ids in order of popularity are to be measured. rows 0: an
    open table. Pure."""
    if count <= 0:
        return 1.0
    least = math.floor(count)
    if count > least:  # a mean over batches
        part = count - least
        below, above = (expected_list_bytes(n, rows, num_owners) for n in (least, least + 1))
        return (1 - part) * below + part * above
    keys = -(-rows // num_owners) if rows else 2.0**64 / num_owners
    varint = 1 + sum(count >= 1 << 7 * i for i in range(1, 10))
    whole, rest = divmod(least, BLOCK)
    blocks = whole * _block_bytes(BLOCK, count, keys)
    if rest:
        blocks += _block_bytes(rest, count, keys)
    return varint + (0 if rows else 1) + blocks


def _block_bytes(length: int, count: float, keys: float) -> float:
    """A block of `length` of the distances between `count` of `keys` keys: its width is that of the largest."""
    size = chance_before = 0.0
    for width in range(65):
        # A distance reaches 2^width where so many keys in a row are not among the `count`.
        free = 1 - 2.0**width / max(1.0, keys - (count - 1) / 2)
        longer = free**count if free > 0 and 2.0**width <= keys - count else 0.0
        chance = (1 - longer) ** length
        size += (chance - chance_before) * (1 + math.ceil(length * width / 8))
        if chance == 1.0:  # and stays so
            break
        chance_before = chance
    return size


def expected_numbers_bytes(count: float, keys: float) -> float:
    """Bytes of `count` numbers below `keys`, each as likely, as `_native.pack_numbers` packs them. Pure."""
    whole, rest = divmod(count, BLOCK)
    return whole * _drawn_bytes(BLOCK, keys) + (_drawn_bytes(rest, keys) if rest else 0.0)


def expected_listed_bytes(count: float, rows: int, num_owners: int) -> float:
    """Bytes of a list of `count` ids as they come, each of the rows of an owner as likely. rows 0: an open table."""
    keys = -(-rows // num_owners) if rows else 2.0**64
    return expected_numbers_bytes(count, keys) + listed_head_bytes(count, rows)


def listed_head_bytes(count: float, rows: int) -> float:
    """Of that: how many there are; of an open table, the kind of the list and the least id."""
    return 1 + sum(count >= 1 << 7 * i for i in range(1, 10)) + (0 if rows else 11)


def _drawn_bytes(length: float, keys: float) -> float:
    size = chance_before = 0.0
    for width in range(65):
        chance = min(1.0, 2.0**width / keys) ** length
        size += (chance - chance_before) * (1 + math.ceil(length * width / 8))
        if chance == 1.0:  # and stays so
            break
        chance_before = chance
    return size


def measured_bytes(ids: Tensor, rows: int) -> tuple[float, float]:
    """Bytes of these ids of one batch where one rank has all rows: (of the list of the different ones, of all as they
    come). rows 0: an open table."""
    one, all_rows = torch.ones(1, dtype=torch.int64), torch.tensor([rows])
    offsets, table = torch.tensor([0, len(ids)]), torch.zeros(1, dtype=torch.int32)
    asked = _native.Lookups(ids, offsets, table, torch.tensor([2], dtype=torch.uint8), 0, None, None)  # fmt: skip
    unique = torch.as_tensor(_native.make_plan(asked, all_rows, one).unique_ids)
    sizes = [
        len(_native.pack_ids(listed, one * 0, one * len(listed), all_rows, one, one * 0, is_ascending)[0])
        for listed, is_ascending in ((unique, True), (ids, False))
    ]  # fmt: skip
    return float(sizes[0]), float(sizes[1])


def _flatten(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).view(-1)
