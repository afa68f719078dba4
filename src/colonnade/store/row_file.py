"""Files of exported rows: safetensors with `ids` (N,) int64 ascending, then `weights` (N, width) to the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import CorruptionError
from colonnade.files.checksums import AGAIN, BLOCK_BYTES, CheckedFile, FileChecksums, open_checked
from colonnade.files.untrusted import parse_json
from colonnade.table import Table

DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
IDS_AT_ONCE = 1 << 20
LONGEST_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class RowFile:
    """Open file of one table's rows. Its header fits the table and the file's length."""

    file: CheckedFile
    table: Table
    num_rows: int
    ids_begin: int
    weights_begin: int
    stride: int
    """Bytes of a row."""

    @property
    def path(self) -> Path:
        return self.file.path

    def ids(self) -> Iterator[np.ndarray]:
        """Read all ids, a run at a time. Raises CorruptionError if they do not ascend, or one is outside its vocabulary
        table; StorageError."""
        last = None
        for first in range(0, self.num_rows, IDS_AT_ONCE):
            part = self.read_ids(first, min(first + IDS_AT_ONCE, self.num_rows))
            is_after = last is None or part[0] > last
            if not (is_after and bool((part[1:] > part[:-1]).all())):
                raise CorruptionError(f"{self.path}: got ids that do not ascend. {AGAIN}")
            last = int(part[-1])
            if self.table.rows is not None and (part[0] < 0 or last >= self.table.rows):
                bad = int(part[0]) if part[0] < 0 else last
                raise CorruptionError(
                    f"{self.path}: got id {bad}, wanted 0 .. {self.table.rows - 1} for table {self.table.name!r}. "
                    f"{AGAIN}"
                )
            yield part

    def read_ids(self, first: int, last: int) -> np.ndarray:
        """Read ids (N,) int64 of rows first .. last - 1."""
        return self.file.read(self.ids_begin + 8 * first, 8 * (last - first)).view(np.int64)

    def read_weights(self, first_row: int, end_row: int) -> Tensor:
        """Read weights (N, width) of rows first .. last - 1."""
        data = self.file.read(
            self.weights_begin + first_row * self.stride, (end_row - first_row) * self.stride
        )
        values = torch.from_numpy(data).view(getattr(torch, self.table.dtype))
        return values.view(end_row - first_row, self.table.width)

    def check_row_blocks(self, slots: np.ndarray) -> None:
        """Check the blocks of rows that are about to be read, if they are unchecked.

        slots (E,) int32, as uint32; slots without a row are ignored. Raises CorruptionError, StorageError.
        """
        if self.file.is_checked:
            return
        while blocks := _native.unchecked_blocks(
            slots, self.num_rows, self.weights_begin, self.stride, BLOCK_BYTES, self.file.checked
        ):
            for block in blocks:
                self.file.check_block(block)


def open_row_file(folder: Path, name: str, checksums: FileChecksums, table: Table) -> RowFile:
    """Open a table's file and check its header, without reading or allocating memory for its rows.

    Raises CorruptionError if it is no file of this table's rows, StorageError.
    """
    file = open_checked(folder, name, checksums)
    path = file.path
    size = file.num_bytes
    length = int.from_bytes(file.read(0, 8).tobytes(), "little") if size >= 8 else 0
    if not 0 < length <= min(size - 8, LONGEST_HEADER):
        raise _format_error(path, f"a header of {length} bytes in a file of {size}")
    header = parse_json(dict[str, Any], file.read(8, length).tobytes(), path, AGAIN)
    begin = 8 + length
    stride = table.width * table.itemsize
    try:
        parts = [header[name] for name in ("ids", "weights")]
        num_rows = parts[0]["shape"][0]
        got = [(part["dtype"], part["shape"], part["data_offsets"]) for part in parts]
    except (KeyError, TypeError, IndexError):
        raise _format_error(path, "a header without ids (N,) and weights (N, width)") from None
    is_number = type(num_rows) is int and num_rows >= 0
    ids_end = 8 * num_rows if is_number else 0
    end = ids_end + num_rows * stride if is_number else 0
    wanted = [
        ("I64", [num_rows], [0, ids_end]),
        (DTYPES[table.dtype], [num_rows, table.width], [ids_end, end]),
    ]
    if not is_number or got != wanted:
        raise _format_error(
            path, f"ids and weights {str(got)[:300]}, wanted {wanted} for table {table.name!r}"
        )
    if begin + end != size or begin % 8:
        raise _format_error(
            path, f"{size:,} bytes, and a header of {begin:,} that says {end:,} follow"
        )
    return RowFile(file, table, num_rows, begin, begin + ids_end, stride)


def _format_error(path: Path, got: str) -> CorruptionError:
    return CorruptionError(f"{path}: got {got}; it is no file of exported rows. {AGAIN}")
