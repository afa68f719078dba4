"""The twins themselves: known answers, and torch's own operators where it has them."""

import torch
from references import plan_reference
from torch.nn import functional

from colonnade.ops import reference


def unsigned(words):
    return [word % 2**64 for word in words.tolist()]


def test_mix64_is_splitmix64():
    """The first outputs of the splitmix64 generator seeded with 0 (Vigna's splitmix64.c)."""
    states = torch.arange(1, 4) * reference._word(reference.GOLDEN)
    assert unsigned(reference.mix64(states)) == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert unsigned(reference.mix64(torch.tensor([0]))) == [0]


def test_birth_is_the_splitmix64_stream():
    word = unsigned(reference.mix64(torch.tensor([reference._word(reference.GOLDEN)])))[0]
    first = reference.initial_values(torch.tensor([0]), 1, 0, 2.0, torch.float64)
    assert first.item() == 2.0 * (2 * (word >> 11) / 2**53 - 1)
    first = reference.initial_values(torch.tensor([0]), 1, 0, 2.0, torch.float32)
    assert first.item() == 2.0 * (2 * (word >> 40) / 2**24 - 1)


def test_owner_of_one_rank_is_zero():
    ids = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    assert plan_reference.owner_of(ids, 0, 1).tolist() == [0] * 5
    assert plan_reference.owner_of(torch.tensor([0, 5, 9]), 10, 1).tolist() == [0] * 3


def test_plan_by_hand():
    plan = plan_reference.make_plan(
        torch.tensor([4, 2, 4, 9, 2, 4]), [0, 3, 4, 6], [1, 0, 1], [10, 5], [1, 1]
    )
    assert plan.unique_ids.tolist() == [9, 2, 4]
    assert plan.block_offsets.tolist() == [0, 1, 3]
    assert plan.inverse.tolist() == [2, 1, 2, 0, 1, 2]
    assert plan.segment_offsets.tolist() == [0, 1, 3, 6]
    assert plan.entries.tolist() == [3, 1, 4, 0, 2, 5]


def test_pool_is_embedding_bag():
    """Values and gradients, against torch.nn.functional.embedding_bag in float64."""
    table = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 20, (30,))
    offsets = torch.tensor([0, 0, 5, 6, 29, 30])
    weights = torch.rand(30, dtype=torch.float64)
    for pooling, factors in (("sum", None), ("mean", None), ("sum", weights)):
        wanted = functional.embedding_bag(
            ids, table, offsets[:-1], mode=pooling, per_sample_weights=factors
        )
        pooled = reference.pool(table.detach()[ids], offsets, pooling, factors)
        torch.testing.assert_close(pooled, wanted)
        gradients = torch.randn(5, 3, dtype=torch.float64)
        (dense,) = torch.autograd.grad(wanted, table, gradients)
        terms = reference.lookup_gradients(gradients, offsets, pooling, factors)
        plan = plan_reference.make_plan(ids, [0, 30], [0], [20], [1])
        sums = reference.sum_rows(terms, plan.segment_offsets, plan.entries)
        torch.testing.assert_close(sums, dense[plan.unique_ids])


def test_sqrtn_by_hand():
    """Four rows over sqrt(4), and their gradients; in bfloat16 the sum is rounded once, at the end."""
    rows, offsets = torch.tensor([[1.0], [2.0], [3.0], [8.0]]), torch.tensor([0, 0, 4])
    assert reference.pool(rows, offsets, "sqrtn").tolist() == [[0.0], [7.0]]
    gradients = torch.tensor([[5.0], [3.0]])
    terms = reference.lookup_gradients(gradients, offsets, "sqrtn", torch.arange(4.0))
    assert terms.tolist() == [[0.0], [1.5], [3.0], [4.5]]
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    pooled = reference.pool(rows, torch.tensor([0, 3]), "sum", dtype=torch.bfloat16)
    assert pooled.item() == 258.0


def test_sequence_is_a_weighted_gather():
    rows, weights = torch.randn(4, 3), torch.rand(4)
    assert reference.pool(rows, torch.tensor([0, 4]), "sequence") is rows
    weighted = reference.pool(rows, torch.tensor([0, 4]), "sequence", weights)
    assert torch.equal(weighted, rows * weights[:, None])


def test_ordered_sum_keeps_its_order():
    """1e8 + 1 - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1."""
    terms = torch.tensor([[1e8], [1.0], [-1e8], [1e8], [-1e8], [1.0]])
    assert reference.ordered_sum(terms, torch.tensor([0, 3, 3, 6])).tolist() == [
        [0.0],
        [0.0],
        [1.0],
    ]


def test_record_layout():
    records = reference.pack(
        torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5]]), torch.tensor([0x0102030405060708])
    )
    assert bytes(records[0].tolist()).hex() == "0000803f000000c00000003f0807060504030201"
