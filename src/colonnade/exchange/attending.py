"""Softmax attention over rows that lie on several ranks: queries go to them, and what each makes of its rows is merged
where the samples are. Gradients go the same way back.

Nothing here is rounded: a logarithm of sums in 16 bits would change a row's weight by several percent.

Legend: B samples of this rank, G of all ranks, D dim, H heads, P = D + H, R ranks that have rows of the sequence,
E rows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.interaction import TargetAttention
from colonnade.topology.mesh import Mesh
from colonnade.topology.reduction import sum_in_order


@dataclass(frozen=True, slots=True)
class Attended:
    """One batch, as it was evaluated here."""

    queries: Tensor  # (G, D), a leaf; of no samples where no rows of the sequence can lie
    rows: Tensor  # (E, D), a leaf
    result: Tensor  # (G, P)
    stats: Tensor  # (R, B, P), a leaf
    merged: Tensor  # (B, P)


@dataclass(frozen=True, slots=True)
class Attention:
    """One consumer's."""

    interaction: TargetAttention
    mesh: Mesh
    ranks: tuple[int, ...]
    """That may have rows of its sequence."""
    query: int
    """Its fields: indices into Declaration.fields."""
    sequence: int

    @property
    def is_here(self) -> bool:
        return self.mesh.rank in self.ranks

    def fetch(
        self,
        query: Tensor,  # (B, D)
        rows: Tensor,  # (E, D) of this rank, of all ranks' samples in rank order
        lengths: Tensor,  # (G,) int64: rows of each sample here
        sizes: Sequence[int],
        counts_as: str,
        is_trained: bool,
    ) -> Attended:
        """Collective."""
        size, dim = query.shape
        queries = self._to_owners("fetch", query.repeat(len(self.ranks), 1, 1), sizes, counts_as)
        with torch.set_grad_enabled(is_trained):
            queries.requires_grad_(is_trained)
            rows = rows.requires_grad_(is_trained)
            segments = torch.arange(len(queries)).repeat_interleave(lengths)
            result = self.interaction.partial(rows, segments, len(queries), None, queries)
            stats = self._to_samples("fetch", result.detach(), sizes, counts_as)
            stats = stats.requires_grad_(is_trained)
            merged = self.interaction.merged(stats)
        assert merged.shape == (size, self.interaction.width(dim))
        return Attended(queries, rows, result, stats, merged)

    def push(
        self, attended: Attended, gradient: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Collective. gradient (B, P) -> of this rank's queries (B, D), and of the rows here (E, D)."""
        (of_stats,) = torch.autograd.grad(
            attended.merged, attended.stats, gradient, retain_graph=True
        )
        given = self._to_owners("push", of_stats, sizes, "push")
        of_queries, of_rows = torch.autograd.grad(
            attended.result, [attended.queries, attended.rows], given, retain_graph=True
        )
        back = self._to_samples("push", of_queries, sizes, "push")
        return sum_in_order(back.flatten(1)[None]).view(back.shape[1:]), of_rows

    def _to_owners(
        self, group: str, blocks: Tensor, sizes: Sequence[int], counts_as: str
    ) -> Tensor:
        """blocks (R, B, n) of this rank's samples -> (G, n) of all samples, or (0, n) where no rows can lie."""
        _, size, width = blocks.shape
        send = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        receive = [each * width * self.is_here for each in sizes]
        found, _ = self.mesh.all_to_all(
            group, blocks.reshape(-1), send, receive, counts_as=counts_as
        )
        return found.view(sum(sizes) if self.is_here else 0, width)

    def _to_samples(
        self, group: str, values: Tensor, sizes: Sequence[int], counts_as: str
    ) -> Tensor:
        """values (G, n), or (0, n) where no rows can lie -> (R, B, n) of this rank's samples."""
        width, size = values.shape[1], sizes[self.mesh.rank]
        send = [each * width * self.is_here for each in sizes]
        receive = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        found, _ = self.mesh.all_to_all(
            group, values.reshape(-1), send, receive, counts_as=counts_as
        )
        return found.view(len(self.ranks), size, width)
