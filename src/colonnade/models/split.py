"""Base classes of models, which separate the embeddings from the dense network.

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
from colonnade.models.dense_cost import DenseCost
from colonnade.topology.towers import Partition


class SplitModel(nn.Module):
    """Model split into `embeddings` and a dense `network`.

    Only the network is compiled (`compile`) or computed in 16 bits (`autocast`); rows and pooled values keep their
    dtype. `to` moves the network and its inputs to a device.
    """

    embeddings: EmbeddingCollection
    autocast: torch.dtype | None = None
    """Dtype of products in `network`; None: the dtype of its parameters."""
    towers: Partition | None = None
    """Partition of the features into towers, if the model has one."""
    dense_cost: DenseCost | None = None
    """Cost of all dense weights, if known."""
    flat_dense_cost: DenseCost | None = None
    """Cost of the same model without tower modules, if known."""
    ordered: tuple[str, ...] = ()
    """Prefixes of names of weights that have columns in the order of the fields, or of towers."""
    objective: Any = None
    """Objective of training (`train.objective.Objective`); None: cross entropy of the labels."""
    init_scales: Mapping[str, float] = {}
    """Scale of new rows by table, uniform in +- this; overrides `embedding.init_scale`."""

    @classmethod
    def row_width(cls, table: str, dim: int, settings: Mapping[str, Any]) -> float:
        """Return the width of a table's rows, from `model.dim` and the model's other settings."""
        return dim

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[..., Any] | None = None

    def fill_missing_features(self, batch: Batch) -> Batch:
        """Return the batch with empty bags for the features that it lacks."""
        empty = Ids(
            torch.empty(0, dtype=torch.int64), torch.zeros(batch.size + 1, dtype=torch.int64)
        )
        names = [feature.name for feature in self.embeddings.declaration.features]
        return replace(batch, ids={name: batch.ids.get(name, empty) for name in names})

    @abstractmethod
    def network(self, *inputs: Any) -> Any:
        """Compute a tensor, or a tuple of tensors, from tensors."""

    def evaluate_network(self, *inputs: Any, out_like: Tensor) -> Any:
        """Evaluate `network(*inputs)`, compiled and with autocast if set.

        out_like: a tensor of the dtype of the outputs, on the device of the inputs."""
        network = self._compiled or self.network
        if self.autocast is None:
            return network(*inputs)
        with torch.autocast(out_like.device.type, self.autocast):
            outputs = network(*inputs)
        if isinstance(outputs, tuple):
            return tuple(output.to(out_like.dtype) for output in outputs)
        return outputs.to(out_like.dtype)

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """Compile the network with `torch.compile` and its options. Lookups are not torch code and stay outside."""
        self._compiled = torch.compile(self.network, **options)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_compiled": None}  # type: ignore[misc]


class Scorer(SplitModel):
    """Model that returns logits (B, tasks), one per label: the log odds that the label is 1."""

    @abstractmethod
    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        """Compute the logits. fields: outputs of the model's consumers by name, (B, ...) each; dense (B, n), of their
        dtype and device."""

    def forward(self, batch: Batch) -> Tensor:
        fields = self.embeddings(batch)
        first = next(iter(fields.values()))
        return self.evaluate_network(fields, batch.dense.to(first), out_like=first)
