"""The linear term of the dense columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colonnade.ops.linear import linear


class LinearTerm(nn.Module):
    """(B, n) -> (B, tasks), n may be 0: then the bias alone. Starts at zero, as first-order weights do."""

    def __init__(self, num_dense: int, tasks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tasks, num_dense))
        self.bias = nn.Parameter(torch.zeros(tasks))

    def forward(self, dense: Tensor) -> Tensor:
        return linear(dense, self.weight, self.bias)
