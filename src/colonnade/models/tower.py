"""An MLP whose first layer is in two parts: of the fields, which may be evaluated where they lie, and of the dense
columns, which lie with the samples.

Legend: B samples, n dense columns, H width of the first layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from colonnade.interaction import FieldsLinear
from colonnade.models.linear_term import LinearTerm
from colonnade.models.mlp import mlp


class Tower(nn.Module):
    """All of it but the fields' part. The function and the first values of `mlp([n + sum of dims, *widths])`."""

    def __init__(self, num_dense: int, dims: Iterable[int], widths: Sequence[int]) -> None:
        """widths: of all layers, H first; no ReLU after the last. dims: of the fields."""
        super().__init__()
        self.columns = LinearTerm(num_dense, widths[0], fan_in=max(1, num_dense + sum(dims)))
        self.has_relu = len(widths) > 1
        self.top = mlp(widths)

    def forward(self, first: Tensor, dense: Tensor) -> Tensor:
        """first (B, H): what `first_layer` gave; dense (B, n) -> (B, widths[-1])."""
        hidden = first + self.columns(dense)
        return self.top(hidden.relu() if self.has_relu else hidden)


def first_layer(num_dense: int, dims: Iterable[int], out: int) -> FieldsLinear:
    """The fields' part: a consumer of them."""
    dims = tuple(dims)
    return FieldsLinear(dims, out, fan_in=max(1, num_dense + sum(dims)))
