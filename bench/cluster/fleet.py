"""The ranks of one job as one worker: what `harness` sends is heard by all of them, and all of them answer.

Ranks reach this process by a socket in the file system, which every namespace sees: what is said here never
travels over the links that are measured.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import BenchError

from cluster.hosts import Hosts
from cluster.launch import Job, torchrun

SOCKET = "COLONNADE_BENCH_SOCKET"
"""The environment variable that tells a rank where to answer."""
END_SECONDS = 20.0


class Fleet:
    """`open_fleet` starts it; `close` ends it and waits."""

    def __init__(self, name: str, job: Job, ranks: list[socket.socket], timeout: float) -> None:
        self.name, self.job, self.ranks, self.timeout = name, job, ranks, timeout
        self.files = [rank.makefile("rw", encoding="utf-8", newline="\n") for rank in ranks]

    def send(self, message: Mapping[str, Any]) -> None:
        for file in self.files:
            try:
                print(json.dumps(message), file=file, flush=True)
            except OSError:
                raise self._died() from None

    def answers(self) -> list[dict[str, Any]]:
        """Return the ranks' answers in rank order. Raises BenchError with the ranks' output if one died or is silent
        for too long."""
        results = []
        for file in self.files:
            try:
                line = file.readline()
            except OSError:
                line = ""
            if not line:
                raise self._died()
            results.append(json.loads(line))
        return results

    def close(self) -> None:
        for file, rank in zip(self.files, self.ranks, strict=True):
            with suppress(OSError):
                file.close()
            rank.close()
        try:
            self.job.wait(END_SECONDS)
        except TimeoutError:
            self.job.stop()
            self.job.wait(END_SECONDS)

    def _died(self) -> BenchError:
        return BenchError(
            f"{self.name} ended or said nothing\nthe ranks' last words:\n{self.job.tail()}"
        )


def open_fleet(
    name: str,
    hosts: Hosts,
    ranks_per_host: int,
    module: str,
    *,
    python: str,
    folder: Path,
    timeout: float,
    number: int = 0,
) -> Fleet:
    """`python -m module` under torchrun on every host, in the bench folder; returns when all ranks have called.

    number: of the job, where these hosts run several. timeout: seconds until they must have, and for every answer.
    """
    folder.mkdir()
    place = folder / "socket"
    num_ranks = len(hosts) * ranks_per_host
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(num_ranks)
        listener.settimeout(0.2)
        bench = Path(__file__).resolve().parents[1]
        job = torchrun(
            hosts,
            ranks_per_host,
            ["-m", module],
            folder=folder,
            python=python,
            env={SOCKET: str(place)},
            number=number,
            cwd=bench,
        )
        callers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        while len(callers) < num_ranks:
            if time.monotonic() > deadline or any(agent.poll() is not None for agent in job.agents):
                job.stop()
                raise BenchError(f"{name}: {len(callers)} of {num_ranks} ranks came\n{job.tail()}")
            with suppress(TimeoutError):
                caller, _ = listener.accept()
                caller.settimeout(timeout)
                callers[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "little")] = caller
    return Fleet(name, job, [callers[r] for r in range(num_ranks)], timeout)
