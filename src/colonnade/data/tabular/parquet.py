"""Parquet as it is: one file, many, folders, patterns; streamed by row groups, which footers make reachable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from colonnade.data.contract import Splits
from colonnade.data.tabular.arrow import dtype_in, one_array
from colonnade.data.tabular.columns import check_names, check_types, refuse_repeated
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.fields import Dtype
from colonnade.data.tabular.opening import Format, open_tables
from colonnade.data.tabular.source import Splitting
from colonnade.errors import ConfigError, DataError

ENDINGS = (".parquet", ".pq", ".parq")
SCHEMA_KEY = b"colonnade.schema"
"""Of a footer's metadata: a declaration as YAML."""


def open_parquet(
    path: str | Path | Sequence[str | Path],
    *,
    schema: Any = None,
    label: str | None = None,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    validation_fraction: float = 0.0,
    test_fraction: float = 0.0,
    split_by: str | None = None,
    days: bool = False,
    shuffle_window: int = 0,
    seed: int = 0,
    threads: int = 1,
) -> Splits:
    """Samples under a declared schema, or one inferred from the first file.

    path                 a file, a folder (every file below it), a pattern, or several of these; natural order of names
    schema               a Declaration, its fields, plain values, or the path of a YAML file; None: what the footer
                         declares, as `colonnade convert criteo` writes it, else inferred
    label                the label's column, where the schema is inferred; default: one named label, click, target or y
    validation, test     files of their own
    validation_fraction, test_fraction
                         else, this share: the last samples in the order of the files (test after validation) or,
    split_by             a column: all samples of one value of it together, by its hash. Read once at opening
    days                 True: Splits.days has a source for every file or folder right below `path`, or that matches
    shuffle_window       samples; 0: in the order of the files. Else an order per epoch from `seed`: row groups are
                         shuffled, put together into windows of about so many samples, and these permuted
    threads              read so many row groups at a time

    At most two windows are in memory, each at least a row group. Raises DataError naming file, row (from 0) and
    column: here for what footers say, for values when they are read.
    """
    splitting = Splitting(
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        split_by=split_by,
        days=days,
        shuffle_window=shuffle_window,
        seed=seed,
        threads=threads,
    )
    return open_tables(
        path,
        parquet_format(),
        schema=schema,
        label=label,
        validation=validation,
        test=test,
        splitting=splitting,
    )


def parquet_format() -> Format:
    return Format(ENDINGS, open_parquet_file)


@dataclass(frozen=True, slots=True, eq=False)
class ParquetTable:
    """One file, by its footer."""

    path: Path
    num_bytes: int
    metadata: pq.FileMetaData
    types: dict[str, pa.DataType]  # by column
    groups: NDArray[np.int64]  # (blocks,) numbers of the row groups that have rows
    lengths: NDArray[np.int64]  # (blocks,)

    def read(self, block: int, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        with self._opened(block) as file:
            group = int(self.groups[block])
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
        return {name: one_array(table.column(name)) for name in columns}

    @property
    def names(self) -> list[str]:
        return list(self.types)

    @property
    def header_types(self) -> dict[str, str]:
        return {}

    def dtype_of(self, column: str) -> Dtype | None:
        return dtype_in(self.types[column]) if column in self.types else None

    def declared(self) -> Declaration | None:
        """Return what the footer declares (`colonnade convert` writes it)."""
        text = (self.metadata.metadata or {}).get(SCHEMA_KEY)
        try:
            return None if text is None else Declaration.from_yaml(text.decode())
        except (ConfigError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.path}: its footer declares a schema that cannot be read ({error}). Give one with schema"
            ) from None

    def head(self, num_rows: int) -> Mapping[str, pa.Array]:
        batches: list[pa.RecordBatch] = []
        with self._opened(0) as file:
            for batch in file.iter_batches(num_rows, self.groups.tolist(), use_threads=False):
                batches.append(batch.slice(0, num_rows - sum(map(len, batches))))
                if sum(map(len, batches)) == num_rows:
                    break
        table = pa.Table.from_batches(batches)
        return {name: one_array(table.column(name)) for name in table.column_names}

    def bind(self, declaration: Declaration, split_by: str | None) -> ParquetTable:
        check_names(self.path, self.names, declaration, split_by)
        check_types(self.path, self.types, declaration)
        return self

    @contextmanager
    def _opened(self, block: int) -> Iterator[pq.ParquetFile]:
        """To read this block. Errors of reading become DataErrors that name it."""
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
                f"{self.path}, row group {int(self.groups[block])} ({self.place(block, 0)} on): cannot be read "
                f"({str(error).splitlines()[0]}). Write or fetch the file again"
            ) from None

    def place(self, block: int, row: int) -> str:
        return f"row {int(self.lengths[:block].sum()) + row}"


def open_parquet_file(path: Path) -> ParquetTable:
    """Reads the footer. Raises DataError for what is no Parquet file, or not whole."""
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
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
    refuse_repeated(path, names)
    types = dict(zip(names, schema.types, strict=True))
    return ParquetTable(path, num_bytes, metadata, types, groups, lengths[groups])
