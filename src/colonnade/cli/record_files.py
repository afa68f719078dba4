"""Files of raw records: any tabular format, or one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from colonnade.data.lines import check_regular_file
from colonnade.data.tabular.files import read_tables
from colonnade.data.tabular.formats import TableFormat, find_format, list_endings
from colonnade.errors import ConfigError, DataError

JSON_ENDINGS = (".jsonl", ".ndjson")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read all records of a file. Raises ConfigError, DataError as `read_record_batches`."""
    return list(chain.from_iterable(read_record_batches(path, 1 << 16)))


def read_record_batches(path: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file in order, `size` at a time, as records with all columns.

    Raises ConfigError for an unknown suffix, DataError naming file and line or row.
    """
    suffix = path.suffix.lower()
    if suffix in JSON_ENDINGS:
        return _read_json_lines(path, size)
    format = find_format(suffix)
    if format is None:
        raise ConfigError(
            f"got {str(path)!r}, wanted a name that ends in {', '.join([*list_endings(), *JSON_ENDINGS])}"
        )
    return _read_table(path, format, size)


def _read_table(
    file_path: Path, table_format: TableFormat, rows_per_batch: int
) -> Iterator[list[dict[str, Any]]]:
    file = table_format.open_file(check_regular_file(file_path))
    rows: list[dict[str, Any]] = []
    for table in read_tables(file, file.names):
        for part in table.to_batches(max_chunksize=rows_per_batch):
            rows += _list_rows(part, file_path)
            while len(rows) >= rows_per_batch:
                yield rows[:rows_per_batch]
                rows = rows[rows_per_batch:]
    if rows:
        yield rows


def _list_rows(record_batch: pa.RecordBatch, file_path: Path) -> list[dict[str, Any]]:
    """Return the rows of a batch as records. Raises DataError for a time that Python cannot hold."""
    columns: dict[str, list[Any]] = {}
    for name, array in zip(record_batch.schema.names, record_batch.columns, strict=True):
        try:
            columns[name] = array.to_pylist()
        except (OverflowError, ValueError) as error:
            raise DataError(
                f"{file_path}, column {name}: got a time out of range ({error}), wanted times of the years 1 to "
                "9999. Repair the row"
            ) from None
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _read_json_lines(file_path: Path, rows_per_batch: int) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    with check_regular_file(file_path).open(encoding="utf-8") as file:
        for number, line in enumerate(_decode_lines(file, file_path), 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file_path}, line {number}: got no JSON ({str(error)[:100]}), wanted an object on each "
                    "line. Repair "
                    "the line"
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{file_path}, line {number}: got {type(record).__name__}, wanted an object on each line. Repair it"
                )
            rows.append(record)
            if len(rows) == rows_per_batch:
                yield rows
                rows = []
    if rows:
        yield rows


def _decode_lines(text_file: Any, file_path: Path) -> Iterator[str]:
    try:
        yield from text_file
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file_path}: got bytes that are not UTF-8 ({error.reason}), wanted UTF-8. Convert the file with iconv"
        ) from None
