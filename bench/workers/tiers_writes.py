"""`python -m workers.tiers_writes STORE STREAM DIM`: bytes written for each byte of rows that leave memory.

The stream's largest table, every row on disk; batches of rows leave memory as its lookups would have them leave where
1/8 is held, the most counted: the others, each with its own probability. Space is let grow to live rows / 0.7, as
it is by default, and then collected. The first filling of that space is free of charge and not counted. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from workers.tier_stream import Stream
from workers.tiers_store import FILL_STEP, RUN, first_records, open_backings, tables_of

BATCH = 16384
STEPS_PER_DOUBLING, MAX_DOUBLINGS = 4, 22
SEGMENTS = 64
"""Segments of the table, once it is filled."""
PASSES = 1.5
"""Rows written, in rows of the table: as many again are written before."""


def heats_of(counts: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode numbers of uses as rows store them in files: native/access_frequency.h, at the beginning of its clock."""
    doublings = np.log2(np.clip(counts, 0.5, 2.0**MAX_DOUBLINGS))
    return (np.round(STEPS_PER_DOUBLING * doublings).astype(np.int64) & 255).astype(np.uint8)


def measure(folder: Path, stream: Stream, dim: int) -> dict[str, float]:
    tables, starts = tables_of(stream, dim), stream.shape.starts
    t = max(range(len(tables)), key=lambda t: tables[t].rows or 0)
    table = tables[t]
    span = slice(starts[t], starts[t + 1])
    counts, rate = (
        np.array(stream.state("count")[span]),
        np.array(stream.state("rate")[span], np.float64),
    )
    heats, rows = heats_of(counts), len(counts)
    rate[np.argpartition(-counts, rows // 8)[: rows // 8]] = 0
    upto = np.cumsum(rate)
    generator = np.random.default_rng(1)
    records = torch.from_numpy(first_records(table, dim))
    size = max(1 << 20, rows * table.record_bytes // SEGMENTS >> 12 << 12)
    [store] = open_backings(folder, [table], None, segment_bytes=size)
    with store:
        for first in range(0, rows, RUN):
            ids = torch.arange(first, min(first + RUN, rows))
            store.write(ids, records[: len(ids)], torch.from_numpy(heats[ids.numpy()])).wait()
        store.commit(FILL_STEP)
        store.prune([])
        before = None
        written = 0
        while before is None or written < 2 * PASSES * rows:
            if before is None and written >= PASSES * rows:
                before = store.count_rows_and_bytes()
            drawn = np.searchsorted(upto, generator.random(BATCH) * upto[-1])
            ids = generator.permutation(np.unique(drawn))
            store.write(torch.from_numpy(ids), records[: len(ids)], torch.from_numpy(heats[ids]))
            store.collect_garbage()
            written += len(ids)
        after = store.count_rows_and_bytes()
        gained = {name: after[name] - before[name] for name in after}
        return {
            "of_rows": 1 + gained["rows_rewritten"] / gained["rows_written"],
            "of_bytes": gained["bytes_written"] / (gained["rows_written"] * store.record_bytes),
            "utilisation": after["bytes_live"] / after["bytes_held"],
        }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Stream(Path(sys.argv[2])), int(sys.argv[3]))))
