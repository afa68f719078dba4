"""Transfer of rows: load and copy nn.Embedding weights, exported files, and records of other runs.

Legend: N rows, D width of a table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.checkpoint.fingerprint import dense_weights
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ConfigError, DataError, IdRangeError
from colonnade.lookup.row_access import admit_loaded_rows
from colonnade.publish.model_files import ExportedTable, read_dense, read_export
from colonnade.store.policies import RowRetention
from colonnade.store.records import build_fresh_records
from colonnade.store.row_file import open_row_file
from colonnade.store.table_shards import RecordShape
from colonnade.table import Table

ROWS_PER_CHUNK = 65536  # rows at a time


@torch.no_grad()
def load_rows(
    collection: EmbeddingCollection,
    table: str,
    weights: Tensor | nn.Embedding | nn.EmbeddingBag,
    ids: Tensor | None = None,
) -> None:
    """Load weights into rows of a table. Collective, between steps.

    weights (N, D), an nn.Embedding or an nn.EmbeddingBag, the same on every rank; each rank takes the rows it owns.
    ids (N,) int64, without duplicates, by default 0 .. N-1. The rows count as just trained, but their optimizer begins
    anew: its state (for FTRL, the state that gives these weights) and its count of steps. Parts of a table are
    concatenated in D. Raises ConfigError, DataError or IdRangeError with nothing changed.
    """
    collection.ensure_open()
    table_index = collection.declaration.table_index(table)
    declared = collection.tables[table_index]
    values = weights.weight if isinstance(weights, nn.Embedding | nn.EmbeddingBag) else weights
    values = values.detach().cpu()
    if ids is None:
        ids = torch.arange(len(values))
    _check_weights_and_ids(declared, values, ids)
    collection.pipeline.drop_copies()
    for start in range(0, len(ids), ROWS_PER_CHUNK):
        chunk = slice(start, start + ROWS_PER_CHUNK)
        store_records(
            collection, table_index, ids[chunk], build_fresh_records(declared, values[chunk])
        )


def to_embedding(
    collection: EmbeddingCollection, table: str, ids: Tensor | None = None
) -> nn.Embedding:
    """Copy rows to a plain nn.Embedding; its row i is that of ids[i]. Collective.

    By default it has all rows of a vocabulary table, including untrained ones. An open table needs `ids`
    (`trained_ids` lists them).
    """
    collection.ensure_open()
    declared = collection.tables[collection.declaration.table_index(table)]
    if ids is None:
        if declared.rows is None:
            raise ConfigError(
                f"table {table!r} is open: say which ids become rows, e.g. trained_ids(collection, {table!r})"
            )
        ids = torch.arange(declared.rows)
    weights = torch.empty(len(ids), declared.width, dtype=getattr(torch, declared.dtype))
    for start in range(0, len(ids), ROWS_PER_CHUNK):
        weights[start : start + ROWS_PER_CHUNK] = collection.rows(
            table, ids[start : start + ROWS_PER_CHUNK]
        )
    return nn.Embedding.from_pretrained(weights, freeze=False)


def trained_ids(collection: EmbeddingCollection, table: str) -> Tensor:
    """Return the ids of all rows that were trained or loaded on any rank, (N,) int64 ascending. Collective."""
    collection.ensure_open()
    table_index = collection.declaration.table_index(table)
    has_rows = collection.mesh.rank in collection.plan.tables[table_index].sharding.row_owners
    own_ids = [rows.ids for rows in collection.scan(table)] if has_rows else []
    data = torch.cat([*own_ids, torch.empty(0, dtype=torch.int64)]).numpy().tobytes()
    gathered = collection.mesh.all_gather_bytes("control", data)
    parts = [torch.from_numpy(np.frombuffer(part, np.int64).copy()) for part in gathered]
    return torch.cat(parts).unique()  # ascending; several ranks send the ids of replicated hot rows


@torch.no_grad()
def load_export(model: nn.Module, collection: EmbeddingCollection, folder: Path | str) -> None:
    """Load dense weights and rows from a folder that `export_run` wrote, in chunks of rows. Collective.

    All tables and weights must exist and fit, and all bytes are checked first: raises CheckpointError, CorruptionError
    or StorageError with nothing changed, or ConfigError as `load_rows`. To load a part of another model, warm-start a
    run from its checkpoints instead.
    """
    collection.ensure_open()
    folder = Path(folder)
    export = read_export(folder)
    tables = {table.name: table for table in export.tables}
    for declared in collection.tables:
        exported = tables.get(declared.name)
        if (
            exported is None
            or exported.dim != declared.width
            or (exported.rows or 0) > (declared.rows or 2**63)
        ):
            raise CheckpointError(
                f"{folder} has {_describe_table(exported)} for table {declared.name!r}, wanted width {declared.width} "
                f"and {'any' if declared.rows is None else declared.rows} rows"
            )
    exported_dense = read_dense(folder, export)
    own_dense = dense_weights(model)
    exported_shapes = {name: tuple(value.shape) for name, value in exported_dense.items()}
    own_shapes = {name: tuple(value.shape) for name, value in own_dense.items()}
    if exported_shapes != own_shapes:
        name = next(
            n
            for n in {**own_shapes, **exported_shapes}
            if exported_shapes.get(n) != own_shapes.get(n)
        )
        raise CheckpointError(
            f"{folder}: got dense weights {name} {exported_shapes.get(name)}, wanted {own_shapes.get(name)}"
        )
    files = []
    for declared in collection.tables:
        exported_table = tables[declared.name]
        stored = replace(declared, dtype=exported_table.dtype, master=False)
        files.append(
            open_row_file(folder, exported_table.file, export.files[exported_table.file], stored)
        )
    for file in files:
        for _ in file.ids():
            pass
        file.file.check_all()
    for name, value in own_dense.items():
        value.copy_(exported_dense[name])
    for declared, file in zip(collection.tables, files, strict=True):
        for start in range(0, file.num_rows, ROWS_PER_CHUNK):
            end = min(start + ROWS_PER_CHUNK, file.num_rows)
            ids = torch.from_numpy(file.read_ids(start, end))
            load_rows(collection, declared.name, file.read_weights(start, end), ids)


def store_records(
    collection: EmbeddingCollection, table_index: int, row_ids: Tensor, row_records: Tensor
) -> None:
    """Store rows of one table that this rank owns, or its slices of them. row_ids (N,), row_records (N, record_bytes).

    The rows count as just trained, and are admitted if the table has an admission policy.
    """
    rows_per_put = max(1, min(ROWS_PER_CHUNK, collection.plan.tables[table_index].capacity_rows))
    declared = collection.tables[table_index]
    shards = collection.slices.table_shards
    for shard_index in collection.slices.slices_of_table[table_index]:
        owned = collection.shards[shard_index].owns(row_ids, declared.rows)
        owned_ids = row_ids[owned]
        owned_records = row_records[owned]
        if shards[shard_index].table is not declared:
            owned_records = owned_records[
                :, RecordShape.of(declared).bytes_of(*shards[shard_index].columns)
            ]
        for start in range(0, len(owned_ids), rows_per_put):
            chunk = slice(start, start + rows_per_put)
            collection.store.write_rows(
                shard_index, owned_ids[chunk], owned_records[chunk].contiguous()
            )
            if isinstance(policy := collection.policies.get(shard_index), RowRetention):
                evicted = admit_loaded_rows(
                    policy,
                    shards[shard_index].table,
                    collection.exchange.squared_norms,
                    owned_ids[chunk],
                    owned_records[chunk].contiguous(),
                    collection.step,
                )
                collection.store.delete(shard_index, evicted)


def _check_weights_and_ids(table: Table, weights: Tensor, ids: Tensor) -> None:
    """Raise ConfigError, DataError or IdRangeError for wrong weights or ids."""
    if weights.dim() != 2 or weights.shape[1] != table.width or not weights.is_floating_point():
        raise ConfigError(
            f"table {table.name!r}: got weights {tuple(weights.shape)} {weights.dtype}, "
            f"wanted (N, {table.width}) floats"
        )
    if ids.shape != (len(weights),) or ids.dtype != torch.int64:
        raise ConfigError(
            f"table {table.name!r}: got ids {tuple(ids.shape)} {ids.dtype}, wanted ({len(weights)},) int64"
        )
    is_finite = torch.isfinite(weights).all(dim=1)
    if not is_finite.all():
        row = int((~is_finite).to(torch.uint8).argmax())
        raise DataError(f"table {table.name!r}: got NaN or inf in row {row} of the weights")
    if not len(ids):
        return
    if table.rows is not None and not (ids.min() >= 0 and ids.max() < table.rows):
        raise IdRangeError(
            f"table {table.name!r}: got ids {int(ids.min())} .. {int(ids.max())}, wanted 0 .. {table.rows - 1}"
        )
    ordered = ids.sort().values
    if (ordered[1:] == ordered[:-1]).any():
        repeated_id = int(ordered[:-1][ordered[1:] == ordered[:-1]][0])
        raise DataError(
            f"table {table.name!r}: got id {repeated_id} more than once, wanted each once"
        )


def _describe_table(table: ExportedTable | None) -> str:
    if table is None:
        return "nothing"
    return f"width {table.dim} and {'any' if table.rows is None else table.rows} rows"
