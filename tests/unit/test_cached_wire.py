"""What ranks with copies say of rows, and records in messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colonnade.errors import WorldError
from colonnade.exchange.cached_wire import (
    FAR,
    Named,
    by_table,
    read_notes,
    records_layout,
    with_notes,
    without_notes,
)


def named(random, counts):
    said = random.random((counts.sum(), 3)) < 0.5
    ages = np.where(said[:, 0], random.integers(0, 2 * FAR, len(said)), 0)
    return Named(counts, *said.T, ages)


@pytest.mark.parametrize("high", [1, 2, 20])
def test_notes_come_back(high):
    random = np.random.default_rng(high)
    for _ in range(20):
        said = named(random, random.integers(0, high, (3, 4)))
        requests = [random.integers(0, 256, n).astype(np.uint8) for n in (0, 5, 9)]
        notes, others = without_notes(with_notes(said, requests))
        assert all(np.array_equal(one, other) for one, other in zip(others, requests, strict=True))
        heard = read_notes(notes, said.counts)
        for name in ("renewed", "wanted", "written"):
            np.testing.assert_array_equal(getattr(heard, name), getattr(said, name))
        np.testing.assert_array_equal(heard.ages, np.minimum(said.ages, FAR))
        for mine in (said.renewed, said.written):
            assert heard.counted(mine).sum() == mine.sum()
        with pytest.raises(WorldError, match="rank 2 sent"):
            read_notes([*notes[:2], np.append(notes[2], np.uint8(1))], said.counts)
    for message in ([1], [9, 0, 0, 0], [255, 255, 255, 255]):
        with pytest.raises(WorldError, match="rank 0 sent"):
            without_notes([np.array(message, np.uint8)])


def test_records_lie_rank_by_rank_and_come_back_table_by_table():
    counts, widths = np.array([[2, 0, 1], [1, 3, 0]]), np.array([3, 2, 5])
    layout = records_layout(counts, widths)
    message = torch.zeros(layout.layout.num_elements, dtype=torch.uint8)
    whole = [torch.arange(n * 7, dtype=torch.uint8).view(n, 7) + 1 for n in counts.sum(0)]
    for t, records in enumerate(whole):
        layout.fill(message, t, records)
    assert (message > 0).all()
    for t, records in enumerate(whole):
        assert torch.equal(layout.of(message, t), records[:, : widths[t]])
    assert [rows.tolist() for rows in by_table(counts)] == [[0, 1, 3], [4, 5, 6], [2]]
