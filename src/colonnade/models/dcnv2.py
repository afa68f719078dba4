"""DCN-v2 (Wang et al. 2021): cross layers with a matrix each, and an MLP; tower modules before them where asked.

Legend: B samples, W width of x_0 = dense columns and fields, or what leaves their towers, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, cat, nn

from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.interaction import Concat, Interaction, LowRankCross, TowerModule
from colonnade.models import work
from colonnade.models.fields import dims_of
from colonnade.models.layers import MatrixCross, MixtureCross, Tower, first_layer, mlp
from colonnade.models.split import Scorer
from colonnade.models.tower_modules import DCNTower, checked_partition, tower_consumers
from colonnade.table import Feature, Table
from colonnade.topology.towers import Partition

Consumers = dict[str, tuple[Interaction, Sequence[str]]]


class DCNv2(Scorer):
    """Matrices are whole, of `cross_rank`, or a mixture of `cross_experts` of that rank. The MLP is beside the cross
    layers (parallel: both feed the last layer) or after them (stacked).

    Of a rank, without experts and tower modules, the cross layers and the linear layer behind them are an operator of
    the fields, "cross", and so is the first layer of an MLP beside them, "first": owners can evaluate both.
    """

    ordered = ("cross.", "top.0.", "last.")

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        cross_layers: int = 3,
        cross_rank: int | None = None,
        cross_experts: int = 1,
        structure: Literal["parallel", "stacked"] = "parallel",
        top: Sequence[int] = (128, 64),
        towers: Partition | None = None,
        tower_dim: int | None = None,
        tower_layers: int = 1,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        """`towers` with `tower_dim`: a tower's module has `tower_layers` cross layers (of `cross_rank`) over its fields
        and makes that many columns of each. Without `tower_dim` towers say where rows lie, and the model is the flat
        one. Raises ConfigError."""
        if cross_experts > 1 and cross_rank is None:
            raise ConfigError(
                f"got cross_experts={cross_experts} without cross_rank; experts are of low rank: set one, e.g. 32"
            )
        super().__init__()

        def layer(width: int) -> nn.Module:
            if cross_experts > 1 and cross_rank is not None:
                return MixtureCross(width, cross_rank, cross_experts)
            return MatrixCross(width, cross_rank)

        dims = dims_of(tables, features)
        self.is_parallel = structure == "parallel"
        self.towers = checked_partition(towers, dims, tower_dim)
        consumers: Consumers = {"fields": (Concat(), list(dims))}
        width = flat_width = num_dense + sum(dims.values())
        inside = work.Work()
        self.deep: Tower | None = None
        if self.towers is not None and tower_dim is not None:
            width = num_dense + tower_dim * len(features)

            def make(dims: Sequence[int]) -> TowerModule:
                module = DCNTower(
                    len(dims), sum(dims), tower_dim, layers=tower_layers, rank=cross_rank
                )
                return TowerModule(module, dims, len(dims) * tower_dim, side_by_side=True)

            consumers = dict(tower_consumers(self.towers, dims, make, seed=seed))
            for members in self.towers.towers:
                each = [dims[name] for name in members]
                inside += work.dcn_tower(each, tower_dim, layers=tower_layers, rank=cross_rank)
        elif cross_rank is not None and cross_experts == 1:
            consumers, self.deep = self._of_low_rank(
                dims, num_dense, cross_rank, cross_layers, [*top, tasks]
            )
        self.taken = list(consumers)
        self.embeddings = EmbeddingCollection(tables, features, consumers=consumers, seed=seed)
        if self.deep is None:
            self.cross = nn.ModuleList(layer(width) for _ in range(cross_layers))
            self.top = mlp([width, *top], last_relu=True)
            last = top[-1] if top else width
            self.last = nn.Linear(last + width if self.is_parallel else last, tasks)

        def around(width: int) -> work.Work:
            last = (top[-1] if top else width) + width * self.is_parallel
            crossed = work.cross(width, layers=cross_layers, rank=cross_rank, experts=cross_experts)
            return crossed + work.mlp([width, *top]) + work.mlp([last, tasks])

        self.work, self.flat_work = inside + around(width), around(flat_width)

    def _of_low_rank(
        self,
        dims: Mapping[str, int],
        num_dense: int,
        rank: int,
        layers: int,
        widths: Sequence[int],
    ) -> tuple[Consumers, Tower]:
        """Consumers of the fields, and all that is behind them. widths: of the layers behind x_0 or x_L, the MLP's and
        the last one."""
        width, tasks = num_dense + sum(dims.values()), widths[-1]
        given = (list(dims.values()), rank, layers)
        if not self.is_parallel:
            cross = LowRankCross(*given, widths[0], num_dense=num_dense)
            return {"cross": (cross, list(dims))}, Tower(0, [width], widths)
        inputs = widths[-2] if len(widths) > 1 else width  # of the last layer, beside x_L
        cross = LowRankCross(*given, tasks, num_dense=num_dense, fan_in=inputs + width)
        first = first_layer(num_dense, dims.values(), widths[0])
        deep = Tower(num_dense, dims.values(), widths)
        # The last layer takes both side by side: its parts start as parts of it.
        parts = deep.top[-1] if len(deep.top) else nn.ModuleList([first, deep.columns])
        with torch.no_grad():
            for parameter in parts.parameters():
                parameter.mul_((inputs / (inputs + width)) ** 0.5)
        return {"cross": (cross, list(dims)), "first": (first, list(dims))}, deep

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        if self.deep is not None:
            if self.is_parallel:
                return fields["cross"] + self.deep(fields["first"], dense)
            return self.deep(fields["cross"], dense[:, :0])
        first = cat([dense, *(fields[name] for name in self.taken)], dim=1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        if self.is_parallel:
            return self.last(cat([x, self.top(first)], dim=1))
        return self.last(self.top(x))
