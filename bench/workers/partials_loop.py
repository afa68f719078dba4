"""Cases of `bench partials` for its workers: a case of `exchange_loop`, and the model whose operators take the rows.

Legend: F fields, D dim, H width of the first layer, B samples of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers.exchange_loop import Case

LR = 0.02
"""Learning rate of plain SGD, which is the same whether a row's parts are updated together or apart."""
OPERATORS = {
    "LR+FM": ("fm", "linear"),
    "Wide&Deep": ("deep", "linear"),
    "DeepFM": ("fm", "deep", "linear"),
}
OVER_IDS = " over ids"
"""End of the name of a model whose `fm` has every id as a variable, not every field's bag."""


@dataclass(frozen=True)
class ModelCase(Case):
    """Rows have D elements for `fm` and `deep`, and one for `linear`. A step is lookup, these operators, a fixed
    gradient back to what they give, SGD; what a model has behind them is the same for all systems, and left out."""

    model: str = "LR+FM"
    hidden: int = 128  # H

    @property
    def width(self) -> int:
        return self.dim + 1

    @property
    def operators(self) -> tuple[str, ...]:
        return OPERATORS[self.model.removesuffix(OVER_IDS)]

    @property
    def over(self) -> Literal["fields", "ids"]:
        return "ids" if self.model.endswith(OVER_IDS) else "fields"

    def weight(self) -> Tensor:
        """Return the weight (F * D, H) of the first layer."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        width = len(self.rows) * self.dim
        return torch.randn(width, self.hidden, generator=generator) / width**0.5

    def output_gradients(self) -> list[Tensor]:
        """Gradients, by operator."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = [self.hidden if name == "deep" else 1 for name in self.operators]
        return [
            torch.randn(self.batch_size, width, generator=generator) / self.batch_size
            for width in widths
        ]
