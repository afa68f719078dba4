"""Messages between ranks of one host through memory that they share: the same bits as through gloo, whatever the sizes,
channels and order; who cannot read it; who is killed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exchanges import CHOICES, run_exchange
from ranks import run_ranks

from colonnade.comm import process_groups, shm
from colonnade.comm.mesh import ALL
from colonnade.errors import PeerLost

SIZES = (0, 1, 2, 7, 1009, 65_537)
WIDTH = 3


def small_messages_too():
    shm.MIN_SHARED_BYTES = 1


def message(sender, receiver, call, rows):
    first = sender * 1_000_003 + receiver * 101 + call
    return (torch.arange(rows * WIDTH) + first).to(torch.int32).view(rows, WIDTH)


def rows_of(num_ranks, call):
    """Return the rows (N, N) of each rank to each rank."""
    pick = torch.Generator().manual_seed(call)
    which = torch.randint(len(SIZES), (num_ranks, num_ranks), generator=pick)
    return torch.tensor(SIZES)[which]


def call_of(mesh, channel, call, in_room):
    rows, rank = rows_of(mesh.num_ranks, call), mesh.rank
    blocks = [message(rank, r, call, int(n)) for r, n in enumerate(rows[rank])]
    send = torch.cat(blocks)
    if in_room:
        room = mesh.allocate_send_buffer(send.numel(), send.dtype).view(send.shape)
        send = room.copy_(send)
    received = rows[:, rank].tolist()
    return mesh.all_to_all(channel, send, rows[rank].tolist(), received, wait=False), received


def check_calls(mesh, channel, num_calls):
    """Up to three under way at once, which end in another order than they began in."""
    under_way = []
    for number in range(num_calls):
        under_way.append((number, call_of(mesh, channel, number, in_room=number % 3 != 0)))
        if len(under_way) == 3 or number == num_calls - 1:
            for call, ((received, work), expected) in reversed(under_way):
                work.wait()
                blocks = received.split(expected)
                for sender, (block, n) in enumerate(zip(blocks, expected, strict=True)):
                    assert torch.equal(block, message(sender, mesh.rank, call, n)), (channel, call)
            under_way.clear()


def all_purposes(mesh, least):
    shm.MIN_SHARED_BYTES = least
    errors = []

    def run(channel):
        try:
            check_calls(mesh, channel, 40)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=[p]) for p in ("fetch", "checkpoint", "route", "dense")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    lanes = {} if mesh.shared_memory is None else mesh.shared_memory.trackers
    return {channel: len(lane._retained) for channel, lane in lanes.items()}


@pytest.mark.parametrize("num_ranks, least", [(2, 1), (3, 1), (3, 20_000)])
def test_odd_sizes_on_many_threads(num_ranks, least):
    for shared_counts in run_ranks(num_ranks, all_purposes, least, fresh=True):
        assert set(shared_counts) == {"fetch", "checkpoint", "route", "dense"}
        assert max(shared_counts.values()) <= 4  # of the last calls, three at once


def test_hosts_of_two_share_in_their_own_groups_alone():
    for lanes in run_ranks(4, of_two_hosts, ranks_per_host=2, fresh=True):
        assert lanes == ["fetch in host"]


def of_two_hosts(mesh):
    small_messages_too()
    for scope, size in ((ALL, 4), (mesh.host_scope, 2), (mesh.cross_host_scope, 2)):
        send = torch.arange(size * 5) + 100 * mesh.rank
        received, _ = mesh.all_to_all("fetch", send, [5] * size, [5] * size, scope=scope)
        members = scope.members(mesh.rank, mesh.num_ranks)
        place = members.index(mesh.rank)
        wanted = [torch.arange(5) + 5 * place + 100 * r for r in members]
        assert torch.equal(received, torch.cat(wanted))
    return sorted(mesh.shared_memory.trackers)


def with_and_without(mesh, names):
    small_messages_too()
    result = []
    for name in names:
        pair = [
            run_exchange(item, CHOICES[name], [9, 0, 1, 13], "float32", 1)
            for item in (replace(mesh, shared_memory=None), mesh)
        ]
        result.append(pair)
    return result, sorted(mesh.shared_memory.trackers)


@pytest.mark.parametrize(
    "names",
    [
        ("all three", "columns of all", "towers", "tower rows"),
        pytest.param(sorted(CHOICES), marks=pytest.mark.slow),
    ],
    ids=["four", "all"],
)
def test_every_exchange_gives_the_same_bits(names):
    """Four of the choices have every exchange and every sharding among them, but `partials`, which sends what
    `towers` does."""
    for results, lanes in run_ranks(3, with_and_without, names, fresh=True):
        assert {"fetch", "push"} <= set(lanes)
        for without, shared in results:
            assert_same(without, shared)


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def unreadable(mesh):
    """The world was opened where rank 1 cannot read others' memory."""
    check_calls(mesh, "fetch", 6)
    return mesh.shared_memory is None


def test_one_that_cannot_read_has_all_messages_travel(monkeypatch, tmp_path):
    assert all(run_ranks(3, blinded, fresh=True))


def blinded(mesh):
    small_messages_too()
    assert mesh.shared_memory is not None
    if mesh.rank == 1:
        process_groups.can_read_buffer = lambda *_: False
    again = replace(mesh, shared_memory=process_groups._open_shared_memory(mesh))
    return unreadable(again)


def killed(mesh, place):
    """Rank 1 is killed while the others read what it sent."""
    small_messages_too()
    size = 1 << 22
    send = mesh.allocate_send_buffer(3 * size, torch.uint8).fill_(mesh.rank + 1)
    received, call = mesh.all_to_all("fetch", send, [size] * 3, [size] * 3, wait=False)
    if mesh.rank == 1:
        call.wait()
        (place / "sent").touch()
        time.sleep(60)
    call.wait()
    first = received.clone()
    while not (place / "sent").exists():
        time.sleep(0.01)
    if mesh.rank == 0:
        os.kill(mesh.peers[1].pid, signal.SIGKILL)
    # Its memory is still here: it was mapped.
    whole = all(bool((part == r + 1).all()) for r, part in enumerate(first.split(size)))
    try:
        while True:
            mesh.all_to_all("fetch", send.clone(), [size] * 3, [size] * 3)
    except PeerLost as error:
        (place / f"lost-{mesh.rank}").write_text(f"{whole} {error}")
        raise


def test_a_killed_mate_is_named(tmp_path):
    with pytest.raises(AssertionError):
        run_ranks(3, killed, Path(tmp_path), timeout=90, fresh=True)
    for rank in (0, 2):
        output = (tmp_path / f"lost-{rank}").read_text()
        assert output.startswith("True ") and "rank 1" in output and "gone" in output


def gone_before_it_is_read(mesh, place):
    """Rank 1's ticket has come, but it is gone when rank 0 opens its memory for the first time."""
    small_messages_too()
    size = 1 << 20
    send = mesh.allocate_send_buffer(2 * size, torch.uint8).fill_(mesh.rank + 1)
    _, call = mesh.all_to_all("push", send, [size] * 2, [size] * 2, wait=False)
    if mesh.rank == 1:
        call.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.peer_monitor.wait_for_call("push", call.work)  # the ticket is here
    while os.path.exists(f"/proc/{mesh.peers[1].pid}/fd/0"):
        time.sleep(0.01)
    try:
        call.wait()
    except PeerLost as error:
        (place / "lost").write_text(str(error))
        raise


def test_one_that_is_gone_before_it_is_read_is_named(tmp_path):
    with pytest.raises(AssertionError):
        run_ranks(2, gone_before_it_is_read, Path(tmp_path), timeout=90, fresh=True)
    output = (tmp_path / "lost").read_text()
    assert "rank 1" in output and "gone" in output
