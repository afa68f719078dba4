"""make_plan, owner_of, take: against their twins, and what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import LIMITS, batches, everywhere, running_on, unmix64

from colonnade import _native
from colonnade.ops import reference


def one_hot(ids, *, tables=(0,)):
    """Every feature has the same number of lookups."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    batch_size = len(ids) // max(1, len(tables))
    return _native.Lookups(
        ids,
        torch.arange(len(tables) + 1) * batch_size,
        torch.tensor(tables, dtype=torch.int32),
        torch.zeros(len(tables), dtype=torch.uint8),
        batch_size,
        None,
        None,
    )


@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from([1, 2, 5]))
def test_equals_twin(batch, num_ranks):
    wanted = reference.make_plan(
        batch.ids, batch.feature_offsets, batch.feature_tables, batch.table_rows, num_ranks
    )
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            plan = batch.plan(num_ranks)
        for name in reference.Plan._fields:
            assert torch.equal(getattr(plan, name), getattr(wanted, name)), name
        assert plan.num_unique == len(wanted.unique_ids)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("rows", [0, 1, 2, 1000, 2**62])
def test_owner_equals_twin(rows, num_ranks):
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**63), 2**63 - 1, size=500)
    if rows:
        ids = np.abs(ids // 2) % rows
    ids = torch.from_numpy(np.concatenate([ids, [0] if rows else LIMITS]))
    owners = _native.owner_of(ids, rows, num_ranks)
    assert torch.equal(owners, reference.owner_of(ids, rows, num_ranks))
    assert 0 <= int(owners.min()) and int(owners.max()) < num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_vocabulary_is_dealt_without_gaps(num_ranks):
    """Each rank's local row numbers id // num_ranks are distinct, and shares differ by at most one."""
    rows = 1001
    ids = torch.arange(rows)
    owners = _native.owner_of(ids, rows, num_ranks)
    for rank in range(num_ranks):
        local = (ids // num_ranks)[owners == rank]
        assert len(local.unique()) == len(local)
        assert rows // num_ranks <= len(local) <= rows // num_ranks + 1


def test_ids_with_one_hash_prefix_are_told_apart():
    """600 ids whose hashes agree in their first 50 bits, each looked up three times."""
    ids = [unmix64(0x123456789ABC << 16 | low) for low in range(600)]
    rng = np.random.default_rng(1)
    lookups = rng.permutation(ids * 3)
    plan = _native.make_plan(one_hot(lookups), torch.tensor([0]), 1)
    assert plan.unique_ids.tolist() == ids  # ascending hash
    assert plan.segment_offsets.tolist() == list(range(0, 1801, 3))
    assert (plan.entries.view(-1, 3).diff() > 0).all()
    assert torch.equal(plan.unique_ids[plan.inverse.long()], torch.from_numpy(lookups))


def test_nothing_to_plan():
    plan = _native.make_plan(one_hot([], tables=()), torch.tensor([], dtype=torch.int64), 3)
    assert plan.num_unique == 0 and plan.block_offsets.tolist() == [0]
    plan = _native.make_plan(one_hot([], tables=(1, 1)), torch.tensor([5, 0]), 2)
    assert plan.block_offsets.tolist() == [0] * 5 and plan.segment_offsets.tolist() == [0]


def test_arrays_outlive_the_plan():
    entries = _native.make_plan(one_hot([3, 1, 3]), torch.tensor([5]), 1).entries
    _native.make_plan(one_hot([0, 0, 0]), torch.tensor([5]), 1)  # would reuse freed memory
    assert entries.tolist() == [1, 0, 2]


@pytest.mark.parametrize("bad", [-1, 10, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_id_outside_its_vocabulary(bad, num_ranks):
    ids = [1, 2, 3, 4, 5, 6, bad, bad]
    with pytest.raises(IndexError, match=rf"^table 1 feature 1 position 2 id {bad} rows 10$"):
        _native.make_plan(one_hot(ids, tables=(0, 1)), torch.tensor([0, 10]), num_ranks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_offsets": [0, 3, 2, 6]}, "feature_offsets decrease at feature 1: 3 -> 2"),
        ({"feature_offsets": [1, 2, 4, 6]}, "starts at 1"),
        ({"feature_offsets": [0, 2, 4, 5]}, "end at 5 but there are 6 ids"),
        ({"feature_offsets": [0, 2, 6]}, "3 elements, wanted 4"),
        ({"feature_tables": [0, -1, 0]}, "feature 1 names table -1"),
        ({"poolings": [0, 3, 0]}, "feature 1 has pooling 3"),
        ({"batch_size": 3}, "feature 0 has 2 lookups for 3 samples"),
        ({"bag_offsets": [0, 1, 2, 3, 4, 6]}, "bag_offsets has 6 elements, wanted 7"),
        ({"bag_offsets": [0, 1, 2, 5, 4, 5, 6]}, "decrease at feature 1 sample 1: 5 -> 4"),
        ({"bag_offsets": [0, 1, 3, 4, 4, 5, 6]}, "feature 0 has lookups 0 .. 2"),
        ({"bag_offsets": [0, 1, 2, 3, 4, 5, 2**62]}, "feature 2 has lookups 4 .. 6"),
        ({"weights": torch.ones(5)}, "weights has 5 elements, wanted 6"),
        ({"weights": torch.ones(6, dtype=torch.int32)}, "weights: got int32"),
        ({"ids": torch.arange(6).int()}, r"ids: got int32 \(6\), wanted contiguous CPU int64"),
        ({"ids": torch.arange(12)[::2]}, "wanted contiguous"),
        ({"ids": torch.arange(6).view(2, 3)}, r"ids: got int64 \(2, 3\)"),
    ],
)
def test_lookups_that_cannot_be(change, message):
    arguments = {
        "ids": torch.arange(6),
        "feature_offsets": [0, 2, 4, 6],
        "feature_tables": [0, 1, 0],
        "poolings": [0, 0, 0],
        "batch_size": 2,
        "bag_offsets": None,
        "weights": None,
        **change,
    }
    dtypes = {"feature_tables": torch.int32, "poolings": torch.uint8}
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = torch.tensor(value, dtype=dtypes.get(name, torch.int64))
    with pytest.raises(ValueError, match=message):
        _native.Lookups(**arguments)


def test_plan_that_cannot_be():
    with pytest.raises(ValueError, match="num_ranks: got 0"):
        _native.make_plan(one_hot([1]), torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="feature 0 names table 2 of 2"):
        _native.make_plan(one_hot([1], tables=(2,)), torch.tensor([0, 0]), 1)
    with pytest.raises(ValueError, match="got -4 for table 1"):
        _native.make_plan(one_hot([1]), torch.tensor([0, -4]), 1)


def test_take():
    values = torch.arange(10, dtype=torch.int32) * 7
    index = torch.randint(0, 10, (100_003,), dtype=torch.int32)
    out = torch.empty_like(index)
    _native.take(values, index, out)
    assert torch.equal(out, reference.take(values, index))
    for bad in (-1, 10):
        index[77_777] = bad
        with pytest.raises(IndexError, match="outside"):
            _native.take(values, index, out)
