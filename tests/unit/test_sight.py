"""What owners see of coming batches, beside its definition row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_sight import SlowSight

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
    fast = Sight(3, quota, least, holds=window > 0)
    slow = SlowSight(3, quota, least, holds=window > 0)
    seen, lies_with = 0, {}
    for t, batch in enumerate(batches):
        while seen < min(len(batches), t + window + 1):
            ids = np.array(sorted(batches[seen]), np.int64)
            fast.see(ids, np.array([batches[seen][id] for id in ids.tolist()], np.int16))
            slow.see(batches[seen])
            seen += 1
        fast.is_over = slow.is_over = seen == len(batches)
        ids = np.array(sorted(batch), np.int64)
        found, (has, keeps, back) = fast.decide(), slow.decide()
        assert set(ids[found.has].tolist()) == has
        assert set(ids[found.keeps].tolist()) == keeps
        recalled = list(zip(found.recalled.tolist(), found.holders.tolist(), strict=True))
        assert set(recalled) == back and len(recalled) == len(back)
        # What it is for: nobody needs a row that another has.
        for id, holder in recalled:
            assert lies_with.pop(id) == holder and id not in batch
        for id, user in batch.items():
            assert lies_with.get(id, user) == user and (id in has) == (id in lies_with)
            lies_with.pop(id, None)
            if id in keeps:
                lies_with[id] = user
        counts = np.bincount(list(lies_with.values()), minlength=3)
        assert (counts == fast.lent).all() and (counts <= quota).all()
    assert lies_with == slow.holder, (
        "what nobody used when the end came into sight stays until it is given back"
    )


def decided(users, window, **how):
    """Of one row, used by these (None: nobody): by batch, whether its user has it and keeps it, and what comes back."""
    sight, row, seen, found = Sight(2, 10, 2, **how), np.array([7]), 0, []
    for t in range(len(users)):
        while seen < min(len(users), t + window + 1):
            count = 0 if users[seen] is None else 1
            sight.see(row[:count], np.array([users[seen]] * count, np.int16))
            seen += 1
        said = sight.decide()
        found.append((said.has.tolist(), said.keeps.tolist(), said.recalled.tolist()))
    return found


def test_a_row_stays_with_its_only_user_alone():
    lent, back, plain = ([False], [True], []), ([True], [False], []), ([False], [False], [])
    said = decided([0, 0, SHARED, 0, 1, 1], 6, holds=False)
    assert said == [lent, back, plain, plain, lent, back]


def test_a_row_that_is_lent_waits_until_somebody_else_comes_into_sight():
    nobody = ([], [], [])
    assert decided([0, 0, None, None, 0, None, None, 1], 1, holds=True) == [
        ([False], [True], []), ([True], [True], []), nobody, nobody, ([True], [True], []), nobody,
        ([], [], [7]), ([False], [False], []),
    ]  # fmt: skip


def test_a_row_that_one_rank_alone_has_used_before_is_lent_to_it():
    nobody = ([], [], [])
    said = decided([0, None, None, 0, None, 1], 1, holds=True)
    assert said == [
        ([False], [False], []),
        nobody,
        nobody,
        ([False], [True], []),
        ([], [], [7]),
        ([False], [False], []),
    ]


def test_rows_that_come_in_turns_do_not_drive_each_other_out():
    """More of them than there is room for: values and gradients of 64 bytes, records of 136, as of Adagrad."""
    sight, seen, moved = Sight(1, 60, 3, holds=True), 0, 0
    for t in range(120):
        while seen < min(120, t + 3):
            ids = (np.arange(10) + 10 * seen) % 90
            sight.see(ids, np.zeros(10, np.int16))
            seen += 1
        sight.is_over = seen == 120
        said = sight.decide()
        plain = ~(said.has | said.keeps)
        records = (said.has != said.keeps).sum() + len(said.recalled)
        moved += int(128 * plain.sum() + 136 * records)
    assert moved < 0.6 * 120 * 10 * 128


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
