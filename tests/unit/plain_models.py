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
    def taken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's weights, or their gradients, as they are named and cut here."""
        return dict(weights)

    def fields(self, batch: Batch) -> Tensor:
        results = []
        for feature in self.features:
            ids = batch.ids[feature.name]
            offsets = torch.arange(batch.size) if ids.offsets is None else ids.offsets[:-1]
            results.append(self.bags[feature.table](ids.values, offsets))
        return torch.stack(results, 1)

    def id_pairs(self, batch: Batch, dim: int) -> Tensor:
        """Products of all pairs of a sample's ids, of `dim` columns, (B, dim); each of n ids of a bag counts 1 / n."""
        products = []
        for sample in range(batch.size):
            vectors = []
            for feature in self.features:
                ids = batch.ids[feature.name]
                starts = torch.arange(batch.size + 1) if ids.offsets is None else ids.offsets
                own = ids.values[starts[sample] : starts[sample + 1]]
                vectors.append(self.bags[feature.table].weight[own, :dim] / max(1, len(own)))
            products.append(sum(pairs(torch.cat(vectors)[None]))[0])
        return torch.stack(products)


def pairs(vectors: Tensor) -> list[Tensor]:
    """v_i * v_j of all pairs, (B, D) each."""
    return [vectors[:, i] * vectors[:, j] for i in range(vectors.shape[1]) for j in range(i)]


class PlainLR(Plain):
    def __init__(self, tables, features, num_dense, tasks):
        super().__init__(tables, features)
        self.linear = Term(num_dense, tasks)

    def forward(self, batch):
        return self.fields(batch).sum(1) + self.linear(batch.dense)


class PlainPairs(PlainLR):
    """`over`: what a pair is of, "ids" or "fields"."""

    over = "ids"

    def sum_pairs(self, batch: Batch, deep: Tensor) -> Tensor:
        """Sum of v_i * v_j of all pairs, (B, D). deep: the fields' vectors (B, F, D)."""
        return self.id_pairs(batch, deep.shape[2]) if self.over == "ids" else sum(pairs(deep))


class PlainFM(PlainPairs):
    def forward(self, batch):
        fields, tasks = self.fields(batch), len(self.linear.bias)
        deep, wide = fields[..., :-tasks], fields[..., -tasks:]
        second = self.sum_pairs(batch, deep).sum(1, keepdim=True)
        return wide.sum(1) + second + self.linear(batch.dense)


class PlainNFM(PlainPairs):
    def __init__(self, tables, features, num_dense, tasks, top):
        super().__init__(tables, features, num_dense, tasks)
        self.top = stack([num_dense + tables[0].width - tasks, *top, tasks])

    def forward(self, batch):
        fields, tasks = self.fields(batch), len(self.linear.bias)
        deep, wide = fields[..., :-tasks], fields[..., -tasks:]
        hidden = self.top(torch.cat([batch.dense, self.sum_pairs(batch, deep)], 1))
        return hidden + wide.sum(1) + self.linear(batch.dense)


class PlainWideDeep(PlainPairs):
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
            logits = logits + self.sum_pairs(batch, deep).sum(1, keepdim=True)
        return logits

    @staticmethod
    def taken(weights):
        """Take the weights of a model whose first layer is in two parts."""
        weights = dict(weights)
        of_fields = weights.pop("embeddings.interactions.deep.weight")
        of_columns = weights.pop("deep.columns.weight")
        results = {"deep.0.weight": torch.cat([of_columns, of_fields], 1)}
        results["deep.0.bias"] = weights.pop("deep.columns.bias")
        for name, value in weights.items():  # its first layer has no number
            if name.startswith("deep.top."):
                _, _, number, kind = name.split(".")
                name = f"deep.{int(number) + 2}.{kind}"
            results[name] = value
        return results


class PlainDeepFM(PlainWideDeep):
    HAS_FM = True


class PlainDLRM(Plain):
    def __init__(self, tables, features, num_dense, tasks, bottom, top, keep_fields):
        super().__init__(tables, features)
        dim, num_fields = tables[0].width, len(features)
        self.bottom = stack([num_dense, *bottom, dim], last_relu=True) if num_dense else None
        vectors = num_fields + (num_dense > 0)
        retained = (num_fields if keep_fields else 0) + (num_dense > 0)
        self.keep_fields = keep_fields
        self.top = stack([retained * dim + vectors * (vectors - 1) // 2, *top, tasks])

    def forward(self, batch):
        fields = self.fields(batch)
        vectors, retained = fields, [fields.flatten(1)] if self.keep_fields else []
        if self.bottom is not None:
            dense = self.bottom(batch.dense)
            vectors = torch.cat([dense[:, None], fields], 1)
            retained = [*retained, dense]
        dots = [pair.sum(1, keepdim=True) for pair in pairs(vectors)]
        return self.top(torch.cat([*retained, *dots], 1))


class PlainTower(nn.Module):
    """One tower's module; `kinds` of weights are named as the model's."""

    def __init__(self, **layers):
        super().__init__()
        self.module = nn.ModuleDict(layers)


class PlainTowered(Plain):
    """Twin of a model with tower modules, which give (B, O) each, in the partition's order; modules are named tower0,
    ..."""

    def make_towers(self, partition, make):
        self.members = [[self.number(name) for name in tower] for tower in partition.towers]
        self.towers = nn.ModuleDict(
            {f"tower{n}": PlainTower(**make(len(member))) for n, member in enumerate(self.members)}
        )

    def number(self, name):
        return [feature.name for feature in self.features].index(name)

    @staticmethod
    def taken(weights):
        return {
            name.replace("embeddings.interactions.", "towers."): v for name, v in weights.items()
        }

    def tower_outputs(self, fields: Tensor) -> list[Tensor]:
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
        retained = vectors if keep else int(num_dense > 0)
        self.top = stack([retained * dim + vectors * (vectors - 1) // 2, *top, tasks])

    def leaves(self, module, fields):
        result = []
        if "field_projection" in module:
            result += [module["field_projection"](fields[:, f]) for f in range(fields.shape[1])]
        if "summary" in module:
            result.append(module["summary"](fields.flatten(1)))
        return torch.cat(result, 1).unflatten(1, (-1, self.dim))

    def forward(self, batch):
        vectors = torch.cat(self.tower_outputs(self.fields(batch)), 1)
        retained = [vectors.flatten(1)] if self.keep else []
        if self.bottom is not None:
            dense = self.bottom(batch.dense)
            vectors = torch.cat([dense[:, None], vectors], 1)
            retained = [*retained, dense]
        dots = [pair.sum(1, keepdim=True) for pair in pairs(vectors)]
        return self.top(torch.cat([*retained, *dots], 1))


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
        first = x = torch.cat([batch.dense, *self.tower_outputs(self.fields(batch))], 1)
        for layer in self.cross:
            x = layer(first, x)
        return self.last(torch.cat([x, self.top(first)], 1))


class PlainDCNv1(PlainDCN):
    @staticmethod
    def taken(weights):
        """Take the weights of a collapsed model: one map of x_0 for all that takes it."""
        weights = dict(weights)
        first = torch.cat([weights["weights"], weights["embeddings.interactions.first.weight"]], 1)
        num_layers, tasks = (
            len(weights["biases"]),
            len(first) - len(weights["bias"]) - len(weights["biases"]),
        )
        cross, last, hidden = first.split([num_layers, tasks, len(weights["bias"])])
        results = {}
        for n in range(num_layers):
            results[f"cross.{n}.weight"] = cross[n : n + 1]
            results[f"cross.{n}.bias"] = weights["biases"][n]
        after = {k.removeprefix("top."): v for k, v in weights.items() if k.startswith("top.")}
        if not after:  # the last layer is the first
            results["last.weight"], results["last.bias"] = (
                torch.cat([last, hidden], 1),
                weights["bias"],
            )
            return results
        results["top.0.weight"], results["top.0.bias"] = hidden, weights["bias"]
        number = max(int(name.split(".")[0]) for name in after)
        for name, value in after.items():
            if int(name.split(".")[0]) < number:
                results[f"top.{int(name.split('.')[0]) + 2}.{name.split('.')[1]}"] = value
        results["last.weight"] = torch.cat([last, after[f"{number}.weight"]], 1)
        results["last.bias"] = after[f"{number}.bias"]
        return results


class PlainLowRankDCN(PlainDCN):
    """`MatrixLayer`s of a rank, whose weights the model has side by side, layer by layer."""

    def taken(self, weights):
        weights = dict(weights)
        cross = {
            name: weights.pop(f"embeddings.interactions.cross.{name}")
            for name in ("down", "up", "bias", "last")
        }
        results = {}
        for n in range(len(self.cross)):
            results[f"cross.{n}.layers.0.weight"] = cross["down"][n]
            results[f"cross.{n}.layers.1.weight"] = cross["up"][n].T
            results[f"cross.{n}.layers.1.bias"] = cross["bias"][n]
        columns = weights.pop("deep.columns.weight"), weights.pop("deep.columns.bias")
        hidden = cross["last"]  # stacked: what the MLP makes of x_L
        if self.is_parallel:
            hidden = torch.cat([columns[0], weights.pop("embeddings.interactions.first.weight")], 1)
        if not len(self.top):  # the last layer is the first
            results["last.weight"], results["last.bias"] = hidden, columns[1]
        else:
            results["top.0.weight"], results["top.0.bias"] = hidden, columns[1]
            number = len(self.top) - 2
            for kind in ("weight", "bias"):
                results[f"last.{kind}"] = weights.pop(f"deep.top.{number}.{kind}")
            for name, value in weights.items():
                place, kind = name.removeprefix("deep.top.").split(".")
                results[f"top.{int(place) + 2}.{kind}"] = value
        if self.is_parallel:
            results["last.weight"] = torch.cat([cross["last"], results["last.weight"]], 1)
        return results
