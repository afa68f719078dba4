"""Messages by tickets: who exchanges them, which rooms are kept, and rooms themselves."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.comm import shm
from colonnade.comm.shm import (
    MIN_BUFFER_BYTES,
    MIN_SHARED_BYTES,
    BufferPool,
    MessageTracker,
    PeerBuffers,
    buffer_size,
    can_read_buffer,
    uses_shared_memory,
)
from colonnade.errors import WorldError

NUM = 3
CALLS = st.lists(
    st.lists(st.booleans(), min_size=NUM, max_size=NUM), max_size=12
)  # who gets tickets


@given(
    st.lists(st.lists(st.integers(0, 2 * MIN_SHARED_BYTES), min_size=NUM, max_size=NUM), min_size=NUM, max_size=NUM)
)  # fmt: skip
def test_both_ends_agree(sizes):
    """sizes[i][j]: bytes from i to j."""
    result = [uses_shared_memory(sizes[i], [row[i] for row in sizes], i) for i in range(NUM)]
    for i in range(NUM):
        for j in range(NUM):
            assert result[i][j] == result[j][i]
            assert result[i][j] == (i != j and max(sizes[i][j], sizes[j][i]) >= MIN_SHARED_BYTES)


@settings(max_examples=examples(40, 200))
@given(st.data())
def test_rooms_are_kept_until_all_have_read(data):
    """Two ranks or more whose calls begin in one order each and end in any: no room that was not read is let go, and
    each that was told as read is."""
    lanes = [MessageTracker() for _ in range(NUM)]
    posted = {}  # (sender, receiver, number) -> the ticket's "read"
    waiting = {i: [] for i in range(NUM)}  # calls begun: {mate: number}
    done = set()  # (sender, receiver, number) that were read
    retained = {i: [] for i in range(NUM)}  # (room, numbers)
    pairs_of_calls = data.draw(CALLS)
    ahead = [0] * NUM
    for _ in range(4 * len(pairs_of_calls) * NUM):
        i = data.draw(st.integers(0, NUM - 1))
        if ahead[i] < len(pairs_of_calls) and data.draw(st.booleans()):
            pairs = pairs_of_calls[ahead[i]]  # by the pair's lower rank: with the next one
            mates = [j for j in range(NUM) if j != i and pairs[(i + j) % NUM]]
            ahead[i] += 1
            room = torch.empty(1)
            numbers = lanes[i].begin_call(room, mates)
            for mate, (number, read) in numbers.items():
                posted[i, mate, number] = read
            retained[i].append((room, {mate: number for mate, (number, _) in numbers.items()}))
            waiting[i].append({mate: number for mate, (number, _) in numbers.items()})
        elif waiting[i]:
            which = data.draw(st.integers(0, len(waiting[i]) - 1))
            call = waiting[i][which]
            if any((mate, i, number) not in posted for mate, number in call.items()):
                continue  # has not arrived
            waiting[i].pop(which)
            done |= {(mate, i, number) for mate, number in call.items()}
            lanes[i].end_call({m: (number, posted[m, i, number]) for m, number in call.items()})
        stored = [{id(room) for room, _ in lane._retained} for lane in lanes]
        for rank in range(NUM):
            for room, numbers in retained[rank]:
                if any((rank, mate, number) not in done for mate, number in numbers.items()):
                    assert id(room) in stored[rank], (
                        "a room was let go that somebody has yet to read"
                    )


def test_a_steady_purpose_keeps_two_rooms():
    sender, receiver = MessageTracker(), MessageTracker()
    for step in range(5):
        ours, their_call = (
            sender.begin_call(torch.empty(1), [1]),
            receiver.begin_call(torch.empty(1), [0]),
        )
        assert len(sender._retained) == (1 if step == 0 else 2)
        sender.end_call({1: (ours[1][0], their_call[0][1])})
        receiver.end_call({0: (their_call[0][0], ours[1][1])})
        assert len(sender._retained) == 1


@given(st.integers(0, 1 << 34))
def test_sizes_of_rooms(num_bytes):
    size = buffer_size(num_bytes)
    assert size >= max(num_bytes, MIN_BUFFER_BYTES) and size & (size - 1) == 0
    assert size == MIN_BUFFER_BYTES or size < 2 * num_bytes


def test_a_room_serves_again_once_nothing_looks_into_it():
    rooms = BufferPool()
    first = rooms.allocate_buffer(300_000)
    view, address = first[7:100].view(torch.int8), first.data_ptr()
    second = rooms.allocate_buffer(300_000)
    assert second.data_ptr() != address and rooms.num_bytes == 2 << 19
    del first
    gc.collect()
    assert rooms.allocate_buffer(300_000).data_ptr() not in (
        address,
        second.data_ptr(),
    )  # `view` looks
    assert rooms.fd_of(view) is not None and rooms.fd_of(torch.empty(5)) is None
    del view
    gc.collect()
    assert rooms.allocate_buffer(290_000).data_ptr() in {address, *rooms._fds} - {second.data_ptr()}
    assert rooms.num_bytes == 3 << 19


def test_others_read_what_is_written():
    rooms = BufferPool()
    room = rooms.allocate_buffer(1 << 20)
    file = rooms.fd_of(room)
    others = PeerBuffers(os.getpid())
    address = others.map_buffer(file)
    assert address != room.data_ptr() and others.map_buffer(file) == address
    room.copy_(torch.arange(1 << 20).to(torch.uint8))
    assert can_read_buffer(os.getpid(), file, bytes(range(16)))
    assert not can_read_buffer(os.getpid(), file, bytes(range(1, 17)))
    assert not can_read_buffer(2**22 + 1, file, bytes(range(16)))  # nobody
    with pytest.raises(OSError):
        others.map_buffer(10**6)


def test_no_room_is_told(monkeypatch):
    def refused(name):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shm.os, "memfd_create", refused)
    with pytest.raises(WorldError, match=r"Too many open files.*ulimit -n"):
        BufferPool().allocate_buffer(1 << 20)


def test_rooms_are_given_back():
    before = len(os.listdir("/proc/self/fd"))
    rooms = BufferPool()
    block = rooms.allocate_buffer(1000)
    block.fill_(7)
    rooms.close()
    assert rooms.num_bytes == 0 and int(block.sum()) == 7000  # who still looks into one may
    del block
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_has_no_file_left_says_so_and_blames_nobody(monkeypatch):
    rooms = BufferPool()
    file = rooms.fd_of(rooms.allocate_buffer(1000))
    others = PeerBuffers(os.getpid())

    def none_left(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", none_left)
        with pytest.raises(WorldError, match=r"Too many open files.*ulimit -n"):
            others.map_buffer(file)
    assert others.map_buffer(file)
    with pytest.raises(FileNotFoundError):  # a mate is gone
        others.map_buffer(10**6)
