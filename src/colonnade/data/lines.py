"""Text files: bytes, lines, errors that name a line, and the search for a data set's files."""

from __future__ import annotations

import os
from pathlib import Path

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
    raise DataError(f"{path}: no such file or folder. Check its name and its folder")


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


def read_all_lines(path: str | Path) -> list[bytes]:
    """Read the lines of a file, without their newlines. Raises DataError: missing, a folder, empty, gzipped."""
    path = check_regular_file(Path(path))
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not text:
        raise DataError(
            f"{path}: got an empty file, wanted at least one line. Was it fully written?"
        )
    check_not_gzipped(path, text)
    return text.removesuffix(b"\n").split(b"\n")


def check_not_gzipped(path: Path, text: bytes) -> None:
    """Raise DataError if `text`, with which a file begins, is that of a gzip file."""
    if text.startswith(GZIP_MAGIC):
        raise DataError(
            f"{path}: got a gzip file (it starts with 1f 8b), wanted plain text. Unpack it first: gunzip {path.name}"
        )
