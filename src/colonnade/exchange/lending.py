"""What both ends of a loan know of a batch, from its route to its update.

Legend: T tables, N ranks, U unique rows of this rank's batch, P rows named to it by all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.cache.sight import Sight
from colonnade.exchange.loans import Loans
from colonnade.exchange.marks import Cut
from colonnade.exchange.packing import Requests
from colonnade.exchange.said import Back, Said


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
    stayed: int = 0  # it was here: nothing came
    copied: int = 0  # a copy was here: gradients went
    returned: int = 0  # whole rows that went back, with any batch

    def add(self, said: Said, back: Back) -> None:
        self.asked += int(said.plain.sum())
        self.borrowed += int(said.borrowed.sum())
        self.stayed += int((said.has & ~said.read).sum())
        self.copied += int(said.read.sum())
        self.returned += len(back.ids)


@dataclass(slots=True)
class Line:
    """Batches of one lookahead, in order. Nothing is known of those of another."""

    sight: Sight
    lent: Loans  # rows of this rank
    had: Loans  # rows of others
    routed: int = 0
    trained: int = 0
    is_cut: bool = False  # a batch of it was left out: the others rely on it


@dataclass(frozen=True, slots=True)
class Borrower:
    """One batch, as the rank that uses the rows has it."""

    said: Said  # (U,) as messages list them
    order: np.ndarray  # (U,) `Flight.order`
    cut: Cut  # plain rows before the others: what comes
    index: Tensor  # (U,) int32: the element of each row of the plan in a message that is cut so
    sent: Cut  # rows that their owners update before the others: what goes
    sent_index: Tensor
    local: np.ndarray  # places of rows that are not plain in the plan, ascending
    ids: Tensor  # of these
    offsets: Tensor  # (T + 1,) by table
    updated: np.ndarray  # (len(local),) bool: here
    back: Back


@dataclass(frozen=True, slots=True)
class Lender:
    """One batch, as the owner of the rows has it."""

    said: Said  # (P,)
    is_here: np.ndarray  # (P,) bool: it lies here before the batch
    requests: _native.Lookups  # of the plain ones
    plan: _native.Plan  # of those that are updated here, each row once
    back: Back


@dataclass(slots=True)
class Flight:
    """One training batch, from its route to its update."""

    line: Line
    number: int  # in its line: 1, 2, ..
    order: np.ndarray  # (U,) of this rank's rows as listed, the place of each in the plan
    requests: Requests
    owner_plan: _native.Plan  # of all that was named here
    borrower: Borrower | None = None  # once it is decided on
    lender: Lender | None = None
    slots: Tensor | None = None  # of `Borrower.ids`, from fetch to update
    there: np.ndarray | None = None  # (P,) int32: slots of rows that are `Lender.is_here`
    back: np.ndarray | None = None  # int32: slots of `Lender.back`
    is_last: bool = False  # of its lookahead
    sums: Tensor | None = None  # elements of all rows' gradients, laid out by `Borrower.sent_index`

    @property
    def sides(self) -> tuple[Borrower, Lender]:
        """Of a batch that was decided on."""
        assert self.borrower is not None and self.lender is not None
        return self.borrower, self.lender

    def named(self, mine: np.ndarray) -> Tensor:
        """Ids of rows of `mine` (P,) bool that were named here, as listed."""
        return self.requests.ids[torch.from_numpy(mine)]

    @property
    def owned(self) -> tuple[np.ndarray, np.ndarray]:
        """(`there`, `back`) of one that was fetched."""
        assert self.there is not None and self.back is not None
        return self.there, self.back
