"""DLRM (Naumov et al. 2019): bottom MLP, pairwise dots of all fields, top MLP.

Legend: B samples, n dense columns, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import Concat
from colonnade.models.mlp import mlp
from colonnade.table import Feature, Table


class _Dots(torch.autograd.Function):
    """Backward in one product: with G the symmetric matrix of the dots' gradients, dX = G X.

    torch's own would scatter into a full matrix, multiply twice and add.
    """

    @staticmethod
    def forward(ctx, vectors: Tensor, pairs: Tensor, mirror: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, mirror)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        vectors, mirror = ctx.saved_tensors
        num_vectors = vectors.shape[1]
        padded = torch.cat([gradient, gradient.new_zeros(len(gradient), 1)], 1)  # the diagonal's
        matrix = padded.index_select(1, mirror).view(-1, num_vectors, num_vectors)
        return torch.bmm(matrix, vectors), None, None


class PairwiseDot(nn.Module):
    """(B, V, D) -> (B, V (V - 1) / 2): the dot product of every pair of vectors."""

    pairs: Tensor  # of each dot: its place in the flattened (V, V) matrix
    mirror: Tensor  # of each place in that matrix: its dot, or one past the last on the diagonal

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        mirror = torch.full((num_vectors, num_vectors), len(rows))
        mirror[rows, columns] = mirror[columns, rows] = torch.arange(len(rows))
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.register_buffer("mirror", mirror.flatten(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        return _Dots.apply(vectors, self.pairs, self.mirror)


class DLRM(nn.Module):
    """Logits (B, tasks). All fields pooled and of one dim; `num_dense` may be 0 (then there is no bottom MLP)."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (128, 64),
        keep_fields: bool = False,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        """`keep_fields`: the top MLP sees the field vectors themselves beside their dots."""
        super().__init__()
        dim = tables[0].width
        self.num_fields = len(features)
        self.keep_fields = keep_fields
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={"fields": (Concat(), [f.name for f in features])},
            seed=seed,
        )
        self.bottom = mlp([num_dense, *bottom, dim], last_relu=True) if num_dense else None
        num_vectors = self.num_fields + (num_dense > 0)
        self.dot = PairwiseDot(num_vectors)
        kept = dim * (num_vectors if keep_fields else num_dense > 0)
        self.top = mlp([kept + num_vectors * (num_vectors - 1) // 2, *top, tasks])

    def forward(self, batch: Batch) -> Tensor:
        fields = self.embeddings(batch)["fields"]  # (B, F * D)
        vectors = fields.unflatten(1, (self.num_fields, -1))
        kept = [fields] if self.keep_fields else []
        if self.bottom is not None:
            dense = self.bottom(batch.dense.to(fields.dtype))
            vectors = torch.cat([dense[:, None], vectors], dim=1)
            kept.append(dense)
        return self.top(torch.cat([*kept, self.dot(vectors)], dim=1))
