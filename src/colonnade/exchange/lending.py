"""What both ends of a loan know of a batch: whose rows lie where, as messages list them and as plans do.

Legend: T tables, N ranks, U unique rows of this rank's batch, P rows named to it by all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from colonnade import _native
from colonnade.cache.sight import Sight
from colonnade.exchange.cached_wire import blocks_of
from colonnade.exchange.clean import Cut
from colonnade.exchange.packing import Requests


@dataclass(frozen=True, slots=True)
class Lending:
    """What of one table a rank may have in its owners' place."""

    rows: int
    window: int
    """Batches that owners see beyond the one they decide on."""


@dataclass
class LentCounts:
    """Rows of this rank's batches that were made ready since the run was opened, each once a batch."""

    asked: int = 0  # values came, gradients went
    borrowed: int = 0  # the whole row came
    stayed: int = 0  # nothing travelled
    returned: int = 0  # the whole row went back

    def add(self, said: Said) -> None:
        self.asked += int(said.plain.sum())
        self.borrowed += int(said.borrowed.sum())
        self.stayed += int((said.has & said.keeps).sum())
        self.returned += int(said.returned.sum())


@dataclass(slots=True)
class Line:
    """Batches of one lookahead, in order. Nothing is known of those of another."""

    sights: Sequence[Sight]  # by table
    routed: int = 0
    trained: int = 0
    is_cut: bool = False  # a batch of it was left out: the others rely on it


@dataclass(frozen=True, slots=True)
class Said:
    """Of rows, listed rank by rank, table by table."""

    counts: np.ndarray  # (N, T) int64
    has: np.ndarray  # (rows,) bool: lies with its user
    keeps: np.ndarray  # (rows,) bool: does so after the batch

    @property
    def plain(self) -> np.ndarray:
        """(rows,) bool: with its owner, before and after."""
        return ~(self.has | self.keeps)

    @property
    def borrowed(self) -> np.ndarray:
        return ~self.has & self.keeps

    @property
    def returned(self) -> np.ndarray:
        return self.has & ~self.keeps

    def counted(self, mine: np.ndarray) -> np.ndarray:
        """(N, T): rows of `mine` (rows,) bool."""
        return blocks_of(mine, self.counts)


@dataclass(frozen=True, slots=True)
class Borrower:
    """One batch, as the rank that uses the rows has it."""

    said: Said  # (U,) as messages list them
    order: np.ndarray  # (U,) of each of these, its place in the plan
    cut: Cut  # plain rows before the others
    index: Tensor  # (U,) int32: the element of each row of the plan in a message that is cut so
    local: np.ndarray  # places of the others in the plan, ascending
    ids: Tensor  # of these
    offsets: Tensor  # (T + 1,) by table


@dataclass(frozen=True, slots=True)
class Lender:
    """One batch, as the owner of the rows has it."""

    said: Said  # (P,)
    is_here: np.ndarray  # (P,) bool: something of it travels, so the row is pinned
    requests: _native.Lookups  # of the plain ones
    plan: _native.Plan  # of these, each row once


@dataclass(slots=True)
class Flight:
    """One training batch, from its route to its update."""

    line: Line
    number: int  # in its line: 1, 2, ..
    requests: Requests
    owner_plan: _native.Plan  # of all that was named here
    orders: Sequence[np.ndarray]  # by table: what makes the plan's rows ascend
    borrower: Borrower | None = None  # once it is decided on
    lender: Lender | None = None
    slots: Tensor | None = None  # of `Borrower.ids`, from fetch to update
    here: np.ndarray | None = None  # (U,) int32: these, as messages list the rows
    there: np.ndarray | None = None  # (P,) int32: slots of rows that are `Lender.is_here`
    sums: Tensor | None = None  # elements of all rows' gradients, laid out by `Borrower.index`

    @property
    def sides(self) -> tuple[Borrower, Lender]:
        """Of a batch that was decided on."""
        assert self.borrower is not None and self.lender is not None
        return self.borrower, self.lender

    @property
    def slots_by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """(`here`, `there`) of one that was fetched."""
        assert self.here is not None and self.there is not None
        return self.here, self.there
