"""Export of a checkpoint as files that other programs read: model.json, the dense weights and every table's rows in
safetensors.

DESTINATION/model.json                    config, schema of the data, tables, features; checksums of all files
DESTINATION/dense.safetensors             the dense network's state_dict
DESTINATION/rows-<table number>.safetensors   ids (N,) int64 ascending; weights (N, width) of the table's dtype
DESTINATION/join-<number>.arrow           a table of data.options.join, whose place the config then gives as this name

Untrained rows are not exported: their value follows from the seed (`Table`). Legend: N trained rows.

run/serving/<step>-<tag>-v<version>/     an export for predictors, written once; the tag distinguishes checkpoints of
                                         the same step
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from colonnade import __version__
from colonnade.checkpoint.completeness import read_checkpoint
from colonnade.checkpoint.header import list_checkpoints, resolve_step, suggest_group
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import open_recorded_stores
from colonnade.config.run import load_config
from colonnade.errors import CheckpointError, ConfigError, NonFiniteError, StorageError
from colonnade.files.checksums import compute_checksums
from colonnade.files.disk import Disk, check_free_space, storage_error
from colonnade.formats import VERSIONS
from colonnade.publish.model_files import (
    DENSE,
    FORMAT,
    MODEL,
    list_join_files,
    serialize_model_json,
)
from colonnade.store.contract import RowBatch
from colonnade.store.log.backing import LogBacking
from colonnade.store.row_file import DTYPES
from colonnade.store.table_shards import ColumnShardReader
from colonnade.table import ITEM_BYTES

REMEDY_NON_FINITE = (
    "Export an older checkpoint (--at STEP), and train on from there with a smaller learning rate"
)


def export_run(
    run_folder: Path | str, destination: Path | str, *, at: int | str | None = None
) -> dict[str, Any]:
    """Export a checkpoint of a run, saved by any number of ranks, to a new folder; return the content of model.json.

    at: a saved step, "best", "last" or None: the best by the validation part if there is one, else the last.
    Needs neither the data nor the model's code. Needs memory for the ids of one table (16 bytes per row), not for its
    weights. The folder appears when it is complete. Raises CheckpointError without such a checkpoint, ConfigError if
    the destination exists, NonFiniteError for NaN or inf among the weights, StorageError for a failing disk.
    """
    run_folder = Path(run_folder)
    destination = Path(destination)
    step = resolve_step(run_folder, at)
    with stage_folder(destination) as staged:
        staged.mkdir()
        return _write_export(run_folder, step, staged)


@contextmanager
def stage_folder(destination: Path) -> Iterator[Path]:
    """Yield the path of a folder to make and fill; rename it to `destination` after the block, or leave nothing.

    Raises ConfigError if the destination exists, StorageError if it cannot be written.
    """
    if destination.exists():
        raise ConfigError(f"{destination} exists; give a folder that does not, or remove this one")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        staged = temporary / destination.name
        yield staged
        for path in [*staged.rglob("*"), staged]:
            sync_to_disk(path)
        os.rename(staged, destination)
        Disk().sync_dir(destination.parent)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, "write", destination) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_export(run_folder: Path, step: int, folder: Path) -> dict[str, Any]:
    """Write all files of an export into `folder`; return the content of model.json."""
    header = read_checkpoint(run_folder, step)
    config_path = run_folder / "config.yaml"
    model: dict[str, Any] = {
        "colonnade": __version__,
        "run": header["run"],
        "step": step,
        "config": None,
        "schema": header.get("schema"),
        "features": [
            {"name": name, "table": table, "pooling": pooling}
            for name, (table, pooling) in header["model"]["features"].items()
        ],
        "tables": [],
    }
    if config_path.exists():
        model["config"] = load_config(config_path).model_dump()
        join = model["config"]["data"]["options"].get("join") or {}
        for number, (key, source) in enumerate(join.items()):
            # Imported here, because a predictor of other models needs no reader of files.
            from colonnade.data.tabular.join import read_keyed_table

            join[key] = f"join-{number}.arrow"
            read_keyed_table(source, key).write_file(folder / join[key])
    for table_index, (name, table_header) in enumerate(header["model"]["tables"].items()):
        stores = open_recorded_stores(run_folder, header, table_index)
        table = _build_table_entry(table_index, name, table_header)
        try:
            table["count"] = write_rows(folder / table["file"], stores, table, header["run"], step)
        finally:
            for store in stores:
                store.close()
        model["tables"].append(table)
    dense = load_state(run_folder / "checkpoints" / f"{step:012d}" / "dense", header["run"])[
        "model"
    ]
    check_dense_finite(dense)
    # Not safetensors' save_file: its file is readable by the owner only, and a full disk raises no OSError.
    metadata = {"format": "pt", "checkpoint": f"{header['run']}@{step}"}
    content = save({k: v.contiguous().clone() for k, v in dense.items()}, metadata=metadata)
    (folder / DENSE).write_bytes(content)
    names = [
        DENSE,
        *(table["file"] for table in model["tables"]),
        *list_join_files(model["config"]),
    ]
    model["files"] = {name: asdict(compute_checksums(folder / name)) for name in names}
    text = serialize_model_json(model)
    (folder / MODEL).write_bytes(text)
    return json.loads(text)


def check_dense_finite(weights: dict[str, Tensor]) -> None:
    """Raise NonFiniteError that names a dense weight with NaN or inf."""
    for name, value in weights.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(
                f"dense weights {name}: got NaN or inf, which scores nothing. {REMEDY_NON_FINITE}"
            )


def check_rows_finite(table: str, ids: Tensor, weights: Tensor) -> None:
    """Raise NonFiniteError that names the table and id of a row with NaN or inf."""
    is_finite = torch.isfinite(weights).all(dim=1)
    if not bool(is_finite.all()):
        row = int((~is_finite).to(torch.uint8).argmax())
        raise NonFiniteError(
            f"table {table!r}: got NaN or inf in the row of id {int(ids[row])}, which scores nothing. "
            f"{REMEDY_NON_FINITE}"
        )


def _build_table_entry(
    table_index: int, table_name: str, table_header: dict[str, Any]
) -> dict[str, Any]:
    """Return the entry of a table in model.json, without its row count."""
    dims = (
        table_header["dim"] if isinstance(table_header["dim"], dict) else {"": table_header["dim"]}
    )
    parts = []
    column = 0
    for part, dim in dims.items():
        parts.append({"name": part, "column": column, "dim": dim})
        column += dim
    return {
        "number": table_index,
        "name": table_name,
        "dim": column,  # of a whole row: the parts' side by side
        "rows": table_header["rows"],
        "parts": parts,
        "dtype": table_header["dtype"].split()[0],
        "optimizer": table_header["optimizer"],
        "file": f"rows-{table_index}.safetensors",
    }


def write_rows(
    path: Path,
    table_stores: Sequence[LogBacking | ColumnShardReader],
    table_entry: dict[str, Any],
    run_name: str,
    step: int,
) -> int:
    """Write every live row of one table's shards, ids ascending; return their number. Raises NonFiniteError.

    Scans twice: the first scan sorts ids, the second copies rows to their positions through a memory map.
    """
    width = table_entry["dim"]
    dtype = table_entry["dtype"]
    row_bytes = width * ITEM_BYTES[dtype]
    ids = np.empty(sum(len(store) for store in table_stores), np.int64)
    start = 0
    for batch in _scan_all(table_stores):
        ids[start : start + len(batch.ids)] = batch.ids.numpy()
        start += len(batch.ids)
    ids.sort()
    shapes = {"ids": ("I64", [len(ids)]), "weights": (DTYPES[dtype], [len(ids), width])}
    # Metadata differs between tables, so that swapped files are detected when they are opened.
    metadata = {"format": "pt", "table": table_entry["name"], "checkpoint": f"{run_name}@{step}"}
    data_offset = _write_header(path, metadata, shapes, [ids.nbytes, len(ids) * row_bytes])
    if not len(ids):
        return 0
    mapped = np.memmap(path, np.uint8, "r+", offset=data_offset)
    mapped[: ids.nbytes] = ids.view(np.uint8)
    weights = mapped[ids.nbytes :].reshape(len(ids), row_bytes)
    for batch in _scan_all(table_stores):
        positions = np.searchsorted(ids, batch.ids.numpy())
        rows = batch.records[:, :row_bytes].contiguous()
        check_rows_finite(table_entry["name"], batch.ids, rows.view(getattr(torch, dtype)))
        weights[positions] = rows.numpy()
    mapped.flush()
    return len(ids)


def _scan_all(stores: Sequence[LogBacking | ColumnShardReader]) -> Iterator[RowBatch]:
    for store in stores:
        yield from store.scan()


def _write_header(
    path: Path,
    metadata: dict[str, str],
    tensor_shapes: dict[str, tuple[str, list[int]]],
    tensor_bytes: list[int],
) -> int:
    """Write the header of a safetensors file and reserve space for its data; return the offset of the data."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data_bytes = 0
    for (name, (dtype, shape)), size in zip(tensor_shapes.items(), tensor_bytes, strict=True):
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [data_bytes, data_bytes + size],
        }
        data_bytes += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begins at a multiple of 64
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        data_offset = file.tell()
        if data_bytes:
            check_free_space(path.parent, data_bytes)
            # Reserve the space now: a full disk raises here, but would crash in the memory map.
            os.posix_fallocate(file.fileno(), data_offset, data_bytes)
    return data_offset


def sync_to_disk(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


FOLDER = "serving"
ABANDONED_SECONDS = 3600.0


def export_if_missing(path: Path, *, at: int | str | None = None) -> Path:
    """Return `path` if it is an export; for a run folder, the export of a checkpoint, which is written if missing.

    Raises CheckpointError if it is neither, or has no such checkpoint.
    """
    if (path / MODEL).exists():
        if at is not None:
            raise ConfigError(
                f"{path} is an exported model and holds one checkpoint; leave --at out, or give the run folder"
            )
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder; give a run folder or one that `colonnade export` wrote"
        )
    if not (path / "checkpoints").is_dir():
        raise CheckpointError(
            f"{path} is neither a run folder with a checkpoint nor an exported model; "
            f"train first, or give another folder{suggest_group(path)}"
        )
    step = resolve_step(path, at)
    read_checkpoint(path, step)  # an export does not show whether its checkpoint was damaged later
    destination = path / FOLDER / _export_name(path, step)
    if destination.is_dir():
        return destination
    try:
        export_run(path, destination, at=step)
    except (ConfigError, StorageError):
        if not destination.is_dir():  # else another process was faster
            raise
    _delete_orphaned_exports(path)
    return destination


def _export_name(path: Path, step: int) -> str:
    """Return the folder name of an export. The tag differs if a run was resumed earlier and saved the step again."""
    tag = (path / "checkpoints" / f"{step:012d}.json").stat().st_mtime_ns
    return f"{step}-{tag:x}-v{VERSIONS[FORMAT]}"


def _delete_orphaned_exports(path: Path) -> None:
    """Delete exports of deleted checkpoints and of killed writers. Processes with mapped files can still read them."""
    current = {_export_name(path, step) for step in list_checkpoints(path)}
    for export_folder in (path / FOLDER).iterdir():
        is_obsolete = (
            _is_abandoned(export_folder)
            if export_folder.name.startswith(".")
            else export_folder.name not in current
        )
        if export_folder.is_dir() and is_obsolete:
            shutil.rmtree(export_folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether a folder is unchanged for an hour. A process id does not help: another host may be writing."""
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it is deleted or changes right now
        return False
    return time.time() - newest > ABANDONED_SECONDS
