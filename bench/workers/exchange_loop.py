"""Protocol of `bench exchange` between the parent and a rank: one JSON object per line, over a socket.

    parent                                        every rank
    {"case": a `Case`, "choices": by system}      {"ready": facts, "left_out": {system: reason}}
    {"system": name, "warm_up": W, "steps": K}    measurements (`Block`)
    {"plan": true}                                {"links", "chosen": in words, "same": system,
                                                   "left_out": {system: reason},
                                                   "predicted": {system: {"payload_bytes", "seconds": of a step}}}
    end of file                                   leaves

Another case replaces the systems of the one before. All ranks do the same blocks in the same order. Batches go round:
a system's n-th step sees batch n modulo their number.

Legend: N batches, R ranks, F features (one table each), B samples of a rank, L lookups per sample and feature, D dim.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

SOCKET = "COLONNADE_BENCH_SOCKET"
ROWS_LR, EPS = 0.02, 1e-6
INTERFACE_COUNTERS = Path("/sys/class/net/eth0/statistics")


@dataclass(frozen=True)
class Case:
    """`ids`: an .npy of (N, R, F, B * L) int64, sample by sample. Rows begin as zeros and every step sends the same
    gradient back, so that all systems must come to the same outputs."""

    ids: str
    rows: list[int]  # by feature
    dim: int
    batch_size: int  # B
    lookups: int  # L
    pooled: bool
    """False: a sequence feature, one output row per lookup."""
    seed: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.dim

    @property
    def names(self) -> list[str]:
        return [f"C{f + 1}" for f in range(len(self.rows))]

    def load(self, rank: int) -> Tensor:
        """Read this rank's own ids whole: (N, F, B * L)."""
        return torch.from_numpy(np.array(np.load(self.ids, mmap_mode="r")[:, rank]))

    def gradient(self) -> Tensor:
        """Make the gradient of the outputs: (B, F * D) pooled, (B * L, D) of each sequence feature."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.pooled:
            shape: tuple[int, int] = self.batch_size, len(self.rows) * self.dim
        else:
            shape = self.batch_size * self.lookups, self.dim
        return torch.randn(shape, generator=generator) / self.batch_size


@dataclass
class Block:
    seconds: list[float] = field(default_factory=list)  # by step
    cpu_seconds: float = 0.0  # this process's, per step
    sent_bytes: float = 0.0  # by the host's interface, per step; 0 but on the host's first rank
    payload_bytes: dict[str, float] = field(
        default_factory=dict
    )  # per step, by purpose and link, where counted
    phases: dict[str, float] = field(default_factory=dict)  # seconds per step
    digest: float = 0.0  # of the last step's outputs
    rss_bytes: int = 0


class System(Protocol):
    """One choice of sharding and exchange, standing in every rank."""

    def run(self, warm_up: int, steps: int, start: Callable[[], None]) -> Iterations: ...


class Planner(Protocol):
    def plan(self) -> dict[str, Any]:
        """Predict the step of each system between the links as they are. Collective."""
        ...


@dataclass
class Iterations:
    """Result of a system's `run`, which calls `start` on every rank after `warm_up` steps and does `steps` more."""

    seconds: list[float]
    digest: float
    payload_bytes: dict[str, float] = field(default_factory=dict)  # of all of them, by purpose
    phases: dict[str, float] = field(default_factory=dict)  # of all of them


Built = tuple[dict[str, System], dict[str, str], dict[str, Any], Planner | None]


def serve(build: Callable[[Any, Mapping[str, Any]], Built], case_type: type[Case] = Case) -> None:
    """Answer the parent until it closes the socket. `build(case, choices)` is called on every rank, and opens the world
    when it is called first: (systems, what is left out and why, facts, a planner where there is one)."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(os.environ[SOCKET])
        parent.sendall(rank.to_bytes(4, "little"))
        file = parent.makefile("rw", encoding="utf-8", newline="\n")
        systems: dict[str, System] = {}
        planner: Planner | None = None
        barrier = None
        for line in file:
            message = json.loads(line)
            if "case" in message:
                systems, planner = {}, None
                gc.collect()  # rows of the case before
                systems, left_out, facts, planner = build(
                    case_type(**message["case"]), message["choices"]
                )
                if not dist.is_initialized():  # alone
                    dist.init_process_group("gloo")
                barrier = barrier or dist.new_group()
                answer: dict[str, Any] = {"ready": facts, "left_out": left_out}
            elif "plan" in message:
                answer = planner.plan() if planner is not None else {}
            else:
                done = measure(
                    systems[message["system"]], message["warm_up"], message["steps"], barrier
                )
                answer = asdict(done)
            print(json.dumps(answer), file=file, flush=True)


def measure(system: System, warm_up: int, steps: int, group: Any) -> Block:
    began: list[float] = []

    def start() -> None:
        dist.barrier(group=group)
        began[:] = [time.process_time(), sent_bytes()]

    done = system.run(warm_up, steps, start)
    cpu_seconds = time.process_time() - began[0]
    dist.barrier(group=group)  # what travelled for this block has travelled
    return Block(
        seconds=done.seconds,
        cpu_seconds=cpu_seconds / steps,
        sent_bytes=(sent_bytes() - began[1]) / steps,
        payload_bytes={name: count / steps for name, count in done.payload_bytes.items()},
        phases={name: seconds / steps for name, seconds in done.phases.items()},
        digest=done.digest,
        rss_bytes=resident_bytes(),
    )


def sent_bytes() -> int:
    """Return the bytes that this host's interface has sent; 0 but on the host's first rank."""
    if os.environ["LOCAL_RANK"] != "0" or not INTERFACE_COUNTERS.exists():
        return 0
    return int((INTERFACE_COUNTERS / "tx_bytes").read_text())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def digest_of(outputs: Tensor | list[Tensor]) -> float:
    """Sum the absolute values of the outputs over all ranks. Collective."""
    outputs = outputs if isinstance(outputs, list) else [outputs]
    total = sum(output.detach().double().abs().sum() for output in outputs)
    value = torch.as_tensor(total, dtype=torch.float64).view(1)
    dist.all_reduce(value)
    return float(value)
