"""A store's tables change their memory in place, and make room for a batch that no earlier one foretold."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from logs import open_test_log

from colonnade import Table, _native
from colonnade.errors import BudgetExceeded
from colonnade.store.dram import MappedTier, open_dram_store
from colonnade.store.log.compaction import Collector
from colonnade.store.log.writer import LogWriter
from colonnade.store.traffic import TrafficSample

TABLES = [Table("a", 4), Table("b", 4, rows=1000), Table("small", 4, rows=10)]


@contextmanager
def opened(folder, tables=TABLES, capacities=(100, 100, 10), **settings):
    reader, writer, collector = _native.PageReader("auto", 8), LogWriter(), Collector()
    logs = [
        open_test_log(
            folder / table.name, table_name=table.name, record_bytes=table.record_bytes, identity="x/rank0",
            rows=table.rows, reader=reader, writer=writer, collector=collector, step=None,
        )
        for table in tables
    ]  # fmt: skip
    yield open_dram_store(tables, capacities, seed=1, backings=logs, **settings)
    for log in logs:
        log.close()


@pytest.fixture
def store(tmp_path):
    with opened(tmp_path, most_rows=[400, 400, 400]) as store:
        yield store


def acquire(store, first, count):
    """Pin `count` rows of the first table."""
    offsets = torch.tensor([0, count, count, count])
    slots, job = store.acquire(torch.arange(first, first + count), offsets)
    store.wait(job)
    return slots, offsets


def train(store, counts, first=0):
    """Count a use of `counts` rows of each table in their clocks; return how often they were used before."""
    ids = torch.cat([first * (t < 2) + torch.arange(count) for t, count in enumerate(counts)])
    offsets = torch.tensor([0, *counts]).cumsum(0)
    slots, job = store.acquire(ids, offsets)
    store.wait(job)
    store.before_update(slots, offsets)
    before = []
    for t, _ in enumerate(counts):
        part = slots[offsets[t] : offsets[t + 1]]
        records = torch.empty(len(part), store.tables[t].record_bytes, dtype=torch.uint8)
        store.native.pack(t, part, records)
        clocks = np.ascontiguousarray(records.numpy()[:, -8:]).view(np.int64)
        before += clocks.flatten().tolist()
        clocks += 1
        records.numpy()[:, -8:] = clocks.view(np.uint8)
        store.native.unpack(t, part, records)
    store.release(slots, offsets, dirty=True)
    return before


def test_tables_change_in_place_and_lose_nothing(store):
    assert store.capacities() == {0: 100, 1: 100}  # the third has all its rows in memory
    for first in range(0, 500, 50):
        assert train(store, [50, 50, 10], first) == [0] * 100 + [first // 50] * 10
    before = store.resident_bytes()
    store.resize({0: 300, 1: 40})
    assert store.capacities() == {0: 300, 1: 40}
    assert store.num_rows(1) <= 40 and store.resident_bytes() <= before
    store.resize({0: 60, 1: 1000})
    assert store.capacities() == {0: 60, 1: 400}  # as much as has addresses
    uses = [train(store, [50, 50, 0], first) for first in range(0, 500, 50)]
    assert uses == [[1] * 100] * 10


def test_a_table_keeps_the_rows_that_batches_use(store):
    slots, offsets = acquire(store, 0, 80)
    store.resize({0: 10, 1: 190})
    assert store.capacities() == {0: 80, 1: 120}
    store.release(slots, offsets, dirty=False)
    store.resize({0: 10, 1: 190})
    assert store.capacities() == {0: 10, 1: 190}


@pytest.mark.parametrize("is_committing", [False, True])
def test_a_batch_that_does_not_fit_takes_memory_of_other_tables(store, is_committing):
    train(store, [90, 20, 10])
    if is_committing:
        store.begin_commit()
    with pytest.raises(BudgetExceeded, match="table 'a': a batch needs 150 rows"):
        train(store, [150, 20, 0])  # memory is as planned
    store.traffic = TrafficSample(len(TABLES))
    assert train(store, [150, 20, 0]) == [1] * 90 + [0] * 60 + [1] * 20
    assert store.capacities() == {0: 150, 1: 50}
    with pytest.raises(BudgetExceeded, match="table 'b': a batch needs 120 rows"):
        train(store, [150, 120, 0])  # both do not fit
    if is_committing:
        store.finish_commit(1)
    assert train(store, [150, 50, 10]) == [2] * 90 + [1] * 60 + [2] * 20 + [0] * 30 + [1] * 10


def test_a_batch_for_which_the_others_have_too_little_changes_nothing(store):
    train(store, [0, 20, 0])
    store.traffic = TrafficSample(len(TABLES))
    train(store, [0, 20, 0])
    slots, offsets = acquire(store, 0, 90)
    with pytest.raises(BudgetExceeded, match=r"a batch needs 150 rows .* 90 of these are in use"):
        acquire(store, 1000, 150)
    assert store.capacities() == {0: 100, 1: 100}
    store.release(slots, offsets, dirty=False)
    acquire(store, 1000, 150)
    assert store.capacities() == {0: 150, 1: 50}


def test_tables_with_a_budget_of_their_own_keep_it(tmp_path):
    with opened(tmp_path, most_rows=[400, 0, 400]) as store:
        store.traffic = TrafficSample(len(TABLES))
        assert store.capacities() == {0: 100}
        with pytest.raises(BudgetExceeded, match="a batch needs 150 rows"):
            acquire(store, 0, 150)
        assert store.native.capacity_rows(1) == 100


class Failing:
    def fault(self):
        return None

    def acquire(self, *_):
        raise MemoryError("cannot reserve 64 bytes of address space")


@pytest.mark.parametrize("has_traffic", [False, True])
def test_other_errors_of_memory_stay_as_they_are(store, monkeypatch, has_traffic):
    store.traffic = TrafficSample(len(TABLES)) if has_traffic else None
    monkeypatch.setattr(store, "tiers", Failing())
    with pytest.raises(MemoryError, match="cannot reserve 64 bytes"):
        acquire(store, 0, 5)


def test_evicted_rows_have_a_cache_beside_a_stacked_table(tmp_path):
    tables = [Table("open", 4), Table("stacked", 4, rows=30, hashes=2), TABLES[2]]
    sizes = [20, 30, 10]
    with opened(
        tmp_path, tables, sizes, mapped=MappedTier(tmp_path, cache_rows=[40, 0, 0])
    ) as store:
        uses = [train(store, [20, 3, 0], first) for first in (0, 20, 0)]
        assert uses == [[0] * 23, [0] * 23, [1] * 23]
        assert store.tiers.cache_counts()["hits"] == 20
