"""Marks of rows are unpacked as they were packed."""

from __future__ import annotations

import numpy as np
import pytest

from colonnade.cache.messages import pack_row_bits, packed_bit_sizes, unpack_row_bits


@pytest.mark.parametrize("counts", [[0], [8, 0, 9], [1, 17, 0], [0, 0]])
def test_marks_travel(counts):
    counts = np.array(counts)
    marks = np.random.default_rng(1).random(counts.sum()) < 0.5
    data, sizes = pack_row_bits(marks, counts)
    assert sizes == packed_bit_sizes(counts) == [-(-n // 8) for n in counts.tolist()]
    assert unpack_row_bits(data, counts).tolist() == marks.tolist()
