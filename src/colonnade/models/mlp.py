"""A stack of linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from colonnade.ops.linear import linear


class MLP(nn.Sequential):
    """nn.Sequential(Linear, ReLU, Linear, ...), each layer evaluated together with the ReLU after it.

    Parameters are named and initialised as in that Sequential. Hooks on its inner layers are not called.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        layers = list(self)
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.Linear):
                x = linear(x, layer.weight, layer.bias, relu=isinstance(after, nn.ReLU))
        return x


def mlp(widths: Sequence[int], *, last_relu: bool = False) -> MLP:
    """(B, widths[0]) -> (B, widths[-1])."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return MLP(*(layers if last_relu else layers[:-1]))
