"""Exchange `replicated`: every rank has every row, reads its own, and sends its sums of gradients per row to all ranks.

All ranks apply the sums in rank order. Before a step only ids are sent, so that each rank pins the rows that any rank's
batch will change. The sums are those of `rows`, in the same order, so results have the same bits for any sharding.

Legend: T tables, N ranks, U unique rows of this rank, O rows that some rank requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.exchange.contract import FetchedRows, LookupRequest, RowsLookup
from colonnade.exchange.row_owner import (
    build_request_lookups,
    gather_int32,
    owned_rows,
)
from colonnade.exchange.rows import FetchedRowsPart, RowsExchange
from colonnade.lookup.contract import (
    BatchInfo,
    Caller,
    PartLookup,
    PinnedRows,
    RowGradients,
    RowSource,
)
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.row_layout import build_row_layout
from colonnade.store.contract import RowView
from colonnade.topology.sharding import table_wise
from colonnade.wire.coding import NO_CODING, Coding
from colonnade.wire.packing import pack_id_requests, unpack_id_requests


class ReplicatedExchange(FetchedRowsPart[RowsLookup]):
    """Exchange of replicated rows on one rank, in a world of several.

    A lookup's owned rows are those of all ranks' batches. In its messages, `wanted` is this rank's unique rows as one
    block, and `served` is all ranks' rows as they arrive.
    """

    def __init__(
        self, declaration: EmbeddingDeclaration, mesh: Mesh, coding: Coding = NO_CODING
    ) -> None:
        self.mesh = mesh
        self.counts_norm = mesh.rank == 0
        self.rows = RowsExchange(
            declaration, mesh, [table_wise(mesh.rank)] * len(declaration.tables), coding
        )
        self.declaration = declaration
        self.outputs = self.rows.outputs
        self.owner = self.rows.owner
        self.exactness = self.rows.exactness

    def build_requests(self, batch: Batch, caller: Caller) -> LookupRequest:
        owner = self.owner
        lookups, plan, codes = self.rows.plan_batch(batch)
        message = np.empty(0, np.uint8)
        if caller != "evaluation":  # no rank needs the rows that others only read
            offsets = np.asarray(plan.block_offsets)
            (message,) = pack_id_requests(
                torch.as_tensor(plan.unique_ids),
                offsets[None, :-1],
                offsets[None, 1:],
                owner.table_rows,
                owner.one_owner,
                np.zeros((1, len(owner.widths)), np.int64),
                next_use_codes=codes,
            )
        return LookupRequest([message] * self.mesh.num_ranks, lookups, plan, codes)

    def serve_requests(
        self, request: LookupRequest, received_requests: Sequence[np.ndarray], batch: BatchInfo
    ) -> RowsLookup:
        plan = request.plan
        owner = self.owner
        assert plan is not None
        if batch.is_evaluated:
            return RowsLookup(batch, request.lookups, plan, owned_rows(plan, request.codes), plan)
        first_owner = torch.zeros(len(owner.widths), dtype=torch.int64)
        requests = unpack_id_requests(
            received_requests, owner.table_rows, owner.one_owner, first_owner
        )
        owner_plan, owned = owner.plan_owned_rows(requests)
        messages = self.rows.build_message_layouts(
            self._own_counts(plan), requests.counts, requests.ids
        )
        return RowsLookup(batch, request.lookups, plan, owned, owner_plan, messages=messages)

    def resolve_slots(self, lookup: PartLookup, row_views: Sequence[RowView]) -> None:
        """Find the slot of each of this rank's unique rows. Local, any thread."""
        assert isinstance(lookup, RowsLookup)
        lookup.pinned = PinnedRows(lookup.slots, self._select_unique_rows(lookup, lookup.slots))

    def fetch(self, lookup: RowsLookup, row_source: RowSource) -> None:
        """Read rows of this rank. Not collective."""
        kernels = self.owner.select_kernels(row_source.views)
        codec = self.rows.codec
        unique_rows = lookup.request_slots(row_source)
        if unique_rows is None:
            unique_rows = self._select_unique_rows(lookup, row_source.rows)
        is_exact = codec.values.name == "exact"
        if is_exact and row_source.in_place and kernels is self.owner.native:
            by_lookup = gather_int32(unique_rows, lookup.plan.inverse)
            locations = kernels.locate_rows(lookup.lookups, row_source.views, by_lookup)
            lookup.reads = FetchedRows(kernels, locations, row_source)
            return
        counts = self._own_counts(lookup.plan)
        layout = build_row_layout(counts, self.owner.widths)
        requests = build_request_lookups(torch.as_tensor(lookup.plan.unique_ids), counts)
        values = kernels.gather_message(row_source, unique_rows, layout, requests)
        if not is_exact:  # as if they were sent: values must not depend on the sharding
            codec.decode_values(codec.encode_values(values, layout), layout, values)
        index = layout.rank_major_index(self.owner.widths)
        lookup.reads = self.rows.wrap_received_rows(lookup, values, index)

    def begin_push(
        self, lookup: RowsLookup, output_gradients: list[Tensor] | None, step: int, batch_index: int
    ) -> Callable[[], RowGradients]:
        """Implement the contract: send this rank's sums of all its rows to every rank."""
        if output_gradients is None:
            output_gradients = self.owner.native.zero_outputs(lookup.lookups)
        sums = self.rows.sum_gradients(lookup, output_gradients)
        return self.rows.send_gradient_sums(lookup, sums, step, batch_index, to_all=True)

    def prefetched(self, lookup: RowsLookup) -> dict[str, Tensor]:
        return self.rows.prefetched(lookup)

    def restore(
        self, lookup: RowsLookup, rank_prefetched_values: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self.rows.restore(lookup, rank_prefetched_values)

    def _own_counts(self, plan: Any) -> np.ndarray:
        """Return counts of this rank's unique rows by rank and table, (N, T), as if it requested all from itself."""
        counts = np.zeros((self.mesh.num_ranks, len(self.owner.widths)), dtype=np.int64)
        counts[self.mesh.rank] = np.diff(np.asarray(plan.block_offsets))
        return counts

    def _select_unique_rows(self, lookup: RowsLookup, requested_rows: Tensor) -> Tensor:
        """Return the part (U,) of `requested_rows` (O,) int32, of all requested rows, for this rank's unique rows."""
        if lookup.messages is None:  # an evaluation, whose owned rows are this rank's
            return requested_rows
        first = int(lookup.messages.served.counts[: self.mesh.rank].sum())
        inverse = torch.as_tensor(lookup.owner_plan.inverse)
        return gather_int32(
            requested_rows, inverse[first : first + lookup.plan.num_unique].contiguous()
        )
