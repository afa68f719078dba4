"""A model that scores samples: embeddings, then a dense network.

Legend: B samples, n dense columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from colonnade.batch import Batch
from colonnade.models.split import SplitModel


class Scorer(SplitModel):
    """Logits (B, tasks), one per label, of its being 1."""

    @abstractmethod
    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        """fields: what the model's consumers give, (B, ...) each; dense (B, n), dtype and device of these."""

    def forward(self, batch: Batch) -> Tensor:
        fields = self.embeddings(batch)
        like = next(iter(fields.values()))
        return self.run(like, fields, batch.dense.to(like))
