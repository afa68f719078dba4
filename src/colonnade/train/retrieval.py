"""How well a model ranks a whole catalogue: recall and NDCG at k, exact.

Legend: B queries, I items, k places.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Ids
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.sets.interactions import Held
from colonnade.data.tensors import Columns
from colonnade.errors import ConfigError, NonFiniteError
from colonnade.models.retriever import Retriever

PLACES = (10, 20)
CHUNK = 4096  # items embedded at a time


def recall_and_ndcg(top: Tensor, truth: Ids, k: int) -> tuple[Tensor, Tensor]:
    """top (B, >= k) items, best first, -1 for none; truth (B,) bags of different items. Each (B,) float64.

    recall: the share of a query's true items among its first k. ndcg: 1 / log2(place + 1) of each of them there, over
    what a perfect ranking has. nan for a query without true items.
    """
    assert truth.offsets is not None
    top, counts = top[:, :k], truth.offsets.diff()
    sample = torch.repeat_interleave(torch.arange(len(top)), counts)
    # A query's items as numbers of their own: then one search serves all.
    width = (
        int(max(top.max() if top.numel() else 0, truth.values.max() if sample.numel() else 0)) + 2
    )
    known = (sample * width + truth.values).sort().values
    wanted = torch.arange(len(top))[:, None] * width + top
    if len(known):
        found = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        is_hit = (known[found] == wanted) & (top >= 0)
    else:
        is_hit = torch.zeros_like(top, dtype=torch.bool)
    gains = 1 / torch.arange(2, k + 2, dtype=torch.float64).log2()
    perfect = torch.cat([torch.zeros(1, dtype=torch.float64), gains.cumsum(0)])
    hits = is_hit.double()
    return hits.sum(1) / counts, (hits * gains[: top.shape[1]]).sum(1) / perfect[
        counts.clamp(max=k)
    ]


def best(scores: Tensor, k: int) -> Tensor:
    """scores (B, I) -> (B, min(k, I)) items, best first; of equal ones the lower number first; -1 where only items
    that score -inf are left. Raises NonFiniteError for NaN."""
    k = min(k, scores.shape[1])
    if bool(scores.isnan().any()):
        raise NonFiniteError(
            "got NaN among the scores, wanted numbers: the model diverged; lower its learning rate"
        )
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
    """In place: -inf for the items of each query's bag."""
    assert seen.offsets is not None
    sample = torch.repeat_interleave(torch.arange(len(scores)), seen.offsets.diff())
    scores[sample, seen.values] = -math.inf
    return scores


@torch.no_grad()
def evaluate_retrieval(
    model: Retriever, source: Source, batch_size: int, mesh: Mesh
) -> dict[str, float]:
    """Collective: each rank ranks the catalogue for its share of the queries of one pass over `source`. Every rank
    returns the same means over queries, whatever the number of ranks. The model's training flag is put back."""
    catalogue = getattr(source, "catalogue", None)
    if catalogue is None:
        raise ConfigError(
            "this data set has no catalogue to rank; retrieval is scored on movielens_retrieval, gowalla, or a source "
            "with a `catalogue` and batches whose key is `data.interactions.Held`"
        )
    was_training = model.training
    model.eval()
    rows = []
    try:
        items = _catalogue(model, catalogue)
        for batch in source.batches(batch_size, rank=mesh.rank, num_ranks=mesh.num_ranks):
            scores = (model.queries(batch) @ items.T).cpu()
            assert isinstance(batch.key, Held)
            top = best(without_seen(scores, batch.key.seen), max(PLACES))
            found = [recall_and_ndcg(top, batch.key.truth, k) for k in PLACES]
            rows.append(torch.stack([column for pair in found for column in pair], 1))
    finally:
        model.train(was_training)
    table = torch.cat(rows) if rows else torch.empty(0, 2 * len(PLACES), dtype=torch.float64)
    parts = mesh.all_gather_bytes("evaluate", table.numpy().tobytes())
    pooled = np.concatenate([np.frombuffer(part).reshape(-1, 2 * len(PLACES)) for part in parts])
    names = [f"{metric}@{k}" for k in PLACES for metric in ("recall", "ndcg")]
    # math.fsum: the same bits in whatever order the queries come.
    means = {
        name: math.fsum(column) / len(pooled) if len(pooled) else math.nan
        for name, column in zip(names, pooled.T, strict=True)
    }
    return {**means, "num_samples": float(len(pooled))}


def _catalogue(model: Retriever, columns: Columns) -> Tensor:
    """(I, D)."""
    chunks = torch.arange(columns.num_samples).split(CHUNK)
    return torch.cat([model.items(columns.take(chosen)) for chosen in chunks])
