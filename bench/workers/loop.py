"""Protocol between the parent and a worker: one JSON object per line, over stdin and stdout.

    parent                              worker
    the case (see `Case`)               {"ready": versions and other facts}   once the model stands
    {"steps": K}                        {"seconds": [K], "phases": {name: [K]}, "loss": mean over K,
                                         "processor_seconds": per step, of all threads}
    end of file                         leaves

A worker waits without spinning while others run. Legend: N batches, B samples, F fields.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor, nn

from workers.network import DCNv2Network, DeepFMNetwork, DenseNetwork, use_library_linear

CROSS_LAYERS = 3

PHASES = ("wait", "forward", "backward", "rows", "dense")
"""wait: until the batch is usable; rows: the embeddings' update, where apart; dense: zero_grad and the dense update."""


@dataclass(frozen=True)
class Case:
    """Model, data and settings of a worker.

    `data` holds dense.npy (N, B, n) float32, ids.npy (N, F, B) int64, label.npy (N, B, 1) float32.
    """

    data: str
    rows: list[int]  # by field
    dim: int
    bottom: list[int]
    top: list[int]
    embedding_lr: float
    dense_lr: float
    num_threads: int
    seed: int
    model: str = "dlrm"
    """dlrm, deepfm or dcnv2: the MLP of the others is `top`."""
    part: str = "step"
    """step: the whole; embeddings, interaction or products: that part alone with a fixed gradient, and a loss of 0."""
    options: Sequence[str] = ()
    """Differences from the system as shipped. Peers: malloc, linear (Colonnade's), rows (row-wise Adagrad in one
    stacked table, torch alone), planner, pipeline (torchrec alone). colonnade: shipped_malloc."""

    @property
    def names(self) -> list[str]:
        return [f"C{f + 1}" for f in range(len(self.rows))]

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """dense, ids, label: read whole, so that no step waits for a disk."""
        arrays = [np.load(Path(self.data) / f"{name}.npy") for name in ("dense", "ids", "label")]
        dense, ids, label = map(torch.from_numpy, arrays)
        return dense, ids, label

    def network(self) -> nn.Module:
        """The dense network in plain torch: takes dense, fields and, of deepfm, first-order weights."""
        num_dense = np.load(Path(self.data) / "dense.npy", mmap_mode="r").shape[2]
        shape = {"num_fields": len(self.rows), "dim": self.dim, "num_dense": num_dense}
        network: nn.Module
        if self.model == "deepfm":
            network = DeepFMNetwork(**shape, top=self.top)
        elif self.model == "dcnv2":
            network = DCNv2Network(**shape, cross_layers=CROSS_LAYERS, top=self.top)
        else:
            network = DenseNetwork(**shape, bottom=self.bottom, top=self.top)
        return use_library_linear(network) if "linear" in self.options else network

    def gradient(self, batch_size: int) -> Tensor:
        """Make the gradient (B, F * D) that the embeddings alone get instead of a network's."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = batch_size, len(self.rows) * self.dim
        return torch.randn(shape, generator=generator) / batch_size


class Laps:
    """Splits a step: `laps("forward")` books the time since the last call."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(phases, 0.0)
        self.start()

    def start(self) -> None:
        """Start the clock: what came before is in no phase."""
        self.last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now


Step = Callable[[Laps], Tensor]
"""Trains the next batch; returns its loss."""


def build_part(
    case: Case, bottom: nn.Module, interact: Callable[[Tensor, Tensor], Tensor], top: nn.Module
) -> Step:
    """Build a step of the interaction alone, or of both MLPs and their optimizer alone."""
    inputs, ids, _ = case.load()
    generator = torch.Generator().manual_seed(case.seed)

    def random_leaf(width: int) -> Tensor:
        return torch.randn(ids.shape[2], width, generator=generator).requires_grad_()

    fields, vector = random_leaf(len(case.rows) * case.dim), random_leaf(case.dim)
    vector_gradient = vector.detach().clone()
    dots = interact(vector, fields).detach().requires_grad_()
    dots_gradient, logit_gradient = torch.randn_like(dots), random_leaf(1).detach()
    batches = iter(range(len(ids)))

    def interaction_step(laps: Laps) -> Tensor:
        vector.grad = fields.grad = None
        laps("dense")
        outputs = interact(vector, fields)
        laps("forward")
        outputs.backward(dots_gradient)
        laps("backward")
        return torch.zeros(())

    if case.part == "interaction":
        return interaction_step
    parameters = [*bottom.parameters(), *top.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=case.dense_lr, fused=True)

    def products_step(laps: Laps) -> Tensor:
        optimizer.zero_grad()
        dots.grad = None
        laps("dense")
        outputs = bottom(inputs[next(batches)]), top(dots)
        laps("forward")
        torch.autograd.backward(outputs, (vector_gradient, logit_gradient))
        laps("backward")
        optimizer.step()
        laps("dense")
        return torch.zeros(())

    return products_step


def keep_freed_memory() -> None:
    """Give malloc the settings of colonnade.ops.memory, which a peer's environment does not have."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        if not library.mallopt(-3, 2**30):
            library.mallopt(-3, 2**25)
        library.mallopt(-1, 2**30)


def serve(build: Callable[[Case], tuple[Step, dict[str, str]]]) -> None:
    """Answer the parent until it closes the pipe."""
    channel = open_channel()
    case = Case(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(case.num_threads)
    torch.manual_seed(case.seed)
    if "malloc" in case.options:
        keep_freed_memory()
    step, facts = build(case)
    print(json.dumps({"ready": {"torch": torch.__version__, **facts}}), file=channel)
    for line in sys.stdin:
        print(json.dumps(_block(step, json.loads(line)["steps"])), file=channel)


def open_channel() -> TextIO:
    """Open the file for answers. What libraries print goes to stderr instead."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def _block(step: Step, num_steps: int) -> dict:
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    losses = []
    started = time.process_time()
    for _ in range(num_steps):
        laps = Laps()
        losses.append(step(laps).detach())
        for name, spent in laps.seconds.items():
            phases[name].append(spent)
    seconds = [sum(parts) for parts in zip(*phases.values(), strict=True)]
    return {
        "seconds": seconds,
        "phases": phases,
        "loss": float(torch.stack(losses).mean()),
        "processor_seconds": (time.process_time() - started) / num_steps,
    }
