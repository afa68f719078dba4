"""A file's bytes as read-only memory, also those that are still to come, which Python's mmap refuses."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from colonnade.errors import StorageError
from colonnade.store.disk import DiskFile


class FileMapping:
    """`num_bytes` from the file's start at `address`. Loads beyond the file's end kill the process: the caller knows
    how much is there, and nobody may shorten the file while it is mapped. It ends with `close`, or when nobody holds
    the object any more; from then on nobody may load from it."""

    def __init__(self, file: DiskFile, num_bytes: int) -> None:
        """Raises StorageError."""
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        address = library.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fd, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise StorageError(
                number,
                f"{file.path}: could not map: {os.strerror(number)}. Raise the limit on address space "
                "(`ulimit -v`), or on mappings (vm.max_map_count)",
            )
        self.address = int(address)
        self.close = weakref.finalize(self, library.munmap, address, num_bytes)
        self.close.atexit = False  # the system does that, and threads may be loading from it still
