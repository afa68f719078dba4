"""Tabular files of any format as one sequence of blocks.

A block is the unit of reading: a row group, or some megabytes of text. Blocks are numbered over all
files, in the natural order of the files' paths (day_2 before day_10).
"""

from __future__ import annotations

import glob
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from colonnade.data.lines import check_regular_file
from colonnade.data.tabular.arrow_types import combine_chunks, replace_null_type
from colonnade.data.tabular.chunk import Chunk
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import (
    InvalidValue,
    SplitField,
    encode_block,
    encode_split_keys,
    parse_times,
    transform_numbers,
)
from colonnade.data.tabular.fields import Number, Time
from colonnade.errors import ConfigError, DataError

T = TypeVar("T")


class TableFile(ABC):
    """Indexed file, the base of one class per format: plain values that can be sent to other processes."""

    __slots__ = ()

    if TYPE_CHECKING:  # fields in some formats, which a property of the base would give a default

        @property
        def path(self) -> Path: ...

        @property
        def names(self) -> Sequence[str]:
            """Names of the columns."""
            ...

        @property
        def header_types(self) -> Mapping[str, str]:
            """Types of columns that the header gives (infer.TYPES), by name."""
            ...

        @property
        def lengths(self) -> NDArray[np.int64]:
            """Number of samples of each block, 1 or more (blocks,)."""
            ...

    @property
    def column_types(self) -> Mapping[str, pa.DataType]:
        """Arrow types of the columns that have one; none in text, which is read as the schema says."""
        return {}

    @property
    def delimiter(self) -> str:
        """Delimiter of text; "" in files of other formats."""
        return ""

    def read_head(self, num_rows: int) -> Mapping[str, pa.Array]:
        """Return the first rows of a file with rows, all columns. Raises DataError."""
        return read_first_rows(self, num_rows)

    def bind_schema(self, file_schema: FileSchema) -> TableFile:
        """Return the file as read under a schema with all dtypes set; its columns are checked afterwards."""
        return self

    @abstractmethod
    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        """Return arrays of lengths[block_index] values. Called from any thread. Raises DataError, InvalidValue."""

    def describe_row(self, block: int, row: int) -> str:
        """Return the position of a row for messages: "line 7" of text, "record 5" or "row 5" else."""
        return f"row {int(self.lengths[:block].sum()) + row}"


@dataclass(frozen=True, slots=True, eq=False)
class TableFiles:
    """Files read under one schema."""

    file_schema: FileSchema
    files: tuple[TableFile, ...]
    lengths: NDArray[np.int64]  # (blocks of all files,)
    bounds: NDArray[np.int64]  # (files + 1,): file i has the blocks bounds[i] .. bounds[i + 1] - 1
    split_field: SplitField | None = None  # encoded as Chunk.split_key

    def read_chunk(self, block_index: int) -> Chunk:
        """Read and encode a block. Raises DataError naming file, row and column."""
        split_field = self.split_field
        names = self.file_schema.columns + (split_field.columns if split_field else ())

        def encode(columns: Mapping[str, pa.Array], size: int) -> Chunk:
            return encode_block(self.file_schema, columns, size, split_field=split_field)

        return self.read_columns(block_index, tuple(dict.fromkeys(names)), encode)

    def read_split_keys(self, block_index: int) -> NDArray[np.float64]:
        """Read only `Chunk.split_key` of a block, (samples of the block,)."""
        field = self.split_field
        assert field is not None
        return self.read_column(
            block_index, field.column, lambda array: encode_split_keys(field, array)
        )

    def read_column(
        self, block_index: int, column: str, encode_column: Callable[[pa.Array], T]
    ) -> T:
        """Read one column of a block. Raises DataError naming file, row and column."""
        return self.read_columns(
            block_index, (column,), lambda columns, _: encode_column(columns[column])
        )

    def read_numbers(self, block_index: int, fields: Sequence[Number]) -> NDArray[np.float64]:
        """Read numbers of a block before (x - mean) / std, (samples of the block, fields), NaN where missing."""
        names = tuple(dict.fromkeys(field.column for field in fields))

        def transform(columns: Mapping[str, pa.Array], _: int) -> NDArray[np.float64]:
            arrays = {name: replace_null_type(columns[name]) for name in names}
            return np.stack([transform_numbers(f, arrays[f.column]) for f in fields], axis=1)

        return self.read_columns(block_index, names, transform)

    def read_time_column(
        self, block_index: int, time_field: Number | Time
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return a column's times in microseconds since 1970, and a mask of the missing ones."""
        return self.read_column(
            block_index,
            time_field.column,
            lambda array: parse_times(time_field, replace_null_type(array)),
        )

    def read_columns(
        self,
        block_index: int,
        column_names: tuple[str, ...],
        encode_columns: Callable[[Mapping[str, pa.Array], int], T],
    ) -> T:
        """Return what `encode_columns` makes of columns of a block and its length. Raises DataError naming the file."""
        file_index = int(np.searchsorted(self.bounds, block_index, side="right")) - 1
        file = self.files[file_index]
        local = block_index - int(self.bounds[file_index])
        try:
            return encode_columns(file.read_block(local, column_names), int(file.lengths[local]))
        except InvalidValue as fault:
            raise build_data_error(file, local, fault) from None
        except pa.ArrowException as error:
            raise DataError(
                f"{file.path}, from {file.describe_row(local, 0)} on: cannot be read as declared "
                f"({str(error).splitlines()[0]})"
            ) from None


def read_first_rows(file: TableFile, num_rows: int) -> Mapping[str, pa.Array]:
    """Read the first rows of a non-empty file, all columns. Raises DataError."""
    tables: list[pa.Table] = []
    for table in read_tables(file, file.names):
        tables.append(table.slice(0, num_rows - sum(map(len, tables))))
        if sum(map(len, tables)) == num_rows:
            break
    rows = pa.concat_tables(tables, promote_options="permissive")
    return {name: combine_chunks(rows.column(name)) for name in file.names}


def read_tables(file: TableFile, column_names: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the blocks of a file in order, as tables of these columns. Raises DataError naming file, row and column."""
    for block in range(len(file.lengths)):
        try:
            yield pa.table(dict(file.read_block(block, column_names)))
        except InvalidValue as fault:
            raise build_data_error(file, block, fault) from None


def build_data_error(file: TableFile, block: int, fault: InvalidValue) -> DataError:
    """Build the error that names file, row and column of an invalid value."""
    return DataError(
        f"{file.path}, {file.describe_row(block, fault.row)}, column {fault.column}: got {fault.got}, wanted "
        f"{fault.wanted}. {fault.fix}"
    )


def combine_table_files(file_schema: FileSchema, files: Sequence[TableFile]) -> TableFiles:
    """Combine bound files into one sequence of blocks. Every `dtype` of the schema is set."""
    lengths = np.concatenate([file.lengths for file in files])
    bounds = np.cumsum([0, *(len(file.lengths) for file in files)])
    return TableFiles(file_schema, tuple(files), lengths, bounds)


def find_files(path: str | Path | Sequence[str | Path], endings: tuple[str, ...]) -> list[Path]:
    """Return the files of a data set in the order of `find_days`. Raises DataError if there are none."""
    return [file for day in find_days(path, endings) for file in day]


def find_days(
    path: str | Path | Sequence[str | Path], endings: tuple[str, ...]
) -> list[list[Path]]:
    """Return the files of a data set, grouped by day, in natural order. Raises DataError if there are none.

    path                          days
    a file, of any name           the file
    a folder                      every file directly below it, and every folder directly below it with all its files
    a pattern, "day_*.parquet"    every match: a file, or a folder with all its files
    a list of these               one day per entry

    In folders, files that end in none of `endings` are skipped, and names that begin with . or _, as in Spark and
    Hive.
    """
    if not isinstance(path, str | Path):
        if not isinstance(path, Sequence) or not all(isinstance(p, str | Path) for p in path):
            raise ConfigError(
                f"got path={path!r}, wanted a file, a folder, a pattern, or a list of these"
            )
        if not path:
            raise ConfigError("got an empty list of paths, wanted at least one")
        return [[file for day in find_days(entry, endings) for file in day] for entry in path]
    path = Path(path).expanduser()
    if path.is_file():
        return [[path]]
    if path.is_dir():
        days = [
            _list_files_below(child, endings) if child.is_dir() else [check_regular_file(child)]
            for child in sorted(path.iterdir(), key=natural_sort_key)
            if child.is_dir() or child.name.lower().endswith(endings)
            if child.name[0] not in "._"
        ]
        days = [day for day in days if day]
        if not days:
            raise DataError(
                f"{path}: got a folder without a file that ends in {' or '.join(endings)}, "
                "wanted at least one. Name the folder that holds them"
            )
        return days
    if glob.has_magic(str(path)):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)), key=natural_sort_key)
        days = [
            _list_files_below(m, endings) if m.is_dir() else [check_regular_file(m)]
            for m in matches
        ]
        days = [day for day in days if day]
        if not days:
            raise DataError(f"{path}: no file matches this pattern. Check the path")
        return days
    return [[check_regular_file(path)]]


def _list_files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    files = [
        file
        for file in folder.rglob("*")
        if file.name.lower().endswith(endings)
        and not file.is_dir()
        and not any(part[0] in "._" for part in file.relative_to(folder).parts)
    ]
    return sorted(map(check_regular_file, files), key=natural_sort_key)


def natural_sort_key(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which day_2 precedes day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), part) if i % 2 else (0, part) for i, part in enumerate(parts)]
