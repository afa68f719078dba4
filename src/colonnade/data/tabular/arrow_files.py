"""Files of Arrow tables: tables in memory, cut into blocks, and fragments of data sets, which are read when needed."""

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
from colonnade.errors import ConfigError, DataError

BLOCK_ROWS = 1 << 17
"""Number of rows of a block of a table in memory, however its owner has cut it into chunks."""
IN_MEMORY = Path("the table")
"""Name of a table without a file in messages."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrowTableFile(TableFile):
    """Table in memory, cut into blocks, or a file of a data set: by row groups in Parquet, else as one block."""

    path: Path
    schema: pa.Schema
    """Columns with the types as which they are read, those of folder names too."""
    blocks: Sequence[pa.Table | pa.dataset.Fragment]
    lengths: NDArray[np.int64]
    num_bytes: int | None = None
    """Size of a file on this machine when it was opened."""

    @property
    def names(self) -> list[str]:
        return self.schema.names

    @property
    def header_types(self) -> dict[str, str]:
        return {}

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        return dict(zip(self.schema.names, self.schema.types, strict=True))

    def read_head(self, num_rows: int) -> Mapping[str, pa.Array]:
        tables: list[pa.Table] = []
        for block in range(len(self.blocks)):
            tables.append(self._read_rows(block, self.names, num_rows - sum(map(len, tables))))
            if sum(map(len, tables)) == num_rows:
                break
        table = pa.concat_tables(tables)
        return {name: combine_chunks(table.column(name)) for name in self.names}

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        length = int(self.lengths[block_index])
        table = self._read_rows(block_index, list(column_names), length + 1)
        if len(table) != length:
            raise DataError(
                f"{self.path}: got {len(table)} rows, and {length} when it was opened: it has changed since. Leave the "
                "file alone while it is read, and open it again"
            )
        return {name: combine_chunks(table.column(name)) for name in column_names}

    def _read_rows(self, block_index: int, column_names: list[str], num_rows: int) -> pa.Table:
        """Read the first rows of a block. Raises DataError naming it."""
        block = self.blocks[block_index]
        if isinstance(block, pa.Table):
            return block.select(column_names).slice(0, num_rows)
        try:
            if self.num_bytes is not None and self.path.stat().st_size != self.num_bytes:
                raise OSError(
                    f"its size was {self.num_bytes} bytes when it was opened and has changed since"
                )
            scanner = block.scanner(
                self.schema, columns=column_names, batch_size=num_rows, use_threads=False
            )
            return scanner.head(num_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            group = "".join(f", row group {g.id}" for g in getattr(block, "row_groups", None) or ())
            raise DataError(
                f"{self.path}{group} ({self.describe_row(block_index, 0)} on): cannot be read "
                f"({str(error).splitlines()[0]}). Write or fetch the file again, and leave it alone while it is read"
            ) from None


def cut_table(path: Path, table: pa.Table) -> ArrowTableFile:
    """Cut a table into blocks. The arrays are shared, not copied, except views of texts, which become plain texts.
    Raises DataError for a repeated name."""
    check_unique_column_names(path, table.column_names)
    table = table.cast(replace_views(table.schema))
    blocks = [table.slice(row, BLOCK_ROWS) for row in range(0, len(table), BLOCK_ROWS)]
    return ArrowTableFile(path, table.schema, blocks, np.array(list(map(len, blocks)), np.int64))


def open_fragment(
    fragment: pa.dataset.Fragment, schema: pa.Schema, num_bytes: int | None = None
) -> ArrowTableFile:
    """Open a file of a data set with the columns of `schema`. Raises DataError for a repeated name, and for a file
    that cannot be read."""
    path = Path(getattr(fragment, "path", IN_MEMORY))
    check_unique_column_names(path, schema.names)
    blocks = [fragment]
    try:
        if isinstance(fragment, pa.dataset.ParquetFileFragment):
            blocks = fragment.split_by_row_group()
            rows = [block.row_groups[0].num_rows for block in blocks]
        else:
            rows = [fragment.count_rows()]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}). Write or fetch the file again"
        ) from None
    lengths = np.array(rows, np.int64)
    blocks = [block for block, length in zip(blocks, lengths, strict=True) if length]
    return ArrowTableFile(path, replace_views(schema), blocks, lengths[lengths > 0], num_bytes)


def open_arrow_object(source: Any) -> list[ArrowTableFile]:
    """Open a table of another library, or each file of a pyarrow data set. Raises ConfigError for another object,
    DataError for a table without rows, and for a file that cannot be read."""
    if isinstance(source, pa.dataset.Dataset):
        files = [open_fragment(part, source.schema) for part in source.get_fragments()]
        if not files:
            raise DataError("got a data set without a file, wanted at least one. Check its path")
        return files
    if not hasattr(source, "__arrow_c_stream__"):
        raise ConfigError(
            f"got path={repr(source)[:60]}, wanted a file, a folder, a pattern, or a list of these; or a table with "
            "__arrow_c_stream__ (pyarrow, Polars, DuckDB, pandas 2.2 or later), or a pyarrow.dataset.Dataset"
        )
    table = pa.table(source)
    if not len(table):
        raise DataError(
            f"{IN_MEMORY}: got no row, wanted at least one. A reader has none left where it was read before: make a "
            "table of it once (read_all)"
        )
    return [cut_table(IN_MEMORY, table)]
