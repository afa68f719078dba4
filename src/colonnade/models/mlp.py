"""A stack of linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int], *, last_relu: bool = False) -> nn.Sequential:
    """widths: input, hidden..., output."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or i < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
