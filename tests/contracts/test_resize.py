"""A store's tables change their memory in place, and make room for a batch that no earlier one foretold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colonnade import Table, _native
from colonnade.errors import BudgetExceeded
from colonnade.store.compaction import Collector
from colonnade.store.dram import open_dram_store
from colonnade.store.log import open_log
from colonnade.store.traffic import TrafficSample
from colonnade.store.writer import LogWriter

TABLES = [Table("a", 4), Table("b", 4, rows=1000), Table("small", 4, rows=10)]


@pytest.fixture
def store(tmp_path):
    reader, writer, collector = _native.PageReader("auto", 8), LogWriter(), Collector()
    logs = [
        open_log(
            tmp_path / table.name, table_name=table.name, record_bytes=table.record_bytes, identity="x/rank0",
            rows=table.rows, reader=reader, writer=writer, collector=collector, step=None,
        )
        for table in TABLES
    ]  # fmt: skip
    store = open_dram_store(
        TABLES, [100, 100, 10], seed=1, backings=logs, most_rows=[400, 400, 400]
    )
    yield store
    for log in logs:
        log.close()


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
    ids = torch.arange(80)
    offsets = torch.tensor([0, 80, 80, 80])
    slots, job = store.acquire(ids, offsets)
    store.wait(job)
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
