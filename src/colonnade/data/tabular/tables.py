"""Detection of a path's format, schema inference, and options that a run records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from colonnade.data.contract import Splits
from colonnade.data.sources import FILE_OPTIONS
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.files import find_files
from colonnade.data.tabular.formats import FORMATS, find_format, list_endings
from colonnade.data.tabular.infer import INFER_ROWS
from colonnade.data.tabular.join import describe_reading, read_keyed_table
from colonnade.data.tabular.opening import infer_schema_from_files, open_days, resolve_schema
from colonnade.data.tabular.source import ReaderOptions
from colonnade.errors import ConfigError


def detect_file_format(path: str | Path) -> str:
    """Return the name in SOURCES of the format of the first file, by its ending. Raises ConfigError, DataError."""
    file = find_files(path, list_endings())[0]
    format = FORMATS["csv"] if file.suffix.lower() == ".txt" else find_format(file.suffix)
    if format is not None:
        return format.name
    raise ConfigError(
        f"{file}: got a name that ends in none of {', '.join(list_endings())}; say which kind it is with "
        + " or ".join(f"--data {kind}" for kind in FORMATS)
    )


@dataclass(frozen=True, slots=True)
class TableHead:
    """First rows of files and their inferred schema. `problem`: the reason if there is no schema."""

    kind: str
    num_rows: int  # of all files
    num_bytes: int
    columns: Mapping[str, pa.Array]  # of the first INFER_ROWS rows
    file_schema: FileSchema | None
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
    problem: str


def read_first_rows_and_schema(
    path: str | Path, kind: str | None = None, label: str | None = None, **options: Any
) -> TableHead:
    """Read the first rows and infer a schema. `options`: of the format. Raises ConfigError, DataError."""
    kind = kind or detect_file_format(path)
    format = FORMATS[kind]
    tables = [read_keyed_table(source, key) for key, source in options.pop("join", {}).items()]
    days = open_days(path, format, tables, options)
    files = [file for day in days for file in day]
    first = next((file for file in files if len(file.lengths)), files[0])
    inferred = file_schema = None
    problem = ""
    try:
        inferred = infer_schema_from_files(files, label)
        file_schema = resolve_schema(files, inferred.file_schema, ReaderOptions())[0].file_schema
    except ConfigError as error:
        problem = str(error)
    return TableHead(
        kind,
        sum(int(file.lengths.sum()) for file in files),
        sum(file.path.stat().st_size for file in files),
        first.read_head(INFER_ROWS) if len(first.lengths) else {},
        file_schema,
        {} if inferred is None else inferred.left_out,
        (*describe_reading(first), *(() if inferred is None else inferred.notes)),
        problem,
    )


def infer_schema(path: str | Path, label: str | None = None, **options: Any) -> FileSchema:
    """Infer a file schema by the rules of `infer.py`. `options`: open_csv's delimiter, quote, names, ..."""
    head = read_first_rows_and_schema(path, None, label, **options)
    if head.file_schema is None:
        raise ConfigError(head.problem)
    return head.file_schema


def build_portable_options(options: Mapping[str, Any], splits: Splits) -> dict[str, Any]:
    """Return `options` that open the same data in the same way later and from any folder, for the run folder.

    The schema, if a file or absent, becomes plain values; paths become absolute; `Splits.options` are added.
    """
    recorded = {**options, **splits.options}
    file_schema = getattr(splits.train, "file_schema", None)
    if file_schema is not None:
        recorded.pop("label", None)
        recorded["schema"] = file_schema.to_dict()
    if recorded.get("join"):
        recorded["join"] = {key: _make_portable(source) for key, source in recorded["join"].items()}
    for name in FILE_OPTIONS:
        if name in recorded:
            recorded[name] = _make_portable(recorded[name])
    return recorded


def _make_portable(source: Any) -> Any:
    """Return the absolute path of files; anything else as it is."""
    is_path = isinstance(source, str | Path)
    return os.path.realpath(Path(source).expanduser()) if is_path else source
