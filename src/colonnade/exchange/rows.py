"""`rows`: unique rows travel to the requester; gradients are summed per row before they travel back.

Per rank and step: ids of its unique rows out (and when they are needed next, where a reader says it), their
values in, one summed gradient per row out. In a world of one, synchronous, nothing is copied: lookups read the
owner's rows in place.

Legend: B samples, F features, T tables, N ranks, E lookups, U unique rows of this rank, O rows it owns,
P rows other ranks (and this one) asked it for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Call, Mesh
from colonnade.exchange.owner import Owner, listed, soonest, take
from colonnade.exchange.prefetched import rows_held, values_of
from colonnade.lookup.contract import (
    BITWISE,
    Asked,
    ByPage,
    RowGradients,
    RowSource,
    Ticket,
)
from colonnade.lookup.kernels import NOWHERE, Kernels
from colonnade.lookup.layout import (
    Declaration,
    Lookups,
    collect,
    collect_codes,
    consumption,
    explain_range,
    outputs,
)
from colonnade.lookup.outputs import CPU, found, summed_backwards
from colonnade.lookup.row_layout import RowLayout, row_layout
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.store.mapped import MappedRows
from colonnade.topology.sharding import Sharding, row_wise_in
from colonnade.wire.codec import CODECS, Block, Codec, Draw, decode, encode
from colonnade.wire.coding import AS_IT_IS, Coding
from colonnade.wire.id_distribution import counted
from colonnade.wire.owner_map import deal
from colonnade.wire.packing import pack_requests, unpack_requests


@dataclass(frozen=True, slots=True)
class Wire:
    """Both ends of a ticket's messages."""

    asked: RowLayout  # my unique rows, by owner
    serving: RowLayout  # rows asked of me, by requester
    asked_index: Tensor  # (U,) int32 element of each unique row
    serving_index: Tensor  # (P,) int32 element of each row asked of me
    requests: _native.Lookups  # what all ranks asked me for: one one-hot feature per (rank, table)


@dataclass(slots=True)
class Arrival:
    """A message of rows on its way here."""

    work: Call | None
    keep: Any
    decode: Callable[[], None] | None = None  # once it has arrived

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.decode is not None:
            self.decode()
            self.decode = None


@dataclass(slots=True)
class Fetched:
    """Where `values` finds the row of each lookup."""

    kernels: Kernels
    placed: Any  # theirs
    keep: Any
    arrival: Arrival | None = None
    index: Tensor | None = None
    """(U,) int32, where rows were copied: the element of `keep` that each unique row begins with."""

    def wait(self) -> None:
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None


class RowsExchange(Owner):
    """One rank's end."""

    exactness = BITWISE

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding] | None = None,
        coding: Coding = AS_IT_IS,
    ) -> None:
        """shardings: by table, where rows are not dealt to all ranks."""
        self.coding = coding
        self.declaration = declaration
        num_ranks = max(1, mesh.num_ranks)
        everywhere = row_wise_in(mesh.world)
        self.deal = deal(shardings or [everywhere] * len(declaration.tables), num_ranks)
        self.outputs = outputs(declaration)
        self.consumption = consumption(declaration)
        super().__init__(declaration, self.consumption, self.outputs, mesh)
        self.exactness = coding.exactness(BITWISE, declaration.dtype, mesh.num_ranks)

    def ask(self, batch: Batch, purpose: str = "route") -> Asked:
        """Raises IdRangeError, DataError."""
        lookups, plan = self.planned(batch)
        codes = self._codes(batch, plan)
        return Asked(batch.size, self.requests(plan, codes), (lookups, plan, codes))

    def requests(self, plan: _native.Plan, codes: Tensor | None) -> list[np.ndarray]:
        """Local. By rank, uint8: what it is asked for of the plan's rows; codes (U,) of them. World of one: []."""
        num_ranks = self.mesh.num_ranks
        if num_ranks == 1:
            return []
        blocks = self.deal.blocks(plan)
        firsts, lasts = (b.reshape(-1, num_ranks).T for b in (blocks[:-1], blocks[1:]))
        return pack_requests(
            torch.as_tensor(plan.unique_ids), firsts, lasts, self.table_rows, self.deal.num_owners,
            self.deal.places, codes=codes,
        )  # fmt: skip

    def planned(self, batch: Batch) -> tuple[Lookups, _native.Plan]:
        """Local. Raises IdRangeError, DataError."""
        lookups = collect(batch, self.declaration, self.consumption)
        try:
            plan = _native.make_plan(lookups.native, self.table_rows, self.deal.num_owners)
        except IndexError as error:
            raise explain_range(error, self.declaration, self.consumption.features) from None
        return lookups, plan

    def answer(
        self, asked: Asked, heard: Sequence[np.ndarray], *, step: int, weight: float, purpose: str
    ) -> Ticket:
        lookups, plan, codes = asked.lookups
        blocks = self.deal.blocks(plan)
        if self.mesh.num_ranks == 1:
            return Ticket(
                step, asked.size, lookups, plan, torch.as_tensor(plan.unique_ids),
                torch.from_numpy(blocks), plan, weight, codes, purpose=purpose,
            )  # fmt: skip
        counts = np.diff(blocks).reshape(len(self.widths), -1).T  # (N, T)
        places = torch.from_numpy(self.deal.places[self.mesh.rank].copy())
        requests = unpack_requests(heard, self.table_rows, self.deal.num_owners, places)
        wanted = listed(requests.ids, requests.counts)
        owner_plan = _native.make_plan(wanted, self.table_rows, self.undealt)
        codes = None if requests.codes is None else soonest(requests.codes.numpy(), owner_plan)
        ticket = Ticket(
            step, asked.size, lookups, plan, torch.as_tensor(owner_plan.unique_ids),
            torch.as_tensor(owner_plan.block_offsets), owner_plan, weight, codes, purpose=purpose,
        )  # fmt: skip
        ticket.wire = self._wire(counts, requests.counts, wanted)
        return ticket

    def _codes(self, batch: Batch, plan: _native.Plan) -> Tensor | None:
        """(U,) uint8: `Batch.next_use` by unique row. Raises DataError."""
        if batch.next_use is None:
            return None
        return soonest(collect_codes(batch, self.declaration, self.consumption), plan)

    def place(self, ticket: Ticket, views: Sequence[RowView]) -> None:
        """And in which order the update finds them quickly: that thread has time."""
        super().place(ticket, views)
        plan = ticket.owner_plan
        if views[0].rows is None:
            found = _native.by_page(
                ticket.pinned, ticket.owned_offsets, plan.segment_offsets, plan.entries
            )
            ticket.by_page = ByPage(*map(torch.as_tensor, found)) if found else None

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """Collective in a world of several. Row values are copied before it returns; they may still travel."""
        kernels = self.kernels(source.views)
        placed = ticket.placed if source.rows is ticket.slots else None
        if placed is None:
            placed = take(source.rows, ticket.owner_plan.inverse)
        if self.mesh.num_ranks == 1 and source.in_place:
            order = (
                ticket.by_page.entries if ticket.by_page and source.rows is ticket.slots else None
            )
            where = kernels.place(ticket.lookups, source.views, placed, order)
            ticket.reads = Fetched(kernels, where, source)
            return
        wire = ticket.wire or self._local_wire(ticket)
        ticket.wire = wire
        rows = source.rows if self.mesh.num_ranks == 1 else placed
        counts_as = counted(ticket.purpose, "fetch")
        send = self.mesh.room(wire.serving.num_elements, self.declaration.dtype)
        kernels.message(source, rows, wire.serving, wire.requests, send)
        if self.mesh.num_ranks == 1:
            ticket.reads = self._received(ticket, send, wire.asked_index)
            return
        values = empty(wire.asked.num_elements, dtype=self.declaration.dtype)
        arrival = self._send(send, wire.serving, wire.asked, values, counts_as)
        ticket.reads = self._received(ticket, values, wire.asked_index, arrival)

    def _send(
        self, send: Tensor, theirs: RowLayout, mine: RowLayout, into: Tensor, counts_as: str
    ) -> Arrival:
        """Collective. send: rows laid out as `theirs`; into: room for those of others, laid out as `mine`."""
        codec = CODECS[self.coding.codecs.values]
        if codec.name == "exact":
            _, work = self.mesh.all_to_all(
                "fetch", send, theirs.rank_elements, mine.rank_elements, wait=False,
                counts_as=counts_as, into=into,
            )  # fmt: skip
            return Arrival(work, (send, into))
        coded = encode(codec, send, self._blocks(theirs))
        data, work = self.mesh.all_to_all(
            "fetch", coded, self._rank_bytes(codec, theirs, send.dtype),
            self._rank_bytes(codec, mine, send.dtype), wait=False, counts_as=counts_as,
        )  # fmt: skip
        return Arrival(work, coded, partial(decode, codec, data, self._blocks(mine), into))

    def _received(
        self, ticket: Ticket, values: Tensor, index: Tensor, arrival: Arrival | None = None
    ) -> Fetched:
        """Rows in one block of values: index (U,) int32, the element that each begins with."""
        view = RowView(values.data_ptr(), self.itemsize, 1, self.dtype)
        taken = take(index, ticket.plan.inverse)
        placed = self.native.place(ticket.lookups, [view] * len(self.widths), taken)
        return Fetched(self.native, placed, values, arrival, index)

    def pooled(self, ticket: Ticket, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """One tensor per output, filled from the fetched rows."""
        reads: Fetched = ticket.reads
        reads.wait()
        return reads.kernels.pool(ticket.lookups, reads.placed, into)

    def read(self, batch: Batch, rows: MappedRows, device: torch.device = CPU) -> dict[str, Tensor]:
        """Prediction, in a world of one: what `values` gives, of rows that nobody changes. No plan, no ticket, no
        graph. Raises IdRangeError, DataError as `route` does, CorruptionError and StorageError where a file of rows is
        damaged."""
        lookups = collect(batch, self.declaration, self.consumption)
        try:
            slots = rows.find(lookups.ids, lookups.feature_offsets, self.consumption.tables)
        except IndexError:
            self.ask(batch)  # says which
            raise
        pooled = self.native.pool(lookups, (*rows.places(), slots, None))
        rows.check()
        return found(self.declaration, self.outputs, pooled, device, batch.dense)

    def drop(self, ticket: Ticket) -> None:
        if ticket.reads is not None:
            ticket.reads.wait()
        ticket.reads = None
        ticket.forget()

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """What a fetched ticket has read: ids (U,), table_offsets (T + 1,), values listed table by table."""
        reads: Fetched = ticket.reads
        reads.wait()
        offsets = self._table_offsets(ticket)
        width = torch.from_numpy(self.widths).repeat_interleave(offsets.diff())
        assert reads.index is not None  # `hold` is for values that were copied
        starts = reads.index.long() & 0xFFFFFFFF
        ramp = torch.arange(int(width.sum())) - (width.cumsum(0) - width).repeat_interleave(width)
        values = reads.keep[starts.repeat_interleave(width) + ramp]
        return {
            "ids": torch.as_tensor(ticket.plan.unique_ids).clone(),
            "table_offsets": offsets,
            "values": values,
        }

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        """Instead of `fetch`: the values that all ranks of some world held for this step's global batch. Raises
        CheckpointError for what another exchange held."""
        parts = rows_held(held)
        unique, offsets = torch.as_tensor(ticket.plan.unique_ids), self._table_offsets(ticket)
        blocks, indices, start = [], [], 0
        for t, dim in enumerate(self.widths.tolist()):
            mine = unique[offsets[t] : offsets[t + 1]]
            blocks.append(values_of(parts, self.widths, t, mine).flatten())
            indices.append(torch.arange(len(mine)) * dim + start)
            start += blocks[-1].numel()
        index = torch.cat(indices).to(torch.int32)
        ticket.reads = self._received(ticket, torch.cat(blocks), index)
        ticket.wire = ticket.wire or self._local_wire(ticket)

    def _table_offsets(self, ticket: Ticket) -> Tensor:
        """(T + 1,) int64: this rank's unique rows by table."""
        return self.deal.table_offsets(ticket.plan)

    def _begin_push(self, ticket: Ticket, step: int, number: int) -> Callable[[], RowGradients]:
        kernels = self.native if ticket.reads is None else ticket.reads.kernels
        summed = summed_backwards(ticket, self.declaration.compute_dtype)
        if summed is None:
            summed = kernels.zeros(ticket.lookups)
        if self.mesh.num_ranks == 1:
            return partial(kernels.of_outputs, ticket, summed)
        wire, plan = ticket.wire, ticket.plan
        send = self.mesh.room(wire.asked.num_elements, self.declaration.compute_dtype)
        asked = RowGradients(
            ticket.pinned, self._table_offsets(ticket), plan.segment_offsets, plan.entries,
            self.native.source(ticket, summed), summed,
        )  # fmt: skip
        self.native.sum_into(asked, send, wire.asked_index)
        codec, dtype = CODECS[self.coding.codecs.gradients], send.dtype
        sizes, theirs = wire.asked.rank_elements, wire.serving.rank_elements
        if codec.name != "exact":
            send = encode(codec, send, self._blocks(wire.asked), self._draws(plan, step, number))
            sizes, theirs = (
                self._rank_bytes(codec, each, dtype) for each in (wire.asked, wire.serving)
            )
        send, sizes = self._outgoing(send, sizes)
        data, call = self.mesh.all_to_all("push", send, sizes, theirs, wait=False)
        arrival = Arrival(call, send)

        def finish() -> RowGradients:
            arrival.wait()
            received = data
            if codec.name != "exact":
                received = empty(wire.serving.num_elements, dtype=dtype)
                decode(codec, data, self._blocks(wire.serving), received)
            return RowGradients(
                ticket.pinned, ticket.owned_offsets,
                ticket.owner_plan.segment_offsets, ticket.owner_plan.entries,
                _native.RowGradients(received.data_ptr(), wire.serving_index, self.native.compute), received,
                ticket.by_page,
            )  # fmt: skip

        return finish

    def _outgoing(self, sums: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
        """What this rank sends of its rows' sums, and how much of it to each rank."""
        return sums, sizes

    def _blocks(self, layout: RowLayout) -> list[Block]:
        """Rank by rank, table by table."""
        dims = [tuple(part.dim for part in table.parts) for table in self.declaration.tables]
        return [Block(n, dims[t]) for counts in layout.counts.tolist() for t, n in enumerate(counts)]  # fmt: skip

    def _rank_bytes(self, codec: Codec, layout: RowLayout, dtype: torch.dtype) -> list[int]:
        tables = self.declaration.tables
        width = [codec.row_bytes([part.dim for part in table.parts], dtype) for table in tables]
        return (layout.counts @ np.array(width)).tolist()

    def _draws(self, plan: _native.Plan, step: int, number: int) -> list[Draw]:
        """Of the rows this rank asked for, block by block."""
        num_ranks, borders = self.mesh.num_ranks, self.deal.blocks(plan).tolist()
        unique, seeds = torch.as_tensor(plan.unique_ids), self._seeds(number)
        places = [(t, t * num_ranks + r) for r in range(num_ranks) for t in range(len(seeds))]
        return [Draw(unique[borders[b] : borders[b + 1]], seeds[t], step) for t, b in places]

    def _seeds(self, number: int) -> list[int]:
        """By table."""
        tables, rank = self.declaration.tables, self.mesh.rank
        return [self.coding.seed(table.name, rank, number) for table in tables]

    def _wire(self, counts: np.ndarray, asked: np.ndarray, requests: _native.Lookups) -> Wire:
        mine, theirs = row_layout(counts, self.widths), row_layout(asked, self.widths)
        return Wire(
            mine, theirs, mine.table_major(self.widths), theirs.rank_major(self.widths), requests
        )

    def _local_wire(self, ticket: Ticket) -> Wire:
        counts = np.diff(ticket.owned_offsets.numpy())[None, :]
        return self._wire(counts, counts, listed(ticket.owned_ids, counts))
