"""Protocol between `bench kernels` and a worker: one JSON object per line, over stdin and stdout.

    parent                                            worker
    {"num_threads", "seed"}                           {"ready": versions}   at once
    {"open": Tables, "also": [systems]}               {"opened": seconds}   tables and state stand, touched
    {"close": true}                                   {"closed": true}      their memory is given back
    {"system", "workload", "ids": path, "steps": K}   {"seconds": [K], "phases": {name: [K]}}
    end of file                                       leaves

The batches of `ids` come in turn, and again from the first when they end. A block begins with one more step, which
is not answered. Phases of a step:

    forward    lookup and pooling
    backward   from the outputs' gradient to the rows' gradients; with a fused optimizer, to the updated rows
    rows       the optimizer's update of the rows
    plan       lookups grouped by row                        } colonnade only; others do it inside
    slots      rows found, pinned and released again         } forward or backward

The outputs' gradient is a fixed tensor. Everything but `forward` counts as update.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from workers.loop import Laps, open_channel
from workers.workload import NUM_FEATURES, Tables, Workload

SPIN_SECONDS = 0.02
"""OpenMP's threads spin this long after a block; the next system must not pay for it."""
EPS = 1e-8
"""Epsilon of every Adagrad."""
SCALE = 1e-3
"""Scale of gradients and weights: small enough that nothing grows in thousands of steps, far from denormal numbers."""

Step = Callable[[Laps], None]
"""Takes the next batch, starts the laps, looks the ids up and updates the rows."""


class System(Protocol):
    """Tables of one kind, opened; makes the step of a workload."""

    phases: Sequence[str]

    def step(self, workload: Workload, batches: Iterator[Tensor]) -> Step:
        """`batches`: ids (F, B * L) int64, contiguous, without end."""


def serve(open_systems: Callable[[Tables, Sequence[str]], Mapping[str, System]]) -> None:
    """Answer the parent until it closes the pipe. `open_systems` gives the systems by name: the worker's own, and
    those asked for in "also"."""
    channel = open_channel()
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["num_threads"])
    torch.manual_seed(settings["seed"])
    print(json.dumps({"ready": {"torch": torch.__version__}}), file=channel)
    systems: Mapping[str, System] = {}
    runs: dict[str, Run] = {}
    for line in sys.stdin:
        message = json.loads(line)
        if "open" in message or "close" in message:
            systems, runs = {}, {}
            gc.collect()
        if "open" in message:
            start = time.perf_counter()
            systems = open_systems(Tables(**message["open"]), message["also"])
            answer: dict[str, Any] = {"opened": time.perf_counter() - start}
        elif "close" in message:
            answer = {"closed": True}
        else:
            key = f"{message['system']} {message['ids']}"
            if key not in runs:
                # One at a time: a run's outputs, gradients and batches may be large.
                runs = {k: run for k, run in runs.items() if run.path == message["ids"]}
                workload = Workload(**message["workload"])
                runs[key] = Run(systems[message["system"]], workload, message["ids"])
            answer = runs[key].block(message["steps"])
        print(json.dumps(answer), file=channel)


class Run:
    """One system's way through one file of batches."""

    def __init__(self, system: System, workload: Workload, path: str) -> None:
        self.path = path
        self.phases = system.phases
        self.step = system.step(workload, cycle(torch.from_numpy(np.load(path))))

    def block(self, num_steps: int) -> dict[str, Any]:
        phases: dict[str, list[float]] = defaultdict(list)
        self.step(Laps(self.phases))  # caches are as the system before left them
        for _ in range(num_steps):
            laps = Laps(self.phases)
            self.step(laps)
            for name, spent in laps.seconds.items():
                phases[name].append(spent)
        time.sleep(SPIN_SECONDS)
        seconds = [sum(parts) for parts in zip(*phases.values(), strict=True)]
        return {"seconds": seconds, "phases": phases}


def gradient_of(workload: Workload, dim: int) -> Tensor:
    """Pooled: (B, F * D), features side by side. Sequences: (F * B * L, D), feature-major."""
    if workload.pooled:
        shape = workload.batch_size, NUM_FEATURES * dim
    else:
        shape = workload.num_lookups, dim
    return fill(torch.empty(shape))


def fill(weights: Tensor) -> Tensor:
    """Random-looking values, in place and fast: every page is touched. The same in every worker."""
    flat = weights.view(-1)
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(min(len(flat), 1 << 20), generator=generator) * SCALE
    for part in flat.split(len(pattern)):
        part.copy_(pattern[: len(part)])
    return weights
