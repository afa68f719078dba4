"""A file's bytes as read-only memory, also those that are still to come, which Python's mmap refuses."""

from __future__ import annotations

import ctypes
import mmap
import os

from colonnade.errors import StorageError
from colonnade.store.disk import DiskFile


class FileMapping:
    """`num_bytes` from the file's start at `address`. Loads beyond the file's end kill the process: the caller knows
    how much is there, and nobody may shorten the file while it is mapped."""

    def __init__(self, file: DiskFile, num_bytes: int) -> None:
        """Raises StorageError."""
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        self._library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._num_bytes = num_bytes
        address = self._library.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fd, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise StorageError(
                number,
                f"{file.path}: could not map: {os.strerror(number)}. Raise the limit on address space "
                "(`ulimit -v`), or on mappings (vm.max_map_count)",
            )
        self.address = int(address)

    def close(self) -> None:
        """Nobody may load from it any more."""
        if self.address:
            self._library.munmap(self.address, self._num_bytes)
        self.address = 0
