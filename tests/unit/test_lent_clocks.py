"""Owners count how often rows that are lent were updated."""

from __future__ import annotations

import numpy as np
import torch

from colonnade import SGD, Adam, Table
from colonnade.exchange.lent_clocks import LentClocks, moved_bytes


def test_they_are_counted_row_by_row():
    """Beside a dict: rows that are lent, used and given back, in batches of two ranks and three tables."""
    random, slow, fast = np.random.default_rng(3), {}, LentClocks([12, None, 12])
    for _ in range(40):
        free = [(t, id) for t in range(3) for id in range(12) if (t, id) not in slow]
        for what in ("lend", "tick", "end"):
            rows = free if what == "lend" else list(slow)
            some = [row for row in rows if random.random() < 0.4]
            ranks = random.integers(0, 2, len(some)).tolist()
            listed = sorted((rank, *row) for rank, row in zip(ranks, some, strict=True))
            counts = np.zeros((2, 3), np.int64)
            for rank, t, _ in listed:
                counts[rank, t] += 1
            ids = torch.tensor([id for _, _, id in listed], dtype=torch.int64)
            rows = [(t, id) for _, t, id in listed]
            if what == "lend":
                clocks = torch.from_numpy(random.integers(0, 2**32, len(rows)))
                fast.lend(counts, ids, clocks)
                slow |= dict(zip(rows, clocks.tolist(), strict=True))
            elif what == "tick":
                fast.tick(counts, ids)
                slow |= {row: slow[row] + 1 for row in rows}
            else:
                assert fast.of(counts, ids).tolist() == [slow[row] for row in rows]
                assert fast.end(counts, ids).tolist() == [slow.pop(row) for row in rows]


def test_a_clock_is_lent_where_updates_depend_on_it():
    assert moved_bytes(Table("t", 16, optimizer=SGD(lr=0.1))) == (64, 64)
    assert moved_bytes(Table("t", 16, optimizer=Adam(lr=0.1))) == (3 * 64 + 4, 3 * 64)
    rounded = Table("t", 16, optimizer=SGD(lr=0.1), dtype="bfloat16")
    assert moved_bytes(rounded) == (32 + 4, 32)
