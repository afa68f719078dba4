"""Columns in memory: slicing against the slow definition, and tensors at fault."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.batch import Ids
from colonnade.data import Position, open_tensors
from colonnade.data.tensors import gather_ids
from colonnade.errors import DataError, IdRangeError

BAGS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=1, max_size=20)


def bags_of(ids: Ids) -> list[list[int]]:
    offsets = ids.offsets.tolist()
    return [ids.values[b:e].tolist() for b, e in itertools.pairwise(offsets)]


def jagged(bags: list[list[int]]) -> Ids:
    offsets = [0]
    for bag in bags:
        offsets.append(offsets[-1] + len(bag))
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    return Ids(values, torch.tensor(offsets), torch.arange(float(len(values))))


@given(BAGS, st.data())
def test_bags_are_taken_whole_in_any_order(bags, data):
    rows = data.draw(st.lists(st.integers(0, len(bags) - 1), max_size=30))
    taken = gather_ids(jagged(bags), torch.tensor(rows, dtype=torch.int64))
    assert bags_of(taken) == [bags[i] for i in rows]
    weights = bags_of(Ids(jagged(bags).weights, jagged(bags).offsets))
    assert bags_of(Ids(taken.weights, taken.offsets)) == [weights[i] for i in rows]


def test_columns_stay_together_when_shuffled():
    n = 500
    source = open_tensors(
        {"id": torch.arange(n)},
        dense=torch.arange(float(n))[:, None],
        label=torch.arange(n) % 2,
        sample_weight=torch.arange(float(n)) / n,
        group=torch.arange(n) * 3,
        shuffle_seed=1,
    )
    orders = []
    for epoch in (0, 1, 0):
        (batch,) = source.batches(n, start=Position(epoch, 0))
        ids = batch.ids["id"].values
        assert torch.equal(batch.dense[:, 0], ids.float())
        assert torch.equal(batch.label[:, 0], (ids % 2).float())
        assert torch.equal(batch.sample_weight, (torch.arange(float(n)) / n)[ids])
        assert torch.equal(batch.group, ids * 3)
        assert sorted(ids.tolist()) == list(range(n))
        orders.append(ids)
    assert torch.equal(orders[0], orders[2]) and not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], torch.arange(n))


def test_without_a_seed_the_order_is_the_one_given():
    source = open_tensors({"id": torch.tensor([5, 3, 9])}, label=torch.tensor([1, 0, 1]))
    (batch,) = source.batches(10)
    assert batch.ids["id"].values.tolist() == [5, 3, 9] and batch.dense.shape == (3, 0)
    assert source.schema.categorical[0].cardinality is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_dense_value_that_is_not_finite_is_named(bad):
    dense = torch.zeros(9, 3)
    dense[4, 2] = bad
    with pytest.raises(DataError, match=rf"shop, row 4, column price: got {bad}"):
        open_tensors({}, dense=dense, dense_names=["age", "visits", "price"], name="shop")


@pytest.mark.parametrize("bad", [float("inf"), float("-inf")])
def test_a_label_may_be_unknown_but_not_infinite(bad):
    label = torch.zeros(9, 2)
    label[3, 1] = torch.nan
    source = open_tensors({}, label=label, label_names=["click", "buy"])
    assert source.schema.labels == ("click", "buy")
    [batch] = source.batches(9)
    assert batch.label.shape == (9, 2) and batch.label.isnan().sum() == 1
    label[7, 0] = bad
    with pytest.raises(DataError, match="row 7, column label: got inf"):
        open_tensors({}, label=label, label_names=["click", "buy"])


@pytest.mark.parametrize("bad", [-1, 10, 2**62])
def test_an_id_outside_its_vocabulary_is_named(bad):
    ids = torch.arange(10)
    ids[6] = bad
    with pytest.raises(IdRangeError, match=rf"row 6, column film: got id {bad}, wanted 0 \.\. 9"):
        open_tensors({"film": ids}, cardinalities={"film": 10})
    open_tensors({"film": ids})  # an open table takes it
    bag = jagged([[1], [], [2, bad], [3]])
    with pytest.raises(IdRangeError, match="row 2, column tags"):
        open_tensors({"tags": bag}, cardinalities={"tags": 10})


@pytest.mark.parametrize("convert", [np.asarray, list, pa.array])
def test_columns_that_numpy_reads_are_taken(convert):
    ids = np.array([3, 1, 2], np.int32)[::-1]
    source = open_tensors(
        {"film": convert(ids), "tags": Ids(convert(ids), torch.tensor([0, 1, 3, 3]))},
        dense=np.ones((3, 1)),
        label=convert(np.array([0.0, 1.0, 0.0])),
        sample_weight=convert(np.array([1.0, 2.0, 3.0])),
        group=convert(np.arange(3)),
    )
    (batch,) = source.batches(3)
    assert batch.ids["film"].values.tolist() == [2, 1, 3]
    assert batch.ids["tags"].values.tolist() == [2, 1, 3]
    assert batch.ids["film"].values.dtype == torch.int64
    assert batch.label.tolist() == [[0.0], [1.0], [0.0]]
    assert batch.sample_weight.tolist() == [1.0, 2.0, 3.0]
    assert batch.group.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": {}}, "no column at all"),
        ({"ids": {"a": torch.zeros(3)}}, r"column a: got \(3,\) float32"),
        ({"ids": {"a": ["x", "y"]}}, r"got ids\['a'\] of type list, wanted numbers.*open_csv"),
        ({"ids": {"a": torch.arange(2)}, "label": object()}, "got label of type object, wanted"),
        ({"ids": {"a": torch.arange(3), "b": torch.arange(4)}}, r"column b: got \(4,\) int64"),
        (
            {"ids": {"a": torch.arange(3)}, "label": torch.zeros(3, 2)},
            r"column label: got \(3, 2\)",
        ),
        ({"ids": {"a": torch.arange(3)}, "dense": torch.zeros(3)}, r"column dense: got \(3,\)"),
        (
            {"ids": {"a": torch.arange(3)}, "group": torch.zeros(3)},
            r"column group: got \(3,\) float",
        ),
        ({"ids": {"a": torch.arange(3)}, "cardinalities": {"b": 3}}, "names the column 'b'"),
        (
            {"ids": {"a": Ids(torch.arange(3), torch.tensor([0, 2, 1, 3]))}},
            "column a: got offsets .* never decreasing",
        ),
        ({"ids": {"a": Ids(torch.arange(3), torch.tensor([0, 2]))}}, "end at 2, wanted 0 .. 3"),
        (
            {"ids": {"a": Ids(torch.arange(3), None, torch.ones(2))}},
            r"column a\.weights: got \(2,\) float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(DataError, match=message):
        open_tensors(**arguments)
