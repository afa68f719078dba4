"""Text to Parquet, as a stream: what is read often is better kept in columns, smaller, typed and checked once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from colonnade.data.lines import LineFile, locate, open_lines
from colonnade.data.sets.criteo import CATEGORIES, DENSE, FILE, FOLDER, parse_columns
from colonnade.data.tabular.columns import refuse_repeated
from colonnade.data.tabular.csv import CsvTable, build_dialect, open_text
from colonnade.data.tabular.infer import INFER_ROWS, UNNAMED, infer
from colonnade.data.tabular.narrow import BLANKS, narrowest
from colonnade.data.tabular.parquet import SCHEMA_KEY
from colonnade.errors import DataError, StorageError

ROWS_PER_GROUP = 1 << 17
"""40 columns of so many rows are some 40 MB in memory: what a reader, and this writer, holds at least."""
CHUNK_LINES = 1 << 15
COMPRESSION = "zstd"
"""With dictionaries. Criteo's text becomes 0.22 of its size (snappy 0.29), read at millions of rows/s on a core."""

CRITEO_SCHEMA = "\n".join(
    [
        "hash_version: 1",
        "fields:",
        "  label: {type: label}",
        *(f"  {name}: {{type: number, missing: 0.0, transform: log1p}}" for name in DENSE),
        *(f"  {name}: {{type: category, dtype: integer}}" for name in CATEGORIES),
        "",
    ]
)
"""What makes of the columns the batches that the text makes."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A stream of tables of one schema. `num_rows` of all of them; `metadata` goes into the file's footer."""

    source: Path
    schema: pa.Schema
    num_rows: int
    tables: Iterable[pa.Table]
    metadata: Mapping[bytes, bytes]


def open_criteo_conversion(path: str | Path) -> Conversion:
    """A Criteo text file (or the folder that holds it) as these columns, in the order of the lines:

    label       int8: 0 or 1
    I1 .. I13   int64, null where missing
    C1 .. C26   int64, never null: what the 8 hex digits spell; 4294967296 (2**32) where missing

    `tables` raises DataError naming file, line and column.
    """
    file = open_lines(locate(path, folder=FOLDER, file=FILE))
    schema = pa.schema(
        [
            pa.field("label", pa.int8(), nullable=False),
            *(pa.field(name, pa.int64()) for name in DENSE),
            *(pa.field(name, pa.int64(), nullable=False) for name in CATEGORIES),
        ]
    )
    metadata = {SCHEMA_KEY: CRITEO_SCHEMA.encode()}
    tables = _criteo_tables(file, schema)
    return Conversion(file.path, schema, file.num_lines, tables, metadata)


def _criteo_tables(file: LineFile, schema: pa.Schema) -> Iterator[pa.Table]:
    for start in range(0, file.num_lines, CHUNK_LINES):
        stop = min(start + CHUNK_LINES, file.num_lines)
        lines = file.read(start, stop)
        read, ids = parse_columns(lines, stop - start, path=file.path, first_line=start + 1)
        label = pa.array(read.column(0).to_numpy().astype(np.int8))
        numbers = [read.column(i) for i in range(1, 14)]
        yield pa.Table.from_arrays([label, *numbers, *map(pa.array, ids)], schema=schema)


def open_csv_conversion(
    path: str | Path,
    *,
    delimiter: str | None = None,
    quote: str | None = '"',
    names: Sequence[str] | None = None,
    null_values: Sequence[str] = (),
    on_rows: Callable[[int, int], object] = lambda rows, total: None,
) -> Conversion:
    """A CSV file as its columns, in order; an empty field is null. The options are `open_csv`'s.

    Every row is read once here, to choose what a column is, so that no value is changed or refused later:

    int64     all values are integers as one writes them: no leading zeros, 64 bits
    double    all are numbers, none of them with leading zeros or an integer that a double cannot hold
    string    anything else

    Raises DataError naming file, line and column; calls `on_rows` with the rows of each block and of the file.
    """
    table = open_text(Path(path).expanduser(), build_dialect(delimiter, quote, names, null_values))
    refuse_repeated(table.path, table.names)
    total = int(table.lengths.sum())
    if total == 0:
        raise DataError(f"{table.path}: got no row after the header, wanted at least one")
    texts = dict.fromkeys(table.names, pa.string())
    ranks = [0] * len(table.names)
    for block in range(len(table.lengths)):
        read = table.parse(table.rows.read(block), block, None, texts)
        ranks = [max(rank, _narrowest(read.column(i))) for i, rank in enumerate(ranks)]
        on_rows(int(table.lengths[block]), total)
    types = {name: _TYPES[rank] for name, rank in zip(table.names, ranks, strict=True)}
    schema = pa.schema([pa.field(name, type_) for name, type_ in types.items()])
    typed = any(kind != UNNAMED for kind in table.header_types.values())
    declared = (
        infer(table.path, table.head(INFER_ROWS), None, table.header_types) if typed else None
    )
    metadata = {} if declared is None else {SCHEMA_KEY: declared.declaration.to_yaml().encode()}
    return Conversion(table.path, schema, total, _csv_tables(table, types), metadata)


_TYPES = [pa.int64(), pa.float64(), pa.string()]


def _narrowest(column: pa.ChunkedArray) -> int:
    """Return the index into _TYPES of the first type that holds these texts without changing what they say."""
    return _TYPES.index(narrowest(pc.utf8_trim(column, BLANKS)))


def _csv_tables(table: CsvTable, types: dict[str, pa.DataType]) -> Iterator[pa.Table]:
    for block in range(len(table.lengths)):
        yield table.parse(table.rows.read(block), block, None, types)


def write_parquet(
    conversion: Conversion,
    target: str | Path,
    *,
    rows_per_group: int = ROWS_PER_GROUP,
    overwrite: bool = False,
    on_rows: Callable[[int], object] = lambda rows: None,
) -> None:
    """Write all of it to `target`, which appears whole and synced, or not at all; calls `on_rows` with the count of
    each table written. Holds one row group and one table of the stream at a time.

    Raises DataError where `target` is there already (unless `overwrite`) or has no folder, StorageError where it
    cannot be written, and what the stream raises. A killed process leaves a hidden file that ends in .partial.
    """
    target = check_target(conversion.source, target, overwrite=overwrite)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _write(conversion, partial, rows_per_group, on_rows)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(target)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{target}: cannot be written ({error.strerror or error}); nothing is left of it. Free some space, or "
            "write elsewhere"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def check_target(source: Path, target: str | Path, *, overwrite: bool) -> Path:
    """Where to write. Raises DataError: a directory, no folder, the source itself, there already."""
    target = Path(target).expanduser()
    if target.is_dir():
        raise DataError(f"{target}: got a directory, wanted the name of the file to write")
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(
            f"{target}: got the text file itself, wanted another name for the Parquet file"
        )
    if target.exists() and not overwrite:
        raise DataError(f"{target} is there already; give another name, or --force to replace it")
    if not target.parent.is_dir():
        raise DataError(f"{target}: there is no folder {target.parent}; make it first")
    return target


def _write(
    conversion: Conversion, path: Path, rows_per_group: int, on_rows: Callable[[int], object]
) -> None:
    schema = conversion.schema.with_metadata(dict(conversion.metadata))
    with pq.ParquetWriter(path, schema, compression=COMPRESSION) as writer:
        held: list[pa.Table] = []
        num_held = 0
        for table in conversion.tables:
            held.append(table.replace_schema_metadata(schema.metadata))
            num_held += len(table)
            if num_held >= rows_per_group:
                whole = pa.concat_tables(held)
                full = num_held - num_held % rows_per_group
                writer.write_table(whole.slice(0, full), rows_per_group)
                held, num_held = [whole.slice(full)], num_held - full
            on_rows(len(table))
        if num_held:
            writer.write_table(pa.concat_tables(held), rows_per_group)
