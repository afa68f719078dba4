"""Weights that one tower alone uses: summed inside the tower in each step, and sent to all ranks only when needed.

They are sent before a checkpoint and at the end of training. In between, ranks of other towers have the values that
they received last: their optimizer does not change weights without a gradient.

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
from colonnade.errors import ConfigError
from colonnade.lookup.contract import TowerConsumers
from colonnade.lookup.layout import EmbeddingDeclaration

ELEMENTWISE_OPTIMIZERS = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
"""Optimizers that are known to update each parameter from its own gradients alone."""


@dataclass(frozen=True, slots=True)
class TowerWeights:
    """Operators, by tower, that the ranks of this tower alone evaluate."""

    size: int  # S
    modules: tuple[tuple[nn.Module, ...], ...]  # by tower

    def parameters(self, tower: int) -> list[nn.Parameter]:
        """Return the trained parameters of a tower."""
        parameters = (
            parameter for module in self.modules[tower] for parameter in module.parameters()
        )
        return list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))

    def broadcast_to_other_towers(self, mesh: Mesh, optimizer: Optimizer) -> None:
        """Send each tower's weights, buffers and optimizer state to all ranks of other towers.

        Collective, between steps. Each rank receives them from its peer, the rank with the same
        local rank in that tower.
        """
        own_tower, local_rank = divmod(mesh.rank, self.size)
        packed = self._serialize_tower(own_tower, optimizer)
        sizes_of_ranks = [int(size) for size in mesh.all_gather("dense", torch.tensor(len(packed)))]
        peers = range(local_rank, mesh.num_ranks, self.size)
        is_peer = [rank in peers and rank != mesh.rank for rank in range(mesh.num_ranks)]
        lengths = [
            size * is_sender for size, is_sender in zip(sizes_of_ranks, is_peer, strict=True)
        ]
        received, _ = mesh.all_to_all(
            "dense",
            packed.repeat(sum(is_peer)),
            [len(packed) * is_receiver for is_receiver in is_peer],
            lengths,
        )
        parts = {
            rank // self.size: part
            for rank, part in enumerate(received.split(lengths))
            if is_peer[rank]
        }
        self._load_serialized_towers(parts, optimizer)

    def _serialize_tower(self, tower: int, optimizer: Optimizer) -> Tensor:
        """Serialize the weights, buffers and optimizer state of a tower."""
        parameters = self.parameters(tower)
        state = optimizer.state
        buffer = io.BytesIO()
        states = {
            n: dict(state[parameter])
            for n, parameter in enumerate(parameters)
            if parameter in state
        }
        torch.save({"tensors": self._tensors(tower), "state": states}, buffer)
        return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)

    @torch.no_grad()
    def _load_serialized_towers(
        self, serialized_by_tower: Mapping[int, Tensor], optimizer: Optimizer
    ) -> None:
        """Load the serialized weights and optimizer state of other towers."""
        parameters = (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        index_of_parameter = {id(parameter): index for index, parameter in enumerate(parameters)}
        merged = optimizer.state_dict()
        for tower, part in serialized_by_tower.items():
            received: dict[str, Any] = torch.load(
                io.BytesIO(part.numpy().tobytes()), weights_only=True, map_location="cpu"
            )
            for own_tensor, received_tensor in zip(
                self._tensors(tower), received["tensors"], strict=True
            ):
                own_tensor.copy_(received_tensor)
            for n, parameter in enumerate(self.parameters(tower)):
                if n in received["state"]:
                    merged["state"][index_of_parameter[id(parameter)]] = received["state"][n]
        optimizer.load_state_dict(merged)

    def _tensors(self, tower: int) -> list[Tensor]:
        """Return the weights and buffers of a tower."""
        buffers = [buffer for module in self.modules[tower] for buffer in module.buffers()]
        return [*(parameter.data for parameter in self.parameters(tower)), *dict.fromkeys(buffers)]


def find_tower_weights(
    declaration: EmbeddingDeclaration,
    tower_consumers: TowerConsumers | None,
    num_ranks: int,
    optimizer: Optimizer,
) -> TowerWeights | None:
    """Find the weights to sum inside their tower only; None if there are none. Pure.

    Weights that several towers share, or that no tower uses, are summed over all ranks. So are all weights if the
    optimizer may combine several parameters, because then it must see the same values on every rank.
    """
    if (
        tower_consumers is None
        or tower_consumers.size >= num_ranks
        or type(optimizer) not in ELEMENTWISE_OPTIMIZERS
    ):
        return None
    users = defaultdict(set)
    for name, consumer in declaration.consumers.items():
        for parameter in consumer.interaction.parameters():
            users[id(parameter)].add(tower_consumers.tower_of.get(name))
    modules: list[list[nn.Module]] = [[] for _ in range(num_ranks // tower_consumers.size)]
    for name, tower in tower_consumers.tower_of.items():
        operator = declaration.consumers[name].interaction
        if all(users[id(parameter)] == {tower} for parameter in operator.parameters()):
            modules[tower].append(operator)
    if not any(
        parameter.requires_grad
        for operators in modules
        for operator in operators
        for parameter in operator.parameters()
    ):
        return None
    return TowerWeights(tower_consumers.size, tuple(map(tuple, modules)))


def reject_tower_gradient(parameter: Tensor) -> None:
    """Raise ConfigError, because backward added a gradient to a parameter that one tower alone trains."""
    raise ConfigError(
        f"got a gradient from the loss of a {tuple(parameter.shape)} weight that is trained inside a tower: ranks of "
        "other towers have older values of it. Use weights of operators inside towers nowhere else (for a penalty on "
        "them, take the optimizer's weight_decay), or send values (plan.exchange=pooled)"
    )
