"""Cost of dense networks, from their widths: parameters, and products per sample.

A product is one multiplication and addition. Rows are not counted: they are gathered, not multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FLOPS_PER_PRODUCT = 6
"""Floating-point operations per product in training: a multiplication and an addition forward, twice that backward."""


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Cost of dense layers. Costs of several layers add up."""

    products: int = 0
    parameters: int = 0

    def __add__(self, other: DenseCost) -> DenseCost:
        return DenseCost(self.products + other.products, self.parameters + other.parameters)

    @property
    def flops(self) -> int:
        """Floating-point operations per sample, forward and backward."""
        return FLOPS_PER_PRODUCT * self.products


def linear_cost(inputs: int, outputs: int, *, times: int = 1, bias: bool = True) -> DenseCost:
    """Return the cost of one linear layer that is used `times` times per sample."""
    return DenseCost(times * inputs * outputs, inputs * outputs + outputs * bias)


def mlp_cost(widths: Sequence[int]) -> DenseCost:
    """Return the cost of an MLP with these layer widths."""
    return sum((linear_cost(a, b) for a, b in pairwise(widths)), DenseCost())


def dots_cost(vectors: int, dim: int) -> DenseCost:
    """Return the cost of the dots of all pairs of vectors, counted as the full matrix, as the literature does."""
    return DenseCost(vectors * vectors * dim)


def cross_layers_cost(
    width: int, *, layers: int = 1, rank: int | None = None, experts: int = 1
) -> DenseCost:
    """Return the cost of cross layers of DCN-v2: full matrices, matrices of `rank`, or a mixture of `experts`."""
    if rank is None:
        one = linear_cost(width, width)
    elif experts == 1:
        one = linear_cost(width, rank, bias=False) + linear_cost(rank, width)
    else:
        inner = experts * (2 * width * rank + rank * rank) + width * experts
        one = DenseCost(inner, inner + width)
    return DenseCost(layers * one.products, layers * one.parameters)


def dlrm_tower_cost(
    fields: int, dim: int, out_dim: int, *, vectors: int = 1, summaries: int = 0
) -> DenseCost:
    """Return the cost of a `models.tower_modules.DLRMTower`."""
    per_field = linear_cost(dim, vectors * out_dim, times=fields) if vectors else DenseCost()
    return per_field + (
        linear_cost(fields * dim, summaries * out_dim) if summaries else DenseCost()
    )


def dcn_tower_cost(
    dims: Sequence[int], out_dim: int, *, layers: int = 1, rank: int | None = None
) -> DenseCost:
    """Return the cost of a `models.tower_modules.DCNTower`."""
    width = sum(dims)
    return cross_layers_cost(width, layers=layers, rank=rank) + linear_cost(
        width, len(dims) * out_dim
    )


def dlrm_cost(
    num_dense: int,
    vectors: int,
    dim: int,
    *,
    bottom: Sequence[int],
    top: Sequence[int],
    top_vectors: int = 1,
    tasks: int = 1,
) -> DenseCost:
    """Return the cost of a DLRM without its towers.

    vectors: number of vectors in the dots, including the bottom MLP's. top_vectors: how many of them are themselves
    inputs of the top MLP.
    """
    bottom_cost = mlp_cost([num_dense, *bottom, dim]) if num_dense else DenseCost()
    top_cost = mlp_cost([top_vectors * dim + vectors * (vectors - 1) // 2, *top, tasks])
    return bottom_cost + dots_cost(vectors, dim) + top_cost
