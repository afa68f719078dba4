"""DeepFM (Guo et al. 2017): a factorization machine and an MLP over the same fields.

Legend: B samples, F fields, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from colonnade.config.model import PairVariables
from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FM, Sum
from colonnade.models.fields import DEEP, build_pairs, find_field_dims, find_first_order_fields
from colonnade.models.layers import LinearTerm, SplitMLP, build_first_layer
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class DeepFM(Scorer):
    """DeepFM over tables with the parts deep (dim D, the same for all) and wide (dim tasks); an id is sent to its owner
    once for both. Several tasks share the pairwise terms.

    over, bags: as `FactorizationMachine` takes them."""

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
        names = list(deep)
        widths = [*top, tasks]
        pairs = build_pairs(FM, features, over, bags)
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={
                "fm": (pairs, names),
                "deep": (build_first_layer(num_dense, deep.values(), widths[0]), names),
                "linear": (Sum(), wide),
            },
            seed=seed,
        )
        self.linear = LinearTerm(num_dense, tasks)
        self.deep = SplitMLP(num_dense, deep.values(), widths)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        deep = self.deep(fields["deep"], dense)
        return fields["fm"] + deep + fields["linear"] + self.linear(dense)
