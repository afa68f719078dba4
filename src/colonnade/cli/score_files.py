"""Score files: Parquet, CSV or TSV, streamed, and there only when whole.

Columns: `key` where the batches have one, then `score`, or `score_<label>` of several labels. One line per
sample, in the order of the input. Legend: B samples, T tasks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import ConfigError, DataError, StorageError

FORMATS = (".parquet", ".csv", ".tsv")


class ScoreFile:
    """Writes beside `path` and takes its name at the end; of an exception nothing is left. A context manager."""

    def __init__(self, path: Path, labels: Sequence[str]) -> None:
        """Raises ConfigError for an ending that names no format."""
        if path.suffix not in FORMATS:
            raise ConfigError(
                f"got output {str(path)!r}, wanted a name that ends in {', '.join(FORMATS)}"
            )
        self.path = path
        self.names = score_names(labels)
        self._beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._writer: Any = None
        self._has_key: bool | None = None
        self.num_samples = 0

    def __enter__(self) -> ScoreFile:
        """Raises StorageError where nothing can be written: before any work is done."""
        try:
            self._beside.touch()
        except OSError as error:
            raise self._explain(error) from None
        return self

    def add(self, batch: Batch, scores: Tensor) -> None:
        """scores (B, T) of the batch."""
        if scores.shape != (batch.size, len(self.names)):
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
            columns["key"] = _column(batch.key)
        values = scores.cpu().numpy()
        columns |= {name: np.ascontiguousarray(values[:, t]) for t, name in enumerate(self.names)}
        table = pa.table(columns)
        try:
            if self._writer is None:
                self._writer = self._open(table.schema)
            self._writer.write_table(table)
        except OSError as error:
            raise self._explain(error) from None
        self.num_samples += batch.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._writer is None:
                empty = pa.table({name: pa.array([], pa.float64()) for name in self.names})
                self._writer = self._open(empty.schema)
            if self._writer is not None:
                self._writer.close()
            if kind is None:
                os.replace(self._beside, self.path)
        except OSError as problem:
            if kind is None:
                raise self._explain(problem) from None
        finally:
            self._beside.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> Any:
        if self.path.suffix == ".parquet":
            return pa.parquet.ParquetWriter(str(self._beside), schema)
        delimiter = "\t" if self.path.suffix == ".tsv" else ","
        options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
        return pa.csv.CSVWriter(str(self._beside), schema, write_options=options)

    def _explain(self, error: OSError) -> StorageError:
        words = os.strerror(error.errno) if error.errno else str(error)
        fix = (
            "Free space there"
            if error.errno == errno.ENOSPC
            else "Name a file in a folder you can write to"
        )
        return StorageError(
            error.errno, f"{self.path}: could not write: {words}. {fix}; nothing is left of it"
        )


def score_names(labels: Sequence[str]) -> tuple[str, ...]:
    return ("score",) if len(labels) == 1 else tuple(f"score_{label}" for label in labels)


def _column(key: Any) -> Any:
    return key.cpu().numpy() if isinstance(key, Tensor) else key
