"""Memory that a row of an open table takes: of this process before and after rows were born, beside what it holds.

python -m workers.sparse_rows DIM OPTIMIZER ROWS   prints one JSON object
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import colonnade
from colonnade import Table
from colonnade.ops.memory import keep_freed_memory
from colonnade.store.dram import open_dram_store

RUN = 1 << 14
CLOCK = 4
"""Bytes in memory; a record at rest has 8."""


def resident_bytes() -> int:
    """Return the resident bytes of this process, by the kernel's count."""
    words = Path("/proc/self/smaps_rollup").read_text().split()
    return int(words[words.index("Rss:") + 1]) << 10


def measure(dim: int, optimizer: str, rows: int) -> dict[str, float]:
    """`payload`: weights and optimizer state; `clock`: of updates; `beyond`: all else, by the kernel's count."""
    keep_freed_memory()
    table = Table("t", dim, optimizer=getattr(colonnade, optimizer)(lr=0.01))
    store = open_dram_store([table], [2 * rows], seed=0)
    payload = (dim + table.state_floats) * 4
    bear(store.native, 0, RUN)
    before, stored = resident_bytes(), store.resident_bytes()
    bear(store.native, RUN, RUN + rows)
    grown, reported = resident_bytes() - before, store.resident_bytes() - stored
    return {
        "payload": payload,
        "clock": CLOCK,
        "beyond": round(grown / rows - payload - CLOCK, 2),
        "beyond_told": round(reported / rows - payload - CLOCK, 2),
        "total": round(grown / rows, 2),
    }


def bear(dram: object, first: int, last: int) -> None:
    """Rows of ids that look like hashes."""
    for start in range(first, last, RUN):
        ids = torch.arange(start, min(start + RUN, last)) * 0x9E3779B97F4A7C1
        slots = torch.empty(len(ids), dtype=torch.int32)
        offsets = torch.tensor([0, len(ids)])
        dram.acquire(ids, offsets, slots, True)  # type: ignore[attr-defined]
        dram.release(slots, offsets, True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
