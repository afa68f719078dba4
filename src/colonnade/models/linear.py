"""Models with first-order weights: logistic regression, factorization machines, and networks beside these.

Legend: B samples, F fields, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, cat

from colonnade.config.model import PairVariables
from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FM, BiInteraction, Interaction, Sum
from colonnade.models.fields import (
    DEEP,
    WIDE,
    build_pairs,
    find_field_dims,
    find_first_order_fields,
)
from colonnade.models.layers import LinearTerm, SplitMLP, build_first_layer, mlp
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class FirstOrderScorer(Scorer):
    """Base of scorers whose logits have a term of one weight per id and task, and one per dense column."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        num_dense: int,
        tasks: int,
        consumers: Mapping[str, tuple[Interaction, Sequence[str]]],
        seed: int,
        part: str = WIDE,
    ) -> None:
        """Create the linear term. consumers: of the other terms. part: part of the tables with first-order weights."""
        super().__init__()
        wide = find_first_order_fields(tables, features, tasks, part)
        self.embeddings = EmbeddingCollection(
            tables, features, consumers={**consumers, "linear": (Sum(), wide)}, seed=seed
        )
        self.linear = LinearTerm(num_dense, tasks)

    def _add_linear_terms(
        self, logits: Tensor, fields: Mapping[str, Tensor], dense: Tensor
    ) -> Tensor:
        return logits + fields["linear"] + self.linear(dense)


class LR(FirstOrderScorer):
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
        super().__init__(tables, features, num_dense, tasks, {}, seed, part="")

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return fields["linear"] + self.linear(dense)


class FactorizationMachine(FirstOrderScorer):
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
        pairs = build_pairs(FM, features, over, bags)
        consumers = {"fm": (pairs, list(find_field_dims(tables, features, DEEP)))}
        super().__init__(tables, features, num_dense, tasks, consumers, seed)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self._add_linear_terms(fields["fm"], fields, dense)


class NFM(FirstOrderScorer):
    """Neural factorization machine (He and Chua 2017): an MLP over the elementwise products of all pairs of fields.

    Tables have the parts deep (dim D, the same for all) and wide (dim tasks). The paper's dropout and batch
    normalisation are omitted: the latter would make a sample's logit depend on its batch. over, bags: as
    `FactorizationMachine` takes them.
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
        deep = find_field_dims(tables, features, DEEP)
        consumers = {"pairs": (build_pairs(BiInteraction, features, over, bags), list(deep))}
        super().__init__(tables, features, num_dense, tasks, consumers, seed)
        self.top = mlp([num_dense + next(iter(deep.values())), *top, tasks])

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self._add_linear_terms(self.top(cat([dense, fields["pairs"]], dim=1)), fields, dense)


class WideDeep(FirstOrderScorer):
    """Wide & Deep (Cheng et al. 2016): first-order weights plus an MLP over the same fields.

    Tables have the parts deep and wide (dim tasks). The paper trains wide with FTRL, deep with Adagrad: give the parts
    those optimizers. Crosses of columns must be columns of the data."""

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
        deep = find_field_dims(tables, features, DEEP)
        widths = [*top, tasks]
        first = build_first_layer(num_dense, deep.values(), widths[0])
        consumers = {"deep": (first, list(deep))}
        super().__init__(tables, features, num_dense, tasks, consumers, seed)
        self.deep = SplitMLP(num_dense, deep.values(), widths)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self._add_linear_terms(self.deep(fields["deep"], dense), fields, dense)


class DeepFM(FirstOrderScorer):
    """DeepFM (Guo et al. 2017): a factorization machine and an MLP over the same fields.

    Tables have the parts deep (dim D, the same for all) and wide (dim tasks); an id is sent to its owner once for both.
    Several tasks share the pairwise terms. over, bags: as `FactorizationMachine` takes them."""

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
        deep = find_field_dims(tables, features, DEEP)
        widths = [*top, tasks]
        first = build_first_layer(num_dense, deep.values(), widths[0])
        pairs = build_pairs(FM, features, over, bags)
        consumers = {"fm": (pairs, list(deep)), "deep": (first, list(deep))}
        super().__init__(tables, features, num_dense, tasks, consumers, seed)
        self.deep = SplitMLP(num_dense, deep.values(), widths)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self._add_linear_terms(
            fields["fm"] + self.deep(fields["deep"], dense), fields, dense
        )
