"""Layout of a message of rows, for every exchange.

Row values and gradients of all tables are sent in one buffer of elements: rank by rank, table by table, row by row.

Legend: N ranks, T tables, R rows of a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of R rows in a buffer. It gives each row's first element, for rows listed in one of two orders."""

    block_elements: np.ndarray  # (N, T) int64: first element of the block of rank n, table t
    rank_elements: list[int]  # (N,): elements to or from each rank
    counts: np.ndarray  # (N, T) int64: rows of each block

    @property
    def num_elements(self) -> int:
        return sum(self.rank_elements)

    def table_major_index(self, dims: np.ndarray) -> Tensor:
        """Return element offsets of rows listed table by table, then rank by rank, (R,) int32. dims: (T,)."""
        return self._element_offsets(self.block_elements.T, self.counts.T, dims[:, None])

    def rank_major_index(self, dims: np.ndarray) -> Tensor:
        """Return element offsets of rows listed rank by rank, then table by table, (R,) int32. dims: (T,)."""
        return self._element_offsets(self.block_elements, self.counts, dims[None, :])

    @staticmethod
    def _element_offsets(starts: np.ndarray, counts: np.ndarray, dims: np.ndarray) -> Tensor:
        widths = np.broadcast_to(dims, counts.shape).ravel()
        counts = counts.ravel()
        before = np.concatenate([[0], np.cumsum(counts)[:-1]])
        index = np.repeat(starts.ravel() - before * widths, counts)
        index += np.arange(index.size) * np.repeat(widths, counts)
        return torch.from_numpy(index.astype(np.uint32).view(np.int32))


def build_row_layout(counts: np.ndarray, dims: np.ndarray) -> RowLayout:
    """Build the layout of blocks of counts (N, T) rows, of tables with dims (T,) elements per row."""
    elements = counts * dims[None, :]
    starts = np.concatenate([[0], np.cumsum(elements)[:-1]]).reshape(elements.shape)
    return RowLayout(starts, elements.sum(1).tolist(), counts)


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums of gradients by row."""

    values: Tensor  # of the compute dtype
    index: Tensor  # (U,) int32: first element of each row's sum
