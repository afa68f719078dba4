"""Shared memory for messages between ranks of one host, so that no byte of them passes a socket.

Each room is a nameless file in memory (memfd), which others open by the number of its process and its own there: no
folder is needed, /dev/shm's size does not count, and what is left of a killed process is nothing.

    sender                                       receiver
    has its message in a room (`Rooms`)
    ticket: file, place in it, what was read ->  maps the room once, and copies its part out of it
    keeps the room                           <-  a later ticket of the same channel: what was read

Nothing but messages is shared: that one is written, and that it has been read, is told through torch.distributed, so
memory is as ordered as its calls are, on any processor. A channel so keeps the rooms of its last two calls or so.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import WorldError
from colonnade.ops.memory import empty

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


LEAST_BYTES = 1 << 18
"""That one of two ranks sends the other, for both to send tickets: measured, of smaller ones the processors gain
nothing."""
TICKET = struct.Struct("=qqq")  # file, place, number of the first message that is not read


def by_ticket(sent: Sequence[int], got: Sequence[int], me: int) -> list[bool]:
    """Pure, and the same at both ends. With whom a call of these bytes exchanges tickets: both ways or none, for what
    was read is told by tickets."""
    pairs = zip(sent, got, strict=True)
    return [rank != me and max(pair) >= LEAST_BYTES for rank, pair in enumerate(pairs)]


class Lane:
    """One channel's messages, numbered mate by mate, as its calls begin in one order on all ranks. They may end in any
    order, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, int] = defaultdict(int)
        self._unread: dict[int, set[int]] = defaultdict(set)
        self._read: dict[int, int] = defaultdict(int)  # by mates: all that came before this one
        self._held: list[tuple[Tensor, Mapping[int, int]]] = []

    def begin(self, room: Tensor, mates: Iterable[int]) -> dict[int, tuple[int, int]]:
        """A message to each of `mates`, and one from each: by mate its number, and that of the first which was not
        read here. Keeps `room`."""
        with self._lock:
            found = {}
            for mate in mates:
                number = self._begun[mate]
                self._begun[mate] += 1
                self._unread[mate].add(number)
                found[mate] = number, min(self._unread[mate])
            self._held.append((room, {mate: number for mate, (number, _) in found.items()}))
            return found

    def end(self, read: Mapping[int, tuple[int, int]]) -> None:
        """A call's messages were read here. read: by mate the number of its message, and of the first message to it
        that was not read there when it sent that one."""
        with self._lock:
            for mate, (number, there) in read.items():
                self._unread[mate].remove(number)
                self._read[mate] = max(there, self._read[mate])
            self._held = [
                (room, numbers)
                for room, numbers in self._held
                if any(number >= self._read[mate] for mate, number in numbers.items())
            ]

    @property
    def num_held(self) -> int:
        return len(self._held)


@dataclass(slots=True)
class Post:
    """A call of tickets under way. What gloo is to carry: `send`, of so many bytes to each member, and `got`."""

    mates: Mates
    lane: Lane
    members: Sequence[int]
    numbers: Mapping[int, tuple[int, int]]
    keep: Tensor
    received: Tensor
    received_bytes: Sequence[int]
    send: Tensor
    send_bytes: Sequence[int]
    got: Tensor
    got_bytes: Sequence[int]

    def arrive(self) -> None:
        """gloo has carried it. Once. Raises OSError where a mate is gone."""
        there, here = self.received.data_ptr(), self.got.data_ptr()
        tickets: Any = self.got.numpy()
        read = {}
        places = zip(
            self.members, self.received_bytes, accumulate(self.received_bytes, initial=0),
            accumulate(self.got_bytes, initial=0), strict=False,
        )  # fmt: skip
        for member, size, to, at in places:
            if member in self.numbers:
                file, place, unread = TICKET.unpack_from(tickets, at)
                if size:
                    memmove(there + to, self.mates.others[member].address(file) + place, size)
                read[member] = self.numbers[member][0], unread
            elif member != self.mates.rank:
                memmove(there + to, here + at, size)
        self.lane.end(read)


@dataclass(slots=True)
class Mates:
    """The ranks of this rank's host, which can read each other's rooms."""

    rank: int
    others: Mapping[int, OthersRooms]
    rooms: Rooms = field(default_factory=Rooms)
    lanes: dict[str, Lane] = field(default_factory=dict)

    def room(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(num_elements,), to be written to and sent once."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < LEAST_BYTES:
            return empty(num_elements, dtype=dtype)
        return self.rooms.empty(num_bytes).view(dtype)

    def post(
        self,
        channel: str,
        members: Sequence[int],
        send: Tensor,
        sent: Sequence[int],
        received: Tensor,
        got: Sequence[int],
    ) -> Post | None:
        """Of a call among `members`, of this host all, that sends each `sent` bytes of `send`, and gets `got`. None:
        the call is too small for tickets. Nobody may write to `send` again if it lies in a room of `rooms`; else it
        is copied. Raises WorldError where there is no room."""
        me = members.index(self.rank)
        tickets = by_ticket(sent, got, me)
        if not any(tickets):
            return None
        if self.rooms.file_of(send) is None:
            room = self.rooms.empty(send.nbytes)
            memmove(room.data_ptr(), send.data_ptr(), send.nbytes)
        else:
            room = send
        file, begin = self.rooms.file_of(room), room.untyped_storage().data_ptr()
        lane = self.lanes.setdefault(channel, Lane())
        numbers = lane.begin(room, [m for m, by in zip(members, tickets, strict=True) if by])
        out = [TICKET.size if by else size for by, size in zip(tickets, sent, strict=True)]
        back = [TICKET.size if by else size for by, size in zip(tickets, got, strict=True)]
        out[me] = back[me] = 0
        message = bytearray(sum(out))
        base = room.data_ptr()
        starts = list(accumulate(sent, initial=0))
        carried = torch.frombuffer(message, dtype=torch.uint8)
        for i, at in enumerate(accumulate(out[:-1], initial=0)):
            if tickets[i]:
                TICKET.pack_into(
                    message, at, file, base + starts[i] - begin, numbers[members[i]][1]
                )
            elif out[i]:
                memmove(carried.data_ptr() + at, base + starts[i], out[i])
        memmove(received.data_ptr() + sum(got[:me]), base + starts[me], sent[me])
        into = torch.empty(sum(back), dtype=torch.uint8)
        return Post(self, lane, members, numbers, room, received, got, carried, out, into, back)


def readable(pid: int, file: int, word: bytes) -> bool:
    """Whether a room of that process can be read, and begins with that word: another process may have its number in
    another space."""
    try:
        here = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(here, len(word), 0) == word
        finally:
            os.close(here)
    except OSError:
        return False
