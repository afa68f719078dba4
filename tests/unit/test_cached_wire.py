"""Notes about rows in messages of ranks with cached rows."""

from __future__ import annotations

import numpy as np
import pytest

from colonnade.cache.messages import (
    MAX_AGE,
    RowRequests,
    parse_row_flags,
    prepend_row_flags,
    split_row_flags,
)
from colonnade.errors import WorldError


def draw_records(random, counts):
    sent = random.random((counts.sum(), 3)) < 0.5
    ages = np.where(sent[:, 0], random.integers(0, 2 * MAX_AGE, len(sent)), 0)
    return RowRequests(counts, *sent.T, ages)


@pytest.mark.parametrize("high", [1, 2, 20])
def test_notes_come_back(high):
    random = np.random.default_rng(high)
    for _ in range(20):
        sent = draw_records(random, random.integers(0, high, (3, 4)))
        requests = [random.integers(0, 256, n).astype(np.uint8) for n in (0, 5, 9)]
        notes, others = split_row_flags(prepend_row_flags(sent, requests))
        assert all(np.array_equal(one, other) for one, other in zip(others, requests, strict=True))
        flags = parse_row_flags(notes, sent.counts)
        for name in ("renewed", "wanted", "written"):
            np.testing.assert_array_equal(getattr(flags, name), getattr(sent, name))
        np.testing.assert_array_equal(flags.ages, np.minimum(sent.ages, MAX_AGE))
        for own in (sent.renewed, sent.written):
            assert flags.count_rows(own).sum() == own.sum()
        with pytest.raises(WorldError, match="rank 2 sent"):
            parse_row_flags([*notes[:2], np.append(notes[2], np.uint8(1))], sent.counts)
    for message in ([1], [9, 0, 0, 0], [255, 255, 255, 255]):
        with pytest.raises(WorldError, match="rank 0 sent"):
            split_row_flags([np.array(message, np.uint8)])
