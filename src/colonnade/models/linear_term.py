"""What a model makes of the dense columns by themselves: a linear term, or their part of a first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
