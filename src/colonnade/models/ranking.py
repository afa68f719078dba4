"""Parts that models which rank candidates share: marks of known candidates, means of metrics over all ranks' queries.

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
from colonnade.data.batches import batches_of
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

    measure   of a batch: (Q,) numbers for each of `names`, one for each query; Q may differ from the batch's size

    Every rank returns the same means, whatever the number of ranks, and how many queries there were as "num_samples".
    The means of no queries are NaN. Call it inside `evaluation_mode(model)`.
    """
    rows = []
    for batch in batches_of(source, batch_size, mesh, channel="evaluate"):
        values = measure(batch)
        rows.append(torch.stack([values[name].cpu().double() for name in names], 1))
    table = torch.cat(rows) if rows else torch.empty(0, len(names), dtype=torch.float64)
    parts = mesh.all_gather_bytes("evaluate", table.numpy().tobytes())
    pooled = np.concatenate([np.frombuffer(part).reshape(-1, len(names)) for part in parts])
    # math.fsum: the same bits in whatever order the queries come.
    means = {
        name: math.fsum(column) / len(pooled) if len(pooled) else math.nan
        for name, column in zip(names, pooled.T, strict=True)
    }
    return {**means, "num_samples": float(len(pooled))}


def check_scores(scores: Tensor) -> None:
    """Raise NonFiniteError where there is a NaN among the scores."""
    if scores.numel() and bool(scores.amax().isnan()):  # one pass, as NaN is the greatest number
        raise NonFiniteError(
            "got NaN among the scores, wanted numbers: the model diverged; lower its learning rate"
        )


def mark_candidates(
    samples: Tensor, items: Tensor, num_samples: int, candidate_ids: Tensor
) -> Tensor:
    """Mark which candidates occur with each sample: pairs (sample, item), (M,) -> (num_samples, M) bool."""
    marks = torch.zeros(num_samples, len(candidate_ids), dtype=torch.bool)
    ids, order = candidate_ids.sort()
    first = torch.searchsorted(ids, items)
    # Few of the items are candidates; the second search is for those alone.
    hits = (ids[first.clamp(max=len(ids) - 1)] == items).nonzero()[:, 0] if len(ids) else first[:0]
    first = first[hits]
    counts = torch.searchsorted(ids, items[hits], right=True) - first
    ramp = torch.arange(int(counts.sum()))
    at = ramp + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    marks[samples[hits].repeat_interleave(counts), order[at]] = True
    return marks
