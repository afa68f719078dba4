"""`pooled`: owners sum the rows of bags, for the samples of all ranks at once; partial sums travel to the samples'
ranks, and gradients of pooled values travel back.

Per rank and step: an id per lookup out, a block of (its samples, an owner's fields) in from every owner, and such a
block of gradients out. Owners' blocks are added in a fixed order (`wire/transport.py`; a table with one owner:
nothing to add). A requester divides by the bags' lengths where a feature asks for means, so an owner need not know
what lies elsewhere.

Legend: B samples of this rank, G samples of all ranks, C columns of lookups, E lookups, N ranks, O rows this rank
owns, W columns of all fields side by side, W_o those with a share on rank o.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.errors import CheckpointError, ConfigError
from colonnade.exchange.owner import Owner, soonest, take
from colonnade.exchange.prefetched import Held, gathered_held, names_of, rows_held, values_of
from colonnade.lookup.contract import (
    REASSOCIATED,
    Asked,
    RowGradients,
    RowSource,
    Ticket,
)
from colonnade.lookup.fields import Columns, Fields, runs_of
from colonnade.lookup.kernels import NOWHERE
from colonnade.lookup.layout import (
    Consumption,
    Declaration,
    Lookups,
    Output,
    collect,
    collect_codes,
    consumption,
    explain_range,
    outputs,
)
from colonnade.lookup.outputs import CPU, summed_backwards
from colonnade.ops.memory import empty
from colonnade.table import POOLINGS
from colonnade.topology.sharding import Sharding
from colonnade.wire import bags
from colonnade.wire.coding import AS_IT_IS, Coding
from colonnade.wire.id_distribution import counted
from colonnade.wire.owner_map import deal
from colonnade.wire.transport import Flight, Route, open_routes

NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class Wire:
    """Who has which samples."""

    sizes: list[int]  # by rank
    lookups: Lookups  # of this rank's batch
    rows: Sequence[Tensor] = ()  # of sequences, as they lie here, of all samples
    pooled: Any = None  # of an exchange that sends partials: what they were evaluated of here,
    partials: Any = None  # and how,
    versions: Any = None  # of the weights then
    attended: Any = None  # of attention: as it was evaluated here,
    of_rows: Any = None  # and gradients of the rows
    gathered: Sequence[Tensor] | None = (
        None  # inside a tower, turn by turn, where it leaves as something else when it is used
    )
    inside: Any = None  # of rows that come together in a tower: the ticket of its small world


@dataclass(slots=True)
class Fetched:
    """Pooled sums, for the samples of this rank."""

    flights: Sequence[Flight]  # by route
    whole: Tensor | None = None  # (B, W), where nothing has to travel or to be added

    def wait(self) -> None:
        for flight in self.flights:
            flight.wait()


class PooledExchange(Owner):
    """One rank's end."""

    exactness = REASSOCIATED
    """Sums of a bag whose rows have several owners, of a row's gradients over the ranks, and of the gradients of a
    field that several consumers take."""
    averaged_there: Collection[int] = ()
    """Features that owners pool as they are declared; of all others they give sums."""
    undivided: Collection[int] = ()
    """Features whose means need no division where the samples are."""

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding],
        coding: Coding = AS_IT_IS,
    ) -> None:
        """shardings: by table; none of those looked up here replicates. Raises ConfigError for sequences whose rows
        would have to travel."""
        self.declaration, self.shardings, self.coding = declaration, shardings, coding
        self.mesh = mesh
        self.exactness = coding.exactness(REASSOCIATED, declaration.dtype, mesh.num_ranks)
        self.outputs = self._outputs()
        for output in self.outputs:
            if output.is_sequence:
                feature = declaration.features[declaration.fields[output.fields[0]].feature]
                raise ConfigError(
                    f"feature {feature.name!r} of table {feature.table!r}: got exchange pooled, substitute, "
                    "towers or tower_rows for a sequence, whose rows reach the model one by one; give this table "
                    "exchange rows"
                )
        order = dict.fromkeys(i for output in self.outputs for i in output.fields)
        every = Fields(declaration, tuple(order))
        self.fields = Fields(declaration, every.pooled + every.sequences)
        shares = [self.fields.share(rank, shardings) for rank in range(mesh.num_ranks)]
        self.here = shares[mesh.rank]
        self.whole, messages = self._arriving(), [self._carried(each) for each in shares]
        self.sent = messages[mesh.rank]
        self.routes = self._routes(messages)
        roundings = max((route.roundings for route in self.routes), default=1)
        self.exactness = replace(self.exactness, max_error=roundings * self.exactness.max_error)
        self.routed = [runs_of([each.columns.starts.items()], self.sent)[0] for each in self.routes]
        sums = self.here.as_sums(but=self.averaged_there)
        self.owned = consumption(sums)
        super().__init__(sums, self.owned, outputs(sums), mesh)
        features = self.fields.features
        tables = [declaration.table_of(declaration.features[f]) for f in features]
        # As an owner pools them where they are an owner's lookups, too, in a world of one.
        poolings = [
            POOLINGS.index(pooling if f in self.averaged_there or is_one_by_one else "sum")
            for f, pooling in ((f, declaration.features[f].pooling) for f in features)
            for is_one_by_one in [pooling == "sequence" and mesh.num_ranks == 1]
        ]
        self.asked = Consumption(
            features, (), torch.tensor(tables, dtype=torch.int32), torch.tensor(poolings, dtype=torch.uint8)
        )  # fmt: skip
        column = {f: c for c, f in enumerate(features)}
        self.deal = deal(shardings, mesh.num_ranks)
        self.taken = runs_of([each.pieces for each in self.outputs], self.whole)
        self.divided = [
            (column[f], declaration.features[f].pooling, self.whole.of(key))
            for key, f in ((k, declaration.fields[k].feature) for k in self.whole.dims if isinstance(k, int))
            if declaration.features[f].pooling in ("mean", "sqrtn") and f not in self.undivided
        ]  # fmt: skip

    def _outputs(self) -> tuple[Output, ...]:
        return outputs(self.declaration)

    def _arriving(self) -> Columns:
        """What comes to the ranks of the samples."""
        return self._carried(self.fields)

    def _carried(self, share: Fields) -> Columns:
        """What a rank that has these fields sends."""
        return share.columns

    def _routes(self, messages: Sequence[Columns]) -> Sequence[Route]:
        """For all columns of what each rank sends; the same on every rank. In a world of one: none."""
        return open_routes(
            self.mesh, messages, self.whole, self.coding, self.declaration.compute_dtype
        )

    def _fetched_by(self, route: Route, part: Tensor, ticket: Ticket) -> Flight:
        """part (G, P): of what is sent here, what takes that route."""
        return route.fetch(part, ticket.wire.sizes, counted(ticket.purpose, "fetch"))

    def _pushed_by(
        self, route: Route, total: Tensor, ticket: Ticket, step: int, number: int
    ) -> Flight:
        """total (B, W): gradients of what came -> (G, P), of what was sent by that route."""
        return route.push(total, ticket.wire.sizes, step, number)

    def _message(self, ticket: Ticket, pooled: Tensor) -> Tensor:
        """pooled (G, W_o) of this rank's fields -> (G, P) as it is sent."""
        return pooled

    def _gradients_here(self, ticket: Ticket, received: Tensor) -> list[Tensor]:
        """received (G, P): gradients of what was sent -> (G, W_o), of what was pooled here, if anything was; and of the
        rows of each sequence."""
        return [received]

    def ask(self, batch: Batch, purpose: str = "route") -> Asked:
        """Raises IdRangeError, DataError."""
        lookups = self._collected(batch)
        codes = None
        if batch.next_use is not None:
            codes = collect_codes(batch, self.declaration, self.asked)
        plan, messages = None, []
        try:
            if self.mesh.num_ranks > 1:
                messages = bags.pack(lookups, self.table_rows, self.deal, codes)
            else:
                plan = _native.make_plan(lookups.native, self.table_rows, self.undealt)
        except IndexError as error:
            raise explain_range(error, self.declaration, self.asked.features) from None
        return Asked(batch.size, messages, (lookups, plan, codes))

    def answer(
        self, asked: Asked, heard: Sequence[np.ndarray], *, step: int, weight: float, purpose: str
    ) -> Ticket:
        lookups, plan, codes = asked.lookups
        every = bags.Joined(lookups, [asked.size], codes)
        if self.mesh.num_ranks > 1:
            every = bags.join(
                heard, self.owned, self.table_rows, self.deal, self.mesh.rank, self.declaration.compute_dtype,
            )  # fmt: skip
            plan = _native.make_plan(every.lookups.native, self.table_rows, self.undealt)
        known = None if every.codes is None else soonest(every.codes, plan)
        ticket = Ticket(
            step, asked.size, every.lookups, plan, torch.as_tensor(plan.unique_ids),
            torch.as_tensor(plan.block_offsets), plan, weight, known, purpose=purpose,
        )  # fmt: skip
        ticket.wire = Wire(every.sizes, lookups)
        return ticket

    def _collected(self, batch: Batch) -> Lookups:
        return collect(batch, self.declaration, self.asked)

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """Collective in a world of several. Rows are pooled before it returns; the sums may still travel."""
        sizes, dtype = ticket.wire.sizes, self.declaration.compute_dtype
        block = empty(sum(sizes), 0, dtype=dtype)
        if self.here.order:
            found = self._pooled_here(ticket, source)
            pooled = found.pop(0) if self.here.columns.dims else block
            ticket.wire.rows = found
            block = self._message(ticket, pooled)
        if self.mesh.num_ranks == 1:
            ticket.reads = Fetched((), block)
            return
        flights = []
        for route, runs in zip(self.routes, self.routed, strict=True):
            part = block
            if route.columns.width < self.sent.width:
                part = empty(sum(sizes), route.columns.width, dtype=dtype)
                for run in runs:
                    part[:, run.columns_here] = block[:, run.columns_there]
            flights.append(self._fetched_by(route, part, ticket))
        ticket.reads = Fetched(flights)

    def _pooled_here(self, ticket: Ticket, source: RowSource) -> list[Tensor]:
        """Of the samples that this rank serves: sums of its fields (G, W_o), where it has any, and rows of each
        sequence."""
        placed = ticket.placed if source.rows is ticket.slots else None
        if placed is None:
            placed = take(source.rows, ticket.owner_plan.inverse)
        kernels = self.kernels(source.views)
        there = kernels.place(ticket.lookups, source.views, placed)
        into = {}
        if kernels is self.native and self.here.columns.dims:
            shape = sum(ticket.wire.sizes), self.here.columns.width
            room = self.mesh.room(math.prod(shape), self.declaration.compute_dtype)
            into = {0: room.view(shape)}
        return [each.to(CPU) for each in kernels.pool(ticket.lookups, there, into)]

    def pooled(self, ticket: Ticket, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """One tensor per output, in the output dtype."""
        total = self._total(ticket)
        lookups: Lookups = ticket.wire.lookups
        for c, pooling, columns in self.divided:
            if (bag := lookups.bags[c]) is not None:
                lengths = bag.diff().clamp(min=1).to(total.dtype)
                total[:, columns] /= (lengths if pooling == "mean" else _sqrt(lengths))[:, None]
        dtype, tensors = self.declaration.output_dtype, []
        for i, (output, runs) in enumerate(zip(self.outputs, self.taken, strict=True)):
            is_all = len(runs) == 1 and runs[0].width == total.shape[1] and len(self.outputs) == 1
            if is_all and i not in into:
                tensors.append(total.to(dtype))
                continue
            tensor = into[i] if i in into else empty(len(total), output.width, dtype=dtype)
            for run in runs:
                tensor[:, run.columns_here] = total[:, run.columns_there]
            tensors.append(tensor)
        return tensors

    def _total(self, ticket: Ticket) -> Tensor:
        """(B, W) of the compute dtype: sums of bags over owners. The caller's own."""
        reads: Fetched = ticket.reads
        if reads.whole is not None:
            return reads.whole.clone()
        reads.wait()
        total = empty(ticket.batch_size, self.whole.width, dtype=self.declaration.compute_dtype)
        for route, flight in zip(self.routes, reads.flights, strict=True):
            route.add(flight, total)
        return total

    def _begin_push(self, ticket: Ticket, step: int, number: int) -> Callable[[], RowGradients]:
        total = self._gradients(ticket)
        flights = [self._pushed_by(route, total, ticket, step, number) for route in self.routes]
        return lambda: self._pushed(ticket, total, flights)

    def _pushed(self, ticket: Ticket, total: Tensor, flights: Sequence[Flight]) -> RowGradients:
        """total (B, W): what it sent, by route."""
        received = total
        if self.mesh.num_ranks > 1:
            num_samples = sum(ticket.wire.sizes)
            received = empty(num_samples, self.sent.width, dtype=total.dtype)
            for route, flight, runs in zip(self.routes, flights, self.routed, strict=True):
                flight.wait()
                part = flight.received.view(num_samples, route.columns.width)
                if route.columns.width == self.sent.width:
                    received = part
                    continue
                for run in runs:
                    received[:, run.columns_there] = part[:, run.columns_here]
        if not self.here.order:
            none = torch.empty(0, dtype=torch.int32)
            source = _native.RowGradients(received.data_ptr(), none, self.native.compute)
            return RowGradients(
                ticket.pinned, ticket.owned_offsets, torch.zeros(1, dtype=torch.int32), none, source
            )
        return self.native.of_outputs(ticket, self._gradients_here(ticket, received))

    def _gradients(self, ticket: Ticket) -> Tensor:
        """(B, W) of the compute dtype: gradients of the sums."""
        dtype, size = self.declaration.compute_dtype, ticket.batch_size
        total = empty(size, self.whole.width, dtype=dtype)
        given = summed_backwards(ticket, dtype)
        if given is None:
            total.zero_()
        else:
            for gradient, runs in zip(given, self.taken, strict=True):
                for run in runs:
                    there = total[:, run.columns_there]
                    here = gradient[:, run.columns_here]
                    there.copy_(here) if run.is_first else there.add_(here)
        lookups: Lookups = ticket.wire.lookups
        for c, pooling, columns in self.divided:
            if (bag := lookups.bags[c]) is not None:
                lengths = bag.diff().clamp(min=1).to(dtype)
                total[:, columns] *= (1 / (lengths if pooling == "mean" else _sqrt(lengths)))[:, None]  # fmt: skip
        return total

    def drop(self, ticket: Ticket) -> None:
        if ticket.reads is not None:
            ticket.reads.wait()
        ticket.reads = None
        ticket.forget()

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """What a fetched ticket has read: sums (B, W), by sample."""
        return {"sums": self._total(ticket), "fields": self._names}

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        """Instead of `fetch`: this rank's samples of what all ranks of some world held for this step's global batch,
        whose blocks they are, in rank order, in every world; or their sums, where another exchange held rows. Raises
        CheckpointError where neither is there."""
        if any("gathered" in each for each in held):
            every = gathered_held(held, self._names, self.fields.columns, ticket.wire.sizes)
            first = sum(ticket.wire.sizes[: self.mesh.rank])
            ticket.reads = Fetched((), every[first : first + ticket.batch_size])
            return
        if not all(torch.equal(each.get("fields", NOTHING), self._names) for each in held):
            ticket.reads = Fetched((), self._sums_of_rows(ticket, rows_held(held)))
            return
        sums = torch.cat([each["sums"] for each in held])
        sizes, rank = ticket.wire.sizes, self.mesh.rank
        if sums.shape != (sum(sizes), self.whole.width):
            raise CheckpointError(
                f"the commit holds sums of shape {tuple(sums.shape)} that were read ahead, this batch wants "
                f"{(sum(sizes), self.whole.width)}; go on with the data, model and batch size of the commit"
            )
        first = sum(sizes[:rank])
        ticket.reads = Fetched((), sums[first : first + sizes[rank]])

    @property
    def _names(self) -> Tensor:
        """uint8: whose sums are held, side by side."""
        return names_of(self._held(i) for i in self.fields.order)

    def _held(self, i: int) -> str:
        """What the sums of a field are called."""
        return self.declaration.fields[i].name

    def _sums_of_rows(self, ticket: Ticket, parts: Sequence[Held]) -> Tensor:
        """(B, W) of the compute dtype, by sample: of rows that were read ahead."""
        lookups: Lookups = ticket.wire.lookups
        size, dtype = ticket.batch_size, self.declaration.compute_dtype
        sums = torch.zeros(size, self.fields.width, dtype=dtype)
        bounds = lookups.feature_offsets.tolist()
        for c, (f, t) in enumerate(
            zip(self.asked.features, self.asked.tables.tolist(), strict=True)
        ):
            ids = lookups.ids[bounds[c] : bounds[c + 1]]
            rows = values_of(parts, self.widths, t, ids).to(dtype)
            if (weights := lookups.weights[c]) is not None:
                rows = rows * weights.to(dtype)[:, None]
            bag = lookups.bags[c]
            if bag is not None:
                samples = torch.arange(size).repeat_interleave(bag.diff())
                rows = torch.zeros(size, rows.shape[1], dtype=dtype).index_add_(0, samples, rows)
            for i in self.fields.order:
                field, start = self.declaration.fields[i], self.fields.columns.starts[i]
                if field.feature == f:
                    column = self.declaration.parts[field.part][1].column
                    sums[:, start : start + field.dim] = rows[:, column : column + field.dim]
        return sums


def _sqrt(values: Tensor) -> Tensor:
    """Correctly rounded, as the native kernels'; torch's own on a CPU is not."""
    return torch.from_numpy(np.sqrt(values.numpy()))
