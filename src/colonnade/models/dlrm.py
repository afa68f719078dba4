"""DLRM (Naumov et al. 2019): bottom MLP, pairwise dots of all fields, top MLP; tower modules before them where asked.

Legend: B samples, n dense columns, F fields, D dim, c and p vectors that leave a tower of each field and of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import Concat, Interaction, TowerModule
from colonnade.models import work
from colonnade.models.fields import dims_of
from colonnade.models.layers import mlp
from colonnade.models.split import Scorer
from colonnade.models.tower_modules import DLRMTower, checked_partition, tower_consumers
from colonnade.ops.interaction import pairwise_dot
from colonnade.table import Feature, Table
from colonnade.topology.towers import Partition


class DLRM(Scorer):
    """All fields pooled and of one dim; `num_dense` may be 0 (then there is no bottom MLP)."""

    ordered = ("top.0.",)

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (128, 64),
        keep_fields: bool = False,
        towers: Partition | None = None,
        tower_dim: int | None = None,
        tower_vectors: int = 1,
        tower_summaries: int = 0,
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        """`keep_fields`: the top MLP sees the field vectors themselves beside their dots.

        `towers` with `tower_dim`: a tower's module makes c = `tower_vectors` vectors of that dim of each field and
        p = `tower_summaries` of all together; these meet in dots, and the bottom MLP's has their dim. Without
        `tower_dim` towers say where rows lie, and the model is the flat one. Raises ConfigError.
        """
        super().__init__()
        dims = dims_of(tables, features)
        self.towers = checked_partition(towers, dims, tower_dim)
        self.dim = dim = tables[0].width
        num_fields = len(features)
        consumers: dict[str, tuple[Interaction, Sequence[str]]] = {"fields": (Concat(), list(dims))}
        inside = work.Work()
        if self.towers is not None and tower_dim is not None:
            self.dim = tower_dim
            num_fields = tower_vectors * len(features) + tower_summaries * len(self.towers.towers)

            def make(dims: Sequence[int]) -> TowerModule:
                module = DLRMTower(
                    len(dims), dim, tower_dim, vectors=tower_vectors, summaries=tower_summaries
                )
                out = (tower_vectors * len(dims) + tower_summaries) * tower_dim
                return TowerModule(module, dims, out)

            consumers = dict(tower_consumers(self.towers, dims, make, seed=seed))
            for members in self.towers.towers:
                inside += work.dlrm_tower(
                    len(members), dim, tower_dim, vectors=tower_vectors, summaries=tower_summaries
                )
        self.taken = list(consumers)
        self.embeddings = EmbeddingCollection(tables, features, consumers=consumers, seed=seed)
        self.bottom = mlp([num_dense, *bottom, self.dim], last_relu=True) if num_dense else None
        # Vectors are the bottom MLP's, if there is one, then the fields'; the top MLP sees those kept in this order.
        num_vectors = num_fields + (num_dense > 0)
        self.kept = list(range(num_dense > 0, num_vectors)) if keep_fields else []
        self.kept += [0] if num_dense else []
        self.top = mlp(
            [len(self.kept) * self.dim + num_vectors * (num_vectors - 1) // 2, *top, tasks]
        )

        def around(fields: int, dim: int) -> work.Work:
            has_dense = num_dense > 0
            kept = fields * keep_fields + has_dense
            return work.dlrm(
                num_dense, fields + has_dense, dim, bottom=bottom, top=top, kept=kept, tasks=tasks
            )

        self.work = inside + around(num_fields, self.dim)
        self.flat_work = around(len(features), dim)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        vectors = [fields[name] for name in self.taken]  # (B, vectors * D) each
        if self.bottom is not None:
            vectors = [self.bottom(dense), *vectors]
        return self.top(pairwise_dot(vectors, dim=self.dim, kept=self.kept))
