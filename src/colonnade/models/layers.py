"""Layers that models share: linear terms, MLPs, cross layers.

Legend: B samples, n dense columns, H width of the first layer; of cross layers, W width of x, R rank, K experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from colonnade.interaction import FieldsLinear
from colonnade.ops.interaction import cross
from colonnade.ops.linear import linear


class LinearTerm(nn.Module):
    """(B, n) -> (B, out), n may be 0: then the bias alone. Starts at zero, as first-order weights do; or as a part of
    a linear layer of `fan_in` inputs."""

    def __init__(self, num_dense: int, out: int, *, fan_in: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, num_dense))
        self.bias = nn.Parameter(torch.zeros(out))
        if fan_in is not None:
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5)

    def forward(self, dense: Tensor) -> Tensor:
        return linear(dense, self.weight, self.bias)


class MLP(nn.Sequential):
    """nn.Sequential(Linear, ReLU, Linear, ...), each linear layer evaluated together with the ReLU after it.

    Parameters are named and initialised as in that Sequential. Hooks on its linear layers and their ReLUs are not
    called; any other module in it is.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        layers = list(self)
        is_done = False  # the ReLU, with the layer before it
        for layer, after in zip(layers, [*layers[1:], None], strict=False):
            if is_done:
                is_done = False
            elif type(layer) is nn.Linear:
                is_done = type(after) is nn.ReLU
                x = linear(x, layer.weight, layer.bias, relu=is_done)
            else:
                x = layer(x)
        return x


def mlp(widths: Sequence[int], *, last_relu: bool = False) -> MLP:
    """(B, widths[0]) -> (B, widths[-1])."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return MLP(*(layers if last_relu else layers[:-1]))


class Tower(nn.Module):
    """All of it but the fields' part. The function and the first values of `mlp([n + sum of dims, *widths])`."""

    def __init__(self, num_dense: int, dims: Iterable[int], widths: Sequence[int]) -> None:
        """widths: of all layers, H first; no ReLU after the last. dims: of the fields."""
        super().__init__()
        self.columns = LinearTerm(num_dense, widths[0], fan_in=max(1, num_dense + sum(dims)))
        self.has_relu = len(widths) > 1
        self.top = mlp(widths)

    def forward(self, first: Tensor, dense: Tensor) -> Tensor:
        """first (B, H): what `first_layer` gave; dense (B, n) -> (B, widths[-1])."""
        hidden = first + self.columns(dense)
        return self.top(hidden.relu() if self.has_relu else hidden)


def first_layer(num_dense: int, dims: Iterable[int], out: int) -> FieldsLinear:
    """The fields' part: a consumer of them."""
    dims = tuple(dims)
    return FieldsLinear(dims, out, fan_in=max(1, num_dense + sum(dims)))


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
