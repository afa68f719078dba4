"""Where a data set's files lie."""

from __future__ import annotations

import os
from pathlib import Path

from colonnade.errors import DataError

VARIABLE = "COLONNADE_DATA"


def check_regular(path: Path) -> Path:
    """Return the path of a regular file. Raises DataError: a pipe would hang, and skipping one would lose samples."""
    if path.exists() or path.is_symlink():
        if path.is_file():
            return path
        raise DataError(
            f"{path}: got a folder, a pipe, a device or a broken link, wanted a regular file. Write the samples to a "
            "file, or take this out of the data"
        )
    raise DataError(f"{path}: no such file or folder. Check the path given with --path")


def locate(path: str | Path | None, *, folder: str, file: str) -> Path:
    """The file `file` of the data set kept in `folder`.

    `path` is the file itself, the folder that holds it, or a folder of data sets. Without it,
    `$COLONNADE_DATA` is the folder of data sets. Raises DataError saying where it looked.
    """
    if path is not None:
        given = Path(path).expanduser()
        candidates = [given / file, given / folder / file] if given.is_dir() else [given]
    else:
        root = os.environ.get(VARIABLE)
        candidates = [Path(root).expanduser() / folder / file] if root else []
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(str(c) for c in candidates) or f"nowhere (no path given, {VARIABLE} not set)"
    raise DataError(
        f"no file {file} of {folder}: looked at {looked}. "
        f"Give its folder with --path, or set {VARIABLE} to the folder that holds {folder}"
    )
