"""The dense work of `bench hybrid`, the same for every system: an MLP over a batch's fields, there and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.exchange_loop import Case

DEPTH = 3


@dataclass(frozen=True)
class HybridCase(Case):
    hidden: int = 0
    """Units of each of `DEPTH` layers; 0: no dense work, the exchange alone."""


class DenseWork:
    """Forward and backward of an MLP over the fields of one batch. Its weights stay, and what rows get back is fixed,
    so that all systems must come to the same outputs."""

    def __init__(self, case: HybridCase) -> None:
        torch.manual_seed(case.seed)
        self.network: nn.Sequential | None = None
        if case.hidden:
            sizes = [len(case.rows) * case.dim, *[case.hidden] * DEPTH]
            layers = [item for n, m in pairwise(sizes) for item in (nn.Linear(n, m), nn.ReLU())]
            self.network = nn.Sequential(*layers, nn.Linear(case.hidden, 1))

    def run(self, fields: Tensor) -> None:
        """fields (B, F * D)"""
        if self.network is not None:
            self.network.zero_grad()
            self.network(fields.detach().requires_grad_()).sum().backward()


class WithDense:
    """Dense work of a system of `exchange_colonnade` or `exchange_torchrec` between lookup and update."""

    def __init__(self, case: HybridCase, *rest: Any) -> None:
        super().__init__(case, *rest)
        self.dense = DenseWork(case)

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        self.dense.run(outputs[0])
        return super().gradients(outputs)  # type: ignore[misc]
