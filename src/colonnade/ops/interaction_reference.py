"""The fused interactions in plain PyTorch: their definition, and what runs on other devices and dtypes.

Equal to the fused ones up to the order of sums. Differentiable any number of times.

Legend: B samples, V vectors, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pairwise_dot(vectors: Sequence[Tensor], kept: Sequence[int] = ()) -> Tensor:
    """Vectors (B, k, D) each -> (B, len(kept) * D + V (V - 1) / 2): see `interaction.pairwise_dot`."""
    stacked = torch.cat(list(vectors), dim=1)  # (B, V, D)
    num_vectors = stacked.shape[1]
    rows, columns = torch.tril_indices(num_vectors, num_vectors, -1, device=stacked.device)
    dots = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
    chosen = dots.index_select(1, rows * num_vectors + columns)
    return torch.cat([*(stacked[:, v] for v in kept), chosen.to(stacked.dtype)], dim=1)


def fm(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors (B, k, D) each -> (B, 1): half of |sum of vectors|^2 - sum of |vector|^2."""
    stacked = torch.cat(list(vectors), dim=1)
    return (stacked.sum(1).square() - stacked.square().sum(1)).sum(1, keepdim=True) / 2


def cross(first: Tensor, factor: Tensor, input: Tensor) -> Tensor:
    """first * factor + input."""
    return first * factor + input
