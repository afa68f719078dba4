"""Marks of a message's rows, one bit for each, and the message cut in two by them.

Legend: N ranks, T tables, R rows of a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.exchange.wire import RowLayout, row_layout


@dataclass(frozen=True, slots=True)
class Cut:
    """A message of rows as two: marked ones first, then the rest."""

    marks: np.ndarray  # (R,) bool, rank by rank, table by table
    early: RowLayout
    rest: RowLayout

    def elements(self, dims: np.ndarray) -> np.ndarray:
        """(R,) int32, rows listed rank by rank, table by table: the element where each begins if the early message lies
        before the rest."""
        found = np.empty(len(self.marks), np.uint32)
        found[self.marks] = _elements(self.early.rank_major(dims))
        # Beyond 2^31 as bits, not as a number.
        found[~self.marks] = _elements(self.rest.rank_major(dims)) + np.uint32(
            self.early.num_elements
        )
        return found.view(np.int32)


def cut(layout: RowLayout, marks: np.ndarray, dims: np.ndarray) -> Cut:
    """marks: see `Cut`."""
    ends = layout.counts.ravel().cumsum()
    before = np.concatenate([[0], np.cumsum(marks)])
    early = (before[ends] - before[ends - layout.counts.ravel()]).reshape(layout.counts.shape)
    return Cut(marks, row_layout(early, dims), row_layout(layout.counts - early, dims))


def pack_marks(marks: np.ndarray, counts: np.ndarray) -> tuple[Tensor, list[int]]:
    """marks (R,) bool of counts (N,) rows of each rank -> bits, each rank's in bytes of its own; bytes by rank."""
    parts = packed_by_rank(marks, counts)
    return torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts]


def packed_by_rank(marks: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Likewise, by rank."""
    ends = counts.cumsum().tolist()
    return [np.packbits(marks[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def mark_bytes(counts: np.ndarray) -> list[int]:
    """By rank: of what `pack_marks` gives."""
    return (-(-counts // 8)).tolist()


def unpack_marks(data: Tensor, counts: np.ndarray) -> np.ndarray:
    """What `pack_marks` was given."""
    firsts = [0, *np.cumsum(mark_bytes(counts)).tolist()]
    marks, sizes = data.numpy(), counts.tolist()
    bits = [np.unpackbits(marks[a:], count=n) for a, n in zip(firsts, sizes, strict=False)]
    return np.concatenate(bits).view(bool)


def _elements(numbers: Tensor) -> np.ndarray:
    """int32 that hold uint32."""
    return numbers.numpy().view(np.uint32)
