"""The store's reader alone: random rows of one filled table, enough of them under way to keep the device busy.

A block of K steps reads K batches. Answers as every worker of `bench tiers`; `rows_read` counts rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from workers.tiers_loop import Case, Gate, serve
from workers.tiers_store import FILL_STEP, open_backings, tables_of

ROWS = 4096
"""Rows of a batch."""
NUM_BATCHES = 256
UNDER_WAY = 4
"""Batches whose reads are under way."""


def draw_batches(num_rows: int, seed: int) -> list[Tensor]:
    """Draw batches of unique rows, before anything is timed."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = torch.randint(num_rows, (2 * ROWS,), generator=generator).unique()
        batches.append(ids[torch.randperm(len(ids), generator=generator)[:ROWS]].contiguous())
    return batches


class Reader:
    def __init__(self, case: Case) -> None:
        tables = tables_of(case.open_stream(), case.dim)
        biggest = max(tables, key=lambda table: table.rows or 0)
        self.table = biggest
        [self.backing] = open_backings(Path(case.store), [biggest], FILL_STEP)
        self.gate = Gate(0, 0)
        self.batches = cycle(draw_batches(biggest.rows or 1, case.seed))
        self.buffers = [
            torch.empty(ROWS, biggest.record_bytes, dtype=torch.uint8) for _ in range(UNDER_WAY + 1)
        ]
        self.under_way: deque = deque()
        self.rows_read = 0

    def step(self, network: bool) -> None:
        while len(self.under_way) < UNDER_WAY:
            ids = next(self.batches)
            buffer = self.buffers.pop()
            self.under_way.append((self.backing.read(ids, buffer), buffer))
        job, buffer = self.under_way.popleft()
        exists = job.wait()
        if not bool(exists.all()):
            raise RuntimeError("a row of a filled table was not found")
        self.rows_read += len(exists)
        self.buffers.append(buffer)

    def settle(self) -> None:
        """Each step waits for its reads."""

    def counts(self) -> Mapping[str, float]:
        counts = self.backing.reader.counts()
        return {"rows_read": self.rows_read, "device_reads": counts["reads"]}


def open_system(case: Case) -> tuple[Reader, dict[str, float | str]]:
    return Reader(case), {}


if __name__ == "__main__":
    serve(open_system)
