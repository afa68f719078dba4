"""Tower modules of DLRM and DCN-v2 (DMT, Luo et al. 2024), a model's consumers by tower, and what these save and cost.

Legend: B samples, F fields of a tower, N their dim, D dim of the vectors that leave it, W columns side by side.
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


def words_of(model: nn.Module, collection: EmbeddingCollection) -> str:
    """One line; nothing where there are no tower modules."""
    modules = [each for each in collection.interactions.values() if isinstance(each, TowerModule)]
    if not modules:
        return ""
    enter, leave = (
        sum(sum(each.dims) for each in modules),
        sum(each.out for each in modules),
    )
    weights = sum(weight.numel() for each in modules for weight in each.parameters())
    fields = "+".join(str(len(each.dims)) for each in modules)
    said = (
        f"{len(modules)} tower modules ({fields} fields): {leave:,} floats of a sample leave them of {enter:,} (CR "
        f"{enter / leave:.2f}); {weights:,} parameters"
    )
    work, flat = getattr(model, "work", None), getattr(model, "flat_work", None)
    if work is None or flat is None:
        return said
    return (
        f"{said}. The dense network takes {work.flops / 1e6:.2f} MFLOP a sample and has {work.parameters:,} "
        f"parameters; without them {flat.flops / 1e6:.2f} and {flat.parameters:,}"
    )


TOWER = "tower"
"""Consumers are tower0, tower1, ... in the partition's order."""


class DLRMTower(nn.Module):
    """c vectors of each field, by one map that they share, then p of all together: (B, F, N) -> (B, (c F + p) D)."""

    def __init__(
        self, fields: int, dim: int, out_dim: int, *, vectors: int, summaries: int
    ) -> None:
        """vectors: c; summaries: p."""
        super().__init__()
        if vectors < 0 or summaries < 0 or not vectors + summaries:
            raise ConfigError(
                f"got tower_vectors={vectors}, tower_summaries={summaries}, wanted one of them at least 1: something "
                "must leave a tower"
            )
        self.each = nn.Linear(dim, vectors * out_dim) if vectors else None
        self.summary = nn.Linear(fields * dim, summaries * out_dim) if summaries else None

    def forward(self, fields: Tensor) -> Tensor:
        found = []
        if self.each is not None:
            vectors = linear(fields.flatten(0, 1), self.each.weight, self.each.bias)
            found.append(vectors.unflatten(0, fields.shape[:2]).flatten(1))
        if self.summary is not None:
            found.append(linear(fields.flatten(1), self.summary.weight, self.summary.bias))
        return found[0] if len(found) == 1 else cat(found, dim=1)


class DCNTower(nn.Module):
    """Cross layers over the fields side by side, then D columns for each field: (B, W) -> (B, F D)."""

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


def tower_consumers(
    partition: Partition,
    dims: Mapping[str, int],
    make: Callable[[Sequence[int]], TowerModule],
    *,
    seed: int,
) -> dict[str, tuple[TowerModule, list[str]]]:
    """By name, a tower's module and its fields. make: from the dims of a tower's fields.

    First values of a module follow from `seed` and its tower's features in their order alone, so towers may change
    places; torch's generator is left as it was.
    """
    found = {}
    for number, features in enumerate(partition.towers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(features, seed))
            found[f"{TOWER}{number}"] = make([dims[name] for name in features]), list(features)
    return found


def _seed_of(features: Sequence[str], seed: int) -> int:
    text = json.dumps([seed, *features]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def checked_partition(
    partition: Partition | None, features: Iterable[str], tower_dim: int | None
) -> Partition | None:
    """Raises ConfigError for a partition of another model's features, or a module without towers."""
    if partition is None:
        if tower_dim is not None:
            raise ConfigError(
                f"got tower_dim={tower_dim} without towers; say which features stand together (towers), or leave "
                "it out"
            )
        return None
    known, given = list(features), partition.features
    for names, words in (
        ([name for name in given if name not in known], "this model has no such feature"),
        ([name for name in known if name not in given], "it stands in no tower"),
    ):
        if names:
            raise ConfigError(
                f"towers: {', '.join(map(repr, names))}: {words}; the partition is for another model. Wanted each of "
                f"{', '.join(known)} in one tower"
            )
    return partition
