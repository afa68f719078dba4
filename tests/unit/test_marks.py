"""Marks of rows, and messages cut by them: every row is found where it lies."""

from __future__ import annotations

import numpy as np
import pytest

from colonnade.exchange.marks import cut, mark_bytes, pack_marks, unpack_marks
from colonnade.exchange.wire import row_layout

SHAPES = [(1, 1), (2, 3), (4, 2), (3, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_message_in_two_holds_the_rows_of_one(shape, share):
    random = np.random.default_rng(sum(shape))
    dims, counts = random.integers(1, 6, shape[1]), random.integers(0, 9, shape)
    layout, marks = row_layout(counts, dims), random.random(counts.sum()) < share
    whole = np.arange(layout.num_elements)
    # The slow way: row by row, rank by rank, table by table.
    widths = np.repeat(np.tile(dims, shape[0]), counts.ravel())
    rows = np.split(whole, widths.cumsum()[:-1]) if len(widths) else []
    clean = [row for row, mark in zip(rows, marks, strict=True) if mark]
    rest = [row for row, mark in zip(rows, marks, strict=True) if not mark]
    found = cut(layout, marks, dims)
    assert found.early.num_elements == sum(map(len, clean))
    assert found.rest.num_elements == sum(map(len, rest))
    message = np.concatenate([*clean, *rest, np.empty(0, np.int64)])
    for place, row in zip(found.elements(dims).tolist(), rows, strict=True):
        assert message[place : place + len(row)].tolist() == row.tolist()


@pytest.mark.parametrize("counts", [[0], [8, 0, 9], [1, 17, 0], [0, 0]])
def test_marks_travel(counts):
    counts = np.array(counts)
    marks = np.random.default_rng(1).random(counts.sum()) < 0.5
    data, sizes = pack_marks(marks, counts)
    assert sizes == mark_bytes(counts) == [-(-n // 8) for n in counts.tolist()]
    assert unpack_marks(data, counts).tolist() == marks.tolist()
