"""Steps of one network whose dense gradients are summed over hosts, by one codec after the other in turns.

torchrun ... -m workers.dct_ranks FILE ROUNDS STEPS PERCENT      rank 0 writes FILE: JSON of seconds by system

The batch is such that the sums take this part of an exact step: "none", which sums nothing, takes the rest. Buckets
leave while backward runs. bytes: of a step, that rank 0 sends over its uplink.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from colonnade import Mesh, close_mesh, open_mesh
from colonnade.comm.traffic import Traffic
from colonnade.plan.names import DenseCodec, Thresholding
from colonnade.train.dense import DenseGradients

WIDTHS = (512, 1024, 512, 256)
"""1.2 million weights."""
CODECS: dict[str, DenseCodec] = {
    "exact": "exact",
    "int8": "int8",
    "thresholded": Thresholding(keep=0.01, keep_steps=0),
}
NONE = "none"
TUNING_ROUNDS = 4


class Steps:
    """Steps of one system on this rank."""

    def __init__(self, mesh: Mesh, system: str) -> None:
        torch.manual_seed(0)
        layers = [layer for n, m in pairwise(WIDTHS) for layer in (nn.Linear(n, m), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 1))
        self.mesh = replace(mesh, traffic=Traffic())
        self.dense: DenseGradients | None = None
        if system != NONE:
            self.dense = DenseGradients(list(self.model.parameters()), self.mesh, CODECS[system])
            self.dense.build_buckets()

    def time(self, inputs: torch.Tensor, steps: int) -> list[float]:
        """Return the seconds of each step, after one that is not timed."""
        seconds = []
        for _ in range(steps + 1):
            self.mesh.barrier()
            start = time.perf_counter()
            if self.dense is None:
                self.model.zero_grad()
            else:
                self.dense.zero_gradients()
                self.dense.begin_last_backward()
            self.model(inputs).square().sum().backward()
            if self.dense is not None:
                self.dense.reduce(finite=True, stop=False)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def sent_bytes(self) -> float:
        return sum(
            size for (_, link), size in self.mesh.traffic.sent_bytes.items() if link == "remote"
        )


def tune_batch(mesh: Mesh, none: Steps, exact: Steps, percent: int) -> torch.Tensor:
    """Return a batch with which the sums are `percent` of an exact step, the same size on all ranks."""
    size = 256.0
    for _ in range(TUNING_ROUNDS):
        inputs = torch.randn(int(size), WIDTHS[0])
        computing, whole = (sum(system.time(inputs, 4)) / 4 for system in (none, exact))
        factor = (whole - computing) / computing * (100 - percent) / percent
        size = min(max(size * factor, 8.0), 8192.0)
        size = float(mesh.broadcast("dense", torch.tensor([size])))
    return torch.randn(int(size), WIDTHS[0], generator=torch.Generator().manual_seed(mesh.rank))


def main(path: str, rounds: int, steps: int, percent: int) -> None:
    torch.set_num_threads(1)
    mesh = open_mesh()
    systems = {name: Steps(mesh, name) for name in (NONE, *CODECS)}
    inputs = tune_batch(mesh, systems[NONE], systems["exact"], percent)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            seconds[name] += system.time(inputs, steps)
    sent = {}
    for name, system in systems.items():
        before = system.sent_bytes()
        system.time(inputs, 1)
        sent[name] = (system.sent_bytes() - before) / 2
    if mesh.rank == 0:
        result = {"seconds": seconds, "bytes": sent, "batch": len(inputs)}
        Path(path).write_text(json.dumps(result))
    close_mesh(mesh)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
