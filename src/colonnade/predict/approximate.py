"""Approximate top-k of items by an HNSW graph (Malkov & Yashunin 2016) of the optional package usearch.

Largest dots become nearest neighbours: a vector gets one more element, so that all have one length, and queries get a
zero there. Candidates of the graph are scored again by their dots. The recall against the exact ranking is measured
when an index is built.

Legend: B queries, I items, S queries of a sample, D dim, k cutoff.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Ids
from colonnade.errors import ConfigError
from colonnade.models.retriever import rank_items

EXACT = "exact"
HNSW = "hnsw"
RECALL_K = 10
"""Cutoff of the measured recall."""
WANTED_RECALL = 0.98
"""Recall up to which a search looks at more of the graph, within MAX_EXPANSION."""
MAX_SAMPLE = 256
CONNECTIVITY = 16
BUILD_EXPANSION = 128
MIN_EXPANSION = 64
MAX_EXPANSION = 1024
MAX_SHARE = 0.25
"""Share of all items above which asking the graph for so many costs more than the exact ranking."""


def check_index_kind(kind: str) -> None:
    """Raise ConfigError for a kind that does not exist, or that needs a missing package."""
    if kind not in (EXACT, HNSW):
        raise ConfigError(f"--index: got {kind!r}, choose from '{EXACT}', '{HNSW}'")
    if kind == HNSW and find_spec("usearch") is None:
        raise ConfigError("--index hnsw needs usearch; install it: pip install 'colonnade[index]'")


@dataclass(frozen=True, slots=True, eq=False)
class ApproximateIndex:
    """HNSW graph of the vectors of all items at one checkpoint. Any thread may search it."""

    graph: Any
    vectors: Tensor  # (I, D)
    recall: float
    """Mean recall@k of the sample, k = min(RECALL_K, I)."""

    def rank(self, queries: Tensor, masked: Ids, k: int) -> tuple[Tensor, Tensor]:
        """Rank as `rank_items` does, approximately: each returned score is right, and a better item may be missing.

        A query with so many masked items that the graph returns too few others is ranked exactly.
        """
        num_items = len(self.vectors)
        width = min(k, num_items)
        top = torch.full((len(queries), width), -1, dtype=torch.int64)
        scores = torch.full((len(queries), width), -torch.inf)
        counts = masked.counts.tolist()
        ends = masked.counts.cumsum(0).tolist()
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            mask = masked.values[end - count : end]
            query = queries[row]
            result = self._search(query, mask, width)
            if result is None:
                bag = Ids(mask, torch.tensor([0, count]))
                items, values = rank_items(query[None], self.vectors, bag, k)
                result = items[0], values[0]
            top[row, : len(result[0])], scores[row, : len(result[0])] = result
        return top, scores

    def _search(self, query: Tensor, masked_items: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
        """Return at most k items with their scores, best first; None: too few, or too many to ask for."""
        num_items = len(self.vectors)
        count = k + len(masked_items)
        if count > MAX_SHARE * num_items:
            return None
        items = search_graph(self.graph, query[None], count)[0]
        items = items[(items >= 0) & ~torch.isin(items, masked_items)].sort().values
        if len(items) < k:
            return None
        values = self.vectors[items] @ query
        values, order = values.sort(descending=True, stable=True)
        return items[order[:k]], values[:k]


def build_index(vectors: Tensor, queries: Tensor | None = None) -> ApproximateIndex:
    """Build the index of items (I, D), and measure its recall on queries (S, D); default: a sample of the items.

    Raises ConfigError without usearch. Other threads may answer meanwhile.
    """
    check_index_kind(HNSW)
    graph = import_module("usearch.index").Index(
        ndim=vectors.shape[1] + 1,
        metric="l2sq",
        dtype="f32",
        connectivity=CONNECTIVITY,
        expansion_add=BUILD_EXPANSION,
        expansion_search=MIN_EXPANSION,
        enable_key_lookups=False,
    )
    if len(vectors):
        keys = np.arange(len(vectors), dtype=np.uint64)
        graph.add(keys, lengthen(vectors).numpy(), threads=torch.get_num_threads())
    if queries is None or not len(queries):
        generator = torch.Generator().manual_seed(0)
        queries = vectors[torch.randperm(len(vectors), generator=generator)[:MAX_SAMPLE]]
    recall = measure_recall(graph, vectors, queries)
    while recall < WANTED_RECALL and graph.expansion_search < MAX_EXPANSION:
        graph.expansion_search *= 2
        recall = measure_recall(graph, vectors, queries)
    return ApproximateIndex(graph, vectors, recall)


def lengthen(vectors: Tensor) -> Tensor:
    """Append an element to each vector (I, D) that gives all of them the length of the longest: (I, D + 1)."""
    squares = vectors.square().sum(1, keepdim=True)
    return torch.cat([vectors, (squares.max() - squares).clamp(min=0).sqrt()], dim=1).contiguous()


def search_graph(graph: Any, queries: Tensor, num_neighbours: int) -> Tensor:
    """Return `num_neighbours` items near each query, (B, num_neighbours) int64; -1 where the graph returns fewer."""
    longer = torch.cat([queries, queries.new_zeros(len(queries), 1)], dim=1)
    result = graph.search(longer.numpy(), num_neighbours, threads=1)
    keys = torch.from_numpy(np.atleast_2d(result.keys).astype(np.int64))
    counts = getattr(result, "counts", None)
    if counts is None:  # a single query, whose keys are as many as were found
        return keys
    return keys.masked_fill(
        torch.arange(keys.shape[1]) >= torch.from_numpy(counts.astype(np.int64))[:, None], -1
    )


def measure_recall(graph: Any, vectors: Tensor, queries: Tensor) -> float:
    """Return the mean share of the exact best items (I, D) of queries (S, D) that the graph returns."""
    k = min(RECALL_K, len(vectors))
    if not k or not len(queries):
        return 1.0
    nothing = Ids(
        torch.empty(0, dtype=torch.int64), torch.zeros(len(queries) + 1, dtype=torch.int64)
    )
    exact = rank_items(queries, vectors, nothing, k)[0]
    approximate = search_graph(graph, queries, k)
    matches = (exact[:, :, None] == approximate[:, None, :]).any(2)
    return float(matches.double().mean())
