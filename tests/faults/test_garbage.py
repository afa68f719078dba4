"""Bytes that others send to the ports of a running world change nothing: bytes that mean nothing, or silence."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from ranks import run_ranks
from scenario import assert_same_bits, train

LISTENING = "0A"
SIZES = [23, 24, 1, 23] * 5


def own_ports() -> list[int]:
    """TCP ports of 127.0.0.1, or of all addresses, on which this process listens."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(link))
        except OSError:
            continue  # closed meanwhile
    results = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in own:
                results.add(int(words[1].partition(":")[2], 16))
    return sorted(results)


def pester(is_over: threading.Event, received: list[int]) -> None:
    """Connect: a few close at once, others stay silent."""
    silent = []
    while not is_over.wait(0.05):
        for port in own_ports():
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
                received.append(port)
                size = (0, 1, 8, 64, 5000)[len(received) % 5]
                stranger.sendall(os.urandom(size))
            except OSError:
                continue
            if size or len(silent) > 50:
                stranger.close()
            else:
                silent.append(stranger)


def trained_among_strangers(mesh):
    wanted = train(mesh, sizes=SIZES)
    is_over, received = threading.Event(), []
    stranger = threading.Thread(target=pester, args=(is_over, received))
    stranger.start()
    try:
        result = train(mesh, sizes=SIZES)
    finally:
        is_over.set()
        stranger.join()
    return wanted, result, set(received)


def test_strangers_change_nothing():
    for wanted, results, ports in run_ranks(2, trained_among_strangers):
        assert_same_bits(wanted, results)
        assert len(ports) >= 2, "a port for each loop"
