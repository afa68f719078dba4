"""`replicated`: every rank has every row, so lookups read this rank's own; what each rank's batch sums up per row goes
to all ranks, which apply it in rank order.

Ahead of a step, ids travel, so that each rank has the rows at hand that any rank's batch will change. No value does.
The sums are those of `rows`, in the same order: its bits, whatever the sharding.

Legend: T tables, N ranks, U unique rows of this rank, O rows that some rank asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.exchange.owner import listed, soonest, take
from colonnade.exchange.rows import Fetched, RowsExchange, Wire
from colonnade.lookup.contract import Asked, RowGradients, RowSource, Ticket
from colonnade.lookup.layout import Declaration, collect, explain_range
from colonnade.lookup.row_layout import row_layout
from colonnade.store.contract import RowView
from colonnade.topology.sharding import Sharding, table_wise
from colonnade.wire.codec import CODECS, Draw, decode, encode
from colonnade.wire.coding import AS_IT_IS, Coding
from colonnade.wire.packing import pack_requests, unpack_requests


class ReplicatedExchange(RowsExchange):
    """One rank's end. In a world of one: `rows`.

    A ticket's owned rows are those of all ranks' batches; its wire describes this rank's unique rows as one block
    (`asked`), and all ranks' as they come here (`serving`).
    """

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding] | None = None,
        coding: Coding = AS_IT_IS,
    ) -> None:
        """shardings: by table; every rank has what is looked up, so they are not looked at."""
        here = [table_wise(mesh.rank)] * len(declaration.tables)
        super().__init__(declaration, mesh, here, coding)

    def ask(self, batch: Batch, purpose: str = "route") -> Asked:
        """Raises IdRangeError, DataError."""
        if self.mesh.num_ranks == 1:
            return super().ask(batch, purpose)
        lookups = collect(batch, self.declaration, self.consumption)
        try:
            plan = _native.make_plan(lookups.native, self.table_rows, self.undealt)
        except IndexError as error:
            raise explain_range(error, self.declaration, self.consumption.features) from None
        codes = self._codes(batch, plan)
        message = np.empty(0, np.uint8)
        if purpose != "evaluate":  # nobody needs the rows that others only read
            offsets = self._table_offsets_of(plan).numpy()
            (message,) = pack_requests(
                torch.as_tensor(plan.unique_ids), offsets[None, :-1], offsets[None, 1:], self.table_rows,
                self.undealt, np.zeros((1, len(self.widths)), np.int64), codes=codes,
            )  # fmt: skip
        return Asked(batch.size, [message] * self.mesh.num_ranks, (lookups, plan, codes))

    def answer(
        self, asked: Asked, heard: Sequence[np.ndarray], *, step: int, weight: float, purpose: str
    ) -> Ticket:
        if self.mesh.num_ranks == 1:
            return super().answer(asked, heard, step=step, weight=weight, purpose=purpose)
        lookups, plan, codes = asked.lookups
        offsets = self._table_offsets_of(plan)
        if purpose == "evaluate":
            return Ticket(
                step, asked.size, lookups, plan, torch.as_tensor(plan.unique_ids), offsets, plan, weight,
                codes, purpose=purpose,
            )  # fmt: skip
        everywhere = torch.zeros(len(self.widths), dtype=torch.int64)
        requests = unpack_requests(heard, self.table_rows, self.undealt, everywhere)
        wanted = listed(requests.ids, requests.counts)
        owner_plan = _native.make_plan(wanted, self.table_rows, self.undealt)
        codes = None if requests.codes is None else soonest(requests.codes.numpy(), owner_plan)
        ticket = Ticket(
            step, asked.size, lookups, plan, torch.as_tensor(owner_plan.unique_ids),
            torch.as_tensor(owner_plan.block_offsets), owner_plan, weight, codes, purpose=purpose,
        )  # fmt: skip
        ours = row_layout(offsets.diff().numpy()[None], self.widths)
        all_ranks = row_layout(requests.counts, self.widths)
        ticket.wire = Wire(
            ours, all_ranks, ours.rank_major(self.widths), all_ranks.rank_major(self.widths), wanted
        )  # fmt: skip
        return ticket

    def place(self, ticket: Ticket, views: Sequence[RowView]) -> None:
        """The slot of each of this rank's unique rows."""
        if self.mesh.num_ranks == 1:
            return super().place(ticket, views)
        ticket.placed = self._mine(ticket, ticket.pinned)

    def _mine(self, ticket: Ticket, rows: Tensor) -> Tensor:
        """(U,) int32: `rows` (O,) int32 of all that ranks asked for, of this rank's."""
        if ticket.wire is None:  # of an evaluation, whose owned rows are this rank's
            return rows
        first = int(ticket.wire.serving.counts[: self.mesh.rank].sum())
        inverse = torch.as_tensor(ticket.owner_plan.inverse)
        return take(rows, inverse[first : first + ticket.plan.num_unique].contiguous())

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """Not collective: the rows are here."""
        if self.mesh.num_ranks == 1:
            return super().fetch(ticket, source)
        kernels = self.kernels(source.views)
        mine = ticket.placed if source.rows is ticket.slots else None
        if mine is None:
            mine = self._mine(ticket, source.rows)
        codec = CODECS[self.coding.codecs.values]
        if codec.name == "exact" and source.in_place and kernels is self.native:
            placed = kernels.place(ticket.lookups, source.views, take(mine, ticket.plan.inverse))
            ticket.reads = Fetched(kernels, placed, source)
            return
        counts = np.zeros((self.mesh.num_ranks, len(self.widths)), dtype=np.int64)
        counts[0] = self._table_offsets(ticket).diff().numpy()
        layout, unique = row_layout(counts, self.widths), torch.as_tensor(ticket.plan.unique_ids)
        values = kernels.message(source, mine, layout, listed(unique, counts))
        if (
            codec.name != "exact"
        ):  # as if it had travelled: what is read must not depend on the sharding
            blocks = self._blocks(layout)
            decode(codec, encode(codec, values, blocks), blocks, values)
        index = layout.rank_major(self.widths)
        ticket.reads = self._received(ticket, values, index)

    def _table_offsets(self, ticket: Ticket) -> Tensor:
        return self._table_offsets_of(ticket.plan)

    def _table_offsets_of(self, plan: _native.Plan) -> Tensor:
        """(T + 1,) int64: this rank's unique rows by table."""
        return torch.as_tensor(plan.block_offsets)

    def _outgoing(self, sums: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
        """All of them, to every rank."""
        num_ranks = self.mesh.num_ranks
        return sums.repeat(num_ranks), [len(sums)] * num_ranks

    def _draws(self, plan: _native.Plan, step: int, number: int) -> list[Draw]:
        by_table = torch.as_tensor(plan.unique_ids).split(
            self._table_offsets_of(plan).diff().tolist()
        )
        seeds = self._seeds(number)
        return [Draw(ids, seed, step) for ids, seed in zip(by_table, seeds, strict=True)]

    def squared_norm(self, pushed: RowGradients) -> tuple[RowGradients, float]:
        """Every rank has the same sums: the first counts them."""
        summed, square = super().squared_norm(pushed)
        return summed, square if self.mesh.rank == 0 else 0.0
