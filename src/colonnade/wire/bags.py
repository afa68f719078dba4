"""Messages of lookups to the ranks that pool them. Each lookup is sent to the owner of its row, with the number of the
sample's lookups that this owner gets.

A message lists the ids of all columns of a table together: either every lookup's id, or each unique id once and the
index of every lookup's id in few bits, whichever is shorter. native/bags.h describes the format; bags_reference.py is a
slow implementation of it for tests.

Legend: B samples, G samples of all ranks, C columns of lookups, E lookups, T tables, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import DataError, WorldError
from colonnade.lookup.layout import LookupColumns, Lookups
from colonnade.wire.owner_map import OwnerMap

BITS = (1, 2, 4, 8, 16, 32)
"""Possible widths in bits of a bag's length, where lengths differ."""


@dataclass(frozen=True, slots=True)
class ReceivedBags:
    """Lookups of all ranks that an owner received, joined into one batch."""

    lookups: Lookups
    sizes: list[int]  # (N,) samples of each rank
    codes: np.ndarray | None  # (E,) uint8 of `Batch.next_use`; 0 where the sender has none


def pack_bag_lookups(
    lookups: Lookups, table_rows: Tensor, owner_map: OwnerMap, codes: np.ndarray | None
) -> list[np.ndarray]:
    """Pack lookups into a message to each rank, uint8. codes: (E,) of `Batch.next_use`. Raises IndexError for an id
    outside its vocabulary table, as `_native.make_plan` does, and DataError for a batch that is too large for a
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
            None if codes is None else torch.from_numpy(codes),
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
