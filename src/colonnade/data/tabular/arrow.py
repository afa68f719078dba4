"""Arrow files (Feather, IPC), and `open_arrow`, which also reads tables of other libraries."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from colonnade.data.tabular.arrow_files import ArrowTableFile, cut_table
from colonnade.data.tabular.opening import build_opener
from colonnade.errors import DataError


def open_arrow_file(path: Path) -> ArrowTableFile:
    """Map a file in memory. Raises DataError for a file that is not Arrow's, or is incomplete."""
    try:
        with pa.memory_map(str(path)) as file:
            return cut_table(path, pa.ipc.open_file(file).read_all())
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as an Arrow file ({str(error).splitlines()[0]}). Write it again"
        ) from None


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
