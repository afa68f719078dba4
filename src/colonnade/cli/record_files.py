"""Files of raw records: any tabular format, or one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from colonnade.data.lines import check_regular_file
from colonnade.data.tabular.files import read_tables
from colonnade.data.tabular.formats import find_format, list_endings
from colonnade.errors import ConfigError, DataError

JSON_ENDINGS = (".jsonl", ".ndjson")
ROWS_TOGETHER = 1 << 12
"""Number of rows of a table that become records at a time."""


def read_record_batches(path: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file in order, `size` at a time, as records with all columns. Raises as `read_records`."""
    records = read_records(path)
    while batch := list(islice(records, size)):
        yield batch


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order, as records with all columns.

    Raises ConfigError for an unknown suffix, DataError naming file and line or row.
    """
    suffix = path.suffix.lower()
    if suffix in JSON_ENDINGS:
        yield from _read_json_lines(path)
    elif (format := find_format(suffix)) is not None:
        file = format.open_file(check_regular_file(path))
        for table in read_tables(file, file.names):
            for rows in table.to_batches(max_chunksize=ROWS_TOGETHER):
                yield from _list_rows(rows, path)
    else:
        raise ConfigError(
            f"got {str(path)!r}, wanted a name that ends in {', '.join([*list_endings(), *JSON_ENDINGS])}"
        )


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


def _read_json_lines(file_path: Path) -> Iterator[dict[str, Any]]:
    with check_regular_file(file_path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file_path}, line {number}: got bytes that are not UTF-8 ({error.reason}), wanted UTF-8. Convert "
                    "the file with iconv"
                ) from None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file_path}, line {number}: got no JSON ({str(error)[:100]}), wanted an object on each line. "
                    "Repair the line"
                ) from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{file_path}, line {number}: got {type(record).__name__}, wanted an object on each line. Repair it"
                )
            yield record
