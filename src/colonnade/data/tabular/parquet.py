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
from colonnade.data.tabular.columns import check_names, check_types, refuse_repeated, settle
from colonnade.data.tabular.declaration import Declaration, load_declaration
from colonnade.data.tabular.fields import Dtype
from colonnade.data.tabular.files import Files, bind_files, find_days, find_files
from colonnade.data.tabular.infer import infer
from colonnade.data.tabular.source import Splitting
from colonnade.errors import ConfigError, DataError

ENDINGS = (".parquet", ".pq", ".parq")
INFER_ROWS = 1 << 16
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
    how = Splitting(
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        split_by=split_by,
        days=days,
        shuffle_window=shuffle_window,
        seed=seed,
        threads=threads,
    )
    days_of_files = find_days(path, ENDINGS)
    files = [open_table(file) for day in days_of_files for file in day]
    if schema is None:
        declaration = infer_parquet(files, label)
    elif label is not None:
        raise ConfigError(
            f"got both schema and label={label!r}; the schema says which field is the label"
        )
    else:
        declaration = load_declaration(schema)
    declaration = settle_types(files, declaration, split_by)
    others = [
        None if each is None else _files(find_files(each, ENDINGS), declaration)
        for each in (validation, test)
    ]
    chosen = bind_files(declaration, files, split_by)
    return how.split(chosen, days_of_files, *others)


def _files(paths: list[Path], declaration: Declaration) -> Files:
    files = [open_table(path) for path in paths]
    return bind_files(settle_types(files, declaration, None), files)


def infer_parquet(files: Sequence[ParquetTable], label: str | None) -> Declaration:
    """What the first file's footer declares (`colonnade convert` writes it); else from its first `INFER_ROWS` rows."""
    first = next((file for file in files if len(file.lengths)), None)
    if first is None:
        raise DataError(f"{files[0].path}: got no row, wanted at least one to infer a schema from")
    declared = (first.metadata.metadata or {}).get(SCHEMA_KEY)
    if declared is None or label is not None:
        return infer(first.path, first.head(), label)
    try:
        return Declaration.from_yaml(declared.decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise DataError(
            f"{first.path}: its footer declares a schema that cannot be read ({error}). Give one with schema"
        ) from None


def settle_types(
    files: Sequence[ParquetTable], declaration: Declaration, split_by: str | None
) -> Declaration:
    """Raises DataError for the first file whose columns are not what the declaration reads."""
    found: dict[str, Dtype | None] = {}
    for file in files:
        check_names(file.path, list(file.types), declaration, split_by)
        for column in declaration.columns:
            found[column] = found.get(column) or dtype_in(file.types[column])
    declaration = settle(declaration, found)
    for file in files:
        check_types(file.path, file.types, declaration)
    if not any(len(file.lengths) for file in files):
        raise DataError(f"{files[0].path}: got no row, wanted at least one. Was it fully written?")
    return declaration


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

    def head(self) -> Mapping[str, pa.Array]:
        """The first rows of the first row group, all columns."""
        with self._opened(0) as file:
            group = int(self.groups[0])
            batches = file.iter_batches(INFER_ROWS, row_groups=[group], use_threads=False)
            batch = next(batches)
        return dict(zip(batch.schema.names, batch.columns, strict=True))

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


def open_table(path: Path) -> ParquetTable:
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
