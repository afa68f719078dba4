"""Rows in and out: nn.Embedding and nn.EmbeddingBag weights, exported files, records of other runs.

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
from colonnade.pipeline.row_access import adopt_rows
from colonnade.publish.exported import ExportedTable, read_dense, read_export
from colonnade.store.records import fresh_records
from colonnade.store.row_file import open_row_file
from colonnade.store.table_shards import RecordShape
from colonnade.table import Table

RUN = 65536  # rows at a time


@torch.no_grad()
def load_rows(
    collection: EmbeddingCollection,
    table: str,
    weights: Tensor | nn.Embedding | nn.EmbeddingBag,
    ids: Tensor | None = None,
) -> None:
    """Collective, between steps: give rows of a table these weights, as if they had just been trained to them.

    weights (N, D), an nn.Embedding or an nn.EmbeddingBag, the same on every rank, which keeps what it owns; ids (N,)
    int64, each once, by default 0 .. N-1. The rows' optimizer state starts anew (FTRL's is what gives these weights)
    and their clocks are 1. Parts of a table lie side by side in D. Raises ConfigError, DataError or IdRangeError
    with nothing changed.
    """
    collection.ensure_open()
    t = collection.declaration.table_number(table)
    kind = collection.tables[t]
    _check_owned(collection, t)
    values = weights.weight if isinstance(weights, nn.Embedding | nn.EmbeddingBag) else weights
    values = values.detach().cpu()
    if ids is None:
        ids = torch.arange(len(values))
    _check(kind, values, ids)
    collection.pipeline.updates.settle()
    for start in range(0, len(ids), RUN):
        part = slice(start, start + RUN)
        put_records(collection, t, ids[part], fresh_records(kind, values[part]))


def to_embedding(
    collection: EmbeddingCollection, table: str, ids: Tensor | None = None
) -> nn.Embedding:
    """Collective: a copy of rows as a plain nn.Embedding; its row i is that of ids[i].

    By default all rows of a vocabulary table, those never trained included. An open table needs `ids`
    (`trained_ids` lists those there are).
    """
    collection.ensure_open()
    kind = collection.tables[collection.declaration.table_number(table)]
    if ids is None:
        if kind.rows is None:
            raise ConfigError(
                f"table {table!r} is open: say which ids become rows, e.g. trained_ids(collection, {table!r})"
            )
        ids = torch.arange(kind.rows)
    out = torch.empty(len(ids), kind.width, dtype=getattr(torch, kind.dtype))
    for start in range(0, len(ids), RUN):
        out[start : start + RUN] = collection.rows(table, ids[start : start + RUN])
    return nn.Embedding.from_pretrained(out, freeze=False)


def trained_ids(collection: EmbeddingCollection, table: str) -> Tensor:
    """Collective: (N,) int64 ascending, the ids of all ranks' rows that were ever trained or loaded."""
    collection.ensure_open()
    t = collection.declaration.table_number(table)
    is_told = collection.mesh.rank in collection.plan.tables[t].sharding.holders
    mine = [rows.ids for rows in collection.scan(table)] if is_told else []
    data = torch.cat([*mine, torch.empty(0, dtype=torch.int64)]).numpy().tobytes()
    said = collection.mesh.all_gather_bytes("control", data)
    parts = [torch.from_numpy(np.frombuffer(part, np.int64).copy()) for part in said]
    return torch.cat(parts).unique()  # ascending; every holder tells of its copies of hot rows


@torch.no_grad()
def load_export(model: nn.Module, collection: EmbeddingCollection, folder: Path | str) -> None:
    """Collective: take dense weights and rows from a folder that `export_run` wrote, a run of rows at a time.

    Everything must be there, fit and be as it was written, which is checked first, else CheckpointError,
    CorruptionError or StorageError with nothing changed, or ConfigError as `load_rows`; to take what agrees of another
    model, warm-start a run from its checkpoints instead.
    """
    collection.ensure_open()
    folder = Path(folder)
    export = read_export(folder)
    tables = {table.name: table for table in export.tables}
    for t, kind in enumerate(collection.tables):
        _check_owned(collection, t)
        got = tables.get(kind.name)
        if got is None or got.dim != kind.width or (got.rows or 0) > (kind.rows or 2**63):
            raise CheckpointError(
                f"{folder} has {_words(got)} for table {kind.name!r}, wanted width {kind.width} and "
                f"{'any' if kind.rows is None else kind.rows} rows"
            )
    dense = read_dense(folder, export)
    own = dense_weights(model)
    got_shapes = {name: tuple(value.shape) for name, value in dense.items()}
    wanted = {name: tuple(value.shape) for name, value in own.items()}
    if got_shapes != wanted:
        name = next(n for n in {**wanted, **got_shapes} if got_shapes.get(n) != wanted.get(n))
        raise CheckpointError(
            f"{folder}: got dense weights {name} {got_shapes.get(name)}, wanted {wanted.get(name)}"
        )
    files = []
    for kind in collection.tables:
        said = tables[kind.name]
        stored = replace(kind, dtype=said.dtype, master=False)
        files.append(open_row_file(folder, said.file, export.files[said.file], stored))
    for file in files:
        for _ in file.ids():
            pass
        file.file.check_all()
    for name, value in own.items():
        value.copy_(dense[name])
    for kind, file in zip(collection.tables, files, strict=True):
        for start in range(0, file.num_rows, RUN):
            end = min(start + RUN, file.num_rows)
            ids = torch.from_numpy(file.read_ids(start, end))
            load_rows(collection, kind.name, file.read_weights(start, end), ids)


def put_records(collection: EmbeddingCollection, t: int, ids: Tensor, records: Tensor) -> None:
    """Those rows of table t that this rank owns, or its slices of them, become these records (N, record_bytes) of whole
    rows; they are as new as just trained ones, and where the table has admission, admitted."""
    run = max(1, min(RUN, collection.plan.tables[t].capacity_rows))
    kind, laid = collection.tables[t], collection.slices.laid
    for number in collection.slices.of_table[t]:
        owned = collection.shards[number].owns(ids, kind.rows)
        here, theirs = ids[owned], records[owned]
        if laid[number].table is not kind:
            theirs = theirs[:, RecordShape.of(kind).bytes_of(*laid[number].columns)]
        for start in range(0, len(here), run):
            part = slice(start, start + run)
            collection.store.put(number, here[part], theirs[part].contiguous())
            adopt_rows(
                collection.opened, number, here[part], theirs[part].contiguous(), collection.step
            )


def _check_owned(collection: EmbeddingCollection, t: int) -> None:
    """Refuse to load rows of a table that ranks may have cached, since they would go on with the cached rows. Raises
    ConfigError."""
    cached, numbers = collection.cached, collection.slices.of_table[t]
    if cached is not None and cached.number and any(cached.has_copies[each] for each in numbers):
        raise ConfigError(
            f"load_rows: got rows of table {collection.tables[t].name!r} that ranks may have copies of, which would "
            "stay as they are; load before the first batch, or leave plan.cache out for this table"
        )


def _check(table: Table, weights: Tensor, ids: Tensor) -> None:
    if weights.dim() != 2 or weights.shape[1] != table.width or not weights.is_floating_point():
        raise ConfigError(
            f"table {table.name!r}: got weights {tuple(weights.shape)} {weights.dtype}, "
            f"wanted (N, {table.width}) floats"
        )
    if ids.shape != (len(weights),) or ids.dtype != torch.int64:
        raise ConfigError(
            f"table {table.name!r}: got ids {tuple(ids.shape)} {ids.dtype}, wanted ({len(weights)},) int64"
        )
    finite = torch.isfinite(weights).all(dim=1)
    if not finite.all():
        row = int((~finite).to(torch.uint8).argmax())
        raise DataError(f"table {table.name!r}: got NaN or inf in row {row} of the weights")
    if not len(ids):
        return
    if table.rows is not None and not (ids.min() >= 0 and ids.max() < table.rows):
        raise IdRangeError(
            f"table {table.name!r}: got ids {int(ids.min())} .. {int(ids.max())}, wanted 0 .. {table.rows - 1}"
        )
    ordered = ids.sort().values
    if (ordered[1:] == ordered[:-1]).any():
        twice = int(ordered[:-1][ordered[1:] == ordered[:-1]][0])
        raise DataError(f"table {table.name!r}: got id {twice} more than once, wanted each once")


def _words(table: ExportedTable | None) -> str:
    if table is None:
        return "nothing"
    return f"width {table.dim} and {'any' if table.rows is None else table.rows} rows"
