"""Wide & Deep (Cheng et al. 2016): first-order weights beside an MLP over the same fields.

Legend: B samples, F fields, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, cat

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import Concat, Sum
from colonnade.models.fields import DEEP, dims_of, first_order
from colonnade.models.linear_term import LinearTerm
from colonnade.models.mlp import mlp
from colonnade.models.scorer import Scorer
from colonnade.table import Feature, Table


class WideDeep(Scorer):
    """Tables have the parts deep and wide (tasks). The paper trains wide with FTRL, deep with Adagrad: give the
    parts those optimizers. Crosses of columns, where wanted, are columns of the data."""

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
        deep = dims_of(tables, features, DEEP)
        wide = first_order(tables, features, tasks)
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={"deep": (Concat(), list(deep)), "linear": (Sum(), wide)},
            seed=seed,
        )
        self.linear = LinearTerm(num_dense, tasks)
        self.top = mlp([num_dense + sum(deep.values()), *top, tasks])

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        deep = self.top(cat([dense, fields["deep"]], dim=1))
        return deep + fields["linear"] + self.linear(dense)
