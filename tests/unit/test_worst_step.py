"""No step does much more than the others: while rows leave, while segments are rewritten, while a checkpoint is
written."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from logs import open_test_log

from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    MaxRowsEviction,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    _native,
    build_plan,
)
from colonnade.comm.mesh import Mesh
from colonnade.files.disk import Change, Disk
from colonnade.store.budget import slot_bytes
from colonnade.store.dram import DramStore
from colonnade.store.log.backing import LogBacking
from colonnade.store.log.compaction import Collector
from colonnade.store.log.writer import LogWriter

ROWS = 20_000
SLOTS = 4_000  # of each table
UNIQUE = 1_000  # rows of a batch and table, about


def tables(dim: int, rows: int) -> list[Table]:
    stays = MaxRowsEviction(rows=rows // 2, by="frequency", halve_steps=50)
    return [
        Table("open", dim, optimizer=RowWiseAdagrad(lr=0.1), eviction=stays),
        Table("vocabulary", dim, rows=rows, optimizer=RowWiseAdagrad(lr=0.1)),
    ]


@dataclass
class Tiered:
    """An open and a vocabulary table with room for a fifth of their rows."""

    embeddings: EmbeddingCollection
    store: DramStore
    logs: list[LogBacking]
    rows: RowOptimizer

    def close(self) -> None:
        for log in self.logs:
            log.close()


def opened(folder, dim=4, rows=ROWS, slots=SLOTS, disk=None, collector=None, lookahead=2, **sizes):
    kinds = tables(dim, rows)
    reader, writer = _native.PageReader(), LogWriter(pending_bytes=sizes.pop("pending", 64 << 20))
    logs = [
        open_test_log(
            folder / kind.name,
            table_name=kind.name,
            record_bytes=kind.record_bytes,
            identity=kind.name,
            step=None,
            rows=kind.rows,
            reader=reader,
            writer=writer,
            collector=collector or Collector(),
            disk=disk or Disk(),
            **{"segment_bytes": 1 << 18, "chunk_bytes": 1 << 16, **sizes},
        )
        for kind in kinds
    ]
    features = [Feature(kind.name, kind.name) for kind in kinds]
    embeddings = EmbeddingCollection(kinds, features, seed=0)
    memory = {kind.name: slots * slot_bytes(kind) for kind in kinds}
    plan = build_plan(
        kinds,
        1,
        PlanConfig(memory={"dram": sum(memory.values()), "tables": memory}, lookahead=lookahead),
    )
    embeddings.open(plan, Mesh(), backings=logs)
    return Tiered(embeddings, embeddings.store, logs, RowOptimizer(embeddings))


def batches(count: int, rows=ROWS, unique=UNIQUE):
    """Skewed: a few rows come in every batch, most rarely."""
    random = np.random.default_rng(5)
    for _ in range(count):
        drawn = (random.random((2, unique)) ** 2 * rows).astype(np.int64)
        ids = {
            "open": Ids(torch.from_numpy(drawn[0] * 7919)),
            "vocabulary": Ids(torch.from_numpy(drawn[1])),
        }
        yield Batch(unique, torch.zeros(unique, 0), ids)


def learn(tiered: Tiered, batch: Batch) -> None:
    sum(out.sum() for out in tiered.embeddings(batch).values()).backward()
    tiered.rows.step()


@dataclass
class Work:
    """Work of one step, done by the threads that train: nothing here depends on how fast anything is."""

    touched: int  # rows used, evicted, saved for a checkpoint
    appended: int  # rows
    looked: int  # slots looked at to choose who leaves
    remembered: int  # rows that admission and eviction touched
    waited: float  # seconds for room

    @classmethod
    def between(cls, before: dict, now: dict) -> Work:
        return cls(*(now[name] - before[name] for name in cls.__dataclass_fields__))


def counted(tiered: Tiered) -> dict:
    sources, native = tiered.store.sources, tiered.store.native
    appended = sum(log.count_rows_and_bytes()["rows_written"] for log in tiered.logs)
    used = sources.resident + sources.read + sources.copied + sources.born
    return {
        "touched": used + sources.evicted_clean + appended,
        "appended": appended,
        "looked": sum(native.num_slots_examined(t) for t in range(2)),
        "remembered": tiered.embeddings.policies[0].work,
        "waited": sources.room_seconds,
    }


@pytest.mark.parametrize("case", ["eviction", "collection", "checkpoint"])
def test_a_step_is_bounded_work(case, tmp_path):
    """Counted, not timed: the worst step's rows at most thrice the median's, and no wait for the writer."""
    tiered = opened(tmp_path)
    works, begun = [], []
    for step, batch in enumerate(batches(130)):
        if case == "collection":
            for log in tiered.logs:
                log.collect_garbage_piece()
        before = counted(tiered)
        if case == "checkpoint" and step % 10 == 5:
            tiered.store.begin_commit()
            begun.append(counted(tiered)["appended"] - before["appended"])
        learn(tiered, batch)
        works.append(Work.between(before, counted(tiered)))
        if case == "checkpoint" and step % 10 == 8:
            tiered.store.finish_commit(step)
    works = works[40:]
    evicted = tiered.store.sources.evicted_clean + tiered.store.sources.evicted_dirty
    assert evicted > 90 * UNIQUE / 4  # steadily
    if case == "collection":
        assert sum(log.count_rows_and_bytes()["rows_rewritten"] for log in tiered.logs) > ROWS
    if case == "checkpoint":
        assert len(begun) == 13 and not any(begun)  # nothing is copied when a checkpoint begins
        # A step saves no more than its own rows.
        assert max(work.appended for work in works) <= 2 * 2 * UNIQUE
    for what in ("touched", "looked", "remembered"):
        item = [getattr(work, what) for work in works]
        assert max(item) <= 3 * float(np.median(item)), (what, max(item), np.median(item))
    assert max(work.waited for work in works) == 0.0
    tiered.close()


class StuckDisk(Disk):
    """Writes no byte until it may."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def perform(self, change: Change, action):
        if change.verb == "append":
            self.gate.wait()
        return action()


def test_a_checkpoint_on_a_slow_disk_keeps_no_step_waiting(tmp_path):
    """A checkpoint fills half of what may wait to be written, and waits; training goes on in the other half."""
    disk, pending = StuckDisk(), 1 << 19
    tiered = opened(tmp_path, slots=3 * SLOTS, disk=disk, pending=pending, chunk_bytes=1 << 14)
    writer = tiered.logs[0].writer
    assert writer is not None
    ready = list(batches(17))
    tiered.store._rows_together = 512
    for batch in ready[:15]:
        learn(tiered, batch)
    tiered.store.begin_commit()
    writing = threading.Thread(target=tiered.store.finish_commit, args=(1,))
    writing.start()
    end = time.monotonic() + 30
    while writer.pending_bytes <= pending // 2 and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)  # it goes on as far as it can
    rescue = threading.Timer(20, disk.gate.set)  # a step that waits is to fail, not to hang
    rescue.start()
    for batch in ready[15:]:
        learn(tiered, batch)
    assert not disk.gate.is_set() and writing.is_alive()
    assert tiered.store.sources.room_seconds == 0.0
    rescue.cancel()
    disk.gate.set()
    writing.join(60)
    assert not writing.is_alive()
    tiered.close()


# In seconds, on a machine that does nothing else


@pytest.mark.slow
@pytest.mark.parametrize("case", ["eviction", "collection", "checkpoint"])
def test_the_worst_step_is_at_most_thrice_the_median(case, tmp_path):
    """The best of three runs: a machine that does something else now and then makes some step slow."""
    results = []
    for attempt in range(3):
        tiered = opened(
            tmp_path / str(attempt),
            dim=16,
            rows=400_000,
            slots=60_000,
            segment_bytes=1 << 21 if case == "collection" else 1 << 25,
            chunk_bytes=1 << 20,
            lookahead=2,
        )
        ready = tiered.embeddings.lookahead(batches(260, rows=400_000, unique=12_000))
        seconds, writing, last = [], None, time.perf_counter()
        for step, batch in enumerate(ready):
            learn(tiered, batch)
            if case == "checkpoint" and step % 40 == 20:
                if writing is not None:
                    writing.join()
                tiered.store.begin_commit()
                writing = threading.Thread(target=tiered.store.finish_commit, args=(step,))
                writing.start()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        if writing is not None:
            writing.join()
        ready.close()
        if case == "collection":
            assert (
                sum(log.count_rows_and_bytes()["rows_rewritten"] for log in tiered.logs) > 100_000
            )
        tiered.close()
        steady = np.array(seconds[60:])
        median, worst = float(np.median(steady)), float(steady.max())
        print(
            f"{case}: median {median * 1e3:.1f} ms, worst {worst * 1e3:.1f} ms, {worst / median:.2f}"
        )
        results.append(worst / median)
        if results[-1] <= 3:
            break
    assert min(results) <= 3, results
