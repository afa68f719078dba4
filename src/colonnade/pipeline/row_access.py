"""Access to rows of an open collection by table and id: read, list, delete, adopt; and lookups in exported rows.

Legend: N ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.errors import IdRangeError
from colonnade.exchange.cached import check_uncached
from colonnade.lookup.kernels import NativeKernels
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    build_lookup_columns,
    collect_lookups,
    explain_range_error,
    list_outputs,
)
from colonnade.lookup.outputs import build_outputs
from colonnade.pipeline.open_rows import OpenRows
from colonnade.store.contract import Rows, RowView
from colonnade.store.mapped import MappedRows
from colonnade.store.policies import RowRetention
from colonnade.table import CLOCK_BYTES

PACKED = torch.contiguous_format


def read_weights(rows: OpenRows, table: str, ids: Tensor) -> Tensor:
    """Implement `EmbeddingCollection.rows`. Collective, with the same ids (N,) on every rank."""
    declared = rows.views.declared
    table_index = declared.table_index(table)
    slices = rows.views.slices_of_table[table_index]
    num_rows = rows.views.table_shards[slices[0]].table.rows
    unique, inverse = torch.unique(ids, return_inverse=True)
    if num_rows is not None and len(unique) and not (unique[0] >= 0 and unique[-1] < num_rows):
        raise IdRangeError(
            f"table {table!r}: got ids {int(unique[0])} .. {int(unique[-1])}, wanted 0 .. {num_rows - 1}"
        )
    width, compute = declared.tables[table_index].width, declared.compute_dtype
    weights = torch.zeros(len(unique), width, dtype=compute)
    for t in slices:
        table_shard, shard = rows.views.table_shards[t], rows.shards[t]
        is_owned = shard.owns(unique, num_rows)
        if rows.mesh.rank not in table_shard.sharding.row_owners:
            is_owned[:] = False  # a replicated row that another rank returns
        num_owned = int(is_owned.sum())
        offsets = torch.tensor([0] * (t + 1) + [num_owned] * (len(rows.shards) - t))
        own = rows.store.read(unique[is_owned].contiguous(), offsets)[t].to(compute)
        weights[is_owned, slice(*table_shard.columns)] = own
    # One rank's values and zeros: exact.
    return rows.mesh.all_reduce("evaluate", weights).to(declared.dtype)[inverse]


def delete_rows(rows: OpenRows, table: str, ids: Tensor) -> None:
    """Implement `EmbeddingCollection.delete`: with the same ids (N,) on every rank."""
    for t in check_uncached(rows.cached, rows.build_slices(table)):
        own = ids[rows.shards[t].owns(ids, rows.views.table_shards[t].table.rows)].unique()
        rows.store.delete(t, own)
        policy = rows.policies.get(t)
        if isinstance(policy, RowRetention):
            policy.drop(own)


def scan_rows(rows: OpenRows, table: str) -> Iterator[Rows]:
    """Implement `EmbeddingCollection.scan`."""
    for t in rows.build_slices(table):
        slice_table = rows.views.table_shards[t].table
        for ids, records in rows.store.scan(t):
            # Copied even where one row is contiguous already: its clock may begin at any byte.
            weights = records[:, : slice_table.width * slice_table.itemsize].clone(
                memory_format=PACKED
            )
            clocks = records[:, -CLOCK_BYTES:].clone(memory_format=PACKED)
            yield Rows(
                ids,
                weights.view(rows.views.declared.dtype),
                clocks.view(torch.int64).flatten(),
            )


def admit_loaded_rows(rows: OpenRows, t: int, ids: Tensor, records: Tensor, step: int) -> None:
    """Admit rows of slice t that were loaded from a checkpoint or an import, between steps; others may be evicted for
    them. ids (N,) unique; records (N, record_bytes) uint8; step: updates made before."""
    policy = rows.policies.get(t)
    if not isinstance(policy, RowRetention):
        return
    norms, table = None, rows.views.table_shards[t].table
    if policy.reads_norms:
        indices = torch.arange(len(ids), dtype=torch.int32)
        view = RowView(records.data_ptr(), table.record_bytes, table.width, table.dtype)
        norms = rows.exchange.squared_norms(view, indices)
    rows.store.delete(t, policy.adopt(ids, step, norms).unique())


class MappedLookup:
    """Reader of a declaration's features in mapped, read-only rows, in a world of one. It plans no batch, pins nothing
    and builds no graph."""

    def __init__(self, declaration: EmbeddingDeclaration, rows: MappedRows) -> None:
        self.declaration, self.rows = declaration, rows
        self.outputs, self.lookup_columns = (
            list_outputs(declaration),
            build_lookup_columns(declaration),
        )
        self.table_rows = torch.tensor([table.rows or 0 for table in declaration.tables])
        self.kernels = NativeKernels(declaration, self.lookup_columns, self.outputs, 1)

    def read(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Return the same outputs as `Exchange.values`. Raises IdRangeError and DataError as training does, and
        CorruptionError and StorageError where a file of rows is damaged."""
        lookups = collect_lookups(batch, self.declaration, self.lookup_columns)
        try:
            slots = self.rows.find_slots(
                lookups.ids, lookups.feature_offsets, self.lookup_columns.tables
            )
        except IndexError:
            try:  # to find which feature and lookup it is
                one_owner = torch.ones(len(self.table_rows), dtype=torch.int64)
                _native.make_plan(lookups.native, self.table_rows, one_owner)
            except IndexError as error:
                features = self.lookup_columns.features
                raise explain_range_error(error, self.declaration, features) from None
            raise
        pooled = self.kernels.pool(lookups, (*self.rows.addresses_and_strides(), slots, None))
        self.rows.check_damage()
        return build_outputs(self.declaration, self.outputs, pooled, device, batch.dense)
