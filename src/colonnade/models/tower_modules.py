"""Tower modules of DLRM and DCN-v2 (DMT, Luo et al. 2024): modules, consumers by tower, and a summary of their cost.

Legend: B samples, F fields of a tower, N their dim, D dim of the vectors it outputs, W columns of all its fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, cat, nn

from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.interaction import TowerModule
from colonnade.models.layers import MatrixCross
from colonnade.ops.linear import linear
from colonnade.topology.towers import Partition


def describe_tower_modules(model: nn.Module, collection: EmbeddingCollection) -> str:
    """Describe a model's tower modules in one line; an empty string if there are none."""
    modules = [
        operator
        for operator in collection.interactions.values()
        if isinstance(operator, TowerModule)
    ]
    if not modules:
        return ""
    inputs = sum(sum(module.dims) for module in modules)
    outputs = sum(module.out for module in modules)
    weights = sum(weight.numel() for module in modules for weight in module.parameters())
    fields = "+".join(str(len(module.dims)) for module in modules)
    summary = (
        f"{len(modules)} tower modules ({fields} fields): {outputs:,} floats of a sample leave them of {inputs:,} (CR "
        f"{inputs / outputs:.2f}); {weights:,} parameters"
    )
    cost = getattr(model, "dense_cost", None)
    flat = getattr(model, "flat_dense_cost", None)
    if cost is None or flat is None:
        return summary
    return (
        f"{summary}. The dense network takes {cost.flops / 1e6:.2f} MFLOP a sample and has {cost.parameters:,} "
        f"parameters; without them {flat.flops / 1e6:.2f} and {flat.parameters:,}"
    )


TOWER = "tower"
"""Prefix of the consumers' names: tower0, tower1, ... in the partition's order."""


class DLRMTower(nn.Module):
    """Tower module of DLRM: c vectors per field from a shared linear map, then p vectors of all fields: (B, F, N) ->
    (B, (c F + p) D)."""

    def __init__(
        self, fields: int, dim: int, out_dim: int, *, vectors: int, summaries: int
    ) -> None:
        """Create the module. fields: F; dim: N, width of an input vector; out_dim: D, of an output vector; vectors: c,
        outputs per field; summaries: p, outputs of all fields together. Raises ConfigError if it has no output."""
        super().__init__()
        if vectors < 0 or summaries < 0 or not vectors + summaries:
            raise ConfigError(
                f"got tower_vectors={vectors}, tower_summaries={summaries}, wanted one of them at least 1: something "
                "must leave a tower"
            )
        self.field_projection = nn.Linear(dim, vectors * out_dim) if vectors else None
        self.summary = nn.Linear(fields * dim, summaries * out_dim) if summaries else None

    def forward(self, fields: Tensor) -> Tensor:
        outputs = []
        if self.field_projection is not None:
            vectors = linear(
                fields.flatten(0, 1), self.field_projection.weight, self.field_projection.bias
            )
            outputs.append(vectors.unflatten(0, fields.shape[:2]).flatten(1))
        if self.summary is not None:
            outputs.append(linear(fields.flatten(1), self.summary.weight, self.summary.bias))
        return outputs[0] if len(outputs) == 1 else cat(outputs, dim=1)


class DCNTower(nn.Module):
    """Tower module of DCN-v2: cross layers over the concatenated fields, then D columns per field: (B, W) -> (B, F
    D)."""

    def __init__(
        self, fields: int, width: int, out_dim: int, *, layers: int, rank: int | None
    ) -> None:
        super().__init__()
        self.cross = nn.ModuleList(MatrixCross(width, rank) for _ in range(layers))
        self.last = nn.Linear(width, fields * out_dim)

    def forward(self, fields: Tensor) -> Tensor:
        x = fields
        for layer in self.cross:
            x = layer(fields, x)
        return linear(x, self.last.weight, self.last.bias)


def build_tower_consumers(
    partition: Partition,
    field_dims: Mapping[str, int],
    make_module: Callable[[Sequence[int]], TowerModule],
    *,
    seed: int,
) -> dict[str, tuple[TowerModule, list[str]]]:
    """Build a module for each tower of the partition: modules and their fields, by consumer name.

    make_module: function from the dims of a tower's fields to its module. A module's initial weights depend only on
    `seed` and on its tower's features in their order, so towers may be reordered. torch's generator is left unchanged.
    """
    consumers = {}
    for number, features in enumerate(partition.towers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_tower_seed(features, seed))
            module = make_module([field_dims[name] for name in features])
        consumers[f"{TOWER}{number}"] = module, list(features)
    return consumers


def _tower_seed(features: Sequence[str], seed: int) -> int:
    """Derive the seed of a tower's module from the run's seed and the names of its features."""
    text = json.dumps([seed, *features]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def check_tower_partition(
    partition: Partition | None,
    features: Iterable[str],
    tower_dim: int | None,
    tower_ratio: float | None,
) -> Partition | None:
    """Return the partition, checked against the model's features.

    Raises ConfigError for a partition of other features, and for `tower_dim` or `tower_ratio` without towers."""
    if tower_dim is not None and tower_ratio is not None:
        raise ConfigError(
            f"got tower_dim={tower_dim} and tower_ratio={tower_ratio:g}, which both say how wide a tower module's "
            "output is; leave one of them out"
        )
    if partition is None:
        for name, value in (("tower_dim", tower_dim), ("tower_ratio", tower_ratio)):
            if value is not None:
                raise ConfigError(
                    f"got {name}={value:g} without towers; give the partition of the features (towers), or leave "
                    "it out"
                )
        return None
    model_features = list(features)
    tower_features = partition.features
    for names, problem in (
        (
            [name for name in tower_features if name not in model_features],
            "this model has no such feature",
        ),
        ([name for name in model_features if name not in tower_features], "it is in no tower"),
    ):
        if names:
            raise ConfigError(
                f"towers: {', '.join(map(repr, names))}: {problem}; the partition is for another model. Wanted each of "
                f"{', '.join(model_features)} in one tower"
            )
    return partition


def find_tower_dim(
    tower_dim: int | None,
    tower_ratio: float | None,
    columns: Sequence[tuple[int, int]],
) -> int | None:
    """Return the width of the vectors that tower modules output; None without modules.

    That is `tower_dim`, or the largest with which at least `tower_ratio` columns enter each module for one that leaves.
    columns: of each tower, its input columns and its number of output vectors. Raises ConfigError if none is left.
    """
    if tower_ratio is None:
        return tower_dim
    dim = min(int(inputs / (tower_ratio * vectors) + 1e-9) for inputs, vectors in columns)
    if dim < 1:
        raise ConfigError(
            f"got tower_ratio={tower_ratio:g}, with which no column leaves a tower, wanted at most "
            f"{min(inputs / vectors for inputs, vectors in columns):g} for these fields"
        )
    return dim
