"""Weights that the ranks of one tower alone use: summed inside it in each step, handed to all ranks where others need
them (a checkpoint, the end of a training).

Between these, ranks of other towers have what they were handed last: their optimizer leaves weights without a gradient
alone.

Legend: T towers of S ranks.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.mesh import Mesh
from colonnade.lookup.contract import Inside
from colonnade.lookup.layout import Declaration

SEPARATE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip
"""Optimizers of which it is known that what a parameter becomes follows from its own gradients alone."""


@dataclass(frozen=True, slots=True)
class TowerWeights:
    """By tower, the operators that its ranks alone evaluate."""

    size: int  # S
    modules: tuple[tuple[nn.Module, ...], ...]  # by tower

    def parameters(self, tower: int) -> list[nn.Parameter]:
        """Those that are trained."""
        every = (each for module in self.modules[tower] for each in module.parameters())
        return list(dict.fromkeys(each for each in every if each.requires_grad))

    def hand_out(self, mesh: Mesh, optimizer: Optimizer) -> None:
        """Collective, between steps: every rank gets what it has not from the rank of its number in that tower:
        weights, buffers, and what the optimizer keeps of them."""
        mine, number = divmod(mesh.rank, self.size)
        data = self._packed(mine, optimizer)
        sizes = [int(each) for each in mesh.all_gather("dense", torch.tensor(len(data)))]
        peers = range(number, mesh.num_ranks, self.size)
        others = [rank in peers and rank != mesh.rank for rank in range(mesh.num_ranks)]
        lengths = [size * is_one for size, is_one in zip(sizes, others, strict=True)]
        received, _ = mesh.all_to_all(
            "dense", data.repeat(sum(others)), [len(data) * each for each in others], lengths
        )
        parts = {
            rank // self.size: part
            for rank, part in enumerate(received.split(lengths))
            if others[rank]
        }
        self._unpack(parts, optimizer)

    def _packed(self, tower: int, optimizer: Optimizer) -> Tensor:
        parameters, state = self.parameters(tower), optimizer.state
        buffer = io.BytesIO()
        kept = {n: dict(state[each]) for n, each in enumerate(parameters) if each in state}
        torch.save({"tensors": self._tensors(tower), "state": kept}, buffer)
        return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)

    @torch.no_grad()
    def _unpack(self, parts: Mapping[int, Tensor], optimizer: Optimizer) -> None:
        every = (each for group in optimizer.param_groups for each in group["params"])
        numbers = {id(each): number for number, each in enumerate(every)}
        whole = optimizer.state_dict()
        for tower, part in parts.items():
            said: dict[str, Any] = torch.load(
                io.BytesIO(part.numpy().tobytes()), weights_only=True, map_location="cpu"
            )
            for here, there in zip(self._tensors(tower), said["tensors"], strict=True):
                here.copy_(there)
            for n, each in enumerate(self.parameters(tower)):
                if n in said["state"]:
                    whole["state"][numbers[id(each)]] = said["state"][n]
        optimizer.load_state_dict(whole)

    def _tensors(self, tower: int) -> list[Tensor]:
        buffers = [each for module in self.modules[tower] for each in module.buffers()]
        return [*(each.data for each in self.parameters(tower)), *dict.fromkeys(buffers)]


def tower_weights(
    declaration: Declaration, inside: Inside | None, num_ranks: int, optimizer: Optimizer
) -> TowerWeights | None:
    """Pure. Which weights need be summed inside their tower only; None: none. Weights that consumers of several towers
    share, or of none, are everybody's; and all are, where an optimizer may look at several parameters at once, for it
    must see the same on every rank."""
    if inside is None or inside.size >= num_ranks or type(optimizer) not in SEPARATE:
        return None
    users = defaultdict(set)
    for name, consumer in declaration.consumers.items():
        for each in consumer.interaction.parameters():
            users[id(each)].add(inside.tower_of.get(name))
    modules: list[list[nn.Module]] = [[] for _ in range(num_ranks // inside.size)]
    for name, tower in inside.tower_of.items():
        operator = declaration.consumers[name].interaction
        if all(users[id(each)] == {tower} for each in operator.parameters()):
            modules[tower].append(operator)
    if not any(each.requires_grad for some in modules for one in some for each in one.parameters()):
        return None
    return TowerWeights(inside.size, tuple(map(tuple, modules)))
