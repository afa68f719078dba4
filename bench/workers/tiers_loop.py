"""Protocol of `bench tiers` between the parent and a worker: one JSON object per line, over stdin and stdout.

    parent                                          worker
    the case (see `Case`)                           {"ready": facts}   once every row exists and memory is warm
    {"steps": K, "network": bool, "commit": bool}   {"seconds": [K], "phases": {}, "counts": {name: number}}
    end of file                                     leaves

Counts are of the block alone: seconds of processor, rows that missed, and pages read and bytes written, by the
store's own counters or else as the kernel counts them of the process. Between blocks a worker does nothing (`Gate`).
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from workers.loop import open_channel
from workers.tier_stream import Stream

PAGE_BYTES = 4096
STALL_SECONDS = 0.05
"""A reader ahead that drew no batch for so long will draw none."""


@dataclass(frozen=True)
class Case:
    """Model, stream and settings of a worker. `dram_bytes` None: all rows in memory, and no limit."""

    stream: str
    """Folder of a `Stream`."""
    store: str
    """The system's own folder: empty, or filled by `fill`."""
    dim: int
    dram_bytes: int | None
    lookahead: int
    hints: bool
    starts_empty: bool
    """Rows are initialised when they are first used; else every row exists, and memory holds the best of them."""
    bottom: list[int]
    top: list[int]
    embedding_lr: float
    num_threads: int
    shards: int = 1
    """Databases of a peer."""
    mapped: str = ""
    """Folder for evicted rows above the disk."""
    mapped_bytes: int = 0
    line_ns: int = 0
    """Delay for each cache line that moves to or from these."""
    delay: str = ""
    """Library of the delay."""
    site: str = ""
    """Folder of a peer's own packages."""
    placement: str = "history"
    """Memory of tables: by the history of the stream, as endless training would learn; or as `plan.placement`."""
    seed: int = 0

    def open_stream(self) -> Stream:
        return Stream(Path(self.stream))


class Gate:
    """The stream's batches, numbered from 0, as many as blocks have allowed: nobody works ahead between blocks.

    The first block allows `ahead` more than its steps, so that every later one begins and ends with a full window.
    """

    def __init__(self, num_batches: int, ahead: int) -> None:
        self._num_batches = num_batches
        self._changed = threading.Condition()
        self._allowed = ahead
        self.drawn = 0
        self._last = 0.0

    def __iter__(self) -> Iterator[int]:
        for number in range(self._num_batches):
            with self._changed:
                self._changed.wait_for(lambda: self.drawn < self._allowed)
                self.drawn += 1
                self._last = time.perf_counter()
            yield number

    def allow(self, batches: int) -> None:
        with self._changed:
            self._allowed += batches
            self._changed.notify_all()

    def settle(self) -> float:
        """Wait until batches stop flowing: all were drawn, or the window holds no more. Returns the last one's moment,
        by time.perf_counter: what is still made ready for later blocks belongs to this one."""
        while True:
            with self._changed:
                drawn, last = self.drawn, self._last
            if drawn == self._allowed or time.perf_counter() - last > STALL_SECONDS:
                return last
            time.sleep(0.002)


class System(Protocol):
    gate: Gate

    def step(self, network: bool) -> None:
        """Trains the next batch."""
        ...

    def settle(self) -> None:
        """Wait for the reads of batches that were drawn: they belong to the block that drew them."""
        ...

    def counts(self) -> Mapping[str, float]:
        """Return its counts since it was opened."""
        ...


class Durable(System, Protocol):
    """One whose blocks may hold commits."""

    def commit(self) -> None:
        """Makes everything so far durable. May return before it is."""
        ...

    def wait_for_commit(self) -> None: ...


def serve(open_system: Callable[[Case], tuple[System, dict[str, float | str]]]) -> None:
    """Answer the parent until it closes the pipe."""
    channel = open_channel()
    case = Case(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(case.num_threads)
    torch.manual_seed(case.seed)
    system, facts = open_system(case)
    print(json.dumps({"ready": facts}), file=channel)
    for line in sys.stdin:
        print(json.dumps(_block(system, **json.loads(line))), file=channel)


def _block(system: System | Durable, steps: int, network: bool, commit: bool = False) -> dict:
    """Measure a block. `commit`: one begins before the first step and is durable when the clock stops."""
    before = process_counts() | system.counts()
    seconds = []
    start = time.perf_counter()
    system.gate.allow(steps)
    if commit:
        system.commit()
    for _ in range(steps):
        system.step(network)
        end = time.perf_counter()
        seconds.append(end - start)
        start = end
    last = system.gate.settle()
    waited = time.perf_counter()
    system.settle()
    if commit:
        system.wait_for_commit()
    seconds[-1] += max(0.0, last - end) + time.perf_counter() - waited
    after = process_counts() | wait_for_counts(system)
    counts = {name: after[name] - before[name] for name in after}
    return {"seconds": seconds, "phases": {}, "counts": counts}


def wait_for_counts(system: System) -> dict[str, float]:
    """Wait until what is under way has ended; return the system's counts.

    Processor time does not count: to read that of several processes takes some."""
    counts = dict(system.counts())
    while True:
        time.sleep(0.02)
        later = dict(system.counts())
        if later | {"cpu_seconds": 0.0} == counts | {"cpu_seconds": 0.0}:
            return counts
        counts = later


def process_counts() -> dict[str, float]:
    """Read counts of this process since it began: pages read from devices, bytes written to them, processor seconds."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    counts = {"cpu_seconds": use.ru_utime + use.ru_stime, "pages_read": 0.0, "bytes_written": 0.0}
    path = Path("/proc/self/io")
    if path.exists():
        counters = dict(line.split(": ") for line in path.read_text().splitlines())
        counts["pages_read"] = int(counters["read_bytes"]) / PAGE_BYTES
        counts["bytes_written"] = float(counters["write_bytes"])
    return counts
