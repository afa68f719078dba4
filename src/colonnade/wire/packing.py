"""Requests for rows: packed ids that are sent to owners, and their expected sizes in bytes.

A request, one from each rank to each:
    1 byte    1: codes of `Batch.next_use` follow
    T lists   the requested unique rows, table by table (`_native.pack_ids`, ascending): local rows of a vocabulary,
              hashes of an open table, as bit-packed distances
    numbers   a code for each id, if the first byte is 1
Other messages use `_native.pack_ids` for ids in any order, with duplicates (local rows at the width of the widest of
128), and `_native.pack_numbers` for counts, lengths of bags and other small numbers. native/packing.h describes the
format; packing_reference.py is a slow implementation of it for tests.

Legend: T tables, N ranks, P ids requested from this rank.
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
    """Requests of all ranks for rows of this rank."""

    ids: Tensor  # (P,) int64, rank by rank, table by table
    counts: np.ndarray  # (N, T) int64
    codes: Tensor | None  # (P,) uint8, 0 for ids of ranks that sent none; None: no rank sent any


def pack_id_requests(
    ids: Tensor,
    firsts: np.ndarray,
    lasts: np.ndarray,
    rows: Tensor,
    num_owners: Tensor,
    owner_indices: np.ndarray,
    *,
    codes: Tensor | None,
) -> list[np.ndarray]:
    """Pack the request to each rank, uint8. ids (U,) and their codes; firsts, lasts (N, T): range of the ids of table t
    that rank n owns; owner_indices (N, T): see `OwnerMap`; rows, num_owners (T,) int64."""
    num_ranks, num_tables = firsts.shape
    lists, ends = _native.pack_ids(
        ids,
        _flatten(firsts),
        _flatten(lasts),
        rows.repeat(num_ranks),
        num_owners.repeat(num_ranks),
        _flatten(owner_indices.clip(0)),
        True,
    )
    packed = np.asarray(lists)
    flag = np.array([codes is not None], np.uint8)
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


def unpack_id_requests(
    messages: Sequence[np.ndarray], rows: Tensor, num_owners: Tensor, owner_indices: Tensor
) -> ReceivedRequests:
    """Unpack all ranks' requests to this one. messages: by rank, of `pack_id_requests`; owner_indices (T,): of this
    rank. Raises WorldError that names the rank that sent another kind of message."""
    unpacked = []
    for rank, message in enumerate(messages):
        try:
            unpacked.append(_unpack_id_request(message, rows, num_owners, owner_indices))
        except ValueError as error:
            raise WorldError(
                f"rank {rank} sent {len(message)} bytes that are not a request for rows ({error}); all ranks must run "
                "one version of Colonnade on one model"
            ) from None
    codes = None
    if any(request.codes is not None for request in unpacked):
        codes = torch.cat(
            [
                torch.zeros(len(request.ids), dtype=torch.uint8)
                if request.codes is None
                else request.codes
                for request in unpacked
            ]
        )
    ids = [request.ids for request in unpacked]
    counts = [request.counts for request in unpacked]
    return ReceivedRequests(torch.cat(ids), np.concatenate(counts), codes)


def _unpack_id_request(
    message: np.ndarray, rows: Tensor, num_owners: Tensor, owner_indices: Tensor
) -> ReceivedRequests:
    """Unpack one rank's request. Raises ValueError."""
    if len(message) < FLAG_BYTES or message[0] > 1:
        raise ValueError(f"got {message[:FLAG_BYTES].tolist()} at its beginning, wanted [0] or [1]")
    rest = message[FLAG_BYTES:]
    codes = None
    ids, counts, used = _native.unpack_ids(rest, rows, num_owners, owner_indices.clamp(min=0), True)
    rest = rest[used:]
    if bool((np.asarray(counts)[owner_indices.numpy() < 0] > 0).any()):
        raise ValueError("got ids of a table that has no rows here")
    if message[0]:
        numbers, used = _native.unpack_numbers(rest, len(ids))
        rest = rest[used:]
        numbers = torch.as_tensor(numbers)
        if bool((numbers >> 8).any()):
            raise ValueError("got a code of more than 8 bits")
        codes = numbers.to(torch.uint8)
    if len(rest):
        raise ValueError(f"got {len(rest)} bytes after its end")
    return ReceivedRequests(torch.as_tensor(ids), np.asarray(counts)[None, :], codes)


def expected_id_list_bytes(count: float, rows: int, num_owners: int) -> float:
    """Return the expected bytes of a list of `count` unique rows of one owner, if every set of `count` rows is equally
    likely. This holds for hashed ids, and where popular ids are spread over a table; measure ids in order of popularity
    instead. rows 0: an open table. Pure."""
    if count <= 0:
        return 1.0
    least = math.floor(count)
    if count > least:  # a mean over batches
        part = count - least
        below, above = (expected_id_list_bytes(n, rows, num_owners) for n in (least, least + 1))
        return (1 - part) * below + part * above
    keys = -(-rows // num_owners) if rows else 2.0**64 / num_owners
    varint = 1 + sum(count >= 1 << 7 * i for i in range(1, 10))
    whole, rest = divmod(least, BLOCK)
    blocks = whole * _expected_distance_block_bytes(BLOCK, count, keys)
    if rest:
        blocks += _expected_distance_block_bytes(rest, count, keys)
    return varint + (0 if rows else 1) + blocks


def _expected_distance_block_bytes(length: int, count: float, keys: float) -> float:
    """Return the expected bytes of a block of `length` distances between `count` random keys of `keys`. The largest
    distance determines the width of all."""
    size = chance_before = 0.0
    for width in range(65):
        # A distance is 2^width or more if that many consecutive keys are not among the `count`.
        free = 1 - 2.0**width / max(1.0, keys - (count - 1) / 2)
        longer = free**count if free > 0 and 2.0**width <= keys - count else 0.0
        chance = (1 - longer) ** length
        size += (chance - chance_before) * (1 + math.ceil(length * width / 8))
        if chance == 1.0:  # for all larger widths, too
            break
        chance_before = chance
    return size


def expected_numbers_bytes(count: float, keys: float) -> float:
    """Return the expected bytes of `count` numbers below `keys`, each equally likely, as `_native.pack_numbers` packs
    them. Pure."""
    whole, rest = divmod(count, BLOCK)
    return whole * _expected_number_block_bytes(BLOCK, keys) + (
        _expected_number_block_bytes(rest, keys) if rest else 0.0
    )


def expected_unsorted_list_bytes(count: float, rows: int, num_owners: int) -> float:
    """Return the expected bytes of a list of `count` ids in any order, if each of an owner's rows is equally likely.
    rows 0: an open table."""
    keys = -(-rows // num_owners) if rows else 2.0**64
    return expected_numbers_bytes(count, keys) + list_header_bytes(count, rows)


def list_header_bytes(count: float, rows: int) -> float:
    """Return the bytes of the header of such a list: the count and, for an open table, the kind of the list and the
    least id."""
    return 1 + sum(count >= 1 << 7 * i for i in range(1, 10)) + (0 if rows else 11)


def _expected_number_block_bytes(length: float, keys: float) -> float:
    size = chance_before = 0.0
    for width in range(65):
        chance = min(1.0, 2.0**width / keys) ** length
        size += (chance - chance_before) * (1 + math.ceil(length * width / 8))
        if chance == 1.0:  # for all larger widths, too
            break
        chance_before = chance
    return size


def measure_packed_bytes(ids: Tensor, rows: int) -> tuple[float, float]:
    """Return the packed bytes of the ids of one batch, if one rank owns all rows: of the unique ids, and of all ids in
    their order. rows 0: an open table."""
    one = torch.ones(1, dtype=torch.int64)
    all_rows = torch.tensor([rows])
    offsets = torch.tensor([0, len(ids)])
    table = torch.zeros(1, dtype=torch.int32)
    lookups = _native.Lookups(
        ids, offsets, table, torch.tensor([2], dtype=torch.uint8), 0, None, None
    )
    unique = torch.as_tensor(_native.make_plan(lookups, all_rows, one).unique_ids)
    sizes = [
        len(
            _native.pack_ids(
                listed, one * 0, one * len(listed), all_rows, one, one * 0, is_ascending
            )[0]
        )
        for listed, is_ascending in ((unique, True), (ids, False))
    ]
    return float(sizes[0]), float(sizes[1])


def _flatten(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).view(-1)
