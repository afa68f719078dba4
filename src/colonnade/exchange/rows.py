"""Exchange `rows`: unique rows are sent to the ranks that look them up, and one summed gradient per row back.

Per rank and step: ids of its unique rows out (and when they are needed next, where a reader gives this), their
values in, one summed gradient per row out. In a world of one, synchronous, nothing is copied: lookups read the
owner's rows in place.

Legend: B samples, T tables, N ranks, E lookups, U unique rows of this rank, O rows it owns,
P rows that other ranks (and this one) requested from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh, PendingCall
from colonnade.exchange.contract import (
    ExchangePart,
    FetchedRows,
    FetchedRowsLookup,
    LookupRequest,
    RowMessages,
    RowsLookup,
)
from colonnade.exchange.prefetched import collect_prefetched_rows, gather_prefetched_rows
from colonnade.exchange.row_owner import (
    RowOwner,
    build_request_lookups,
    gather_int32,
    owned_rows,
)
from colonnade.lookup.contract import (
    BITWISE,
    NO_TENSORS,
    BatchInfo,
    ByPage,
    Caller,
    PartLookup,
    PinnedRows,
    RowGradients,
    RowSource,
)
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    Lookups,
    build_lookup_columns,
    collect_lookups,
    list_lookup_outputs,
)
from colonnade.lookup.row_layout import build_row_layout
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.topology.sharding import Sharding, row_wise_over_owners
from colonnade.wire.coding import NO_CODING, Coding, RowCodec
from colonnade.wire.id_distribution import traffic_tag_of
from colonnade.wire.owner_map import build_owner_map
from colonnade.wire.packing import ReceivedRequests, pack_id_requests, unpack_id_requests

RowsReader = TypeVar("RowsReader", bound=FetchedRowsLookup)


class FetchedRowsPart(ExchangePart[RowsReader]):
    """Base class of the parts that pool fetched rows on the samples' rank."""

    def pooled(
        self, lookup: RowsReader, out_tensors: Mapping[int, Tensor] = NO_TENSORS
    ) -> list[Tensor]:
        reads = lookup.reads
        assert reads is not None
        if reads.arrival is not None:
            reads.wait()
        return reads.kernels.pool(lookup.lookups, reads.locations, out_tensors)

    def drop(self, lookup: RowsReader) -> None:
        if lookup.reads is not None:
            lookup.reads.wait()
        lookup.reads = None

    def has_values(self, lookup: RowsReader) -> bool:
        return lookup.reads is not None


class RowsExchange(FetchedRowsPart[RowsLookup]):
    """Exchange of unique rows on one rank."""

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        mesh: Mesh,
        shardings: Sequence[Sharding] | None = None,
        coding: Coding = NO_CODING,
    ) -> None:
        """Take shardings by table; default row-wise over all ranks."""
        self.declaration = declaration
        self.mesh = mesh
        self.num_ranks = mesh.num_ranks
        everywhere = row_wise_over_owners(mesh.world)
        self.owner_map = build_owner_map(
            shardings or [everywhere] * len(declaration.tables), self.num_ranks
        )
        self.outputs = list_lookup_outputs(declaration)
        self.owner = RowOwner(declaration, build_lookup_columns(declaration), self.outputs, mesh)
        self.codec = RowCodec(declaration, mesh.rank, coding)
        self.exactness = coding.describe_exactness(BITWISE, declaration.dtype, self.num_ranks)

    def build_requests(self, batch: Batch, caller: Caller) -> LookupRequest:
        lookups, plan, codes = self.plan_batch(batch)
        messages = self.pack_row_requests(plan, codes) if self.num_ranks > 1 else []
        return LookupRequest(messages, lookups, plan, codes)

    def plan_batch(self, batch: Batch) -> tuple[Lookups, _native.Plan, Tensor | None]:
        """Return a batch's lookups, their plan and `Batch.next_use` by unique row. Raises as `build_requests`."""
        lookups = collect_lookups(batch, self.declaration, self.owner.lookup_columns)
        plan = self.owner.plan_lookups(lookups, self.owner_map.num_owners)
        codes = None if batch.next_use is None else self.owner.next_use_by_row(batch, plan)
        return lookups, plan, codes

    def pack_row_requests(
        self, lookup_plan: _native.Plan, next_use_codes: Tensor | None
    ) -> list[np.ndarray]:
        """Return by rank the request (uint8) for its rows of the plan; next_use_codes (U,) of them."""
        blocks = self.owner_map.block_offsets(lookup_plan)
        firsts, lasts = (b.reshape(-1, self.num_ranks).T for b in (blocks[:-1], blocks[1:]))
        return pack_id_requests(
            torch.as_tensor(lookup_plan.unique_ids),
            firsts,
            lasts,
            self.owner.table_rows,
            self.owner_map.num_owners,
            self.owner_map.owner_indices,
            next_use_codes=next_use_codes,
        )

    def unpack_row_requests(self, received: Sequence[np.ndarray]) -> ReceivedRequests:
        """Return what all ranks' `pack_row_requests` request from this one. Raises WorldError."""
        owner_indices = torch.from_numpy(self.owner_map.owner_indices[self.mesh.rank].copy())
        return unpack_id_requests(
            received, self.owner.table_rows, self.owner_map.num_owners, owner_indices
        )

    def serve_requests(
        self, request: LookupRequest, received_requests: Sequence[np.ndarray], batch: BatchInfo
    ) -> RowsLookup:
        plan = request.plan
        assert plan is not None
        if self.num_ranks == 1:
            return RowsLookup(batch, request.lookups, plan, owned_rows(plan, request.codes), plan)
        counts = (
            np.diff(self.owner_map.block_offsets(plan)).reshape(len(self.owner.widths), -1).T
        )  # (N, T)
        requests = self.unpack_row_requests(received_requests)
        owner_plan, owned = self.owner.plan_owned_rows(requests)
        messages = self.build_message_layouts(counts, requests.counts, requests.ids)
        return RowsLookup(batch, request.lookups, plan, owned, owner_plan, messages=messages)

    def resolve_slots(self, lookup: PartLookup, row_views: Sequence[RowView]) -> None:
        """Find the slot of each request, and the order of rows in memory for the update. Local, any thread."""
        slots = lookup.slots
        plan = lookup.owner_plan
        by_page = None
        if row_views[0].rows is None:
            by_page = _native.by_page(
                slots, lookup.owned.offsets, plan.segment_offsets, plan.entries
            )
        lookup.pinned = PinnedRows(
            slots,
            gather_int32(slots, plan.inverse),
            ByPage(*map(torch.as_tensor, by_page)) if by_page else None,
        )

    def fetch(self, lookup: RowsLookup, row_source: RowSource) -> None:
        """Begin to send rows. Their values are copied before it returns."""
        kernels = self.owner.select_kernels(row_source.views)
        by_request = lookup.request_slots(row_source)
        pinned = None if by_request is None else lookup.pinned
        if by_request is None:
            by_request = gather_int32(row_source.rows, lookup.owner_plan.inverse)
        if self.num_ranks == 1 and row_source.in_place:
            order = pinned.by_page.entries if pinned and pinned.by_page else None
            locations = kernels.locate_rows(lookup.lookups, row_source.views, by_request, order)
            lookup.reads = FetchedRows(kernels, locations, row_source)
            return
        messages = lookup.messages = lookup.messages or self.build_own_messages(lookup)
        rows = row_source.rows if self.num_ranks == 1 else by_request
        send = self.mesh.allocate_send_buffer(messages.served.num_elements, self.declaration.dtype)
        kernels.gather_message(row_source, rows, messages.served, messages.requests, send)
        if self.num_ranks == 1:
            lookup.reads = self.wrap_received_rows(lookup, send, messages.wanted_index)
            return
        values = empty(messages.wanted.num_elements, dtype=self.declaration.dtype)
        tag = traffic_tag_of(lookup.batch.channel, "fetch")
        arrival = self._send_rows(send, messages, values, tag)
        lookup.reads = self.wrap_received_rows(lookup, values, messages.wanted_index, arrival)

    def _send_rows(
        self,
        rows_to_send: Tensor,
        message_layouts: RowMessages,
        received_out: Tensor,
        traffic_tag: str,
    ) -> Callable[[], None]:
        """Send rows, laid out as served, and receive others into `received_out`, laid out as wanted. Collective.
        Return a function that waits for them."""
        codec = self.codec
        served = message_layouts.served
        wanted = message_layouts.wanted
        if codec.values.name == "exact":
            _, call = self.mesh.all_to_all(
                "fetch",
                rows_to_send,
                served.rank_elements,
                wanted.rank_elements,
                wait=False,
                traffic_tag=traffic_tag,
                into=received_out,
            )
            return partial(_wait_for, call, rows_to_send)
        coded = codec.encode_values(rows_to_send, served)
        data, call = self.mesh.all_to_all(
            "fetch",
            coded,
            codec.rank_bytes(codec.values, served, rows_to_send.dtype),
            codec.rank_bytes(codec.values, wanted, rows_to_send.dtype),
            wait=False,
            traffic_tag=traffic_tag,
        )

        def decode() -> None:
            _wait_for(call, coded)
            codec.decode_values(data, wanted, received_out)

        return decode

    def wrap_received_rows(
        self,
        lookup: PartLookup,
        received_values: Tensor,
        element_index: Tensor,
        wait_for_arrival: Callable[[], None] | None = None,
    ) -> FetchedRows:
        """Return rows that are one block of values. element_index: (U,) int32, the element that each row begins
        with."""
        native = self.owner.native
        view = RowView(received_values.data_ptr(), native.itemsize, 1, native.dtype)
        by_lookup = gather_int32(element_index, lookup.plan.inverse)
        locations = native.locate_rows(lookup.lookups, [view] * len(self.owner.widths), by_lookup)
        return FetchedRows(native, locations, received_values, wait_for_arrival, element_index)

    def begin_push(
        self, lookup: RowsLookup, output_gradients: list[Tensor] | None, step: int, batch_index: int
    ) -> Callable[[], RowGradients]:
        kernels = self.owner.native if lookup.reads is None else lookup.reads.kernels
        if output_gradients is None:
            output_gradients = kernels.zero_outputs(lookup.lookups)
        if self.num_ranks == 1:
            return partial(kernels.gradients_from_outputs, lookup, output_gradients)
        return self.send_gradient_sums(
            lookup, self.sum_gradients(lookup, output_gradients), step, batch_index
        )

    def sum_gradients(self, lookup: RowsLookup, output_gradients: list[Tensor]) -> Tensor:
        """Return this rank's sums of gradients by unique row, laid out as wanted."""
        owner = self.owner
        plan = lookup.plan
        messages = lookup.messages
        assert messages is not None
        send = self.mesh.allocate_send_buffer(messages.wanted.num_elements, owner.compute_dtype)
        entries = RowGradients(
            lookup.slots,
            self.table_offsets(lookup),
            plan.segment_offsets,
            plan.entries,
            *owner.native.output_gradients(lookup, output_gradients),
        )
        owner.native.sum_rows_into(entries, send, messages.wanted_index)
        return send

    def send_gradient_sums(
        self,
        lookup: RowsLookup,
        gradient_sums: Tensor,
        step: int,
        batch_index: int,
        *,
        to_all: bool = False,
    ) -> Callable[[], RowGradients]:
        """Send sums of rows to their owners, or all of them to every rank. Collective. Return a function that waits for
        the sums sent to this rank."""
        codec = self.codec
        dtype = gradient_sums.dtype
        messages = lookup.messages
        assert messages is not None
        wanted = messages.wanted
        served = messages.served
        is_exact = codec.gradients.name == "exact"
        sizes = wanted.rank_elements
        sizes_in = served.rank_elements
        if not is_exact:
            rounding_keys = codec.build_rounding_keys(
                lookup.plan, self.owner_map.block_offsets(lookup.plan), step, batch_index
            )
            gradient_sums = codec.encode_gradients(gradient_sums, wanted, rounding_keys)
            sizes, sizes_in = (
                codec.rank_bytes(codec.gradients, layout, dtype) for layout in (wanted, served)
            )
        if to_all:
            sizes = [len(gradient_sums)] * self.num_ranks
            gradient_sums = gradient_sums.repeat(self.num_ranks)
        data, call = self.mesh.all_to_all("push", gradient_sums, sizes, sizes_in, wait=False)

        def finish() -> RowGradients:
            _wait_for(call, gradient_sums)
            received = data if is_exact else codec.decode_gradients(data, served, dtype)
            return build_received_gradients(lookup, received, messages, self.owner)

        return finish

    def prefetched(self, lookup: RowsLookup) -> dict[str, Tensor]:
        """Return ids (U,), table_offsets (T + 1,) and values, table by table, of a fetched batch."""
        reads = lookup.reads
        assert reads is not None and reads.index is not None  # values read ahead were copied
        reads.wait()
        offsets = self.table_offsets(lookup)
        width = torch.from_numpy(self.owner.widths).repeat_interleave(offsets.diff())
        starts = reads.index.long() & 0xFFFFFFFF
        ramp = torch.arange(int(width.sum())) - (width.cumsum(0) - width).repeat_interleave(width)
        return {
            "ids": torch.as_tensor(lookup.plan.unique_ids).clone(),
            "table_offsets": offsets,
            "values": reads.keep[starts.repeat_interleave(width) + ramp],
        }

    def restore(
        self, lookup: RowsLookup, rank_prefetched_values: Sequence[Mapping[str, Tensor]]
    ) -> None:
        parts = collect_prefetched_rows(rank_prefetched_values)
        unique = torch.as_tensor(lookup.plan.unique_ids)
        offsets = self.table_offsets(lookup)
        blocks = []
        indices = []
        start = 0
        for t, dim in enumerate(self.owner.widths.tolist()):
            ids = unique[offsets[t] : offsets[t + 1]]
            blocks.append(gather_prefetched_rows(parts, self.owner.widths, t, ids).flatten())
            indices.append(torch.arange(len(ids)) * dim + start)
            start += blocks[-1].numel()
        index = torch.cat(indices).to(torch.int32)
        lookup.reads = self.wrap_received_rows(lookup, torch.cat(blocks), index)
        lookup.messages = lookup.messages or self.build_own_messages(lookup)

    def table_offsets(self, lookup: PartLookup) -> Tensor:
        """Return where this rank's unique rows of each table begin, (T + 1,) int64."""
        return self.owner_map.table_offsets(lookup.plan)

    def build_message_layouts(
        self, wanted_counts: np.ndarray, served_counts: np.ndarray, served_row_ids: Tensor
    ) -> RowMessages:
        """Build the layouts of messages: wanted_counts (N, T) rows of each owner, served_counts (N, T) rows for each
        rank. served_row_ids: of the served rows."""
        widths = self.owner.widths
        received = build_row_layout(wanted_counts, widths)
        sent = build_row_layout(served_counts, widths)
        return RowMessages(
            received,
            sent,
            received.table_major_index(widths),
            sent.rank_major_index(widths),
            build_request_lookups(served_row_ids, served_counts),
        )

    def build_own_messages(self, lookup: PartLookup) -> RowMessages:
        """Build the layout of the message in a world of one: every row that is looked up."""
        counts = np.diff(lookup.owned.offsets.numpy())[None, :]
        return self.build_message_layouts(counts, counts, lookup.owned.ids)


def build_received_gradients(
    lookup: PartLookup, received_sums: Tensor, message_layouts: RowMessages, row_owner: RowOwner
) -> RowGradients:
    """Return sums received from all ranks, laid out as served, as gradients of the owned rows."""
    plan = lookup.owner_plan
    source = _native.RowGradients(
        received_sums.data_ptr(), message_layouts.served_index, row_owner.native.compute
    )
    pinned = lookup.pinned
    return RowGradients(
        lookup.slots,
        lookup.owned.offsets,
        plan.segment_offsets,
        plan.entries,
        source,
        received_sums,
        pinned.by_page if pinned else None,
    )


def _wait_for(call: PendingCall | None, keep: Tensor) -> None:
    """Wait for a call. keep: its message, which must live until then."""
    if call is not None:
        call.wait()
