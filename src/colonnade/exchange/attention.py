"""Target attention over rows that stay where they are: queries go to the ranks that have rows of the sequence, and what
each makes of its rows is merged where the samples are.

Nothing of it is rounded: a logarithm of sums in 16 bits would change a row's weight by several percent.

Legend: B samples of this rank, G of all ranks, D dim, H heads, R ranks that have rows of the sequence, E rows of it on
this rank, P floats of what is sent (D + H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.comm.collectives import sum_in_order
from colonnade.comm.mesh import Mesh
from colonnade.interaction import TargetAttention


@dataclass(frozen=True, slots=True)
class Attended:
    """One batch, as evaluated here."""

    queries: Tensor  # (G, D), a leaf; of no samples where no rows of the sequence can be
    rows: Tensor  # (E, D), a leaf
    result: Tensor  # (G, P)
    stats: Tensor  # (R, B, P), a leaf
    merged: Tensor  # (B, P)


@dataclass(frozen=True, slots=True)
class RemoteAttention:
    """Attention of one consumer."""

    interaction: TargetAttention
    mesh: Mesh
    ranks: tuple[int, ...]
    """Ranks that may have rows of its sequence."""
    query: int
    """Its fields: indices into Declaration.fields."""
    sequence: int

    @property
    def has_rows(self) -> bool:
        """Whether this rank may have some."""
        return self.mesh.rank in self.ranks

    def fetch(
        self,
        query: Tensor,  # (B, D)
        rows: Tensor,  # (E, D), of all ranks' samples in rank order
        lengths: Tensor,  # (G,) int64: rows of each sample on this rank
        sizes: Sequence[int],
        tag: str,
        is_trained: bool,
    ) -> Attended:
        """Collective: attend to the rows of all ranks. sizes: samples by rank; tag: what bytes are counted as."""
        size, dim = query.shape
        queries = self._to_owners("fetch", query.repeat(len(self.ranks), 1, 1), sizes, tag)
        with torch.set_grad_enabled(is_trained):
            queries.requires_grad_(is_trained)
            rows = rows.requires_grad_(is_trained)
            segments = torch.arange(len(queries)).repeat_interleave(lengths)
            result = self.interaction.partial(rows, segments, len(queries), None, queries)
            stats = self._to_samples("fetch", result.detach(), sizes, tag)
            stats = stats.requires_grad_(is_trained)
            merged = self.interaction.merged(stats)
        assert merged.shape == (size, self.interaction.width(dim))
        return Attended(queries, rows, result, stats, merged)

    def push(
        self, attended: Attended, gradient: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Collective: return gradients of this rank's queries (B, D) and of rows here (E, D); gradient: (B, P)."""
        (of_stats,) = torch.autograd.grad(
            attended.merged, attended.stats, gradient, retain_graph=True
        )
        of_results = self._to_owners("push", of_stats, sizes, "push")
        of_queries, of_rows = torch.autograd.grad(
            attended.result, [attended.queries, attended.rows], of_results, retain_graph=True
        )
        by_rank = self._to_samples("push", of_queries, sizes, "push")
        return sum_in_order(by_rank.flatten(1)[None]).view(by_rank.shape[1:]), of_rows

    def _to_owners(self, group: str, blocks: Tensor, sizes: Sequence[int], tag: str) -> Tensor:
        """Send (R, B, n) of this rank's samples; return (G, n) of all samples, or (0, n) where no rows can be."""
        _, size, width = blocks.shape
        send = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        receive = [each * width * self.has_rows for each in sizes]
        received, _ = self.mesh.all_to_all(group, blocks.reshape(-1), send, receive, counts_as=tag)
        return received.view(sum(sizes) if self.has_rows else 0, width)

    def _to_samples(self, group: str, values: Tensor, sizes: Sequence[int], tag: str) -> Tensor:
        """Send values (G, n), or (0, n) where no rows can be; return (R, B, n) of this rank's samples."""
        width, size = values.shape[1], sizes[self.mesh.rank]
        send = [each * width * self.has_rows for each in sizes]
        receive = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        received, _ = self.mesh.all_to_all(group, values.reshape(-1), send, receive, counts_as=tag)
        return received.view(len(self.ranks), size, width)
