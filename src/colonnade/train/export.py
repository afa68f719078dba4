"""A commit as files that other programs read: model.json, the dense weights and every table's rows in safetensors.

DESTINATION/model.json                    config, schema of the data, tables and features
DESTINATION/dense.safetensors             the dense network's state_dict
DESTINATION/rows-<table number>.safetensors   ids (N,) int64 ascending; weights (N, width) of the table's dtype

Rows that were never trained are not there: their value follows from the seed (`Table`). Legend: N trained rows.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from colonnade import __version__
from colonnade.config import load_config
from colonnade.errors import ConfigError, StorageError
from colonnade.store.contract import RowBatch
from colonnade.store.disk import Disk, storage_error
from colonnade.store.log import LogBacking
from colonnade.store.slices import Joined
from colonnade.train.commits import resolve
from colonnade.train.states import load_state
from colonnade.train.stores import open_recorded_stores
from colonnade.train.wholeness import read_commit

FORMAT = "colonnade export"
VERSION = 1
SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def export_run(
    run_folder: Path | str, destination: Path | str, *, at: int | str | None = None
) -> dict[str, Any]:
    """Write a commit of a run, made by any number of ranks, to a new folder; returns what model.json says.

    `at`: a committed step, "best", "last" or None, which is the last. Needs neither the data nor the model's
    code, and memory for the ids of one table (16 bytes per row), not for its weights. All or nothing: the
    folder appears when it is whole. Raises CheckpointError without such a commit, ConfigError where the
    destination exists, StorageError for a disk that fails.
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
    header = read_commit(run_folder, step)
    config = run_folder / "config.yaml"
    model: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "colonnade": __version__,
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
            table["count"] = write_rows(
                place / table["file"], stores, width=table["dim"], dtype=table["dtype"]
            )
        finally:
            for store in stores:
                store.close()
        model["tables"].append(table)
    dense = load_state(run_folder / "commits" / f"{step:012d}" / "dense", header["run"])["model"]
    # Not safetensors' own file: only its owner may read that, and a full disk is no OSError there.
    content = save({k: v.contiguous().clone() for k, v in dense.items()}, metadata={"format": "pt"})
    (place / "dense.safetensors").write_bytes(content)
    (place / "model.json").write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
    return model


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


def write_rows(path: Path, stores: Sequence[LogBacking | Joined], *, width: int, dtype: str) -> int:
    """Every live row of one table's shards, ids ascending; returns how many.

    Two scans: the first finds each row's place, the second puts it there through a memory map.
    """
    row_bytes = width * ITEM_BYTES[dtype]
    ids = np.empty(sum(len(store) for store in stores), np.int64)
    start = 0
    for batch in _scan(stores):
        ids[start : start + len(batch.ids)] = batch.ids.numpy()
        start += len(batch.ids)
    ids.sort()
    shapes = {"ids": ("I64", [len(ids)]), "weights": (SAFETENSORS_DTYPES[dtype], [len(ids), width])}
    begin = _write_header(path, shapes, [ids.nbytes, len(ids) * row_bytes])
    if not len(ids):
        return 0
    out = np.memmap(path, np.uint8, "r+", offset=begin)
    out[: ids.nbytes] = ids.view(np.uint8)
    weights = out[ids.nbytes :].reshape(len(ids), row_bytes)
    for batch in _scan(stores):
        places = np.searchsorted(ids, batch.ids.numpy())
        weights[places] = batch.records[:, :row_bytes].numpy()
    out.flush()
    return len(ids)


def _scan(stores: Sequence[LogBacking | Joined]) -> Iterator[RowBatch]:
    for store in stores:
        yield from store.scan()


def _write_header(
    path: Path, shapes: dict[str, tuple[str, list[int]]], num_bytes: list[int]
) -> int:
    """A safetensors file with its space reserved and nothing but its header written; where the data begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
