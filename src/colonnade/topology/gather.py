"""Tensors of all ranks on every rank, with gradients.

Legend: m rows of this rank, M of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colonnade.topology.mesh import Mesh


def gather(mesh: Mesh, values: Tensor, purpose: str = "gather") -> Tensor:
    """Collective, and its backward too: (m, ...) of every rank -> (M, ...) in rank order; m may differ, and be 0.

    A rank's rows receive the sum of all ranks' gradients, whose order is fixed. Every rank must take part in the
    backward, which it does when its loss is made of the result.
    """
    if mesh.num_ranks == 1:
        return values
    counts = [int(n) for n in mesh.all_gather(purpose, torch.tensor(len(values)))]
    return _Gather.apply(values, mesh, counts, purpose)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: Mesh, counts: list[int], purpose: str) -> Tensor:
        ctx.mesh, ctx.counts, ctx.purpose = mesh, counts, purpose
        # gloo gathers blocks of one size, and on the CPU.
        padded = torch.zeros(max(counts), *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values
        blocks = mesh.all_gather(purpose, padded)
        rows = [block[:count] for block, count in zip(blocks, counts, strict=True)]
        return torch.cat(rows).to(values.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):  # type: ignore[override]
        (gradient,) = gradients
        total = gradient.to("cpu", copy=True).contiguous()
        ctx.mesh.all_reduce(ctx.purpose, total)
        begin = sum(ctx.counts[: ctx.mesh.rank])
        mine = total[begin : begin + ctx.counts[ctx.mesh.rank]]
        return mine.to(gradient.device), None, None, None
