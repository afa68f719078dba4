"""DLRM (Naumov et al. 2019): bottom MLP, pairwise dots of all fields, top MLP.

Legend: B samples, n dense columns, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import Concat
from colonnade.models.fields import dims_of
from colonnade.models.mlp import mlp
from colonnade.models.scorer import Scorer
from colonnade.ops.interaction import pairwise_dot
from colonnade.table import Feature, Table


class DLRM(Scorer):
    """All fields pooled and of one dim; `num_dense` may be 0 (then there is no bottom MLP)."""

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
        self.dim = tables[0].width
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={"fields": (Concat(), list(dims_of(tables, features)))},
            seed=seed,
        )
        self.bottom = mlp([num_dense, *bottom, self.dim], last_relu=True) if num_dense else None
        # Vectors are the bottom MLP's, if there is one, then the fields'; the top MLP sees those kept in this order.
        num_vectors = len(features) + (num_dense > 0)
        self.kept = list(range(num_dense > 0, num_vectors)) if keep_fields else []
        self.kept += [0] if num_dense else []
        self.top = mlp(
            [len(self.kept) * self.dim + num_vectors * (num_vectors - 1) // 2, *top, tasks]
        )

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        vectors = [fields["fields"]]  # (B, F * D)
        if self.bottom is not None:
            vectors = [self.bottom(dense), *vectors]
        return self.top(pairwise_dot(vectors, dim=self.dim, kept=self.kept))
