"""state_dict, copies and pickles: rows are in them, or they say how else to save."""

from __future__ import annotations

import copy
import os
import pickle
import warnings

import pytest
import torch
from forked_script import run_script
from own_loop import Loop, assert_same_state, through_a_file
from scenario import STAYS, Net

import colonnade
from colonnade import (
    SGD,
    Adam,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.comm.mesh import Mesh
from colonnade.errors import CheckpointError, ConfigError
from colonnade.topology.world import World

KEYS = "embeddings.rows."


@pytest.mark.parametrize("stays", [None, *STAYS])
def test_training_goes_on_to_the_same_bits(stays):
    whole = Loop(stays)
    whole.train(0, 5)
    saved = whole.state()
    losses = whole.train(5, 9)
    again = Loop(stays, seed=4)  # first values follow the saved seed
    again.load(saved)
    assert again.train(5, 9) == losses
    assert_same_state(again, whole)


def test_loading_replaces_what_was_trained_since():
    loop = Loop("counted and frequent")
    loop.train(0, 6)
    saved = loop.state()
    losses = loop.train(6, 10)
    loop.load(saved)
    assert loop.train(6, 10) == losses


def test_a_state_without_rows_replaces_all_rows():
    loop = Loop()
    untrained = loop.state()
    loop.train(0, 3)
    loop.load(untrained)
    assert len(loop.model.state_dict()[f"{KEYS}user.ids"]) == 0
    assert loop.train(0, 3) == Loop().train(0, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copied_row_optimizer_goes_on_with_its_copied_collection(copied):
    loop = Loop()
    loop.train(0, 3)
    again = Loop()
    again.model, again.rows, again.dense = copied((loop.model, loop.rows, loop.dense))
    assert again.rows.collection is again.model.embeddings
    assert again.train(3, 6) == loop.train(3, 6)


@pytest.mark.parametrize(
    "key, value",
    [
        ("step", None),
        ("step", torch.tensor(-1)),
        ("seed", torch.zeros(2, dtype=torch.int64)),
        ("seed", torch.tensor(0.5)),
        ("rows.user.ids", "text"),
        ("rows.user.weights", None),
    ],
)
def test_values_that_are_no_rows_are_refused_by_name(key, value):
    loop = Loop()
    loop.train(0, 2)
    state = loop.model.state_dict()
    state[f"embeddings.{key}"] = value
    with pytest.raises(RuntimeError, match=f"{key}: got .*, wanted "):
        Loop().model.load_state_dict(state)


def test_the_order_of_loading_is_free_before_the_first_batch():
    loop = Loop()
    loop.train(0, 6)
    model, rows, _ = loop.state()
    again = Loop(seed=5)
    again.rows.load_state_dict(rows)
    again.model.load_state_dict(model)
    assert_same_state(again, loop)
    again.rows.load_state_dict(rows)  # and where the rows are
    again.model.load_state_dict(model)
    assert_same_state(again, loop)
    opened = Loop()
    opened.collection.open()
    with pytest.raises(CheckpointError, match="load the model's state_dict first"):
        opened.rows.load_state_dict(rows)


def test_weights_alone_keep_the_optimizer_state_as_in_torch():
    loop = Loop()
    loop.train(0, 4)
    before, (model, _, _) = loop.rows.state_dict()["state"], loop.state()
    loop.model.load_state_dict(model)
    for group, columns in loop.rows.state_dict()["state"].items():
        assert torch.equal(columns["state"], before[group]["state"])


def bfloat16(optimizer):
    tables = [Table("a", 8, optimizer=optimizer, dtype="bfloat16", master=True)]
    return EmbeddingCollection(tables, [Feature("a", "a")])


def test_low_halves_of_a_master_are_weights():
    def train(collection, rows, first, end):
        for step in range(first, end):
            ids = torch.arange(20) * 7 + step
            collection(Batch(20, torch.zeros(20, 0), {"a": Ids(ids)}))[
                "a"
            ].square().sum().backward()
            rows.step()

    one = bfloat16(Adam(lr=0.01))
    rows = RowOptimizer(one)
    train(one, rows, 0, 3)
    model, state = through_a_file(one.state_dict()), through_a_file(rows.state_dict())
    train(one, rows, 3, 6)
    other = bfloat16(Adam(lr=0.01))
    other_rows = RowOptimizer(other)
    other.load_state_dict(model)
    other_rows.load_state_dict(state)
    train(other, other_rows, 3, 6)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_an_untrained_model_loads_with_all_keys():
    state = through_a_file(Net().state_dict())
    assert not Net().load_state_dict(state).missing_keys
    assert not Net().load_state_dict(state, assign=True).missing_keys


def test_partial_and_wrong_keys_are_named():
    loop = Loop()
    loop.train(0, 3)
    whole, _, _ = loop.state()
    before = loop.state()
    ids, weights, clocks = (f"{KEYS}user.{column}" for column in ("ids", "weights", "clocks"))

    def refused(changed, words, strict=True):
        with pytest.raises(RuntimeError, match=words):
            loop.model.load_state_dict({**whole, **changed}, strict=strict)

    without = {name: value for name, value in whole.items() if name != weights}
    with pytest.raises(RuntimeError, match=r"got part of its keys, without rows\.user\.weights"):
        loop.model.load_state_dict(without, strict=False)
    refused({weights: whole[weights][:, :3]}, r"got weights \(\d+, 3\) torch.float64, wanted")
    refused({weights: whole[weights].float()}, "torch.float32, wanted")
    refused({ids: whole[ids] + 10**6}, "wanted 0 .. 52")
    refused({ids: torch.zeros_like(whole[ids])}, "an id more than once")
    refused({clocks: whole[clocks] * 0}, "a clock below 1")
    refused({f"{KEYS}gone.ids": whole[ids]}, r"Unexpected key.*rows\.gone\.ids")
    with pytest.raises(RuntimeError, match=r"Missing key.*embeddings\.rows\.user\.ids"):
        loop.model.load_state_dict(colonnade.dense_state_dict(loop.model))
    for actual, expected in zip(loop.state()[:2], before[:2], strict=True):
        assert str(actual) == str(expected)


def test_a_new_table_starts_anew_where_the_load_is_not_strict():
    names = ["old", "new"]
    tables = [Table(name, 4, rows=9) for name in names]
    features = [Feature(name, name) for name in names]
    small = EmbeddingCollection(tables[:1], features[:1])
    colonnade.load_rows(small, "old", torch.ones(9, 4))
    large = EmbeddingCollection(tables, features)
    result = large.load_state_dict(small.state_dict(), strict=False)
    assert result.missing_keys == [f"rows.new.{item}" for item in ("ids", "weights", "clocks")]
    assert torch.equal(large.rows("old", torch.arange(9)), torch.ones(9, 4))


def test_optimizer_state_of_others_is_named():
    loop = Loop()
    loop.train(0, 3)
    state = loop.rows.state_dict()
    with pytest.raises(CheckpointError, match=r"got state of param groups \[\], wanted \[0, 1"):
        loop.rows.load_state_dict({**state, "state": {}})
    wrong = {**state["state"], 0: {**state["state"][0], "state": torch.zeros(3, 1)}}
    with pytest.raises(CheckpointError, match=r"got state \(3, 1\) torch.float32, wanted"):
        loop.rows.load_state_dict({**state, "state": wrong})


def test_rows_elsewhere_or_too_large_name_the_other_way(tmp_path):
    loop = Loop()
    loop.train(0, 3)
    saved = loop.state()
    loop.collection.max_state_dict_bytes = 1000
    for item in (loop.model, loop.rows):
        with pytest.raises(
            CheckpointError, match=r"bytes of rows.*collection\.save\(folder, step\)"
        ):
            item.state_dict()
    with pytest.raises(CheckpointError, match="max_state_dict_bytes = 1,000"):
        loop.load(saved)
    with pytest.raises(CheckpointError, match="a copy or pickle: got"):
        copy.deepcopy(loop.model)
    budget = Loop()
    plan = build_plan(budget.collection.tables, 1, PlanConfig(memory={"dram": 20_000}, lookahead=0))
    budget.collection.open(plan, folder=tmp_path)
    for item in (budget.model, budget.rows):
        with pytest.raises(CheckpointError, match="a memory budget that does not hold every row"):
            item.state_dict()
    waiting = Loop()
    waiting.load(saved)
    with pytest.raises(CheckpointError, match="a memory budget that does not hold every row"):
        waiting.collection.open(plan, backings=[object()] * 4)


def test_rows_of_an_open_collection_with_another_seed_are_refused():
    one, other = Loop(seed=1), Loop(seed=2)
    other.train(0, 1)
    with pytest.raises(CheckpointError, match="seed 1, this one is open with seed 2"):
        other.model.load_state_dict(one.model.state_dict())


def test_dense_weights_alone_can_be_had():
    loop, other = Loop(), Loop(seed=9)
    loop.train(0, 3)
    state = through_a_file(colonnade.dense_state_dict(loop.model))
    assert set(state) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    colonnade.load_dense_state_dict(other.model, state)
    assert torch.equal(other.model.first.weight, loop.model.first.weight)
    assert not len(other.model.state_dict()[f"{KEYS}user.ids"])
    with pytest.raises(CheckpointError, match=r"missing \['first\.bias'\]"):
        colonnade.load_dense_state_dict(
            other.model, {k: v for k, v in state.items() if k != "first.bias"}
        )
    with pytest.raises(CheckpointError, match="wanted the dense weights alone"):
        colonnade.load_dense_state_dict(other.model, loop.model.state_dict())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_and_pickles_have_rows_of_their_own(duplicate):
    loop = Loop("counted and frequent")
    assert duplicate(loop.model).embeddings.seed == loop.collection.seed  # before the first batch
    loop.train(0, 4)
    twin = Loop()
    twin.model = duplicate(loop.model)
    twin.rows = RowOptimizer(twin.collection)
    twin.dense = torch.optim.Adam(twin.model.parameters(), lr=0.01)
    twin.dense.load_state_dict(copy.deepcopy(loop.dense.state_dict()))
    assert_same_state(twin, loop)
    assert twin.train(4, 8) == loop.train(4, 8)
    assert twin.collection.plan == loop.collection.plan


def test_a_policy_of_ones_own_is_not_copied():
    class Stays:
        def select_rows_to_delete(self, ids, update_counts, step):
            return ids[:0]

    loop = Loop()
    loop.collection.open(policies={"item": Stays()})
    with pytest.raises(ConfigError, match="table 'item': got a policy of your own"):
        copy.deepcopy(loop.model)


PEAK = """
import torch
from colonnade import Adam, EmbeddingCollection, RowOptimizer, Feature, Table, load_rows

ROWS, DIM = 30_000, 400
size = ROWS * (3 * 4 * DIM + 8)  # weights, two moments, clock

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def measured(work):
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here on
    before = status("VmRSS")
    result = work()
    print((status("VmHWM") - before) / size)
    return result

def build():
    return EmbeddingCollection([Table("a", DIM, rows=ROWS, optimizer=Adam(lr=0.1))], [Feature("a", "a")])

collection = build()
rows = RowOptimizer(collection)
for start in range(0, ROWS, 1000):
    load_rows(collection, "a", torch.zeros(1000, DIM), torch.arange(start, start + 1000))
other = build()
other_rows = RowOptimizer(other.open())
model, state = measured(lambda: (collection.state_dict(), rows.state_dict()))
measured(lambda: (other.load_state_dict(model), other_rows.load_state_dict(state)))
"""


def test_a_state_dict_takes_one_copy_of_the_rows(tmp_path):
    """Peak memory: at most 1.1 times the rows' bytes for the state_dict, and as much again for rows loaded from it."""
    ended = run_script(tmp_path, PEAK, environment=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    saved, loaded = map(float, ended.stdout.split())
    assert 0.5 < saved <= 1.1
    assert 0.5 < loaded <= 1.1


def test_several_ranks_are_refused():
    """Without ranks: what a collection of two would say."""
    loop = Loop()
    loop.train(0, 2)
    loop.collection.mesh = Mesh(World(ranks_per_host=2))
    with pytest.raises(CheckpointError, match="rows on 2 ranks, wanted all rows in this process"):
        loop.model.state_dict()


def test_a_shallow_copy_counts_steps_of_its_own():
    loop = Loop()
    loop.train(0, 2)
    twin = copy.copy(loop.collection)
    loop.train(2, 3)
    assert (twin.step, loop.collection.step) == (2, 3)


def warnings_of_first_step(
    optimizer, load_state: bool, *, before_opening: bool = True
) -> list[str]:
    """Load a trained collection's rows into a new one, with or without the optimizer's state; step twice."""

    def build():
        collection = EmbeddingCollection(
            [Table("a", 2, optimizer=optimizer)], [Feature("a", "a")], seed=1
        )
        return collection, RowOptimizer(collection)

    def train(collection, rows):
        collection(Batch(2, torch.zeros(2, 0), {"a": Ids(torch.arange(2))}))["a"].sum().backward()
        rows.step()

    trained = build()
    train(*trained)
    other = build()
    if not before_opening:
        other[0].open()
    other[0].load_state_dict(trained[0].state_dict())
    if load_state:
        other[1].load_state_dict(trained[1].state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*other)
        train(*other)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("before_opening", [False, True])
def test_trained_rows_without_their_optimizer_state_warn_once(before_opening):
    (message,) = warnings_of_first_step(Adam(lr=0.1), False, before_opening=before_opening)
    assert message.startswith("got trained rows of step 1 and no optimizer state for them")
    assert warnings_of_first_step(Adam(lr=0.1), True, before_opening=before_opening) == []
    assert warnings_of_first_step(SGD(lr=0.1), False, before_opening=before_opening) == []
