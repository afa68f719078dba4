"""Memory for messages to ranks of one host: rooms, which they map and read, so that no byte of them travels.

Each room is a nameless file in memory (memfd), which others open by the number of its process and its own there: no
folder is needed, /dev/shm's size does not count, and what is left of a killed process is nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import WorldError

SMALLEST = 1 << 17  # bytes
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def size_of_room(num_bytes: int) -> int:
    """Pure. A power of two, so that steps whose messages differ a little use the same rooms. What is not written to
    takes no memory."""
    return max(SMALLEST, 1 << max(0, num_bytes - 1).bit_length())


class Rooms:
    """This process's own. A room serves again once no tensor looks into it any more, so there are as many as were in
    use at once, of each size; they are given back by `close`, or when the process ends. Any thread may ask."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._files: dict[int, int] = {}  # by where a room begins

    def empty(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8, at the begin of a room. Raises WorldError where the system gives none."""
        size = size_of_room(num_bytes)
        try:  # one call, for other threads take rooms, too
            memory = self._free[size].pop()
        except IndexError:
            memory = self._new(size)
        block = np.frombuffer(memory, np.uint8)
        # Lists are appended to and popped from at once, so this may run at any point of any thread.
        weakref.finalize(block, self._free[size].append, memory).atexit = False
        return torch.from_numpy(block)[:num_bytes]

    def file_of(self, values: Tensor) -> int | None:
        """Of the room that they lie in; None: in none."""
        return self._files.get(values.untyped_storage().data_ptr())

    @property
    def num_bytes(self) -> int:
        """Of all rooms, as if each had been written to as a whole."""
        return sum(os.fstat(file).st_size for file in self._files.values())

    def close(self) -> None:
        """Nobody reads any of them any more: their memory is given back when no tensor looks into it."""
        self._free.clear()
        while self._files:
            os.close(self._files.popitem()[1])

    def _new(self, size: int) -> mmap.mmap:
        file = -1
        try:
            file = os.memfd_create("colonnade")
            os.truncate(file, size)
            memory = mmap.mmap(file, size)
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise WorldError(
                f"got no room of {size / 1e6:.0f} MB for a message to ranks of this host ({error.strerror}), beside "
                f"{len(self._files)} of {self.num_bytes / 1e6:.0f} MB, wanted one; raise the limits of open files and "
                "of addresses (ulimit -n, ulimit -v)"
            ) from None
        self._files[np.frombuffer(memory, np.uint8).ctypes.data] = file  # open: others come to it
        return memory


class OthersRooms:
    """Rooms of another process, mapped when they are first asked for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, tuple[int, np.ndarray]] = {}

    def address(self, file: int) -> int:
        """Where that file's room begins here. Raises OSError where it is not there any more, WorldError where this
        process has no room for it."""
        if file not in self._mapped:
            try:
                memory = self._map(file)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise WorldError(
                    f"cannot read a message of process {self._pid} of this host ({error.strerror}), beside "
                    f"{len(self._mapped)} rooms of it, wanted one more; raise the limits of open files and of "
                    "addresses (ulimit -n, ulimit -v)"
                ) from None
            # Another thread may have mapped it meanwhile, and be reading.
            block = np.frombuffer(memory, np.uint8)
            self._mapped.setdefault(file, (block.ctypes.data, block))
        return self._mapped[file][0]

    def _map(self, file: int) -> mmap.mmap:
        here = os.open(f"/proc/{self._pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(here, 0, prot=mmap.PROT_READ)
        finally:
            os.close(here)
