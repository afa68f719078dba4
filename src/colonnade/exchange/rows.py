"""`rows`: unique rows travel to the requester; gradients are summed per row before they travel back.

Per rank and step: ids of its unique rows out, their values in, one summed gradient per row out. In a
world of one, synchronous, nothing is copied: lookups read the owner's rows in place.

Legend: B samples, F features, T tables, N ranks, E lookups, U unique rows of this rank, O rows it owns,
P rows other ranks (and this one) asked it for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.exchange.contract import (
    BITWISE,
    Consumer,
    Cost,
    Load,
    RowGradients,
    RowSource,
    Ticket,
)
from colonnade.exchange.layout import (
    Declaration,
    Lookups,
    collect,
    consumption,
    explain_range,
    outputs,
)
from colonnade.exchange.wire import RowLayout, Traffic, row_layout
from colonnade.ops.memory import empty
from colonnade.store.mapped import MappedRows
from colonnade.topology.mesh import Mesh
from colonnade.topology.world import World

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Wire:
    """Both ends of a ticket's messages."""

    asked: RowLayout  # my unique rows, by owner
    serving: RowLayout  # rows asked of me, by requester
    asked_index: Tensor  # (U,) int32 element of each unique row
    serving_index: Tensor  # (P,) int32 element of each row asked of me
    requests: _native.Lookups  # what all ranks asked me for: one one-hot feature per (rank, table)


@dataclass(slots=True)
class Fetched:
    """Where `values` finds the row of each lookup: base[t] + index[e] * stride[t] bytes."""

    bases: Tensor  # (T,) int64
    strides: Tensor  # (T,) int64
    index: Tensor  # (E,) int32
    work: dist.Work | None
    keep: Any


class _Pool(torch.autograd.Function):
    """Forward pools; backward only records the gradients on the ticket: rows change in RowOptimizer.step."""

    @staticmethod
    def forward(ctx, exchange: RowsExchange, ticket: Ticket, handle: Tensor):
        ctx.ticket = ticket
        return tuple(exchange.pooled(ticket))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        if ctx.ticket.is_done:
            raise RuntimeError(
                "backward reached a batch that RowOptimizer.step() has applied or dropped already; "
                "call backward before step"
            )
        kept = [gradient.contiguous() for gradient in gradients]
        ctx.ticket.gradients.append(kept)
        ctx.ticket.versions.append([gradient._version for gradient in kept])
        return None, None, None


class RowsExchange:
    """One rank's end. `traffic` counts every payload byte it sends."""

    exactness = BITWISE

    def __init__(self, declaration: Declaration, mesh: Mesh) -> None:
        self.declaration = declaration
        self.mesh = mesh
        self.traffic = Traffic()
        self.outputs = outputs(declaration)
        self.consumption = consumption(declaration)
        self.widths = declaration.widths
        self.table_rows = torch.tensor([t.rows or 0 for t in declaration.tables])
        parts = [(c, *declaration.parts[p]) for c, p in self.consumption.reads]
        self.reads = _native.Reads(
            *_int32s((column, part.column, part.dim) for column, _, part in parts)
        )
        placed = [
            (i, column, output.width)
            for i, output in enumerate(self.outputs)
            for column in output.columns
        ]
        read_places = torch.tensor(placed).reshape(-1, 3).T.contiguous()
        self.read_outputs, self.read_columns, self.read_widths = read_places
        sources = max(1, mesh.num_ranks)
        self.whole_rows = _native.Reads(
            *_int32s((i, 0, width) for i, width in enumerate(self.widths.tolist() * sources))
        )
        self.dtype = declaration.tables[0].dtype
        self.itemsize = declaration.tables[0].itemsize
        self.compute = declaration.tables[0].compute_dtype

    def route(self, batch: Batch, step: int, *, purpose: str = "route") -> Ticket:
        """Collective on `purpose`'s group. Raises IdRangeError, DataError before anything travels."""
        num_ranks, num_tables = self.mesh.num_ranks, len(self.widths)
        lookups = collect(batch, self.declaration, self.consumption)
        try:
            plan = _native.make_plan(lookups.native, self.table_rows, num_ranks)
        except IndexError as error:
            raise explain_range(error, self.declaration, self.consumption.features) from None
        weight = float(batch.size if batch.sample_weight is None else batch.sample_weight.sum())
        unique = torch.as_tensor(plan.unique_ids)
        blocks = np.asarray(plan.block_offsets)
        if num_ranks == 1:
            return Ticket(
                step, batch.size, lookups.native, plan, lookups.feature_offsets,
                unique, torch.from_numpy(blocks), plan, weight, [], [],
            )  # fmt: skip
        counts = np.diff(blocks).reshape(num_tables, num_ranks).T  # (N, T)
        header = np.concatenate(
            [counts, np.full((num_ranks, 1), np.float64(weight).view(np.int64))], axis=1
        )
        received, _ = self._exchange(
            purpose, torch.from_numpy(np.ascontiguousarray(header)).view(-1),
            [num_tables + 1] * num_ranks, [num_tables + 1] * num_ranks,
        )  # fmt: skip
        header = received.view(num_ranks, num_tables + 1).numpy()
        asked_counts = header[:, :-1]
        weight = float(np.ascontiguousarray(header[:, -1]).view(np.float64).sum())
        send = torch.cat(
            [
                unique[blocks[t * num_ranks + r] : blocks[t * num_ranks + r + 1]]
                for r in range(num_ranks)
                for t in range(num_tables)
            ]
        )
        rows_in, rows_out = counts.sum(1).tolist(), asked_counts.sum(1).tolist()
        asked_ids, _ = self._exchange(purpose, send, rows_in, rows_out)
        requests = self._requests(asked_ids, asked_counts)
        owner_plan = _native.make_plan(requests, self.table_rows, 1)
        ticket = Ticket(
            step, batch.size, lookups.native, plan, lookups.feature_offsets,
            torch.as_tensor(owner_plan.unique_ids), torch.as_tensor(owner_plan.block_offsets),
            owner_plan, weight, rows_out, rows_in,
        )  # fmt: skip
        ticket.wire = self._wire(counts, asked_counts, requests)
        return ticket

    def place(self, ticket: Ticket) -> None:
        """The slot of each lookup, or of each row that was asked of this rank."""
        ticket.placed = _take(ticket.pinned, ticket.owner_plan.inverse)

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """Collective in a world of several. Row values are copied before it returns; they may still travel."""
        bases, strides = _addresses(source.views)
        placed = ticket.placed if source.rows is ticket.slots else None
        if placed is None:
            placed = _take(source.rows, ticket.owner_plan.inverse)
        if self.mesh.num_ranks == 1 and source.in_place:
            ticket.reads = Fetched(bases, strides, placed, None, source)
            return
        wire = ticket.wire or self._local_wire(ticket)
        ticket.wire = wire
        send = empty(wire.serving.num_elements, dtype=self.declaration.dtype)
        starts = torch.from_numpy(wire.serving.block_elements.ravel() * self.itemsize)
        rows = source.rows if self.mesh.num_ranks == 1 else placed
        _native.pool(
            wire.requests, rows, bases, strides, self.whole_rows,
            send.data_ptr() + starts,
            torch.from_numpy(self.widths * self.itemsize).repeat(max(1, self.mesh.num_ranks)),
            self.dtype, self.dtype,
        )  # fmt: skip
        values, work = self._exchange(
            "fetch", send, wire.serving.rank_elements, wire.asked.rank_elements, wait=False
        )
        num_tables = len(self.widths)
        ticket.reads = Fetched(
            torch.full((num_tables,), values.data_ptr()),
            torch.full((num_tables,), self.itemsize),
            _take(wire.asked_index, ticket.plan.inverse),
            work,
            (values, send),
        )

    def values(
        self, ticket: Ticket, handle: Tensor, device: torch.device = CPU
    ) -> dict[str, Tensor]:
        """See the contract. In the declared output dtype."""
        return self._found(_Pool.apply(self, ticket, handle), device)

    def _pool(
        self, of: Ticket | Lookups, lookups: _native.Lookups, index: Tensor, bases: Tensor, strides: Tensor
    ) -> list[Tensor]:  # fmt: skip
        tensors = [self._empty_output(i, of) for i in range(len(self.outputs))]
        out_bases, out_strides = self._output_addresses(tensors)
        _native.pool(
            lookups, index, bases, strides, self.reads,
            out_bases, out_strides, self.dtype, self.declaration.output,
        )  # fmt: skip
        return tensors

    def _found(self, tensors: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        """What a model sees of the outputs, by name."""
        found = {}
        for output, pooled in zip(self.outputs, tensors, strict=True):
            tensor = pooled.to(device)  # once, before the consumers that share it
            for name in output.names:
                consumer = self.declaration.consumers.get(name)
                found[name] = tensor if consumer is None else _evaluate(consumer, tensor)
        return found

    def pooled(self, ticket: Ticket) -> list[Tensor]:
        """One tensor per output, filled from the fetched rows."""
        reads: Fetched = ticket.reads
        if reads.work is not None:
            reads.work.wait()
            reads.work = None
        return self._pool(ticket, ticket.lookups, reads.index, reads.bases, reads.strides)

    def read(self, batch: Batch, rows: MappedRows, device: torch.device = CPU) -> dict[str, Tensor]:
        """Prediction, in a world of one: what `values` gives, of rows that nobody changes. No plan, no ticket, no
        graph. Raises IdRangeError, DataError as `route` does."""
        lookups = collect(batch, self.declaration, self.consumption)
        try:
            slots = rows.find(lookups.ids, lookups.feature_offsets, self.consumption.tables)
        except IndexError:
            self.route(batch, 0)  # says which
            raise
        pooled = self._pool(lookups, lookups.native, slots, *rows.places())
        return self._found(pooled, device)

    def push(self, tickets: Sequence[Ticket]) -> RowGradients | None:
        """Collective in a world of several: every rank pushes the same tickets, with gradients or without."""
        pushed = [self._push_one(ticket) for ticket in tickets]
        if not pushed:
            return None
        return pushed[0] if len(pushed) == 1 else self._merge(tickets, pushed)

    def drop(self, ticket: Ticket) -> None:
        if ticket.reads is not None and ticket.reads.work is not None:
            ticket.reads.work.wait()
        ticket.reads = None
        ticket.gradients.clear()

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """What a fetched ticket has read: ids (U,), table_offsets (T + 1,), values listed table by table."""
        reads: Fetched = ticket.reads
        if reads.work is not None:
            reads.work.wait()
            reads.work = None
        offsets = self._table_offsets(ticket)
        width = torch.from_numpy(self.widths).repeat_interleave(offsets.diff())
        starts = ticket.wire.asked_index.long() & 0xFFFFFFFF
        ramp = torch.arange(int(width.sum())) - (width.cumsum(0) - width).repeat_interleave(width)
        values = reads.keep[0][starts.repeat_interleave(width) + ramp]
        return {
            "ids": torch.as_tensor(ticket.plan.unique_ids).clone(),
            "table_offsets": offsets,
            "values": values,
        }

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        """Instead of `fetch`: the values that all ranks of some world held for this step's global batch."""
        unique, offsets = torch.as_tensor(ticket.plan.unique_ids), self._table_offsets(ticket)
        blocks, indices, start = [], [], 0
        for t, dim in enumerate(self.widths.tolist()):
            ids, rows = [], []
            for part in held:
                first, last = part["table_offsets"][t : t + 2].tolist()
                before = int(
                    (part["table_offsets"].diff()[:t] * torch.from_numpy(self.widths)[:t]).sum()
                )
                ids.append(part["ids"][first:last])
                rows.append(part["values"][before : before + (last - first) * dim].view(-1, dim))
            all_ids, order = torch.cat(ids).sort(stable=True)
            mine = unique[offsets[t] : offsets[t + 1]]
            where = torch.searchsorted(all_ids, mine)
            blocks.append(torch.cat(rows)[order[where]].flatten())
            indices.append(torch.arange(len(mine)) * dim + start)
            start += blocks[-1].numel()
        values = torch.cat(blocks)
        num_tables = len(self.widths)
        ticket.reads = Fetched(
            torch.full((num_tables,), values.data_ptr()),
            torch.full((num_tables,), self.itemsize),
            _take(torch.cat(indices).to(torch.int32), ticket.plan.inverse),
            None,
            (values, values),
        )
        ticket.wire = ticket.wire or self._local_wire(ticket)
        # A second commit may hold these values again: give them the layout `hold` reads.
        ordered = torch.empty_like(values)
        starts = ticket.wire.asked_index.long() & 0xFFFFFFFF
        width = torch.from_numpy(self.widths).repeat_interleave(offsets.diff())
        ramp = torch.arange(int(width.sum())) - (width.cumsum(0) - width).repeat_interleave(width)
        ordered[starts.repeat_interleave(width) + ramp] = values
        ticket.reads.keep = (ordered, values)

    def _table_offsets(self, ticket: Ticket) -> Tensor:
        """(T + 1,) int64: this rank's unique rows by table."""
        return torch.as_tensor(ticket.plan.block_offsets)[:: self.mesh.num_ranks].contiguous()

    def cost(self, load: Load, world: World) -> Cost:
        """Payload a rank sends per step; each unique remote row costs its id, its values and its gradient."""
        remote = sum(load.unique_rows_remote.values())
        values = sum(rows * load.row_bytes[t] for t, rows in load.unique_rows_remote.items())
        gradients = values * self.declaration.compute_dtype.itemsize / self.itemsize
        others = world.num_ranks - 1
        header = others * (len(load.unique_rows) + 1) * 8
        payload = {"route": 8.0 * remote + header, "fetch": values, "push": gradients}
        messages = 4 * others
        share = 1 - (world.ranks_per_host - 1) / others if others else 0.0  # leaves the host
        total = sum(payload.values())
        seconds = (
            total * (1 - share) / world.local_bytes_per_second
            + total * share * world.ranks_per_host / world.remote_bytes_per_second
            + messages * world.message_seconds
        )
        return Cost(payload, messages, seconds)

    def _push_one(self, ticket: Ticket) -> RowGradients:
        dtype = self.declaration.output
        if len(ticket.gradients) == 1:
            summed = ticket.gradients[0]
        elif ticket.gradients:
            dtype = self.compute
            wide = [
                [part.to(self.declaration.compute_dtype) for part in g] for g in ticket.gradients
            ]
            summed = [sum(parts[1:], parts[0]) for parts in zip(*wide, strict=True)]
        else:
            summed = [self._empty_output(i, ticket).zero_() for i in range(len(self.outputs))]
        bases, strides = self._output_addresses(summed)
        source = _native.OutputGradients(ticket.lookups, self.reads, bases, strides, dtype)
        plan = ticket.plan
        if self.mesh.num_ranks == 1:
            return RowGradients(
                ticket.pinned,
                ticket.owned_offsets,
                plan.segment_offsets,
                plan.entries,
                source,
                summed,
            )
        wire: Wire = ticket.wire
        send = empty(wire.asked.num_elements, dtype=self.declaration.compute_dtype)
        _native.sum_rows(
            plan.segment_offsets, plan.entries, source, self._table_offsets(ticket),
            self.declaration.native_parts, send.data_ptr(), wire.asked_index, self.compute,
        )  # fmt: skip
        received, _ = self._exchange(
            "push", send, wire.asked.rank_elements, wire.serving.rank_elements
        )
        return RowGradients(
            ticket.pinned, ticket.owned_offsets,
            ticket.owner_plan.segment_offsets, ticket.owner_plan.entries,
            _native.RowGradients(received.data_ptr(), wire.serving_index, self.compute), received,
        )  # fmt: skip

    def summed(self, pushed: RowGradients) -> tuple[RowGradients, Tensor]:
        """The same gradients with each row's entries added up, and the buffer that holds them, row by row."""
        counts = np.diff(pushed.offsets.numpy())[None, :]
        layout = row_layout(counts, self.widths)
        sums = empty(layout.num_elements, dtype=self.declaration.compute_dtype)
        index = layout.rank_major(self.widths)
        _native.sum_rows(
            pushed.segment_offsets, pushed.entries, pushed.source, pushed.offsets,
            self.declaration.native_parts, sums.data_ptr(), index, self.compute,
        )  # fmt: skip
        ramp = torch.arange(len(index) + 1, dtype=torch.int32)
        source = _native.RowGradients(sums.data_ptr(), index, self.compute)
        return RowGradients(
            pushed.slots, pushed.offsets, ramp, ramp[:-1].contiguous(), source, (sums, index)
        ), sums

    def _merge(self, tickets: Sequence[Ticket], pushed: Sequence[RowGradients]) -> RowGradients:
        """Several batches as one application: each is summed per row, then they are, in order."""
        counts = np.stack([np.diff(ticket.owned_offsets.numpy()) for ticket in tickets])
        layout = row_layout(counts, self.widths)
        sums = empty(layout.num_elements, dtype=self.declaration.compute_dtype)
        index = layout.rank_major(self.widths)
        starts = np.concatenate([[0], np.cumsum(counts.sum(1))])
        for i, part in enumerate(pushed):
            _native.sum_rows(
                part.segment_offsets, part.entries, part.source, part.offsets,
                self.declaration.native_parts, sums.data_ptr(),
                index[starts[i] : starts[i + 1]].contiguous(), self.compute,
            )  # fmt: skip
        requests = self._requests(torch.cat([ticket.owned_ids for ticket in tickets]), counts)
        plan = _native.make_plan(requests, self.table_rows, 1)
        slots = torch.cat([part.slots for part in pushed])
        entries = torch.as_tensor(plan.entries)
        firsts = entries[torch.as_tensor(plan.segment_offsets)[:-1].long()].long()
        return RowGradients(
            slots[firsts].contiguous(), torch.as_tensor(plan.block_offsets),
            plan.segment_offsets, plan.entries,
            _native.RowGradients(sums.data_ptr(), index, self.compute), (sums, index, plan),
        )  # fmt: skip

    def _exchange(self, purpose, send, send_rows, receive_rows, *, wait=True):
        if self.mesh.num_ranks > 1:
            self.traffic.count(purpose, send, send_rows, self.mesh.rank)
        return self.mesh.all_to_all(purpose, send, send_rows, receive_rows, wait=wait)

    def _requests(self, ids: Tensor, counts: np.ndarray) -> _native.Lookups:
        """ids listed source by source, table by table; counts (sources, T)."""
        num_sources, num_tables = counts.shape
        return _native.Lookups(
            ids,
            torch.from_numpy(np.concatenate([[0], np.cumsum(counts.ravel())]).astype(np.int64)),
            torch.arange(num_tables, dtype=torch.int32).repeat(num_sources),
            torch.full((num_sources * num_tables,), 2, dtype=torch.uint8),
            0,
            None,
            None,
        )

    def _wire(self, counts: np.ndarray, asked: np.ndarray, requests: _native.Lookups) -> Wire:
        mine, theirs = row_layout(counts, self.widths), row_layout(asked, self.widths)
        return Wire(
            mine, theirs, mine.table_major(self.widths), theirs.rank_major(self.widths), requests
        )

    def _local_wire(self, ticket: Ticket) -> Wire:
        counts = np.diff(ticket.owned_offsets.numpy())[None, :]
        return self._wire(counts, counts, self._requests(ticket.owned_ids, counts))

    def _empty_output(self, number: int, of: Ticket | Lookups) -> Tensor:
        output = self.outputs[number]
        if output.is_sequence:
            first = sum(len(before.fields) for before in self.outputs[:number])
            column = self.consumption.reads[first][0]
            rows = int(of.feature_offsets[column + 1] - of.feature_offsets[column])
        else:
            rows = of.batch_size
        return empty(rows, output.width, dtype=self.declaration.output_dtype)

    def _output_addresses(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(R,) each: where output row 0 of each read lies, and the bytes between rows."""
        itemsize = tensors[0].element_size() if tensors else 0
        starts = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        return starts[self.read_outputs] + self.read_columns * itemsize, self.read_widths * itemsize


def _evaluate(consumer: Consumer, pooled: Tensor) -> Tensor:
    """pooled (B, sum of dims): the consumer's fields side by side."""
    interaction, num_fields = consumer.interaction, len(consumer.features)
    dim = pooled.shape[1] // max(1, num_fields)
    if interaction.width(dim) is None:
        return interaction.combine(pooled)
    return interaction(pooled.unflatten(1, (num_fields, dim)))


def _int32s(rows) -> Iterable[Tensor]:
    """Rows of numbers -> one int32 tensor per column."""
    return torch.tensor(list(rows), dtype=torch.int32).reshape(-1, 3).T.contiguous()


def _addresses(views) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor([view.address for view in views], dtype=torch.int64),
        torch.tensor([view.stride_bytes for view in views], dtype=torch.int64),
    )


def _take(values: Tensor, index: Any) -> Tensor:
    index = torch.as_tensor(index)
    out = torch.empty(len(index), dtype=torch.int32)
    _native.take(values, index, out)
    return out
