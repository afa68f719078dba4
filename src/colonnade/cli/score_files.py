"""Score files in Parquet, CSV or TSV, written as a stream and renamed into place when complete.

Columns: `key` if the batches have one, then `score`, or `score_<label>` for each of several labels, or those that the
model names. One line per sample, in the order of the input. Files of recommendations are written in the same way.
Legend: B samples, T tasks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import ConfigError, DataError, StorageError

FORMATS = (".parquet", ".csv", ".tsv")
T = TypeVar("T", bound="TableWriter")


class TableWriter:
    """Context manager that writes tables to a temporary file, renamed to `path` at the end, deleted after an
    exception."""

    def __init__(self, path: Path, empty: pa.Table) -> None:
        """Choose the format by the suffix of `path`. `empty`: the table to write if there is none. Raises ConfigError
        for an unknown suffix."""
        if path.suffix not in FORMATS:
            raise ConfigError(
                f"got output {str(path)!r}, wanted a name that ends in {', '.join(FORMATS)}"
            )
        self.path = path
        self._empty = empty
        self._temporary_path = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._writer: Any = None

    def __enter__(self: T) -> T:
        """Create the temporary file, so that StorageError is raised before any work is done."""
        try:
            self._temporary_path.touch()
        except OSError as error:
            raise self._storage_error(error) from None
        return self

    def write(self, table: pa.Table) -> None:
        """Append a table; all have the same columns. Text has the elements of a list with `|` between them."""
        if self.path.suffix != ".parquet":
            table = pa.table(
                {
                    name: _join_lists(column)
                    for name, column in zip(table.column_names, table.columns, strict=True)
                }
            )
        try:
            if self._writer is None:
                self._writer = self._open_writer(table.schema)
            self._writer.write_table(table)
        except OSError as error:
            raise self._storage_error(error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._writer is None:
                self.write(self._empty)
            if self._writer is not None:
                self._writer.close()
            if kind is None:
                os.replace(self._temporary_path, self.path)
        except OSError as problem:
            if kind is None:
                raise self._storage_error(problem) from None
        finally:
            self._temporary_path.unlink(missing_ok=True)

    def _open_writer(self, schema: pa.Schema) -> Any:
        """Open the writer of the output's format on the temporary file."""
        if self.path.suffix == ".parquet":
            return pa.parquet.ParquetWriter(str(self._temporary_path), schema)
        delimiter = "\t" if self.path.suffix == ".tsv" else ","
        options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
        return pa.csv.CSVWriter(str(self._temporary_path), schema, write_options=options)

    def _storage_error(self, error: OSError) -> StorageError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = (
            "Free space there"
            if error.errno == errno.ENOSPC
            else "Name a file in a folder you can write to"
        )
        return StorageError(
            error.errno,
            f"{self.path}: could not write: {reason}. {advice}; the partial file was deleted",
        )


class ScoreFile(TableWriter):
    """Writer of scores, with one column per label."""

    def __init__(self, path: Path, labels: Sequence[str], names: Sequence[str] = ()) -> None:
        """Choose the format by the suffix of `path`. names: of the columns of scores, by default one per label. Raises
        ConfigError for an unknown suffix."""
        self.names = tuple(names) or score_names(labels)
        super().__init__(path, pa.table({name: pa.array([], pa.float64()) for name in self.names}))
        self._has_key: bool | None = None
        self.num_samples = 0

    def add(self, batch: Batch, scores: Tensor) -> None:
        """Append the scores (B, T) of a batch. Where they are fewer than its samples, they are of the first ones."""
        if scores.ndim != 2 or scores.shape[1] != len(self.names) or len(scores) > batch.size:
            raise ConfigError(
                f"got scores of shape {tuple(scores.shape)} for {batch.size} samples and {len(self.names)} labels; "
                "this model gives no score per label. Use Predictor(...).model in a program of your own"
            )
        columns: dict[str, Any] = {}
        has_key = batch.key is not None
        if self._has_key is None:
            self._has_key = has_key
        if has_key != self._has_key:
            raise DataError("got keys with some batches only, wanted them with all or with none")
        if has_key:
            columns["key"] = _to_array(batch.key)
        values = scores.cpu().numpy()
        columns |= {name: np.ascontiguousarray(values[:, t]) for t, name in enumerate(self.names)}
        self.write(pa.table(columns))
        self.num_samples += len(scores)


def _join_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return lists as texts, as CSV files of lists are read, and other columns as they are. Raises DataError."""
    if not pa.types.is_list(column.type):
        return column
    lists = column.cast(pa.list_(pa.string()))
    elements = pc.list_flatten(lists)
    if len(odd := elements.filter(pc.match_substring(elements, "|"))):
        raise DataError(
            f"got {odd[0].as_py()!r}, wanted ids without |, which is between those of a list in text. Write .parquet"
        )
    return pc.binary_join(lists, "|")


def score_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the score columns."""
    return ("score",) if len(labels) == 1 else tuple(f"score_{label}" for label in labels)


def _to_array(key: Any) -> Any:
    return key.cpu().numpy() if isinstance(key, Tensor) else key
