"""Euclid's distance of each vector to each of others, and its square, as a product of matrices, through oneDNN."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade.ops.linear import linear


def distances(queries: Tensor, others: Tensor) -> Tensor:
    """(P, D), (M, D) of one dtype -> (P, M): the root of |q|^2 - 2 q.o + |o|^2, in that dtype under autocast, too.

    That of near ones has the rounding of the vectors' lengths, which torch.cdist without products has not. Its
    gradient is 0 where it is 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return _Distances.apply(queries, others)


def squared_distances(queries: Tensor, others: Tensor) -> Tensor:
    """(P, D), (M, D) of one dtype -> (P, M): |q|^2 - 2 q.o + |o|^2, in that dtype under autocast, too.

    Of near ones it has the rounding of the vectors' lengths, and may be below 0 by so much.
    """
    with torch.autocast(queries.device.type, enabled=False):
        found = linear(-2 * queries, others, others.square().sum(1))
        return found + queries.square().sum(1, keepdim=True)


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries: Tensor, others: Tensor) -> Tensor:
        found = linear(-2 * queries, others, None)
        found += queries.square().sum(1, keepdim=True)
        found += others.square().sum(1)
        found.clamp_(min=0).sqrt_()  # keeps NaN, which says that a model diverges
        ctx.save_for_backward(queries, others, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        queries, others, found = ctx.saved_tensors
        share = (gradient / found).masked_fill_(found == 0, 0)
        dq = do = None
        if ctx.needs_input_grad[0]:
            dq = queries * share.sum(1, keepdim=True) - linear(share, others.t(), None)
        if ctx.needs_input_grad[1]:
            do = others * share.sum(0)[:, None] - linear(share.t(), queries.t(), None)
        return dq, do
