"""Tables of other libraries by Arrow's C interface, pyarrow data sets, and Arrow files (Feather, IPC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
from numpy.typing import NDArray

from colonnade.data.tabular.arrow_types import combine_chunks, replace_views
from colonnade.data.tabular.columns import check_unique_column_names
from colonnade.data.tabular.files import TableFile
from colonnade.data.tabular.opening import build_opener
from colonnade.errors import ConfigError, DataError

BLOCK_ROWS = 1 << 17
"""Number of rows of a block of a table in memory, however its owner has cut it into chunks."""
IN_MEMORY = Path("the table")
"""Name of a table without a file in messages."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrowTableFile(TableFile):
    """Table in memory or mapped, cut into blocks, or fragments of a pyarrow data set, which are read when needed."""

    path: Path
    schema: pa.Schema
    blocks: Sequence[pa.Table | pa.dataset.Fragment]
    lengths: NDArray[np.int64]

    @property
    def names(self) -> list[str]:
        return self.schema.names

    @property
    def header_types(self) -> dict[str, str]:
        return {}

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        return dict(zip(self.schema.names, self.schema.types, strict=True))

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        names = list(column_names)
        block = self.blocks[block_index]
        if isinstance(block, pa.dataset.Fragment):
            table = read_fragment(block, self.schema, names)
        else:
            table = block.select(names)
        if len(table) != self.lengths[block_index]:
            raise DataError(
                f"{self.path}, {self.describe_row(block_index, 0)}: got {len(table)} rows, and "
                f"{self.lengths[block_index]} when it was opened. Leave the files alone while they are read"
            )
        return {name: combine_chunks(table.column(name)) for name in names}

    def describe_row(self, block: int, row: int) -> str:
        if isinstance(self.blocks[block], pa.dataset.Fragment):
            return f"row {row} of {describe_fragment(self.blocks[block])}"
        return TableFile.describe_row(self, block, row)


def describe_fragment(fragment: pa.dataset.Fragment) -> str:
    """Describe a fragment by its path and, in Parquet, its row group."""
    groups = [group.id for group in getattr(fragment, "row_groups", None) or ()]
    path = getattr(fragment, "path", IN_MEMORY)
    return f"{path}, row group {groups[0]}" if len(groups) == 1 else str(path)


def read_fragment(
    fragment: pa.dataset.Fragment, schema: pa.Schema, column_names: Sequence[str] | None = None
) -> pa.Table:
    """Read columns of a fragment in the types of `schema`, those of its folder names too. Raises DataError."""
    names = schema.names if column_names is None else list(column_names)
    try:
        # Text that is read as a dictionary, or in a view, has another type in the data set than in the schema.
        return fragment.to_table(schema=schema, columns=names, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{describe_fragment(fragment)}: cannot be read ({str(error).splitlines()[0]}). Write or fetch it again"
        ) from None


def convert_to_table(source: Any) -> pa.Table:
    """Read a table of another library, or a pyarrow data set, into memory. Raises ConfigError for any other object.

    The arrays are shared, not copied, except texts in views, which become plain ones.
    """
    if isinstance(source, pa.dataset.Dataset):
        source = source.to_table()
    if not hasattr(source, "__arrow_c_stream__"):
        raise ConfigError(
            f"got path={source!r}, wanted a file, a folder, a pattern, or a list of these; or a table with "
            "__arrow_c_stream__ (pyarrow, Polars, DuckDB, pandas 2.2 or later), or a pyarrow.dataset.Dataset"
        )
    table = pa.table(source)
    schema = replace_views(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def open_arrow_file(path: Any) -> ArrowTableFile:
    """Open an Arrow file, or a table or data set of another library, as `open_arrow` describes."""
    if isinstance(path, pa.dataset.Dataset):
        return _open_data_set(path)
    if not isinstance(path, str | Path):
        table = convert_to_table(path)
        if not len(table):
            raise DataError(
                f"{IN_MEMORY}: got no row, wanted at least one. A reader has none left where it was read before: make "
                "a table of it once (read_all)"
            )
        return _cut_table(IN_MEMORY, table)
    try:
        with pa.memory_map(str(path)) as file:
            return _cut_table(Path(path), convert_to_table(pa.ipc.open_file(file).read_all()))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as an Arrow file ({str(error).splitlines()[0]}). Write it again"
        ) from None


def _cut_table(path: Path, table: pa.Table) -> ArrowTableFile:
    check_unique_column_names(path, table.column_names)
    blocks = [table.slice(row, BLOCK_ROWS) for row in range(0, len(table), BLOCK_ROWS)]
    return ArrowTableFile(path, table.schema, blocks, np.array(list(map(len, blocks)), np.int64))


def _open_data_set(data_set: pa.dataset.Dataset) -> ArrowTableFile:
    """Cut a data set into row groups of Parquet files, and other files as they are."""
    path = Path(next(iter(getattr(data_set, "files", ())), IN_MEMORY))
    check_unique_column_names(path, data_set.schema.names)
    try:
        fragments = [
            part
            for fragment in data_set.get_fragments()
            for part in (
                fragment.split_by_row_group()
                if isinstance(fragment, pa.dataset.ParquetFileFragment)
                else [fragment]
            )
        ]
        lengths = np.array([_count_rows(fragment) for fragment in fragments], np.int64)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    blocks = [fragment for fragment, length in zip(fragments, lengths, strict=True) if length]
    return ArrowTableFile(path, replace_views(data_set.schema), blocks, lengths[lengths > 0])


def _count_rows(fragment: pa.dataset.Fragment) -> int:
    if isinstance(
        fragment, pa.dataset.ParquetFileFragment
    ):  # whose count_rows is that of all row groups
        return sum(group.num_rows for group in fragment.row_groups)
    return fragment.count_rows()


open_arrow = build_opener(
    "arrow",
    open_arrow_file,
    """Open a table in memory, a pyarrow data set, or Arrow files, as `open_parquet` opens Parquet files.

    path  an object with `__arrow_c_stream__`: a pyarrow Table or RecordBatchReader, a Polars or pandas (2.2 or later)
          frame, a DuckDB relation; a pyarrow.dataset.Dataset; or Arrow files (.arrow, .feather) as in `open_parquet`

    The samples have the order of the rows, in blocks of 131,072, however the table is chunked. A reader that can be
    read once is collected into memory, and has no row for a second `open_arrow`. A data set is streamed: a block is a
    row group of a Parquet file, or a whole file of another format; the names of its folders are columns if it has a
    partitioning. Raises DataError naming row and column, ConfigError for an object of another kind.
    """,
)
