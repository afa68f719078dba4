from __future__ import annotations

import pytest
import torch
from interaction import InteractionContract

from colonnade import (
    FM,
    Batch,
    BiInteraction,
    Concat,
    EmbeddingCollection,
    Feature,
    FieldsLinear,
    Ids,
    LowRankCross,
    NormalizedLinear,
    Sum,
    Table,
)
from colonnade.errors import ConfigError, DataError
from colonnade.lookup.layout import declare


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
    "cross": lambda dims: LowRankCross(dims, 2, 3, 3),
    "cross, one layer": lambda dims: LowRankCross(dims, 3, 1, 3),
}


def plain(interaction, fields):
    """The operator with the same weights, as torch has it. fields (B, W): behind dense columns, where it takes some."""
    if isinstance(interaction, FieldsLinear):
        return fields @ interaction.weight.T
    if isinstance(interaction, LowRankCross):
        x = fields
        layers = zip(interaction.down, interaction.up, interaction.bias, strict=True)
        for down, up, bias in layers:
            x = fields * (x @ down.T @ up + bias) + x
        return x @ interaction.last.T
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
    gradient = torch.randn(size, 3, dtype=torch.float64)
    weights = [fields, *interaction.parameters()]
    wanted = plain(interaction, fields)
    gradients = torch.autograd.grad(wanted, weights, gradient)
    parts = fields.split(dims, dim=1)
    for shards in ([[0, 1, 2, 3, 4]], [[1, 3], [], [0, 2, 4]]):
        result = interaction.combine(
            sum(
                interaction.partial_of_fields(
                    torch.cat([fields[:, :0], *(parts[n] for n in shard)], 1), shard
                )
                for shard in shards
            )
        )
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(torch.autograd.grad(result, weights, gradient), gradients)
    torch.testing.assert_close(interaction(fields), wanted)
    vectors = torch.randn(size * 2, 4, dtype=torch.float64)  # of one width, sample by sample
    needs_equal_dims = WEIGHTED[kind]((4, 4)).double()
    samples = torch.arange(size).repeat_interleave(2)
    result = needs_equal_dims.combine(
        needs_equal_dims.partial(vectors, samples, size, torch.full((size * 2,), 2.0))
    )
    torch.testing.assert_close(result, plain(needs_equal_dims, 2 * vectors.view(size, 8)))


@pytest.mark.parametrize(
    ("rank", "layers", "out"), [(1, 1, 1), (2, 2, 4), (3, 4, 1), (4, 3, 2), (2, 0, 3)]
)
def test_cross_layers_over_dense_columns_and_fields(rank, layers, out):
    """Dense columns stay with the samples; gradients of all; as many floats as its width says."""
    torch.manual_seed(rank)
    dims, size = (2, 1, 3), 5
    interaction = LowRankCross(dims, rank, layers, out, num_dense=2).double()
    fields, dense = torch.randn(2, size, 6, dtype=torch.float64)
    fields, dense = fields.requires_grad_(True), dense[:, :2].clone().requires_grad_(True)
    weights = [fields, dense, *interaction.parameters()]
    gradient = torch.randn(size, out, dtype=torch.float64)
    wanted = plain(interaction, torch.cat([dense, fields], 1))
    gradients = torch.autograd.grad(wanted, weights, gradient, materialize_grads=True)
    parts = fields.split(dims, dim=1)
    partials = [
        interaction.partial_of_fields(torch.cat([parts[n] for n in several], 1), several)
        for several in ([1], [0, 2])
    ]
    assert all(partial.shape == (size, interaction.width(max(dims))) for partial in partials)
    for result in (interaction.combine(sum(partials), dense), interaction(fields, dense)):
        torch.testing.assert_close(result, wanted)
        own = torch.autograd.grad(result, weights, gradient, materialize_grads=True)
        torch.testing.assert_close(own, gradients)


def test_rows_of_a_bag_are_enough():
    """Statistics are linear: those of a bag's rows add up to those of their sum."""
    interaction = LowRankCross((2, 3), 2, 3, 1).double()
    assert not interaction.needs_pooled_fields()
    fields = torch.randn(3, 4, 5, dtype=torch.float64)  # three shards' parts of four samples' sums
    result = interaction.combine(sum(interaction.partial_of_fields(item) for item in fields))
    torch.testing.assert_close(result, plain(interaction, fields.sum(0)))


def test_first_values_are_those_of_linear_layers():
    torch.manual_seed(1)
    cross = LowRankCross((40, 50), 4, 2, 3, num_dense=10, fan_in=400)
    for weight, fan_in in ((cross.down, 100), (cross.up, 4), (cross.bias, 4), (cross.last, 400)):
        assert 0.9 * fan_in**-0.5 < weight.abs().max() <= fan_in**-0.5


def test_dense_columns_of_another_number_are_refused():
    tables, features = [Table("a", 3, rows=5)], [Feature("a", "a")]
    cross = LowRankCross((3,), 2, 1, 1, num_dense=2)
    collection = EmbeddingCollection(tables, features, consumers={"cross": (cross, ["a"])})
    ids = {"a": Ids(torch.tensor([0, 4]))}
    assert collection(Batch(2, torch.ones(2, 2), ids))["cross"].shape == (2, 1)
    with pytest.raises(DataError, match=r"'cross' takes 2 dense columns.*got dense \(2, 3\)"):
        collection(Batch(2, torch.ones(2, 3), ids))


def test_fields_of_other_dims_are_refused():
    tables = [Table("a", 3, rows=5), Table("b", 2, rows=5)]
    features = [Feature("a", "a"), Feature("b", "b")]
    with pytest.raises(
        ConfigError, match=r"consumer 'first' takes fields of dims \[2, 3\].*\[3, 2\]"
    ):
        declare(tables, features, {"first": (FieldsLinear((3, 2), 4), ("b", "a"))})
