"""Stores of `bench tiers`: all that its workers know of how Colonnade stores rows in files."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade import EmbeddingCollection, RowWiseAdagrad, Table, _native
from colonnade.store.log.backing import (
    DEFAULT_SEGMENT_BYTES,
    LogBacking,
    LogLayout,
    open_log,
)
from colonnade.store.log.manifest import LogTable
from colonnade.store.log.writer import LogWorkers
from colonnade.table import CLOCK_BYTES
from workers.tier_stream import Stream

READ_DEPTH = 64
FILL_STEP = 1
"""Step of the filled store's commit. One step: what rows remember of their uses has not faded."""
IDENTITY = "bench/rank0"
RUN = 65536
"""Rows written at once when a store is filled."""


def tables_of(stream: Stream, dim: int) -> list[Table]:
    optimizer = RowWiseAdagrad(lr=0.02)
    return [
        Table(f"C{f + 1}", dim, rows=rows, optimizer=optimizer)
        for f, rows in enumerate(stream.shape.cardinalities)
    ]


def open_backings(
    folder: Path,
    tables: Sequence[Table],
    step: int | None,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
) -> list[LogBacking]:
    """Open a backing for each table, as a run opens its own. `step`: the commit to begin with; None: nothing."""
    workers = LogWorkers(reader=_native.PageReader("auto", READ_DEPTH))
    return [
        open_log(
            folder / table.name,
            LogTable(
                name=table.name, record_bytes=table.record_bytes, identity=IDENTITY, rows=table.rows
            ),
            step=step,
            workers=workers,
            layout=LogLayout(segment_bytes=segment_bytes),
        )
        for table in tables
    ]


def clocks_of(counts: NDArray[np.float32], stream: Stream) -> NDArray[np.uint64]:
    """Compute how many of the history's batches trained a row, as expected of its lookups in the history."""
    batches = stream.shape.history / stream.shape.batch_size
    hit = -batches * np.expm1(-counts.astype(np.float64) / batches)
    return np.rint(hit).astype("<u8")


def first_records(table: Table, dim: int) -> NDArray[np.uint8]:
    """Make records of rows as after one update: (RUN or fewer, record_bytes)."""
    rows = min(RUN, table.rows or RUN)
    records = np.zeros((rows, table.record_bytes), np.uint8)
    weights = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    records[:, : 4 * dim] = weights.view(np.uint8)
    records[:, -CLOCK_BYTES:] = np.frombuffer(np.uint64(1).tobytes(), np.uint8)
    return records


def fill_table(table: Table, backing: LogBacking, clocks: NDArray[np.uint64], dim: int) -> None:
    """Write every row of a table, with its clock, and commit."""
    records = first_records(table, dim)
    with backing:
        for first in range(0, len(clocks), RUN):
            part = clocks[first : first + RUN]
            records[: len(part), -CLOCK_BYTES:] = part.view(np.uint8).reshape(-1, CLOCK_BYTES)
            ids = torch.arange(first, first + len(part))
            backing.write(ids, torch.from_numpy(records[: len(part)])).wait()
        backing.commit(FILL_STEP)


def fill(folder: Path, stream: Stream, dim: int) -> float:
    """Write every row of every table into a new store, with the clock that its uses left, and commit. Returns seconds.

    Rows that are never used are written too: a run never reads them, but systems that hold them must not gain by it.
    """
    start = time.perf_counter()
    tables, starts = tables_of(stream, dim), stream.shape.starts
    for t, (table, backing) in enumerate(
        zip(tables, open_backings(folder, tables, None), strict=True)
    ):
        counts = stream.state("count")[starts[t] : starts[t + 1]]
        fill_table(table, backing, clocks_of(counts, stream), dim)
    return time.perf_counter() - start


def store_counts(embeddings: EmbeddingCollection) -> Mapping[str, float]:
    """Count rows by where they came from and went, and reads of the device, since the store was opened."""
    store = embeddings.store
    sources = store.sources
    counts = {
        "rows_read": sources.read, "rows_mapped": sources.mapped, "rows_born": sources.born,
        "rows_resident": sources.resident,
        "rows_evicted": sources.evicted_clean + sources.evicted_dirty,
        "rows_written": sources.evicted_dirty, "stall_seconds": sources.stall_seconds,
    }  # fmt: skip
    logs = list(store.logs.values())
    if logs:
        reader_counts = logs[0].reader.counts()
        written = sum(log.count_rows_and_bytes()["bytes_written"] for log in logs)
        counts["device_reads"] = reader_counts["reads"]
        counts["pages_read"] = reader_counts["pages"]
        counts["bytes_written"] = written
    return counts


class Commits:
    """Commits beside training, one at a time; older ones are pruned."""

    def __init__(self, embeddings: EmbeddingCollection) -> None:
        self.embeddings = embeddings
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the commit under way, if any, is durable."""
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error

    def begin(self) -> None:
        """Begin a commit between two steps. Waits for the one before."""
        self.wait()
        self.embeddings.store.begin_commit()
        self.thread = threading.Thread(target=self._finish, args=(self.embeddings.step,))
        self.thread.start()

    def _finish(self, step: int) -> None:
        store = self.embeddings.store
        try:
            store.finish_commit(FILL_STEP + step)
            for log in store.logs.values():
                log.prune([FILL_STEP + step])
        except BaseException as error:
            self.error = error
