"""DeepFM (Guo et al. 2017): a factorization machine and an MLP over the same fields, and a linear dense part.

Legend: B samples, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, cat, nn

from colonnade.batch import Batch
from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FM, Concat
from colonnade.models.mlp import mlp
from colonnade.table import Feature, Table


class DeepFM(nn.Module):
    """Logits (B, tasks). All fields pooled and of one dim."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        top: Sequence[int] = (128, 64),
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        names = [feature.name for feature in features]
        self.embeddings = EmbeddingCollection(
            tables, features, consumers={"fm": (FM(), names), "deep": (Concat(), names)}, seed=seed
        )
        dims = {table.name: table.width for table in tables}
        self.deep = mlp([num_dense + sum(dims[f.table] for f in features), *top, tasks])
        self.linear = nn.Linear(num_dense, tasks) if num_dense else None

    def forward(self, batch: Batch) -> Tensor:
        looked_up = self.embeddings(batch)
        dense = batch.dense.to(looked_up["deep"].dtype)
        logits = looked_up["fm"] + self.deep(cat([dense, looked_up["deep"]], dim=1))
        return logits if self.linear is None else logits + self.linear(dense)
