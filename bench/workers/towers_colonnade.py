"""Colonnade by towers between hosts, one tower on each: a choice is one of `exchange_colonnade`'s, or the exchange
`towers`, and may have {"model": name, "ratio": CR}: then each tower has the module that the model makes with
`model.tower_ratio`, and gradients come back to its output. Its weights are summed over all ranks and take a step of
SGD.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade import Feature, Table
from colonnade.interaction import TowerModule
from colonnade.models.dcn import DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.topology.towers import Partition
from workers import exchange_colonnade
from workers.exchange_colonnade import NO_CHOICE, assign_shares, the_mesh
from workers.exchange_loop import Case, serve
from workers.quality_case import TOWER_SETTINGS

MODELS: dict[str, type[DLRM] | type[DCNv2]] = {"dlrm": DLRM, "dcnv2": DCNv2}
LR = 0.02
TRIED = 3


def towers_of(case: Case) -> list[list[str]]:
    """Features by tower: those whose tables lie on ranks of a host."""
    world = the_mesh().world
    results: list[list[str]] = [[] for _ in range(world.num_hosts)]
    for name, rank in zip(case.names, assign_shares(case.rows, world.num_ranks), strict=True):
        results[world.host(rank)].append(name)
    return results


class Opened(exchange_colonnade.Opened):
    def __init__(self, case: Case, choice: Mapping[str, Any], *inputs: Any) -> None:
        self.ratio = choice.get("ratio", 1)
        super().__init__(case, choice, *inputs)
        self.weights = list(self.collection.parameters())
        generator = torch.Generator().manual_seed(case.seed)
        self.output_gradients = [
            torch.randn(case.batch_size, interaction.out, generator=generator) / case.batch_size
            for interaction in self.collection.interactions.values()
            if isinstance(interaction, TowerModule)
        ]

    @staticmethod
    def declared(
        case: Case, choice: Mapping[str, Any] = NO_CHOICE
    ) -> tuple[list[Table], list[Feature], dict[str, Any] | None]:
        tables, features, consumers = exchange_colonnade.Opened.declared(case)
        if (ratio := choice.get("ratio", 1)) == 1:
            return tables, features, consumers
        name = choice["model"]
        towers = Partition(tuple(map(tuple, towers_of(case))))
        model = MODELS[name](
            tables, features, num_dense=0, towers=towers, tower_ratio=ratio, **TOWER_SETTINGS[name]
        )
        declared = model.embeddings.declaration.consumers
        return tables, features, {k: (c.interaction, list(c.features)) for k, c in declared.items()}

    def outputs(self, result: dict[str, Tensor]) -> list[Tensor]:
        return super().outputs(result) if self.ratio == 1 else list(result.values())

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return super().gradients(outputs) if self.ratio == 1 else self.output_gradients

    def own_seconds(self) -> float:
        """The products of its tower's module, for the samples of the rank's peers."""
        modules = [
            interaction
            for interaction in self.collection.interactions.values()
            if isinstance(interaction, TowerModule)
        ]
        if not modules:
            return 0.0
        world = self.mesh.world
        module, spent = modules[world.host(self.mesh.rank)], []
        size = self.case.batch_size * world.num_hosts
        dims = (len(module.dims), self.case.dim) if module.needs_equal_dims else (sum(module.dims),)
        fields = torch.zeros(size, *dims, requires_grad=True)
        for _ in range(TRIED):
            began = time.process_time()
            partials = module.partial_of_fields(fields)
            torch.autograd.grad(
                partials, [fields, *module.parameters()], torch.zeros_like(partials)
            )
            spent.append(time.process_time() - began)
        return median(spent)

    @torch.no_grad()
    def dense_step(self) -> None:
        if self.ratio == 1:
            return
        flat = torch.cat([weight.grad.flatten() for weight in self.weights])
        dist.all_reduce(flat)
        for weight, word in zip(
            self.weights, flat.split([w.numel() for w in self.weights]), strict=True
        ):
            weight -= LR * word.view_as(weight)
            weight.grad = None


def build(case: Case, choices: Mapping[str, Any]) -> Any:
    return exchange_colonnade.build(case, choices, Opened)


if __name__ == "__main__":
    serve(build)
