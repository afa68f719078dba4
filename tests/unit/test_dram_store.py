"""DramStore over logs: reads under way, commits under way, and what goes wrong with either."""

from __future__ import annotations

import threading

import pytest
import torch
from logs import commit_rows, open_test_log

from colonnade import PlanConfig, Table, Uniform, _native, build_plan
from colonnade.errors import CorruptionError, StorageError
from colonnade.store.budget import slot_bytes
from colonnade.store.dram import MappedTier, open_dram_store
from colonnade.store.log.writer import LogWriter

TABLES = [
    Table("open", 4, initializer=Uniform(scale=1.0)),
    Table("cached", 4, rows=300, initializer=Uniform(scale=1.0)),
    Table("direct", 4, rows=40, initializer=Uniform(scale=1.0)),
]
CAPACITY = [60, 60, 40]
PACKED = torch.contiguous_format


def open_store(place, step=None, capacity=CAPACITY, cache_rows=0, **settings):
    """cache_rows: evicted rows of each table in mapped memory."""
    reader, writer = _native.PageReader(), LogWriter(**settings)
    logs = [
        open_test_log(
            place / table.name,
            table_name=table.name,
            record_bytes=table.record_bytes,
            identity="run",
            step=step,
            rows=table.rows,
            reader=reader,
            writer=writer,
            segment_bytes=8192,
            chunk_bytes=4096,
        )
        for table in TABLES
    ]
    cache = (
        MappedTier(place / "mapped", cache_rows=[cache_rows] * len(TABLES)) if cache_rows else None
    )
    return open_dram_store(TABLES, capacity, seed=1, backings=logs, mapped=cache)


def close(store):
    for log in store.logs.values():
        log.close()


def batch(random, sizes=(20, 20, 15)):
    parts = [
        torch.randperm(table.rows or 300, generator=random)[:size]
        for table, size in zip(TABLES, sizes, strict=True)
    ]
    return torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0)


def train(store, ids, offsets, truth, amount=1.0):
    """Every weight of these rows grows by `amount`, as does their clock; `truth`: by table, id -> (weight, clock)."""
    slots, job = store.acquire(ids, offsets)
    store.wait(job)
    store.before_update(slots, offsets)
    for t, table in enumerate(TABLES):
        table_slots = slots[offsets[t] : offsets[t + 1]].contiguous()
        if not len(table_slots):
            continue
        records = torch.empty(len(table_slots), table.record_bytes, dtype=torch.uint8)
        store.native.pack(t, table_slots, records)
        weights = records[:, :16].clone(memory_format=PACKED).view(torch.float32)
        clocks = records[:, -8:].clone(memory_format=PACKED).view(torch.int64)
        for i, row in enumerate(ids[offsets[t] : offsets[t + 1]].tolist()):
            weight, clock = truth[t].get(row, (weights[i].clone(), 0))
            assert torch.equal(weights[i], weight) and clocks[i] == clock
            truth[t][row] = (weight + amount, clock + 1)
        records[:, :16] = (weights + amount).view(torch.uint8)
        records[:, -8:] = (clocks + 1).view(torch.uint8)
        store.native.unpack(t, table_slots, records)
    store.release(slots, offsets, dirty=True)


def content(store):
    results = []
    for t in range(len(TABLES)):
        rows = {}
        for ids, records in store.scan(t):
            weights = records[:, :16].clone(memory_format=PACKED).view(torch.float32)
            clocks = records[:, -8:].clone(memory_format=PACKED).view(torch.int64).flatten()
            for i, row in enumerate(ids.tolist()):
                assert row not in rows
                rows[row] = (weights[i], int(clocks[i]))
        results.append(rows)
    return results


def assert_same(result, wanted):
    for actual, expected in zip(result, wanted, strict=True):
        assert actual.keys() == expected.keys()
        for row, (weight, clock) in actual.items():
            assert torch.equal(weight, expected[row][0]) and clock == expected[row][1]


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_commit_is_of_the_moment_it_began(tmp_path, is_beside):
    """Training, evictions and deletions go on between its beginning and its end."""
    random = torch.Generator().manual_seed(0)
    store, truth = open_store(tmp_path), [{}, {}, {}]
    wanted = {}
    for step in range(1, 9):
        for _ in range(3):
            train(store, *batch(random), truth)
        wanted[step] = [dict(rows) for rows in truth]
        store.begin_commit()
        finishing = threading.Thread(target=store.finish_commit, args=(step,))
        if is_beside:
            finishing.start()
        for _ in range(4):
            train(store, *batch(random), truth)
            gone = torch.randperm(40, generator=random)[:5]
            for t in range(len(TABLES)):
                store.delete(t, gone)
                for row in gone.tolist():
                    truth[t].pop(row, None)
        if not is_beside:
            finishing.start()
        finishing.join()
        assert not store._is_committing
    assert_same(content(store), truth)
    assert store.sources.evicted_dirty > 0 and store.sources.read + store.sources.copied > 0
    close(store)
    for step in (8, 5, 1):  # newest first: opening an older one gives the newer ones up
        again = open_store(tmp_path, step)
        assert_same(content(again), wanted[step])
        close(again)


def test_a_row_deleted_while_in_use_and_trained_again_is_no_part_of_the_commit_between(tmp_path):
    store, truth = open_store(tmp_path), [{}, {}, {}]
    ids, offsets = torch.tensor([3, 5, 7]), torch.tensor([0, 1, 2, 3])
    slots, job = store.acquire(ids, offsets)  # as a batch ahead does
    store.wait(job)
    train(store, ids, offsets, truth)
    for t in range(3):
        store.delete(t, ids[t : t + 1])
        truth[t].clear()
    store.release(slots, offsets, dirty=True)
    store.begin_commit()
    train(store, ids, offsets, truth)
    store.finish_commit(1)
    assert_same(content(store), truth)
    close(store)
    again = open_store(tmp_path, 1)
    assert_same(content(again), [{}, {}, {}])
    close(again)


def test_what_an_abandoned_commit_did_not_save_is_in_the_next(tmp_path):
    random = torch.Generator().manual_seed(1)
    store, truth = open_store(tmp_path), [{}, {}, {}]
    for _ in range(5):
        train(store, *batch(random), truth)
    store.begin_commit()
    with pytest.raises(StorageError, match="second begin_commit"):
        store.begin_commit()
    train(store, *batch(random), truth)
    store.abandon_commit()
    store.abandon_commit()  # nothing to give up any more
    commit_rows(store, 1)
    close(store)
    again = open_store(tmp_path, 1)
    assert_same(content(again), truth)
    close(again)


def test_a_commit_writes_only_what_changed(tmp_path):
    random = torch.Generator().manual_seed(2)
    store, truth = open_store(tmp_path), [{}, {}, {}]
    train(store, *batch(random), truth)
    commit_rows(store, 1)
    before = [log.log.counts()["rows_written"] for log in store.logs.values()]
    ids, offsets = torch.tensor([3, 5, 7]), torch.tensor([0, 1, 2, 3])
    train(store, ids, offsets, truth)
    commit_rows(store, 2)
    after = [log.log.counts()["rows_written"] for log in store.logs.values()]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]
    # Rows only looked at leave without a write.
    for _ in range(20):
        slots, job = store.acquire(*(wanted := batch(random)))
        store.wait(job)
        store.release(slots, wanted[1], dirty=False)
    assert store.sources.evicted_clean > 0 and store.sources.evicted_dirty == 0
    assert [log.log.counts()["rows_written"] for log in store.logs.values()] == after
    close(store)


def test_many_jobs_at_once_and_reads_beside_them(tmp_path):
    """Acquires run ahead; evaluation and deletions see every row whole."""
    random = torch.Generator().manual_seed(3)
    store, truth = open_store(tmp_path, capacity=[100, 100, 40]), [{}, {}, {}]
    for _ in range(30):
        train(store, *batch(random), truth)
    commit_rows(store, 1)
    close(store)
    store = open_store(tmp_path, 1, capacity=[100, 100, 40])  # nothing is in memory
    window = [(batch(random, (10, 10, 5))) for _ in range(8)]
    jobs = [store.acquire(*item) for item in window]
    for t in range(len(TABLES)):
        rows = torch.tensor(sorted(truth[t]))
        offsets = torch.tensor([0] * (t + 1) + [len(rows)] * (len(TABLES) - t))
        read = store.read(rows, offsets)[t]
        assert torch.equal(read, torch.stack([truth[t][row][0] for row in rows.tolist()]))
    for (ids, offsets), (slots, job) in zip(window, jobs, strict=True):
        store.wait(job)
        for t in range(len(TABLES)):
            table_slots = slots[offsets[t] : offsets[t + 1]].contiguous()
            clocks = torch.as_tensor(store.native.clocks(t, table_slots)).tolist()
            rows = ids[offsets[t] : offsets[t + 1]].tolist()
            assert clocks == [truth[t].get(row, (0, 0))[1] for row in rows]
        store.release(slots, offsets, dirty=False)
    sources = store.sources
    assert sources.read > 0 and sources.bytes_read == sources.read * TABLES[0].record_bytes
    close(store)


@pytest.mark.parametrize("cache_rows", [0, 10])
def test_a_store_opened_again_keeps_the_rows_used_most(cache_rows, tmp_path):
    """Rows' clocks say how often they were used, whichever process did it."""
    store, truth = open_store(tmp_path, cache_rows=cache_rows), [{}, {}, {}]

    def of(first, last):
        return torch.arange(first, last), torch.tensor([0, 0, last - first, last - first])

    for _ in range(12):
        train(store, *of(0, 40), truth)
    runs = [(first, first + 20) for first in range(40, 300, 20)]
    for run in runs:
        train(store, *of(*run), truth)
    commit_rows(store, 12 + len(runs))
    close(store)

    store = open_store(tmp_path, step=12 + len(runs), cache_rows=cache_rows)
    for run in [*reversed(runs), (0, 40), *runs]:  # what is used once passes by
        train(store, *of(*run), truth)
    slots, job = store.acquire(*of(0, 40))
    store.wait(job)
    store.release(slots, of(0, 40)[1], dirty=False)
    assert job.counts()["resident"] == 40
    close(store)


@pytest.mark.parametrize("leave", ["flush", "commit", "evict"])
def test_a_row_that_was_never_trained_leaves_no_record(leave, tmp_path):
    """A first value is computed from the id, so that a record would only take room, and say that it was trained."""
    store, truth = open_store(tmp_path), [{}, {}, {}]
    trained, offsets = torch.arange(100, 120), torch.tensor([0, 0, 20, 20])
    train(store, trained, offsets, truth)
    slots, job = store.acquire(torch.arange(20), offsets)
    store.wait(job)
    store.release(slots, offsets, dirty=True)  # a batch whose gradients were dropped
    if leave == "flush":
        store.flush()
    elif leave == "commit":
        commit_rows(store, 1)
    else:
        train(store, torch.arange(200, 260), torch.tensor([0, 0, 60, 60]), truth)
        trained = torch.cat([trained, torch.arange(200, 260)])
        store.flush()
    log = store.logs[1]
    assert log.count_rows_and_bytes()["rows_written"] == len(trained)
    listed = torch.cat([rows.ids for rows in log.scan()])
    assert sorted(listed.tolist()) == trained.tolist()
    close(store)


@pytest.mark.parametrize("cache_rows", [0, 10, 300])  # none, too few for a batch, enough
def test_rows_leave_and_return_with_their_counts_of_uses(cache_rows, tmp_path):
    """Through every tier, twice: half of the rows are used more often than their updates say."""
    store, truth = open_store(tmp_path, cache_rows=cache_rows), [{}, {}, {}]

    def of(first, last):
        return torch.arange(first, last), torch.tensor([0, 0, last - first, last - first])

    def use(first, last, times):
        for _ in range(times):
            slots, job = store.acquire(*of(first, last))
            store.wait(job)
            store.release(slots, of(first, last)[1], dirty=False)

    train(store, *of(0, 40), truth)
    use(0, 20, 12)
    train(store, *of(100, 160), truth)
    use(100, 160, 40)  # so that no count of the others is an old one that the clock has lapped
    before = store.sources.mapped
    train(store, *of(0, 40), truth)
    assert store.sources.mapped - before == (40 if cache_rows == 300 else 0)
    train(store, *of(200, 260), truth)
    store.flush()
    quarters = torch.empty(40, dtype=torch.uint8)  # of doublings of the count
    store.logs[1].log.frequencies(torch.arange(40), quarters)
    assert quarters[:20].min() >= 4 * 3.5 and quarters[20:].max() <= 4 * 2.5
    close(store)


def test_deleting_a_row_that_is_on_its_way(tmp_path):
    random = torch.Generator().manual_seed(4)
    store, truth = open_store(tmp_path), [{}, {}, {}]
    train(store, *batch(random), truth)
    births = store.read(torch.arange(40), torch.tensor([0, 40, 40, 40]))[0]
    commit_rows(store, 1)
    close(store)
    for _ in range(20):
        store = open_store(tmp_path, 1)
        rows = torch.tensor(sorted(truth[0]))
        offsets = torch.tensor([0, len(rows), len(rows), len(rows)])
        slots, job = store.acquire(rows, offsets)
        store.delete(0, rows)
        store.wait(job)
        assert torch.as_tensor(store.native.clocks(0, slots)).tolist() == [0] * len(rows)
        store.release(slots, offsets, dirty=False)
        assert content(store)[0] == {}
        close(store)
    assert len(births) == 40


def test_a_rotten_row_is_named_and_never_trained_on(tmp_path):
    random = torch.Generator().manual_seed(5)
    store, truth = open_store(tmp_path), [{}, {}, {}]
    train(store, *batch(random), truth)
    commit_rows(store, 1)
    close(store)
    path = next((tmp_path / "cached").glob("segment-*.rows"))
    data = bytearray(path.read_bytes())
    data[64 + 20] ^= 1  # in the first row's weights
    path.write_bytes(data)
    store = open_store(tmp_path, 1)
    rows = torch.tensor(sorted(truth[1]))
    offsets = torch.tensor([0, 0, len(rows), len(rows)])
    slots, job = store.acquire(rows, offsets)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=path.name):
            store.wait(job)
    store.release(slots, offsets, dirty=False)
    for call in (
        lambda: store.acquire(rows, offsets),
        lambda: store.read(rows, offsets),
        lambda: store.delete(1, rows),
        store.begin_commit,
        store.flush,
        lambda: commit_rows(store, 2),
    ):
        with pytest.raises(CorruptionError, match=path.name):
            call()
    close(store)


def test_acquire_waits_for_the_writer(tmp_path):
    """Not more than its limit waits in memory, and what waits is not lost."""
    random = torch.Generator().manual_seed(6)
    store, truth = open_store(tmp_path, pending_bytes=4096), [{}, {}, {}]
    for _ in range(60):
        train(store, *batch(random), truth)
    assert store.logs[0].writer.pending_bytes <= 3 * 4096 + 4096
    assert_same(content(store), truth)
    close(store)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 7, 16])
@pytest.mark.parametrize("rows", [None, 60_000])
def test_rows_take_no_more_than_the_budget_says(tmp_path, dtype, dim, rows):
    """While a commit is under way, and after evictions."""
    table = Table("item", dim, rows=rows, dtype=dtype, master=dtype == "bfloat16")
    budget = 20_000 * slot_bytes(table)
    (planned,) = build_plan([table], 1, PlanConfig(memory={"dram": budget})).tables
    capacity = planned.capacity_rows
    log = open_test_log(
        tmp_path,
        table_name="item",
        record_bytes=table.record_bytes,
        identity="run",
        step=None,
        rows=rows,
    )
    store = open_dram_store([table], [capacity], seed=1, backings=[log])
    for start in range(0, 60_000, 5_000):
        records = torch.zeros(5_000, table.record_bytes, dtype=torch.uint8)
        records[:, -8] = 1
        store.write_rows(0, torch.arange(start, start + 5_000), records)
    store.begin_commit()
    assert 0.9 * budget < store.native.resident_bytes() <= budget
    store.abandon_commit()
    log.close()


@pytest.mark.parametrize("is_backed", [False, True])
def test_a_table_wholly_in_mapped_memory_is_counted_there(is_backed, tmp_path):
    """Also without files below."""
    logs = open_store(tmp_path / "logs") if is_backed else None
    store = open_dram_store(
        TABLES,
        CAPACITY,
        seed=1,
        mapped=MappedTier(tmp_path / "mapped", [2]),
        backings=logs.backings if logs else (),
    )
    ids, offsets = torch.cat([torch.arange(20)] * 3), torch.tensor([0, 20, 40, 60])
    for _ in range(3):
        slots, job = store.acquire(ids, offsets)
        store.wait(job)
        store.release(slots, offsets, dirty=False)
    tiers = store.count_tiers()
    assert list(tiers)[:2] == ["dram", "mapped"]
    assert store.sources.born == 60
    assert tiers["dram"].hits == store.sources.resident == 2 * 40
    assert tiers["mapped"].hits == store.sources.mapped == 2 * 20
    weights, record = 4 * TABLES[2].width, TABLES[2].record_bytes
    assert 20 * weights <= tiers["mapped"].held_bytes == tiers["mapped"].live_bytes <= 20 * record
    assert 40 * weights <= tiers["dram"].held_bytes == store.resident_bytes()
    if logs:
        close(store)
        return
    everything = open_dram_store(TABLES, CAPACITY, seed=1)
    everything.acquire(ids, offsets)
    in_memory = everything.count_tiers()
    assert list(in_memory) == ["dram"]
    assert in_memory["dram"].held_bytes == tiers["dram"].held_bytes + tiers["mapped"].held_bytes
