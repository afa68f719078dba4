"""What a model that retrieves is: vectors of queries and of items, whose products rank a catalogue.

Legend: B samples, P positions to learn from, M candidates, D dim.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.models.split import SplitModel


@dataclass(frozen=True, slots=True)
class Contrast:
    """What a softmax is taken over: at each position the positive's score against those of all ranks' candidates.

    Items that are known to be the sample's, this position's positive or not, are no candidates of it: they would be
    wrong negatives, and a model of histories would learn that nothing resembles itself.
    """

    queries: Tensor  # (P, D)
    positives: Tensor  # (P, D)
    weight: Tensor  # (P,) on the CPU, as all that follows but candidates
    sample: Tensor  # (P,) int64: whose position it is
    taken: tuple[Tensor, Tensor]  # (sample, item), (T,) int64 each: its positives among them
    candidates: Tensor  # (M, D)
    candidate_ids: Tensor  # (M,) int64
    positive_log_q: (
        Tensor  # (P,) log of how often the item is drawn as a candidate, up to a constant
    )
    candidate_log_q: Tensor  # (M,)


class Retriever(SplitModel):
    """The score of an item for a query is the product of their vectors over `temperature`."""

    temperature: float

    @abstractmethod
    def forward(self, batch: Batch) -> Contrast:
        """A training batch."""

    @abstractmethod
    def queries(self, batch: Batch) -> Tensor:
        """(B, D). The batch may lack the items' columns."""

    @abstractmethod
    def items(self, batch: Batch) -> Tensor:
        """(B, D). The batch may have no other columns than the items'."""

    def filled(self, batch: Batch) -> Batch:
        """The batch, with empty bags for the features it lacks."""
        empty = Ids(
            torch.empty(0, dtype=torch.int64), torch.zeros(batch.size + 1, dtype=torch.int64)
        )
        names = [feature.name for feature in self.embeddings.declaration.features]
        return replace(batch, ids={name: batch.ids.get(name, empty) for name in names})
