"""What owners see of coming batches, beside its definition row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_sight import decisions

from colonnade.cache.sight import SHARED, Sight, least_uses

ENDS = [-(2**63), 2**63 - 1]


def stream(random, steps, ranks, spread):
    """By batch: {id: its only user, or SHARED}. Most rows have a rank that likes them."""
    found = []
    for _ in range(steps):
        ids = np.unique(random.integers(0, spread, random.integers(0, 12)) - spread // 2)
        ids = np.unique(np.concatenate([ids, random.choice(np.array(ENDS), random.integers(0, 3))]))
        liked = np.abs(ids // 3) % ranks
        users = np.where(random.random(len(ids)) < 0.7, liked, random.integers(-1, ranks, len(ids)))
        found.append(dict(zip(ids.tolist(), users.tolist(), strict=True)))
    return found


@settings(max_examples=60, deadline=None)
@given(
    window=st.sampled_from([0, 1, 2, 5, 100]),
    quota=st.sampled_from([0, 1, 3, 8, 1000]),
    least=st.sampled_from([1, 2, 3, 5]),
    spread=st.sampled_from([4, 12, 60]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_decides_row_by_row(window, quota, least, spread, seed):
    batches = stream(np.random.default_rng(seed), 50, 3, spread)
    sight = Sight(3, quota, least)
    expected = decisions(batches, window=window, quota=quota, least=least)
    seen = 0
    for t, (batch, (has, keeps)) in enumerate(zip(batches, expected, strict=True)):
        while seen < min(len(batches), t + window + 1):
            ids = np.array(sorted(batches[seen]), np.int64)
            sight.see(ids, np.array([batches[seen][id] for id in ids.tolist()], np.int16))
            seen += 1
        ids = np.array(sorted(batch), np.int64)
        found = sight.decide()
        assert set(ids[found[0]].tolist()) == has
        assert set(ids[found[1]].tolist()) == keeps
        assert (sight.lent <= quota).all()
    assert not sight.lent.any(), "at the end of a stream everything is given back"


def test_a_row_stays_with_its_only_user_alone():
    sight = Sight(2, 10, 2)
    row = np.array([7])
    for user in (0, 0, SHARED, 0, 1, 1):
        sight.see(row, np.array([user], np.int16))
    said = [tuple(bool(each[0]) for each in sight.decide()) for _ in range(6)]
    assert said == [
        (False, True),
        (True, False),
        *[(False, False)] * 2,
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("value", "record", "least"),
    [
        (64, 64 + 8, 2),  # SGD
        (64, 2 * 64 + 8, 3),  # a number of state for each weight
        (64, 3 * 64 + 8, 4),  # two of them
        (8, 8 + 8 + 8, 4),  # narrow rows: the clock weighs
    ],
)
def test_state_that_travels_is_made_up_for(value, record, least):
    assert least_uses(value, value, record) == least
    assert least * 2 * value > 2 * record >= (least - 1) * 2 * value
