"""Owner's side of an exchange: computation on the rank that stores the rows, whatever is sent.

Legend: T tables, O rows this rank owns and some rank requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.lookup.contract import Kernels, OwnedRows, PartLookup, RowGradients
from colonnade.lookup.kernels import DeviceKernels, DeviceRowSums, NativeKernels
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    LookupColumns,
    Lookups,
    Output,
    collect_next_use,
    explain_range_error,
)
from colonnade.store.contract import RowView
from colonnade.wire.packing import ReceivedRequests


class RowOwner:
    """Kernels on this rank's rows, in memory or on a device, and plans of the rows that batches use."""

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        lookup_columns: LookupColumns,
        outputs: Sequence[Output],
        mesh: Mesh,
    ) -> None:
        """Take the tables and features that the kernels pool: all declared ones, or those that this rank has rows
        of."""
        self.declaration = declaration
        self.lookup_columns = lookup_columns
        self.widths = declaration.widths
        self.table_rows = torch.tensor([t.rows or 0 for t in declaration.tables])
        self.one_owner = torch.ones(len(declaration.tables), dtype=torch.int64)  # by table
        self.compute_dtype = declaration.compute_dtype
        declared = (declaration, lookup_columns, outputs)
        self.native = NativeKernels(*declared, mesh.num_ranks)
        self.on_device = DeviceKernels(*declared, self.native)

    def select_kernels(self, views: Sequence[RowView]) -> Kernels:
        """Return the kernels for rows in these views' memory."""
        return self.native if views[0].rows is None else self.on_device

    def kernels_of_gradients(self, row_gradients: RowGradients) -> Kernels:
        """Return the kernels that computed these gradients."""
        return self.on_device if isinstance(row_gradients.source, DeviceRowSums) else self.native

    def update(
        self, store: Any, row_gradients: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        """Apply gradients to pinned rows of this rank's store: see `_native.update`."""
        self.select_kernels(store.views()).update(store, row_gradients, optimizers, settings)

    def plan_lookups(self, lookups: Lookups, num_owners: Tensor) -> _native.Plan:
        """Group lookups by row; rows of a table are listed owner by owner. Raises IdRangeError."""
        try:
            return _native.make_plan(lookups.native, self.table_rows, num_owners)
        except IndexError as error:
            raise explain_range_error(
                error, self.declaration, self.lookup_columns.features
            ) from None

    def plan_requests(self, ids: Tensor, counts: np.ndarray) -> _native.Plan:
        """Group requests for this rank's rows by row: ids source by source, table by table; counts (sources, T)."""
        return _native.make_plan(
            build_request_lookups(ids, counts), self.table_rows, self.one_owner
        )

    def next_use_by_row(self, batch: Batch, plan: _native.Plan) -> Tensor:
        """Return `Batch.next_use` by unique row, (U,) uint8. Raises DataError."""
        return reduce_next_use_codes(
            collect_next_use(batch, self.declaration, self.lookup_columns), plan
        )

    def plan_owned_rows(self, requests: ReceivedRequests) -> tuple[_native.Plan, OwnedRows]:
        """Group all ranks' requests by row of this rank. Return the plan, and the rows with their soonest next use."""
        plan = self.plan_requests(requests.ids, requests.counts)
        codes = requests.codes
        next_use = None if codes is None else reduce_next_use_codes(codes.numpy(), plan)
        return plan, owned_rows(plan, next_use)

    def merge_gradients(
        self, batch_lookups: Sequence[PartLookup], batch_gradients: Sequence[RowGradients]
    ) -> RowGradients:
        """Merge gradients of several batches into one application: each batch is summed per row, then batches in
        order."""
        if len(batch_gradients) == 1:
            return batch_gradients[0]
        counts = np.stack([np.diff(lookup.owned.offsets.numpy()) for lookup in batch_lookups])
        plan = self.plan_requests(torch.cat([lookup.owned.ids for lookup in batch_lookups]), counts)
        slots = torch.cat([part.slots for part in batch_gradients])
        entries = torch.as_tensor(plan.entries)
        firsts = entries[torch.as_tensor(plan.segment_offsets)[:-1].long()].long()
        return self.kernels_of_gradients(batch_gradients[0]).merge_batches(
            batch_lookups, batch_gradients, slots[firsts].contiguous(), plan
        )


def owned_rows(plan: _native.Plan, next_use: Tensor | None = None) -> OwnedRows:
    """Return the rows of a plan with one owner."""
    return OwnedRows(
        torch.as_tensor(plan.unique_ids), torch.as_tensor(plan.block_offsets), next_use
    )


def build_request_lookups(ids: Tensor, request_counts: np.ndarray) -> _native.Lookups:
    """Return requests as lookups of one one-hot feature per (source, table): ids listed source by source, table by
    table; request_counts (sources, T)."""
    tables, poolings = _request_features(*request_counts.shape)
    offsets = np.zeros(request_counts.size + 1, np.int64)
    np.cumsum(request_counts.ravel(), out=offsets[1:])
    return _native.Lookups(ids, torch.from_numpy(offsets), tables, poolings, 0, None, None)


@lru_cache(maxsize=64)
def _request_features(num_sources: int, num_tables: int) -> tuple[Tensor, Tensor]:
    """Return the table and pooling of each (source, table); cached, because they are the same in every step. Read
    only."""
    tables = torch.arange(num_tables, dtype=torch.int32).repeat(num_sources)
    return tables, torch.full((num_sources * num_tables,), 2, dtype=torch.uint8)


def gather_int32(values: Tensor, index: Any) -> Tensor:
    """Return values[index], int32."""
    index = torch.as_tensor(index)
    out = torch.empty(len(index), dtype=torch.int32)
    _native.take(values, index, out)
    return out


def reduce_next_use_codes(lookup_codes: np.ndarray, lookup_plan: _native.Plan) -> Tensor:
    """Reduce codes of `Batch.next_use` by lookup to the soonest by unique row."""
    starts = np.asarray(lookup_plan.segment_offsets)[:-1]
    if not len(starts):
        return torch.empty(0, dtype=torch.uint8)
    # One less: 0 (unknown) becomes the farthest, because another lookup of the row may be known.
    by_lookup = lookup_codes[np.asarray(lookup_plan.entries)] - np.uint8(1)
    return torch.from_numpy(np.minimum.reduceat(by_lookup, starts) + np.uint8(1))
