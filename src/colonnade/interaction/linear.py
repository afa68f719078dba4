"""Operators with weights: linear maps of the fields side by side, whose columns can be applied where the fields lie.

Legend: B samples, F fields, W columns of all fields side by side, E vectors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from colonnade.interaction.contract import Interaction
from colonnade.ops.linear import linear


class SideBySide(Interaction):
    """Fields of these dims, in this order, and the columns of each."""

    one_width = False

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)
        self.starts = tuple(accumulate(self.dims, initial=0))

    def refusal(self, dims: Sequence[int]) -> str | None:
        if tuple(dims) != self.dims:
            return f"takes fields of dims {list(dims)}; its operator was made for {list(self.dims)}"
        return None

    def partial(
        self,
        values: Tensor,
        segments: Tensor,
        num_samples: int,
        weights: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Every sample must bring all its vectors, in field order."""
        if weights is not None:
            values = values * weights[:, None]
        return self.partial_of(values.reshape(num_samples, self.starts[-1]))

    @abstractmethod
    def partial_of(self, fields: Tensor, numbers: Sequence[int] | None = None) -> Tensor: ...

    def _columns(self, values: Tensor, numbers: Sequence[int] | None) -> Tensor:
        """(..., W) -> of those fields."""
        if numbers is None or tuple(numbers) == tuple(range(len(self.dims))):
            return values
        pieces = [values[..., self.starts[n] : self.starts[n + 1]] for n in numbers]
        return torch.cat(pieces, dim=-1) if pieces else values[..., :0]


class FieldsLinear(SideBySide):
    """A linear map of the fields side by side, without bias: (B, W) -> (B, out). A network's first layer, but for what
    it makes of dense columns, which lie with the samples."""

    def __init__(self, dims: Sequence[int], out: int, *, fan_in: int | None = None) -> None:
        """dims: by field, in the order of the consumer's features. fan_in: inputs of the layer this is a part of,
        which says how it starts (as nn.Linear); default W."""
        super().__init__(dims)
        bound = (fan_in or max(1, self.starts[-1])) ** -0.5
        self.weight = nn.Parameter(torch.empty(out, self.starts[-1]).uniform_(-bound, bound))

    def width(self, dim: int) -> int:
        return len(self.weight)

    def needs(self) -> Literal["rows", "fields"]:
        return "rows"

    def partial_of(self, fields: Tensor, numbers: Sequence[int] | None = None) -> Tensor:
        return linear(fields, self._columns(self.weight, numbers).to(fields), None)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats


class NormalizedLinear(SideBySide):
    """Layer normalisation of all fields side by side, then a linear layer: (B, W) -> (B, out).

    Statistics: what the map makes of the fields as they are (out floats), their sum, and that of their squares; mean
    and variance are taken from it afterwards.
    """

    def __init__(self, dims: Sequence[int], out: int, *, eps: float = 1e-5) -> None:
        super().__init__(dims)
        total = self.starts[-1]
        bound = max(1, total) ** -0.5
        self.eps = eps
        self.scale, self.shift = nn.Parameter(torch.ones(total)), nn.Parameter(torch.zeros(total))
        self.weight = nn.Parameter(torch.empty(out, total).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out).uniform_(-bound, bound))

    def width(self, dim: int) -> int:
        return len(self.bias) + 2

    def needs(self) -> Literal["rows", "fields"]:
        return "fields"

    def partial_of(self, fields: Tensor, numbers: Sequence[int] | None = None) -> Tensor:
        weight = self._columns(self.weight * self.scale, numbers).to(fields)
        sums, squares = fields.sum(1, keepdim=True), fields.square().sum(1, keepdim=True)
        return torch.cat([linear(fields, weight, None), sums, squares], dim=1)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        mapped, count = stats[:, :-2], self.starts[-1]
        mean, square = stats[:, -2:-1] / count, stats[:, -1:] / count
        deviation = ((square - mean.square()).clamp(min=0) + self.eps).sqrt()
        taken = (self.weight * self.scale).sum(1).to(stats)  # what the map makes of a mean of one
        constant = (self.weight @ self.shift + self.bias).to(stats)
        return (mapped - mean * taken) / deviation + constant

    def forward(self, fields: Tensor) -> Tensor:
        scale, shift = self.scale.to(fields), self.shift.to(fields)
        normalized = layer_norm(fields, (self.starts[-1],), scale, shift, self.eps)
        return linear(normalized, self.weight.to(fields), self.bias.to(fields))
