"""Who owns the rows of all tables, as plans of batches and messages between ranks take it.

Legend: T tables, N ranks, N_t ranks that the rows of table t are dealt to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.topology.sharding import Sharding


@dataclass(frozen=True)
class OwnerMap:
    """A plan lists a table's rows owner by owner; ranks ascend within a sharding, so that is rank by rank, too."""

    num_ranks: int
    num_owners: Tensor  # (T,) int64: N_t
    block_index: (
        np.ndarray
    )  # (sum of N_t,) int64: of each of a plan's blocks among T * N, table by table, rank by rank

    @cached_property
    def owner_indices(self) -> np.ndarray:
        """(N, T) int64: as which of a table's owners a rank has its rows; -1: it has none."""
        found = np.full(len(self.num_owners) * self.num_ranks, -1)
        found[self.block_index] = np.concatenate([np.arange(n) for n in self.num_owners.tolist()])
        return np.ascontiguousarray(found.reshape(-1, self.num_ranks).T)

    def blocks(self, plan: _native.Plan) -> np.ndarray:
        """(T * N + 1,) int64: where the unique rows of each table and rank begin; none are a rank's that owns none."""
        found = np.zeros(len(self.num_owners) * self.num_ranks + 1, dtype=np.int64)
        found[1 + self.block_index] = np.diff(np.asarray(plan.block_offsets))
        return found.cumsum()

    def table_offsets(self, plan: _native.Plan) -> Tensor:
        """(T + 1,) int64: unique rows by table."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.num_owners.cumsum(0)])
        return torch.as_tensor(plan.block_offsets)[starts]


def build_owner_map(shardings: Sequence[Sharding], num_ranks: int) -> OwnerMap:
    """Of shardings by table; of those that replicate, an exchange that deals has no lookups."""
    places = [
        t * num_ranks + np.array(sharding.ranks, dtype=np.int64)
        for t, sharding in enumerate(shardings)
    ]
    counts = torch.tensor([len(sharding.ranks) for sharding in shardings], dtype=torch.int64)
    return OwnerMap(num_ranks, counts, np.concatenate(places))
