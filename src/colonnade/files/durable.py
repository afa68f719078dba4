"""Small files that are replaced atomically and carry a checksum: manifests and headers of checkpoints.

A durable file is its content followed by one line, `\\ncrc32c xxxxxxxx\\n`: the checksum of the content in eight
lower-case hexadecimal digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.files.disk import Disk
from colonnade.files.untrusted import read_regular

TEMPORARY_SUFFIX = ".tmp"


def write_durably(disk: Disk, path: Path, content: bytes, *, checked: bool = True) -> None:
    """Create or replace `path`. When this returns, the file survives a crash; until then the old one does.

    Without `checked` the file has no checksum line: for files that people edit. One writer at a time. After a
    StorageError the path has either the old file or the new one, whole.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    disk.unlink(temporary)
    try:
        file = disk.create(temporary)
        try:
            disk.append(file, 0, append_checksum(content) if checked else content)
            disk.sync(file)
        finally:
            file.close()
        disk.rename(temporary, path)
    except StorageError:
        _try_unlink(disk, temporary)
        raise
    disk.sync_dir(path.parent)


def read_verified(path: Path) -> bytes:
    """Return the content of a durable file. Raises CorruptionError if a byte differs, StorageError if unreadable."""
    return verify_content(path, read_regular(path))


def verify_content(path: Path, data: bytes) -> bytes:
    """Return the content in a durable file's bytes. Raises CorruptionError if a byte differs."""
    length = max(len(data) - len(checksum_line(b"")), 0)
    content = data[:length]
    last_line = data[length:]
    if last_line != checksum_line(content):
        raise CorruptionError(
            f"{path}: got a last line {last_line!r}, wanted {checksum_line(content)!r} for the "
            f"{len(content)} bytes before it: the file is torn or altered. Restore it from a copy, or "
            "go back to an older commit"
        )
    return content


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """Result of the verification of one file."""

    path: Path
    num_bytes: int
    problem: str = ""
    """Description of the damage; "" if every byte is right."""


def verify_file(path: Path, read_file: Callable[[], object]) -> VerifiedFile:
    """Verify one file. read_file: reads the file and raises what is wrong with it."""
    try:
        read_file()
        return VerifiedFile(path, path.stat().st_size)
    except (CorruptionError, CheckpointError, StorageError) as error:
        problem = (
            str(error.strerror if error.strerror else error)
            if isinstance(error, OSError)
            else str(error)
        )
        return VerifiedFile(path, path.stat().st_size if path.is_file() else 0, problem)


def verify_durable(path: Path) -> VerifiedFile:
    """Verify a small file that has a checksum line."""
    return verify_file(path, lambda: read_verified(path))


def read_checksum(path: Path) -> str:
    """Read the checksum in a durable file's last line; "" if it has none."""
    try:
        with path.open("rb") as file:
            file.seek(-len(checksum_line(b"")), os.SEEK_END)
            last_line = file.read()
    except OSError:  # shorter than the line, or unreadable: reading the file reports why
        return ""
    return last_line[-9:-1].decode("latin-1")


def checksum_line(content: bytes | np.ndarray) -> bytes:
    """Build a durable file's last line."""
    return b"\ncrc32c %08x\n" % _native.crc32c(np.frombuffer(content, np.uint8))


def append_checksum(content: bytes | np.ndarray) -> memoryview:
    """Build a durable file's bytes. numpy copies them without the interpreter's lock, so training continues."""
    last_line = checksum_line(content)
    data = np.empty(len(content) + len(last_line), np.uint8)
    data[: len(content)] = np.frombuffer(content, np.uint8)
    data[len(content) :] = np.frombuffer(last_line, np.uint8)
    return data.data


def _try_unlink(disk: Disk, path: Path) -> None:
    """Remove a file while a more important error is raised; ignore failures."""
    try:
        disk.unlink(path)
    except StorageError:
        pass
