"""DeepFM (Guo et al. 2017): a factorization machine and an MLP over the same fields.

Legend: B samples, F fields, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FM, Sum
from colonnade.models.fields import DEEP, dims_of, first_order
from colonnade.models.layers import LinearTerm, Tower, first_layer
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class DeepFM(Scorer):
    """Tables have the parts deep (D, one for all) and wide (tasks): an id is routed once for both. With several
    tasks, these share the pairs."""

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
        names, widths = list(deep), [*top, tasks]
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={
                "fm": (FM(), names),
                "deep": (first_layer(num_dense, deep.values(), widths[0]), names),
                "linear": (Sum(), wide),
            },
            seed=seed,
        )
        self.linear = LinearTerm(num_dense, tasks)
        self.deep = Tower(num_dense, deep.values(), widths)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        deep = self.deep(fields["deep"], dense)
        return fields["fm"] + deep + fields["linear"] + self.linear(dense)
