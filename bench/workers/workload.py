"""Workload of `bench kernels`: the shape of a step's lookups, and the ids, made once for all systems.

Legend: N batches, F features (one table each), B samples, L lookups per sample and feature, R rows of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NUM_FEATURES = 26
SKEWS = {"uniform": 0.0, "zipf 1.05": 1.05, "zipf 1.2": 1.2}
"""P(k-th most frequent row) ~ 1 / k**skew."""


@dataclass(frozen=True)
class Workload:
    name: str
    batch_size: int  # B
    lookups: int  # L
    pooled: bool
    """False: a sequence feature, one output row per lookup."""
    steps: int
    """Steps of a block."""

    @property
    def num_lookups(self) -> int:
        """E, all features' lookups of a step."""
        return NUM_FEATURES * self.batch_size * self.lookups

    @property
    def num_outputs(self) -> int:
        """Output rows of one feature."""
        return self.batch_size * (1 if self.pooled else self.lookups)


@dataclass(frozen=True)
class Tables:
    """Tables that a worker opens: NUM_FEATURES tables of (rows, dim) float32, and one optimizer for all."""

    rows: int
    dim: int
    optimizer: str  # "sgd", "rowwise_adagrad", "adagrad"
    lr: float


def draw(skew: float, num_rows: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ids (shape) int64. Which rows are frequent differs by table, and neighbours in frequency are no neighbours.

    shape: (N, F, ...).
    """
    if not skew:
        return torch.randint(num_rows, shape, generator=generator)
    weight = torch.arange(1, num_rows + 1, dtype=torch.float64).pow_(-skew)
    upto = weight.cumsum(0)
    sample = torch.rand(shape, dtype=torch.float64, generator=generator) * upto[-1]
    rank = torch.searchsorted(upto, sample, right=True).clamp_(max=num_rows - 1)
    # rank -> (factor * rank + start) mod R is a permutation, as factor and R have no common divisor.
    table = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    factor = next(
        f for f in range(int(0.618 * num_rows) | 1, 2 * num_rows) if np.gcd(f, num_rows) == 1
    )
    return rank.mul_(factor).add_((table + 1) * (num_rows // (shape[1] + 1))).remainder_(num_rows)


def write_ids(
    path: Path, workload: Workload, skew: float, num_rows: int, num_batches: int, seed: int
) -> None:
    """path: (N, F, B * L) int64, sample by sample."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_batches, NUM_FEATURES, workload.batch_size * workload.lookups
    np.save(path, draw(skew, num_rows, shape, generator).numpy())
