"""Target attention: what a sample's candidate finds in a sequence of the sample's, by softmax.

Legend: B samples, E rows of all sequences, D dim, H heads, d = D / H, R shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from colonnade.interaction.contract import Interaction


class TargetAttention(Interaction):
    """Of its two fields, a query (pooled) and a sequence: sum over the sequence's rows of softmax(<q, k> / sqrt(d)) k,
    in heads of d columns each, (B, D). Zeros where a sequence is empty.

    Statistics: the weighted mean of a shard's rows (D floats) and, by head, the logarithm of the sum of exponentials
    (H floats). Two shards' merge to that of both, and a shard without a row of the sample changes nothing. It has no
    weights: what maps queries and results belongs to the network.
    """

    merge = "logsumexp"
    sequences = 1

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads

    def width(self, dim: int) -> int:
        return dim + self.heads

    def needs(self) -> Literal["rows", "fields"]:
        return "rows"

    def refusal(self, dims: Sequence[int]) -> str | None:
        if len(dims) != 2 or dims[0] != dims[1]:
            return f"takes a query and a sequence of one dim; got dims {list(dims)}"
        if self.heads < 1 or dims[0] % self.heads:
            return f"has {self.heads} heads, which do not divide dim {dims[0]}"
        return None

    def partial(
        self,
        values: Tensor,
        segments: Tensor,
        num_samples: int,
        weights: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """context (B, D): the samples' queries. weights: of rows, as everywhere."""
        assert context is not None
        if weights is not None:
            values = values * weights[:, None]
        rows = values.unflatten(1, (self.heads, -1))  # (E, H, d)
        queries = context.unflatten(1, (self.heads, -1))[segments]
        scores = (queries * rows).sum(2) * rows.shape[2] ** -0.5  # (E, H)
        none = scores.new_full((num_samples, self.heads), -torch.inf)
        where = segments[:, None].expand_as(scores)
        top = _finite(none.scatter_reduce(0, where, scores.detach(), "amax"))
        powers = (scores - top[segments]).exp()
        totals = torch.zeros_like(top).index_add(0, segments, powers)
        sums = rows.new_zeros(num_samples, *rows.shape[1:])
        sums = sums.index_add(0, segments, powers[:, :, None] * rows)
        return _statistics(sums, totals, top)

    def merged(self, stats: Tensor) -> Tensor:
        """(R, B, D + H) of all shards -> (B, D + H)."""
        dim = stats.shape[2] - self.heads
        means = stats[:, :, :dim].unflatten(2, (self.heads, -1))
        logs = stats[:, :, dim:]
        top = _finite(logs.detach().amax(0))
        powers = (logs - top).exp()
        return _statistics((powers[:, :, :, None] * means).sum(0), powers.sum(0), top)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats[:, : -self.heads]

    def forward(self, query: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
        """query (B, D), rows (E, D) sample by sample, offsets (B + 1,) int64 where each sample's begin -> (B, D). Sums
        are float32 at least."""
        samples = torch.arange(len(query), device=rows.device)
        segments = samples.repeat_interleave(offsets.diff().to(rows.device))
        wide = torch.promote_types(rows.dtype, torch.float32)
        stats = self.partial(rows.to(wide), segments, len(query), None, query.to(wide))
        return self.combine(stats).to(rows.dtype)


def _statistics(sums: Tensor, totals: Tensor, top: Tensor) -> Tensor:
    """sums (B, H, d) and totals (B, H) of exponentials less top (B, H) -> (B, D + H)."""
    is_there = totals > 0
    safe = totals.where(is_there, 1.0)
    logs = (safe.log() + top).where(is_there, -torch.inf)
    return torch.cat([(sums / safe[:, :, None]).flatten(1), logs], dim=1)


def _finite(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), 0.0)
