"""A stack of linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from colonnade.ops.linear import linear


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
