"""Reading of exports: model.json, which lists every file with checksums, dense weights and row files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from colonnade import _native
from colonnade.data.contract import Schema
from colonnade.errors import CorruptionError
from colonnade.files.checksums import FileChecksums, open_checked
from colonnade.files.durable import VerifiedFile, verify_file
from colonnade.files.untrusted import (
    FileName,
    StrictRecord,
    check_file_name,
    parse_stamped,
    read_regular,
)
from colonnade.formats import make_format_stamp
from colonnade.table import ITEM_BYTES, RowDtype

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "colonnade export"
MODEL = "model.json"
DENSE = "dense.safetensors"
REMEDY = "export the run again, or restore the folder from a copy"
LAST_LINES = b',\n  "crc32c": "%08x"\n}\n'

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class ExportedPart(StrictRecord):
    """Part of an exported table: some of its columns, with an optimizer of their own."""

    name: str
    column: Count
    dim: Positive


@dataclass(frozen=True, slots=True)
class ExportedTable(StrictRecord):
    """Table of an export, with the file of its `count` trained rows."""

    number: Count
    name: str
    dim: Positive
    rows: Positive | None
    parts: tuple[ExportedPart, ...]
    dtype: RowDtype
    optimizer: str
    file: FileName
    count: Count


@dataclass(frozen=True, slots=True)
class ExportedFeature(StrictRecord):
    """Feature: a column of ids, and the table for its lookups."""

    name: str
    table: str
    pooling: str


@dataclass(frozen=True, slots=True)
class Export(StrictRecord):
    """Content of model.json."""

    colonnade: str
    """Version of Colonnade that wrote the export."""
    run: str
    step: Count
    config: dict[str, Any] | None
    schema: Schema
    features: tuple[ExportedFeature, ...]
    tables: tuple[ExportedTable, ...]
    files: dict[FileName, FileChecksums]
    crc32c: str

    def __post_init__(self) -> None:
        names = [DENSE, *(table.file for table in self.tables), *list_join_files(self.config)]
        if sorted(names) != sorted(self.files):
            raise ValueError(f"got files {sorted(self.files)}, wanted {sorted(names)}")

    @property
    def row_files(self) -> list[tuple[str, FileChecksums]]:
        """Name and checksums of each table's file."""
        return [(table.file, self.files[table.file]) for table in self.tables]


def list_join_files(config: Mapping[str, Any] | None) -> list[str]:
    """Return the names of the files of tables that samples are joined with, by the configuration in an export.

    Raises ValueError for anything but names."""
    join: Any = config
    for section in ("data", "options", "join"):
        join = join.get(section) if isinstance(join, Mapping) else None
    join = {} if join is None else join
    if not isinstance(join, Mapping) or not all(isinstance(name, str) for name in join.values()):
        raise ValueError(f"got join={join!r}, wanted names of files by key")
    return list(join.values())


def serialize_model_json(fields: dict[str, Any]) -> bytes:
    """Return the content of model.json, whose last field is the checksum of all bytes before it."""
    stamped_fields = {**make_format_stamp(FORMAT), **fields}
    content = json.dumps(stamped_fields, indent=2).encode().removesuffix(b"\n}")
    return content + LAST_LINES % _native.crc32c(np.frombuffer(content, np.uint8))


def parse_model_json(content: bytes, path: Path) -> Export:
    """Parse the content of an export's model.json at `path`.

    Raises CheckpointError where it is another format's or version's, CorruptionError where it is damaged.
    """
    export = parse_stamped(Export, content, path, FORMAT, REMEDY)
    length = max(len(content) - len(LAST_LINES % 0), 0)
    body = content[:length]
    last_line = content[length:]
    wanted_line = LAST_LINES % _native.crc32c(np.frombuffer(body, np.uint8))
    if last_line != wanted_line:
        raise CorruptionError(
            f"{path}: got a last line {last_line[-40:]!r}, wanted {wanted_line!r} for the {length:,} bytes before it: "
            f"the file is torn or altered; {REMEDY}"
        )
    return export


def read_export(folder: Path) -> Export:
    """Read an export's model.json; its other files are not accessed.

    Raises CheckpointError, CorruptionError as `parse_model_json`, StorageError where it cannot be read.
    """
    return parse_model_json(read_regular(folder / MODEL), folder / MODEL)


def check_file_lengths(folder: Path, export: Export) -> None:
    """Compare the lengths of all files and tables with model.json, before that much memory is allocated.

    Raises CorruptionError, StorageError.
    """
    for name, checksums in export.files.items():
        open_checked(folder, name, checksums).file.close()
    for table in export.tables:
        size = table.count * (8 + table.dim * ITEM_BYTES[table.dtype])
        if size > export.files[table.file].bytes:
            raise CorruptionError(
                f"{folder / MODEL}: got {table.count:,} rows of width {table.dim:,} of table {table.name!r}, which "
                f"take {size:,} bytes, wanted at most the {export.files[table.file].bytes:,} of {table.file}; {REMEDY}"
            )


def read_dense(folder: Path, export: Export) -> dict[str, Tensor]:
    """Read and check the dense weights. Raises CorruptionError, StorageError."""
    from safetensors.torch import load  # imported here, because `verify_each_file` needs no torch

    file = open_checked(folder, DENSE, export.files[DENSE])
    content = file.read(0, file.num_bytes).tobytes()
    try:
        return load(content)
    except Exception as error:  # safetensors raises its own kind
        raise CorruptionError(
            f"{file.path}: got {' '.join(str(error).split())}; {REMEDY}"
        ) from None


def verify_each_file(folder: Path) -> Iterator[VerifiedFile]:
    """Read every byte of an export and yield each file.

    Raises CheckpointError, CorruptionError, StorageError if model.json, which lists all files, cannot be read.
    """
    export = read_export(folder)
    yield verify_file(folder / MODEL, lambda: None)
    for name, checksums in export.files.items():

        def check(name: str = name, checksums: FileChecksums = checksums) -> None:
            open_checked(folder, name, checksums).check_all()

        yield verify_file(folder / check_file_name(name, folder / MODEL), check)
