"""Shared functions of models that rank candidates: marks of known candidates, and metrics averaged over all ranks.

Legend: B samples, M candidates, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.data.batches import read_rank_batches
from colonnade.data.contract import Source
from colonnade.errors import NonFiniteError

Measure = Callable[[Batch], Mapping[str, Tensor]]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode and record no gradients inside the block; restore its training flag after it."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def average_metrics(
    measure: Measure, names: Sequence[str], source: Source, batch_size: int, mesh: Mesh
) -> dict[str, float]:
    """Average metrics over the queries of one pass over `source`. Collective: every rank measures its share.

    measure   function from a batch to (Q,) values for each of `names`, one per query; Q may differ from the batch size

    Every rank returns the same means, for any number of ranks, and the number of queries as "num_samples".
    Without queries the means are NaN. Call it inside `evaluation_mode(model)`.
    """
    rows = []
    for batch in read_rank_batches(source, batch_size, mesh, channel="evaluate"):
        values = measure(batch)
        rows.append(torch.stack([values[name].cpu().double() for name in names], 1))
    table = torch.cat(rows) if rows else torch.empty(0, len(names), dtype=torch.float64)
    parts = mesh.all_gather_bytes("evaluate", table.numpy().tobytes())
    pooled = np.concatenate([np.frombuffer(part).reshape(-1, len(names)) for part in parts])
    # math.fsum gives the same bits for any order of the queries.
    means = {
        name: math.fsum(column) / len(pooled) if len(pooled) else math.nan
        for name, column in zip(names, pooled.T, strict=True)
    }
    return {**means, "num_samples": float(len(pooled))}


def check_scores(scores: Tensor) -> None:
    """Raise NonFiniteError if there is a NaN among the scores."""
    if scores.numel() and bool(scores.amax().isnan()):  # amax returns a NaN if there is one
        raise NonFiniteError(
            "got NaN among the scores, wanted numbers: the model diverged; lower its learning rate"
        )


def mark_matching_candidates(
    samples: Tensor, items: Tensor, num_samples: int, candidate_ids: Tensor
) -> Tensor:
    """Mark which candidates (M,) are items of each sample, from pairs (sample, item): (num_samples, M) bool."""
    marks = torch.zeros(num_samples, len(candidate_ids), dtype=torch.bool)
    ids, order = candidate_ids.sort()
    first = torch.searchsorted(ids, items)
    # Few of the items are candidates, and only these need the second search.
    hits = (ids[first.clamp(max=len(ids) - 1)] == items).nonzero()[:, 0] if len(ids) else first[:0]
    first = first[hits]
    counts = torch.searchsorted(ids, items[hits], right=True) - first
    steps = torch.arange(int(counts.sum()))
    positions = steps + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    marks[samples[hits].repeat_interleave(counts), order[positions]] = True
    return marks
