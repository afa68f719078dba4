"""The conformance suite of `Backing` (store/contract.py) with its commits: subclass, give `open`, done.

Every store runs beside a `Twin`, a dict that says what it must answer.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colonnade.errors import CheckpointError, StorageError

LIMITS = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**62, 2**63 - 2, 2**63 - 1]
WIDTHS = [9, 16, 17, 72, 1024]


def make_records(ids, record_bytes: int, salt: int) -> torch.Tensor:
    """Make records (N, record_bytes) uint8 that depend on id and salt only; salt 0 gives zeros, which are a value
    too."""
    ids = np.asarray(ids, np.int64).view(np.uint64)[:, None]
    column = np.arange(record_bytes, dtype=np.uint64)[None, :]
    mixed = (
        ids * np.uint64(0x9E3779B97F4A7C15) + column * np.uint64(31) + np.uint64(salt)
    ) * np.uint64(salt)
    return torch.from_numpy((mixed >> np.uint64(24)).astype(np.uint8))


class Twin:
    """A store, and what it must contain."""

    def __init__(self, suite: BackingContract, directory: Path, record_bytes: int) -> None:
        self.suite = suite
        self.directory = directory
        self.record_bytes = record_bytes
        self.rows: dict[int, bytes] = {}
        self.commits: dict[int, dict[int, bytes]] = {}
        self.step = 0
        self.store = suite.open(directory, record_bytes=record_bytes, step=None)

    def write(self, ids, salt: int) -> None:
        records = make_records(ids, self.record_bytes, salt)
        done = self.store.write(torch.tensor(ids, dtype=torch.int64), records).wait()
        assert done.dtype == torch.bool and done.tolist() == [True] * len(ids)
        self.rows.update((i, bytes(r)) for i, r in zip(ids, records.numpy(), strict=True))

    def delete(self, ids) -> None:
        self.store.delete(torch.tensor(ids, dtype=torch.int64))
        for i in ids:
            self.rows.pop(i, None)

    def commit(self) -> None:
        self.step += 1
        manifest = self.store.commit(self.step)
        self.commits[self.step] = dict(self.rows)
        assert (manifest.step, manifest.num_rows) == (self.step, len(self.rows))
        assert self.store.commits() == sorted(self.commits)

    def collect(self) -> None:
        self.store.collect_garbage()

    def reopen(self, step: int | None) -> None:
        self.store.close()
        self.store = self.suite.open(self.directory, record_bytes=self.record_bytes, step=step)
        self.commits = {
            s: rows for s, rows in self.commits.items() if step is not None and s <= step
        }
        self.rows = dict(self.commits[step]) if step is not None else {}
        assert self.store.commits() == sorted(self.commits)

    def prune(self, keep) -> None:
        self.store.prune(keep)
        self.commits = {step: self.commits[step] for step in keep}
        assert self.store.commits() == sorted(self.commits)

    def check(self, more_ids=()) -> None:
        check_content(self.store, self.rows, self.record_bytes, more_ids)


def check_content(store, rows: dict[int, bytes], record_bytes: int, more_ids=()) -> None:
    """The store answers `rows` to reads, and to a scan; other ids are missing and leave `out` alone."""
    ids = sorted({*rows, *more_ids, *LIMITS}, key=lambda i: (i * 7919) % 1009)
    out = torch.full((len(ids), record_bytes), 0xA5, dtype=torch.uint8)
    result = store.read(torch.tensor(ids, dtype=torch.int64), out).wait()
    assert result.dtype == torch.bool and result.shape == (len(ids),)
    untouched = b"\xa5" * record_bytes
    for i, is_found, record in zip(ids, result.tolist(), out.numpy(), strict=True):
        assert is_found == (i in rows), i
        assert bytes(record) == rows.get(i, untouched), i
    scanned: dict[int, bytes] = {}
    for batch in store.scan():
        assert batch.ids.dtype == torch.int64 and batch.records.dtype == torch.uint8
        for i, record in zip(batch.ids.tolist(), batch.records.numpy(), strict=True):
            assert i not in scanned, f"row {i} scanned twice"
            scanned[i] = bytes(record)
    assert scanned == rows
    assert len(store) == len(rows)


ids_of_a_batch = st.lists(st.sampled_from([*LIMITS, *range(2, 30)]), max_size=20)
operations = st.one_of(
    st.tuples(st.just("write"), ids_of_a_batch, st.integers(0, 3)),
    st.tuples(st.just("write"), ids_of_a_batch, st.integers(0, 3)),
    st.tuples(st.just("delete"), ids_of_a_batch),
    st.tuples(st.just("commit")),
    st.tuples(st.just("reopen"), st.integers(0, 3)),
    st.tuples(st.just("prune"), st.integers(0, 3)),
    st.tuples(st.just("collect")),
    st.tuples(st.just("check")),
)


class BackingContract:
    """Laws of `Backing`. A store under test also has commits(), prune(), close() and len()."""

    def open(
        self, directory: Path, *, record_bytes: int, step: int | None, read_only: bool = False
    ):
        """The store in `directory` as committed at `step`; None: empty. Small segments, please."""
        raise NotImplementedError

    @given(ops=st.lists(operations, max_size=25), record_bytes=st.sampled_from(WIDTHS))
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    def test_random_operations(self, ops, record_bytes):
        self.follow(ops, record_bytes)

    @pytest.mark.slow
    @given(ops=st.lists(operations, max_size=40), record_bytes=st.sampled_from(WIDTHS))
    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    def test_many_random_operations(self, ops, record_bytes):
        self.follow(ops, record_bytes)

    def follow(self, ops, record_bytes) -> None:
        with tempfile.TemporaryDirectory() as directory:
            twin = Twin(self, Path(directory) / "store", record_bytes)
            for name, *arguments in ops:
                if name == "reopen":
                    steps = [None, *sorted(twin.commits)]  # 0: the newest
                    twin.reopen(steps[max(len(steps) - 1 - arguments[0], 0)])
                elif name == "prune":
                    twin.prune(sorted(twin.commits)[arguments[0] :])
                else:
                    getattr(twin, name)(*arguments)
            twin.check()
            twin.commit()
            twin.reopen(twin.step)
            twin.check()
            for step in twin.commits:
                with self.open(
                    twin.directory, record_bytes=record_bytes, step=step, read_only=True
                ) as store:
                    check_content(store, twin.commits[step], record_bytes)
            twin.store.close()

    @pytest.mark.parametrize("record_bytes", WIDTHS)
    @pytest.mark.parametrize("num_rows", [0, 1, 251])
    def test_sizes(self, tmp_path, num_rows, record_bytes):
        twin = Twin(self, tmp_path / "store", record_bytes)
        twin.write(list(range(-5, num_rows - 5)), salt=1)
        twin.check()
        twin.commit()
        twin.reopen(1)
        twin.check()

    def test_ids_at_the_limits_of_int64(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write(LIMITS, salt=1)
        twin.delete(LIMITS[::2])
        twin.check()
        twin.commit()
        twin.reopen(1)
        twin.check()

    def test_a_row_of_zeros_is_not_a_missing_row(self, tmp_path):
        twin = Twin(self, tmp_path, 24)
        twin.write([7], salt=0)
        assert twin.rows[7] == bytes(24)
        twin.check(more_ids=[8])

    def test_the_latest_write_wins_also_inside_a_batch(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write([1, 2, 3], salt=1)
        first, last = make_records([2], 16, 2), make_records([2], 16, 3)
        twin.store.write(
            torch.tensor([2, 4, 2]), torch.cat([first, make_records([4], 16, 2), last])
        )
        twin.rows.update({2: bytes(last.numpy()), 4: bytes(make_records([4], 16, 2).numpy())})
        twin.check()
        twin.commit()
        twin.reopen(1)
        twin.check()

    def test_deleted_rows_stay_deleted(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write(range(100), salt=1)
        twin.commit()
        twin.delete([*range(50), 50, 50, 1000])
        twin.check(more_ids=[1000])
        twin.write([3], salt=2)
        for _ in range(12):
            twin.commit()
            twin.prune([twin.step])
            twin.write([99], salt=twin.step)
            twin.collect()
            twin.check()
            twin.reopen(twin.step)
            twin.check()

    def test_an_id_asked_for_twice_in_a_read(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write([1, 2], salt=1)
        out = torch.zeros(3, 16, dtype=torch.uint8)
        assert twin.store.read(torch.tensor([2, 1, 2]), out).wait().all()
        assert torch.equal(out, make_records([2, 1, 2], 16, 1))

    def test_many_reads_under_way_and_waited_for_in_any_order(self, tmp_path):
        twin = Twin(self, tmp_path, 72)
        twin.write(range(2000), salt=1)
        pending = []
        for i in range(20):
            ids = torch.randperm(3000, generator=torch.Generator().manual_seed(i))[:500]
            out = torch.zeros(500, 72, dtype=torch.uint8)
            pending.append((ids, out, twin.store.read(ids, out)))
        twin.write(range(2000), salt=2)  # a read sees the store as of its call
        for ids, out, read in reversed(pending):
            result = read.wait()
            assert torch.equal(result, read.wait())
            assert torch.equal(result, ids < 2000)
            assert torch.equal(out[result], make_records(ids[result], 72, 1))

    def test_a_read_nobody_waits_for_does_no_harm(self, tmp_path):
        twin = Twin(self, tmp_path, 1024)
        twin.write(range(500), salt=1)
        for _ in range(50):
            twin.store.read(torch.arange(500), torch.empty(500, 1024, dtype=torch.uint8))
        twin.check()

    def test_threads_read_whole_rows_that_never_get_older(self, tmp_path):
        twin = Twin(self, tmp_path, 32)
        ids = torch.arange(64)

        def version(value: int) -> torch.Tensor:
            return torch.full((64, 32), value, dtype=torch.uint8)

        twin.store.write(ids, version(0))
        stop, failures = threading.Event(), []

        def read_on() -> None:
            newest = torch.zeros(64, dtype=torch.uint8)
            while not stop.is_set():
                out = torch.full((64, 32), 255, dtype=torch.uint8)
                result = twin.store.read(ids, out).wait()
                if not (result.all() and (out == out[:, :1]).all() and (out[:, 0] >= newest).all()):
                    failures.append(out)
                newest = out[:, 0]

        threads = [threading.Thread(target=read_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        for value in range(1, 120):
            twin.store.write(ids, version(value))
            if value % 5 == 0:  # commits compact, prunes remove files under the readers
                twin.store.commit(value)
                twin.store.prune([value])
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures

    def test_steps_ascend(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.commit()
        assert twin.store.commit(1).step == 1  # again, with nothing new: the same commit
        with pytest.raises(CheckpointError, match="wanted one after step 1"):
            twin.store.commit(0)
        twin.write([1], salt=1)
        with pytest.raises(CheckpointError, match="wanted one after step 1"):
            twin.store.commit(1)
        twin.commit()

    def test_going_back_forgets_what_came_after(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        for salt in (1, 2, 3):
            twin.write(range(10), salt=salt)
            twin.commit()
        twin.reopen(2)
        twin.check()
        twin.step = 2
        twin.write([4], salt=9)
        twin.commit()  # step 3 once more, with other rows
        twin.reopen(3)
        twin.check()
        twin.reopen(None)
        twin.check()
        with pytest.raises(CheckpointError, match="step 3"):
            self.open(tmp_path, record_bytes=16, step=3, read_only=True)

    def test_what_is_not_committed_is_gone(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write(range(10), salt=1)
        twin.commit()
        twin.write(range(10), salt=2)
        twin.delete([3])
        twin.reopen(1)
        twin.check()

    def test_a_commit_can_be_read_while_the_writer_goes_on(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write(range(50), salt=1)
        twin.commit()
        reader = self.open(tmp_path, record_bytes=16, step=1, read_only=True)
        for salt in range(2, 8):
            twin.write(range(50), salt=salt)
            twin.commit()
        newest = twin.step
        first = twin.commits[1]
        twin.prune([newest])
        check_content(reader, first, 16)
        ids, records = torch.arange(2), torch.zeros(2, 16, dtype=torch.uint8)
        for change in (
            lambda: reader.write(ids, records),
            lambda: reader.delete(ids),
            lambda: reader.commit(9),
            lambda: reader.prune([]),
        ):
            with pytest.raises(StorageError, match="read-only"):
                change()
        twin.check()

    def test_prune(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        for salt in (1, 2, 3, 4):
            twin.write(range(salt, 20), salt=salt)
            twin.commit()
        with pytest.raises(CheckpointError, match="7"):
            twin.store.prune([4, 7])
        twin.prune([2, 4])
        twin.check()
        for step in (1, 3):
            with pytest.raises(CheckpointError, match=f"step {step} "):
                self.open(tmp_path, record_bytes=16, step=step, read_only=True)
        twin.reopen(4)
        twin.check()
        twin.reopen(2)
        twin.check()
        twin.prune([])
        twin.check()
        twin.commit()
        twin.check()

    def test_a_scan_gives_the_rows_of_its_beginning(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write(range(300), salt=1)
        twin.commit()
        twin.write(range(290, 600), salt=2)
        twin.delete([5])
        rows = dict(twin.rows)
        scan = twin.store.scan()
        first = next(scan)
        twin.write(range(400), salt=3)
        twin.delete([299, 500])
        twin.commit()
        twin.store.collect_garbage()
        twin.prune([2])
        scanned = {}
        for batch in (first, *scan):
            for i, record in zip(batch.ids.tolist(), batch.records.numpy(), strict=True):
                assert i not in scanned
                scanned[i] = bytes(record)
        assert scanned == rows
        twin.check()

    def test_what_is_frozen_is_committed(self, tmp_path):
        """Rows change after the freeze; those written for the commit take their place in it."""
        twin = Twin(self, tmp_path, 16)
        twin.write(range(300), salt=1)
        twin.commit()
        twin.write(range(100, 200), salt=2)
        twin.delete([7])
        twin.store.freeze()
        frozen = dict(twin.rows)
        late = make_records(range(40, 60), 16, 4)
        twin.store.write(torch.arange(40, 60), late, is_for_commit=True)
        for i, record in zip(range(40, 60), late.numpy(), strict=True):
            twin.rows[i] = frozen[i] = bytes(record)
        twin.write(range(50, 250), salt=3)
        twin.write([7, 1000], salt=3)
        twin.delete(range(280, 290))
        twin.check()
        manifest = twin.store.commit(2)
        assert manifest.num_rows == len(frozen)
        twin.write([1], salt=8)
        assert twin.store.commit(2) == manifest  # tried again because another table's store failed
        twin.commits[2], twin.step = frozen, 2
        twin.check()
        with self.open(twin.directory, record_bytes=16, step=2, read_only=True) as store:
            check_content(store, frozen, 16)
        twin.commit()
        twin.reopen(3)
        twin.check()
        twin.reopen(2)
        twin.check()

    def test_what_was_thawed_is_not_committed(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.write(range(50), salt=1)
        twin.store.freeze()
        twin.write(range(10), salt=2)
        with pytest.raises(StorageError, match="second freeze"):
            twin.store.freeze()
        twin.store.thaw()
        twin.store.thaw()  # nothing to do
        twin.commit()
        twin.reopen(1)
        twin.check()

    def test_a_commit_while_others_write_and_read(self, tmp_path):
        twin = Twin(self, tmp_path, 32)
        twin.write(range(200), salt=1)
        stop, failures = threading.Event(), []

        def write_on() -> None:
            try:
                salt = 2
                while not stop.is_set():
                    ids = torch.arange(salt % 50, 200)
                    records = make_records(ids.numpy(), 32, salt)
                    twin.store.write(ids, records)
                    out = torch.zeros_like(records)
                    assert twin.store.read(ids, out).wait().all() and torch.equal(out, records)
                    salt += 1
            except BaseException as error:
                failures.append(error)

        for step in range(1, 6):
            twin.store.freeze()
            rows = {}
            for batch in twin.store.scan():
                rows |= dict(
                    zip(batch.ids.tolist(), map(bytes, batch.records.numpy()), strict=True)
                )
            stop.clear()
            thread = threading.Thread(target=write_on)
            thread.start()
            assert twin.store.commit(step).num_rows == len(rows)
            stop.set()
            thread.join()
            assert not failures, failures
            with self.open(twin.directory, record_bytes=32, step=step, read_only=True) as store:
                check_content(store, rows, 32)
            twin.store.prune([step])

    def test_wrong_arrays(self, tmp_path):
        store = Twin(self, tmp_path, 16).store
        records = torch.zeros(3, 16, dtype=torch.uint8)
        ids = torch.arange(3)
        for bad_ids, bad_records in [
            (ids.int(), records),
            (ids.reshape(3, 1), records),
            (torch.arange(6)[::2], records),
            (ids, records[:2]),
            (ids, records[:, :15]),
            (ids, records.to(torch.int8)),
            (ids, torch.zeros(16, 3, dtype=torch.uint8).T),
        ]:
            with pytest.raises(ValueError, match=r"got .* wanted"):
                store.write(bad_ids, bad_records)
            with pytest.raises(ValueError, match=r"got .* wanted"):
                store.read(bad_ids, bad_records)
        assert len(store) == 0

    def test_a_closed_store_says_so(self, tmp_path):
        twin = Twin(self, tmp_path, 16)
        twin.store.close()
        with pytest.raises(StorageError, match="closed"):
            twin.write([1], salt=1)
        with pytest.raises(StorageError, match="closed"):
            twin.check()
