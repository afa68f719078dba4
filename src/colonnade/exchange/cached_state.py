"""State of a row cache between steps: temporary flush of pending gradients to owners' rows, and what checkpoints hold.

`synchronized_view` is called between steps, on the training thread, with any number of batches in flight. Gradients
pending at copies are sent and applied, one update of each row; at exit the rows are restored. Copies and directories do
not change. Where a run continues with lower bounds, some pending gradients are flushed permanently.

A checkpoint is made inside `synchronized_view`, so its rows contain all updates, and other worlds need nothing else
from it. A run that continues in the same world restores the rows as they were before `synchronized_view`, and loads the
cached rows.

Legend: T tables, N ranks, O rows of this rank that are changed temporarily.
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
from colonnade.cache.directory import shift_batch_numbers, surplus_batches
from colonnade.cache.messages import RowRequests, ServedRequests
from colonnade.errors import BudgetExceeded
from colonnade.exchange.cached import CachedExchange
from colonnade.exchange.row_owner import build_request_lookups, gather_int32
from colonnade.lookup.row_layout import RowLayout, build_row_layout
from colonnade.table import CLOCK_BYTES
from colonnade.wire.id_distribution import exchange_messages

CHANNEL = "evaluate"


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows of one table before a temporary change."""

    ids: Tensor  # (n,) int64
    records: Tensor  # (n, record_bytes) uint8

    @property
    def is_trained(self) -> Tensor:
        """True for rows that were ever trained, (n,) bool."""
        # Copied even where one row is contiguous already: its clock may begin at any byte.
        clocks = self.records[:, -CLOCK_BYTES:].clone(memory_format=torch.contiguous_format)
        return clocks.view(torch.int64).flatten() > 0


@contextmanager
def flush_pending_temporarily(
    exchange: CachedExchange, optimizers: Tensor, settings: Tensor
) -> Iterator[list[SavedRows]]:
    """Apply gradients pending at copies to owners' rows until exit, which restores them. Collective.

    Yields, by table, this rank's changed rows as they were before. optimizers, settings: see `_native.update`. Raises
    BudgetExceeded, on every rank, where memory has no room for the rows that change; RuntimeError inside itself."""
    if exchange.is_synchronized:
        raise RuntimeError(
            "got rows.synchronized_view() inside of itself: rows are synchronized already"
        )
    served_requests, send, sent_layout = _request_row_updates(
        exchange, list_pending_slots(exchange)
    )
    store = exchange.store
    plan = served_requests.plan
    ids = torch.as_tensor(plan.unique_ids)
    offsets = torch.as_tensor(plan.block_offsets)
    pinned = _acquire_rows(exchange, ids, offsets)
    slots = pinned[0]
    before = []
    try:
        row_slots = gather_int32(slots, plan.inverse)
        pushed = exchange.send_pending_sums(CHANNEL, send, sent_layout, served_requests, row_slots)
        ends = offsets.tolist()
        for t, table in enumerate(exchange.declaration.tables):
            table_rows = slice(ends[t], ends[t + 1])
            records = torch.empty(ends[t + 1] - ends[t], table.record_bytes, dtype=torch.uint8)
            store.native.pack(t, slots[table_rows].contiguous(), records)
            before.append(SavedRows(ids[table_rows].clone(), records))
        store.before_update(slots, offsets)
        exchange.owner.update(store, pushed, optimizers, settings)
        # Once released, rows are dirty: newer than their stored records. They stay pinned by a second acquire.
        pinned.append(store.acquire(ids, offsets)[0])
        store.release(pinned.pop(0), offsets, dirty=True)
        exchange.is_synchronized = True
        try:
            yield before
        finally:
            exchange.is_synchronized = False
            store.before_update(slots, offsets)
            for t, rows in enumerate(before):
                store.native.unpack(t, slots[ends[t] : ends[t + 1]].contiguous(), rows.records)
    finally:
        for pinned_slots in pinned:
            store.release(pinned_slots, offsets, dirty=True)
    for t, rows in enumerate(before):
        # A row that was never trained has no stored record; delete the one that the temporary change wrote.
        store.delete(t, rows.ids[~rows.is_trained])


def apply_planned_bounds(exchange: CachedExchange) -> None:
    """Continue with a checkpoint's copies under the bounds of this run's plan. Collective, before a lookahead.

    Gradients pending at copies beyond the planned write bounds are sent to their owners, as one update of each row. A
    copy that is too old for the planned read bound is requested at its next use. Raises BudgetExceeded as
    `_flush_to_owners`."""
    clocks = [cache.clock for cache in exchange.caches]
    directories = exchange.directories
    if clocks == [directory.clock for directory in directories]:
        return  # on every rank alike
    _flush_above(exchange, [clock.write_bound for clock in clocks])
    for directory, clock in zip(directories, clocks, strict=True):
        directory.set_clock(clock)


def drop_copies(exchange: CachedExchange) -> None:
    """Send all gradients pending at copies to their owners, as one update of each row, and drop the copies: the next
    use of a row fetches it. Collective, between steps, without batches in flight. Raises BudgetExceeded as
    `_flush_to_owners`, and RuntimeError for a batch that was read and not trained on."""
    if exchange.has_batches_in_flight or exchange.is_synchronized:
        raise RuntimeError(
            "got rows to load or delete inside `with rows.synchronized_view()`, which restores rows when it ends, or "
            "while a batch was read and not trained on, whose cached rows would be old; do it after "
            "RowOptimizer.step(), before the next batch is read"
        )
    _flush_above(exchange, [0] * len(exchange.directories))
    for t, directory in enumerate(exchange.directories):
        exchange.directories[t] = directory.without_rows()


def _flush_above(exchange: CachedExchange, write_bounds: Sequence[int]) -> None:
    """Send sums of more than `write_bounds` batches, by table, to their owners. Collective. Raises BudgetExceeded."""
    slots_by_table = list_pending_slots(exchange, write_bounds)
    num_rows = sum(map(len, slots_by_table))
    if any(map(int, exchange.mesh.all_gather_bytes(CHANNEL, b"%d" % num_rows))):
        _flush_to_owners(exchange, slots_by_table)
    for directory, bound in zip(exchange.directories, write_bounds, strict=True):
        exchange.counts.ticks += int(directory.flush(bound).ticks.sum())
    exchange.counts.pushed_full += num_rows


def list_pending_slots(
    exchange: CachedExchange, write_bounds: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Return, by table, slots of this rank's copies with pending gradients of more than `write_bounds` batches
    (by table, default 0), ascending by id."""
    cached_rows = exchange.cached_rows
    bounds = write_bounds or [0] * len(exchange.widths)
    slots_by_table = [cached_rows.dirty_slots(t) for t in range(len(exchange.widths))]
    return [
        slots[cached_rows.num_pending[t][slots] > bound]
        for t, (slots, bound) in enumerate(zip(slots_by_table, bounds, strict=True))
    ]


def _flush_to_owners(exchange: CachedExchange, slots_by_table: Sequence[np.ndarray]) -> None:
    """Flush gradients pending at these copies (as `list_pending_slots` lists them; every rank its own) to the owners'
    rows,
    by the rules of the newest update. Collective. Raises BudgetExceeded, on every rank and with nothing changed, where
    memory has no room for the rows."""
    assert (
        exchange.last_optimizers is not None
    )  # some rank has pending gradients, so all ranks had an update
    served_requests, send, sent_layout = _request_row_updates(exchange, slots_by_table)
    store = exchange.store
    plan = served_requests.plan
    offsets = torch.as_tensor(plan.block_offsets)
    (slots,) = _acquire_rows(exchange, torch.as_tensor(plan.unique_ids), offsets)
    try:
        pushed = exchange.send_pending_sums(
            CHANNEL, send, sent_layout, served_requests, gather_int32(slots, plan.inverse)
        )
        store.before_update(slots, offsets)
        exchange.owner.update(store, pushed, *exchange.last_optimizers)
    finally:
        store.release(slots, offsets, dirty=True)
    exchange.record_changes(plan, exchange.number)
    for t, copy_slots in enumerate(slots_by_table):
        exchange.cached_rows.clear_pending(t, copy_slots)


def _request_row_updates(
    exchange: CachedExchange, slots_by_table: Sequence[np.ndarray]
) -> tuple[ServedRequests, Tensor, RowLayout]:
    """Request an update of the rows at `slots_by_table` slots from their owners. Collective. Return the requests for
    this rank's rows, the pending sums to send, and their layout."""
    cached_rows = exchange.cached_rows
    mesh = exchange.mesh
    by_id = [cached_rows.ids[t][slots] for t, slots in enumerate(slots_by_table)]
    counts = np.array([[len(slots) for slots in slots_by_table]])
    plan = _native.make_plan(
        build_request_lookups(torch.from_numpy(np.concatenate(by_id)), counts),
        exchange.owner.table_rows,
        exchange.owner_map.num_owners,
    )
    requests = exchange.rows.pack_row_requests(plan, next_use_codes=None)
    (received,), _ = exchange_messages([requests], mesh, 0.0, CHANNEL)
    received_requests = exchange.rows.unpack_row_requests(received)
    all_rows = np.ones(len(received_requests.ids), bool)
    none = np.zeros(len(received_requests.ids), np.int64)
    served_requests = exchange.plan_written_rows(
        RowRequests(received_requests.counts, ~all_rows, ~all_rows, all_rows, none),
        received_requests.ids,
    )
    blocks = exchange.owner_map.block_offsets(plan)
    sent_layout = build_row_layout(np.diff(blocks).reshape(-1, mesh.num_ranks).T, exchange.widths)
    send = torch.empty(sent_layout.num_elements, dtype=cached_rows.pending[0].dtype)
    unique = np.asarray(plan.unique_ids)
    for t, slots in enumerate(slots_by_table):
        # Rank by rank, as the plan lists them.
        ids = unique[blocks[t * mesh.num_ranks] : blocks[(t + 1) * mesh.num_ranks]]
        sums = cached_rows.table_pending_sums(t, slots[np.searchsorted(by_id[t], ids)])
        by_rank = sums.split(sent_layout.counts[:, t].tolist())
        for first, part in zip(sent_layout.block_elements[:, t].tolist(), by_rank, strict=True):
            send[first : first + part.numel()] = part.flatten()
    return served_requests, send, sent_layout


def _acquire_rows(exchange: CachedExchange, ids: Tensor, table_offsets: Tensor) -> list[Tensor]:
    """Acquire rows, and return a list of their slots (one tensor). Collective. Raises BudgetExceeded on every rank."""
    store = exchange.store
    error = None
    pinned = []
    try:
        slots, job = store.acquire(ids, table_offsets)
        store.wait(job)
        pinned = [slots]
    except BudgetExceeded as budget_error:
        error = budget_error
    if not exchange.mesh.min_over_ranks(int(error is None)):
        for slots in pinned:
            store.release(slots, table_offsets, dirty=False)
        raise error or BudgetExceeded(
            "another rank's memory has no room for the rows whose gradients wait at copies; raise plan.memory.dram, or "
            "lower plan.cache.write_bound or size"
        )
    return pinned


CHUNK_ROWS = 4096  # rows that are restored at once


def capture_cache_state(
    exchange: CachedExchange, earlier_rows: Sequence[SavedRows]
) -> dict[str, Any]:
    """Return the cache's state for a checkpoint, between steps: as of the newest step, without batches in flight. It
    has plain values and tensors."""
    tables = {}
    directories, version_log = exchange.export_directory_states()
    for t, (table, directory_state) in enumerate(
        zip(exchange.declaration.tables, directories, strict=True)
    ):
        tables[table.name] = {
            "policy": exchange.directories[t].policy,
            "kept": exchange.outlasts_batch[t],
            "directory": {
                name: torch.from_numpy(values) for name, values in directory_state.items()
            },
            "copies": exchange.cached_rows.export_rows(t, directory_state["slots"].astype("int64")),
            "versions": torch.from_numpy(version_log[t]),
            "before": {"ids": earlier_rows[t].ids, "records": earlier_rows[t].records},
        }
    return {"tables": tables, "rule": exchange.last_optimizers, "number": exchange.number}


def can_load_cache(
    exchange: CachedExchange, rank_states: Sequence[Mapping[str, Any] | None]
) -> bool:
    """Return whether a checkpoint's cached rows can be loaded: the number of ranks, and for each table its cache policy
    and whether copies outlast their batch, must be the same. Bounds and sizes may have changed; but where a size is
    lower by more than `cache.cached_rows.SPARE` rows there may be no room for the copies."""
    own_policies = {
        table.name: (directory.policy, outlasts_batch)
        for table, directory, outlasts_batch in zip(
            exchange.declaration.tables, exchange.directories, exchange.outlasts_batch, strict=True
        )
    }
    saved_policies = [
        # Older checkpoints have neither this flag nor the bounds of their directories.
        state
        and {name: (table["policy"], table.get("kept")) for name, table in state["tables"].items()}
        for state in rank_states
    ]
    if len(rank_states) != exchange.mesh.num_ranks or any(
        policies != own_policies for policies in saved_policies
    ):
        return False
    return all(_has_room_for_state(exchange, state) for state in rank_states if state is not None)


def _has_room_for_state(exchange: CachedExchange, state: Mapping[str, Any]) -> bool:
    """Return whether every copy has room at its old slot, which selects the random bits that it is rounded with."""
    table_states = (state["tables"][table.name] for table in exchange.declaration.tables)
    return all(
        np.asarray(table_state["directory"]["slots"]).max(initial=-1) < limit
        for table_state, limit in zip(table_states, exchange.cached_rows.max_slots, strict=True)
    )


def restore_cache_state(exchange: CachedExchange, saved_state: Mapping[str, Any]) -> None:
    """Load a checkpoint's state before the first batch. The store has the rows of the checkpoint.

    Bounds are those of the checkpoint until training begins (`apply_planned_bounds`). Batch numbers continue, from a
    lower one where they would overflow; all ranks have the same number.
    """
    shift = surplus_batches(saved_state["number"])
    for t, table in enumerate(exchange.declaration.tables):
        table_state = saved_state["tables"][table.name]
        before = SavedRows(table_state["before"]["ids"], table_state["before"]["records"])
        trained = before.is_trained
        ids = before.ids[trained]
        records = before.records[trained]
        for first in range(0, len(ids), CHUNK_ROWS):
            chunk = slice(first, first + CHUNK_ROWS)
            exchange.store.write_rows(t, ids[chunk].contiguous(), records[chunk].contiguous())
        exchange.store.delete(t, before.ids[~trained].contiguous())
        directory = {name: values.numpy() for name, values in table_state["directory"].items()}
        exchange.directories[t].load_state(
            shift_batch_numbers(directory, table_state["policy"], shift)
        )
        exchange.cached_rows.load_rows(t, directory["slots"].astype("int64"), table_state["copies"])
        # Older checkpoints have versions in another order: every row counts as changed.
        versions = table_state.get("versions", torch.tensor(saved_state["number"]))
        exchange.version_log.table_versions(t)[:] = versions.numpy()
    exchange.version_log.renumber(shift)
    exchange.last_optimizers = saved_state["rule"]
    exchange.number = saved_state["number"] - shift
