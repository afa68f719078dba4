"""Ranks on hosts of their own, between network namespaces: they train the same model, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hosts_here import (
    ETC,
    PATHS,
    call_on_host,
    interface_names,
    need_hosts,
    open_hosts,
    sweep,
    torchrun,
)
from ranks import start_child
from scenario import assert_close, assert_same_bits, train
from world_law_rank import SIZES, main

from colonnade import Mesh

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def _hosts():
    need_hosts()


def namespaces() -> list[str]:
    output = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in output.stdout.splitlines()]


def ours(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"colonnade-{pid}-")]


def run_by_torchrun(hosts, folder):
    job = torchrun(
        hosts, 2, [str(HERE / "world_law_rank.py"), str(folder)], folder=folder, env=PATHS
    )
    assert job.wait(120) == [0, 0], job.tail()


def run_forked(hosts, folder):
    """Without torchrun, and with all imports made: rank 0 serves the rendezvous."""
    environment = {
        **os.environ, **interface_names(), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "host1", "MASTER_PORT": "29400",
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = [
        start_child(
            folder / f"output-{rank}", {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            call_on_host, hosts.hosts[rank // 2].namespace, hosts.hosts[rank // 2].name, main, str(folder),
        )
        for rank in range(4)
    ]  # fmt: skip
    assert [rank.wait(120) for rank in ranks] == [0] * 4, "\n".join(
        rank.read_output() for rank in ranks
    )


@pytest.mark.parametrize("run", [run_forked, pytest.param(run_by_torchrun, marks=pytest.mark.slow)])
def test_two_hosts_of_two_ranks_train_what_one_process_trains(run, tmp_path):
    with open_hosts(2) as hosts:
        run(hosts, tmp_path)
        uplinks = hosts.uplinks()
    results = [torch.load(tmp_path / f"rank-{r}.pt", weights_only=False) for r in range(4)]
    wanted = train(Mesh(), sizes=SIZES, steps=len(SIZES))
    for trained, world in results:
        assert (world.num_hosts, world.ranks_per_host) == (2, 2)
        assert_close(wanted, trained, rtol=1e-10)
        assert_same_bits(results[0][0], trained)
    # Four ranks on one host would have sent nothing over it.
    assert min(link.sent for link in uplinks) > 50_000
    assert uplinks[0].sent == pytest.approx(uplinks[1].received, rel=0.02)


SEND = """
import socket, sys, time
peer = socket.create_connection(("host2", 5000))
peer.sendall(bytes(int(sys.argv[1])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
"""
RECEIVE = """
import socket, time
server = socket.create_server(("host2", 5000))
print("ready", socket.gethostname(), flush=True)
peer, _ = server.accept()
count = len(peer.recv(1)); start = time.perf_counter()
while some := peer.recv(1 << 20):
    count += len(some)
print(count, time.perf_counter() - start, flush=True)
"""


def test_a_link_has_its_rate_and_counts_what_it_carries():
    count, gigabits = 20_000_000, 0.8
    with open_hosts(2, gigabits=gigabits) as hosts:
        text = {"stdout": subprocess.PIPE, "text": True}
        receiver = hosts.start(1, [sys.executable, "-c", RECEIVE], **text)
        assert receiver.stdout.readline().split() == ["ready", "host2"]
        sender = hosts.start(0, [sys.executable, "-c", SEND, str(count)])
        received, seconds = receiver.stdout.readline().split()
        assert sender.wait(20) == 0
        links = hosts.uplinks()
    assert int(received) == count
    assert float(seconds) > 0.9 * count / (gigabits * 1e9 / 8), "faster than its link"
    assert count < links[0].sent < 1.06 * count
    assert links[1].received == pytest.approx(links[0].sent, rel=0.01)


def test_nothing_stays(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_hosts(2) as hosts:
        assert len(ours(os.getpid())) == 3
        sleeper = hosts.start(0, ["sleep", "600"])
        while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)  # it is on its way into its host
        raise KeyboardInterrupt
    assert sleeper.returncode == -signal.SIGTERM
    assert ours(os.getpid()) == [] and not list(ETC.glob(f"colonnade-{os.getpid()}-*"))


LEFT = """
import os, sys, time
from cluster.hosts import open_hosts
hosts = open_hosts(2)
child = hosts.start(1, ["sleep", "600"])
deaf = hosts.start(1, ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_left_is_swept():
    bench = HERE.parents[1] / "bench"
    run = subprocess.Popen(
        [sys.executable, "-c", LEFT], cwd=bench, stdout=subprocess.PIPE, text=True
    )
    child = int(run.stdout.readline())
    assert len(ours(run.pid)) == 3
    sweep()
    assert len(ours(run.pid)) == 3, "it still lives"
    run.kill()
    run.wait()
    run.stdout.close()
    for _ in range(100):  # it hears SIGTERM when its parent dies
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.05)
    else:
        raise AssertionError("a process of a killed run lives on")
    sweep()
    assert ours(run.pid) == [] and not list(ETC.glob(f"colonnade-{run.pid}-*"))
