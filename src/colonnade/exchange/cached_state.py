"""State of a row cache between steps: owners' rows with all that waits at copies, for a moment, and what commits hold.

Collective, between steps, on the training thread, with any number of batches in flight: what waits is sent and applied,
one update of each row, and after the moment the rows are put back. Copies and directories are not touched. Where a run
goes on with lower bounds, some of it is handed over for good.

A commit is made while owners' rows have what waits at copies, so its rows are all that was learned, and other worlds
need nothing else of it. Whoever goes on in the same world puts the rows back that were changed for the moment, and
takes up the copies.

Legend: T tables, N ranks, O rows that lie here and are changed for the moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.cache.directory import renumbered, surplus
from colonnade.cache.messages import Named, Serving
from colonnade.errors import BudgetExceeded
from colonnade.exchange.cached import CachedExchange
from colonnade.exchange.row_owner import gather, list_requests
from colonnade.lookup.row_layout import RowLayout, row_layout
from colonnade.table import CLOCK_BYTES
from colonnade.wire.id_distribution import exchange_messages
from colonnade.wire.packing import pack_requests, unpack_requests

GROUP = "evaluate"


@dataclass(frozen=True, slots=True)
class Before:
    """Rows of one table as they were."""

    ids: Tensor  # (n,) int64
    records: Tensor  # (n, record_bytes) uint8

    @property
    def is_trained(self) -> Tensor:
        """(n,) bool."""
        # Copied even where one row is contiguous already: its clock may lie at any byte.
        clocks = self.records[:, -CLOCK_BYTES:].clone(memory_format=torch.contiguous_format)
        return clocks.view(torch.int64).flatten() > 0


@contextmanager
def settled(
    exchange: CachedExchange, optimizers: Tensor, settings: Tensor
) -> Iterator[list[Before]]:
    """By table, what this rank's rows are outside of it. optimizers, settings: see `_native.update`. Raises
    BudgetExceeded, on every rank, where memory has no room for the rows that change; RuntimeError inside of itself."""
    if exchange.is_settled:
        raise RuntimeError("got rows.settled() inside of itself: rows are settled already")
    serving, send, going = _gather_waiting(exchange, waiting(exchange))
    store, plan = exchange.store, serving.plan
    ids = torch.as_tensor(plan.unique_ids)
    offsets = torch.as_tensor(plan.block_offsets)
    held = _acquire_rows(exchange, ids, offsets)
    slots = held[0]
    before = []
    try:
        placed = gather(slots, plan.inverse)
        pushed = exchange.pushed(GROUP, send, going, serving, placed)
        ends = offsets.tolist()
        for t, table in enumerate(exchange.declaration.tables):
            table_rows = slice(ends[t], ends[t + 1])
            records = torch.empty(ends[t + 1] - ends[t], table.record_bytes, dtype=torch.uint8)
            store.native.pack(t, slots[table_rows].contiguous(), records)
            before.append(Before(ids[table_rows].clone(), records))
        store.before_update(slots, offsets)
        exchange.owner.update(store, pushed, optimizers, settings)
        # Rows are newer than what rests of them once they are released; they stay pinned.
        held.append(store.acquire(ids, offsets)[0])
        store.release(held.pop(0), offsets, dirty=True)
        exchange.is_settled = True
        try:
            yield before
        finally:
            exchange.is_settled = False
            store.before_update(slots, offsets)
            for t, rows in enumerate(before):
                store.native.unpack(t, slots[ends[t] : ends[t + 1]].contiguous(), rows.records)
    finally:
        for pinned_slots in held:
            store.release(pinned_slots, offsets, dirty=True)
    for t, rows in enumerate(before):
        # Of a row that was never trained nothing is at rest, and what the moment left there would come back.
        store.delete(t, rows.ids[~rows.is_trained])


def apply_planned_bounds(exchange: CachedExchange) -> None:
    """Collective, before a lookahead: copies of a commit go on with the bounds of this run's plan.

    What waits at copies beyond the planned write bounds goes to its owners, as one update of each row. A copy that is
    too old for the planned read bound is asked for at its next use. Raises BudgetExceeded as `_hand_over`.
    """
    clocks = [cache.clock for cache in exchange.caches]
    directories = exchange.directories
    if all(
        (directory.read_bound, directory.write_bound) == (clock.read_bound, clock.write_bound)
        for directory, clock in zip(directories, clocks, strict=True)
    ):
        return  # on every rank alike
    chosen = waiting(exchange, [clock.write_bound for clock in clocks])
    num_rows = sum(map(len, chosen))
    if any(map(int, exchange.mesh.all_gather_bytes(GROUP, b"%d" % num_rows))):
        _hand_over(exchange, chosen)
    for directory, clock in zip(directories, clocks, strict=True):
        exchange.counts.ticks += int(directory.flush(clock.write_bound).ticks.sum())
        directory.set_bounds(clock.read_bound, clock.write_bound)
    exchange.counts.pushed_full += num_rows


def waiting(exchange: CachedExchange, above: Sequence[int] | None = None) -> list[np.ndarray]:
    """By table, slots of this rank's copies at which gradients of more than `above` (by table, default 0) batches wait,
    ascending by id."""
    copies, bounds = exchange.copies, above or [0] * len(exchange.widths)
    dirty = [copies.dirty(t) for t in range(len(exchange.widths))]
    return [
        slots[copies.ticks[t][slots] > bound]
        for t, (slots, bound) in enumerate(zip(dirty, bounds, strict=True))
    ]


def _hand_over(exchange: CachedExchange, chosen: Sequence[np.ndarray]) -> None:
    """What waits at these copies (as `waiting` lists them; every rank its own) is applied to the owners' rows, by the
    rules of the newest update, and stays so; nothing waits there then. Raises BudgetExceeded, on every rank and with
    nothing changed, where memory has no room for the rows."""
    assert exchange.rule is not None  # something waits somewhere, so all ranks had an update
    serving, send, going = _gather_waiting(exchange, chosen)
    store, plan = exchange.store, serving.plan
    offsets = torch.as_tensor(plan.block_offsets)
    (slots,) = _acquire_rows(exchange, torch.as_tensor(plan.unique_ids), offsets)
    try:
        pushed = exchange.pushed(GROUP, send, going, serving, gather(slots, plan.inverse))
        store.before_update(slots, offsets)
        exchange.owner.update(store, pushed, *exchange.rule)
    finally:
        store.release(slots, offsets, dirty=True)
    exchange.mark(plan, exchange.number)
    for t, copy_slots in enumerate(chosen):
        exchange.copies.clear(t, copy_slots)


def _gather_waiting(
    exchange: CachedExchange, dirty: Sequence[np.ndarray]
) -> tuple[Serving, Tensor, RowLayout]:
    """Collective: who owns what waits here at `dirty` slots, and what waits elsewhere for this rank's rows."""
    copies, mesh = exchange.copies, exchange.mesh
    by_id = [copies.ids[t][slots] for t, slots in enumerate(dirty)]
    counts = np.array([[len(slots) for slots in dirty]])
    plan = _native.make_plan(
        list_requests(torch.from_numpy(np.concatenate(by_id)), counts),
        exchange.owner.table_rows, exchange.deal.num_owners,
    )  # fmt: skip
    blocks = exchange.deal.blocks(plan)
    firsts, lasts = (b.reshape(-1, mesh.num_ranks).T for b in (blocks[:-1], blocks[1:]))
    requests = pack_requests(
        torch.as_tensor(plan.unique_ids), firsts, lasts, exchange.owner.table_rows,
        exchange.deal.num_owners, exchange.deal.places, codes=None,
    )  # fmt: skip
    (received,), _ = exchange_messages([requests], mesh, 0.0, GROUP)
    places = torch.from_numpy(exchange.deal.places[mesh.rank].copy())
    received_requests = unpack_requests(
        received, exchange.owner.table_rows, exchange.deal.num_owners, places
    )
    wanted = list_requests(received_requests.ids, received_requests.counts)
    everything = np.ones(len(received_requests.ids), bool)
    none = np.zeros(len(received_requests.ids), np.int64)
    serving = Serving(
        Named(received_requests.counts, ~everything, ~everything, everything, none), received_requests.ids.numpy(),
        _native.make_plan(wanted, exchange.owner.table_rows, exchange.owner.one_owner), wanted,
    )  # fmt: skip
    going = row_layout(lasts - firsts, exchange.widths)
    send = torch.empty(going.num_elements, dtype=copies.pending[0].dtype)
    unique = np.asarray(plan.unique_ids)
    for t, slots in enumerate(dirty):
        # Rank by rank, as the plan lists them.
        ids = unique[blocks[t * mesh.num_ranks] : blocks[(t + 1) * mesh.num_ranks]]
        sums = copies.waiting_of(t, slots[np.searchsorted(by_id[t], ids)])
        by_rank = sums.split(going.counts[:, t].tolist())
        for first, part in zip(going.block_elements[:, t].tolist(), by_rank, strict=True):
            send[first : first + part.numel()] = part.flatten()
    return serving, send, going


def _acquire_rows(exchange: CachedExchange, ids: Tensor, offsets: Tensor) -> list[Tensor]:
    """Collective: [slots]."""
    store, error, held = exchange.store, None, []
    try:
        slots, job = store.acquire(ids, offsets)
        store.wait(job)
        held = [slots]
    except BudgetExceeded as budget_error:
        error = budget_error
    if not exchange.mesh.least(int(error is None)):
        for slots in held:
            store.release(slots, offsets, dirty=False)
        raise error or BudgetExceeded(
            "another rank's memory has no room for the rows whose gradients wait at copies; raise plan.memory.dram, or "
            "lower plan.cache.write_bound or size"
        )
    return held


TOGETHER = 4096  # rows that are put back at once


def state(exchange: CachedExchange, before: Sequence[Before]) -> dict[str, Any]:
    """Between steps, as of the newest one, whatever is in flight. Plain values and tensors that nobody trains on."""
    tables = {}
    directories, changes = exchange.decided()
    for t, (table, directory_state) in enumerate(
        zip(exchange.declaration.tables, directories, strict=True)
    ):
        tables[table.name] = {
            "policy": exchange.directories[t].policy,
            "kept": exchange.is_kept[t],
            "directory": {
                name: torch.from_numpy(values) for name, values in directory_state.items()
            },
            "copies": exchange.copies.state(t, directory_state["slots"].astype("int64")),
            "changes": torch.from_numpy(changes[t]),
            "before": {"ids": before[t].ids, "records": before[t].records},
        }
    return {"tables": tables, "rule": exchange.rule, "number": exchange.number}


def is_taken_up(exchange: CachedExchange, states: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether copies of all ranks of a world like this one go on here: bounds and sizes may have changed, not which
    tables have copies, who is worth keeping, nor whether copies outlast their batch; where sizes became less by more
    than `cache.copies.SPARE` rows there may be no room for them."""
    own_policies = {
        table.name: (directory.policy, is_kept)
        for table, directory, is_kept in zip(
            exchange.declaration.tables, exchange.directories, exchange.is_kept, strict=True
        )
    }
    saved_policies = [
        # Commits of before did not say whether, and their directories not by which bounds.
        state
        and {name: (table["policy"], table.get("kept")) for name, table in state["tables"].items()}
        for state in states
    ]
    if len(states) != exchange.mesh.num_ranks or any(
        policies != own_policies for policies in saved_policies
    ):
        return False
    return all(_has_room(exchange, state) for state in states if state is not None)


def _has_room(exchange: CachedExchange, state: Mapping[str, Any]) -> bool:
    """For each copy where it was: what it was rounded with at random goes by its slot."""
    of_tables = (state["tables"][table.name] for table in exchange.declaration.tables)
    return all(
        np.asarray(table_state["directory"]["slots"]).max(initial=-1) < room
        for table_state, room in zip(of_tables, exchange.copies.rooms, strict=True)
    )


def load(exchange: CachedExchange, state: Mapping[str, Any]) -> None:
    """Before the first batch. The store has the rows of the commit. Bounds are those of the commit until training
    begins (`apply_planned_bounds`). Batches are counted on; from less where they would come to an end (all ranks alike:
    theirs are one number).
    """
    shift = surplus(state["number"])
    for t, table in enumerate(exchange.declaration.tables):
        table_state = state["tables"][table.name]
        before = Before(table_state["before"]["ids"], table_state["before"]["records"])
        trained = before.is_trained
        ids, records = before.ids[trained], before.records[trained]
        for first in range(0, len(ids), TOGETHER):
            chunk = slice(first, first + TOGETHER)
            exchange.store.put(t, ids[chunk].contiguous(), records[chunk].contiguous())
        exchange.store.delete(t, before.ids[~trained].contiguous())
        directory = {name: values.numpy() for name, values in table_state["directory"].items()}
        exchange.directories[t].load(renumbered(directory, table_state["policy"], shift))
        exchange.copies.load(t, directory["slots"].astype("int64"), table_state["copies"])
        exchange.changes.of(t)[:] = table_state["changes"].numpy()
    exchange.changes.renumber(shift)
    exchange.rule, exchange.number = state["rule"], state["number"] - shift
