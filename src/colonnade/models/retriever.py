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
    """The score of an item for a query is the product of their vectors over `temperature`.

    Where dense column `log_q` says how often an item occurs (its log), models of pairs add it to the score, as one more
    element of the vectors (`asking`, `offering`). Negatives are drawn that often, so the logQ correction of training
    (Bengio and Senecal 2003) takes the same term off, and the vectors learn how much likelier than its share an item
    is. Correcting without the term starts slower: rare items then weigh 1 / q.
    """

    temperature: float
    log_q: int | None = None
    """The number of that column."""

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

    def log_share(self, batch: Batch) -> Tensor:
        """(B,) of column `log_q`, which of a batch of items is the only one; zeros where there is none."""
        if self.log_q is None:
            return torch.zeros(batch.size)
        return batch.dense[:, min(self.log_q, batch.dense.shape[1] - 1)]

    def asking(self, queries: Tensor) -> Tensor:
        """(B, D) -> (B, D), or (B, D + 1) where how often an item occurs is part of scores."""
        if self.log_q is None:
            return queries
        return torch.cat([queries, queries.new_ones(len(queries), 1)], dim=1)

    def offering(self, items: Tensor, log_share: Tensor) -> Tensor:
        """(B, D), (B,) -> what products with those of `asking` are to be taken of."""
        if self.log_q is None:
            return items
        return torch.cat([items, self.temperature * log_share.to(items)[:, None]], dim=1)
