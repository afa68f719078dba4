"""A rank that is lost is named, with what it was describe_peer_status; nobody waits longer than the timeout."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_child, store_in

from colonnade import close_mesh, open_mesh
from colonnade.comm.heartbeat import FileHeartbeats, StoreHeartbeats
from colonnade.comm.peer_status import (
    PeerMonitor,
    PeerStatus,
    describe_peer_status,
    diagnose_stuck_call,
    report_errors_to_peers,
)
from colonnade.comm.rendezvous import HEARTBEATS, STORE, Peer, connect_store, join_rendezvous
from colonnade.errors import PeerLost, WorldError

PEER = Peer("node", "one", 4711, 1, "1.0", "2.0", "x86_64")
FINE = PeerStatus(PEER, 0.3, calls={"dense": 58}, waiting={"dense": 3.0}, step=57)


def blamed(channel="dense", number=58, **ranks) -> tuple[tuple[int, ...], str]:
    statuses = {number: FINE for number in range(1, 4)}
    statuses |= {int(name[1:]): replace(FINE, **text) for name, text in ranks.items()}
    result = diagnose_stuck_call(statuses, channel, number)
    return result.ranks, result.reason


def test_the_rank_that_caused_it_is_blamed_and_none_that_followed():
    assert blamed() == ((), "")
    assert blamed(r2={"calls": {"dense": 57}})[0] == (2,)
    assert "has not joined this call" in blamed(r2={"calls": {"dense": 57}})[1]
    late = {"calls": {"dense": 50}}
    assert blamed(r1=late, r2={"silent_seconds": 9.0, **late})[0] == (
        2,
    )  # rank 1 waits for it elsewhere
    assert blamed(r1=late, r2={"process_state": "gone"})[1].startswith(
        "rank 2 (pid 4711 on node) is gone"
    )
    assert "stopped" in blamed(r3={"process_state": "stopped", "silent_seconds": 9.0})[1]
    assert blamed(r3={"process_state": "running", "silent_seconds": 9.0}) == (
        (),
        "",
    )  # its thread is slow, not the rank
    assert blamed(r1={"stop_reason": "DataError: row 7"}, r2={"silent_seconds": 99.0})[0] == (1,)
    assert "DataError: row 7" in blamed(r1={"stop_reason": "DataError: row 7"})[1]
    followed = {"stop_reason": "rank 1 lost rank 3", "is_follower": True, "process_state": "gone"}
    assert blamed(r1=followed, r3={"process_state": "stopped"})[0] == (3,)
    assert blamed(r1=followed | {"lost_ranks": [9]})[0] == (9,)
    over = {"ended_after": 3, "stop_reason": "it ended"}
    assert blamed(r1=late, r2=over)[0] == (2,)
    assert "no more batches: its data ended after 3" in blamed(r2=over)[1]
    everyone = {f"r{n}": {"silent_seconds": 5.0} for n in range(1, 4)}
    assert blamed(**everyone)[0] == (1, 2, 3)


def test_what_it_did_last():
    assert describe_peer_status(FINE) == "last seen in step 57, 3 s in 'dense'"
    assert "12 s after its last call: computing" in describe_peer_status(
        replace(FINE, waiting={}, idle_seconds=12.2)
    )
    assert "never reported" in describe_peer_status(PeerStatus(PEER, 1.0))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def server():
    port = free_port()
    return dist.TCPStore(
        "127.0.0.1", port, 1, True, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    return server, port


def come(port, rank, num_ranks, seconds, result, peer=PEER):
    store = dist.TCPStore(
        "127.0.0.1", port, 1, False, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    try:
        result[rank] = join_rendezvous(store, rank, num_ranks, peer, timedelta(seconds=seconds))
    except Exception as error:
        result[rank] = error


def met(port, peers, num_ranks=None, seconds=10.0) -> dict:
    results: dict = {}
    who = [
        threading.Thread(target=come, args=(port, r, num_ranks or len(peers), seconds, results, p))
        for r, p in peers.items()
    ]
    for argument in who:
        argument.start()
    for argument in who:
        argument.join()
    return results


def test_ranks_meet_and_each_attempt_has_keys_of_its_own(server):
    port = server.port
    peers = {r: replace(PEER, pid=r) for r in range(3)}
    attempts = [met(port, peers) for _ in range(3)]
    prefixes = {result[r][0] for result in attempts for r in range(3)}
    assert len(prefixes) == 3 and all(
        len({result[r][0] for r in range(3)}) == 1 for result in attempts
    )
    assert [peer.pid for peer in attempts[2][1][1]] == [0, 1, 2]
    # Two of four come, where others were before: they are told apart.
    result = met(port, {0: PEER, 2: PEER}, num_ranks=4, seconds=0.5)
    for error in result.values():
        assert isinstance(error, PeerLost) and "ranks 1, 3 of 4 did not come" in str(error)
    result = met(port, {1: PEER, 2: PEER}, num_ranks=3, seconds=0.5)
    assert all("rank 0 of 3 did not come" in str(error) for error in result.values())


def test_other_versions_and_uneven_hosts_are_refused_by_name(server):
    port = server.port
    other = replace(PEER, torch="1.0", local_ranks=3, verb="plan")
    result = met(port, {0: PEER, 1: PEER, 2: other})
    for error in result.values():
        assert isinstance(error, WorldError)
        assert 'rank 2 has torch="1.0", ranks 0, 1 have "2.0"' in str(error)
        assert "rank 2 has ranks on its host=3, ranks 0, 1 have 1" in str(error)
        # Else their first calls would meet, of other sizes, which ends a process inside gloo.
        assert 'rank 2 has verb="plan", ranks 0, 1 have ""' in str(error)


def test_two_processes_of_one_rank_are_refused(server):
    port = server.port
    results: dict = {}
    first = threading.Thread(target=come, args=(port, 1, 3, 3.0, results, replace(PEER, pid=1)))
    zeroth = threading.Thread(target=come, args=(port, 0, 3, 3.0, {}))
    first.start(), zeroth.start()
    store = dist.TCPStore("127.0.0.1", port, 1, False, wait_for_workers=False)
    while not store.check(["colonnade/hello/1"]) or not store.check([own_key(store)]):
        time.sleep(0.01)
    again: dict = {}
    come(port, 1, 3, 3.0, again, replace(PEER, pid=2))
    assert "two processes came as rank 1 of 3: pid 1 on node and pid 2 on node" in str(again[1])
    first.join(), zeroth.join()


def own_key(store) -> str:
    word = (
        json.loads(store.get("colonnade/hello/0"))["word"]
        if store.check(["colonnade/hello/0"])
        else ""
    )
    return f"colonnade/{word}/here/1"


def test_garbage_at_the_rendezvous_changes_nothing(server):
    port = server.port
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(os.urandom(3000))
        result = met(port, {r: PEER for r in range(2)})
        assert {prefix for prefix, _ in result.values()} and not isinstance(result[0], Exception)


def test_a_taken_port_and_a_missing_address_are_said(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(
            WorldError,
            match=r"rank 0 cannot listen at MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+: Addr",
        ):
            connect_store(0, 2, timedelta(seconds=1))
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(WorldError, match="MASTER_PORT='70000'"):
        connect_store(0, 2, timedelta(seconds=1))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(PeerLost, match=r"rank 1 of 2 found no server at MASTER_ADDR=127.0.0.1"):
        connect_store(1, 2, timedelta(seconds=1))


def test_a_file_that_ranks_do_not_share_is_refused_and_who_is_missing_named(monkeypatch, tmp_path):
    for name, file in store_in(tmp_path).items():
        monkeypatch.setenv(name, file)
    store = connect_store(0, 2, timedelta(seconds=5))
    with pytest.raises(PeerLost) as lost:
        join_rendezvous(store, 0, 2, PEER, timedelta(seconds=0.3))
    first = str(lost.value)
    with pytest.raises(PeerLost) as lost:
        join_rendezvous(
            connect_store(1, 3, timedelta(seconds=5)), 1, 3, PEER, timedelta(seconds=0.3)
        )
    for words, missing in ((first, "rank 1 of 2"), (str(lost.value), "rank 0 of 3")):
        assert f"{missing} did not come in time: not started, or another program" in words
    monkeypatch.setenv(HEARTBEATS, str(tmp_path / "nowhere"))
    with pytest.raises(WorldError, match=r"got COLONNADE_HEARTBEATS='.*nowhere', wanted a file"):
        connect_store(0, 2, timedelta(seconds=1))
    monkeypatch.setenv(STORE, "/proc/self/fd/999")
    with pytest.raises(WorldError, match="got COLONNADE_STORE='/proc/self/fd/999', wanted a file"):
        connect_store(0, 2, timedelta(seconds=1))


def test_heartbeats_in_a_file_do_not_grow_it_and_are_read_whole(tmp_path):
    path = store_in(tmp_path)[HEARTBEATS]
    own, others = FileHeartbeats(path), FileHeartbeats(path)
    lines = {"a" * 5000, "é" * 90_000, "c"}
    own.write_line(0, "x" * 180_000)
    size = os.stat(path).st_size
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            for line in lines:
                own.write_line(0, line)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        read = {text for _ in range(2000) for text in others.read_lines([0, 1]).values()}
    finally:
        is_over.set()
        thread.join()
    assert read - {"x" * 180_000} and read <= lines | {"x" * 180_000}
    assert os.stat(path).st_size <= size and others.read_lines([1]) == {}


def test_rank_0_listens_where_it_is_told(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = connect_store(0, 2, timedelta(seconds=5))
    store.set("a", "b")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


@pytest.mark.parametrize("kind", ["file", "store"])
def test_an_error_is_told_and_one_who_goes_on_is_not_blamed(server, kind, tmp_path):
    if kind == "file":
        path = store_in(tmp_path)[HEARTBEATS]
        heartbeats = [FileHeartbeats(path) for _ in range(2)]
    else:
        heartbeats = [StoreHeartbeats(dist.PrefixStore("p", server.clone()), "h:1") for _ in "ab"]
    ranks = [PeerMonitor(heartbeats[r], [PEER, PEER], r, timedelta(seconds=5)) for r in range(2)]
    for rank in ranks:
        rank.start()
    with pytest.raises(ZeroDivisionError), report_errors_to_peers(ranks[1]):
        raise ZeroDivisionError("by 0")
    lost = str(ranks[0].diagnose_loss("dense", None))
    assert "lost rank 1 in 'dense'" in lost and "ZeroDivisionError: by 0" in lost
    with pytest.raises(PeerLost, match="lost rank 1"):
        ranks[0].begin_call("route")
    with report_errors_to_peers(ranks[1]):
        ranks[1].begin_call("route")
    for rank in ranks:
        rank.announce_end("it ended")


def stopped_at_the_end(mesh):
    """Rank 1 is stopped with nothing left to do; the other one does not take its leave without it."""
    assert mesh.peer_monitor is not None
    mesh.peer_monitor.timeout = 0.2  # of which closing has patience for twelve
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pid = mesh.peers[1].pid
    with pytest.raises(PeerLost, match="is stopped") as error:
        close_mesh(mesh)
    os.kill(pid, signal.SIGKILL)
    return str(error.value)


def test_all_take_their_leave_together():
    with pytest.raises(AssertionError, match="rank 1 failed") as error:
        run_ranks(2, stopped_at_the_end, timeout=60, fresh=True)
    assert "rank 0 failed" not in str(error.value)


def meet_and_lose_one(sent):
    open_mesh(timeout=timedelta(seconds=60))
    mesh = open_mesh(timeout=timedelta(seconds=3))  # the same world
    mesh.publish_step(57)
    mesh.all_reduce("route", torch.ones(1))
    if mesh.rank == 2:
        time.sleep(1.2)
        os.kill(os.getpid(), getattr(signal, sent))
    began = time.monotonic()

    def ahead():
        try:
            mesh.all_reduce("route", torch.ones(1))
        except Exception as error:
            print(f"ahead {type(error).__name__}\n", end="", flush=True)

    thread = threading.Thread(target=ahead)
    thread.start()
    try:
        mesh.all_reduce("dense", torch.ones(1))
    except Exception as error:
        print(f"{error}\n", end="", flush=True)
    thread.join()
    print("took", time.monotonic() - began, flush=True)


@pytest.mark.parametrize(
    ("sent", "kind"), [("SIGKILL", "server"), ("SIGKILL", "file"), ("SIGSTOP", "file")]
)
def test_survivors_name_it_on_every_thread_and_end(sent, kind, tmp_path):
    server = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where = store_in(tmp_path) if kind == "file" else server
    environment = {
        **os.environ, **where, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        start_child(
            tmp_path / str(r), {**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
            meet_and_lose_one, sent,
        )
        for r in range(3)
    ]  # fmt: skip
    try:
        for rank in ranks[:2]:
            rank.process.join(100)
            text = rank.read_output()
            assert rank.code == 0, text
            # A survivor that is done first is gone, too.
            assert re.search(r"lost ranks? ([01], )?2 in", text) and "step 57" in text, text
            assert f"pid {ranks[2].process.pid}" in text, text
            assert (
                "is gone, as if killed" if sent == "SIGKILL" else "is stopped (SIGSTOP)"
            ) in text
            assert "ahead PeerLost" in text
            assert float(text.split("took ")[1].split()[0]) < 3 + 6
    finally:
        for rank in ranks:
            rank.kill()
