"""Owner map: which ranks own the rows of each table, in the form that batch plans and messages use.

Legend: T tables, N ranks, N_t ranks that own rows of table t.
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
    """Map from the blocks of a plan to tables and ranks. A plan lists a table's rows owner by owner; ranks ascend
    within a sharding, so that is rank by rank, too."""

    num_ranks: int
    num_owners: Tensor  # (T,) int64: N_t
    block_index: np.ndarray
    """Index of each block of a plan among T * N blocks, table by table, rank by rank, (sum of N_t,) int64."""

    @cached_property
    def owner_indices(self) -> np.ndarray:
        """Index of a rank among the owners of each table, (N, T) int64; -1: it owns no rows of the table."""
        indices = np.full(len(self.num_owners) * self.num_ranks, -1)
        indices[self.block_index] = np.concatenate([np.arange(n) for n in self.num_owners.tolist()])
        return np.ascontiguousarray(indices.reshape(-1, self.num_ranks).T)

    def block_offsets(self, plan: _native.Plan) -> np.ndarray:
        """Return where the unique rows of each table and rank begin, (T * N + 1,) int64; empty for ranks that own
        none."""
        counts = np.zeros(len(self.num_owners) * self.num_ranks + 1, dtype=np.int64)
        counts[1 + self.block_index] = np.diff(np.asarray(plan.block_offsets))
        return counts.cumsum()

    def table_offsets(self, plan: _native.Plan) -> Tensor:
        """Return where the unique rows of each table begin, (T + 1,) int64."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.num_owners.cumsum(0)])
        return torch.as_tensor(plan.block_offsets)[starts]


def build_owner_map(shardings: Sequence[Sharding], num_ranks: int) -> OwnerMap:
    """Build the owner map of shardings by table. Replicated tables have no lookups in exchanges that use it."""
    block_indices = [
        t * num_ranks + np.array(sharding.ranks, dtype=np.int64)
        for t, sharding in enumerate(shardings)
    ]
    counts = torch.tensor([len(sharding.ranks) for sharding in shardings], dtype=torch.int64)
    return OwnerMap(num_ranks, counts, np.concatenate(block_indices))
