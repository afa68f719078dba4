"""Access to rows by table and id: read, scan, delete and admit rows; and lookups in exported rows.

`EmbeddingCollection.rows`, `scan` and `delete` call these functions with the parts of an open collection: `views`, the
tables as they are sharded; `shards`, this rank's shard by sharded table; `store`, its rows.

Legend: N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch, Ids, SharedIds
from colonnade.comm.mesh import Mesh
from colonnade.errors import IdRangeError
from colonnade.lookup.kernels import NativeKernels
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    LookupColumns,
    Output,
    build_lookup_columns,
    collect_lookups,
    explain_range_error,
    list_lookup_outputs,
)
from colonnade.lookup.outputs import build_outputs
from colonnade.lookup.reads import list_reads
from colonnade.lookup.views import Slices
from colonnade.ops.optimizers import count_updates
from colonnade.store.contract import Resident, Rows, RowView
from colonnade.store.mapped import MappedRows
from colonnade.store.policies import RowPolicy, RowRetention
from colonnade.table import CLOCK_BYTES, Table
from colonnade.topology.sharding import Shard

PACKED = torch.contiguous_format


def read_weights(
    table_views: Slices,
    rank_shards: Sequence[Shard],
    row_store: Resident,
    mesh: Mesh,
    table_name: str,
    ids: Tensor,
) -> Tensor:
    """Read the weights of rows from the ranks that own them. Collective, with the same ids (N,) on every rank."""
    declared = table_views.declared
    table_index = declared.table_index(table_name)
    slices = table_views.slices_of_table[table_index]
    num_rows = table_views.table_shards[slices[0]].table.rows
    unique, inverse = torch.unique(ids, return_inverse=True)
    if num_rows is not None and len(unique) and not (unique[0] >= 0 and unique[-1] < num_rows):
        raise IdRangeError(
            f"table {table_name!r}: got ids {int(unique[0])} .. {int(unique[-1])}, wanted 0 .. {num_rows - 1}"
        )
    width = declared.tables[table_index].width
    compute = declared.compute_dtype
    weights = torch.zeros(len(unique), width, dtype=compute)
    for t in slices:
        table_shard = table_views.table_shards[t]
        shard = rank_shards[t]
        is_owned = shard.owns(unique, num_rows)
        if mesh.rank not in table_shard.sharding.row_owners:
            is_owned[:] = False  # a replicated row that another rank returns
        num_owned = int(is_owned.sum())
        offsets = torch.tensor([0] * (t + 1) + [num_owned] * (len(rank_shards) - t))
        own = row_store.read(unique[is_owned].contiguous(), offsets)[t].to(compute)
        weights[is_owned, slice(*table_shard.columns)] = own
    # One rank's values and zeros: exact.
    return mesh.all_reduce("evaluate", weights).to(declared.dtype)[inverse]


def delete_rows(
    table_views: Slices,
    rank_shards: Sequence[Shard],
    row_store: Resident,
    policies: Mapping[int, RowPolicy],
    table_name: str,
    ids: Tensor,
) -> None:
    """Delete the rows that this rank owns, and what policies remember of them. ids (N,): the same on every rank."""
    for t in table_views.slices_of_table[table_views.declared.table_index(table_name)]:
        own = ids[rank_shards[t].owns(ids, table_views.table_shards[t].table.rows)].unique()
        row_store.delete(t, own)
        policy = policies.get(t)
        if isinstance(policy, RowRetention):
            policy.drop(own)


def scan_rows(table_views: Slices, row_store: Resident, table_name: str) -> Iterator[Rows]:
    """Yield this rank's trained rows of a table from memory and storage, each row once."""
    for t in table_views.slices_of_table[table_views.declared.table_index(table_name)]:
        slice_table = table_views.table_shards[t].table
        for ids, records in row_store.scan(t):
            # Copied even where one row is contiguous already: its clock may begin at any byte.
            weights = records[:, : slice_table.width * slice_table.itemsize].clone(
                memory_format=PACKED
            )
            clocks = records[:, -CLOCK_BYTES:].clone(memory_format=PACKED)
            yield Rows(
                ids,
                weights.view(table_views.declared.dtype),
                count_updates(clocks.view(torch.int64).flatten()),
            )


def admit_loaded_rows(
    policy: RowRetention,
    table: Table,
    compute_squared_norms: Callable[[RowView, Tensor], Tensor],
    loaded_ids: Tensor,
    loaded_records: Tensor,
    step: int,
) -> Tensor:
    """Admit rows of a slice that were loaded from a checkpoint or an import, between steps. Return the ids to delete
    for them. loaded_ids (N,) unique; loaded_records (N, record_bytes) uint8; step: updates made before."""
    norms = None
    if policy.reads_norms:
        indices = torch.arange(len(loaded_ids), dtype=torch.int32)
        view = RowView(loaded_records.data_ptr(), table.record_bytes, table.width, table.dtype)
        norms = compute_squared_norms(view, indices)
    unique_ids: Tensor = policy.adopt(loaded_ids, step, norms).unique()
    return unique_ids


class MappedLookup:
    """Reader of a declaration's features in mapped, read-only rows, in a world of one. It plans no batch, pins nothing
    and builds no graph."""

    def __init__(self, declaration: EmbeddingDeclaration, rows: MappedRows) -> None:
        self.declaration = declaration
        self.rows = rows
        self.outputs = list_lookup_outputs(declaration)
        self.lookup_columns = build_lookup_columns(declaration)
        self.table_rows = torch.tensor([table.rows or 0 for table in declaration.tables])
        self.kernels = NativeKernels(declaration, self.lookup_columns, self.outputs, 1)
        # The native reader has no squares.
        self.reader = None
        if not any(self.lookup_columns.squared):
            self.reader = build_reader(declaration, self.lookup_columns, self.outputs)

    def read(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Return the same outputs as `Exchange.values`. Raises IdRangeError and DataError as training does, and
        CorruptionError and StorageError where a file of rows is damaged."""
        ids = batch.ids
        is_sharing = isinstance(batch.ids, SharedIds)
        if isinstance(ids, SharedIds):
            ids = ids.compact
        pooled = None
        if self.reader is not None:
            pooled = self.rows.read(self.reader, ids, batch.size, is_sharing=is_sharing)
        if pooled is None:
            pooled = self.read_checked(batch)
        self.rows.check_damage()
        return build_outputs(self.declaration, self.outputs, pooled, device, batch.dense)

    def read_checked(self, batch: Batch) -> list[Tensor]:
        """Return the pooled outputs, step by step: check ids, tensors and blocks of files, and name what is invalid."""
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
        return self.kernels.pool(lookups, (*self.rows.addresses_and_strides(), slots, None))


def build_reader(
    declaration: EmbeddingDeclaration, lookup_columns: LookupColumns, outputs: Sequence[Output]
) -> _native.MappedReader:
    """Build the native reader of a declaration's outputs in mapped tables."""
    reads, _ = list_reads(declaration, lookup_columns, outputs)
    return _native.MappedReader(
        Ids,
        [declaration.features[f].name for f in lookup_columns.features],
        lookup_columns.tables,
        lookup_columns.poolings,
        torch.tensor(
            [(r.column, r.part.column, r.part.dim, r.output, r.start) for r in reads],
            dtype=torch.int64,
        ),
        torch.tensor([output.width for output in outputs], dtype=torch.int64),
        declaration.tables[0].dtype,
        declaration.output,
    )
