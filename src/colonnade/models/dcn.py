"""Deep & cross networks: DCN (Wang et al. 2017), cross layers with one weight vector each in parallel with an MLP; and
DCN-v2 (Wang et al. 2021), cross layers with one matrix each and an MLP, optionally after tower modules.

Legend: B samples, n dense columns, W width of x_0 = dense columns and fields (or tower outputs) concatenated, L cross
layers, T tasks, H width of the MLP's first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, cat, nn

from colonnade.config.model import CrossStructure
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.interaction import Concat, FieldsLinear, Interaction, LowRankCross, TowerModule
from colonnade.models.dense_cost import DenseCost, cross_layers_cost, dcn_tower_cost, mlp_cost
from colonnade.models.fields import find_field_dims
from colonnade.models.layers import MatrixCross, MixtureCross, SplitMLP, build_first_layer, mlp
from colonnade.models.split import Scorer
from colonnade.models.tower_modules import (
    DCNTower,
    build_tower_consumers,
    check_tower_partition,
    find_tower_dim,
)
from colonnade.table import Feature, Table
from colonnade.topology.towers import Partition

Consumers = dict[str, tuple[Interaction, Sequence[str]]]


class DCN(Scorer):
    """Deep & cross network evaluated with one linear map of x_0.

    x_{l+1} = x_0 <w_l, x_l> + b_l + x_l equals a_{l+1} x_0 + c_{l+1} with a number a and a sum of biases c:

        a_{l+1} = a_l + a_l <w_l, x_0> + <w_l, c_l>,    c_{l+1} = c_l + b_l,    a_0 = 1, c_0 = 0

    So the cross layers, the last layer's part for x_L and the MLP's first layer share one linear map of x_0 with
    L + T + H rows: `weights` for the dense columns, the consumer "first" for the fields. No x_l is ever computed.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        cross_layers: int = 3,
        top: Sequence[int] = (128, 64),
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        dims = find_field_dims(tables, features)
        widths = [*top, tasks]
        self.rows = [cross_layers, tasks, widths[0]]
        first = build_first_layer(num_dense, dims.values(), sum(self.rows))
        self.embeddings = EmbeddingCollection(
            tables, features, consumers={"first": (first, list(dims))}, seed=seed
        )
        width = num_dense + sum(dims.values())
        self.weights = nn.Parameter(torch.empty(sum(self.rows), num_dense))
        self.bias = nn.Parameter(torch.empty(widths[0]))
        for parameter in (self.weights, self.bias):
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
        self.biases = nn.Parameter(torch.zeros(cross_layers, width))
        self.top = mlp(widths)
        # The last layer's input is x_L and the MLP's output concatenated: scale its parts to that fan-in.
        last_width = width + (top[-1] if top else width)
        rows = slice(cross_layers, cross_layers + tasks if top else None)
        parts = [(weight, rows, width) for weight in (first.weight, self.weights)]
        mlp_parameters = self.top[-1].parameters() if top else [self.bias]
        parts += [(weight, slice(None), top[-1] if top else width) for weight in mlp_parameters]
        with torch.no_grad():
            for parameter, part_rows, fan_in in parts:
                parameter[part_rows] *= (fan_in / last_width) ** 0.5

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        num_layers, tasks, _ = self.rows
        products = fields["first"] + dense @ self.weights.T
        crossed, last, hidden = products.split(self.rows, dim=1)
        first = self.embeddings.interactions["first"]
        assert isinstance(first, FieldsLinear)
        rows = num_layers + tasks
        weights = torch.cat([self.weights[:rows], first.weight[:rows]], dim=1)  # (L + T, W)
        bias_sums = self.biases.cumsum(0)  # c_1 .. c_L
        scale = torch.ones_like(products[:, :1])  # a_l
        for layer in range(num_layers):
            product = scale * crossed[:, layer : layer + 1]
            if layer:
                product = product + (weights[layer] * bias_sums[layer - 1]).sum()
            scale = scale + product
        logits = scale * last
        if num_layers:
            logits = logits + (weights[num_layers:] * bias_sums[-1]).sum(1)
        hidden = hidden + self.bias
        return logits + self.top(hidden.relu() if len(self.top) else hidden)


def _build_towers(
    partition: Partition,
    field_dims: Mapping[str, int],
    tower_dim: int,
    layers: int,
    rank: int | None,
    seed: int,
) -> tuple[Consumers, DenseCost]:
    """Return the consumer of each tower, and the cost of all their modules."""

    def make(dims: Sequence[int]) -> TowerModule:
        module = DCNTower(len(dims), sum(dims), tower_dim, layers=layers, rank=rank)
        return TowerModule(module, dims, len(dims) * tower_dim, side_by_side=True)

    cost = DenseCost()
    for members in partition.towers:
        dims = [field_dims[name] for name in members]
        cost += dcn_tower_cost(dims, tower_dim, layers=layers, rank=rank)
    return dict(build_tower_consumers(partition, field_dims, make, seed=seed)), cost


class DCNv2(Scorer):
    """DCN-v2 with full matrices, matrices of `cross_rank`, or a mixture of `cross_experts` of that rank.

    The MLP is parallel to the cross layers (both feed the last layer) or after them (stacked). With `cross_rank`, and
    without experts and tower modules, owner ranks can evaluate two operators of the fields: "cross", the cross layers
    and the linear layer after them, and "first", the first layer of a parallel MLP.
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
        structure: CrossStructure = "parallel",
        top: Sequence[int] = (128, 64),
        towers: Partition | None = None,
        tower_dim: int | None = None,
        tower_ratio: float | None = None,
        tower_layers: int = 1,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        """Create the model.

        `towers` with `tower_dim`: a tower's module has `tower_layers` cross layers (of `cross_rank`) over its fields
        and outputs `tower_dim` columns for each field. `tower_ratio` sets the largest number with which each module's
        input has that many times the columns of its output. Without either, towers only decide where rows are stored,
        and the model is the flat one. Raises ConfigError.
        """
        if cross_experts > 1 and cross_rank is None:
            raise ConfigError(
                f"got cross_experts={cross_experts} without cross_rank; experts are of low rank: set one, e.g. 32"
            )
        super().__init__()

        def build_cross_layer(width: int) -> nn.Module:
            if cross_experts > 1 and cross_rank is not None:
                return MixtureCross(width, cross_rank, cross_experts)
            return MatrixCross(width, cross_rank)

        dims = find_field_dims(tables, features)
        self.is_parallel = structure == "parallel"
        self.towers = check_tower_partition(towers, dims, tower_dim, tower_ratio)
        consumers: Consumers = {"fields": (Concat(), list(dims))}
        width = flat_width = num_dense + sum(dims.values())
        tower_cost = DenseCost()
        self.deep: SplitMLP | None = None
        if self.towers is not None:
            columns = [(sum(dims[n] for n in tower), len(tower)) for tower in self.towers.towers]
            tower_dim = find_tower_dim(tower_dim, tower_ratio, columns)
        if self.towers is not None and tower_dim is not None:
            width = num_dense + tower_dim * len(features)
            consumers, tower_cost = _build_towers(
                self.towers, dims, tower_dim, tower_layers, cross_rank, seed
            )
        elif cross_rank is not None and cross_experts == 1:
            consumers, self.deep = self._build_low_rank_consumers(
                dims, num_dense, cross_rank, cross_layers, [*top, tasks]
            )
        self.inputs = list(consumers)
        self.embeddings = EmbeddingCollection(tables, features, consumers=consumers, seed=seed)
        if self.deep is None:
            self.cross = nn.ModuleList(build_cross_layer(width) for _ in range(cross_layers))
            self.top = mlp([width, *top], last_relu=True)
            last = top[-1] if top else width
            self.last = nn.Linear(last + width if self.is_parallel else last, tasks)

        def network_cost(width: int) -> DenseCost:
            last = (top[-1] if top else width) + width * self.is_parallel
            crossed = cross_layers_cost(
                width, layers=cross_layers, rank=cross_rank, experts=cross_experts
            )
            return crossed + mlp_cost([width, *top]) + mlp_cost([last, tasks])

        self.dense_cost = tower_cost + network_cost(width)
        self.flat_dense_cost = network_cost(flat_width)

    def _build_low_rank_consumers(
        self,
        dims: Mapping[str, int],
        num_dense: int,
        rank: int,
        layers: int,
        widths: Sequence[int],
    ) -> tuple[Consumers, SplitMLP]:
        """Return the consumers of the fields, and the MLP after them. widths: of the layers after x_0 or x_L, the MLP's
        and the last one."""
        width = num_dense + sum(dims.values())
        tasks = widths[-1]
        shape = (list(dims.values()), rank, layers)
        if not self.is_parallel:
            cross = LowRankCross(*shape, widths[0], num_dense=num_dense)
            return {"cross": (cross, list(dims))}, SplitMLP(0, [width], widths)
        inputs = widths[-2] if len(widths) > 1 else width  # of the last layer, without x_L
        cross = LowRankCross(*shape, tasks, num_dense=num_dense, fan_in=inputs + width)
        first = build_first_layer(num_dense, dims.values(), widths[0])
        deep = SplitMLP(num_dense, dims.values(), widths)
        # The last layer's input is both concatenated: scale its parts to that fan-in.
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
        first = cat([dense, *(fields[name] for name in self.inputs)], dim=1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        if self.is_parallel:
            return self.last(cat([x, self.top(first)], dim=1))
        return self.last(self.top(x))
