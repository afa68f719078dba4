"""The table as one memory-mapped file: the kernel's page cache is the tier of memory.

Reads of a batch are spread over many threads, as a page fault keeps its thread waiting: one thread alone would have
one read under way.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.tier_stream import Stream
from workers.tiers_loop import PAGE_BYTES, Case, serve
from workers.tiers_peer import PeerTraining, first_records

THREADS = 32
RUN = 65536


class MappedStore:
    def __init__(self, path: Path, rows: int, dim: int) -> None:
        self.table = np.memmap(path, np.float32, "r+", shape=(rows, dim + 1))
        self.table._mmap.madvise(mmap.MADV_RANDOM)
        self.pool = ThreadPoolExecutor(THREADS)

    def get(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        records = np.empty((len(rows), self.table.shape[1]), np.float32)
        table = self.table.view(np.ndarray)

        def read(first: int, last: int) -> None:
            # "clip": the other modes go through a buffer of numpy's own.
            np.take(table, rows[first:last], axis=0, out=records[first:last], mode="clip")

        bounds = np.linspace(0, len(rows), 4 * THREADS + 1).astype(int).tolist()
        for done in [self.pool.submit(read, *part) for part in pairwise(bounds)]:
            done.result()
        return records

    def put(self, rows: NDArray[np.int64], records: NDArray[np.float32]) -> None:
        self.table[rows] = records  # just read: the pages are there

    def counts(self) -> Mapping[str, float]:
        return {}


def open_system(case: Case) -> tuple[PeerTraining, dict[str, float | str]]:
    stream, path = case.open_stream(), Path(case.store) / "table.f32"
    start = time.perf_counter()
    rows = stream.shape.num_rows
    records = first_records(min(RUN, rows), case.dim)
    with path.open("wb") as file:
        for first in range(0, rows, RUN):
            records[: rows - first].tofile(file)
    store = MappedStore(path, rows, case.dim)
    filled = time.perf_counter()
    warm(store, stream, case)
    seconds = {"fill_seconds": filled - start, "warm_seconds": time.perf_counter() - filled}
    return PeerTraining(case, store), {"numpy": np.__version__, **seconds}


def warm(store: MappedStore, stream: Stream, case: Case) -> None:
    """Touch the pages that are looked up most, as many as the budget holds."""
    assert case.dram_bytes is not None, "a mapped table has a budget"
    row_bytes = 4 * store.table.shape[1]
    page_of = np.arange(stream.shape.num_rows, dtype=np.int64) * row_bytes // PAGE_BYTES
    rate = np.bincount(page_of, weights=stream.state("rate"))
    num_pages = min(case.dram_bytes // PAGE_BYTES, len(rate))
    pages = np.sort(np.argpartition(-rate, num_pages - 1)[:num_pages])
    first_row = np.minimum(-(-pages * PAGE_BYTES // row_bytes), len(store.table) - 1)
    for first in range(0, num_pages, RUN):
        store.get(first_row[first : first + RUN])


if __name__ == "__main__":
    serve(open_system)
