"""The writer's and the collector's threads: budgets, room, errors, ends; and that neither outlives its work."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from forked_script import run_script
from hypothesis import given
from hypothesis import strategies as st
from logs import open_test_log

from colonnade.errors import StorageError
from colonnade.files.disk import Disk
from colonnade.store.log import background_worker
from colonnade.store.log.backing import LogBacking
from colonnade.store.log.compaction import BUSY_SHARE, Collector
from colonnade.store.log.writer import LogWriter, WriteBudget


class Source:
    """Chunks of 1000 bytes that are written by being counted."""

    def __init__(self, chunks: int, problem: Exception | None = None) -> None:
        self.remaining, self.written, self.problem = chunks, [], problem
        self.gate = threading.Event()
        self.gate.set()

    def write_next_chunk(self) -> int:
        self.gate.wait()
        if not self.remaining:
            return 0
        if self.problem is not None:
            raise self.problem
        self.remaining -= 1
        self.written.append(time.monotonic())
        return 1000

    def list_sealed_unfinished(self) -> set[int]:
        return {1} if self.remaining else set()

    @property
    def has_work(self) -> bool:
        return self.remaining > 0

    @property
    def pending_bytes(self) -> int:
        return 1000 * self.remaining


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 3)), min_size=1, max_size=50))
def test_a_budget_is_kept_on_average(writes):
    """A second's worth may go at once; beyond it, bytes take their time."""
    budget = WriteBudget(1000.0)
    clock = last = 0.0
    written = 0
    for num_bytes, pause in writes:
        clock += pause
        written += num_bytes
        delay = budget.compute_delay(num_bytes, clock - last)
        last = clock
        clock += delay
        assert written <= 1000 * (clock + 1) + 1e-6
    assert WriteBudget(None).compute_delay(10**12, 0.0) == 0.0


def test_the_writer_honours_its_budget():
    writer, source = LogWriter(bytes_per_second=50_000), Source(80)
    start = time.monotonic()
    writer.add_source(source)
    writer.flush(source)
    assert time.monotonic() - start >= (80_000 - 1000 - 50_000) / 50_000
    assert writer.bytes_written == 80_000
    writer.remove_source(source)


def test_many_sources_take_turns():
    writer, sources = LogWriter(), [Source(50) for _ in range(4)]
    for source in sources:
        source.gate.clear()
        writer.add_source(source)
    for source in sources:
        source.gate.set()
    for source in sources:
        writer.flush(source)
    # All begin before one has ended.
    assert max(s.written[0] for s in sources) < min(s.written[-1] for s in sources)
    for source in sources:
        writer.remove_source(source)


def test_an_error_is_told_to_whoever_waits_and_is_tried_again():
    problem = StorageError(errno.ENOSPC, "/d: could not append: full. Free space")
    writer, source = LogWriter(pending_bytes=2000), Source(5, problem)
    writer.add_source(source)
    for wait in (writer.wait_for_room, lambda: writer.flush(source)) * 3:
        with pytest.raises(StorageError, match="could not append") as caught:
            wait()
        assert caught.value.errno == errno.ENOSPC and caught.value.__cause__ is problem
    source.problem = None
    assert writer.wait_for_room() is True
    writer.flush(source)
    assert source.remaining == 0 and writer.pending_bytes == 0
    writer.remove_source(source)


def test_rows_that_can_wait_leave_room_for_those_that_cannot():
    """A commit or a collection waits at half of the limit, so that an eviction never waits for it."""
    writer, source = LogWriter(pending_bytes=8000), Source(6)
    source.gate.clear()
    writer.add_source(source)
    assert writer.wait_for_room(timeout=0) is True and writer.stall_seconds == 0.0
    behind = threading.Thread(target=writer.wait_for_spare_room)
    behind.start()
    behind.join(0.05)
    assert behind.is_alive()
    source.gate.set()
    behind.join(30)
    assert not behind.is_alive() and writer.stall_seconds == 0.0
    writer.remove_source(source)


def test_collecting_goes_on_while_a_full_disk_refuses_to_write():
    writer = LogWriter(pending_bytes=8000)
    source = Source(6, StorageError(errno.ENOSPC, "full"))
    writer.add_source(source)
    writer.wait_for_spare_room()
    source.remaining = 9
    with pytest.raises(StorageError, match="full"):
        writer.wait_for_spare_room()
    writer.remove_source(source)


def test_an_error_nobody_waits_for_is_tried_again_by_itself():
    source = Source(5, StorageError(errno.EIO, "no"))
    writer = LogWriter()
    writer.add_source(source)
    writer.wake()
    time.sleep(0.05)
    source.problem = None
    deadline = time.monotonic() + 20
    while source.remaining and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not source.remaining
    writer.remove_source(source)


def test_a_writer_that_is_closed_says_so_to_those_who_wait():
    writer, source = LogWriter(), Source(5)
    source.gate.clear()
    writer.add_source(source)
    failures = []

    def wait() -> None:
        try:
            writer.flush(source)
        except StorageError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    remover = threading.Thread(target=writer.remove_source, args=(source,))
    remover.start()
    time.sleep(0.05)
    assert remover.is_alive()  # a chunk is on its way
    source.gate.set()
    remover.join()
    thread.join()
    assert "closed" in str(failures[0])


def test_threads_end_with_their_last_source_and_begin_again():
    def alive() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name in ("log writer", "collector")]

    before = alive()
    writer, collector, source, garbage = LogWriter(), Collector(), Source(1), Garbage(1)
    for _ in range(3):
        writer.add_source(source)
        collector.add_source(garbage)
        assert len(alive()) == len(before) + 2
        writer.remove_source(source)
        collector.remove_source(garbage)
        assert alive() == before
        writer.remove_source(source)  # nothing to do


def opened(place, **changes):
    arguments = dict(table_name="t", record_bytes=64, identity="i", step=None)
    sizes = dict(segment_bytes=1 << 14, chunk_bytes=4096)
    return open_test_log(place, **(arguments | sizes | changes))


def test_a_store_that_is_dropped_lets_go_of_threads_lock_and_files(tmp_path, monkeypatch):
    """Dropped stores are released like closed ones, but a moment later."""
    monkeypatch.setattr(background_worker, "RETRY_SECONDS", 0.05)

    def used(place) -> LogBacking:
        store = opened(place)
        store.write(torch.arange(1000), torch.ones(1000, 64, dtype=torch.uint8))
        store.commit(1)
        store.write(torch.arange(500), torch.zeros(500, 64, dtype=torch.uint8))
        out = torch.empty(1000, 64, dtype=torch.uint8)
        assert store.read(torch.arange(1000), out).wait().all() and len(out.unique()) == 2
        return store

    def stored() -> set[str]:
        open_files = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
        files = {path for path in open_files if path.startswith(str(tmp_path))}
        return files | set(os.listdir("/proc/self/task"))

    used(tmp_path / "closed").close()  # threads that any store may use have begun
    before = stored()
    dropped = used(tmp_path / "dropped")
    during = stored() - before
    assert len(during) > 6
    del dropped
    gc.collect()
    deadline = time.monotonic() + 30
    while (remaining := stored() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not remaining
    with opened(tmp_path / "dropped", step=1) as again:
        assert len(again) == 1000


def test_a_store_that_is_dropped_while_its_disk_refuses_to_write_is_let_go(tmp_path, monkeypatch):
    """The error that its writer keeps for those who wait holds nothing of it."""
    monkeypatch.setattr(background_worker, "RETRY_SECONDS", 0.05)
    tries = []

    class Full(Disk):
        def perform(self, change, action):
            if change.verb == "append":
                tries.append(change.path)
                raise OSError(errno.ENOSPC, "full")
            return action()

    writer = LogWriter(pending_bytes=1000)
    store = opened(tmp_path, disk=Full(), writer=writer)
    store.write(torch.arange(1000), torch.zeros(1000, 64, dtype=torch.uint8))
    with pytest.raises(StorageError, match="Free space"):
        writer.wait_for_room()
    gone, received = weakref.ref(store.files), len(tries)
    deadline = time.monotonic() + 30
    while len(tries) < received + 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody takes these errors
    del store
    gc.collect()
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None and writer.pending_bytes == 0


class Garbage:
    """Pieces that take a while."""

    def __init__(self, pieces: int, is_space_short: bool = False) -> None:
        self.pieces, self.is_space_short, self.times, self.problem = (
            pieces,
            is_space_short,
            [],
            None,
        )

    def collect_garbage_piece(self) -> int:
        if self.problem is not None:
            self.problem, problem = None, self.problem
            raise problem
        if not self.pieces:
            return 0
        self.pieces -= 1
        time.sleep(0.02)
        self.times.append(time.monotonic())
        return 1


@pytest.mark.parametrize("is_space_short", [False, True])
def test_collection_leaves_most_of_the_time_to_others_unless_space_is_short(is_space_short):
    collector, garbage = Collector(), Garbage(8, is_space_short)
    collector.add_source(garbage)
    start = time.monotonic()
    collector.wake(garbage)
    while len(garbage.times) < 8:
        time.sleep(0.005)
    took = garbage.times[-1] - garbage.times[0]
    collector.remove_source(garbage)
    if not is_space_short:
        assert took >= 7 * 0.02 / BUSY_SHARE
    assert time.monotonic() - start < 60


def test_only_logs_with_work_are_asked():
    """Twenty-six tables that are asked after every batch cost more than what there is to write."""
    writer, idle, busy = LogWriter(), Source(0), Source(3)
    requests: list[str] = []
    idle.write_next_chunk = lambda: requests.append("writer") or 0
    for source in (idle, busy):
        writer.add_source(source)
    writer.flush(busy)
    assert writer.wait_for_room() is True
    for source in (idle, busy):
        writer.remove_source(source)
    assert not requests


def test_a_log_that_is_named_to_the_collector_is_looked_at_soon():
    """Collector looks at all logs once a second; one that has more is asked again at once."""
    collector, logs = Collector(), [Garbage(0) for _ in range(8)]
    for log in logs:
        collector.add_source(log)
    logs[5].pieces = 3
    start = time.monotonic()
    while logs[5].pieces:
        collector.wake(logs[5])
        time.sleep(0.005)
        assert time.monotonic() - start < 60
    logs[2].pieces = 1  # nobody says so
    while logs[2].pieces:
        time.sleep(0.01)
        assert time.monotonic() - start < 60
    for log in logs:
        collector.remove_source(log)


def test_a_collector_survives_a_bad_disk():
    collector, garbage = Collector(), Garbage(2)
    garbage.problem = StorageError(errno.EIO, "no")
    collector.add_source(garbage)
    while garbage.pieces:
        collector.wake(garbage)
        time.sleep(0.01)
    collector.remove_source(garbage)


def test_a_process_that_ends_with_open_stores_ends_well(tmp_path):
    """Threads in native code while the interpreter goes would abort it."""
    program = f"""
import torch
from colonnade.store.log.backing import LogLayout, open_log
from colonnade.store.log.manifest import LogTable
stores = [
    open_log({str(tmp_path)!r} + f"/{{n}}", LogTable(name="t", record_bytes=64, identity="i"), step=None,
             layout=LogLayout(segment_bytes=1 << 16, chunk_bytes=4096))
    for n in range(3)
]
for salt in range(20):
    for store in stores:
        store.write(torch.arange(2000), torch.full((2000, 64), salt, dtype=torch.uint8))
print("written")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "written\n", "")


def test_more_segments_than_files_are_allowed_by_default(tmp_path):
    store = tmp_path / "store"
    program = f"""
import resource, torch
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from colonnade.store.log.backing import LogLayout, open_log
from colonnade.store.log.manifest import LogTable
table = LogTable(name="t", record_bytes=64, identity="i")
with open_log({str(store)!r}, table, step=None, layout=LogLayout(segment_bytes=4096, chunk_bytes=4096)) as store:
    store.write(torch.arange(10000), torch.zeros(10000, 64, dtype=torch.uint8))
    print(len(store.commit(1).segments))
"""
    done = run_script(tmp_path, program, environment=dict(os.environ))
    assert (done.returncode, done.stdout, done.stderr) == (0, "170\n", "")
