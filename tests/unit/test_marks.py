"""Marks of rows are unpacked as they were packed."""

from __future__ import annotations

import numpy as np
import pytest

from colonnade.cache.messages import mark_bytes, pack_marks, unpack_marks


@pytest.mark.parametrize("counts", [[0], [8, 0, 9], [1, 17, 0], [0, 0]])
def test_marks_travel(counts):
    counts = np.array(counts)
    marks = np.random.default_rng(1).random(counts.sum()) < 0.5
    data, sizes = pack_marks(marks, counts)
    assert sizes == mark_bytes(counts) == [-(-n // 8) for n in counts.tolist()]
    assert unpack_marks(data, counts).tolist() == marks.tolist()
