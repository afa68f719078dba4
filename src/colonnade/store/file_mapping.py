"""A file's bytes as read-only memory, also those that are still to come, which Python's mmap refuses."""

from __future__ import annotations

import os
import weakref

from colonnade import _native
from colonnade.errors import StorageError
from colonnade.store.disk import DiskFile


class FileMapping:
    """`num_bytes` of a file from byte `offset` on at `address`, and `room` bytes of writable memory from the next page
    on.

    Loads beyond the file's end, and loads that its disk cannot answer, read zeros and set `is_damaged` for good. It
    ends with `close`, or when nobody holds the object any more; from then on nobody may load from it."""

    def __init__(self, file: DiskFile, num_bytes: int, *, offset: int = 0, room: int = 0) -> None:
        """Raises StorageError. offset: a multiple of the page size."""
        address, number = _native.map_file(file.fd, offset, num_bytes, room)
        if number:
            raise StorageError(
                number,
                f"{file.path}: could not map: {os.strerror(number)}. Raise the limit on address space "
                "(`ulimit -v`), or on mappings (vm.max_map_count)",
            )
        self.address = address
        self.close = weakref.finalize(self, _native.unmap_file, address)
        self.close.atexit = False  # the system does that, and threads may be loading from it still

    @property
    def is_damaged(self) -> bool:
        """Whether a load failed. What was computed from the mapping is then void."""
        return _native.is_damaged(self.address)
