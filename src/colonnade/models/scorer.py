"""What every model that scores samples is: embeddings, then a dense network, kept apart.

Legend: B samples, n dense columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.embedding import EmbeddingCollection


class Scorer(nn.Module):
    """Logits (B, tasks), one per label, of its being 1.

    `network` is everything dense, so that it alone is compiled (`compile`), computes in bfloat16 (`autocast`) or
    lies on a GPU (`to`); rows, and what is pooled of them, keep their dtype.
    """

    embeddings: EmbeddingCollection
    autocast: torch.dtype | None = None
    """Of products in `network`; None: that of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[..., Tensor] | None = None

    @abstractmethod
    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        """fields: what the model's consumers give, (B, ...) each; dense (B, n), dtype and device of these."""

    def forward(self, batch: Batch) -> Tensor:
        fields = self.embeddings(batch)
        like = next(iter(fields.values()))
        dense = batch.dense.to(like)
        network = self._compiled or self.network
        if self.autocast is None:
            return network(fields, dense)
        with torch.autocast(like.device.type, self.autocast):
            logits = network(fields, dense)
        return logits.to(like.dtype)

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """`torch.compile` of the network, with its options; lookups, which are no torch code, stay outside."""
        self._compiled = torch.compile(self.network, **options)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_compiled": None}  # type: ignore[misc]
