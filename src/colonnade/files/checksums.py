"""Checksums of a file's blocks, and files that are checked by them: at first use, in the background, or whole."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from colonnade import _native
from colonnade.errors import CorruptionError, StorageError
from colonnade.files.disk import DiskFile, storage_error
from colonnade.files.untrusted import StrictRecord, open_inside, open_regular_file

BLOCK_BYTES = 1 << 20
"""Size of the blocks that have a checksum each; a file's last block is shorter."""
LOWEST_PRIORITY = 19
AGAIN = "Export the run again, or restore the folder from a copy"


@dataclass(frozen=True, slots=True)
class FileChecksums(StrictRecord):
    """Length and CRC-32C of a file and of its blocks, in hexadecimal digits, 8 a checksum."""

    bytes: Annotated[int, Field(ge=0)]
    crc32c: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    blocks: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")]

    def __post_init__(self) -> None:
        if len(self.blocks) != 8 * num_blocks(self.bytes):
            raise ValueError(
                f"got {len(self.blocks)} digits of checksums for a file of {self.bytes} bytes"
            )


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def compute_checksums(path: Path) -> FileChecksums:
    """Read a file whole. Raises StorageError."""
    file = open_regular_file(path)
    size = 0
    whole = 0
    blocks = []
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        while count := os.preadv(file.fd, [buffer.data], size):
            whole = _native.crc32c(buffer[:count], whole)
            blocks.append(_native.crc32c(buffer[:count]))
            size += count
            if count < BLOCK_BYTES:
                break
    except OSError as error:
        raise storage_error(error, "read", path) from error
    finally:
        file.close()
    return FileChecksums(size, f"{whole:08x}", "".join(f"{block:08x}" for block in blocks))


class CheckedFile:
    """Open file with bytes that are compared with their checksums at the first read. Any thread may read it."""

    def __init__(self, file: DiskFile, checksums: FileChecksums) -> None:
        """Take an open file. Raises CorruptionError if its length is not the one of the checksums."""
        self.file = file
        self.path = file.path
        self.num_bytes = checksums.bytes
        status = os.fstat(file.fd)
        if status.st_size != self.num_bytes:
            raise CorruptionError(
                f"{self.path}: got {status.st_size:,} bytes, wanted {self.num_bytes:,} by its model.json. {AGAIN}"
            )
        self.checked = np.zeros(num_blocks(self.num_bytes), np.uint8)
        self.is_checked = False
        """True once every block was checked and is right."""
        self._wanted = np.frombuffer(bytes.fromhex(checksums.blocks), ">u4")
        self._checksums = checksums
        self._identity = _identity(status)
        self._checked_identity = self._identity

    def take_over(self, other: CheckedFile) -> None:
        """Skip blocks that `other` has checked, if it is the same file, unchanged."""
        if (other._identity, other._checksums) == (self._identity, self._checksums):
            self.checked = other.checked
            self.is_checked = other.is_checked

    def duplicate(self) -> CheckedFile:
        """Return the same file with a descriptor of its own; both know of the blocks that either checks. Raises
        StorageError."""
        other = copy.copy(self)
        try:
            other.file = DiskFile(self.path, os.dup(self.file.fd))
        except OSError as error:
            raise storage_error(error, "open", self.path) from error
        return other

    def forget_checks_if_written(self) -> bool:
        """Forget which blocks are right if the open file was written to, and return whether it was."""
        if (identity := _identity(os.fstat(self.file.fd))) == self._checked_identity:
            return False
        self._checked_identity = identity
        self.checked[:] = 0
        self.is_checked = False
        return True

    @property
    def is_replaced(self) -> bool:
        """True if another file has this path now, or the file was written to."""
        try:
            return _identity(os.stat(self.path)) != self._identity
        except OSError:
            return False

    def read(self, first_byte: int, num_bytes: int) -> np.ndarray:
        """Return `num_bytes` bytes (uint8) from byte `first_byte` on. Raises CorruptionError naming the block,
        StorageError."""
        begin = first_byte // BLOCK_BYTES
        end = num_blocks(first_byte + num_bytes)
        start = begin * BLOCK_BYTES
        data = np.empty(min(end * BLOCK_BYTES, self.num_bytes) - start, np.uint8)
        self._read_into(start, data)
        for block in range(begin, end):
            if not self.checked[block]:
                at = (block - begin) * BLOCK_BYTES
                self._compare_checksum(block, data[at : at + BLOCK_BYTES])
        return data[first_byte - start : first_byte - start + num_bytes]

    def check_block(self, block: int) -> None:
        """Check one block. Raises CorruptionError naming the block, StorageError."""
        start = block * BLOCK_BYTES
        data = np.empty(min(BLOCK_BYTES, self.num_bytes - start), np.uint8)
        self._read_into(start, data)
        self._compare_checksum(block, data)

    def check_all(self, pause: Callable[[float], object] = lambda _: None) -> None:
        """Check every unchecked block; `pause` gets the seconds of each check. Raises as `check`."""
        for block in np.flatnonzero(self.checked == 0).tolist():
            began = time.perf_counter()
            self.check_block(block)
            if pause(time.perf_counter() - began):
                return
        self.is_checked = True

    def _read_into(self, start: int, data: np.ndarray) -> None:
        done = 0
        try:
            while done < len(data):
                count = os.preadv(self.file.fd, [data[done:].data], start + done)
                if not count:
                    raise CorruptionError(
                        f"{self.path}: ends at byte {start + done:,}, wanted {self.num_bytes:,} bytes: it was cut "
                        f"short. {AGAIN}"
                    )
                done += count
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error(error, "read", self.path) from error

    def _compare_checksum(self, block: int, data: np.ndarray) -> None:
        got = _native.crc32c(data)
        wanted = int(self._wanted[block])
        if got != wanted:
            raise CorruptionError(
                f"{self.path}: got checksum {got:08x} of block {block} (bytes {block * BLOCK_BYTES:,} to "
                f"{block * BLOCK_BYTES + len(data):,}), wanted {wanted:08x}: it is torn, altered or another file. "
                f"{AGAIN}"
            )
        self.checked[block] = 1


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_checked(folder: Path, name: str, checksums: FileChecksums) -> CheckedFile:
    """Open a file of an export. Raises CorruptionError for another length, or a name that leads out of the folder;
    StorageError."""
    return CheckedFile(open_inside(folder, name), checksums)


class Scrub:
    """Thread of the lowest priority that checks the unread blocks of files, half of the time at most."""

    def __init__(self, files: Iterable[CheckedFile]) -> None:
        self.problem: StorageError | None = None
        """First damage detected; None if none was."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._check_files, args=(tuple(files),), name="scrub", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until every file is checked."""
        self._thread.join()

    def _check_files(self, files: tuple[CheckedFile, ...]) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        for file in files:
            try:
                file.check_all(self._stop.wait)
            except StorageError as error:
                self.problem = self.problem or error
            if self._stop.is_set():
                return
