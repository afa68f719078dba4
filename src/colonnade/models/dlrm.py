"""DLRM (Naumov et al. 2019): bottom MLP, pairwise dots of all fields, top MLP; optionally after tower modules.

Legend: B samples, n dense columns, F fields, D dim; a tower outputs c vectors per field and p vectors of all fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import Concat, Interaction, TowerModule
from colonnade.models.dense_cost import DenseCost, dlrm_cost, dlrm_tower_cost
from colonnade.models.fields import find_field_dims
from colonnade.models.layers import mlp
from colonnade.models.split import Scorer
from colonnade.models.tower_modules import (
    DLRMTower,
    build_tower_consumers,
    check_tower_partition,
    find_tower_dim,
)
from colonnade.ops.interaction import pairwise_dot
from colonnade.table import Feature, Table
from colonnade.topology.towers import Partition


class DLRM(Scorer):
    """DLRM over pooled fields of equal dim; `num_dense` may be 0 (then there is no bottom MLP).

    With `keep_fields` the top MLP's input has the field vectors, in addition to their dots. None: if there are no dense
    columns; dots of vectors near 0 would be its only input.
    """

    ordered = ("top.0.",)

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (128, 64),
        keep_fields: bool | None = None,
        towers: Partition | None = None,
        tower_dim: int | None = None,
        tower_ratio: float | None = None,
        tower_vectors: int = 1,
        tower_summaries: int = 0,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        """Create the model.

        `towers` with `tower_dim`: a tower's module outputs c = `tower_vectors` vectors of that dim per field and
        p = `tower_summaries` of all its fields. The dots are of these vectors, and the bottom MLP's output has their
        dim. `tower_ratio` sets the largest dim with which each module's input has that many times the columns of its
        output. Without either, towers only decide where rows are stored, and the model is the flat one.
        Raises ConfigError.
        """
        super().__init__()
        dims = find_field_dims(tables, features)
        self.towers = check_tower_partition(towers, dims, tower_dim, tower_ratio)
        self.dim = dim = tables[0].width
        num_fields = len(features)
        consumers: dict[str, tuple[Interaction, Sequence[str]]] = {"fields": (Concat(), list(dims))}
        tower_cost = DenseCost()
        if self.towers is not None:
            counts = [len(members) for members in self.towers.towers]
            vectors = [tower_vectors * count + tower_summaries for count in counts]
            columns = [(count * dim, max(1, n)) for count, n in zip(counts, vectors, strict=True)]
            tower_dim = find_tower_dim(tower_dim, tower_ratio, columns)
        if self.towers is not None and tower_dim is not None:
            self.dim = tower_dim
            num_fields = tower_vectors * len(features) + tower_summaries * len(self.towers.towers)

            def make(dims: Sequence[int]) -> TowerModule:
                module = DLRMTower(
                    len(dims), dim, tower_dim, vectors=tower_vectors, summaries=tower_summaries
                )
                out = (tower_vectors * len(dims) + tower_summaries) * tower_dim
                return TowerModule(module, dims, out)

            consumers = dict(build_tower_consumers(self.towers, dims, make, seed=seed))
            for members in self.towers.towers:
                tower_cost += dlrm_tower_cost(
                    len(members), dim, tower_dim, vectors=tower_vectors, summaries=tower_summaries
                )
        self.inputs = list(consumers)
        self.embeddings = EmbeddingCollection(tables, features, consumers=consumers, seed=seed)
        self.bottom = mlp([num_dense, *bottom, self.dim], last_relu=True) if num_dense else None
        # Vector 0 is the bottom MLP's output, if there is one; the fields' vectors follow.
        num_vectors = num_fields + (num_dense > 0)
        if keep_fields is None:
            keep_fields = num_dense == 0
        self.top_vectors = list(range(num_dense > 0, num_vectors)) if keep_fields else []
        self.top_vectors += [0] if num_dense else []
        self.top = mlp(
            [len(self.top_vectors) * self.dim + num_vectors * (num_vectors - 1) // 2, *top, tasks]
        )

        def network_cost(fields: int, dim: int) -> DenseCost:
            has_dense = num_dense > 0
            return dlrm_cost(
                num_dense,
                fields + has_dense,
                dim,
                bottom=bottom,
                top=top,
                top_vectors=fields * keep_fields + has_dense,
                tasks=tasks,
            )

        self.dense_cost = tower_cost + network_cost(num_fields, self.dim)
        self.flat_dense_cost = network_cost(len(features), dim)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        vectors = [fields[name] for name in self.inputs]  # (B, vectors * D) each
        if self.bottom is not None:
            vectors = [self.bottom(dense), *vectors]
        return self.top(pairwise_dot(vectors, dim=self.dim, included=self.top_vectors))
