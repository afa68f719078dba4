"""The dense network of every peer: the same function as colonnade.models.dlrm after the embeddings, in plain torch.

Imports torch only, so that a peer's environment need not hold Colonnade. tests/unit/test_bench.py holds the
two together. Legend: B samples, n dense columns, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DenseNetwork(nn.Module):
    """Bottom MLP, dots of all pairs of vectors, top MLP. Parameters are named as in colonnade.models.dlrm.DLRM."""

    pairs: Tensor

    def __init__(
        self,
        num_fields: int,
        dim: int,
        *,
        num_dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
    ) -> None:
        super().__init__()
        self.num_fields = num_fields
        num_vectors = num_fields + 1
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        # One index_select: the fastest of the plain forms tried (two index tensors: backward 1.4x slower).
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.bottom = nn.Sequential(*_layers([num_dense, *bottom, dim]), nn.ReLU())
        self.top = nn.Sequential(*_layers([dim + len(rows), *top, 1]))

    def forward(self, dense: Tensor, fields: Tensor) -> Tensor:
        """dense (B, n), fields (B, F * D) -> logits (B, 1)."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], fields.unflatten(1, (self.num_fields, -1))], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([bottom, dots.index_select(1, self.pairs)], dim=1))


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]
