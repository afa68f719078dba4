"""Shared-memory transport: messages between ranks of one host that do not pass through a socket.

Each buffer is an anonymous file in memory (memfd). Other ranks open it by the pid and file descriptor of its owner:
this needs no folder, the size of /dev/shm does not limit it, and a killed process leaves nothing.

    sender                                           receiver
    writes its message to a buffer (`BufferPool`)
    descriptor: fd, offset, first unread message ->  maps the buffer once, and copies its part out of it
    retains the buffer                           <-  a later descriptor of the same channel: first unread message

Only message bytes are in shared memory. torch.distributed carries the notices that a message was written and that it
was read, so memory accesses are ordered by its calls, on any processor. Therefore a channel retains the buffers of
about its last two calls.
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

MIN_BUFFER_BYTES = 1 << 17
LIMIT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def buffer_size(num_bytes: int) -> int:
    """Round a message's size up to a power of two, so that steps with similar messages reuse buffers. Pure. Unwritten
    pages need no memory."""
    return max(MIN_BUFFER_BYTES, 1 << max(0, num_bytes - 1).bit_length())


class BufferPool:
    """Shared-memory buffers of this process. Thread-safe.

    A buffer is reused once no tensor refers to it, so for each size there are as many buffers as were in use at once.
    `close`, or the end of the process, frees them."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._fds: dict[int, int] = {}  # by start address of the buffer

    def allocate_buffer(self, num_bytes: int) -> Tensor:
        """Return an uninitialised tensor (num_bytes,) uint8 at the start of a free buffer. Raises WorldError if the
        system refuses a new buffer."""
        size = buffer_size(num_bytes)
        try:  # one atomic call, because other threads take buffers too
            memory = self._free[size].pop()
        except IndexError:
            memory = self._create_buffer(size)
        block = np.frombuffer(memory, np.uint8)
        # `append` is atomic, so the finalizer may run at any point of any thread.
        weakref.finalize(block, self._free[size].append, memory).atexit = False
        return torch.from_numpy(block)[:num_bytes]

    def fd_of(self, values: Tensor) -> int | None:
        """Return the file descriptor of the buffer that contains a tensor; None if no buffer does."""
        return self._fds.get(values.untyped_storage().data_ptr())

    @property
    def num_bytes(self) -> int:
        """Size of all buffers, including unwritten pages."""
        return sum(os.fstat(fd).st_size for fd in self._fds.values())

    def close(self) -> None:
        """Free the buffers once no tensor refers to them. Call it when no other rank reads them any more."""
        self._free.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _create_buffer(self, size: int) -> mmap.mmap:
        fd = -1
        try:
            fd = os.memfd_create("colonnade")
            os.truncate(fd, size)
            memory = mmap.mmap(fd, size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise WorldError(
                f"got no buffer of {size / 1e6:.0f} MB for a message to ranks of this host ({error.strerror}), in "
                f"addition to {len(self._fds)} of {self.num_bytes / 1e6:.0f} MB, wanted one; raise the limits of open "
                "files and of addresses (ulimit -n, ulimit -v)"
            ) from None
        self._fds[np.frombuffer(memory, np.uint8).ctypes.data] = (
            fd  # open, so that others can map it
        )
        return memory


class PeerBuffers:
    """Buffers of another process of this host, each mapped at its first use."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, tuple[int, np.ndarray]] = {}

    def map_buffer(self, peer_fd: int) -> int:
        """Return the address at which this process has mapped the peer's buffer `peer_fd`. Raises OSError if the peer
        is gone, WorldError if this process cannot map another buffer."""
        if peer_fd not in self._mapped:
            try:
                memory = self._map_buffer(peer_fd)
            except OSError as error:
                if error.errno not in LIMIT_ERRORS:
                    raise
                raise WorldError(
                    f"cannot read a message of process {self._pid} of this host ({error.strerror}), with "
                    f"{len(self._mapped)} of its buffers mapped, wanted one more; raise the limits of open files and "
                    "of addresses (ulimit -n, ulimit -v)"
                ) from None
            # Another thread may have mapped it in the meantime and be reading from it.
            block = np.frombuffer(memory, np.uint8)
            self._mapped.setdefault(peer_fd, (block.ctypes.data, block))
        return self._mapped[peer_fd][0]

    def _map_buffer(self, fd: int) -> mmap.mmap:
        own_fd = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(own_fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(own_fd)


MIN_SHARED_BYTES = 1 << 18
"""Smallest message sent through shared memory. Below 256 KiB it was not faster (measured)."""
DESCRIPTOR = struct.Struct("=qqq")  # fd, offset, number of the first unread message


def uses_shared_memory(
    sent_bytes: Sequence[int], received_bytes: Sequence[int], own_member_index: int
) -> list[bool]:
    """Return, for each member of a call, whether its messages go through shared memory. Pure; the same at both ends.

    sent_bytes, received_bytes: bytes to and from each member. A pair uses shared memory in both directions or in none,
    because descriptors also acknowledge reads."""
    pairs = zip(sent_bytes, received_bytes, strict=True)
    return [i != own_member_index and max(pair) >= MIN_SHARED_BYTES for i, pair in enumerate(pairs)]


class MessageTracker:
    """Tracker of one channel's messages: numbers them per peer, and retains buffers until all peers have read them.

    Calls of a channel begin in the same order on all ranks. They may end in any order, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_begun: dict[int, int] = defaultdict(int)
        self._unread: dict[int, set[int]] = defaultdict(set)  # numbers of messages from a peer
        self._read_by_peer: dict[int, int] = defaultdict(
            int
        )  # the peer has read all earlier messages
        self._retained: list[tuple[Tensor, Mapping[int, int]]] = []

    def begin_call(
        self, send_buffer: Tensor, peer_ranks: Iterable[int]
    ) -> dict[int, tuple[int, int]]:
        """Begin a call that exchanges one message with each peer, and retain `send_buffer`, which contains those to
        send.

        Returns by peer the message number, and the number of the peer's first message that is still unread here."""
        with self._lock:
            numbers = {}
            for peer in peer_ranks:
                number = self._num_begun[peer]
                self._num_begun[peer] += 1
                self._unread[peer].add(number)
                numbers[peer] = number, min(self._unread[peer])
            self._retained.append(
                (send_buffer, {peer: number for peer, (number, _) in numbers.items()})
            )
            return numbers

    def end_call(self, read_messages: Mapping[int, tuple[int, int]]) -> None:
        """End a call after its messages were read here, and release buffers that all peers have read.

        read_messages: by peer, its message's number, and the first of our messages that it had not read when it sent
        that."""
        with self._lock:
            for peer, (number, first_unread) in read_messages.items():
                self._unread[peer].remove(number)
                self._read_by_peer[peer] = max(first_unread, self._read_by_peer[peer])
            self._retained = [
                (buffer, numbers)
                for buffer, numbers in self._retained
                if any(number >= self._read_by_peer[peer] for peer, number in numbers.items())
            ]


@dataclass(slots=True)
class SharedMessages:
    """Pending all-to-all with some of its messages in shared memory.

    gloo sends `gloo_send`, with `gloo_send_bytes` for each member: descriptors, and small messages as they are. It
    receives `gloo_received` likewise."""

    shared_memory: SharedMemory
    tracker: MessageTracker
    members: Sequence[int]
    numbers: Mapping[int, tuple[int, int]]
    buffer: Tensor
    received: Tensor
    received_bytes: Sequence[int]
    gloo_send: Tensor
    gloo_send_bytes: Sequence[int]
    gloo_received: Tensor
    gloo_received_bytes: Sequence[int]

    def copy_received_messages(self) -> None:
        """Copy all messages to `received`. Call it once, when gloo is done. Raises OSError if a peer is gone."""
        target = self.received.data_ptr()
        source = self.gloo_received.data_ptr()
        descriptors: Any = self.gloo_received.numpy()
        read = {}
        blocks = zip(
            self.members,
            self.received_bytes,
            accumulate(self.received_bytes, initial=0),
            accumulate(self.gloo_received_bytes, initial=0),
            strict=False,
        )
        for member, size, target_begin, source_begin in blocks:
            if member in self.numbers:
                fd, offset, first_unread = DESCRIPTOR.unpack_from(descriptors, source_begin)
                if size:
                    message = self.shared_memory.peers[member].map_buffer(fd) + offset
                    memmove(target + target_begin, message, size)
                read[member] = self.numbers[member][0], first_unread
            elif member != self.shared_memory.rank:
                memmove(target + target_begin, source + source_begin, size)
        self.tracker.end_call(read)


@dataclass(slots=True)
class SharedMemory:
    """Shared memory of the ranks of one host, which can read each other's buffers."""

    rank: int
    peers: Mapping[int, PeerBuffers]
    pool: BufferPool = field(default_factory=BufferPool)
    trackers: dict[str, MessageTracker] = field(default_factory=dict)

    def allocate_buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor (num_elements,) to write once and send; in ordinary memory if it is small."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < MIN_SHARED_BYTES:
            return empty(num_elements, dtype=dtype)
        return self.pool.allocate_buffer(num_bytes).view(dtype)

    def prepare_messages(
        self,
        channel: str,
        members: Sequence[int],
        send: Tensor,
        sent: Sequence[int],
        received: Tensor,
        received_bytes: Sequence[int],
    ) -> SharedMessages | None:
        """Prepare an all-to-all among `members`, all of this host; return None if all messages are small.

        sent, received_bytes: bytes to and from each member. `send` must not change any more if it is in a buffer of
        `pool`; otherwise it is copied to one. Raises WorldError if no buffer is available."""
        own = members.index(self.rank)
        is_shared = uses_shared_memory(sent, received_bytes, own)
        if not any(is_shared):
            return None
        if self.pool.fd_of(send) is None:
            buffer = self.pool.allocate_buffer(send.nbytes)
            memmove(buffer.data_ptr(), send.data_ptr(), send.nbytes)
        else:
            buffer = send
        fd = self.pool.fd_of(buffer)
        buffer_begin = buffer.untyped_storage().data_ptr()
        tracker = self.trackers.setdefault(channel, MessageTracker())
        peers = [m for m, shared in zip(members, is_shared, strict=True) if shared]
        numbers = tracker.begin_call(buffer, peers)
        out_bytes = [
            DESCRIPTOR.size if shared else size
            for shared, size in zip(is_shared, sent, strict=True)
        ]
        in_bytes = [
            DESCRIPTOR.size if shared else size
            for shared, size in zip(is_shared, received_bytes, strict=True)
        ]
        out_bytes[own] = in_bytes[own] = 0
        message = bytearray(sum(out_bytes))
        data = buffer.data_ptr()
        begins = list(accumulate(sent, initial=0))
        gloo_send = torch.frombuffer(message, dtype=torch.uint8)
        for i, at in enumerate(accumulate(out_bytes[:-1], initial=0)):
            if is_shared[i]:
                DESCRIPTOR.pack_into(
                    message, at, fd, data + begins[i] - buffer_begin, numbers[members[i]][1]
                )
            elif out_bytes[i]:
                memmove(gloo_send.data_ptr() + at, data + begins[i], out_bytes[i])
        memmove(received.data_ptr() + sum(received_bytes[:own]), data + begins[own], sent[own])
        gloo_received = torch.empty(sum(in_bytes), dtype=torch.uint8)
        return SharedMessages(
            self,
            tracker,
            members,
            numbers,
            buffer,
            received,
            received_bytes,
            gloo_send,
            out_bytes,
            gloo_received,
            in_bytes,
        )


def can_read_buffer(pid: int, fd: int, token: bytes) -> bool:
    """Return whether this process can read buffer `fd` of process `pid`, and it begins with `token`. The token detects
    another process with the same pid in another pid namespace."""
    try:
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(own_fd, len(token), 0) == token
        finally:
            os.close(own_fd)
    except OSError:
        return False
