"""The conformance suite of `Interaction`: a subclass says how to make one and what it must equal.

F(x; W) = combine(merge over shards of partial(shard)): however the vectors are dealt to shards.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from colonnade.interaction import Interaction

# One suite, several subclasses: that is what `differing_executors` sees.
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)
SHAPES = st.tuples(st.integers(0, 7), st.integers(1, 6), st.integers(1, 9))  # B, F, D


class InteractionContract:
    def make(self) -> Interaction:
        raise NotImplementedError

    def expected(self, fields: Tensor) -> Tensor:
        """The ordinary operator on pooled fields (B, F, D), written another way."""
        raise NotImplementedError

    @SETTINGS
    @given(shape=SHAPES, seed=st.integers(0, 10**6))
    def test_one_shard_is_the_operator(self, shape, seed):
        interaction, fields = self.make(), random_fields(shape, seed)
        result, wanted = evaluate(interaction, fields), self.expected(fields)
        if shape[0] == 0 and interaction.width(shape[2]) is None:
            assert len(result) == 0  # nothing says how wide no values are
            return
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(interaction(fields), wanted)

    @SETTINGS
    @given(shape=SHAPES, seed=st.integers(0, 10**6), num_shards=st.integers(1, 4))
    def test_any_dealing_of_fields_merges_to_the_operator(self, shape, seed, num_shards):
        interaction = self.make()
        if interaction.width(shape[2]) is None:
            pytest.skip("values must travel: there is no partial to merge")
        assert interaction.merge == "sum"
        fields = random_fields(shape, seed)
        num_samples, num_fields, dim = fields.shape
        owner = torch.randint(0, num_shards, (num_fields,))
        merged = torch.zeros(num_samples, interaction.width(dim), dtype=fields.dtype)
        for shard in range(num_shards):
            own = fields[:, owner == shard]
            samples = torch.arange(num_samples).repeat_interleave(own.shape[1])
            merged += interaction.partial(own.reshape(-1, dim), samples, num_samples)
        torch.testing.assert_close(interaction.combine(merged), self.expected(fields))

    def test_gradients(self):
        fields = random_fields((3, 4, 2), 1).requires_grad_(True)
        assert torch.autograd.gradcheck(lambda x: evaluate(self.make(), x), fields)
        assert torch.autograd.gradcheck(self.make(), fields)

    def test_weights_scale_the_vectors(self):
        interaction, fields = self.make(), random_fields((4, 3, 5), 2)
        weights = torch.rand(4 * 3, dtype=fields.dtype)
        samples = torch.arange(4).repeat_interleave(3)
        weighted = interaction.partial(fields.reshape(-1, 5), samples, 4, weights)
        scaled = interaction.partial(fields.reshape(-1, 5) * weights[:, None], samples, 4)
        torch.testing.assert_close(weighted, scaled)


def random_fields(shape, seed) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def evaluate(interaction: Interaction, fields: Tensor) -> Tensor:
    num_samples, num_fields, dim = fields.shape
    samples = torch.arange(num_samples).repeat_interleave(num_fields)
    partial = interaction.partial(fields.reshape(-1, dim), samples, num_samples)
    return interaction.combine(partial)
