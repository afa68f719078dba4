"""Messages between ranks of one host by memory that both map: a ticket travels instead, which says where they lie.

    sender                                       receiver
    has its message in a room (`rooms.py`)
    ticket: file, place in it, what was read ->  maps the room once, and copies its part out of it
    keeps the room                           <-  a later ticket of the same purpose: what was read

Nothing but messages is shared: that one is written, and that it has been read, is told through torch.distributed, so
memory is as ordered as its calls are, on any processor. A purpose so keeps the rooms of its last two calls or so.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from colonnade.ops.memory import empty
from colonnade.topology.rooms import OthersRooms, Rooms

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
    """One purpose's messages, numbered mate by mate, as its calls begin in one order on all ranks. They may end in any
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
        purpose: str,
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
        lane = self.lanes.setdefault(purpose, Lane())
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
