"""Operators with weights: linear maps of the concatenated fields, and DCN-v2's low-rank cross layers.

Each rank applies the weight columns of the fields it has.

Legend: B samples, F fields, W columns of all fields concatenated, E vectors. For cross layers: n dense columns, W
columns of x_0 (dense columns and fields concatenated), W' some of them, L layers, R rank, O output floats, P floats of
a partial.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from colonnade.interaction.contract import Interaction
from colonnade.ops.interaction import cross
from colonnade.ops.linear import linear


class ConcatenatedFields(Interaction):
    """Base class of operators over concatenated fields of known dims. It knows each field's columns."""

    needs_equal_dims = False

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)
        self.starts = tuple(accumulate(self.dims, initial=0))

    def find_dims_problem(self, dims: Sequence[int]) -> str | None:
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
        """Compute partials. Every sample must have one vector per field, in field order."""
        if weights is not None:
            values = values * weights[:, None]
        return self.partial_of_fields(values.reshape(num_samples, self.starts[-1]))

    @abstractmethod
    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor: ...

    def _select_columns(self, values: Tensor, field_indices: Sequence[int] | None) -> Tensor:
        """Return the columns of these fields from all columns (..., W)."""
        if field_indices is None or tuple(field_indices) == tuple(range(len(self.dims))):
            return values
        pieces = [values[..., self.starts[i] : self.starts[i + 1]] for i in field_indices]
        return torch.cat(pieces, dim=-1) if pieces else values[..., :0]


class FieldsLinear(ConcatenatedFields):
    """Linear map of the concatenated fields, without bias: (B, W) -> (B, out). It is the fields' part of a network's
    first layer; the dense columns' part stays with the samples."""

    def __init__(self, dims: Sequence[int], out: int, *, fan_in: int | None = None) -> None:
        """Create the layer. dims: by field, in the order of the consumer's features. fan_in: number of inputs of the
        layer this is a part of, for its initialisation (as nn.Linear); default W."""
        super().__init__(dims)
        bound = (fan_in or max(1, self.starts[-1])) ** -0.5
        self.weight = nn.Parameter(torch.empty(out, self.starts[-1]).uniform_(-bound, bound))

    def width(self, dim: int) -> int:
        return len(self.weight)

    def needs_pooled_fields(self) -> bool:
        return False

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        return linear(fields, self._select_columns(self.weight, field_indices).to(fields), None)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats


class NormalizedLinear(ConcatenatedFields):
    """Layer normalisation of all concatenated fields, then a linear layer: (B, W) -> (B, out).

    Statistics: the linear map of the unnormalised fields (out floats), their sum, and the sum of their squares.
    `combine` computes mean and variance from them.
    """

    def __init__(self, dims: Sequence[int], out: int, *, eps: float = 1e-5) -> None:
        super().__init__(dims)
        total = self.starts[-1]
        bound = max(1, total) ** -0.5
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(total))
        self.shift = nn.Parameter(torch.zeros(total))
        self.weight = nn.Parameter(torch.empty(out, total).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out).uniform_(-bound, bound))

    def width(self, dim: int) -> int:
        return len(self.bias) + 2

    def needs_pooled_fields(self) -> bool:
        return True

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        weight = self._select_columns(self.weight * self.scale, field_indices).to(fields)
        sums = fields.sum(1, keepdim=True)
        squares = fields.square().sum(1, keepdim=True)
        return torch.cat([linear(fields, weight, None), sums, squares], dim=1)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        mapped = stats[:, :-2]
        count = self.starts[-1]
        mean = stats[:, -2:-1] / count
        square = stats[:, -1:] / count
        deviation = ((square - mean.square()).clamp(min=0) + self.eps).sqrt()
        mapped_ones = (self.weight * self.scale).sum(1).to(stats)
        constant = (self.weight @ self.shift + self.bias).to(stats)
        return (mapped - mean * mapped_ones) / deviation + constant

    def forward(self, fields: Tensor) -> Tensor:
        scale = self.scale.to(fields)
        shift = self.shift.to(fields)
        normalized = layer_norm(fields, (self.starts[-1],), scale, shift, self.eps)
        return linear(normalized, self.weight.to(fields), self.bias.to(fields))


class LowRankCross(ConcatenatedFields):
    """Low-rank cross layers of DCN-v2 (Wang et al. 2021), then a linear map of x_L to O floats, without bias.

    x_{l+1} = x_0 * (U_l t_l + b_l) + x_l with t_l = V_l x_l. Every x_l is x_0 times a factor, element by element:

        x_l = x_0 * (1 + sum over j < l of b_j + U_j t_j)

    So t_l, and likewise the output, needs two things of x_0: a vector, V_l (x_0 * (1 + sum of b_j)), and for each j < l
    a matrix, V_l diag(x_0) U_j, which is multiplied with t_j. These are the statistics: level by level, for each of its
    rows the element of the vector and the rows of its matrices; P = L R + R^2 L (L - 1) / 2 + O (1 + L R) floats. They
    are linear in x_0, so they add up over fields, and over rows of a bag, on any ranks, and one round is enough for all
    layers. `forward`, with all values on one rank, evaluates the layers directly, which is less work.
    """

    def __init__(
        self,
        dims: Sequence[int],
        rank: int,
        layers: int,
        out: int,
        *,
        num_dense: int = 0,
        fan_in: int | None = None,
    ) -> None:
        """Create the layers. dims: by field. num_dense: n; dense columns come first in x_0. fan_in: number of inputs of
        the layer that the last one is a part of; default W. Initialisation is that of `nn.Linear`s of these shapes."""
        super().__init__(dims)
        self.num_dense = num_dense
        width = num_dense + self.starts[-1]

        def uniform_parameter(*shape: int, inputs: int) -> nn.Parameter:
            bound = max(1, inputs) ** -0.5
            return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))

        self.down = uniform_parameter(layers, rank, width, inputs=width)  # V
        self.up = uniform_parameter(layers, rank, width, inputs=rank)  # U, transposed
        self.bias = uniform_parameter(layers, width, inputs=rank)
        self.last = uniform_parameter(out, width, inputs=fan_in or width)

    def width(self, dim: int) -> int:
        layers, rank, _ = self.down.shape
        inner = layers * rank + rank**2 * layers * (layers - 1) // 2
        return inner + len(self.last) * (1 + layers * rank)

    def needs_pooled_fields(self) -> bool:
        return False

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        n = self.num_dense
        return self._project_fields(
            fields, lambda weight: self._select_columns(weight[..., n:], field_indices)
        )

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        """Compute the output from merged statistics. dense (B, n), if n is not 0."""
        n = self.num_dense
        if n:
            assert dense is not None
            stats = stats + self._project_fields(dense.to(stats), lambda weight: weight[..., :n])
        products = stats.new_ones(stats.shape[0], 1)  # 1, t_0, t_1, ... concatenated
        for rows in (*self.down, self.last):
            level = stats[:, : len(rows) * products.shape[1]]
            stats = stats[:, level.shape[1] :]
            inner = level.unflatten(1, (len(rows), products.shape[1])) @ products[:, :, None]
            products = torch.cat([products, inner[:, :, 0]], dim=1)
        return products[:, -len(self.last) :]

    def forward(self, fields: Tensor, dense: Tensor | None = None) -> Tensor:
        """Evaluate the layers on pooled fields (B, W) -> (B, O). dense (B, n), if n is not 0."""
        first = fields
        if self.num_dense:
            assert dense is not None
            first = torch.cat([dense.to(fields), fields], dim=1)
        x = first
        for down, up, bias in zip(self.down, self.up, self.bias, strict=True):
            inner = linear(x, down.to(x), None)
            x = cross(first, linear(inner, up.T.to(x), bias.to(x)), x)
        return linear(x, self.last.to(x), None)

    def _project_fields(self, values: Tensor, select_columns: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the statistics of some columns of x_0: (B, W') -> (B, P).

        select_columns: function from weights (..., W) to those of these columns."""
        weights = (self.down, self.up, self.bias, self.last)
        down, up, bias, last = (select_columns(weight.to(values)) for weight in weights)
        # Factors of x_l: 1 + sum of b_j; U_0, U_1, ...
        factors = last.new_ones(1, last.shape[1])
        products = []
        for k, rows in enumerate((*down, last)):
            products.append((rows[:, None] * factors).flatten(0, 1))
            if k < len(up):
                factors = torch.cat([factors[:1] + bias[k], factors[1:], up[k]])
        return linear(values, torch.cat(products), None)
