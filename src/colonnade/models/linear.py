"""Linear models: logistic regression, and the factorization machine that adds products of pairs.

Legend: B samples, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FM, Sum
from colonnade.models.fields import DEEP, find_field_dims, find_first_order_fields
from colonnade.models.layers import LinearTerm
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class LR(Scorer):
    """Logistic regression with one weight per id and task, and one per dense column. Tables have dim = tasks."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        wide = find_first_order_fields(tables, features, tasks, part="")
        self.embeddings = EmbeddingCollection(
            tables, features, consumers={"linear": (Sum(), wide)}, seed=seed
        )
        self.linear = LinearTerm(num_dense, tasks)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return fields["linear"] + self.linear(dense)


class FactorizationMachine(Scorer):
    """Factorization machine (Rendle 2010): logistic regression, and <v_i, v_j> of all pairs of fields.

    Tables have the parts deep (dim D) and wide (dim tasks). Dense columns have first-order weights only. Several tasks
    share the pairwise terms.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        deep = list(find_field_dims(tables, features, DEEP))
        wide = find_first_order_fields(tables, features, tasks)
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={"fm": (FM(), deep), "linear": (Sum(), wide)},
            seed=seed,
        )
        self.linear = LinearTerm(num_dense, tasks)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return fields["fm"] + fields["linear"] + self.linear(dense)
