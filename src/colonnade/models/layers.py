"""Layers that models share: linear terms, MLPs, cross layers.

Legend: B samples, n dense columns, H width of the first layer; for cross layers: W width of x, R rank, K experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import Linear, ReLU

from colonnade.interaction import FieldsLinear
from colonnade.ops.interaction import cross
from colonnade.ops.linear import linear


class LinearTerm(nn.Module):
    """Linear layer of the dense columns: (B, n) -> (B, out). If n is 0, only the bias. Initialised to zero, as
    first-order weights are, or, with `fan_in`, as a part of a linear layer of that many inputs."""

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
    """Sequential(Linear, ReLU, Linear, ...) that fuses each linear layer with the ReLU after it.

    Parameters are named and initialised as in that Sequential. Hooks on its linear layers and their ReLUs are not
    called; hooks on other modules are.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        layers = [*self._modules.values(), None]
        is_fused_relu = False  # `layer` was evaluated with the layer before it
        for layer, next_layer in pairwise(layers):
            if is_fused_relu:
                is_fused_relu = False
            elif type(layer) is Linear:
                is_fused_relu = type(next_layer) is ReLU
                x = linear(x, layer.weight, layer.bias, relu=is_fused_relu)
            else:
                assert layer is not None
                x = layer(x)
        return x


def mlp(widths: Sequence[int], *, last_relu: bool = False) -> MLP:
    """Return an MLP with these layer widths: (B, widths[0]) -> (B, widths[-1])."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return MLP(*(layers if last_relu else layers[:-1]))


class SplitMLP(nn.Module):
    """MLP of dense columns and fields, without the fields' part of its first layer (see `build_first_layer`).

    Both together have the function and the initial values of `mlp([n + sum of dims, *widths])`.
    """

    def __init__(self, num_dense: int, dims: Iterable[int], widths: Sequence[int]) -> None:
        """Create everything except the fields' part. widths: of all layers, H first; the last has no ReLU. dims: of the
        fields."""
        super().__init__()
        self.columns = LinearTerm(num_dense, widths[0], fan_in=max(1, num_dense + sum(dims)))
        self.has_relu = len(widths) > 1
        self.top = mlp(widths)

    def forward(self, first: Tensor, dense: Tensor) -> Tensor:
        """Evaluate the MLP. first (B, H): output of the layer of `build_first_layer`; dense (B, n) -> (B,
        widths[-1])."""
        hidden = first + self.columns(dense)
        return self.top(hidden.relu() if self.has_relu else hidden)


def build_first_layer(num_dense: int, dims: Iterable[int], out: int) -> FieldsLinear:
    """Build the fields' part of a `SplitMLP`'s first layer, as a consumer of the fields."""
    dims = tuple(dims)
    return FieldsLinear(dims, out, fan_in=max(1, num_dense + sum(dims)))


class MatrixCross(nn.Module):
    """Cross layer of DCN-v2 (Wang et al. 2021): x_0 * (W x_l + b) + x_l; with `rank`, W is a product U V of that
    rank."""

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
    """Mixture of K low-rank experts of DCN-v2: x_0 * (sum over k of G_k(x_l) U_k g(C_k g(V_k x_l)) + b) + x_l, with
    g = tanh and softmax gates G. Gates add up to one, so b is outside the sum."""

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.experts = experts

        def uniform_parameter(*shape: int, inputs: int) -> nn.Parameter:
            bound = math.sqrt(1 / inputs)
            return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))

        self.down = uniform_parameter(experts * rank, width, inputs=width)
        self.core = uniform_parameter(experts, rank, rank, inputs=rank)
        self.up = uniform_parameter(experts, rank, width, inputs=rank)
        self.bias = nn.Parameter(torch.zeros(width))
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        inner = nn.functional.linear(x, self.down).unflatten(1, (self.experts, -1)).tanh()
        inner = torch.einsum("bkr,krs->bks", inner, self.core).tanh()
        inner = inner * self.gate(x).softmax(1)[:, :, None]
        # The inner values are already scaled by the gates, so one product over (expert, rank) sums the experts.
        factor = nn.functional.linear(inner.flatten(1), self.up.flatten(0, 1).t(), self.bias)
        return cross(first, factor, x)
