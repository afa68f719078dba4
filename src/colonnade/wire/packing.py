"""Messages to the owners of rows: requests for unique rows, and lookups of bags that owners pool.

A request, one from each rank to each:
    1 byte    1: codes of `Batch.next_use` follow
    T lists   the requested unique rows, table by table (`_native.pack_ids`, ascending): local rows of a vocabulary,
              hashes of an open table, as bit-packed distances
    numbers   a code for each id, if the first byte is 1
Other messages use `_native.pack_ids` for ids in any order, with duplicates (local rows at the width of the widest of
128), and `_native.pack_numbers` for counts, lengths of bags and other small numbers. native/packing.h describes the
format; packing_reference.py is a slow implementation of it for tests.

Each lookup of a bag is sent to the owner of its row, with the number of the sample's lookups that this owner gets. A
message lists the ids of all columns of a table together: either every lookup's id, or each unique id once and the index
of every lookup's id in few bits, whichever is shorter. native/bags.h describes it; bags_reference.py is the slow one.

Legend: T tables, N ranks, P ids requested from this rank; B samples, G samples of all ranks, C columns of lookups,
E lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import DataError, WorldError
from colonnade.hops.message_bytes import FLAG_BYTES
from colonnade.lookup.layout import LookupColumns, Lookups
from colonnade.wire.owner_map import OwnerMap


@dataclass(frozen=True, slots=True)
class ReceivedRequests:
    """Requests of all ranks for rows of this rank."""

    ids: Tensor  # (P,) int64, rank by rank, table by table
    counts: np.ndarray  # (N, T) int64
    codes: Tensor | None  # (P,) uint8, 0 for ids of ranks that sent none; None: no rank sent any


def pack_id_requests(
    ids: Tensor,
    block_starts: np.ndarray,
    block_ends: np.ndarray,
    table_rows: Tensor,
    num_owners: Tensor,
    owner_indices: np.ndarray,
    *,
    next_use_codes: Tensor | None,
) -> list[np.ndarray]:
    """Pack the request to each rank, uint8. ids (U,), and next_use_codes of them; block_starts, block_ends (N, T):
    range of the ids of table t that rank n owns; table_rows, num_owners (T,) int64."""
    num_ranks, num_tables = block_starts.shape
    lists, ends = _native.pack_ids(
        ids,
        _flatten(block_starts),
        _flatten(block_ends),
        table_rows.repeat(num_ranks),
        num_owners.repeat(num_ranks),
        _flatten(owner_indices.clip(0)),
        True,
    )
    packed = np.asarray(lists)
    flag = np.array([next_use_codes is not None], np.uint8)
    borders = [0, *np.asarray(ends)[num_tables - 1 :: num_tables].tolist()]
    messages = []
    for rank in range(num_ranks):
        parts = [flag, packed[borders[rank] : borders[rank + 1]]]
        if next_use_codes is not None:
            bounds = zip(block_starts[rank].tolist(), block_ends[rank].tolist(), strict=True)
            codes = torch.cat([next_use_codes[first:last] for first, last in bounds])
            parts.append(np.asarray(_native.pack_numbers(codes.long())))
        messages.append(np.concatenate(parts))
    return messages


def unpack_id_requests(
    rank_messages: Sequence[np.ndarray],
    table_rows: Tensor,
    num_owners: Tensor,
    owner_indices: Tensor,
) -> ReceivedRequests:
    """Unpack all ranks' requests to this one. rank_messages: by rank, of `pack_id_requests`; owner_indices (T,): of
    this rank. Raises WorldError that names the rank that sent another kind of message."""
    unpacked = []
    for rank, message in enumerate(rank_messages):
        try:
            unpacked.append(_unpack_id_request(message, table_rows, num_owners, owner_indices))
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


def measure_packed_bytes(ids: Tensor, num_table_rows: int) -> tuple[float, float]:
    """Return the packed bytes of the ids of one batch, if one rank owns all rows: of the unique ids, and of all ids in
    their order. num_table_rows 0: an open table."""
    one = torch.ones(1, dtype=torch.int64)
    all_rows = torch.tensor([num_table_rows])
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


@dataclass(frozen=True, slots=True)
class ReceivedBags:
    """Lookups of all ranks that an owner received, joined into one batch."""

    lookups: Lookups
    sizes: list[int]  # (N,) samples of each rank
    codes: np.ndarray | None  # (E,) uint8 of `Batch.next_use`; 0 where the sender has none


def pack_bag_lookups(
    lookups: Lookups, table_rows: Tensor, owner_map: OwnerMap, next_use_codes: np.ndarray | None
) -> list[np.ndarray]:
    """Pack lookups into a message to each rank, uint8. next_use_codes: (E,) of `Batch.next_use`. Raises IndexError for
    an id outside its vocabulary table, as `_native.make_plan` does, and DataError for a batch that is too large for a
    message."""
    is_weighted = torch.tensor(
        [weights is not None for weights in lookups.weights], dtype=torch.uint8
    )
    try:
        packed, ends = _native.pack_bags(
            lookups.native,
            table_rows,
            owner_map.num_owners,
            torch.from_numpy(owner_map.owner_indices),
            is_weighted,
            None if next_use_codes is None else torch.from_numpy(next_use_codes),
        )
    except ValueError as error:
        raise DataError(f"lookups to pool: {error}; give each rank smaller batches") from None
    return np.split(np.asarray(packed), np.asarray(ends)[:-1])


def unpack_bag_lookups(
    messages: Sequence[np.ndarray],
    owned: LookupColumns,
    table_rows: Tensor,
    owner_map: OwnerMap,
    rank: int,
    dtype: torch.dtype,
) -> ReceivedBags:
    """Unpack the messages of `pack_bag_lookups` to this `rank` into one batch of all ranks' samples, in rank order.

    messages: by sender; owned: columns of lookups of tables with rows on this rank; dtype: of weights, which are 1 for
    ranks that sent none. Raises WorldError that names the rank that sent another kind of message."""
    owner_indices = torch.from_numpy(owner_map.owner_indices[rank].copy())
    weight_dtype = str(dtype).removeprefix("torch.")
    try:
        unpacked = _native.join_bags(
            list(messages),
            owned.tables,
            table_rows,
            owner_map.num_owners,
            owner_indices,
            weight_dtype,
        )
    except ValueError as error:
        raise WorldError(
            f"{error}; all ranks must run one version of Colonnade on one model"
        ) from None
    ids, starts, flat, weights, codes, sizes = map(torch.as_tensor, unpacked)
    size = int(sizes.sum())
    bounds = starts.tolist()
    factors = weights.view(dtype) if len(weights) else None
    is_one_hot = not len(flat)
    native = _native.Lookups(
        ids, starts, owned.tables, owned.poolings, size, None if is_one_hot else flat, factors
    )
    bags: list[Tensor | None] = [None] * len(owned.features)
    if not is_one_hot:
        bags = [flat[c * size : (c + 1) * size + 1] - first for c, first in enumerate(bounds[:-1])]
    lookups = Lookups(
        ids,
        starts,
        native,
        size,
        bags,
        [None] * len(bags) if factors is None else list(factors.split(starts.diff().tolist())),
    )
    return ReceivedBags(lookups, sizes.tolist(), codes.numpy() if len(codes) else None)
