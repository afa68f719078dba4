"""Export of a checkpoint as files that other programs read: model.json, the dense weights and every table's rows in
safetensors.

DESTINATION/model.json                    config, schema of the data, tables, features; checksums of all files
DESTINATION/dense.safetensors             the dense network's state_dict
DESTINATION/rows-<table number>.safetensors   ids (N,) int64 ascending; weights (N, width) of the table's dtype

Rows that were never trained are not there: their value follows from the seed (`Table`). Legend: N trained rows.

run/serving/<step>-<tag>-v<version>/     an export for predictors, written once; the tag tells checkpoints of one step
apart
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from colonnade import __version__
from colonnade.checkpoint.completeness import read_checkpoint
from colonnade.checkpoint.header import list_checkpoints, resolve
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import open_recorded_stores
from colonnade.config.run import load_config
from colonnade.errors import CheckpointError, ConfigError, NonFiniteError, StorageError
from colonnade.formats import VERSIONS
from colonnade.publish.exported import DENSE, FORMAT, MODEL, model_bytes
from colonnade.store.checksums import compute_checksums
from colonnade.store.contract import RowBatch
from colonnade.store.disk import Disk, storage_error
from colonnade.store.log import LogBacking
from colonnade.store.row_file import DTYPES
from colonnade.store.table_shards import Joined
from colonnade.table import ITEM_BYTES

GO_BACK = (
    "Export an older checkpoint (--at STEP), and train on from there with a smaller learning rate"
)


def export_run(
    run_folder: Path | str, destination: Path | str, *, at: int | str | None = None
) -> dict[str, Any]:
    """Write a checkpoint of a run, made by any number of ranks, to a new folder; returns what model.json says.

    `at`: a saved step, "best", "last" or None: the best where a validation part chose one, else the last.
    Needs neither the data nor the model's code, and memory for the ids of one table (16 bytes per row), not for its
    weights. All or nothing: the folder appears when it is whole. Raises CheckpointError without such a checkpoint,
    ConfigError where the destination exists, NonFiniteError for NaN or inf among the weights, StorageError for a disk
    that fails.
    """
    run_folder, destination = Path(run_folder), Path(destination)
    step = resolve(run_folder, at)
    if destination.exists():
        raise ConfigError(f"{destination} exists; give a folder that does not, or remove this one")
    destination.parent.mkdir(parents=True, exist_ok=True)
    place = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        place.mkdir()
        model = _write(run_folder, step, place)
        for path in [*place.iterdir(), place]:
            _sync(path)
        os.rename(place, destination)
        Disk().sync_dir(destination.parent)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, "write", destination) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return model


def _write(run_folder: Path, step: int, place: Path) -> dict[str, Any]:
    header = read_checkpoint(run_folder, step)
    config = run_folder / "config.yaml"
    model: dict[str, Any] = {
        "colonnade": __version__,
        "run": header["run"],
        "step": step,
        "config": load_config(config).model_dump() if config.exists() else None,
        "schema": header.get("schema"),
        "features": [
            {"name": name, "table": table, "pooling": pooling}
            for name, (table, pooling) in header["model"]["features"].items()
        ],
        "tables": [],
    }
    for number, (name, said) in enumerate(header["model"]["tables"].items()):
        stores = open_recorded_stores(run_folder, header, number)
        table = _table(number, name, said)
        try:
            table["count"] = write_rows(place / table["file"], stores, table, header["run"], step)
        finally:
            for store in stores:
                store.close()
        model["tables"].append(table)
    dense = load_state(run_folder / "checkpoints" / f"{step:012d}" / "dense", header["run"])[
        "model"
    ]
    check_dense(dense)
    # Not safetensors' own file: only its owner may read that, and a full disk is no OSError there.
    said = {"format": "pt", "checkpoint": f"{header['run']}@{step}"}
    content = save({k: v.contiguous().clone() for k, v in dense.items()}, metadata=said)
    (place / DENSE).write_bytes(content)
    names = [DENSE, *(table["file"] for table in model["tables"])]
    model["files"] = {name: asdict(compute_checksums(place / name)) for name in names}
    text = model_bytes(model)
    (place / MODEL).write_bytes(text)
    return json.loads(text)


def check_dense(weights: dict[str, Tensor]) -> None:
    """Raises NonFiniteError naming a weight that is NaN or inf."""
    for name, value in weights.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(
                f"dense weights {name}: got NaN or inf, which scores nothing. {GO_BACK}"
            )


def check_rows(table: str, ids: Tensor, weights: Tensor) -> None:
    """Raises NonFiniteError naming table and id of a row that is NaN or inf."""
    is_finite = torch.isfinite(weights).all(dim=1)
    if not bool(is_finite.all()):
        row = int((~is_finite).to(torch.uint8).argmax())
        raise NonFiniteError(
            f"table {table!r}: got NaN or inf in the row of id {int(ids[row])}, which scores nothing. {GO_BACK}"
        )


def _table(number: int, name: str, said: dict[str, Any]) -> dict[str, Any]:
    dims = said["dim"] if isinstance(said["dim"], dict) else {"": said["dim"]}
    parts, column = [], 0
    for part, dim in dims.items():
        parts.append({"name": part, "column": column, "dim": dim})
        column += dim
    return {
        "number": number,
        "name": name,
        "dim": column,  # of a whole row: the parts' side by side
        "rows": said["rows"],
        "parts": parts,
        "dtype": said["dtype"].split()[0],
        "optimizer": said["optimizer"],
        "file": f"rows-{number}.safetensors",
    }


def write_rows(
    path: Path, stores: Sequence[LogBacking | Joined], table: dict[str, Any], run: str, step: int
) -> int:
    """Every live row of one table's shards, ids ascending; returns how many. Raises NonFiniteError.

    Two scans: the first finds each row's place, the second puts it there through a memory map.
    """
    width, dtype = table["dim"], table["dtype"]
    row_bytes = width * ITEM_BYTES[dtype]
    ids = np.empty(sum(len(store) for store in stores), np.int64)
    start = 0
    for batch in _scan(stores):
        ids[start : start + len(batch.ids)] = batch.ids.numpy()
        start += len(batch.ids)
    ids.sort()
    shapes = {"ids": ("I64", [len(ids)]), "weights": (DTYPES[dtype], [len(ids), width])}
    # So that no two tables' files begin alike: one in the other's place is noticed when it is opened.
    said = {"format": "pt", "table": table["name"], "checkpoint": f"{run}@{step}"}
    begin = _write_header(path, said, shapes, [ids.nbytes, len(ids) * row_bytes])
    if not len(ids):
        return 0
    out = np.memmap(path, np.uint8, "r+", offset=begin)
    out[: ids.nbytes] = ids.view(np.uint8)
    weights = out[ids.nbytes :].reshape(len(ids), row_bytes)
    for batch in _scan(stores):
        places = np.searchsorted(ids, batch.ids.numpy())
        rows = batch.records[:, :row_bytes].contiguous()
        check_rows(table["name"], batch.ids, rows.view(getattr(torch, dtype)))
        weights[places] = rows.numpy()
    out.flush()
    return len(ids)


def _scan(stores: Sequence[LogBacking | Joined]) -> Iterator[RowBatch]:
    for store in stores:
        yield from store.scan()


def _write_header(
    path: Path,
    metadata: dict[str, str],
    shapes: dict[str, tuple[str, list[int]]],
    num_bytes: list[int],
) -> int:
    """A safetensors file with its space reserved and nothing but its header written; where the data begins."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for (name, (dtype, shape)), size in zip(shapes.items(), num_bytes, strict=True):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begins at a multiple of 64
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        begin = file.tell()
        if end:
            # Reserved now: a full disk is an error here, and a crash in the memory map.
            os.posix_fallocate(file.fileno(), begin, end)
    return begin


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


FOLDER = "serving"
ABANDONED_SECONDS = 3600.0


def exported(path: Path, *, at: int | str | None = None) -> Path:
    """`path` itself if it is an exported model; of a run folder the export of a checkpoint, made now if there is none.

    Raises CheckpointError where it is neither, or has no such checkpoint.
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
            "train first, or give another folder"
        )
    step = resolve(path, at)
    read_checkpoint(
        path, step
    )  # an export made before the checkpoint was damaged does not speak for it
    destination = path / FOLDER / _name(path, step)
    if destination.is_dir():
        return destination
    try:
        export_run(path, destination, at=step)
    except (ConfigError, StorageError):
        if not destination.is_dir():  # else another process was faster
            raise
    _drop_old(path)
    return destination


def _name(path: Path, step: int) -> str:
    """A run that went back and trained again checkpoints the same step anew."""
    tag = (path / "checkpoints" / f"{step:012d}.json").stat().st_mtime_ns
    return f"{step}-{tag:x}-v{VERSIONS[FORMAT]}"


def _drop_old(path: Path) -> None:
    """Exports of checkpoints that are no more, and what killed ones left behind. Who has mapped one keeps it."""
    current = {_name(path, step) for step in list_checkpoints(path)}
    for place in (path / FOLDER).iterdir():
        is_left = _is_abandoned(place) if place.name.startswith(".") else place.name not in current
        if place.is_dir() and is_left:
            shutil.rmtree(place, ignore_errors=True)


def _is_abandoned(place: Path) -> bool:
    """Nobody wrote there for an hour. A process number would not tell: another host may be writing."""
    try:
        newest = max(each.stat().st_mtime for each in (place, *place.iterdir()))
    except OSError:  # it went, or changes right now
        return False
    return time.time() - newest > ABANDONED_SECONDS
