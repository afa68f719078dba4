"""Launcher of the ranks of one machine.

Ranks find each other through nameless files in memory (memfd) that they inherit from the launcher: no port listens, no
other user can open them, and nothing of them is left however the processes end. Ranks talk to each other by gloo, on
127.0.0.1 only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from colonnade.processors import usable_processors
from colonnade.topology.rendezvous import HEARTBEATS, STORE
from colonnade.train.interrupt import REPEAT_SECONDS

LOOK_SECONDS = 0.1  # between two looks at whether a rank has ended or a signal has come
END_SECONDS = 30.0  # between SIGTERM and SIGKILL


@contextmanager
def memory_file(name: str) -> Iterator[str]:
    """Yield the path of a nameless file in memory, valid here and in processes that inherit `descriptor(path)`."""
    number = os.memfd_create(name)
    try:
        os.fchmod(number, 0o600)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def descriptor(path: str) -> int:
    return int(path.rpartition("/")[2])


def run_ranks(
    command: Sequence[str], num_ranks: int, files: Sequence[str]
) -> Mapping[int, int] | None:
    """Run `command` as every rank, and return when all have ended.

    `files`: paths of memory files that the ranks inherit. Returns the status of the ranks that failed first, by rank;
    the others are then ended. Returns None if SIGINT or SIGTERM came: the first is passed on to the ranks, which then
    commit and end; the next one ends them at once.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with (
        memory_file("colonnade-store") as store,
        memory_file("colonnade-heartbeats") as heartbeats,
        _record_signals() as signals,
    ):
        threads = str(max(1, usable_processors() // num_ranks))
        environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            STORE: store,
            HEARTBEATS: heartbeats,
        }
        try:
            for rank in range(num_ranks):
                ranks.append(
                    subprocess.Popen(
                        command,
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        pass_fds=[descriptor(path) for path in (store, heartbeats, *files)],
                    )
                )
            return _watch(ranks, signals)
        finally:
            signals.clear()
            _end(ranks, signals)


@contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of obeying them."""
    signals: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], signals: list[int]
) -> Mapping[int, int] | None:
    """Wait until all ranks have ended well, one has failed, or a second signal has come."""
    stopped_at = 0.0
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            failures = {rank: code for rank, code in enumerate(codes) if code}
            return None if stopped_at or signals else failures
        while signals:
            number, now = signals.pop(0), time.monotonic()
            if stopped_at and now - stopped_at > REPEAT_SECONDS:
                return None
            stopped_at = stopped_at or now
            for rank in ranks:
                rank.send_signal(number)
        time.sleep(LOOK_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> None:
    """End the ranks that still run: by SIGTERM, and by SIGKILL after `END_SECONDS` or at one more signal."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + END_SECONDS
    while any(rank.poll() is None for rank in ranks):
        if signals or time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(LOOK_SECONDS)
