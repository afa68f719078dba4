"""The models again, in plain PyTorch: nn.EmbeddingBag, nn.Linear, and the papers' formulas written out.

Parameters are named as the models', or `taken` says how, so that `load_state_dict` gives a twin the same dense weights.
Legend: B samples, F fields, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from colonnade import Batch, Feature, Table


def stack(widths, last_relu=False) -> nn.Sequential:
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Term(nn.Module):
    def __init__(self, num_dense, tasks):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tasks, num_dense))
        self.bias = nn.Parameter(torch.randn(tasks))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Plain(nn.Module):
    """`bags`: one nn.EmbeddingBag per table, whole rows; subclasses see the fields' vectors (B, F, D)."""

    def __init__(self, tables: list[Table], features: list[Feature]):
        super().__init__()
        self.features = features
        self.bags = nn.ModuleDict(
            {
                t.name: nn.EmbeddingBag(t.rows, t.width, mode="mean", dtype=torch.float64)
                for t in tables
            }
        )

    @staticmethod
    def taken(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's weights, or their gradients, as they are named and cut here."""
        return dict(given)

    def fields(self, batch: Batch) -> Tensor:
        found = []
        for feature in self.features:
            ids = batch.ids[feature.name]
            offsets = torch.arange(batch.size) if ids.offsets is None else ids.offsets[:-1]
            found.append(self.bags[feature.table](ids.values, offsets))
        return torch.stack(found, 1)


def pairs(vectors: Tensor) -> list[Tensor]:
    """v_i * v_j of all pairs, (B, D) each."""
    return [vectors[:, i] * vectors[:, j] for i in range(vectors.shape[1]) for j in range(i)]


class PlainLR(Plain):
    def __init__(self, tables, features, num_dense, tasks):
        super().__init__(tables, features)
        self.linear = Term(num_dense, tasks)

    def forward(self, batch):
        return self.fields(batch).sum(1) + self.linear(batch.dense)


class PlainFM(PlainLR):
    def forward(self, batch):
        fields, tasks = self.fields(batch), len(self.linear.bias)
        deep, wide = fields[..., :-tasks], fields[..., -tasks:]
        second = sum(pair.sum(1, keepdim=True) for pair in pairs(deep))
        return wide.sum(1) + second + self.linear(batch.dense)


class PlainNFM(PlainLR):
    def __init__(self, tables, features, num_dense, tasks, top):
        super().__init__(tables, features, num_dense, tasks)
        self.top = stack([num_dense + tables[0].width - tasks, *top, tasks])

    def forward(self, batch):
        fields, tasks = self.fields(batch), len(self.linear.bias)
        deep, wide = fields[..., :-tasks], fields[..., -tasks:]
        hidden = self.top(torch.cat([batch.dense, sum(pairs(deep))], 1))
        return hidden + wide.sum(1) + self.linear(batch.dense)


class PlainWideDeep(PlainLR):
    HAS_FM = False

    def __init__(self, tables, features, num_dense, tasks, top):
        super().__init__(tables, features, num_dense, tasks)
        width = num_dense + len(features) * (tables[0].width - tasks)
        self.deep = stack([width, *top, tasks])

    def forward(self, batch):
        fields, tasks = self.fields(batch), len(self.linear.bias)
        deep, wide = fields[..., :-tasks], fields[..., -tasks:]
        hidden = self.deep(torch.cat([batch.dense, deep.flatten(1)], 1))
        logits = hidden + wide.sum(1) + self.linear(batch.dense)
        if self.HAS_FM:
            logits = logits + sum(pair.sum(1, keepdim=True) for pair in pairs(deep))
        return logits

    @staticmethod
    def taken(given):
        """Of a model whose first layer is in two parts."""
        given = dict(given)
        of_fields = given.pop("embeddings.interactions.deep.weight")
        of_columns = given.pop("deep.columns.weight")
        found = {"deep.0.weight": torch.cat([of_columns, of_fields], 1)}
        found["deep.0.bias"] = given.pop("deep.columns.bias")
        for name, value in given.items():  # its first layer has no number
            if name.startswith("deep.top."):
                _, _, number, kind = name.split(".")
                name = f"deep.{int(number) + 2}.{kind}"
            found[name] = value
        return found


class PlainDeepFM(PlainWideDeep):
    HAS_FM = True


class PlainDLRM(Plain):
    def __init__(self, tables, features, num_dense, tasks, bottom, top, keep_fields):
        super().__init__(tables, features)
        dim, num_fields = tables[0].width, len(features)
        self.bottom = stack([num_dense, *bottom, dim], last_relu=True) if num_dense else None
        vectors = num_fields + (num_dense > 0)
        kept = (num_fields if keep_fields else 0) + (num_dense > 0)
        self.keep_fields = keep_fields
        self.top = stack([kept * dim + vectors * (vectors - 1) // 2, *top, tasks])

    def forward(self, batch):
        fields = self.fields(batch)
        vectors, kept = fields, [fields.flatten(1)] if self.keep_fields else []
        if self.bottom is not None:
            dense = self.bottom(batch.dense)
            vectors = torch.cat([dense[:, None], fields], 1)
            kept = [*kept, dense]
        dots = [pair.sum(1, keepdim=True) for pair in pairs(vectors)]
        return self.top(torch.cat([*kept, *dots], 1))


class PlainTower(nn.Module):
    """One tower's module; `kinds` of weights are named as the model's."""

    def __init__(self, **layers):
        super().__init__()
        self.module = nn.ModuleDict(layers)


class PlainTowered(Plain):
    """What leaves the towers, (B, O) each, in the partition's order; modules are named tower0, ..."""

    def make_towers(self, partition, make):
        self.members = [[self.number(name) for name in tower] for tower in partition.towers]
        self.towers = nn.ModuleDict(
            {f"tower{n}": PlainTower(**make(len(each))) for n, each in enumerate(self.members)}
        )

    def number(self, name):
        return [feature.name for feature in self.features].index(name)

    @staticmethod
    def taken(given):
        return {name.replace("embeddings.interactions.", "towers."): v for name, v in given.items()}

    def left(self, fields: Tensor) -> list[Tensor]:
        return [
            self.leaves(tower.module, fields[:, members])
            for tower, members in zip(self.towers.values(), self.members, strict=True)
        ]


class PlainTowerDLRM(PlainTowered):
    """A vector at a time: c of each field, then p of all of a tower."""

    def __init__(self, tables, features, num_dense, tasks, bottom, top, partition, dim, c, p, keep):
        super().__init__(tables, features)
        wide = tables[0].width

        def make(count):
            layers = {"field_projection": nn.Linear(wide, c * dim)} if c else {}
            return layers | ({"summary": nn.Linear(count * wide, p * dim)} if p else {})

        self.make_towers(partition, make)
        self.dim, self.keep = dim, keep
        self.bottom = stack([num_dense, *bottom, dim], last_relu=True) if num_dense else None
        vectors = c * len(features) + p * len(partition.towers) + (num_dense > 0)
        kept = vectors if keep else int(num_dense > 0)
        self.top = stack([kept * dim + vectors * (vectors - 1) // 2, *top, tasks])

    def leaves(self, module, fields):
        result = []
        if "field_projection" in module:
            result += [module["field_projection"](fields[:, f]) for f in range(fields.shape[1])]
        if "summary" in module:
            result.append(module["summary"](fields.flatten(1)))
        return torch.cat(result, 1).unflatten(1, (-1, self.dim))

    def forward(self, batch):
        vectors = torch.cat(self.left(self.fields(batch)), 1)
        kept = [vectors.flatten(1)] if self.keep else []
        if self.bottom is not None:
            dense = self.bottom(batch.dense)
            vectors = torch.cat([dense[:, None], vectors], 1)
            kept = [*kept, dense]
        dots = [pair.sum(1, keepdim=True) for pair in pairs(vectors)]
        return self.top(torch.cat([*kept, *dots], 1))


class VectorLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1, width)), nn.Parameter(torch.ones(width))

    def forward(self, first, x):
        return first * (x * self.weight).sum(1, keepdim=True) + self.bias + x


class MatrixLayer(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        if rank is None:
            self.layers = nn.ModuleList([nn.Linear(width, width)])
        else:
            self.layers = nn.ModuleList(
                [nn.Linear(width, rank, bias=False), nn.Linear(rank, width)]
            )

    def forward(self, first, x):
        factor = x
        for layer in self.layers:
            factor = layer(factor)
        return first * factor + x


class MixtureLayer(nn.Module):
    """An expert at a time, as the paper writes it."""

    def __init__(self, width, rank, experts):
        super().__init__()
        self.down = nn.Parameter(torch.ones(experts * rank, width))
        self.core = nn.Parameter(torch.ones(experts, rank, rank))
        self.up = nn.Parameter(torch.ones(experts, rank, width))
        self.bias = nn.Parameter(torch.ones(width))
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, first, x):
        gates, total = self.gate(x).softmax(1), x
        for k, (core, up) in enumerate(zip(self.core, self.up, strict=True)):
            down = self.down.reshape(len(self.core), -1, x.shape[1])[k]
            expert = first * (torch.tanh(torch.tanh(x @ down.T) @ core) @ up + self.bias)
            total = total + gates[:, k : k + 1] * expert
        return total


class PlainDCN(Plain):
    def __init__(
        self, tables, features, num_dense, tasks, layers, top, structure="parallel", cross_layers=2
    ):
        super().__init__(tables, features)
        width = num_dense + len(features) * tables[0].width
        self.cross = nn.ModuleList(layers(width) for _ in range(cross_layers))
        self.top = stack([width, *top], last_relu=True)
        self.is_parallel = structure == "parallel"
        last = top[-1] if top else width
        self.last = nn.Linear(last + width * self.is_parallel, tasks)

    def forward(self, batch):
        first = x = torch.cat([batch.dense, self.fields(batch).flatten(1)], 1)
        for layer in self.cross:
            x = layer(first, x)
        if self.is_parallel:
            return self.last(torch.cat([x, self.top(first)], 1))
        return self.last(self.top(x))


class PlainTowerDCN(PlainTowered):
    def __init__(self, tables, features, num_dense, tasks, top, partition, dim, layers, rank):
        super().__init__(tables, features)
        wide = tables[0].width
        self.make_towers(
            partition,
            lambda count: {
                "cross": nn.ModuleList(MatrixLayer(count * wide, rank) for _ in range(layers)),
                "last": nn.Linear(count * wide, count * dim),
            },
        )
        width = num_dense + len(features) * dim
        self.cross = nn.ModuleList(MatrixLayer(width, rank) for _ in range(2))
        self.top = stack([width, *top], last_relu=True)
        self.last = nn.Linear(top[-1] + width, tasks)

    def leaves(self, module, fields):
        first = x = fields.flatten(1)
        for layer in module["cross"]:
            x = layer(first, x)
        return module["last"](x)

    def forward(self, batch):
        first = x = torch.cat([batch.dense, *self.left(self.fields(batch))], 1)
        for layer in self.cross:
            x = layer(first, x)
        return self.last(torch.cat([x, self.top(first)], 1))


class PlainDCNv1(PlainDCN):
    @staticmethod
    def taken(given):
        """Of a model that is collapsed: one map of x_0 for all that takes it."""
        given = dict(given)
        first = torch.cat([given["weights"], given["embeddings.interactions.first.weight"]], 1)
        num_layers, tasks = (
            len(given["biases"]),
            len(first) - len(given["bias"]) - len(given["biases"]),
        )
        cross, last, hidden = first.split([num_layers, tasks, len(given["bias"])])
        found = {}
        for n in range(num_layers):
            found[f"cross.{n}.weight"] = cross[n : n + 1]
            found[f"cross.{n}.bias"] = given["biases"][n]
        after = {k.removeprefix("top."): v for k, v in given.items() if k.startswith("top.")}
        if not after:  # the last layer is the first
            found["last.weight"], found["last.bias"] = torch.cat([last, hidden], 1), given["bias"]
            return found
        found["top.0.weight"], found["top.0.bias"] = hidden, given["bias"]
        number = max(int(name.split(".")[0]) for name in after)
        for name, value in after.items():
            if int(name.split(".")[0]) < number:
                found[f"top.{int(name.split('.')[0]) + 2}.{name.split('.')[1]}"] = value
        found["last.weight"] = torch.cat([last, after[f"{number}.weight"]], 1)
        found["last.bias"] = after[f"{number}.bias"]
        return found


class PlainLowRankDCN(PlainDCN):
    """`MatrixLayer`s of a rank, whose weights the model has side by side, layer by layer."""

    def taken(self, given):
        given = dict(given)
        cross = {
            name: given.pop(f"embeddings.interactions.cross.{name}")
            for name in ("down", "up", "bias", "last")
        }
        found = {}
        for n in range(len(self.cross)):
            found[f"cross.{n}.layers.0.weight"] = cross["down"][n]
            found[f"cross.{n}.layers.1.weight"] = cross["up"][n].T
            found[f"cross.{n}.layers.1.bias"] = cross["bias"][n]
        columns = given.pop("deep.columns.weight"), given.pop("deep.columns.bias")
        hidden = cross["last"]  # stacked: what the MLP makes of x_L
        if self.is_parallel:
            hidden = torch.cat([columns[0], given.pop("embeddings.interactions.first.weight")], 1)
        if not len(self.top):  # the last layer is the first
            found["last.weight"], found["last.bias"] = hidden, columns[1]
        else:
            found["top.0.weight"], found["top.0.bias"] = hidden, columns[1]
            number = len(self.top) - 2
            for kind in ("weight", "bias"):
                found[f"last.{kind}"] = given.pop(f"deep.top.{number}.{kind}")
            for name, value in given.items():
                place, kind = name.removeprefix("deep.top.").split(".")
                found[f"top.{int(place) + 2}.{kind}"] = value
        if self.is_parallel:
            found["last.weight"] = torch.cat([cross["last"], found["last.weight"]], 1)
        return found
