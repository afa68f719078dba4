"""The owner's side of an exchange: what happens where rows are, whatever travels.

Legend: O rows this rank owns and some rank asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.lookup.contract import Asked, Exactness, Inside, RowGradients, Ticket
from colonnade.lookup.kernels import NOWHERE, DeviceKernels, Kernels, NativeKernels, Sums
from colonnade.lookup.layout import Consumption, Declaration, Output
from colonnade.lookup.outputs import CPU, found, recorded
from colonnade.store.contract import RowView
from colonnade.wire.id_distribution import Asks, route


class Owner(Asks):
    """Finds, sums and updates the rows of this rank: what all exchanges are built on."""

    declaration: Declaration
    """What a model declared; or of it, where a plan has several exchanges, the features of this one."""
    outputs: tuple[Output, ...]
    exactness: Exactness

    @property
    def pushed_parameters(self) -> tuple[nn.Parameter, ...]:
        """See the contract; none, where only rows and their sums travel."""
        return ()

    @property
    def inside(self) -> Inside | None:
        """See the contract."""
        return None

    def __init__(
        self, declaration: Declaration, consumption: Consumption, outputs: Sequence[Output], mesh: Mesh
    ) -> None:  # fmt: skip
        """What its kernels pool: all that was declared, or the share of it that lies here."""
        self.mesh = mesh
        self.widths = declaration.widths
        self.table_rows = torch.tensor([t.rows or 0 for t in declaration.tables])
        self.undealt = torch.ones(len(declaration.tables), dtype=torch.int64)  # owners, by table
        self.dtype = declaration.tables[0].dtype
        self.itemsize = declaration.tables[0].itemsize
        declared = (declaration, consumption, outputs)
        self.native = NativeKernels(*declared, mesh.num_ranks)
        self.on_device = DeviceKernels(*declared, self.native)

    def kernels(self, views: Sequence[RowView]) -> Kernels:
        """For rows that lie there."""
        return self.native if views[0].rows is None else self.on_device

    def route(self, batch: Batch, step: int, *, purpose: str = "route") -> Ticket:
        """Collective on `purpose`'s group. Raises IdRangeError, DataError before anything travels."""
        (ticket,) = route([self], self.mesh, batch, step, purpose)
        return ticket

    def take_back(self, asked: Asked) -> None:
        """See the contract; nothing, where what is asked leaves nothing behind."""

    def place(self, ticket: Ticket, views: Sequence[RowView]) -> None:
        """The slot of each lookup, or of each row that was asked of this rank."""
        ticket.placed = take(ticket.pinned, ticket.owner_plan.inverse)

    @abstractmethod
    def pooled(self, ticket: Ticket, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """One tensor per output, of what was fetched. into: `Kernels.pool`'s."""

    def values(
        self, ticket: Ticket, handle: Tensor, device: torch.device = CPU
    ) -> dict[str, Tensor]:
        """See the contract. In the declared output dtype."""
        tensors = recorded(self, ticket, handle)
        return found(self.declaration, self.outputs, tensors, device, ticket.dense)

    def squared_norm(self, pushed: RowGradients) -> tuple[RowGradients, float]:
        return self._kernels_of(pushed).squared_norm(pushed)

    def squared_norms(self, rows: RowView, slots: Tensor) -> Tensor:
        return self.kernels([rows]).squared_norms(rows, slots)

    def update(
        self, store: Any, pushed: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        self.kernels(store.views()).update(store, pushed, optimizers, settings)

    def begin_push(self, tickets: Sequence[Ticket], step: int) -> Callable[[], RowGradients | None]:
        """Collective in a world of several: every rank pushes the same tickets, with gradients or without."""
        begun = [self._begin_push(ticket, step, i) for i, ticket in enumerate(tickets)]
        return lambda: self.merge(tickets, [finish() for finish in begun]) if begun else None

    @abstractmethod
    def _begin_push(self, ticket: Ticket, step: int, number: int) -> Callable[[], RowGradients]:
        """`begin_push` of one. number: of the ticket in its step."""

    def merge(self, tickets: Sequence[Ticket], pushed: Sequence[RowGradients]) -> RowGradients:
        """Several batches as one application: each is summed per row, then they are, in order."""
        if len(pushed) == 1:
            return pushed[0]
        counts = np.stack([np.diff(ticket.owned_offsets.numpy()) for ticket in tickets])
        asked = listed(torch.cat([ticket.owned_ids for ticket in tickets]), counts)
        plan = _native.make_plan(asked, self.table_rows, self.undealt)
        slots = torch.cat([part.slots for part in pushed])
        entries = torch.as_tensor(plan.entries)
        firsts = entries[torch.as_tensor(plan.segment_offsets)[:-1].long()].long()
        return self._kernels_of(pushed[0]).merged(tickets, pushed, slots[firsts].contiguous(), plan)

    def _kernels_of(self, pushed: RowGradients) -> Kernels:
        return self.on_device if isinstance(pushed.source, Sums) else self.native


def listed(ids: Tensor, counts: np.ndarray) -> _native.Lookups:
    """ids listed source by source, table by table; counts (sources, T). One one-hot feature per (source, table)."""
    tables, poolings = _features_of(*counts.shape)
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts.ravel(), out=offsets[1:])
    return _native.Lookups(ids, torch.from_numpy(offsets), tables, poolings, 0, None, None)


@lru_cache(maxsize=64)
def _features_of(num_sources: int, num_tables: int) -> tuple[Tensor, Tensor]:
    """Table and pooling of each, the same in every step; read only."""
    tables = torch.arange(num_tables, dtype=torch.int32).repeat(num_sources)
    return tables, torch.full((num_sources * num_tables,), 2, dtype=torch.uint8)


def take(values: Tensor, index: Any) -> Tensor:
    """values[index], int32."""
    index = torch.as_tensor(index)
    out = torch.empty(len(index), dtype=torch.int32)
    _native.take(values, index, out)
    return out


def soonest(codes: np.ndarray, plan: _native.Plan) -> Tensor:
    """Codes of `Batch.next_use` by lookup -> the soonest by unique row."""
    starts = np.asarray(plan.segment_offsets)[:-1]
    if not len(starts):
        return torch.empty(0, dtype=torch.uint8)
    # One less: 0 (unknown) becomes the farthest, for another lookup of the row may know.
    by_lookup = codes[np.asarray(plan.entries)] - np.uint8(1)
    return torch.from_numpy(np.minimum.reduceat(by_lookup, starts) + np.uint8(1))
