"""Linear models: logistic regression, and the factorization machine that adds products of pairs.

Legend: B samples, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from colonnade.config.model import PairVariables
from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FM, Sum
from colonnade.models.fields import DEEP, build_pairs, find_field_dims, find_first_order_fields
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
    """Factorization machine (Rendle 2010): logistic regression, and <x_i v_i, x_j v_j> of all pairs of variables.

    over: the variables are a sample's ids, as in the paper, or its pooled fields (`interaction.FM`). bags: names of the
    features of which a sample may have several ids; None: all. For the others both are the same, and squares are not
    pooled.

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
        over: PairVariables = "ids",
        bags: Collection[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        deep = list(find_field_dims(tables, features, DEEP))
        wide = find_first_order_fields(tables, features, tasks)
        pairs = build_pairs(FM, features, over, bags)
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={"fm": (pairs, deep), "linear": (Sum(), wide)},
            seed=seed,
        )
        self.linear = LinearTerm(num_dense, tasks)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return fields["fm"] + fields["linear"] + self.linear(dense)
