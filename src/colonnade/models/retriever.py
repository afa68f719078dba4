"""Models that retrieve: vectors of queries and of items, what they learn, and exact recall and NDCG of a catalogue.

Legend: B samples or queries, P positions to learn from, M candidates, I items of the catalogue, D dim, k places.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.comm.collectives import gather
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.tensors import Columns
from colonnade.errors import ConfigError
from colonnade.models.ranking import average_metrics, check_scores, evaluation_mode, mark_candidates
from colonnade.models.split import SplitModel

PLACES = (10, 20)
CHUNK = 4096  # items embedded at a time


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
    # (P,): log of how often the item is drawn as a candidate, up to a constant
    positive_log_q: Tensor
    candidate_log_q: Tensor  # (M,)


class Retrieval:
    """Objective of a `Retriever`: softmax cross entropy of each positive against candidates of all ranks."""

    monitor = "ndcg@20"
    metrics = tuple(f"{metric}@{k}" for k in PLACES for metric in ("recall", "ndcg"))

    def loss(self, model: Retriever, batch: Batch, mesh: Mesh) -> Tensor:
        return contrastive_loss(model(batch), model.temperature, mesh)

    def check_source(self, source: Source) -> None:
        if getattr(source, "catalogue", None) is None:
            raise ConfigError(
                "this data set has no catalogue of items to rank, by which a retrieval model is judged; leave the part "
                "out (test_fraction=0), or use movielens_retrieval, gowalla, power_law, or a source with a `catalogue` "
                "and batches whose key is `data.interactions.Held`"
            )

    def evaluate(
        self, model: Retriever, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Rank the catalogue for each query; the metrics are means over queries."""
        self.check_source(source)
        with evaluation_mode(model):
            catalogue: Columns = source.catalogue  # type: ignore[attr-defined]
            chunks = torch.arange(catalogue.num_samples).split(CHUNK)
            items = torch.cat([model.items(catalogue.take(chunk)) for chunk in chunks])

            def measure(batch: Batch) -> dict[str, Tensor]:
                scores = (model.queries(batch) @ items.T).cpu()
                top = best(without_seen(scores, batch.key.seen), max(PLACES))
                values = [
                    value for k in PLACES for value in recall_and_ndcg(top, batch.key.truth, k)
                ]
                return dict(zip(self.metrics, values, strict=True))

            return average_metrics(measure, self.metrics, source, batch_size, mesh)

    def predict(self, model: Retriever, batch: Batch) -> Tensor:
        raise ConfigError(
            f"{type(model).__name__} gives no logits but vectors to search with; use "
            "predictor.model.queries(batch) and predictor.model.items(batch)"
        )


class Retriever(SplitModel):
    """The score of an item for a query is the product of their vectors over `temperature`.

    Where dense column `log_q` says how often an item occurs (its log), models of pairs add it to the score, as one more
    element of the vectors (`asking`, `offering`). Negatives are drawn that often, so the logQ correction of training
    (Bengio and Senecal 2003) takes the same term off, and the vectors learn how much likelier than its share an item
    is. Correcting without the term starts slower: rare items then weigh 1 / q.
    """

    objective = Retrieval()
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

    def contrast_pairs(
        self, batch: Batch, queries: Tensor, items: Tensor, item_ids: Tensor, taken: Iterable[Ids]
    ) -> Contrast:
        """Set each sample's query (B, D) against the items (B, D) of all samples, but its own and those of its bags."""
        log_q, sample = self.log_share(batch), torch.arange(batch.size)
        bags = [Ids(item_ids), *taken]
        pairs = torch.cat([bag.samples for bag in bags]), torch.cat([bag.values for bag in bags])
        weight = torch.ones(batch.size) if batch.sample_weight is None else batch.sample_weight
        queries, items = self.asking(queries), self.offering(items, log_q)
        return Contrast(queries, items, weight, sample, pairs, items, item_ids, log_q, log_q)

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


def contrastive_loss(contrast: Contrast, temperature: float, mesh: Mesh) -> Tensor:
    """Compute this rank's part of the weighted mean over all ranks' positions. Collective, and its backward too.

    At each position: -log of the positive's share in the softmax over it and all candidates that its sample has not
    taken. Scores are products over `temperature`, less the log of how often an item is drawn.
    """
    queries = contrast.queries
    candidates = gather(mesh, contrast.candidates)
    ids = gather(mesh, contrast.candidate_ids)
    log_q = gather(mesh, contrast.candidate_log_q).to(queries)
    weight = contrast.weight.to(queries)
    total = mesh.all_reduce("dense", contrast.weight.sum(dtype=torch.float64))
    positive = (queries * contrast.positives).sum(1, keepdim=True) / temperature
    positive = positive - contrast.positive_log_q.to(queries)[:, None]
    others = queries @ candidates.T / temperature - log_q
    num_samples = int(contrast.sample[-1]) + 1 if len(contrast.sample) else 0
    taken = mark_candidates(*contrast.taken, num_samples, ids)[contrast.sample]
    others = others.masked_fill(taken.to(queries.device), float("-inf"))
    losses = torch.cat([positive, others], dim=1).logsumexp(1) - positive[:, 0]
    return (losses * weight).sum() / max(float(total), 1e-12)


def recall_and_ndcg(top: Tensor, truth: Ids, k: int) -> tuple[Tensor, Tensor]:
    """Compute both metrics of each query, exactly.

    top (B, >= k) items, best first, -1 for none; truth (B,) bags of different items. Each (B,) float64.

    recall: the share of a query's true items among its first k. ndcg: 1 / log2(place + 1) of each of them there, over
    what a perfect ranking has. nan for a query without true items.
    """
    top, counts, sample = top[:, :k], truth.counts, truth.samples
    # A query's items as numbers of their own: then one search serves all.
    largest = max(top.max() if top.numel() else 0, truth.values.max() if sample.numel() else 0)
    width = int(largest) + 2
    known = (sample * width + truth.values).sort().values
    wanted = torch.arange(len(top))[:, None] * width + top
    if len(known):
        places = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        is_hit = (known[places] == wanted) & (top >= 0)
    else:
        is_hit = torch.zeros_like(top, dtype=torch.bool)
    gains = 1 / torch.arange(2, k + 2, dtype=torch.float64).log2()
    perfect = torch.cat([torch.zeros(1, dtype=torch.float64), gains.cumsum(0)])
    hits = is_hit.double()
    return hits.sum(1) / counts, (hits * gains[: top.shape[1]]).sum(1) / perfect[
        counts.clamp(max=k)
    ]


def best(scores: Tensor, k: int) -> Tensor:
    """Choose the items with the best scores.

    scores (B, I) -> (B, min(k, I)) items, best first; of equal ones the lower number first; -1 where only items
    that score -inf are left. Raises NonFiniteError for NaN."""
    k = min(k, scores.shape[1])
    check_scores(scores)
    # topk takes any of equal scores; where one was left out at the edge, that query is sorted whole.
    values, items = scores.topk(k, dim=1)
    items, order = items.sort(dim=1)
    values, again = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    items = items.gather(1, again)
    if k:
        edge = values[:, -1:]
        is_cut = (scores == edge).sum(1) > (values == edge).sum(1)
        if bool(is_cut.any()):
            whole = scores[is_cut].sort(dim=1, descending=True, stable=True)
            items[is_cut], values[is_cut] = whole.indices[:, :k], whole.values[:, :k]
    return items.masked_fill(values == -math.inf, -1)


def without_seen(scores: Tensor, seen: Ids) -> Tensor:
    """Give the items of each query's bag the score -inf, in place."""
    scores[seen.samples, seen.values] = -math.inf
    return scores
