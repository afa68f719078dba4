"""Target attention: softmax attention of a sample's candidate over a sequence of the sample.

Legend: B samples, E rows of all sequences, D dim, H heads, d = D / H, R shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.interaction.contract import Interaction


class TargetAttention(Interaction):
    """Attention of a pooled query field over a sequence field, in heads of d columns.

    Result: sum over the sequence's rows of softmax(<q, k> / sqrt(d)) k, (B, D); zeros for an empty sequence.

    Statistics: the weighted mean of a shard's rows (D floats) and, by head, the logarithm of the sum of exponentials
    (H floats). Statistics of two shards can be merged, and a shard without a row of the sample changes nothing. The
    operator has no weights: projections of queries and results belong to the network.
    """

    merge = "logsumexp"
    sequences = 1

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads

    def width(self, dim: int) -> int:
        return dim + self.heads

    def needs_pooled_fields(self) -> bool:
        return False

    def find_dims_problem(self, dims: Sequence[int]) -> str | None:
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
        """Compute the statistics of this shard's rows. context (B, D): the samples' queries. weights: of rows."""
        assert context is not None
        if weights is not None:
            values = values * weights[:, None]
        rows = values.unflatten(1, (self.heads, -1))  # (E, H, d)
        queries = context.unflatten(1, (self.heads, -1))[segments]
        scores = (queries * rows).sum(2) * rows.shape[2] ** -0.5  # (E, H)
        lowest = scores.new_full((num_samples, self.heads), -torch.inf)
        index = segments[:, None].expand_as(scores)
        maxima = _replace_infinite(lowest.scatter_reduce(0, index, scores.detach(), "amax"))
        exponentials = (scores - maxima[segments]).exp()
        totals = torch.zeros_like(maxima).index_add(0, segments, exponentials)
        sums = rows.new_zeros(num_samples, *rows.shape[1:])
        sums = sums.index_add(0, segments, exponentials[:, :, None] * rows)
        return _build_statistics(sums, totals, maxima)

    def merge_partials(self, stats: Tensor) -> Tensor:
        """Merge the statistics of all shards: (R, B, D + H) -> (B, D + H)."""
        dim = stats.shape[2] - self.heads
        means = stats[:, :, :dim].unflatten(2, (self.heads, -1))
        logs = stats[:, :, dim:]
        maxima = _replace_infinite(logs.detach().amax(0))
        exponentials = (logs - maxima).exp()
        return _build_statistics(
            (exponentials[:, :, :, None] * means).sum(0), exponentials.sum(0), maxima
        )

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats[:, : -self.heads]

    def forward(self, query: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
        """Evaluate the whole operator. query (B, D); rows (E, D), sample by sample; offsets (B + 1,) int64: each
        sample's first row -> (B, D). Sums are in float32 or wider."""
        samples = torch.arange(query.shape[0], device=rows.device)
        counts = offsets.diff().to(rows.device)
        segments = samples.repeat_interleave(counts, output_size=rows.shape[0])
        dtype = torch.promote_types(rows.dtype, torch.float32)
        stats = self.partial(rows.to(dtype), segments, query.shape[0], None, query.to(dtype))
        return self.combine(stats).to(rows.dtype)


def _build_statistics(sums: Tensor, totals: Tensor, maxima: Tensor) -> Tensor:
    """Build statistics (B, D + H) from sums (B, H, d) and totals (B, H) of exponentials of scores minus maxima."""
    has_rows = totals > 0
    safe = totals.where(has_rows, 1.0)
    logs = (safe.log() + maxima).where(has_rows, -torch.inf)
    return torch.cat([(sums / safe[:, :, None]).flatten(1), logs], dim=1)


def _replace_infinite(values: Tensor) -> Tensor:
    """Replace infinities by 0."""
    return values.where(values.isfinite(), 0.0)
