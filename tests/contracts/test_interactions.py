from __future__ import annotations

import pytest
import torch
from interaction import InteractionContract

from colonnade import (
    FM,
    BiInteraction,
    Concat,
    Feature,
    FieldsLinear,
    NormalizedLinear,
    Sum,
    Table,
)
from colonnade.errors import ConfigError
from colonnade.exchange.layout import declare


class TestFM(InteractionContract):
    def make(self):
        return FM()

    def expected(self, fields):
        total = torch.zeros(len(fields), 1, dtype=fields.dtype)
        for i in range(fields.shape[1]):
            for j in range(i):
                total += (fields[:, i] * fields[:, j]).sum(1, keepdim=True)
        return total


class TestConcat(InteractionContract):
    def make(self):
        return Concat()

    def expected(self, fields):
        return torch.cat([fields[:, f] for f in range(fields.shape[1])], 1)


class TestSum(InteractionContract):
    def make(self):
        return Sum()

    def expected(self, fields):
        return sum(fields.unbind(1))


class TestBiInteraction(InteractionContract):
    def make(self):
        return BiInteraction()

    def expected(self, fields):
        total = torch.zeros(len(fields), fields.shape[2], dtype=fields.dtype)
        for i in range(fields.shape[1]):
            for j in range(i):
                total += fields[:, i] * fields[:, j]
        return total


WEIGHTED = {
    "linear": lambda dims: FieldsLinear(dims, 3),
    "normalized": lambda dims: NormalizedLinear(dims, 3),
}


def plain(interaction, fields):
    """The operator with the same weights, as torch has it."""
    if isinstance(interaction, FieldsLinear):
        return fields @ interaction.weight.T
    norm = torch.nn.LayerNorm(fields.shape[1], eps=interaction.eps, dtype=fields.dtype)
    norm.weight, norm.bias = interaction.scale, interaction.shift
    return norm(fields) @ interaction.weight.T + interaction.bias


@pytest.mark.parametrize("kind", WEIGHTED)
@pytest.mark.parametrize("size", [0, 1, 9])
def test_operators_with_weights_however_fields_are_dealt(kind, size):
    torch.manual_seed(size)
    dims = (3, 1, 4, 1, 5)
    interaction = WEIGHTED[kind](dims).double()
    with torch.no_grad():
        for weight in interaction.parameters():
            weight.add_(torch.randn_like(weight))
    fields = torch.randn(size, sum(dims), dtype=torch.float64, requires_grad=True)
    given = torch.randn(size, 3, dtype=torch.float64)
    weights = [fields, *interaction.parameters()]
    wanted = plain(interaction, fields)
    gradients = torch.autograd.grad(wanted, weights, given)
    parts = fields.split(dims, dim=1)
    for shards in ([[0, 1, 2, 3, 4]], [[1, 3], [], [0, 2, 4]]):
        found = interaction.combine(
            sum(
                interaction.partial_of(
                    torch.cat([fields[:, :0], *(parts[n] for n in shard)], 1), shard
                )
                for shard in shards
            )
        )
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, weights, given), gradients)
    torch.testing.assert_close(interaction(fields), wanted)
    vectors = torch.randn(size * 2, 4, dtype=torch.float64)  # of one width, sample by sample
    one_width = WEIGHTED[kind]((4, 4)).double()
    samples = torch.arange(size).repeat_interleave(2)
    found = one_width.combine(
        one_width.partial(vectors, samples, size, torch.full((size * 2,), 2.0))
    )
    torch.testing.assert_close(found, plain(one_width, 2 * vectors.view(size, 8)))


def test_fields_of_other_dims_are_refused():
    tables = [Table("a", 3, rows=5), Table("b", 2, rows=5)]
    features = [Feature("a", "a"), Feature("b", "b")]
    with pytest.raises(
        ConfigError, match=r"consumer 'first' takes fields of dims \[2, 3\].*\[3, 2\]"
    ):
        declare(tables, features, {"first": (FieldsLinear((3, 2), 4), ("b", "a"))})
