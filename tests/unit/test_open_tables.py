"""Admission and eviction of open tables: what stays, what it costs, and that a checkpoint holds what is remembered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import open_test_log
from own_model import Net, splits
from ranks import run_ranks

import colonnade
from colonnade import (
    SGD,
    AgeEviction,
    Batch,
    CountMinAdmission,
    EmbeddingCollection,
    Feature,
    Ids,
    MaxRowsEviction,
    RandomAdmission,
    RowOptimizer,
    Table,
    _native,
    build_plan,
    load_rows,
    trained_ids,
)
from colonnade.errors import CheckpointError, ConfigError
from colonnade.store.policies import (
    RowRetention,
    SketchLayout,
    _mix64,
    describe_retention,
    draw_bits,
)
from colonnade.topology.sharding import Shard

COUNTED = CountMinAdmission(updates=2, expected_ids=5000)


def table(**changes) -> Table:
    return Table("item", 4, optimizer=SGD(lr=1.0), **changes)


def policy(num_owners=1, place=0, **changes) -> RowRetention:
    return RowRetention(table(**changes), seed=1, shard=Shard(num_owners, place))


def opened(kind: Table, **changes):
    embeddings = EmbeddingCollection([kind], [Feature("item", "item")], seed=1)
    return embeddings.open(build_plan([kind]), **changes)


def train(embeddings, rows, ids):
    batch = Batch(len(ids), torch.zeros(len(ids), 0), {"item": Ids(torch.as_tensor(ids))})
    embeddings(batch)["item"].sum().backward()
    rows.step()


def remembered(retention) -> dict[str, torch.Tensor]:
    """`state` in one piece, rows in the order of their ids."""
    results = {
        name: torch.cat(parts) if parts else torch.empty(0)
        for name, parts in retention.state().items()
    }
    if "ids" in results:
        order = results["ids"].argsort()
        results |= {name: results[name][order] for name in ("ids", "steps", "values")}
    return results


# Orders of eviction against a slow twin


@dataclass
class Row:
    step: int
    count: int
    norm: float
    moved: int


def mixed(i: int) -> int:
    """mix64: the order of rows that were updated in the same step."""
    return int(_mix64(np.array([i]).view(np.uint64))[0])


class Twin:
    """The same rules, row by row."""

    def __init__(self, by, max_rows, max_age, halve):
        self.by, self.max_rows, self.max_age, self.halve = by, max_rows, max_age, halve
        self.rows: dict[int, Row] = {}
        self.time = 0

    def score(self, row: Row) -> float:
        if self.by == "recency":
            return 0
        value = row.count / 256 * 2.0 ** (row.step // self.halve if self.halve else 0)
        if self.by == "norm":
            value = row.norm
        if not value:
            return -math.inf
        exponent = math.floor(math.log2(value))
        return exponent + math.floor((value / 2.0**exponent - 1) * 4) / 4

    def record_updates(self, ids, norms, step):
        names = sorted(zip(ids, norms, strict=True), key=lambda pair: mixed(pair[0]))
        for i, norm in names:
            before = self.rows.get(i)
            count = 256
            if before is not None:
                shift = step // self.halve - before.step // self.halve if self.halve else 0
                count += before.count >> shift
            self.time += 1
            self.rows[i] = Row(step, count, norm, self.time)
        remaining = [
            i
            for i in sorted(self.rows, key=lambda i: self.rows[i].moved)
            if self.max_age and self.rows[i].step + self.max_age <= step
        ]
        for i in remaining:
            del self.rows[i]
        if self.max_rows:
            for i in self.order()[: max(0, len(self.rows) - self.max_rows)]:
                remaining.append(i)
                del self.rows[i]
        return remaining

    def order(self):
        return sorted(self.rows, key=lambda i: (self.score(self.rows[i]), self.rows[i].moved))


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    kind=st.sampled_from([("recency", 60, 0, 0), ("frequency", 90, 0, 4), ("norm", 70, 0, 0)]),
    limit=st.sampled_from([1, 64, 200]),
    seed=st.integers(0, 50),
)
def test_a_snapshot_is_of_its_moment_whatever_changes_meanwhile(kind, limit, seed):
    native, random = _native.Retention(*kind, 1), np.random.default_rng(seed)

    def record_updates(step):
        ids = torch.from_numpy(np.unique(random.integers(0, 400, 40)))
        native.record_updates(
            ids, torch.rand(len(ids)).double() if kind[0] == "norm" else None, step
        )
        native.remove(torch.from_numpy(random.integers(0, 400, 5)))

    def columns(parts):
        return sorted(zip(*(torch.as_tensor(column).tolist() for column in parts), strict=True))

    step = 0
    for _ in range(4):
        for _ in range(3):
            record_updates(step := step + 1)
        wanted, results = columns(native.state()), []
        native.begin_snapshot()
        for _ in range(int(random.integers(0, 4))):
            record_updates(step := step + 1)
        while part := columns(native.save_some(limit)):
            results += part
            record_updates(step := step + 1)
        assert sorted(results) == wanted
    native.begin_snapshot()  # one that nobody finishes
    record_updates(step + 1)


def test_a_sketch_is_copied_as_it_was_while_it_counts_on():
    kind = CountMinAdmission(updates=3, expected_ids=20_000, halve_steps=6)
    retention, random = policy(admission=kind), np.random.default_rng(0)
    assert retention._sketch is not None

    def record_updates(step):
        ids = torch.from_numpy(np.unique(random.integers(0, 5000, 900)))
        retention.select_rows_to_delete(ids, torch.ones(len(ids)), step)

    for step in range(0, 30, 3):
        record_updates(step)
        counters = torch.as_tensor(retention._sketch.counters).clone()
        retention.begin_state()
        record_updates(step + 1)
        record_updates(step + 2)
        state = retention.finish_state()
        assert torch.equal(torch.cat(state["counters"]), counters)
        assert state["counted_to"][0].tolist() == [step]


STEPS = st.lists(
    st.tuples(
        st.integers(1, 3),  # steps until then
        st.lists(st.integers(-20, 20), unique=True, max_size=12),
        st.booleans(),  # whether it is put back from its state first
        st.lists(st.integers(-25, 25), unique=True, max_size=2),  # rows deleted
    ),
    max_size=30,
)


@settings(max_examples=examples(40, 150), deadline=None)
@given(
    steps=STEPS,
    kind=st.sampled_from(
        [
            ("recency", 7, 0, 0), ("recency", 0, 3, 0), ("recency", 9, 3, 0), ("frequency", 7, 0, 0),
            ("frequency", 6, 0, 4), ("norm", 5, 0, 0),
        ]
    ),
    seed=st.integers(0, 5),
)  # fmt: skip
def test_orders_of_eviction_are_those_of_a_slow_twin(steps, kind, seed):
    twin, native = Twin(*kind), _native.Retention(*kind, 1)
    random, step = np.random.default_rng(seed), 0
    for after, ids, restored, deleted in steps:
        step += after
        norms = random.random(len(ids)).astype(np.float32).astype(float) * 4
        if restored:
            state = [torch.as_tensor(column) for column in native.state()]
            shuffled = torch.from_numpy(random.permutation(len(state[0])))
            native = _native.Retention(*kind, 1)
            native.restore(*(column[shuffled] for column in state))
        native.remove(torch.tensor(deleted, dtype=torch.int64))
        for i in deleted:
            twin.rows.pop(i, None)
        received = torch.from_numpy(norms) if kind[0] == "norm" else None
        remaining = torch.as_tensor(
            native.record_updates(torch.tensor(ids, dtype=torch.int64), received, step)
        )
        assert remaining.tolist() == twin.record_updates(ids, norms.tolist(), step)
        assert torch.as_tensor(native.state()[0]).tolist() == twin.order()
        assert len(native) == len(twin.rows)


@pytest.mark.parametrize("halvings", [*range(12), 20, 31, 32, 33, 40, 64])
def test_counts_are_halved_however_long_a_row_was_not_updated(halvings):
    """A row of many updates against rows of few: the count, and the order in which rows leave."""
    twin, native = Twin("frequency", 4, 0, 2), _native.Retention("frequency", 4, 0, 2, 1)

    def record_updates(ids: list[int], step: int) -> None:
        remaining = torch.as_tensor(native.record_updates(torch.tensor(ids), None, step)).tolist()
        assert remaining == twin.record_updates(ids, [0.0] * len(ids), step)
        state = [torch.as_tensor(column).tolist() for column in native.state()]
        assert state[0] == twin.order()
        assert state[2] == [twin.rows[i].count for i in state[0]]

    for _ in range(600):
        record_updates([1], 1)
    for ids in ([2, 3], [2], [1], [4, 5], [6], [7], [8]):
        record_updates(ids, max(1, 2 * halvings))


def test_many_rows_come_and_go_as_in_the_twin():
    """Through several growths of the index."""
    twin, native = Twin("frequency", 3000, 0, 7), _native.Retention("frequency", 3000, 0, 7, 1)
    random = np.random.default_rng(1)
    for step in range(12):
        ids = np.unique((random.random(900) ** 2 * 9000).astype(np.int64)) * 7919
        remaining = torch.as_tensor(
            native.record_updates(torch.from_numpy(ids), None, step)
        ).tolist()
        assert remaining == twin.record_updates(ids.tolist(), [0.0] * len(ids), step)
    assert len(native) == 3000


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_squared_norms(dtype):
    rows = torch.randn(50, 13, dtype=torch.float64).to(getattr(torch, dtype))
    rows[3] = 0
    slots = torch.tensor([4, 0, 49, 3], dtype=torch.int32)
    result = _native.squared_norms(rows.data_ptr(), 13 * rows.element_size(), 13, dtype, slots)
    wanted = rows[slots.long()].double().square().sum(1)
    torch.testing.assert_close(torch.as_tensor(result), wanted, rtol=1e-14, atol=0)


# Admission


@settings(max_examples=examples(20, 50), deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), unique=True, max_size=15), max_size=25), st.booleans())
def test_a_sketch_never_counts_too_few(steps, halves):
    """And with room enough never too many. Halved counts are at most what was counted."""
    every = 5 if halves else None
    retention = policy(
        admission=CountMinAdmission(updates=3, expected_ids=100_000, halve_steps=every)
    )
    times: dict[int, int] = {}
    for step, ids in enumerate(steps):
        given_ids = torch.tensor(ids, dtype=torch.int64)
        refused = retention.select_rows_to_delete(
            given_ids, torch.ones(len(ids), dtype=torch.int64), step
        ).tolist()
        for i in ids:
            times[i] = times.get(i, 0) + 1
        wanted = [i for i in ids if times[i] < 3]
        assert set(wanted) <= set(refused)
        if not halves:
            assert refused == wanted


def test_a_sketch_admits_too_early_no_more_often_than_it_says():
    retention = policy(admission=CountMinAdmission(updates=2, expected_ids=20_000, error=0.02))
    ids = torch.randperm(2**40 // 2**20)[:20_000] * 2**20 + 17
    early = 0
    for step, part in enumerate(ids.split(1000)):
        early += len(part) - len(retention.select_rows_to_delete(part, torch.ones(len(part)), step))
    assert early <= 0.02 * len(ids)
    late = retention.select_rows_to_delete(ids[:1000].contiguous(), torch.ones(1000), 30)
    assert len(late) == 0  # seen twice
    assert retention.num_bytes <= 1.5 * 20_000 * math.log2(1 / 0.02) + 40_000


def test_a_counter_stays_at_its_most():
    """A counter that began again at 0 would send a row away that was admitted long ago."""
    sketch, row = _native.CountMinSketch(255, 2, 64, 1, 0, 1, 0), torch.tensor([7])
    is_admitted = [int(sketch.record_updates(row, step)[0]) for step in range(600)]
    assert is_admitted == [0] * 254 + [1] * 346


def test_halved_counts_are_forgotten():
    retention = policy(admission=CountMinAdmission(updates=2, expected_ids=100, halve_steps=10))
    one = torch.tensor([5])
    assert retention.select_rows_to_delete(one, torch.tensor([1]), 0).tolist() == [5]
    assert retention.select_rows_to_delete(one, torch.tensor([1]), 30).tolist() == [5]
    assert retention.select_rows_to_delete(one, torch.tensor([1]), 31).tolist() == []


def test_a_row_is_admitted_by_chance_and_stays():
    ids = torch.arange(20_000)
    share = (draw_bits(ids, 3, 7) < 0.3 * 2**53).double().mean()
    assert abs(share - 0.3) < 0.02
    assert not torch.equal(draw_bits(ids, 3, 7), draw_bits(ids, 4, 7))
    assert not torch.equal(draw_bits(ids, 3, 7), draw_bits(ids, 3, 8))
    embeddings = opened(table(admission=RandomAdmission(probability=0.25)))
    rows = RowOptimizer(embeddings)
    births = embeddings.rows("item", torch.arange(100))
    train(embeddings, rows, list(range(100)))
    first = trained_ids(embeddings, "item")
    assert 10 < len(first) < 45
    train(embeddings, rows, list(range(100)))
    second = trained_ids(embeddings, "item")
    assert set(first.tolist()) < set(second.tolist())
    after = embeddings.rows("item", torch.arange(100))
    assert torch.equal(after[first], births[first] - 2)  # both updates
    refused = sorted(set(range(100)) - set(second.tolist()))
    assert torch.equal(after[refused], births[refused])


# In a collection


def test_the_table_never_has_more_rows_than_it_may():
    embeddings = opened(table(admission=COUNTED, eviction=MaxRowsEviction(rows=10)))
    rows = RowOptimizer(embeddings)
    for _ in range(20):
        train(embeddings, rows, torch.randint(0, 40, (16,)))
        assert len(trained_ids(embeddings, "item")) <= 10
    result = embeddings.policies[0]
    assert isinstance(result, RowRetention)
    assert remembered(result)["ids"].tolist() == trained_ids(embeddings, "item").tolist()


def test_rows_leave_the_disk_too(tmp_path):
    kind = table(eviction=AgeEviction(steps=3))
    store = open_test_log(
        tmp_path, table_name="item", record_bytes=kind.record_bytes, identity="item", step=None
    )
    embeddings = opened(kind, backings=[store])
    rows = RowOptimizer(embeddings)
    for step in range(8):
        train(embeddings, rows, list(range(5 * step, 5 * step + 5)))
        embeddings.store.flush()
    assert trained_ids(embeddings, "item").tolist() == list(range(25, 40))
    assert len(store) == 15


def test_a_table_without_an_age_is_named_as_checkpoints_of_before_name_it():
    one, other = MaxRowsEviction(rows=5), MaxRowsEviction(rows=5, age_steps=3)
    before = "MaxRowsEviction(rows=5, by='recency', halve_steps=None)"
    assert describe_retention(None, one) == {"eviction": before}
    assert describe_retention(None, other) == {"eviction": f"{before[:-1]}, age_steps=3)"}


def test_rows_leave_a_table_for_age_before_it_is_full():
    """Rows leave at most five rows and three steps: whichever comes first."""
    embeddings = opened(table(eviction=MaxRowsEviction(rows=5, age_steps=3)))
    rows = RowOptimizer(embeddings)
    retained = {"0 1": 2, "2 3": 4, "4": 5, "5 6": 5, "": 3, "4 5 6": 3, "7 8 9": 5}
    for text, number in retained.items():
        ids = [int(i) for i in text.split()]
        train(embeddings, rows, torch.tensor(ids, dtype=torch.int64))
        local = trained_ids(embeddings, "item").tolist()
        assert len(local) == number and set(ids) <= set(local), local


def test_the_smallest_rows_leave():
    embeddings = opened(table(eviction=MaxRowsEviction(rows=3, by="norm")))
    load_rows(
        embeddings, "item", torch.tensor([[1.0] * 4, [9.0] * 4, [3.0] * 4, [0.1] * 4, [5.0] * 4])
    )
    assert trained_ids(embeddings, "item").tolist() == [1, 2, 4]


def test_loaded_rows_are_admitted_and_deleted_ones_forgotten():
    embeddings = opened(table(admission=COUNTED, eviction=MaxRowsEviction(rows=50)))
    rows = RowOptimizer(embeddings)
    load_rows(embeddings, "item", torch.ones(5, 4))
    train(embeddings, rows, [0, 1, 7])
    assert trained_ids(embeddings, "item").tolist() == [0, 1, 2, 3, 4]
    assert embeddings.rows("item", torch.tensor([0]))[0].tolist() == [0.0] * 4
    embeddings.delete("item", torch.tensor([1, 99]))
    assert remembered(embeddings.policies[0])["ids"].tolist() == [0, 2, 3, 4]


def test_evaluation_leaves_no_trace():
    embeddings = opened(table(admission=COUNTED, eviction=AgeEviction(steps=2)))
    rows = RowOptimizer(embeddings)
    train(embeddings, rows, [1, 2])
    before = remembered(embeddings.policies[0])
    embeddings.eval()
    with torch.no_grad():
        embeddings(Batch(2, torch.zeros(2, 0), {"item": Ids(torch.tensor([1, 5]))}))
    after = remembered(embeddings.policies[0])
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_several_batches_of_a_step_are_one_update():
    embeddings = opened(
        table(
            admission=CountMinAdmission(updates=2, expected_ids=50), eviction=AgeEviction(steps=9)
        )
    )
    rows = RowOptimizer(embeddings)
    for ids in ([1, 2], [2, 3]):
        batch = Batch(2, torch.zeros(2, 0), {"item": Ids(torch.tensor(ids))})
        embeddings(batch)["item"].sum().backward()
    rows.step()
    assert trained_ids(embeddings, "item").tolist() == []
    rows.step()  # nothing to apply
    train(embeddings, rows, [2])
    assert trained_ids(embeddings, "item").tolist() == [2]


# What it costs


@pytest.mark.parametrize(
    "changes",
    [
        {"eviction": MaxRowsEviction(rows=8000, by="frequency", halve_steps=30)},
        {"eviction": MaxRowsEviction(rows=8000, by="recency")},
        {"eviction": AgeEviction(steps=20)},
        {
            "admission": CountMinAdmission(updates=2, expected_ids=100_000, halve_steps=40),
            "eviction": AgeEviction(steps=50),
        },
    ],
    ids=["frequency", "recency", "age", "admission"],
)  # fmt: skip
def test_no_step_does_much_more_than_the_others_while_it_grows(changes):
    """Table grows from empty to full and beyond: the worst step at most thrice the median, in rows and counters
    touched."""
    retention, random = policy(**changes), np.random.default_rng(3)
    clocks: dict[int, int] = {}
    work = []
    for step in range(300):
        ids = np.unique((random.random(1500) ** 3 * (2000 + 300 * step)).astype(np.int64) * 7919)
        for i in ids.tolist():
            clocks[i] = clocks.get(i, 0) + 1
        before = retention.work
        now = torch.tensor([clocks[i] for i in ids.tolist()])
        for i in retention.select_rows_to_delete(torch.from_numpy(ids), now, step).tolist():
            clocks.pop(i)
        work.append(retention.work - before)
    assert max(work) <= 3 * float(np.median(work)), (max(work), np.median(work))
    assert len(retention) == len(clocks)


def test_memory_for_each_row_is_what_the_documents_say():
    retention = policy(eviction=MaxRowsEviction(rows=400_000, by="frequency"))
    for step in range(20):
        ids = torch.arange(20_000 * step, 20_000 * (step + 1)) * 7919
        retention.select_rows_to_delete(ids, torch.ones(len(ids)), step)
        if step > 3:
            assert retention.num_bytes <= 31.5 * len(retention)


# Checkpoints

STAYS = {
    "counted": {
        "admission": CountMinAdmission(updates=2, expected_ids=300, halve_steps=7),
        "eviction": MaxRowsEviction(rows=20, by="frequency", halve_steps=6),
    },
    "norm": {"eviction": MaxRowsEviction(rows=20, by="norm")},
    "aged": {"admission": RandomAdmission(probability=0.6), "eviction": AgeEviction(steps=2)},
}


class OpenNet(Net):
    def __init__(self, stays: str, **changes):
        super().__init__(**changes)
        kinds = [
            replace(t, **(STAYS[stays] if t.rows is None else {})) for t in self.collection.tables
        ]
        features = self.collection.declaration.features
        self.inner["rows"] = EmbeddingCollection(kinds, features, seed=0)


def state_of(model):
    return {
        t: remembered(policy)
        for t, policy in model.collection.policies.items()
        if isinstance(policy, RowRetention)
    }


def content(model):
    rows = {}
    for part in model.collection.scan("film"):
        for i, w, c in zip(part.ids.tolist(), part.weights, part.clocks.tolist(), strict=True):
            rows[i] = (w.tolist(), c)
    return rows


def fitted(model, folder, max_steps, **changes):
    settings_of = {"batch_size": 10, "epochs": 9, "quiet": True, "checkpoint_steps": 4, **changes}
    return colonnade.fit(model, splits(150), run=folder, max_steps=max_steps, **settings_of)


@pytest.mark.parametrize(
    ("stays", "changes"),
    [
        ("counted", {}),
        ("counted", {"staleness_steps": 2, "dram": 6_000}),
        ("norm", {"dram": 6_000, "lookahead": 3}),
        ("aged", {"accumulate": 2}),
    ],
)
def test_a_run_goes_on_to_the_same_bits(stays, changes, tmp_path):
    whole, cut, again = OpenNet(stays), OpenNet(stays), OpenNet(stays)
    done = fitted(whole, tmp_path / "whole", 23, **changes)
    fitted(cut, tmp_path / "cut", 9, **changes)
    result = fitted(again, tmp_path / "cut", 23, **changes)
    assert done.outcome.steps == 23 and result.resumed_at == 9
    assert content(whole) and content(whole) == content(again)
    one, other = state_of(whole), state_of(again)
    assert one.keys() == {1}
    for t, state in one.items():
        assert all(torch.equal(value, other[t][name]) for name, value in state.items())


def test_other_settings_are_refused(tmp_path):
    fitted(OpenNet("aged"), tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"tables\.film\.admission was RandomAdmission"):
        fitted(OpenNet("counted"), tmp_path, 8)
    with pytest.raises(CheckpointError, match=r"tables\.film"):
        fitted(Net(), tmp_path, 8)


def on_ranks(mesh, stays, folder, max_steps):
    model = OpenNet(stays)
    result = fitted(model, folder, max_steps, mesh=mesh, quiet=False)
    return content(model), state_of(model)[1], result.resumed_at


@pytest.mark.parametrize("stays", ["counted", pytest.param("norm", marks=pytest.mark.slow)])
def test_on_two_ranks_and_on_one_after_two(stays, tmp_path):
    whole = run_ranks(2, on_ranks, stays, tmp_path / "whole", 16)
    run_ranks(2, on_ranks, stays, tmp_path / "cut", 8)
    again = run_ranks(2, on_ranks, stays, tmp_path / "cut", 16)
    assert [part[2] for part in again] == [8, 8]
    for one, other in zip(whole, again, strict=True):
        assert one[0] and one[0] == other[0]
        assert len(one[1]["ids"]) <= 10  # each its share
        assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    rows = whole[0][0] | whole[1][0]
    model = OpenNet(stays)
    fitted(model, tmp_path / "whole", 16)  # nothing left to do: as the two ranks left it
    assert content(model) == rows
    state = state_of(model)[1]
    assert sorted(state["ids"].tolist()) == sorted(rows)
    if "counters" in state:
        pair = sum(part[1]["counters"].long() for part in whole)
        assert torch.equal(state["counters"].long(), pair.clamp(max=255))
    fitted(model := OpenNet(stays), tmp_path / "whole", 20)
    assert 0 < len(content(model)) <= 20


@pytest.mark.parametrize("worlds", [(1, 3), (3, 2), (2, 5)])
def test_counters_find_their_ranks(worlds):
    """Many blocks: every id is counted at least as often as in the world before, whatever rank it has now."""
    kind = table(admission=CountMinAdmission(updates=3, expected_ids=50_000))
    assert SketchLayout(kind.admission).count > 64
    ids = torch.arange(3000) * 7919

    def world(size):
        return [RowRetention(kind, seed=1, shard=Shard(size, place)) for place in range(size)]

    def record_updates(ranks, step):
        owner = torch.as_tensor(_native.owner_of(ids, 0, len(ranks)))
        refused = [
            retention.select_rows_to_delete(
                ids[owner == rank], torch.ones(int((owner == rank).sum())), step
            )
            for rank, retention in enumerate(ranks)
        ]
        return torch.cat(refused)

    before, after = world(worlds[0]), world(worlds[1])
    assert len(record_updates(before, 0)) == len(record_updates(before, 1)) == len(ids)
    states = [retention.state() for retention in before]
    for retention in after:
        retention.restore(states)
    assert len(record_updates(after, 2)) == 0
    if worlds[0] > 1:
        with pytest.raises(CheckpointError, match="memory of rows holds nothing"):
            after[0].restore([{}] * worlds[0])


# Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CountMinAdmission(updates=1, expected_ids=9), "updates=1, wanted a whole number, 2 .. 255"),
        (lambda: CountMinAdmission(updates=300, expected_ids=9), "updates=300"),
        (lambda: CountMinAdmission(updates=2, expected_ids=0), "expected_ids=0"),
        (lambda: CountMinAdmission(updates=2, expected_ids=9, error=0), "error=0"),
        (lambda: CountMinAdmission(updates=2, expected_ids=9, halve_steps=0), "halve_steps=0"),
        (lambda: RandomAdmission(probability=1), "probability=1, wanted more than 0, less than 1"),
        (lambda: RandomAdmission(probability=float("nan")), "probability=nan"),
        (lambda: AgeEviction(steps=0), "steps=0"),
        (lambda: AgeEviction(steps=True), "steps=True"),
        (lambda: MaxRowsEviction(rows=0), "rows=0"),
        (lambda: MaxRowsEviction(rows=1.5), "rows=1.5"),
        (lambda: MaxRowsEviction(rows=9, by="size"), "by='size', choose from recency, frequency, norm"),
        (lambda: MaxRowsEviction(rows=9, halve_steps=3), "only counts are halved"),
        (lambda: MaxRowsEviction(rows=9, age_steps=0), "age_steps=0"),
        (lambda: MaxRowsEviction(rows=9, by="norm", age_steps=3), "or evict by='recency'"),
        (lambda: table(rows=9, eviction=AgeEviction(steps=3)), "leave rows out for an open table"),
        (lambda: table(admission=AgeEviction(steps=3)), "got admission=AgeEviction"),
        (lambda: table(eviction=3), "got eviction=3, wanted AgeEviction"),
        (lambda: policy(num_owners=4, eviction=MaxRowsEviction(rows=3)), "at least a row for each"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make()


def test_one_who_decides():
    own = policy(admission=COUNTED)
    with pytest.raises(ConfigError, match="give one of them"):
        opened(table(admission=COUNTED), policies={"item": own})


def test_tables_of_a_model_built_by_name():
    from colonnade.config.run import build_config
    from colonnade.data.contract import Column, Schema
    from colonnade.models.build import build_tables

    columns = [Column("a"), Column("b"), Column("c", cardinality=9), Column("d")]
    schema = Schema(dense=(), categorical=tuple(columns), labels=("y",))
    values = {
        "admission": {"updates": 3, "expected_ids": 1000},
        "eviction": {"max_rows": 500, "by": "frequency", "halve_steps": 9},
        "tables": {
            "b": {"eviction": {"age_steps": 4}},
            "d": {"eviction": {"age_steps": 4, "max_rows": 6}},
        },
    }
    a, b, c, d = build_tables(schema, build_config({"embedding": values}))[0]
    assert d.eviction == MaxRowsEviction(rows=6, age_steps=4)
    assert a.admission == CountMinAdmission(updates=3, expected_ids=1000)
    assert a.eviction == MaxRowsEviction(rows=500, by="frequency", halve_steps=9)
    assert b.admission is None and b.eviction == AgeEviction(steps=4)
    assert c.admission is None and c.eviction is None
    with pytest.raises(ConfigError, match=r"embedding\.tables\.c: .* it has a, b, d"):
        build_tables(schema, build_config({"embedding": {"tables": {"c": {}}}}))
    closed = Schema(dense=(), categorical=(columns[2],), labels=("y",))
    with pytest.raises(ConfigError, match=r"embedding\.eviction: this data has no open table"):
        build_tables(closed, build_config({"embedding": {"eviction": {"max_rows": 5}}}))
