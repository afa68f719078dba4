"""Clean rows: those of a coming batch that no batch in flight will change, and a message of rows cut in two by them.

The owner knows them, for it knows what every rank asked for; the others are told one bit for each row they asked of it.

Legend: O rows this rank owns and some rank asked for, N ranks, T tables, R rows of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.exchange.wire import RowLayout, row_layout

Rows = tuple[Tensor, Tensor]
"""Rows pinned in a store: slots (n,) int32, offsets (T + 1,) by table."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A message of rows as two: clean ones, which travel ahead, and the rest."""

    marks: np.ndarray  # (R,) bool, rank by rank, table by table: is it clean?
    early: RowLayout
    rest: RowLayout

    def index(self, dims: np.ndarray) -> Tensor:
        """(R,) int32, rows listed table by table, then rank by rank: the element where each begins if the early
        message lies before the rest."""
        ones = np.ones_like(dims)
        order = row_layout(self.early.counts + self.rest.counts, ones).table_major(ones)
        return torch.from_numpy(self.elements(dims)[_elements(order)])

    def elements(self, dims: np.ndarray) -> np.ndarray:
        """(R,) int32 likewise, rows listed rank by rank, table by table."""
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


def clean_rows(rows: Rows, in_flight: Sequence[Rows], never: Sequence[int]) -> Tensor:
    """(O,) bool: rows that none in flight has among its own. `never`: tables whose rows may change without being asked
    for."""
    held = [_keys(*each) for each in in_flight]
    clean = ~np.isin(_keys(*rows), np.concatenate(held)) if held else np.ones(len(rows[0]), bool)
    for t in never:
        clean[int(rows[1][t]) : int(rows[1][t + 1])] = False
    return torch.from_numpy(clean)


def pack_marks(marks: np.ndarray, counts: np.ndarray) -> tuple[Tensor, list[int]]:
    """marks (R,) bool of counts (N,) rows of each rank -> bits, each rank's in bytes of its own; bytes by rank."""
    ends = counts.cumsum().tolist()
    parts = [np.packbits(marks[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts]


def mark_bytes(counts: np.ndarray) -> list[int]:
    """By rank: of what `pack_marks` gives."""
    return (-(-counts // 8)).tolist()


def unpack_marks(data: Tensor, counts: np.ndarray) -> np.ndarray:
    """What `pack_marks` was given."""
    firsts = [0, *np.cumsum(mark_bytes(counts)).tolist()]
    marks, sizes = data.numpy(), counts.tolist()
    bits = [np.unpackbits(marks[a:], count=n) for a, n in zip(firsts, sizes, strict=False)]
    return np.concatenate(bits).view(bool)


def _keys(slots: Tensor, offsets: Tensor) -> np.ndarray:
    """One number for each row, of any table."""
    counts = offsets.diff().numpy()
    return (np.repeat(np.arange(len(counts)), counts) << 32) + _elements(slots)


def _elements(numbers: Tensor) -> np.ndarray:
    """int32 that hold uint32."""
    return numbers.numpy().view(np.uint32)
