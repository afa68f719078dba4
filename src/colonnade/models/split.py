"""Split of every model here: embeddings, and a dense network that is kept apart from them.

Legend: B samples, n dense columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.batch import Batch, Ids
from colonnade.embedding import EmbeddingCollection
from colonnade.models.work import Work
from colonnade.topology.towers import Partition


class SplitModel(nn.Module):
    """`network` is everything dense, so that it alone is compiled (`compile`) or computes in 16 bits (`autocast`);
    rows, and what is pooled of them, keep their dtype. `to` moves the network, and what it is given, to a device."""

    embeddings: EmbeddingCollection
    autocast: torch.dtype | None = None
    """Of products in `network`; None: that of its parameters."""
    towers: Partition | None = None
    """Which features stand together, where the model was told."""
    work: Work | None = None
    """Of all dense weights, where it is known; `flat_work`: of the same model without tower modules."""
    flat_work: Work | None = None
    ordered: tuple[str, ...] = ()
    """How the names of weights begin whose columns follow the order of the fields, or of towers."""
    objective: Any = None
    """What the model learns (`train.objective.Objective`), where that is not its labels."""
    init_scales: Mapping[str, float] = {}
    """By table: new rows are uniform in +- this, whatever `embedding.init_scale` says."""

    @classmethod
    def row_width(cls, table: str, dim: int, settings: Mapping[str, Any]) -> float:
        """Return the width of a table's rows, of `model.dim` and the model's other settings."""
        return dim

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[..., Any] | None = None

    def filled(self, batch: Batch) -> Batch:
        """Give the batch empty bags for the features it lacks."""
        empty = Ids(
            torch.empty(0, dtype=torch.int64), torch.zeros(batch.size + 1, dtype=torch.int64)
        )
        names = [feature.name for feature in self.embeddings.declaration.features]
        return replace(batch, ids={name: batch.ids.get(name, empty) for name in names})

    @abstractmethod
    def network(self, *given: Any) -> Any:
        """Tensors in, a tensor or a tuple of them out."""

    def run(self, like: Tensor, *given: Any) -> Any:
        """`network(*given)`, compiled and in the precision asked for; what it gives is of the dtype of `like`."""
        network = self._compiled or self.network
        if self.autocast is None:
            return network(*given)
        with torch.autocast(like.device.type, self.autocast):
            found = network(*given)
        if isinstance(found, tuple):
            return tuple(each.to(like.dtype) for each in found)
        return found.to(like.dtype)

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """`torch.compile` of the network, with its options; lookups, which are no torch code, stay outside."""
        self._compiled = torch.compile(self.network, **options)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_compiled": None}  # type: ignore[misc]


class Scorer(SplitModel):
    """Logits (B, tasks), one per label, of its being 1."""

    @abstractmethod
    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        """fields: what the model's consumers give, (B, ...) each; dense (B, n), dtype and device of these."""

    def forward(self, batch: Batch) -> Tensor:
        fields = self.embeddings(batch)
        like = next(iter(fields.values()))
        return self.run(like, fields, batch.dense.to(like))
