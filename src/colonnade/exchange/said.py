"""What owners say of a batch's rows that are lent, or come back: whose row lies where, as messages list them.

Legend: T tables, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.exchange.cached_wire import blocks_of, ranks_of, tables_of


@dataclass(frozen=True, slots=True)
class Said:
    """Of rows, listed rank by rank, table by table: what lies with their users. A copy lies with its owner, too."""

    counts: np.ndarray  # (N, T) int64
    has: np.ndarray  # (rows,) bool: the row, or a copy
    keeps: np.ndarray  # (rows,) bool: the row does so after the batch, or a copy
    copied: np.ndarray  # (rows,) bool: what is kept is a copy; where nothing is, what was had

    @property
    def plain(self) -> np.ndarray:
        """(rows,) bool: with its owner alone, before and after."""
        return ~(self.has | self.keeps)

    @property
    def read(self) -> np.ndarray:
        """A copy: the gradient goes to the owner."""
        return self.has & ~self.keeps & self.copied

    @property
    def pushed(self) -> np.ndarray:
        """Updated by their owner."""
        return self.plain | self.read

    @property
    def borrowed(self) -> np.ndarray:
        return ~self.has & self.keeps

    @property
    def returned(self) -> np.ndarray:
        """With the batch; a copy of it may stay."""
        return np.where(self.keeps, self.copied, self.has & ~self.copied)

    def counted(self, mine: np.ndarray) -> np.ndarray:
        """(N, T): rows of `mine` (rows,) bool."""
        return blocks_of(mine, self.counts)


@dataclass(frozen=True, slots=True)
class Back:
    """Rows that are given back with a batch, of it or of earlier ones: listed rank by rank, table by table, by id."""

    counts: np.ndarray  # (N, T) int64
    ids: Tensor  # int64
    copied: np.ndarray  # bool: a copy stays

    @property
    def tables(self) -> np.ndarray:
        """Of each."""
        return tables_of(self.counts)


def listed_back(
    ranks: np.ndarray,
    tables: np.ndarray,
    ids: np.ndarray,
    copied: np.ndarray,
    shape: tuple[int, int],
) -> Back:
    """Of rows in any order, to (N, T) = `shape` ranks and tables."""
    order = np.lexsort((ids, tables, ranks))
    counts = np.bincount(ranks.astype(np.int64) * shape[1] + tables, minlength=shape[0] * shape[1])
    return Back(counts.reshape(shape), torch.from_numpy(ids[order]), copied[order])


def returned(said: Said, ids: Tensor) -> Back:
    """ids: of rows that go back with a use of theirs."""
    return Back(said.counted(said.returned), ids, said.copied[said.returned])


def both(one: Back, other: Back) -> Back:
    return listed_back(
        np.concatenate([ranks_of(one.counts), ranks_of(other.counts)]), np.concatenate([one.tables, other.tables]),
        torch.cat([one.ids, other.ids]).numpy(), np.concatenate([one.copied, other.copied]), one.counts.shape,
    )  # fmt: skip
