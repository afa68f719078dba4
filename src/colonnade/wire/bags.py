"""Lookups as they travel to the ranks that pool them: each goes to the rank that owns its row, and every rank hears how
many of a sample's lookups it got.

A message tells ids once for all columns of a table, either one after the other or the different ones and, in few bits,
which of them each lookup is: whichever is shorter. The format is told in native/bags.h, its slow twin is
bags_reference.py.

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
"""What the length of a bag may take, where not all are equal."""


@dataclass(frozen=True, slots=True)
class ReceivedBags:
    """What all ranks look up of an owner's rows, as one batch."""

    lookups: Lookups
    sizes: list[int]  # (N,) samples of each rank
    codes: np.ndarray | None  # (E,) uint8 of `Batch.next_use`, 0 of ranks that know none


def pack_bags(
    lookups: Lookups, table_rows: Tensor, owner_map: OwnerMap, codes: np.ndarray | None
) -> list[np.ndarray]:
    """A message to each rank, uint8. codes (E,). Raises IndexError for an id outside its vocabulary table, as
    `_native.make_plan` does, and DataError for a batch that is too large to be told."""
    is_weighted = torch.tensor([each is not None for each in lookups.weights], dtype=torch.uint8)
    try:
        packed, ends = _native.pack_bags(
            lookups.native, table_rows, owner_map.num_owners, torch.from_numpy(owner_map.owner_indices), is_weighted,
            None if codes is None else torch.from_numpy(codes),
        )  # fmt: skip
    except ValueError as error:
        raise DataError(f"lookups to pool: {error}; give each rank smaller batches") from None
    return np.split(np.asarray(packed), np.asarray(ends)[:-1])


def unpack_bags(
    messages: Sequence[np.ndarray],
    owned: LookupColumns,
    table_rows: Tensor,
    owner_map: OwnerMap,
    rank: int,
    dtype: torch.dtype,
) -> ReceivedBags:
    """messages: by rank, of `pack_bags`, for this `rank`; owned: the columns whose rows lie here; dtype: of weights. One
    batch of all ranks' samples, in rank order; where some have weights, the others' are 1. Raises WorldError naming the
    rank whose message is none."""
    places, of_weights = torch.from_numpy(owner_map.owner_indices[rank].copy()), str(dtype)
    try:
        found = _native.join_bags(
            list(messages), owned.tables, table_rows, owner_map.num_owners, places,
            of_weights.removeprefix("torch."),
        )  # fmt: skip
    except ValueError as error:
        raise WorldError(
            f"{error}; all ranks must run one version of Colonnade on one model"
        ) from None
    ids, starts, flat, weights, codes, sizes = map(torch.as_tensor, found)
    size, bounds = int(sizes.sum()), starts.tolist()
    factors = weights.view(dtype) if len(weights) else None
    is_one_hot = not len(flat)
    native = _native.Lookups(
        ids, starts, owned.tables, owned.poolings, size, None if is_one_hot else flat, factors
    )
    bags: list[Tensor | None] = [None] * len(owned.features)
    if not is_one_hot:
        bags = [flat[c * size : (c + 1) * size + 1] - first for c, first in enumerate(bounds[:-1])]
    lookups = Lookups(
        ids, starts, native, size, bags,
        [None] * len(bags) if factors is None else list(factors.split(starts.diff().tolist())),
    )  # fmt: skip
    return ReceivedBags(lookups, sizes.tolist(), codes.numpy() if len(codes) else None)
