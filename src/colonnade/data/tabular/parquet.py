"""Parquet files, streamed by row groups: files, folders and patterns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from colonnade.data.tabular.arrow_types import combine_chunks
from colonnade.data.tabular.columns import check_unique_column_names
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.files import TableFile
from colonnade.data.tabular.opening import build_opener
from colonnade.errors import ConfigError, DataError

SCHEMA_KEY = b"colonnade.schema"
"""Key in a footer's metadata of a file schema as YAML."""


@dataclass(frozen=True, slots=True, eq=False)
class ParquetTableFile(TableFile):
    """Parquet file with its footer."""

    path: Path
    num_bytes: int
    metadata: pq.FileMetaData
    types: dict[str, pa.DataType]  # by column
    groups: NDArray[np.int64]  # (blocks,) indices of the row groups that have rows
    lengths: NDArray[np.int64]  # (blocks,)

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        with self._open_for_block(block_index) as file:
            group = int(self.groups[block_index])
            table = file.read_row_group(group, columns=list(column_names), use_threads=False)
        return {name: combine_chunks(table.column(name)) for name in column_names}

    @property
    def names(self) -> list[str]:
        return list(self.types)

    @property
    def header_types(self) -> dict[str, str]:
        return {}

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        return self.types

    def embedded_schema(self) -> FileSchema | None:
        """Return the schema in the footer, if any (`colonnade convert` writes it)."""
        text = (self.metadata.metadata or {}).get(SCHEMA_KEY)
        try:
            return None if text is None else FileSchema.from_yaml(text.decode())
        except (ConfigError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.path}: its footer declares a schema that cannot be read ({error}). Give one with schema"
            ) from None

    def read_head(self, num_rows: int) -> Mapping[str, pa.Array]:
        batches: list[pa.RecordBatch] = []
        with self._open_for_block(0) as file:
            for batch in file.iter_batches(num_rows, self.groups.tolist(), use_threads=False):
                batches.append(batch.slice(0, num_rows - sum(map(len, batches))))
                if sum(map(len, batches)) == num_rows:
                    break
        table = pa.Table.from_batches(batches)
        return {name: combine_chunks(table.column(name)) for name in table.column_names}

    @contextmanager
    def _open_for_block(self, block_index: int) -> Iterator[pq.ParquetFile]:
        """Open the file to read a block. Errors while reading become DataErrors that name the block."""
        try:
            with pq.ParquetFile(self.path, metadata=self.metadata) as file:
                if self.path.stat().st_size != self.num_bytes:
                    raise DataError(
                        f"{self.path}: its size was {self.num_bytes} bytes when it was opened and has changed "
                        "since. Leave the file alone while it is read, and open it again"
                    )
                yield file
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{self.path}, row group {int(self.groups[block_index])} "
                f"({self.describe_row(block_index, 0)} on): cannot be read "
                f"({str(error).splitlines()[0]}). Write or fetch the file again"
            ) from None


def open_parquet_file(path: Path) -> ParquetTableFile:
    """Read a file's footer. Raises DataError for a file that is not Parquet or is incomplete."""
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            schema = file.schema_arrow
        num_bytes = path.stat().st_size
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read as Parquet ({reason}). Is it a Parquet file, and whole?"
        ) from None
    lengths = np.array(
        [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], np.int64
    )
    groups = np.flatnonzero(lengths)
    names = list(schema.names)
    check_unique_column_names(path, names)
    types = dict(zip(names, schema.types, strict=True))
    return ParquetTableFile(path, num_bytes, metadata, types, groups, lengths[groups])


open_parquet = build_opener(
    "parquet",
    open_parquet_file,
    """Open Parquet files under a declared schema, or one inferred from the first file.

    path                 a file, a folder (every file below it), a pattern, or a list of these; natural order of names
    schema               a FileSchema, its fields, plain values, or the path of a YAML file; None: the one in the
                         footer, which `colonnade convert criteo` writes, else inferred
    label                the label's column, if the schema is inferred; default: one named label, click, target or y
    validation, test     separate files, or Arrow tables
    validation_fraction, test_fraction
                         else, this share: the last samples in the order of the files (test after validation) or,
    split_by             a column: samples with equal values are in one part, by the value's hash. Read once at opening
    order_by             a column of times or numbers: the fractions are the last samples by it, whatever the order of
                         the files; samples with equal values are in one part, the later one. Read once at opening
    validation_after, test_after
                         with order_by: a time or number, instead of a fraction; samples at or after it are held out
    days                 True: Splits.days has a source for every file or folder directly below `path`, or that matches
    shuffle_window       samples; 0: in the order of the files. Else a new order each epoch from `seed`: row groups are
                         shuffled and combined into windows of about this many samples, which are permuted
    threads              number of row groups read at a time
    join                 by key column: a table with one row per key, whose other columns become those of the samples:
                         files of any format, or an Arrow table, read into memory once. A sample with a key that it
                         does not have gets missing values

    At most two windows are in memory, each at least a row group. Raises DataError naming file, row (from 0) and
    column: here for faults in footers and in columns read at opening, for other values when they are read.
    """,
)
