"""HbmStore over rows in memory, without and with logs below them, on every device there is."""

from __future__ import annotations

import pytest
import torch
from devices import CUDA
from logs import commit_rows
from resident import IDS, TABLES, ResidentContract, grouped, read_all
from test_dram import open_logs

from colonnade import Table, Uniform
from colonnade.errors import BudgetExceeded, ConfigError, CorruptionError
from colonnade.store.dram import MappedTier, open_dram_store
from colonnade.store.hbm import open_hbm_store


class HbmContract(ResidentContract):
    device = "cpu"
    dram_rows: list[int] | None = None  # None: without logs, every row has room

    def mapped(self, place):
        return None

    def open(self, place, capacity_rows, step=None):
        backings = open_logs(place, step) if self.dram_rows else []
        below = open_dram_store(
            TABLES,
            self.dram_rows or [97, 97],
            seed=1,
            backings=backings,
            mapped=self.mapped(place),
        )
        return open_hbm_store(below, capacity_rows or [97, 97], self.device, seed=1)

    def train(self, store, slots, offsets):
        for t, rows in enumerate(store.rows):
            table_slots = slots[offsets[t] : offsets[t + 1]].long().to(rows.device)
            rows.weights[table_slots] += 1
            rows.clocks[table_slots] += 1

    def step(self, store, chosen, truth):
        """Train these rows, numbers into IDS by table."""
        ids, offsets = grouped(chosen)
        slots, job = store.acquire(ids, offsets)
        store.wait(job)
        store.before_update(slots, offsets)
        self.train(store, slots, offsets)
        store.release(slots, offsets, dirty=True)
        for rows, numbers in zip(truth, chosen, strict=True):
            rows[numbers] += 1

    def test_rows_put_deleted_and_listed(self, tmp_path):
        store = self.open(tmp_path, [20, 20])
        births = read_all(store)
        truth = [rows.clone() for rows in births]
        random = torch.Generator().manual_seed(3)
        for _ in range(12):
            self.step(store, [torch.randperm(len(ids), generator=random)[:9] for ids in IDS], truth)
            gone = torch.randperm(60, generator=random)[:7]
            stored, offsets = grouped([gone[:3], gone[2:5]])
            slots, _ = store.acquire(stored, offsets)
            for t, ids in enumerate(IDS):
                store.delete(t, torch.tensor(ids)[gone])
                truth[t][gone] = births[t][gone]
            store.wait(store.acquire(*grouped([gone[:0], gone[:0]]))[1])
            assert [store.clocks(0, slots[:3]).tolist()] == [[0, 0, 0]]  # born again in place
            store.release(slots, offsets, dirty=True)
            one = gone[:1]
            records = self.records_of(store, 0, torch.tensor(IDS[0])[gone[5:]])
            store.write_rows(0, torch.tensor(IDS[0])[one], records[:1])
            truth[0][one] = 7.0
            assert all(map(torch.equal, read_all(store), truth))
        for t, ids in enumerate(IDS):
            listed = {}
            for own, records in store.scan(t):
                weights = records[:, : 4 * TABLES[t].dim].contiguous().view(torch.float32)
                listed |= dict(zip(own.tolist(), weights, strict=True))
            trained = [i for i in range(len(ids)) if not torch.equal(truth[t][i], births[t][i])]
            assert sorted(listed) == sorted(ids[i] for i in trained)
            assert all(torch.equal(listed[ids[i]], truth[t][i]) for i in trained)

    def records_of(self, store, t, ids):
        """Rows of sevens with a clock of one."""
        table = TABLES[t]
        weights = torch.full((len(ids), table.dim), 7.0).view(torch.uint8)
        state = torch.zeros(len(ids), table.record_bytes - 4 * table.dim - 8, dtype=torch.uint8)
        clocks = torch.ones(len(ids), 1, dtype=torch.int64).view(torch.uint8)
        return torch.cat([weights, state, clocks], 1)

    def test_what_does_not_fit_the_level_below_comes_in_parts(self, tmp_path):
        if self.dram_rows is None:
            pytest.skip("without logs below, every row fits there")
        store = self.open(tmp_path, None)
        assert max(self.dram_rows) < 60
        truth = read_all(store)
        for _ in range(3):
            self.step(store, [torch.arange(97), torch.arange(62)], truth)
        assert all(map(torch.equal, read_all(store), truth))
        store.flush()
        assert all(map(torch.equal, store.below.read(*everything()), truth))

    def test_one_row_that_leaves_alone(self, tmp_path):
        """Row clock begins at a byte that is no multiple of eight."""
        table = Table("narrow", 2, rows=9, initializer=Uniform(scale=1.0))
        assert table.record_bytes % 8
        below = open_dram_store([table], [9], seed=1)
        store = open_hbm_store(below, [1], self.device, seed=1)
        offsets = torch.tensor([0, 1])
        births = store.read(torch.arange(9), torch.tensor([0, 9]))[0]
        for turn in range(18):
            slots, job = store.acquire(torch.tensor([turn % 9]), offsets)
            store.wait(job)
            self.train(store, slots, offsets)
            store.release(slots, offsets, dirty=True)
        assert store.sources.evicted_dirty == 17
        assert torch.equal(store.read(torch.arange(9), torch.tensor([0, 9]))[0], births + 1 + 1)

    def test_a_row_that_leaves_untrained_costs_no_write(self, tmp_path):
        store = self.open(tmp_path, [10, 10])
        for start in range(0, 50, 10):
            ids, offsets = grouped(
                [torch.arange(start, start + 10), torch.arange(start, start + 10)]
            )
            slots, job = store.acquire(ids, offsets)
            store.wait(job)
            store.release(slots, offsets, dirty=False)
        sources = store.sources
        assert (sources.evicted_clean, sources.evicted_dirty, sources.bytes_evicted) == (80, 0, 0)

    def test_rows_used_most_stay(self, tmp_path):
        store = self.open(tmp_path, [20, 20])
        often = torch.arange(10)
        for turn in range(30):
            seldom = 10 + (torch.arange(10) + 10 * turn) % 50
            for numbers in (often, often, seldom):
                ids, offsets = grouped([numbers, numbers])
                slots, job = store.acquire(ids, offsets)
                store.wait(job)
                store.release(slots, offsets, dirty=False)
        before = store.num_hits
        store.acquire(*grouped([often, often]))
        assert store.num_hits - before == 20

    def test_rows_needed_soonest_stay(self, tmp_path):
        store = self.open(tmp_path, [20, 20])
        numbers = torch.arange(20)
        codes = torch.tensor([1] * 10 + [255] * 4 + [100] * 6, dtype=torch.uint8)
        ids, offsets = grouped([numbers, numbers])
        slots, job = store.acquire(ids, offsets, codes.repeat(2))
        store.wait(job)
        store.release(slots, offsets, dirty=False)
        new = torch.arange(20, 27)
        ids, offsets = grouped([new, new])
        hints = torch.full((14,), 2, dtype=torch.uint8)
        slots, job = store.acquire(ids, offsets, hints)
        for t in range(2):
            stayed = store.directories[t].find_slots(torch.tensor(IDS[t])[:20].numpy()) >= 0
            assert stayed[:10].all() and not stayed[10:14].any() and stayed[14:].sum() == 3


def everything():
    return grouped([torch.arange(len(ids)) for ids in IDS])


class TestHbm(HbmContract):
    """Every row has room below."""

    def test_more_than_the_device_has_is_refused(self):
        below = open_dram_store(TABLES, [97, 97], seed=1)
        with pytest.raises(ConfigError, match=r"plan.memory.hbm: got [\d,]+ bytes .*Give hbm less"):
            open_hbm_store(below, [2**50, 97], self.device, seed=1)


class TestHbmOverFiles(HbmContract):
    """Rows fit neither the device nor memory."""

    dram_rows: list[int] | None = [50, 40]  # noqa: RUF012

    def test_commits_hold_what_is_newest_on_the_device(self, tmp_path):
        store = self.open(tmp_path, [30, 30])
        truth = read_all(store)
        random = torch.Generator().manual_seed(4)
        for step in range(1, 4):
            for _ in range(4):
                self.step(store, [torch.randperm(60, generator=random)[:12] for _ in IDS], truth)
            committed = [rows.clone() for rows in truth]
            store.begin_commit()
            for _ in range(4):
                self.step(store, [torch.randperm(60, generator=random)[:12] for _ in IDS], truth)
            store.finish_commit(step)
        assert all(map(torch.equal, read_all(store), truth))
        close(store)
        again = self.open(tmp_path, [30, 30], step=3)
        assert all(map(torch.equal, read_all(again), committed))
        close(again)

    def test_an_abandoned_commit_loses_nothing(self, tmp_path):
        store = self.open(tmp_path, [30, 30])
        truth = read_all(store)
        self.step(store, [torch.arange(12), torch.arange(12)], truth)
        store.begin_commit()
        self.step(store, [torch.arange(6, 18), torch.arange(12)], truth)
        store.abandon_commit()
        commit_rows(store, 1)
        close(store)
        again = self.open(tmp_path, [30, 30], step=1)
        assert all(map(torch.equal, read_all(again), truth))
        close(again)

    def test_a_rotten_row_is_named_and_never_trained_on(self, tmp_path):
        store = self.open(tmp_path, [30, 30])
        self.step(store, [torch.arange(12), torch.arange(12)], read_all(store))
        commit_rows(store, 1)
        close(store)
        path = next((tmp_path / "vocabulary").glob("segment-*.rows"))
        data = bytearray(path.read_bytes())
        data[64 + 20] ^= 1
        path.write_bytes(data)
        store = self.open(tmp_path, [30, 30], step=1)
        ids, offsets = grouped([torch.arange(12), torch.arange(0)])
        slots, job = store.acquire(ids, offsets)
        for _ in range(2):
            with pytest.raises(CorruptionError, match=path.name):
                store.wait(job)
        store.release(slots, offsets, dirty=True)
        for call in (
            lambda: store.acquire(ids, offsets),
            lambda: store.wait(job),
            lambda: commit_rows(store, 2),
        ):
            with pytest.raises(CorruptionError, match=path.name):
                call()
        close(store)

    def test_a_write_down_that_fails_loses_nothing(self, tmp_path, monkeypatch):
        store = self.open(tmp_path, [20, 20])
        truth = read_all(store)
        self.step(store, [torch.arange(20), torch.arange(20)], truth)
        calls = []

        def fail(t, ids, records, write=store.below.write_back):
            calls.append(t)
            if len(calls) == 2:  # the first table's rows are below, the second's are not
                raise BudgetExceeded("no room")
            write(t, ids, records)

        monkeypatch.setattr(store.below, "write_back", fail)
        wanted = grouped([torch.arange(30, 40), torch.arange(30, 40)])
        with pytest.raises(BudgetExceeded):
            store.acquire(*wanted)
        assert [directory.num_pinned for directory in store.directories] == [0, 0]
        assert all(map(torch.equal, read_all(store), truth))
        slots, job = store.acquire(*wanted)
        store.wait(job)
        assert len(slots) == 20 and all(map(torch.equal, read_all(store), truth))


def close(store):
    for log in store.below.logs.values():
        log.close()


class TestHbmOverCache(TestHbmOverFiles):
    """Four tiers: a device, memory, evicted rows in mapped files, logs."""

    def mapped(self, place):
        return MappedTier(place / "mapped", cache_rows=[13] * len(TABLES))


@CUDA
class TestHbmOnCuda(TestHbm):
    device = "cuda"


@CUDA
class TestHbmOverFilesOnCuda(TestHbmOverFiles):
    device = "cuda"
