"""Small files that are either there, whole and checked, or not there: manifests, and the run-level commit.

A durable file is its content followed by one line, `\\ncrc32c xxxxxxxx\\n`: the checksum of the content in
eight lower-case hexadecimal digits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from colonnade import _native
from colonnade.errors import CorruptionError, StorageError
from colonnade.store.disk import Disk, storage_error

TEMPORARY_SUFFIX = ".tmp"


def write_durably(disk: Disk, path: Path, content: bytes, *, checked: bool = True) -> None:
    """Create or replace `path`. When this returns it survives a crash; until then the old file does.

    Without `checked` there is no checksum line: for files that people edit.
    One writer at a time. After a StorageError either the old file or the new one is there, whole.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    disk.unlink(temporary)
    try:
        file = disk.create(temporary)
        try:
            disk.append(file, 0, content + (_trailer(content) if checked else b""))
            disk.sync(file)
        finally:
            file.close()
        disk.rename(temporary, path)
    except StorageError:
        _try_unlink(disk, temporary)
        raise
    disk.sync_dir(path.parent)


def read_verified(path: Path) -> bytes:
    """The content of a durable file. Raises CorruptionError if a byte differs, StorageError if unreadable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise storage_error(error, "read", path) from error
    length = len(data) - len(_trailer(b""))
    content, trailer = data[: max(length, 0)], data[max(length, 0) :]
    if trailer != _trailer(content):
        raise CorruptionError(
            f"{path}: got a last line {trailer!r}, wanted {_trailer(content)!r} for the "
            f"{len(content)} bytes before it: the file is torn or altered. Restore it from a copy, or "
            "go back to an older commit"
        )
    return content


def _trailer(content: bytes) -> bytes:
    return b"\ncrc32c %08x\n" % _native.crc32c(np.frombuffer(content, np.uint8))


def _try_unlink(disk: Disk, path: Path) -> None:
    """Tidy up while another error is on its way to the user, which matters more than this one."""
    try:
        disk.unlink(path)
    except StorageError:
        pass
