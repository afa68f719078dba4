"""make_plan, owner_of, take: against their twins, and what they refuse."""

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import LIMITS, batches, everywhere, running_on, unmix64
from references import plan_reference

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


@settings(max_examples=examples(25, 80), deadline=None)
@given(batches(), st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=4))
def test_equals_twin(batch, pattern):
    """Tables dealt to any numbers of owners, side by side."""
    wanted = plan_reference.make_plan(
        batch.ids,
        batch.feature_offsets,
        batch.feature_tables,
        batch.table_rows,
        batch.owners(pattern),
    )
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            plan = batch.plan(pattern)
        for name in plan_reference.LookupGroups._fields:
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
    assert torch.equal(owners, plan_reference.owner_of(ids, rows, num_ranks))
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
    plan = _native.make_plan(one_hot(lookups), torch.tensor([0]), torch.tensor([1]))
    assert plan.unique_ids.tolist() == ids  # ascending hash
    assert plan.segment_offsets.tolist() == list(range(0, 1801, 3))
    assert (plan.entries.view(-1, 3).diff() > 0).all()
    assert torch.equal(plan.unique_ids[plan.inverse.long()], torch.from_numpy(lookups))


SHARED = 40_000  # lookups of one table, more than those from which threads share a table


def grouped(ids, feature_offsets, feature_tables, table_rows, num_owners):
    """plan_reference.make_plan by sorting arrays: for batches too large for its loops."""
    ids, start = np.asarray(ids), 0
    unique, counts, entries, lengths = [], [0], [], []
    inverse = np.empty(len(ids), np.int32)
    for t, (rows, dealt_to) in enumerate(zip(table_rows, num_owners, strict=True)):
        features = [f for f in range(len(feature_tables)) if feature_tables[f] == t]
        lookups = [np.arange(feature_offsets[f], feature_offsets[f + 1]) for f in features]
        lookups = np.concatenate([np.empty(0, np.int64), *lookups])
        own, which = np.unique(ids[lookups], return_inverse=True)
        owners = plan_reference.owner_of(torch.from_numpy(own), rows, dealt_to).numpy()
        hashes = reference.mix64(torch.from_numpy(own)).numpy().view(np.uint64)
        order = np.lexsort((own // dealt_to if rows else hashes, owners))
        row = np.argsort(order)[which]
        inverse[lookups] = start + row
        start += len(own)
        unique.append(own[order])
        counts += np.bincount(owners, minlength=dealt_to).tolist()
        entries.append(lookups[np.argsort(row, kind="stable")])
        lengths.append(np.bincount(row, minlength=len(own)))
    return plan_reference.LookupGroups(
        torch.from_numpy(np.concatenate(unique)),
        torch.tensor(counts).cumsum(0),
        torch.from_numpy(inverse),
        torch.from_numpy(np.concatenate([[0], *lengths]).cumsum().astype(np.int32)),
        torch.from_numpy(np.concatenate(entries).astype(np.int32)),
    )


@settings(max_examples=examples(20, 40), deadline=None)
@given(
    table_rows=st.lists(st.sampled_from([0, 1, 1000, 10**6, 2**40, 2**62]), min_size=1, max_size=3),
    sizes=st.lists(st.sampled_from([0, 1, 31, 33, 700, SHARED, 2 * SHARED]), min_size=1, max_size=5),
    hot=st.sampled_from([0, 0.3, 1]),
    spread=st.sampled_from([1, 2**20, 2**60]),
    owners=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_tables_that_threads_share(table_rows, sizes, hot, spread, owners, seed):
    """Any sizes of tables, one hot row among them, with several features in any order."""
    rng, owners = np.random.default_rng(seed), owners[: len(table_rows)]
    feature_tables = rng.integers(0, len(table_rows), size=len(sizes)).tolist()
    ids = []
    for t, size in zip(feature_tables, sizes, strict=True):
        drawn = rng.integers(-(2**63), 2**63 - 1, size=size)
        drawn = np.abs(drawn // 2) % table_rows[t] if table_rows[t] else drawn // spread
        ids.append(np.where(rng.random(size) < hot, 0, drawn))
    ids = np.concatenate(ids)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    wanted = grouped(ids, offsets, feature_tables, table_rows, owners)
    lookups = _native.Lookups(
        torch.from_numpy(ids),
        torch.from_numpy(offsets),
        torch.tensor(feature_tables, dtype=torch.int32),
        torch.full((len(sizes),), 2, dtype=torch.uint8),
        0,
        None,
        None,
    )
    for num_threads in (1, 2, 3):
        with running_on(_native.isa(), num_threads):
            plan = _native.make_plan(lookups, torch.tensor(table_rows), torch.tensor(owners))
        for name in plan_reference.LookupGroups._fields:
            assert torch.equal(getattr(plan, name), getattr(wanted, name)), name


@settings(max_examples=30, deadline=None)
@given(batches(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_grouped_equals_twin(batch, pattern):
    arguments = batch.feature_offsets, batch.feature_tables, batch.table_rows, batch.owners(pattern)
    quick = grouped(batch.ids, *arguments)
    for name, wanted in plan_reference.make_plan(batch.ids, *arguments)._asdict().items():
        assert torch.equal(getattr(quick, name), wanted), name


def test_shared_tables_ids_with_one_hash_prefix_are_told_apart():
    """Same as above, with runs that cross the threads' parts of the table, beside ids of any hash."""
    ids = [unmix64(0x123456789ABC << 16 | low) for low in range(2 * SHARED)]
    lookups = np.random.default_rng(1).permutation(ids + list(range(100)))
    wanted = grouped(lookups, [0, len(lookups)], [0], [0], [3])
    for num_threads in (1, 2, 3):
        with running_on(_native.isa(), num_threads):
            plan = _native.make_plan(one_hot(lookups), torch.tensor([0]), torch.tensor([3]))
        for name in plan_reference.LookupGroups._fields:
            assert torch.equal(getattr(plan, name), getattr(wanted, name)), name


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_id_outside_a_shared_vocabulary(num_threads):
    ids = np.zeros(2 * SHARED, np.int64)
    ids[SHARED + 7] = ids[-1] = 10
    with running_on(_native.isa(), num_threads):
        with pytest.raises(IndexError, match=r"^table 0 feature 1 position 7 id 10 rows 10$"):
            _native.make_plan(one_hot(ids, tables=(0, 0)), torch.tensor([10]), torch.tensor([2]))
        with pytest.raises(IndexError, match=r"^table 1 feature 1 position 7 id 10 rows 10$"):
            _native.make_plan(
                one_hot(ids, tables=(0, 1)), torch.tensor([10, 10]), torch.tensor([1, 1])
            )


def test_nothing_to_plan():
    none = torch.tensor([], dtype=torch.int64)
    plan = _native.make_plan(one_hot([], tables=()), none, none)
    assert plan.num_unique == 0 and plan.block_offsets.tolist() == [0]
    plan = _native.make_plan(one_hot([], tables=(1, 1)), torch.tensor([5, 0]), torch.tensor([3, 1]))
    assert plan.block_offsets.tolist() == [0] * 5 and plan.segment_offsets.tolist() == [0]


def test_arrays_outlive_the_plan():
    entries = _native.make_plan(one_hot([3, 1, 3]), torch.tensor([5]), torch.tensor([1])).entries
    _native.make_plan(
        one_hot([0, 0, 0]), torch.tensor([5]), torch.tensor([1])
    )  # would reuse freed memory
    assert entries.tolist() == [1, 0, 2]


@pytest.mark.parametrize("bad", [-1, 10, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_id_outside_its_vocabulary(bad, num_ranks):
    ids = [1, 2, 3, 4, 5, 6, bad, bad]
    with pytest.raises(IndexError, match=rf"^table 1 feature 1 position 2 id {bad} rows 10$"):
        _native.make_plan(
            one_hot(ids, tables=(0, 1)), torch.tensor([0, 10]), torch.tensor([2, num_ranks])
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_offsets": [0, 3, 2, 6]}, "feature_offsets decrease at feature 1: 3 -> 2"),
        ({"feature_offsets": [1, 2, 4, 6]}, "starts at 1"),
        ({"feature_offsets": [0, 2, 4, 5]}, "end at 5 but there are 6 ids"),
        ({"feature_offsets": [0, 2, 6]}, "3 elements, wanted 4"),
        ({"feature_tables": [0, -1, 0]}, "feature 1 names table -1"),
        ({"poolings": [0, 4, 0]}, "feature 1 has pooling 4"),
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
    with pytest.raises(ValueError, match="num_owners: got 0"):
        _native.make_plan(one_hot([1]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="feature 0 names table 2 of 2"):
        _native.make_plan(one_hot([1], tables=(2,)), torch.tensor([0, 0]), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="got -4 for table 1"):
        _native.make_plan(one_hot([1]), torch.tensor([0, -4]), torch.tensor([1, 1]))


def test_take():
    values = torch.arange(10, dtype=torch.int32) * 7
    index = torch.randint(0, 10, (100_003,), dtype=torch.int32)
    out = torch.empty_like(index)
    _native.take(values, index, out)
    assert torch.equal(out, values[index.long()])
    for bad in (-1, 10):
        index[77_777] = bad
        with pytest.raises(IndexError, match="outside"):
            _native.take(values, index, out)


ODD = [-(2**63), -5, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**62, 2**63 - 1]


def arrays(dtypes, max_size):
    """Mostly of the first dtype and contiguous; any numbers."""
    values = st.lists(st.sampled_from(ODD), max_size=max_size)

    def array(drawn, dtype, shape):
        tensor = torch.tensor(drawn, dtype=torch.int64).to(dtype)
        return {"flat": tensor, "strided": tensor[::2], "nested": tensor[None]}[shape]

    shapes = st.sampled_from(["flat"] * 10 + ["strided", "nested"])
    return st.builds(array, values, st.sampled_from([dtypes[0]] * 10 + dtypes[1:]), shapes)


def nearly(values, dtype):
    """A right array, perhaps with one number replaced."""

    def changed(place, number):
        tensor = torch.tensor(values, dtype=torch.int64)
        if place is not None:
            tensor[place] = number
        return tensor.to(dtype)

    places = st.one_of(st.none(), st.integers(0, len(values) - 1))
    return st.builds(changed, places, st.sampled_from(ODD))


@settings(max_examples=examples(60, 300), deadline=None)
@given(
    ids=st.one_of(nearly([0, 1, 2, 3, 4, 5], torch.int64), arrays([torch.int64, torch.int32], 8)),
    feature_offsets=st.one_of(
        nearly([0, 2, 4, 6], torch.int64), arrays([torch.int64, torch.int32], 5)
    ),
    feature_tables=st.one_of(nearly([0, 1, 0], torch.int32), arrays([torch.int32, torch.int64], 4)),
    poolings=st.one_of(nearly([0, 1, 2], torch.uint8), arrays([torch.uint8, torch.float32], 4)),
    batch_size=st.sampled_from([2, 2, 2, *ODD]),
    bag_offsets=st.one_of(
        st.none(),
        nearly([0, 1, 2, 3, 4, 5, 6], torch.int64),
        arrays([torch.int64, torch.int32], 8),
    ),
    weights=st.one_of(st.none(), arrays([torch.float32, torch.float64, torch.int64], 8)),
    table_rows=st.one_of(nearly([0, 9], torch.int64), arrays([torch.int64, torch.int32], 4)),
    num_owners=st.one_of(
        nearly([1, 3], torch.int64),
        nearly([2, 1], torch.int64),
        arrays([torch.int64, torch.int32], 4),
    ),
)
def test_anything_is_planned_or_refused(**arguments):
    """No array, however wrong, crashes; what is planned groups every lookup."""
    table_rows, num_owners = arguments.pop("table_rows"), arguments.pop("num_owners")
    try:
        lookups = _native.Lookups(**arguments)
        plan = _native.make_plan(lookups, table_rows, num_owners)
    except (ValueError, TypeError, IndexError) as error:
        assert str(error)
        return
    ids = arguments["ids"]
    assert torch.equal(plan.unique_ids[plan.inverse.long()], ids)
    assert sorted(plan.entries.tolist()) == list(range(len(ids)))
