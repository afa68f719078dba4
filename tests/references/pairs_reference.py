"""Products of pairs of a sample's ids, in plain PyTorch, one pair after another: what operators over ids compute.

Legend: B samples, E lookups, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from colonnade import Feature, Ids


def scale_lookups(vectors: Tensor, ids: Ids, pooling: str, size: int) -> list[Tensor]:
    """Return each sample's variables x v, (n, D) each. vectors (E, D): the row of each lookup."""
    starts = list(range(size + 1)) if ids.offsets is None else ids.offsets.tolist()
    if ids.weights is not None:
        vectors = vectors * ids.weights.to(vectors)[:, None]
    divisors = {"sum": lambda n: 1, "mean": lambda n: n, "sqrtn": lambda n: n**0.5}
    return [
        vectors[first:last] / divisors[pooling](max(1, last - first))
        for first, last in pairwise(starts)
    ]


def multiply_pairs(
    vectors: Mapping[str, Tensor], ids: Mapping[str, Ids], features: Sequence[Feature], size: int
) -> Tensor:
    """Return the sum over pairs of a sample's ids of x_i v_i * x_j v_j, (B, D). vectors: by feature, (E, D)."""
    by_feature = [scale_lookups(vectors[f.name], ids[f.name], f.pooling, size) for f in features]
    dim = vectors[features[0].name].shape[1]
    sums = []
    for sample in range(size):
        variables = torch.cat([bags[sample] for bags in by_feature])
        total = variables.new_zeros(dim)
        for i in range(len(variables)):
            for j in range(i):
                total = total + variables[i] * variables[j]
        sums.append(total)
    return torch.stack(sums) if sums else torch.zeros(0, dim, dtype=torch.float64)
