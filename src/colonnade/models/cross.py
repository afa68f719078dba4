"""Cross layers: x_{l+1} = x_0 * factor(x_l) + x_l, elementwise, for two ways of making the factor.

Legend: B samples, W width of x, R rank, K experts.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from colonnade.ops.interaction import cross
from colonnade.ops.linear import linear


class MatrixCross(nn.Module):
    """DCN-v2 (Wang et al. 2021): x_0 * (W x_l + b) + x_l; with `rank`, W is a product U V of that rank."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        widths = [width, width] if rank is None else [width, rank, width]
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=i == len(widths) - 2) for i, (a, b) in enumerate(pairwise(widths))
        )

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        factor = x
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            factor = linear(factor, layer.weight, layer.bias)
        return cross(first, factor, x)


class MixtureCross(nn.Module):
    """DCN-v2's mixture of K low-rank experts: x_0 * (sum over k of G_k(x_l) U_k g(C_k g(V_k x_l)) + b) + x_l, with
    g = tanh and the gates G a softmax (they add up to one, so b stands outside)."""

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.experts = experts

        def uniform(*shape: int, inputs: int) -> nn.Parameter:
            bound = math.sqrt(1 / inputs)
            return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))

        self.down = uniform(experts * rank, width, inputs=width)
        self.core = uniform(experts, rank, rank, inputs=rank)
        self.up = uniform(experts, rank, width, inputs=rank)
        self.bias = nn.Parameter(torch.zeros(width))
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        inner = nn.functional.linear(x, self.down).unflatten(1, (self.experts, -1)).tanh()
        inner = torch.einsum("bkr,krs->bks", inner, self.core).tanh()
        inner = inner * self.gate(x).softmax(1)[:, :, None]
        # Gates scale what goes up: experts are summed by one product over (expert, rank).
        factor = nn.functional.linear(inner.flatten(1), self.up.flatten(0, 1).t(), self.bias)
        return cross(first, factor, x)
