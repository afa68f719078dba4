"""`lent`: a row stays with the rank that alone uses it, which updates it as its owner would; all else as `rows`.

Owners see the ids of `window` batches beyond each that is made ready (`in_sight`, `cache.sight`), say with some bits
for each row asked of them whether its user keeps it (`lent_wire`), name those that come back otherwise, and send a row
with all its state or take it back so. Who gives a row back that it uses next beside others has a copy until then.
Nobody needs a row that is elsewhere: reads see every update, and the bits are those of `rows`.

Legend: T tables, N ranks, U unique rows of this rank's batch, P rows named to it by all ranks.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.cache.sight import Sight, worth_of
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.exchange.borrowed import Borrowed
from colonnade.exchange.cached_wire import by_table, ranges, ranks_of, records_layout, tables_of
from colonnade.exchange.contract import Asked, Exchange, RowGradients, RowSource, Ticket
from colonnade.exchange.layout import Declaration
from colonnade.exchange.lending import (
    Borrower,
    Flight,
    Lender,
    Lending,
    LentCounts,
    Line,
)
from colonnade.exchange.lent_clocks import LentClocks, moved_bytes
from colonnade.exchange.lent_records import clocks_at, put_by_room, unpack
from colonnade.exchange.lent_wire import (
    listed_order,
    pack_numbers,
    read_requests,
    read_said,
    said_messages,
)
from colonnade.exchange.loans import NONE, Loans
from colonnade.exchange.marks import cut
from colonnade.exchange.owner import listed, soonest
from colonnade.exchange.packing import pack_requests, unpack_requests
from colonnade.exchange.recording import summed_backwards
from colonnade.exchange.routing import exchanged
from colonnade.exchange.rows import Arrival, RowsExchange
from colonnade.exchange.said import Back, Said, both, listed_back, returned
from colonnade.exchange.slices import Slices
from colonnade.exchange.wire import row_layout
from colonnade.ops.memory import empty
from colonnade.table import ITEM_BYTES
from colonnade.topology.mesh import Mesh
from colonnade.topology.sharding import Sharding


class LentExchange(RowsExchange):
    """One rank's end, in a world of several. One batch is one step."""

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding] | None,
        lendings: Sequence[Lending],
        seed: int,
    ) -> None:
        """lendings: by table, of one window. seed: the run's, which random bits of updates are drawn from."""
        super().__init__(declaration, mesh, shardings)
        tables = declaration.tables
        self.lendings = tuple(lendings)
        self.has_copies = [True] * len(tables)
        self.window = max(each.window for each in lendings)
        self.lent_widths, self.back_widths = np.array(
            [moved_bytes(table) for table in tables]
        ).T.copy()
        self.counts = LentCounts()
        self.store: Any = None  # this rank's own rows
        self.borrowed = Borrowed(tables, [each.rows for each in lendings], seed)
        self._rows = [table.rows for table in tables]
        self._clocks = LentClocks(self._rows)  # of this rank's own rows that others have
        self._routing: Line | None = None  # of the lookahead that is under way
        self._line: Line | None = None  # of the batch that was read last
        self._flight: Flight | None = None  # whose gradients were pushed

    # ---- what is in sight

    def in_sight(self, batches: Iterable[Batch], slices: Slices, step: int) -> Iterator[Batch]:
        """Collective, one thread: the same batches, one lookahead's, each with its ticket, once the ids of `window`
        batches after it have travelled. An error of reading is raised so much earlier."""
        line = self._routing = self._new_line()
        waiting: deque[Batch] = deque()

        def decided() -> Batch:
            batch = waiting.popleft()
            self._decide(batch.ticket)
            return batch

        try:
            for batch in batches:
                mine = copy.copy(batch)  # the caller may hand the same one twice
                mine.ticket = slices.route(self, mine, step, "route")
                waiting.append(mine)
                if len(waiting) > self.window:
                    yield decided()
            line.sight.is_over = True
            while waiting:
                batch = decided()
                batch.ticket.wire.is_last = not waiting
                yield batch
        finally:
            if self._routing is line:
                self._routing = None

    def route(self, batch: Batch, step: int, *, purpose: str = "route") -> Ticket:
        """Of a batch of no lookahead nothing else is in sight."""
        ticket = super().route(batch, step, purpose=purpose)
        if isinstance(ticket.wire, Flight) and ticket.wire.line is not self._routing:
            ticket.wire.line.sight.is_over = True
            self._decide(ticket)
        return ticket

    def _new_line(self) -> Line:
        both_ways = (self.lent_widths + self.back_widths).tolist()
        worths = [
            worth_of(table.width * table.itemsize, table.width * ITEM_BYTES[table.compute_dtype], moved)
            for table, moved in zip(self.declaration.tables, both_ways, strict=True)
        ]  # fmt: skip
        owners = self.deal.num_owners.tolist()
        quotas = [each.rows // n for each, n in zip(self.lendings, owners, strict=True)]
        sight = Sight(self.mesh.num_ranks, quotas, worths, holds=self.window > 0)
        lent, had = (Loans(self.mesh.num_ranks, self._rows) for _ in range(2))
        return Line(sight, lent, had)

    def ask(self, batch: Batch, purpose: str = "route") -> Asked:
        """Raises IdRangeError, DataError. Rows that lie here are named by their numbers, as of the newest decision."""
        if purpose == "evaluate":
            return super().ask(batch, purpose)
        lookups, plan = self.planned(batch)
        codes, unique = self._codes(batch, plan), torch.as_tensor(plan.unique_ids)
        counts, listed_as, firsts, lasts = self._as_listed(plan)
        line = self._routing if purpose == "route" else None
        numbers = np.full(len(unique), NONE)
        if line is not None:
            numbers[listed_as] = line.had.numbers(tables_of(counts), unique.numpy()[listed_as])
        order = listed_order(counts, listed_as, numbers[listed_as])
        is_plain = numbers == NONE
        before, plain = np.concatenate([[0], np.cumsum(is_plain)]), torch.from_numpy(is_plain)
        requests = pack_requests(
            unique[plain], before[firsts], before[lasts], self.table_rows, self.deal.num_owners,
            self.deal.places, codes=None if codes is None else codes[plain],
        )  # fmt: skip
        named = pack_numbers(numbers[listed_as], counts.sum(1))
        messages = [np.concatenate(each) for each in zip(named, requests, strict=True)]
        return Asked(batch.size, messages, (lookups, plan, order))

    def answer(
        self, asked: Asked, heard: Sequence[np.ndarray], *, step: int, weight: float, purpose: str
    ) -> Ticket:
        """A ticket of training without rows: they are known once it is decided on."""
        if purpose == "evaluate":
            return super().answer(asked, heard, step=step, weight=weight, purpose=purpose)
        lookups, plan, order = asked.lookups
        # A batch of no lookahead has a line of its own, in which nothing else is in sight.
        line = (self._routing if purpose == "route" else None) or self._new_line()
        places = torch.from_numpy(self.deal.places[self.mesh.rank].copy())
        requests = read_requests(heard, line.lent, self.table_rows, self.deal.num_owners, places)
        owner_plan = _native.make_plan(
            listed(requests.ids, requests.counts), self.table_rows, self.undealt
        )
        line.routed += 1
        line.sight.see(requests.counts, owner_plan)
        flight = Flight(line, line.routed, order, requests, owner_plan)
        none = torch.zeros(len(self.widths) + 1, dtype=torch.int64)
        return Ticket(
            step, asked.size, lookups, plan, none[:0], none, None, weight, None, flight, purpose=purpose
        )  # fmt: skip

    def _decide(self, ticket: Ticket) -> None:
        """Collective on the group the ticket was routed on, in the order of the batches: who has which row, and who
        keeps it; which rows of this rank are needed here."""
        flight: Flight = ticket.wire
        counts, ids = flight.requests.counts, flight.requests.ids.numpy()
        done, rows = flight.line.sight.decide(), np.asarray(flight.owner_plan.inverse)
        reads = done.reader[rows] == ranks_of(counts)
        copied = done.copied[rows]
        said = Said(counts, done.has[rows] | reads, done.keeps[rows] | copied, copied | reads)
        back = listed_back(done.holders, done.tables, done.recalled, done.recopied, counts.shape)
        mine = returned(said, torch.from_numpy(ids[said.returned]))
        messages = said_messages(
            said, back, flight.line.lent.numbers(back.tables, back.ids.numpy())
        )
        flight.line.lent.decide(said, ids, back)
        flight.borrower = self._borrower(ticket, messages)
        flight.lender = self._lender(ticket, said, both(mine, back))

    def _borrower(self, ticket: Ticket, messages: Sequence[np.ndarray]) -> Borrower:
        """Collective. messages: by rank, what this one says as an owner."""
        counts, order, had = self._counts(ticket.plan), ticket.wire.order, ticket.wire.line.had
        (heard,), _ = exchanged([messages], self.mesh, 0.0, ticket.purpose)
        unique = torch.as_tensor(ticket.plan.unique_ids)
        asked = unique.numpy()[order]
        said, named = read_said(heard, counts, had.numbers(tables_of(counts), asked), had)
        had.decide(said, asked, named)
        back = both(returned(said, torch.from_numpy(asked[said.returned])), named)
        self.counts.add(said, back)
        is_local, is_pushed = np.empty((2, len(order)), bool)
        is_local[order], is_pushed[order] = ~said.plain, said.pushed
        local = np.flatnonzero(is_local)
        layout = row_layout(counts, self.widths)
        comes, goes = (cut(layout, first, self.widths) for first in (said.plain, said.pushed))
        come_index, go_index = torch.empty(2, len(order), dtype=torch.int32)
        for index, each in ((come_index, comes), (go_index, goes)):
            index.numpy()[order] = each.elements(self.widths)
        return Borrower(
            said, order, comes, come_index, goes, go_index, local,
            unique[torch.from_numpy(local)],
            torch.from_numpy(np.searchsorted(local, self._table_offsets(ticket).numpy())),
            ~is_pushed[local], back,
        )  # fmt: skip

    def _lender(self, ticket: Ticket, said: Said, back: Back) -> Lender:
        """Completes the ticket: rows that lie here and are asked for, then those that come back."""
        requests, is_here = ticket.wire.requests, ~said.has | said.read
        ids = torch.cat([requests.ids[torch.from_numpy(is_here)], back.ids])
        counts = np.concatenate([said.counted(is_here), back.counts])
        plan = _native.make_plan(listed(ids, counts), self.table_rows, self.undealt)
        ticket.owner_plan, ticket.owned_ids = plan, torch.as_tensor(plan.unique_ids)
        ticket.owned_offsets = torch.as_tensor(plan.block_offsets)
        if requests.codes is not None:
            unknown = np.zeros(len(back.ids), np.uint8)
            ticket.next_use = soonest(
                np.concatenate([requests.codes.numpy()[is_here], unknown]), plan
            )
        plain, pushed = (
            listed(requests.ids[torch.from_numpy(mine)], said.counted(mine))
            for mine in (said.plain, said.pushed)
        )
        return Lender(
            said, is_here, plain, _native.make_plan(pushed, self.table_rows, self.undealt), back
        )

    # ---- fetch

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """Collective. Raises RuntimeError where it is not the turn of this batch."""
        flight = ticket.wire
        if not isinstance(flight, Flight):
            return super().fetch(ticket, source)
        self._take_turn(flight)
        borrower, lender = flight.sides
        assert ticket.placed is not None
        there, placed = np.zeros(len(lender.is_here), np.int32), ticket.placed.numpy()
        num_here = int(lender.is_here.sum())
        there[lender.is_here] = placed[:num_here]
        slots, _ = self.borrowed.store.acquire(borrower.ids, borrower.offsets)
        by_row = np.zeros(len(borrower.order), np.int32)
        by_row[borrower.local] = slots.numpy()
        here = by_row[borrower.order]
        flight.slots, flight.there, flight.back = slots, there, placed[num_here:]
        out, come = lender.said.borrowed, borrower.said.borrowed
        counts = borrower.said.counted(come)
        lent = lender.said.counted(out)
        records = self._carried("fetch", self.store, there[out], lent, counts, self.lent_widths)
        unpack(self.borrowed.store, here[come], counts, self.lent_widths, records)
        self._clocks.lend(lent, flight.named(out), clocks_at(self.store, there[out], lent))
        plain, early, rest = lender.said.plain, borrower.cut.early, borrower.cut.rest
        serving = row_layout(lender.said.counted(plain), self.widths)
        send = self.native.message(source, torch.from_numpy(there[plain]), serving, lender.requests)
        values = empty(early.num_elements + rest.num_elements, dtype=self.declaration.dtype)
        into = values[: early.num_elements]
        arrival = self._send(send, serving, early, into, counts_as="fetch")
        local = ~borrower.said.plain
        ids = torch.as_tensor(ticket.plan.unique_ids)[torch.from_numpy(borrower.order[local])]
        values[early.num_elements :] = self.native.message(
            RowSource(self.borrowed.store.views(), slots, False), torch.from_numpy(here[local]), rest,
            listed(ids, rest.counts),
        )  # fmt: skip
        ticket.reads = self._received(ticket, values, borrower.index, arrival)
        return None

    def _take_turn(self, flight: Flight) -> None:
        """Collective where a line begins: what was lent in another one comes back."""
        line = flight.line
        if line.is_cut or flight.number != line.trained + 1:
            raise RuntimeError(
                "where rows are lent every batch of a lookahead is trained on, in order, before the next one is read, "
                "and no other: one was left out, one of no lookahead came between, or a second one was read before "
                "RowOptimizer.step(); close the lookahead, drop what was read with collection.forget(), and open it "
                "again"
            )
        if line is not self._line:
            if self._line is not None:
                self._line.is_cut = True
            self._give_back()
            self._line = line

    def _carried(
        self,
        purpose: str,
        source: Any,
        slots: np.ndarray,
        theirs: np.ndarray,
        ours: np.ndarray,
        widths: np.ndarray,
    ) -> Tensor:
        """Collective: the first bytes of records, widths (T,), of rows of a store, theirs (N, T) of them for each rank,
        slots as listed rank by rank, table by table. Those of `ours` (N, T) that came, one after another as listed."""
        going, coming = row_layout(theirs, widths), row_layout(ours, widths)
        message = empty(going.num_elements, dtype=torch.uint8)
        source.native.pack_blocks(torch.from_numpy(slots), theirs.ravel(), widths, message)
        received, _ = self.mesh.all_to_all(
            purpose, message, going.rank_elements, coming.rank_elements
        )
        return received

    # ---- push

    def _begin_push(self, ticket: Ticket, step: int, number: int) -> Callable[[], RowGradients]:
        """Sums of rows that their owners update travel; those of others wait here for `update`."""
        if number:
            raise RuntimeError(
                "where rows are lent a step is of one batch; call RowOptimizer.step() after each"
            )
        flight: Flight = ticket.wire
        borrower, lender = flight.sides
        summed = summed_backwards(ticket, self.declaration.compute_dtype)
        if summed is None:
            summed = self.native.zeros(ticket.lookups)
        early, rest = borrower.sent.early, borrower.sent.rest
        sums = empty(early.num_elements + rest.num_elements, dtype=self.declaration.compute_dtype)
        asked = RowGradients(
            ticket.pinned, self._table_offsets(ticket), ticket.plan.segment_offsets,
            ticket.plan.entries, self.native.source(ticket, summed), summed,
        )  # fmt: skip
        self.native.sum_into(asked, sums, borrower.sent_index)
        self._flight, flight.sums = flight, sums
        serving = row_layout(lender.said.counted(lender.said.pushed), self.widths)
        received, call = self.mesh.all_to_all(
            "push", sums[: early.num_elements], early.rank_elements, serving.rank_elements, wait=False
        )  # fmt: skip
        arrival = Arrival(call, sums)
        placed = torch.from_numpy(flight.owned[0][lender.said.pushed])
        plan, index = lender.plan, serving.rank_major(self.widths)
        firsts = torch.as_tensor(plan.entries)[torch.as_tensor(plan.segment_offsets)[:-1].long()]

        def finish() -> RowGradients:
            arrival.wait()
            return RowGradients(
                placed[firsts.long()].contiguous(), torch.as_tensor(plan.block_offsets),
                plan.segment_offsets, plan.entries,
                _native.RowGradients(received.data_ptr(), index, self.native.compute), (received, index, plan),
            )  # fmt: skip

        return finish

    def squared_norm(self, pushed: RowGradients) -> tuple[RowGradients, float]:
        raise ConfigError(
            "clip_grad_norm_: got rows that are lent (plan.cache.staleness=exact), whose gradients do not all come to "
            "their owners; leave rows.clip_norm out (rows.clip_value works), or leave plan.cache out"
        )

    def update(
        self, store: Any, pushed: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        """Collective: rows that lie with their owners there, the others where they are; then these go back."""
        super().update(store, pushed, optimizers, settings)
        flight, self._flight = self._flight, None
        assert flight is not None and flight.slots is not None and flight.sums is not None
        borrower, lender = flight.sides
        updated = torch.from_numpy(np.flatnonzero(borrower.updated))
        offsets = torch.searchsorted(updated, borrower.offsets)
        ramp = torch.arange(len(updated) + 1, dtype=torch.int32)
        index = borrower.sent_index[torch.from_numpy(borrower.local)[updated]].contiguous()
        mine = RowGradients(
            flight.slots[updated].contiguous(), offsets, ramp, ramp[:-1].contiguous(),
            _native.RowGradients(flight.sums.data_ptr(), index, self.native.compute), flight.sums,
        )  # fmt: skip
        super().update(self.borrowed.store, mine, optimizers, settings)
        self.borrowed.change(mine.slots, offsets)
        ticked = ~lender.said.pushed
        self._clocks.tick(lender.said.counted(ticked), flight.named(ticked))
        self._return(store, flight)
        flight.slots = flight.sums = None
        flight.line.trained += 1
        if flight.is_last:
            self._give_back()

    def _return(self, store: Any, flight: Flight) -> None:
        """Collective: rows go back with a batch. What nothing is left to say of leaves: they, but for copies that stay,
        and copies that the batch has read."""
        borrower, lender = flight.sides
        assert flight.slots is not None
        order = np.argsort(borrower.back.tables, kind="stable")
        back = borrower.back.ids[torch.from_numpy(order)]
        ends = np.concatenate([[0], borrower.back.counts.sum(0).cumsum()])
        offsets = torch.from_numpy(ends)
        slots, _ = self.borrowed.store.acquire(back, offsets)
        listed_slots = np.empty(len(order), np.int32)
        listed_slots[order] = slots.numpy()
        records = self._carried(
            "push",
            self.borrowed.store,
            listed_slots,
            borrower.back.counts,
            lender.back.counts,
            self.back_widths,
        )
        theirs = lender.back.counts
        clocks = self._clocks.end(theirs, lender.back.ids)
        unpack(store, flight.owned[1], theirs, self.back_widths, records, clocks)
        self.borrowed.store.release(slots, offsets, dirty=True)
        self.borrowed.store.release(flight.slots, borrower.offsets, dirty=True)
        self.borrowed.forget(slots, offsets)
        stays = borrower.back.copied[order]
        firsts = borrower.offsets.tolist()
        for t in range(len(self.widths)):
            some, mine = slice(ends[t], ends[t + 1]), slice(firsts[t], firsts[t + 1])
            left = back[some][torch.from_numpy(~stays[some])]
            read = borrower.ids[mine][torch.from_numpy(~borrower.updated[mine])]
            self.borrowed.store.delete(t, torch.cat([left, read]))

    def drop(self, ticket: Ticket) -> None:
        """The other batches of its lookahead cannot be trained on."""
        super().drop(ticket)
        flight = ticket.wire
        if not isinstance(flight, Flight):
            return
        flight.line.is_cut = True
        if flight.slots is not None and flight.borrower is not None:
            self.borrowed.store.release(flight.slots, flight.borrower.offsets, dirty=False)
            flight.slots = None

    # ---- between steps

    def settle(self) -> None:
        """Collective, between steps, on the training thread, with any number of batches in flight: owners' rows become
        what they are where they are lent, and stay lent; those that were not updated since the last time are so
        already. Raises BudgetExceeded, on every rank, where memory has no room for them."""
        here = self.borrowed.news()
        plan = _native.make_plan(
            listed(torch.cat([ids for ids, _ in here]), np.array([[len(ids) for ids, _ in here]])),
            self.table_rows, self.deal.num_owners,
        )  # fmt: skip
        unique, ends = torch.as_tensor(plan.unique_ids), self.deal.table_offsets(plan).tolist()
        slots = [
            by_id[torch.searchsorted(ids, unique[ends[t] : ends[t + 1]])]
            for t, (ids, by_id) in enumerate(here)
        ]
        counts, order, firsts, lasts = self._as_listed(plan)
        requests = pack_requests(
            unique, firsts, lasts, self.table_rows, self.deal.num_owners, self.deal.places, codes=None
        )  # fmt: skip
        (heard,), _ = exchanged([requests], self.mesh, 0.0, "evaluate")
        places = torch.from_numpy(self.deal.places[self.mesh.rank].copy())
        named = unpack_requests(heard, self.table_rows, self.deal.num_owners, places)
        records = self._carried(
            "evaluate",
            self.borrowed.store,
            torch.cat(slots).numpy()[order],
            counts,
            named.counts,
            self.back_widths,
        )
        clocks = self._clocks.of(named.counts, named.ids)[:, None].view(torch.uint8)
        error = None
        try:
            layout = records_layout(named.counts, self.back_widths)
            for t, rows in enumerate(by_table(named.counts)):
                where = torch.from_numpy(rows)
                mine = torch.cat([layout.of(records, t), clocks[where]], 1)
                put_by_room(self.store, t, named.ids[where], mine)
        except BudgetExceeded as found:
            error = found
        if not self.mesh.least(int(error is None)):
            raise error or BudgetExceeded(
                "another rank's memory has no room for the rows that come back; raise plan.memory.dram, or lower "
                "plan.cache.size"
            )
        ends_here = torch.tensor([0, *(len(ids) for ids, _ in here)]).cumsum(0)
        self.borrowed.forget(torch.cat([by_id for _, by_id in here]), ends_here)

    def _give_back(self) -> None:
        """Collective, between steps: all rows are where their owners are."""
        self.settle()
        self.borrowed.clear()
        self._clocks = LentClocks(self._rows)
        self._line = None

    @property
    def lends(self) -> bool:
        """Whether rows may lie elsewhere than with their owners; the same on every rank."""
        return self._line is not None

    def _as_listed(
        self, plan: _native.Plan
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of a plan's rows in messages, rank by rank: counts (N, T), each one's place in the plan, and where those of
        each rank and table begin and end there (N, T)."""
        counts = self._counts(plan)
        lasts = counts.T.cumsum().reshape(counts.T.shape).T
        return counts, ranges((lasts - counts).ravel(), counts.ravel()), lasts - counts, lasts

    def _counts(self, plan: _native.Plan) -> np.ndarray:
        """(N, T)"""
        return np.diff(self.deal.blocks(plan)).reshape(-1, self.mesh.num_ranks).T


def lent_end(exchange: Exchange, store: Any) -> LentExchange | None:
    """That of a plan whose rows are lent: it finds this rank's rows in `store`."""
    if not isinstance(exchange, LentExchange):
        return None
    exchange.store = store
    return exchange
