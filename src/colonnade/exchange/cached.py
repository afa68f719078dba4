"""Row cache around an exchange of rows (HET, Miao et al. 2021).

Ranks store copies of the rows that they use, within staleness bounds, and send owners the sums of several batches'
gradients. A directory (`cache.directory`) decides for each batch, from the order of batches alone, which rows to
request from their owners. Their ids are sent ahead of training as in `rows`; rows whose copies may be used as they are
are not requested. A rank that has a copy and requests the row receives it only if it has changed since, else one bit.
These bits follow from the order of batches, too, because an owner learns the rows that a batch will write together
with those that it reads; so they are sent with the ids, and rows in one message.

Legend: T tables, N ranks, U unique rows of this rank's batch, W rows it requests, P rows requested from it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.cache import CachedRows, DeviceCachedRows, NativeCachedRows, count_sent_record_bytes
from colonnade.cache.directory import (
    AGES,
    EXPIRED,
    HIT,
    MISS,
    CacheCounts,
    Decision,
    Directory,
    OverwrittenVersions,
    VersionLog,
    count_rows_by_age,
    join_decisions,
)
from colonnade.cache.messages import (
    MAX_AGE,
    RowRequests,
    ServedRequests,
    pack_row_bits,
    packed_bit_sizes,
    parse_row_flags,
    prepend_row_flags,
    row_tables,
    split_row_flags,
    unpack_row_bits,
)
from colonnade.cache.next_use import PreviewedBatch, sort_plan_rows_by_id, yield_batch_previews
from colonnade.comm.mesh import Mesh
from colonnade.exchange.contract import (
    ExchangePart,
    FetchedRows,
    FetchedRowsLookup,
    LookupRequest,
    RowsLookup,
)
from colonnade.exchange.row_owner import (
    build_request_lookups,
    gather_int32,
)
from colonnade.exchange.rows import FetchedRowsPart, RowsExchange
from colonnade.lookup.contract import (
    BatchInfo,
    Caller,
    Kernels,
    PartLookup,
    PinnedRows,
    RowGradients,
    RowSource,
)
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.row_layout import RowLayout, build_row_layout
from colonnade.lookup.views import Slices
from colonnade.staleness import RowClock, TableCache
from colonnade.store.contract import RowView
from colonnade.topology.sharding import Sharding
from colonnade.wire.codec import RoundingKey
from colonnade.wire.coding import NO_CODING, Coding


@dataclass(slots=True)
class CacheTransfer:
    """Transfer of one training batch's rows, as the directories decided it, from sending its ids to its push."""

    number: int
    decisions: Sequence[Decision]  # by table
    ends: Sequence[int]  # (T + 1,): its rows by table
    num_slots: Sequence[int]  # by table: slots of its copies so far
    slots: np.ndarray  # (U,) int64
    pushed: np.ndarray  # (U,) bool
    row_requests: RowRequests  # (W,)
    origin: np.ndarray  # (W,) index in the batch's U rows; -1: evicted
    request_slots: np.ndarray  # (W,) slot
    ids: np.ndarray  # (W,)
    served_requests: ServedRequests | None = None
    is_sent: np.ndarray | None = None  # (P,) bool: rows that this rank sends
    is_received: np.ndarray | None = None  # (W,) bool: rows that it receives
    overwritten: OverwrittenVersions | None = None  # rows of this rank that it changes
    sums: Any = (
        None  # of U rows, table by table (`CachedRows`), until they are applied to the copies
    )
    preview: PreviewedBatch | None = None
    is_fetched: bool = False
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class CachedRequest(LookupRequest):
    """Request of one training batch whose rows are read from copies."""

    transfer: CacheTransfer = field(kw_only=True)


@dataclass(slots=True)
class CachedLookup(FetchedRowsLookup):
    """Lookup of one training batch whose rows are read from copies."""

    transfer: CacheTransfer | None = None


class CachedExchange(FetchedRowsPart[FetchedRowsLookup]):
    """Exchange of cached rows on one rank, in a world of several. One batch is one step. Evaluation uses the exchange
    of rows that it wraps."""

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        mesh: Mesh,
        shardings: Sequence[Sharding] | None,
        caches: Sequence[TableCache | None],
        coding: Coding = NO_CODING,
        device: torch.device | None = None,
    ) -> None:
        """Take caches by table; None for tables of another exchange. device: memory of the cached rows; None: this
        process's."""
        self.rows = RowsExchange(declaration, mesh, shardings, coding)
        self.codec = self.rows.codec
        self.declaration = declaration
        self.mesh = mesh
        self.owner = self.rows.owner
        self.owner_map = self.rows.owner_map
        self.outputs = self.rows.outputs
        self.widths = self.owner.widths
        self.exactness = self.rows.exactness
        self.is_cached = [cache is not None for cache in caches]
        none = TableCache(0, RowClock(0, 0))
        self.caches = [cache or none for cache in caches]
        self.directories = [
            Directory(cache.rows, cache.clock, cache.policy) for cache in self.caches
        ]
        sizes = declaration.tables, [cache.rows for cache in self.caches]
        self.cached_rows: CachedRows = (
            NativeCachedRows(*sizes) if device is None else DeviceCachedRows(*sizes, device)
        )
        self.version_log = VersionLog([table.rows for table in declaration.tables])
        # Where every batch requests its rows again, copies need not outlast their batch.
        self.outlasts_batch = [cache.clock.is_late for cache in self.caches]
        self.record_widths = np.array(
            [
                count_sent_record_bytes(table, is_changed)
                for table, is_changed in zip(declaration.tables, self.outlasts_batch, strict=True)
            ]
        )
        self.windows = [cache.window for cache in self.caches]
        self.counts = CacheCounts()
        self.ages = np.zeros(AGES, np.int64)  # of the same rows
        self.store: Any = None  # this rank's rows
        self.number = 0  # of the newest batch that was pushed
        self.is_synchronized = (
            False  # owners' rows include, for now, the gradients pending at copies
        )
        self._preview: PreviewedBatch | None = None  # of the batch whose ids a lookahead sends next
        # Of batches whose decisions were undone, and which the lookahead sends again.
        self._undone_previews: deque[PreviewedBatch | None] = deque()
        self._transfers: list[CacheTransfer] = []  # ids sent and not pushed, in order
        self._lock = (
            threading.Lock()
        )  # of the directories and transfers: the lookahead's thread sends ids
        self.last_optimizers: tuple[Tensor, Tensor] | None = None  # of the newest update

    # ---- ids

    @property
    def has_batches_in_flight(self) -> bool:
        """True if ids of a batch were sent that was neither trained on nor dropped."""
        return bool(self._transfers)

    def preview_batches(self, batches: Iterable[Batch], slices: Slices) -> Iterator[Batch]:
        """Yield the batches of one lookahead, whose ids are sent one by one as they are yielded. If a table's policy
        looks ahead, read `window` batches more, and set the preview of the one that is yielded."""
        self._undone_previews.clear()
        if not self.window:
            yield from batches
            return

        def preview_batch(batch: Batch) -> PreviewedBatch:
            _, plan, _ = planned = self.rows.plan_batch(slices.prepare_ids(batch))
            return PreviewedBatch(
                planned, sort_plan_rows_by_id(plan, self.owner_map.table_offsets(plan).tolist())
            )

        for batch, preview in yield_batch_previews(batches, preview_batch, self.windows):
            self._preview = preview
            yield batch

    @property
    def window(self) -> int:
        """Number of batches after the current one that are read before its ids are sent."""
        return max(self.windows)

    def build_requests(self, batch: Batch, caller: Caller) -> LookupRequest:
        if caller == "evaluation":
            return self.rows.build_requests(batch, caller)
        preview = None
        if caller == "lookahead":
            undone = self._undone_previews
            preview = undone.popleft() if undone else self._preview
            self._preview = None
        lookups, plan, codes = self.rows.plan_batch(batch) if preview is None else preview.planned
        with self._lock:
            transfer, request_plan, origin = self._decide_rows(plan, preview)
            transfer.preview = preview
            self._transfers.append(transfer)
        request_codes = None
        if codes is not None:
            request_codes = torch.zeros(len(origin), dtype=torch.uint8)  # unknown of evicted rows
            is_used = torch.from_numpy(origin >= 0)
            request_codes[is_used] = codes[torch.from_numpy(origin)[is_used]]
        requests = self.rows.pack_row_requests(request_plan, request_codes)
        return CachedRequest(
            prepend_row_flags(transfer.row_requests, requests), lookups, plan, transfer=transfer
        )

    def _decide_rows(
        self, plan: _native.Plan, preview: PreviewedBatch | None
    ) -> tuple[CacheTransfer, _native.Plan, np.ndarray]:
        """Return the transfer of the next batch, a plan of the rows that it requests, and for each of these its index
        among the batch's rows, -1 if it was evicted."""
        unique = np.asarray(plan.unique_ids)
        ends = self.owner_map.table_offsets(plan).tolist()
        slots = np.empty(len(unique), np.int64)
        pushed = np.empty(len(unique), bool)
        rows_by_table = sort_plan_rows_by_id(plan, ends) if preview is None else preview.rows
        decisions = self._decide_by_table(rows_by_table, preview)
        # All tables at once: a call for each of dozens of tables takes longer than its work.
        rows = np.concatenate([indices for indices, _ in rows_by_table])
        decision = join_decisions(decisions)
        self.counts.add_decision(decision)
        self.ages += count_rows_by_age([decision])
        slots[rows] = decision.slots
        pushed[rows] = decision.pushed
        is_listed = (decision.outcomes != HIT) | decision.pushed
        requested_rows = rows[is_listed]
        count = len(decision.evicted_ids)
        tables = np.concatenate(
            [
                row_tables(np.diff(ends)[None, :])[is_listed],
                row_tables(np.array([[len(decision.evicted_ids) for decision in decisions]])),
            ]
        )
        counts = np.bincount(tables, minlength=len(decisions))[None, :]
        listing = np.argsort(tables, kind="stable")
        ids = np.concatenate([unique[requested_rows], decision.evicted_ids])
        request_plan = _native.make_plan(
            build_request_lookups(torch.from_numpy(ids[listing]), counts),
            self.owner.table_rows,
            self.owner_map.num_owners,
        )
        request_order = np.empty(len(ids), np.int64)
        request_order[np.asarray(request_plan.inverse)] = listing
        # From now on in the order of messages: rank by rank.
        num_ranks = self.mesh.num_ranks
        sizes = np.diff(self.owner_map.block_offsets(request_plan))
        ranks = np.repeat(np.tile(np.arange(num_ranks), len(decisions)), sizes)
        message_order = request_order[np.argsort(ranks, kind="stable")]
        origin, request_slots, outcomes, written, ages = (
            np.concatenate(pair)
            for pair in (
                (requested_rows, np.full(count, -1)),
                (slots[requested_rows], decision.evicted_slots.astype(np.int64)),
                (decision.outcomes[is_listed], np.full(count, HIT, np.uint8)),
                (decision.pushed[is_listed], np.ones(count, bool)),
                (decision.ages[is_listed].astype(np.int64), np.zeros(count, np.int64)),
            )
        )
        outcomes = outcomes[message_order]
        is_expired = outcomes == EXPIRED
        whole = ~np.array(self.outlasts_batch)[tables[message_order]]
        requested = RowRequests(
            sizes.reshape(-1, num_ranks).T,
            is_expired & ~whole,
            (outcomes == MISS) | (is_expired & whole),
            written[message_order],
            ages[message_order],
        )
        transfer = CacheTransfer(
            self.directories[0].number,
            decisions,
            ends,
            [directory.num_slots for directory in self.directories],
            slots,
            pushed,
            requested,
            origin[message_order],
            request_slots[message_order],
            ids[message_order],
        )
        return transfer, request_plan, origin[request_order]

    def _decide_by_table(
        self,
        rows_by_table: Sequence[tuple[np.ndarray, np.ndarray]],
        batch_preview: PreviewedBatch | None,
    ) -> list[Any]:
        """Return each table's decisions on the rows of a batch. rows_by_table: (indices, ids) of its rows."""
        decisions = []
        for t, (directory, (_, ids)) in enumerate(
            zip(self.directories, rows_by_table, strict=True)
        ):
            hints = None if batch_preview is None else batch_preview.next_uses[t]
            if hints is None:
                decisions.append(directory.decide_batch(ids))
            else:
                decisions.append(
                    directory.decide_batch(ids, hints.next_uses, hints.coming, self.windows[t])
                )
        return decisions

    def serve_requests(
        self, request: LookupRequest, received_requests: Sequence[np.ndarray], batch: BatchInfo
    ) -> FetchedRowsLookup:
        if batch.is_evaluated:
            return self.rows.serve_requests(request, received_requests, batch)
        plan = request.plan
        assert isinstance(request, CachedRequest) and plan is not None
        transfer = request.transfer
        headers, id_messages = split_row_flags(received_requests)
        requests = self.rows.unpack_row_requests(id_messages)
        served = parse_row_flags(headers, requests.counts)
        owner_plan, owned = self.owner.plan_owned_rows(requests)
        transfer.served_requests = self.plan_written_rows(served, requests.ids)
        with self._lock:
            changed = self._mark_stale_copies(transfer, transfer.served_requests)
            transfer.overwritten = self.record_changes(
                transfer.served_requests.plan, transfer.number
            )
        transfer.is_sent = served.wanted | changed
        transfer.is_received = transfer.row_requests.wanted.copy()
        if any(self.outlasts_batch):
            self._exchange_renewal_flags(transfer, changed, batch.channel)
        return CachedLookup(batch, request.lookups, plan, owned, owner_plan, transfer=transfer)

    def plan_written_rows(self, row_requests: RowRequests, requested_ids: Tensor) -> ServedRequests:
        """Plan the update of those of the requested rows that their requesters write. requested_ids: of all requested
        rows."""
        written = build_request_lookups(
            requested_ids[torch.from_numpy(row_requests.written)],
            row_requests.count_rows(row_requests.written),
        )
        plan = _native.make_plan(written, self.owner.table_rows, self.owner.one_owner)
        return ServedRequests(row_requests, requested_ids.numpy(), plan, written)

    def resolve_slots(self, lookup: FetchedRowsLookup, row_views: Sequence[RowView]) -> None:
        slots = lookup.slots
        lookup.pinned = PinnedRows(slots, gather_int32(slots, lookup.owner_plan.inverse))

    def _mark_stale_copies(
        self, transfer: CacheTransfer, served_requests: ServedRequests
    ) -> np.ndarray:
        """Return which requested rows have changed since the requester copied them, (P,) bool. The changes of every
        earlier batch must be recorded."""
        served = served_requests.row_requests
        changed = np.zeros(len(served_requests.ids), bool)
        rows = np.flatnonzero(served.renewed)
        ages = served.ages[rows]
        tables = row_tables(served.counts)[rows]
        since = self.version_log.has_changed_since(
            tables, served_requests.ids[rows], transfer.number - ages
        )
        changed[rows] = since | (ages >= MAX_AGE)
        return changed

    def _exchange_renewal_flags(
        self, cache_transfer: CacheTransfer, is_changed: np.ndarray, channel: str
    ) -> None:
        """Send each rank that renews a copy a bit: whether the row will be sent. Collective."""
        assert cache_transfer.served_requests is not None and cache_transfer.is_received is not None
        requested = cache_transfer.row_requests
        served = cache_transfer.served_requests.row_requests
        bits, sizes = pack_row_bits(
            is_changed[served.renewed], served.count_rows(served.renewed).sum(1)
        )
        num_renewed = requested.count_rows(requested.renewed).sum(1)
        received_bits, _ = self.mesh.all_to_all(
            channel, bits, sizes, packed_bit_sizes(num_renewed), traffic_tag="route"
        )
        cache_transfer.is_received[requested.renewed] = unpack_row_bits(received_bits, num_renewed)

    # ---- fetch

    def fetch(self, lookup: FetchedRowsLookup, row_source: RowSource) -> None:
        """Implement the contract. Raises RuntimeError for a batch that is fetched out of order."""
        if isinstance(lookup, RowsLookup):
            self.rows.fetch(lookup, row_source)
            return
        assert isinstance(lookup, CachedLookup)
        transfer = lookup.transfer
        if self.is_synchronized:
            raise RuntimeError(
                "got a batch to train on inside `with rows.synchronized_view()`, which restores rows when it "
                "ends; leave it first"
            )
        if self._transfers[0] is not transfer:
            raise RuntimeError(
                "with a cache every batch of a lookahead is trained on, in order, before the next one is read: one was "
                "left out, or a second one read before RowOptimizer.step(); drop what was read with "
                "collection.discard_batches()"
            )
        transfer.is_fetched = True
        self._exchange_row_records(transfer, _slots_by_request(lookup))
        views = self.cached_rows.views()
        kernels = self.owner.select_kernels(views)
        by_lookup = gather_int32(
            torch.from_numpy(transfer.slots.astype(np.int32)), lookup.plan.inverse
        )
        lookup.reads = FetchedRows(
            kernels, kernels.locate_rows(lookup.lookups, views, by_lookup), self.cached_rows
        )

    def _exchange_row_records(self, cache_transfer: CacheTransfer, row_slots: Tensor) -> None:
        """Send records of rows to the ranks that copy them, and receive this rank's. Collective. Where values are
        coded, a copy has the weights that its owner's codec sent, and the owner's optimizer state."""
        assert (
            cache_transfer.served_requests is not None
            and cache_transfer.is_sent is not None
            and cache_transfer.is_received is not None
        )
        is_sent = cache_transfer.is_sent
        is_received = cache_transfer.is_received
        served = cache_transfer.served_requests.row_requests
        requested = cache_transfer.row_requests
        codec = self.codec
        is_coded = codec.values.name != "exact"
        dtype = self.declaration.dtype
        widths = self.record_widths
        sent_widths = codec.count_sent_bytes(widths, dtype) if is_coded else widths
        sent_counts = served.count_rows(is_sent)
        sent_layout = build_row_layout(sent_counts, sent_widths)
        received_layout = build_row_layout(requested.count_rows(is_received), sent_widths)
        message = self.mesh.allocate_send_buffer(int((sent_counts * widths).sum()), torch.uint8)
        self.store.native.pack_blocks(
            row_slots[torch.from_numpy(is_sent)], sent_counts.ravel(), widths, message
        )
        if is_coded:
            message = codec.encode_records(message, sent_counts, widths, dtype)
        received, _ = self.mesh.all_to_all(
            "fetch",
            message,
            sent_layout.rank_elements,
            received_layout.rank_elements,
            traffic_tag="fetch",
        )
        if is_coded:
            received = codec.decode_records(received, received_layout.counts, widths, dtype)
        for t, num_slots in enumerate(cache_transfer.num_slots):
            self.cached_rows.grow_table(t, num_slots)
        slots = cache_transfer.request_slots[is_received]
        has_pending = self.cached_rows.store_received_rows(
            received_layout.counts,
            slots,
            cache_transfer.ids[is_received],
            received,
            widths,
        )
        if has_pending.any():
            # Gradients that the owner does not have yet are applied to the received copy at once, as the owner will.
            assert self.last_optimizers is not None
            slots = slots[has_pending]
            tables = row_tables(received_layout.counts)[has_pending]
            slots = slots[np.argsort(tables, kind="stable")]
            counts = np.bincount(tables, minlength=len(self.widths))
            self._update_cached_rows(
                slots,
                counts,
                self.cached_rows.gather_pending_sums(counts, slots),
                *self.last_optimizers,
            )

    # ---- push

    def begin_push(
        self,
        lookup: FetchedRowsLookup,
        output_gradients: list[Tensor] | None,
        step: int,
        batch_index: int,
    ) -> Callable[[], RowGradients]:
        assert isinstance(lookup, CachedLookup) and lookup.transfer is not None
        transfer = lookup.transfer
        reads = lookup.reads
        assert reads is not None
        if batch_index:
            raise RuntimeError(
                "with a cache a step is of one batch; call RowOptimizer.step() after each"
            )
        kernels: Kernels = reads.kernels
        if output_gradients is None:
            output_gradients = kernels.zero_outputs(lookup.lookups)
        offsets = self.rows.table_offsets(lookup)
        sums = transfer.sums = kernels.sum_gradients_by_row(lookup, offsets, output_gradients)
        requested = transfer.row_requests
        served_requests = transfer.served_requests
        assert served_requests is not None
        sent_layout = build_row_layout(requested.count_rows(requested.written), self.widths)
        send = self.mesh.allocate_send_buffer(
            sent_layout.num_elements, self.declaration.compute_dtype
        )
        request_slots = transfer.request_slots[requested.written]
        origin = transfer.origin[requested.written]
        self.cached_rows.take_pending_gradients(
            sent_layout.counts, request_slots, origin, sums, send
        )
        row_slots = _slots_by_request(lookup)[
            torch.from_numpy(served_requests.row_requests.written)
        ]
        rounding_keys = None
        if self.codec.gradients.name != "exact":
            ids = torch.from_numpy(transfer.ids[requested.written])
            ids_by_block = ids.split(sent_layout.counts.ravel().tolist())
            rounding_keys = self.codec.build_block_keys(ids_by_block, step, batch_index)
        return partial(
            self.send_pending_sums,
            "push",
            send,
            sent_layout,
            served_requests,
            row_slots,
            rounding_keys,
        )

    def send_pending_sums(
        self,
        channel: str,
        pending_sums: Tensor,
        sent_layout: RowLayout,
        served_requests: ServedRequests,
        row_slots: Tensor,
        rounding_keys: Sequence[RoundingKey] | None = None,
    ) -> RowGradients:
        """Send sums to the owners, and return those received for this rank's rows. Collective. row_slots: slots of the
        rows of received sums, in their order. rounding_keys: by block of the sums, to send them coded."""
        received_layout = build_row_layout(
            served_requests.row_requests.count_rows(served_requests.row_requests.written),
            self.widths,
        )
        layouts = sent_layout, received_layout
        sizes = [layout.rank_elements for layout in layouts]
        dtype = pending_sums.dtype
        codec = self.codec
        if rounding_keys is not None:
            pending_sums = codec.encode_gradients(pending_sums, sent_layout, rounding_keys)
            sizes = [codec.rank_bytes(codec.gradients, layout, dtype) for layout in layouts]
        received, _ = self.mesh.all_to_all(channel, pending_sums, *sizes)
        if rounding_keys is not None:
            received = codec.decode_gradients(received, received_layout, dtype)
        plan = served_requests.plan
        entries = torch.as_tensor(plan.entries)
        firsts = entries[torch.as_tensor(plan.segment_offsets)[:-1].long()].long()
        index = received_layout.rank_major_index(self.widths)
        return RowGradients(
            row_slots[firsts].contiguous(),
            torch.as_tensor(plan.block_offsets),
            plan.segment_offsets,
            plan.entries,
            _native.RowGradients(received.data_ptr(), index, self.owner.native.compute),
            (received, index, plan),
        )

    def after_update(self, optimizer_kinds: Tensor, settings_by_part: Tensor) -> None:
        """Update this rank's copies of the rows that its batch used, after the owners updated theirs."""
        transfer = self._transfers[0]
        assert transfer.is_received is not None
        # Counted now, because a batch that was read may still be dropped before its update.
        self.counts.renewed += int((transfer.row_requests.renewed & ~transfer.is_received).sum())
        counts = np.diff(transfer.ends)
        # Not before, because the step may be skipped after its push.
        self.cached_rows.add_pending_gradients(
            counts, transfer.slots, transfer.sums, transfer.pushed
        )
        self._update_cached_rows(
            transfer.slots, counts, transfer.sums, optimizer_kinds, settings_by_part
        )
        self.last_optimizers = optimizer_kinds.clone(), settings_by_part.clone()
        with self._lock:
            self._transfers.pop(0)
            self.number = transfer.number

    def record_changes(self, plan: _native.Plan, number: int) -> OverwrittenVersions:
        """Record in the version log that batch `number` changes this rank's rows of `plan`."""
        tables = row_tables(np.diff(np.asarray(plan.block_offsets))[None, :])
        return self.version_log.record_row_changes(tables, np.asarray(plan.unique_ids), number)

    def _update_cached_rows(
        self,
        row_slots: np.ndarray,
        table_row_counts: np.ndarray,
        gradient_sums: Any,
        optimizer_kinds: Tensor,
        settings_by_part: Tensor,
    ) -> None:
        """Apply sums of gradients to copies that outlast their batch. slots (n,) table by table, table_row_counts (T,)
        of them; sums of their gradients as `CachedRows` has them."""
        kernels = self.owner.select_kernels(self.cached_rows.views())
        pushed = kernels.gradients_from_sums(
            row_slots, table_row_counts, gradient_sums, np.array(self.outlasts_batch)
        )
        if len(pushed.slots):
            kernels.update(self.cached_rows, pushed, optimizer_kinds, settings_by_part)

    def export_directory_states(self) -> tuple[list[dict[str, np.ndarray]], list[np.ndarray]]:
        """Return states of directories and of `version_log` by table, as of the newest push: without decisions about
        batches in flight."""
        with self._lock:
            directories = [
                directory.export_state(
                    undone_decisions=[transfer.decisions[t] for transfer in self._transfers]
                )
                for t, directory in enumerate(self.directories)
            ]
            overwritten = [transfer.overwritten for transfer in reversed(self._transfers)]
            return directories, self.version_log.copy_versions_before(
                rows for rows in overwritten if rows is not None
            )

    def drop(self, lookup: FetchedRowsLookup) -> None:
        """Drop a batch: undo its decisions, once all later batches are dropped, too."""
        if isinstance(lookup, RowsLookup):
            self.rows.drop(lookup)
            return
        assert isinstance(lookup, CachedLookup) and lookup.transfer is not None
        lookup.reads = None
        self._undo_decision(lookup.transfer)

    def cancel(self, request: LookupRequest) -> None:
        if isinstance(request, CachedRequest):
            self._undo_decision(request.transfer)

    def _undo_decision(self, cache_transfer: CacheTransfer) -> None:
        with self._lock:
            cache_transfer.is_dropped = True
            while self._transfers and self._transfers[-1].is_dropped:
                last = self._transfers.pop()
                decisions = last.decisions
                if last.overwritten is not None:
                    self.version_log.undo_row_changes(last.overwritten)
                self.ages -= count_rows_by_age(decisions)
                for t, (directory, decision) in enumerate(
                    zip(self.directories, decisions, strict=True)
                ):
                    directory.undo_decision(decision)
                    if last.sums is not None:
                        # Gradients that were sent, and not applied, wait again.
                        state = directory.export_state()
                        self.cached_rows.num_pending[t][state["slots"]] = state["ticks"]
                if not last.is_fetched:
                    self._undone_previews.appendleft(last.preview)
                self.counts.add_decision(join_decisions(decisions), -1)


def find_cached_part(
    exchange_parts: Sequence[ExchangePart[Any]], row_store: Any
) -> CachedExchange | None:
    """Return the part that caches rows, if a plan has one, and give it `row_store`, which has this rank's rows."""
    for part in exchange_parts:
        if isinstance(part, CachedExchange):
            part.store = row_store
            return part
    return None


def _slots_by_request(lookup: PartLookup) -> Tensor:
    """Return the slot of each request, int32."""
    assert lookup.pinned is not None and lookup.pinned.by_request is not None
    return lookup.pinned.by_request
