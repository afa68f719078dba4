"""Disk operations of stores and checkpoints, all through one method; and files mapped as read-only memory.

Every changing system call is a `Change` that passes `Disk.perform`; tests override that one method to record a trace,
to kill the process, or to refuse with ENOSPC. Reads do not pass it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from colonnade import _native
from colonnade.errors import StorageError, StoreLocked

Verb = Literal[
    "make_dir", "create", "append", "truncate", "sync", "rename", "unlink", "sync_dir", "lock"
]
T = TypeVar("T")


_NOTHING = memoryview(b"")


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError if the file system of a folder has less free space.

    Reserving more would take all of it, from everybody who writes there, before it fails."""
    usage = shutil.disk_usage(folder)
    if usage.total and num_bytes > usage.free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


class DiskFile:
    """Open file. Its descriptor closes with `close`, or when the last reader drops the object."""

    __slots__ = ("__weakref__", "close", "fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False  # the system closes it, and other threads may still open files


@dataclass(frozen=True, slots=True)
class Change:
    """Description of one change of the disk, before it happens."""

    verb: Verb
    path: Path
    file: DiskFile | None = None  # append, truncate, sync
    offset: int = 0  # append: of the first byte; truncate: the new length
    data: memoryview = _NOTHING  # append
    target: Path | None = None  # rename


class Disk:
    """Disk of this machine. Every method raises StorageError naming the file and the remedy."""

    def perform(self, change: Change, action: Callable[[], T]) -> T:
        """Perform one change. Overriders may refuse it (OSError), record it, or never return."""
        return action()

    def make_dir(self, path: Path) -> None:
        """Create `path` and its missing parents, durably."""
        if path.is_dir():
            return
        if path.parent != path:
            self.make_dir(path.parent)
        self._perform_checked(Change("make_dir", path), lambda: path.mkdir(exist_ok=True))
        self.sync_dir(path.parent)

    def create(self, path: Path, *, direct: bool = False) -> DiskFile:
        """Create an empty file, open for reading and writing. StorageError if it exists.

        `direct`: bypass the page cache, if the file system can. Then data, offsets and lengths of `append` must be
        multiples of 4096 bytes, in memory too.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        direct_flag = getattr(os, "O_DIRECT", 0) if direct else 0

        def create() -> int:
            try:
                return os.open(path, flags | direct_flag, 0o644)
            except OSError as error:
                if not direct_flag or error.errno != errno.EINVAL:
                    raise
                path.unlink(
                    missing_ok=True
                )  # some file systems create the file, then refuse the flag
                return os.open(path, flags, 0o644)

        return DiskFile(path, self._perform_checked(Change("create", path), create))

    def append(self, file: DiskFile, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data`, plain bytes, at `offset`, the end of the valid bytes.

        On failure the bytes from `offset` on are undefined; the bytes before are untouched.
        """
        view = memoryview(data)

        def write() -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(file.fd, view[done:], offset + done)

        self._perform_checked(
            Change("append", file.path, file=file, offset=offset, data=view), write
        )

    def truncate(self, file: DiskFile, length: int) -> None:
        change = Change("truncate", file.path, file=file, offset=length)
        self._perform_checked(change, lambda: os.ftruncate(file.fd, length))

    def sync(self, file: DiskFile) -> None:
        """Make content and length of the file durable; its name only after `sync_dir`."""
        self._perform_checked(Change("sync", file.path, file=file), lambda: os.fsync(file.fd))

    def rename(self, path: Path, target: Path) -> None:
        """Atomically replace `target`; durable only after `sync_dir`."""
        self._perform_checked(
            Change("rename", path, target=target), lambda: os.replace(path, target)
        )

    def unlink(self, path: Path) -> None:
        """Remove a file; absent is not an error. Durable only after `sync_dir`."""
        self._perform_checked(Change("unlink", path), lambda: path.unlink(missing_ok=True))

    def sync_dir(self, path: Path) -> None:
        """Make names created, renamed or removed in `path` durable."""

        def sync() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        self._perform_checked(Change("sync_dir", path), sync)

    def lock(self, path: Path) -> DiskFile:
        """Lock `path` (created if absent) until the file is closed or this process dies.

        Raises StoreLocked if any process has the lock, this one included.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = DiskFile(
            path, self._perform_checked(Change("lock", path), lambda: os.open(path, flags, 0o644))
        )
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise storage_error(error, "lock", path) from error
            raise StoreLocked(
                error.errno,
                f"{path.parent} is open for writing by another run; wanted to be the only writer. "
                f"Stop that run (`fuser {path}` names it), or open the store read-only",
            ) from error
        return file

    def _perform_checked(self, change: Change, action: Callable[[], T]) -> T:
        try:
            return self.perform(change, action)
        except OSError as error:
            raise storage_error(error, change.verb, change.path) from error


_CONTINUE = (
    "run the same command with the same --run (or commit again); steps committed, if there are any, "
    "are intact"
)
_REMEDIES = {
    errno.ENOSPC: f"Free space on this file system or give another directory, then {_CONTINUE}",
    errno.EDQUOT: f"Raise the quota, free space or give another directory, then {_CONTINUE}",
    errno.EROFS: "Choose a directory on a writable file system",
    errno.EACCES: "Make the directory writable for this user, or choose another",
    errno.EPERM: "Make the directory writable for this user, or choose another",
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "Raise the system's limit on open files",
    errno.ENOENT: "Check the path; a file of a store may only be removed by the store",
}


def storage_error(error: OSError, verb: str, path: Path) -> StorageError:
    """Build the message and remedy for an operation `verb` on `path` that the system refused."""
    remedy = _REMEDIES.get(error.errno or 0, f"Check this disk (`dmesg`), then {_CONTINUE}")
    return StorageError(
        error.errno, f"{path}: could not {verb.replace('_', ' ')}: {error.strerror}. {remedy}"
    )


class FileMapping:
    """Mapping of `num_bytes` of a file from byte `offset` on at `address`, followed by `room` bytes of writable memory.

    The writable memory begins at the next page.

    Loads beyond the file's end, and loads that its disk cannot answer, read zeros and set `is_damaged` permanently. The
    mapping ends with `close`, or when the last reference is dropped; loads after that are errors.
    """

    def __init__(
        self,
        file: DiskFile,
        num_bytes: int,
        *,
        offset: int = 0,
        room: int = 0,
        is_random: bool = False,
    ) -> None:
        """Map the file. Raises StorageError. offset: a multiple of the page size. is_random: pages beside a missing one
        are not read with it."""
        address, number = _native.map_file(file.fd, offset, num_bytes, room, is_random)
        if number:
            raise StorageError(
                number,
                f"{file.path}: could not map: {os.strerror(number)}. Raise the limit on address space "
                "(`ulimit -v`), or on mappings (vm.max_map_count)",
            )
        self.address = address
        self.close = weakref.finalize(self, _native.unmap_file, address)
        self.close.atexit = False  # the system unmaps it, and other threads may still load from it

    @property
    def is_damaged(self) -> bool:
        """True once a load has failed. Results computed from the mapping are then void."""
        return _native.is_damaged(self.address)
