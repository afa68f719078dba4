"""DCN-v2 (Wang et al. 2021): cross layers with a matrix each, and an MLP.

Legend: B samples, W width of x_0 = dense columns and fields side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, cat, nn

from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.interaction import Concat
from colonnade.models.cross import MatrixCross, MixtureCross
from colonnade.models.fields import dims_of
from colonnade.models.mlp import mlp
from colonnade.models.scorer import Scorer
from colonnade.table import Feature, Table


class DCNv2(Scorer):
    """Matrices are whole, of `cross_rank`, or a mixture of `cross_experts` of that rank. The MLP is beside the cross
    layers (parallel: both feed the last layer) or after them (stacked)."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        cross_layers: int = 3,
        cross_rank: int | None = None,
        cross_experts: int = 1,
        structure: Literal["parallel", "stacked"] = "parallel",
        top: Sequence[int] = (128, 64),
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        if cross_experts > 1 and cross_rank is None:
            raise ConfigError(
                f"got cross_experts={cross_experts} without cross_rank; experts are of low rank: set one, e.g. 32"
            )
        super().__init__()

        def layer(width: int) -> nn.Module:
            if cross_experts > 1 and cross_rank is not None:
                return MixtureCross(width, cross_rank, cross_experts)
            return MatrixCross(width, cross_rank)

        dims = dims_of(tables, features)
        self.embeddings = EmbeddingCollection(
            tables, features, consumers={"fields": (Concat(), list(dims))}, seed=seed
        )
        width = num_dense + sum(dims.values())
        self.cross = nn.ModuleList(layer(width) for _ in range(cross_layers))
        self.top = mlp([width, *top], last_relu=True)
        self.is_parallel = structure == "parallel"
        last = top[-1] if top else width
        self.last = nn.Linear(last + width if self.is_parallel else last, tasks)

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        first = cat([dense, fields["fields"]], dim=1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        if self.is_parallel:
            return self.last(cat([x, self.top(first)], dim=1))
        return self.last(self.top(x))
