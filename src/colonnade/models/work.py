"""What a dense network costs: weights, and products of a sample. Pure functions of widths.

A product is one multiplication and addition; of rows nothing is counted, for they are gathered, not multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FLOPS_PER_PRODUCT = 6
"""Of training: a multiplication and an addition forward, and twice that backward."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of layers, which add up."""

    products: int = 0
    parameters: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.parameters + other.parameters)

    @property
    def flops(self) -> int:
        """Of a sample, forward and backward."""
        return FLOPS_PER_PRODUCT * self.products


def linear(inputs: int, outputs: int, *, times: int = 1, bias: bool = True) -> Work:
    """One layer, used `times` times for a sample."""
    return Work(times * inputs * outputs, inputs * outputs + outputs * bias)


def mlp(widths: Sequence[int]) -> Work:
    return sum((linear(a, b) for a, b in pairwise(widths)), Work())


def dots(vectors: int, dim: int) -> Work:
    """Of all pairs, as the whole matrix of them is counted in the literature."""
    return Work(vectors * vectors * dim)


def cross(width: int, *, layers: int = 1, rank: int | None = None, experts: int = 1) -> Work:
    """Cross layers of DCN-v2: a matrix each, whole or of a rank, or a mixture of such."""
    if rank is None:
        one = linear(width, width)
    elif experts == 1:
        one = linear(width, rank, bias=False) + linear(rank, width)
    else:
        inner = experts * (2 * width * rank + rank * rank) + width * experts
        one = Work(inner, inner + width)
    return Work(layers * one.products, layers * one.parameters)


def dlrm_tower(
    fields: int, dim: int, out_dim: int, *, vectors: int = 1, summaries: int = 0
) -> Work:
    """`models.tower_modules.DLRMTower`."""
    each = linear(dim, vectors * out_dim, times=fields) if vectors else Work()
    return each + (linear(fields * dim, summaries * out_dim) if summaries else Work())


def dcn_tower(
    dims: Sequence[int], out_dim: int, *, layers: int = 1, rank: int | None = None
) -> Work:
    """`models.tower_modules.DCNTower`."""
    width = sum(dims)
    return cross(width, layers=layers, rank=rank) + linear(width, len(dims) * out_dim)


def dlrm(
    num_dense: int,
    vectors: int,
    dim: int,
    *,
    bottom: Sequence[int],
    top: Sequence[int],
    kept: int = 1,
    tasks: int = 1,
) -> Work:
    """All but towers. vectors: that meet in dots, the bottom MLP's with them; kept: of these, that the top MLP sees."""
    below = mlp([num_dense, *bottom, dim]) if num_dense else Work()
    above = mlp([kept * dim + vectors * (vectors - 1) // 2, *top, tasks])
    return below + dots(vectors, dim) + above
