"""Random access to lines of text files, and the search for a data set's files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError

DATA_VARIABLE = "COLONNADE_DATA"


def check_regular_file(path: Path) -> Path:
    """Return `path` if it is a regular file. Raises DataError else: a pipe would hang, skipping it lose samples."""
    if path.exists() or path.is_symlink():
        if path.is_file():
            return path
        raise DataError(
            f"{path}: got a folder, a pipe, a device or a broken link, wanted a regular file. Write the samples to a "
            "file, or take this out of the data"
        )
    raise DataError(f"{path}: no such file or folder. Check the path given with --path")


def locate_data_file(path: str | Path | None, *, data_set_folder: str, file_name: str) -> Path:
    """Find the file `file_name` of the data set stored in `data_set_folder`.

    `path` is the file itself, the folder that holds it, or a folder of data sets. Without it,
    `$COLONNADE_DATA` is the folder of data sets. Raises DataError that lists the paths tried.
    """
    if path is not None:
        start = Path(path).expanduser()
        candidates = (
            [start / file_name, start / data_set_folder / file_name] if start.is_dir() else [start]
        )
    else:
        root = os.environ.get(DATA_VARIABLE)
        candidates = [Path(root).expanduser() / data_set_folder / file_name] if root else []
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = (
        ", ".join(str(c) for c in candidates) or f"nowhere (no path given, {DATA_VARIABLE} not set)"
    )
    raise DataError(
        f"no file {file_name} of {data_set_folder}: looked at {tried}. "
        f"Give its folder with --path, or set {DATA_VARIABLE} to the folder that holds {data_set_folder}"
    )


STRIDE = 256
"""Number of lines per indexed byte offset: 8 bytes of index per 256 lines."""
SCAN_BYTES = 8 << 20
GZIP_MAGIC = b"\x1f\x8b"
NEWLINE = 0x0A


def build_field_error(
    path: Path, line: int, column: str | None, *, got: str, wanted: str, fix: str
) -> DataError:
    """Build the error for a faulty field. `line` counts from 1. `column` None: the whole line is at fault."""
    where = f"{path}, line {line}" + (f", column {column}" if column else "")
    return DataError(f"{where}: got {got}, wanted {wanted}. {fix}")


def format_excerpt(field: bytes) -> str:
    """Format a field for an error message, at most 40 bytes of it."""
    return (
        repr(field)[1:] if len(field) <= 40 else f"{repr(field[:40])[1:]} ... ({len(field)} bytes)"
    )


def read_range(path: Path, begin: int, end: int, num_bytes: int) -> bytes:
    """Read bytes begin .. end-1 of a file that had `num_bytes` when it was opened. Raises DataError if it changed."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                raise DataError(
                    f"{path}: its size was {num_bytes} bytes when it was opened and has changed since. Leave the file "
                    "alone while it is read, and open it again"
                )
            file.seek(begin)
            return file.read(end - begin)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True, eq=False)
class LineFile:
    """Index over a file of newline-ended lines. A last line without a newline counts."""

    path: Path
    num_lines: int
    num_bytes: int
    ends_in_newline: bool
    offsets: NDArray[np.int64]  # (ceil(num_lines / STRIDE) + 1,): bytes before line 0, STRIDE, ...

    def read_lines(self, first_line: int, end_line: int) -> bytes:
        """Return lines first_line .. end_line-1, counted from 0, newlines included. Reads the file once."""
        if not 0 <= first_line <= end_line <= self.num_lines:
            raise IndexError(f"lines {first_line}..{end_line} of a file of {self.num_lines}")
        if first_line == end_line:
            return b""
        low = first_line // STRIDE
        high = -(-end_line // STRIDE)
        begin = int(self.offsets[low])
        block = read_range(self.path, begin, int(self.offsets[high]), self.num_bytes)
        head = _skip_lines(block, first_line - low * STRIDE, 0)
        last = end_line - (high - 1) * STRIDE  # lines to read of the last stride, 1 .. STRIDE
        tail = _skip_lines(block, last, int(self.offsets[high - 1]) - begin)
        return block[head:tail]


def read_all_lines(path: str | Path) -> list[bytes]:
    """Read the lines of a file, without their newlines. Raises DataError as `open_line_file`."""
    file = open_line_file(path)
    return file.read_lines(0, file.num_lines).removesuffix(b"\n").split(b"\n")


def _skip_lines(text_block: bytes, num_lines: int, begin_position: int) -> int:
    """Return the position just after the num_lines-th newline from `begin_position` on; the end if there are fewer."""
    if num_lines == 0:
        return begin_position
    # A stride is short, so looking at it byte by byte in numpy beats `num_lines` calls of bytes.find.
    window = np.frombuffer(text_block, dtype=np.uint8, offset=begin_position)
    size = 4096
    while True:
        newlines = np.flatnonzero(window[:size] == NEWLINE)
        if len(newlines) >= num_lines:
            return begin_position + int(newlines[num_lines - 1]) + 1
        if size >= len(window):
            return len(text_block)
        size *= 4


def open_line_file(path: str | Path) -> LineFile:
    """Read the file once to index its lines. Raises DataError: missing, a directory, empty, gzipped, unreadable."""
    path = Path(path)
    strides: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    num_newlines = 0
    num_bytes = 0
    last = NEWLINE
    if path.exists() and not path.is_dir():
        check_regular_file(path)
    try:
        with path.open("rb") as file:
            while block := file.read(SCAN_BYTES):
                if num_bytes == 0 and block.startswith(GZIP_MAGIC):
                    raise DataError(
                        f"{path}: got a gzip file (it starts with 1f 8b), wanted plain text. "
                        f"Unpack it first: gunzip -c {path.name} > {path.stem}.unpacked.txt"
                    )
                ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE)
                # The k-th newline of the file (from 1) ends line k - 1; line k starts after it.
                first = (-num_newlines - 1) % STRIDE
                strides.append(ends[first::STRIDE] + (num_bytes + 1))
                num_newlines += len(ends)
                num_bytes += len(block)
                last = block[-1]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file. Check the path given with --path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: got a directory, wanted a file. Name the file in it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if num_bytes == 0:
        raise DataError(
            f"{path}: got an empty file, wanted at least one line. Was it fully written?"
        )
    num_lines = num_newlines + (last != NEWLINE)
    offsets = np.concatenate(strides)[: -(-num_lines // STRIDE)]
    return LineFile(
        path=path,
        num_lines=num_lines,
        num_bytes=num_bytes,
        ends_in_newline=last == NEWLINE,
        offsets=np.append(offsets, num_bytes),
    )
