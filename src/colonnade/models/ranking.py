"""Shared functions of models that rank candidates: marks of known candidates, and metrics averaged over all ranks.

Legend: B samples, M candidates, Q queries, S values of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from colonnade.batch import Batch, Ids
from colonnade.comm.mesh import Mesh
from colonnade.data.batches import read_rank_batches
from colonnade.data.contract import START, Source, iterate_rank_blocks
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


NUM_BLOCKS = 64
"""Number of fixed blocks of samples by whose metrics runs are compared."""
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
"""Factor whose multiples spread neighbouring samples evenly over the blocks."""


def assign_blocks(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Assign samples to blocks by their numbers, (S,): neighbours to different ones."""
    return ((numbers.astype(np.uint64) * GOLDEN_RATIO) >> np.uint64(58)).astype(np.int64)


class BlockedMetrics(dict[str, float]):
    """Metrics by name, of all values; `compute_blocks` returns those of each fixed block of samples."""

    by_type: Mapping[str, Mapping[str, float]] = {}
    """Figures of each type of feedback, by name, of a model that tells types apart."""

    def __init__(
        self,
        compute: Callable[[Any], dict[str, float]],
        numbers: NDArray[np.int64],
        identity: NDArray,
    ) -> None:
        """compute: function from an index of the S values to their metrics. numbers (S,): the values' samples, counted
        in the order of the source; negative if unknown. identity (S, n): values that only the same samples share."""
        super().__init__(compute(slice(None)))
        self._compute = compute
        self._numbers = numbers
        self._identity = identity

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the metrics alone."""
        return dict, (dict(self),)

    def compute_blocks(self) -> dict[str, Any]:
        """Return a digest of the samples, and each metric of each block; {} if samples are not numbered.

        Neither depends on the number of ranks or on the model.
        """
        if not len(self._numbers) or self._numbers.min() < 0:
            return {}
        order = np.argsort(self._numbers, kind="stable")
        digest = blake2b(self._identity[order].tobytes(), digest_size=16).hexdigest()
        block_of_value = assign_blocks(self._numbers)
        blocks = [self._compute(np.flatnonzero(block_of_value == b)) for b in range(NUM_BLOCKS)]
        return {
            "digest": digest,
            "metrics": {name: [block.get(name) for block in blocks] for name in blocks[0]},
        }


def read_numbered_batches(
    source: Source, batch_size: int, mesh: Mesh
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield this rank's batches of an evaluation with the numbers of their samples, (B,); -1 if unknown."""
    ranges = iterate_rank_blocks(
        source.num_samples or 0,
        batch_size,
        rank=mesh.trainers.rank,
        num_ranks=mesh.trainers.num_ranks,
        start=START,
    )
    for batch in read_rank_batches(source, batch_size, mesh, channel="evaluate"):
        begin, end = next(ranges, (0, 0))
        is_known = end - begin == batch.size
        yield batch, torch.arange(begin, end) if is_known else torch.full((batch.size,), -1)


def average_metrics(
    measure: Measure,
    names: Sequence[str],
    source: Source,
    batch_size: int,
    mesh: Mesh,
    *,
    identify: Callable[[Batch], Sequence[Ids]] | None = None,
) -> BlockedMetrics:
    """Average metrics over the queries of one pass over `source`. Collective: every rank measures its share.

    measure   function from a batch to (Q,) values for each of `names`, one per query; Q may differ from the batch size
    identify  function from a batch to ids by which two runs know that they rank for the same samples; without it, or
              if Q is no multiple of the batch size, there are no metrics of blocks

    Every rank returns the same means, for any number of ranks, and the number of queries as "num_samples".
    Without queries the means are NaN. Call it inside `evaluation_mode(model)`.
    """
    rows = []
    for batch, numbers in read_numbered_batches(source, batch_size, mesh):
        values = measure(batch)
        columns = torch.stack([values[name].cpu().double() for name in names], 1)
        copies, rest = divmod(len(columns), max(batch.size, 1))
        bags = () if identify is None else identify(batch)
        samples = torch.stack([numbers, *map(_sum_ids, bags)], 1).double().repeat(copies + 1, 1)
        if rest or identify is None:
            samples = torch.full_like(samples, -1)
        rows.append(torch.cat([columns, samples[: len(columns)]], 1))
    table = torch.cat(rows).numpy() if rows else np.empty((0, len(names)))
    parts = [np.frombuffer(part) for part in mesh.all_gather_bytes("evaluate", table.tobytes())]
    pooled = np.concatenate([part.reshape(-1, table.shape[1]) for part in parts])

    def compute(index: Any) -> dict[str, float]:
        part = pooled[index]
        # math.fsum gives the same bits for any order of the queries.
        means = {
            name: math.fsum(column) / len(part) if len(part) else math.nan
            for name, column in zip(names, part.T, strict=False)
        }
        return {**means, "num_samples": float(len(part))}

    numbers_of_rows = pooled[:, len(names)] if len(pooled) else np.empty(0)
    return BlockedMetrics(compute, numbers_of_rows.astype(np.int64), pooled[:, len(names) + 1 :])


def _sum_ids(bag: Ids) -> Tensor:
    """Sum the hashed ids of each sample, (B,) int64 below 2^53."""
    sums = torch.zeros(len(bag.counts), dtype=torch.int64)
    return sums.index_add_(0, bag.samples, (bag.values.cpu() * 0x9E3779B1) % (1 << 31))


def check_scores(scores: Tensor) -> None:
    """Raise NonFiniteError if there is a NaN among the scores."""
    if scores.numel() and bool(scores.amax().isnan()):  # amax returns a NaN if there is one
        raise NonFiniteError(
            "got NaN among the scores, wanted numbers: the model diverged; lower its learning rate"
        )


def mark_matching_candidates(
    pair_samples: Tensor, pair_items: Tensor, num_samples: int, candidate_ids: Tensor
) -> Tensor:
    """Mark which candidates (M,) are items of each sample, from pairs (sample, item): (num_samples, M) bool."""
    marks = torch.zeros(num_samples, len(candidate_ids), dtype=torch.bool)
    ids, order = candidate_ids.sort()
    first = torch.searchsorted(ids, pair_items)
    # Few of the items are candidates, and only these need the second search.
    hits = (
        (ids[first.clamp(max=len(ids) - 1)] == pair_items).nonzero()[:, 0]
        if len(ids)
        else first[:0]
    )
    first = first[hits]
    counts = torch.searchsorted(ids, pair_items[hits], right=True) - first
    steps = torch.arange(int(counts.sum()))
    positions = steps + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    marks[pair_samples[hits].repeat_interleave(counts), order[positions]] = True
    return marks
