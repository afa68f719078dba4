"""Retrieval models: base class, contrastive loss, and exact recall and NDCG over a catalogue.

Legend: B samples or queries, P training positions, M candidates, I items of the catalogue, D dim, k cutoff.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.comm.collectives import concatenate_over_ranks
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.interactions.samples import HeldOutItems, group_items_by_user
from colonnade.data.tensors import TensorColumns, gather_ids
from colonnade.errors import ConfigError
from colonnade.models.ranking import (
    BlockedMetrics,
    average_metrics,
    check_scores,
    evaluation_mode,
    mark_matching_candidates,
)
from colonnade.models.split import SplitModel

CUTOFFS = (10, 20)
POPULARITY = "popularity_"
"""Prefix of the metrics of a ranking of all items by their number of training interactions."""
CHUNK = 4096  # items embedded at a time
BLOCK = 1 << 16
"""Number of items scored at a time, at least."""
BLOCK_SCORES = 1 << 23
"""Number of scores computed at a time, where few queries leave room for more than BLOCK items."""
LOSS_SCORES = 1 << 20
"""Number of scores that the loss computes at a time: a few MiB, as a processor's cache has."""
TILE = 64
"""Number of neighbouring items that a search of the best chooses or leaves out together."""
Score = Callable[[Tensor, Tensor], Tensor]
"""Function from vectors of queries (B, D) and of items (I, D') to their scores (B, I)."""


@dataclass(frozen=True, slots=True)
class ContrastiveBatch:
    """Inputs of a softmax at each position: the score of its positive against those of all ranks' candidates.

    Items known to be positives of the sample, at this or another position, are not its candidates. They would be
    wrong negatives, and a model of histories would learn that items do not resemble themselves.
    """

    queries: Tensor  # (P, D)
    positives: Tensor  # (P, D)
    weight: Tensor  # (P,); on the CPU, like all fields below except `candidates`
    sample: Tensor  # (P,) int64: the sample of each position, ascending
    known: tuple[Tensor, Tensor]  # (sample, item), (T,) int64 each: items to exclude
    candidates: Tensor  # (M, D)
    candidate_ids: Tensor  # (M,) int64


class RetrievalObjective:
    """Objective of a `Retriever`: softmax cross entropy of each positive against candidates of all ranks."""

    monitor = "ndcg@20"
    metrics = (
        *(f"{metric}@{k}" for k in CUTOFFS for metric in ("recall", "ndcg")),
        *(f"{metric}@{CUTOFFS[0]}" for metric in ("hit_rate", "mrr", "precision")),
    )

    def loss(self, model: Retriever, batch: Batch, mesh: Mesh) -> Tensor:
        return contrastive_loss(model(batch), model.temperature, mesh)

    def check_source(self, source: Source) -> None:
        if getattr(source, "catalogue", None) is None:
            raise ConfigError(
                "this data set has no catalogue of items to rank, by which a retrieval model is judged; train "
                "without the part (test_fraction=0) and look at `colonnade recommend`; or read who chose what with "
                "--data interactions, or give a source with a `catalogue` and batches whose key is "
                "`data.interactions.samples.HeldOutItems`"
            )

    def evaluate(
        self, model: Retriever, source: Source, batch_size: int, mesh: Mesh
    ) -> BlockedMetrics:
        """Rank the catalogue for each query; the metrics are means over queries, those of popularity among them."""
        self.check_source(source)
        catalogue: TensorColumns = source.catalogue  # type: ignore[attr-defined]
        popularity = getattr(source, "popularity", None)
        names = list(self.metrics)
        if popularity is not None:
            names += [f"{POPULARITY}{name}" for name in self.metrics]
        with evaluation_mode(model):
            items = embed_items(model, catalogue)

            def measure(batch: Batch) -> dict[str, Tensor]:
                rankings = [rank_held_out(model.queries(batch), items, batch.key, model.score)]
                if popularity is not None:
                    popular = rank_by_popularity(popularity, batch.key)
                    is_empty = model.mark_empty_queries(batch)[:, None]
                    rankings = [torch.where(is_empty, popular, rankings[0]), popular]
                values = [value for top in rankings for value in measure_ranking(top, batch.key)]
                return dict(zip(names, values, strict=True))

            return average_metrics(
                measure,
                names,
                source,
                batch_size,
                mesh,
                identify=lambda batch: [batch.key.truth],
            )

    def predict(self, model: Retriever, batch: Batch) -> Tensor:
        raise ConfigError(
            f"{type(model).__name__} gives no logits but vectors to search with; use "
            "predictor.model.queries(batch), predictor.model.items(batch) and predictor.model.score"
        )


class Retriever(SplitModel):
    """Retrieval model that ranks items for a query by `score` of their vectors: their dot, unless a model has another.

    The loss of `RetrievalObjective` takes dots divided by `temperature`.

    Dense column `log_q`, if there is one, has the log of an item's frequency. Models of pairs add it to the score as
    one more element of the vectors (`augment_queries`, `augment_items`), so the others learn how much likelier than its
    frequency an item is. Training leaves it out: negatives are drawn with that frequency, and the logQ correction
    (Bengio and Senecal 2003) would subtract the same term. Scores of the others alone, without it, would start slower:
    rare items would have weight 1 / q.
    """

    objective = RetrievalObjective()
    query_features: tuple[str, ...]
    """Names of the features that `queries` reads."""
    item_features: tuple[str, ...]
    """Names of the features that `items` reads, the item's id first."""
    dense_columns: Sequence[int] = ()
    """Indices of the dense columns that `queries` reads."""
    temperature: float
    log_q: int | None = None
    """Index of the dense column with the log of an item's frequency."""

    @abstractmethod
    def forward(self, batch: Batch) -> ContrastiveBatch:
        """Compute the vectors of a training batch."""

    @abstractmethod
    def queries(self, batch: Batch) -> Tensor:
        """Return the vectors of queries, (B, D). The batch may lack the items' columns."""

    @abstractmethod
    def items(self, batch: Batch) -> Tensor:
        """Return the vectors of items, (B, D). The batch needs only the items' columns."""

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        """Score all items for each query: vectors (B, D) of `queries`, (I, D') of `items` -> (B, I)."""
        return score_by_dots(queries, items)

    def mark_empty_queries(self, batch: Batch) -> Tensor:
        """Mark the queries (B,) without a number and without an id, as of users without a history: they are ranked by
        popularity."""
        counts = [batch.ids[name].counts for name in self.query_features]
        return (torch.stack(counts).sum(0) == 0) & (not self.dense_columns)

    def build_contrastive_batch(
        self, batch: Batch, queries: Tensor, items: Tensor, item_ids: Tensor, known: Iterable[Ids]
    ) -> ContrastiveBatch:
        """Contrast each sample's query (B, D) with the items (B, D) of all samples, except its own and those in its
        bags of `known` items; a batch whose key is `HeldOutItems` lists both itself, completely."""
        if isinstance(batch.key, HeldOutItems):
            item_ids, known = batch.key.truth.values, [batch.key.excluded]
        sample = torch.arange(batch.size)
        bags = [Ids(item_ids), *known]
        pairs = torch.cat([bag.samples for bag in bags]), torch.cat([bag.values for bag in bags])
        weight = torch.ones(batch.size) if batch.sample_weight is None else batch.sample_weight
        return ContrastiveBatch(queries, items, weight, sample, pairs, items, item_ids)

    def log_frequency(self, batch: Batch) -> Tensor:
        """Return column `log_q`, (B,); zeros without one. In a batch of items it may be the only dense column."""
        if self.log_q is None:
            return torch.zeros(batch.size)
        return batch.dense[:, min(self.log_q, batch.dense.shape[1] - 1)]

    def augment_queries(self, queries: Tensor) -> Tensor:
        """Append the factor of an item's log frequency to the queries, if scores include it: (B, D) -> (B, D + 1)."""
        if self.log_q is None:
            return queries
        return torch.cat([queries, queries.new_ones(len(queries), 1)], dim=1)

    def augment_items(self, items: Tensor, log_frequency: Tensor) -> Tensor:
        """Append an item's log frequency (B,) to its vector, if scores include it: (B, D) -> (B, D + 1)."""
        if self.log_q is None:
            return items
        return torch.cat([items, self.temperature * log_frequency.to(items)[:, None]], dim=1)


def score_by_dots(queries: Tensor, items: Tensor) -> Tensor:
    """Score all items for each query by the dots of their vectors: (B, D), (I, D) -> (B, I)."""
    return queries @ items.T


def contrastive_loss(contrast: ContrastiveBatch, temperature: float, mesh: Mesh) -> Tensor:
    """Compute this rank's part of the weighted mean over all ranks' positions. Collective, and its backward too.

    A position's loss is -log of the positive's share in the softmax over it and all candidates that are not known items
    of its sample. Scores are dots divided by `temperature`.
    """
    queries = contrast.queries / temperature
    candidates = concatenate_over_ranks(mesh, contrast.candidates)
    ids = concatenate_over_ranks(mesh, contrast.candidate_ids)
    total = mesh.all_reduce("dense", contrast.weight.sum(dtype=torch.float64))
    positive = (queries * contrast.positives).sum(1)
    num_samples = int(contrast.sample[-1]) + 1 if len(contrast.sample) else 0
    is_known = mark_matching_candidates(*contrast.known, num_samples, ids)
    of_sample, candidate = is_known.nonzero().T
    known = group_items_by_user(of_sample, candidate, num_samples)
    share = contrast.weight.to(queries) / max(float(total), 1e-12)
    return _SoftmaxLoss.apply(queries, candidates, positive, share, known, contrast.sample)


class _SoftmaxLoss(torch.autograd.Function):
    """Weighted sum of the losses of `contrastive_loss`. Its gradients are computed in the same pass.

    A block of scores stays in the processor's cache, and its memory is used again for the next: operators on all
    scores (P, M) would write and read them from memory a dozen times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        positive: Tensor,
        weight: Tensor,
        known: Ids,
        sample: Tensor,
    ) -> Tensor:
        """Compute the sum. queries (P, D), candidates (M, D), positive (P,) scores, weight (P,), known (B,) bags of
        candidates' indices, sample (P,)."""
        num_candidates = len(candidates)
        num_rows = max(1, LOSS_SCORES // (num_candidates + 1))
        buffer = queries.new_empty(min(num_rows, len(queries)), num_candidates + 1)
        gradients = [torch.zeros_like(values) for values in (queries, candidates, positive)]
        losses = torch.empty_like(positive)
        for begin in range(0, len(queries), num_rows):
            rows = slice(begin, begin + num_rows)
            block = queries[rows]
            scores = buffer[: len(block)]
            scores[:, -1] = positive[rows]
            others = scores[:, :-1]
            torch.mm(block, candidates.T, out=others)
            mask_items(others, gather_ids(known, sample[rows]))
            largest = scores.amax(1)
            torch.softmax(scores, 1, out=scores)
            # The largest share is 1 / (sum of exp(score - largest)), and never underflows.
            losses[rows] = largest - scores.amax(1).log() - positive[rows]
            scale = weight[rows, None]
            gradients[0][rows] = (others @ candidates) * scale
            gradients[1].addmm_(others.T, block * scale)
            gradients[2][rows] = (scores[:, -1] - 1) * weight[rows]
        ctx.save_for_backward(*gradients)
        return (losses * weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):  # type: ignore[override]
        return *(gradients[0] * saved for saved in ctx.saved_tensors), None, None, None


def recall_and_ndcg(top_items: Tensor, true_items: Ids, k: int) -> tuple[Tensor, Tensor]:
    """Compute exact recall@k and NDCG@k of each query, (B,) float64 each.

    top_items (B, >= k) items, best first, -1 for none; true_items (B,) bags of distinct items.

    recall: share of a query's true items that are among its first k. ndcg: sum of 1 / log2(rank + 1) of these, divided
    by the sum for a perfect ranking. NaN for a query without true items.
    """
    top_items = top_items[:, :k]
    counts = true_items.counts
    is_hit = mark_hits(top_items, true_items)
    gains = 1 / torch.arange(2, k + 2, dtype=torch.float64).log2()
    perfect = torch.cat([torch.zeros(1, dtype=torch.float64), gains.cumsum(0)])
    hits = is_hit.double()
    return hits.sum(1) / counts, (hits * gains[: top_items.shape[1]]).sum(1) / perfect[
        counts.clamp(max=k)
    ]


def measure_ranking(top_items: Tensor, held_out: HeldOutItems) -> list[Tensor]:
    """Return the values (B,) of `RetrievalObjective.metrics`, of the first items (B, k) of each query."""
    values = [value for k in CUTOFFS for value in recall_and_ndcg(top_items, held_out.truth, k)]
    return [*values, *measure_first_hits(top_items, held_out.truth, CUTOFFS[0])]


def rank_held_out(
    queries: Tensor, items: Tensor, held_out: HeldOutItems, score: Score = score_by_dots
) -> Tensor:
    """Return the first items (B, k) of each query (B, D), of its candidates or of all that are not excluded."""
    if held_out.candidates is None:
        return rank_items(queries, items, held_out.excluded, max(CUTOFFS), score=score)[0]
    return rank_candidates(queries, items, held_out.candidates, max(CUTOFFS), score)


def rank_by_popularity(popular_items: Tensor, held_out: HeldOutItems) -> Tensor:
    """Do what `rank_held_out` does, by the order of all items (I,), the most popular first."""
    k, size = max(CUTOFFS), len(held_out.truth.counts)
    if held_out.candidates is not None:
        rank = torch.empty(len(popular_items))
        rank[popular_items] = torch.arange(len(popular_items)).float()
        return rank_candidates(-torch.ones(size, 1), rank[:, None], held_out.candidates, k)
    excluded = held_out.excluded
    first = popular_items[: k + int(excluded.counts.max()) if size else k]
    is_excluded = mark_matching_candidates(excluded.samples, excluded.values, size, first)
    position = torch.arange(len(first)) + len(first) * is_excluded
    best = position.topk(min(k, len(first)), dim=1, largest=False).values
    return torch.where(best < len(first), first[best % max(len(first), 1)], -1)


def rank_candidates(
    queries: Tensor, items: Tensor, candidates: Ids, k: int, score: Score = score_by_dots
) -> Tensor:
    """Rank the items of a bag for each query: (B, k), best first; equal scores in the order of item numbers; -1 where
    there are fewer."""
    sample = candidates.samples
    bags = items[candidates.values.to(items.device)].split(candidates.counts.tolist())
    parts = [score(queries[i : i + 1], bag)[0].cpu() for i, bag in enumerate(bags)]
    scores = torch.cat([queries.new_empty(0).cpu(), *parts])
    check_scores(scores)
    order = torch.from_numpy(np.lexsort((candidates.values, -scores, sample)))
    position = torch.arange(len(order)) - (candidates.counts.cumsum(0) - candidates.counts)[sample]
    is_top = position < k
    top = torch.full((len(queries), k), -1, dtype=torch.int64)
    top[sample[is_top], position[is_top]] = candidates.values[order][is_top]
    return top


def measure_first_hits(top_items: Tensor, true_items: Ids, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute hit rate, reciprocal rank of the first hit (0 without one) and precision of the first k items.

    Arguments and shapes as of `recall_and_ndcg`."""
    is_hit = mark_hits(top_items[:, :k], true_items).double()
    ranks = torch.arange(1, is_hit.shape[1] + 1, dtype=torch.float64)
    reciprocal = (is_hit / ranks).amax(1) if is_hit.shape[1] else is_hit.sum(1)
    return (is_hit.sum(1) > 0).double(), reciprocal, is_hit.sum(1) / k


def mark_hits(top_items: Tensor, true_items: Ids) -> Tensor:
    """Mark which of the items (B, k) are a query's true items; -1 is none."""
    sample = true_items.samples
    # Keys that differ between queries, so that one search serves all queries.
    largest = max(
        top_items.max() if top_items.numel() else 0,
        true_items.values.max() if sample.numel() else 0,
    )
    width = int(largest) + 2
    true_keys = (sample * width + true_items.values).sort().values
    top_keys = torch.arange(len(top_items))[:, None] * width + top_items
    if not len(true_keys):
        return torch.zeros_like(top_items, dtype=torch.bool)
    positions = torch.searchsorted(true_keys, top_keys).clamp(max=len(true_keys) - 1)
    return (true_keys[positions] == top_keys) & (top_items >= 0)


def embed_items(model: Retriever, catalogue: TensorColumns) -> Tensor:
    """Compute the vectors of all items of a catalogue, (I, D)."""
    chunks = torch.arange(catalogue.num_samples).split(CHUNK)
    return torch.cat([model.items(catalogue.gather_rows(chunk)) for chunk in chunks])


def to_column_major(vectors: Tensor) -> Tensor:
    """Return the same vectors (I, D) stored element by element: one query reads them in half the time of rows.

    Sums of products may differ in the last bit between the two layouts.
    """
    return vectors.T.contiguous().T


def rank_items(
    queries: Tensor,
    items: Tensor,
    masked_items: Ids,
    k: int,
    items_per_block: int | None = None,
    *,
    score: Score = score_by_dots,
) -> tuple[Tensor, Tensor]:
    """Rank all items for each query by their scores, exactly, `items_per_block` items at a time.

    queries (B, D), items (I, D), masked_items (B,) bags of items that are not ranked
    -> items and scores (B, min(k, I)), on the CPU, best first; equal scores in the order of item numbers; -1 and -inf
    instead of items that are masked. Raises NonFiniteError for NaN.
    """
    if items_per_block is None:
        items_per_block = max(BLOCK, BLOCK_SCORES // max(len(queries), 1))
    top = torch.empty(len(queries), 0, dtype=torch.int64)
    top_scores = torch.empty(len(queries), 0)
    samples = masked_items.samples
    for begin in range(0, len(items), items_per_block):
        scores = score(queries, items[begin : begin + items_per_block]).cpu()
        if len(samples):
            _mask_columns(scores, samples, masked_items.values - begin)
        best, best_scores = _find_best(scores, k)
        if begin == 0:
            top = best
            top_scores = best_scores
            continue
        # All items before this block have lower numbers, so a stable sort keeps the order of equal scores.
        top_scores, order = torch.cat([top_scores, best_scores], dim=1).sort(
            dim=1, descending=True, stable=True
        )
        top = torch.cat([top, best + begin], dim=1).gather(1, order)
        top = top[:, :k]
        top_scores = top_scores[:, :k]
    return top.masked_fill(top_scores == -math.inf, -1), top_scores


def top_items(scores: Tensor, k: int) -> Tensor:
    """Return the k items with the best scores of each query.

    scores (B, I) -> (B, min(k, I)) items, best first; equal scores in the order of item numbers; -1 instead of items
    that score -inf. Raises NonFiniteError for NaN."""
    top, values = _find_best(scores, k)
    return top.masked_fill(values == -math.inf, -1)


def _find_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns and values (B, min(k, I)) of each row's best scores (B, I), equal ones in column order.

    Only the k tiles with the largest maxima are searched, and the last columns, which fill no tile. Of equal maxima,
    those of the first tiles are chosen. So k scores, the chosen maxima, come before any score of the other tiles.
    Raises NonFiniteError for NaN.
    """
    num_columns = scores.shape[1]
    num_tiles = num_columns // TILE
    if num_tiles <= 2 * k:
        check_scores(scores)
        return _sort_best(scores, k)
    maxima = scores[:, : num_tiles * TILE].unflatten(1, (num_tiles, TILE)).amax(2)
    check_scores(maxima)
    tiles = _sort_best(maxima, k)[0].sort(dim=1).values
    in_tiles = (tiles[:, :, None] * TILE + torch.arange(TILE)).flatten(1)
    last = torch.arange(num_tiles * TILE, num_columns).expand(len(scores), -1)
    columns = torch.cat([in_tiles, last], dim=1)
    candidates = scores.gather(1, columns)
    check_scores(candidates)
    best, values = _sort_best(candidates, k)
    return columns.gather(1, best), values


def _sort_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what `_find_best` does, with the scores of all columns. There is no NaN among them."""
    width = min(k + 1, scores.shape[1])
    values, columns = scores.topk(width, dim=1)
    is_tied = values[:, 1:] == values[:, :-1]
    if bool(is_tied.any()):
        # topk chooses any of equal scores, in any order. Rows in which it left out one equal to the last are sorted
        # completely.
        columns, order = columns.sort(dim=1)
        values, by_value = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        columns = columns.gather(1, by_value)
        is_cut = is_tied[:, k - 1 :].any(1)
        if bool(is_cut.any()):
            full_sort = scores[is_cut].sort(dim=1, descending=True, stable=True)
            columns[is_cut] = full_sort.indices[:, :width]
            values[is_cut] = full_sort.values[:, :width]
    return columns[:, :k], values[:, :k]


def mask_items(scores: Tensor, masked: Ids) -> Tensor:
    """Set the scores (B, I) of the items in each query's bag to -inf, in place."""
    _mask_columns(scores, masked.samples, masked.values)
    return scores


def _mask_columns(scores: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Set the scores at pairs (row, column) to -inf, in place. Columns outside of `scores` are left out."""
    is_inside = (columns >= 0) & (columns < scores.shape[1])
    scores[rows[is_inside], columns[is_inside]] = -math.inf
