"""Neural factorization machine (He and Chua 2017): an MLP over the elementwise products of all pairs of fields.

Legend: B samples, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, cat

from colonnade.config.model import PairVariables
from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import BiInteraction, Sum
from colonnade.models.fields import DEEP, build_pairs, find_field_dims, find_first_order_fields
from colonnade.models.layers import LinearTerm, mlp
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class NFM(Scorer):
    """Neural factorization machine over tables with the parts deep (dim D, the same for all) and wide (dim tasks).

    The paper's dropout and batch normalisation are omitted: the latter would make a sample's logit depend on its
    batch. over, bags: as `FactorizationMachine` takes them.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        top: Sequence[int] = (128, 64),
        tasks: int = 1,
        over: PairVariables = "ids",
        bags: Collection[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        deep = find_field_dims(tables, features, DEEP)
        wide = find_first_order_fields(tables, features, tasks)
        pairs = build_pairs(BiInteraction, features, over, bags)
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={"pairs": (pairs, list(deep)), "linear": (Sum(), wide)},
            seed=seed,
        )
        self.linear = LinearTerm(num_dense, tasks)
        self.top = mlp([num_dense + next(iter(deep.values())), *top, tasks])

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        deep = self.top(cat([dense, fields["pairs"]], dim=1))
        return deep + fields["linear"] + self.linear(dense)
