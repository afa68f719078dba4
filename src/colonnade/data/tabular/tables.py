"""Tabular files of any kind: which one a path holds, its inferred schema, and options that outlive the day."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from colonnade.data.contract import Splits
from colonnade.data.tabular import csv, libsvm, parquet, tfrecord
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.files import find_files
from colonnade.data.tabular.infer import INFER_ROWS
from colonnade.data.tabular.opening import Format, infer_tables, settle_files
from colonnade.data.tabular.source import Splitting, TableSource
from colonnade.errors import ConfigError

FORMATS: dict[str, Callable[..., Format]] = {
    "csv": csv.csv_format,
    "parquet": parquet.parquet_format,
    "libsvm": libsvm.libsvm_format,
    "tfrecord": tfrecord.tfrecord_format,
}
"""By name in SOURCES: from the options of reading, which are keyword arguments, to the format."""
KINDS = {ending: kind for kind, make in FORMATS.items() for ending in make().endings}
"""By ending."""


def kind_of(path: str | Path) -> str:
    """Return the name in SOURCES by the first file's name. Raises ConfigError, DataError."""
    file = find_files(path, tuple(KINDS))[0]
    ending = file.suffix.lower()
    if ending in KINDS or ending == ".txt":
        return KINDS.get(ending, "csv")
    raise ConfigError(
        f"{file}: got a name that ends in none of {', '.join(KINDS)}; say which kind it is with "
        + " or ".join(f"--data {kind}" for kind in FORMATS)
    )


@dataclass(frozen=True, slots=True)
class TableHead:
    """First rows of files, and the schema to start from. `problem`: why there is no schema."""

    kind: str
    num_rows: int  # of all files
    num_bytes: int
    columns: Mapping[str, pa.Array]  # of the first INFER_ROWS rows
    declaration: Declaration | None
    left_out: Mapping[str, str]
    problem: str


def read_head(
    path: str | Path, kind: str | None = None, label: str | None = None, **options: Any
) -> TableHead:
    """Read the first rows and infer a schema. `options`: those of the format. Raises ConfigError, DataError."""
    kind = kind or kind_of(path)
    format = FORMATS[kind](**options)
    paths = find_files(path, format.endings)
    files = [format.open_file(file) for file in paths]
    first = next((file for file in files if len(file.lengths)), files[0])
    declaration, left_out, problem = None, {}, ""
    try:
        inferred = infer_tables(files, label)
        left_out = inferred.left_out
        declaration = settle_files(files, inferred.declaration, Splitting()).declaration
    except ConfigError as error:
        problem = str(error)
    return TableHead(
        kind,
        sum(int(file.lengths.sum()) for file in files),
        sum(file.stat().st_size for file in paths),
        first.head(INFER_ROWS) if len(first.lengths) else {},
        declaration,
        left_out,
        problem,
    )


def infer_schema(path: str | Path, label: str | None = None, **options: Any) -> Declaration:
    """Return a first guess, settled; `infer.py` has the rules. `options`: open_csv's delimiter, quote, names, ..."""
    head = read_head(path, None, label, **options)
    if head.declaration is None:
        raise ConfigError(head.problem)
    return head.declaration


def lasting_options(options: Mapping[str, Any], splits: Splits) -> dict[str, Any]:
    """`options` that open the same data in the same way from any folder, later: what a run folder has to record.

    The schema becomes plain values, whatever it was (a file, nothing); paths become absolute. Options of sources
    without a declared schema are left as they are.
    """
    kept = dict(options)
    if isinstance(splits.train, TableSource):
        kept.pop("label", None)
        kept["schema"] = splits.train.declaration.to_dict()
        for name in ("validation", "test"):
            if kept.get(name) is not None:
                kept[name] = os.path.realpath(Path(kept[name]).expanduser())
    return kept
