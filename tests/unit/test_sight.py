"""What owners see of coming batches, beside its definition row by row."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_sight import SlowSight

from colonnade import _native
from colonnade.cache.sight import MANY, NAME_BYTES, NOBODY, Sight, Worth, worth_of
from colonnade.exchange.owner import listed

ENDS = [-(2**63), 2**63 - 1]
SGD = worth_of(64, 64, 128)


def stream(random, steps, ranks, spread):
    """By batch: {id: its users}. Most rows have a rank that likes them."""
    found = []
    for _ in range(steps):
        ids = np.unique(random.integers(0, spread, random.integers(0, 12)) - spread // 2)
        ids = np.unique(np.concatenate([ids, random.choice(np.array(ENDS), random.integers(0, 3))]))
        liked = (np.abs(ids // 3) % ranks).tolist()
        users = [{rank} for rank in liked]
        for each, draw in zip(users, random.random((len(ids), 3)), strict=True):
            if draw[0] < 0.4:
                each |= {int(draw[1] * ranks)}
            if draw[0] < 0.2:
                each.clear()
                each |= {int(draw[1] * ranks), int(draw[2] * ranks)}
        found.append(dict(zip(ids.tolist(), users, strict=True)))
    return found


def show(sight, ranks, *batches):
    """One of each table. Returns the ids of its plan's rows, all tables'."""
    named = [[[id for id in batch if r in batch[id]] for batch in batches] for r in range(ranks)]
    counts = np.array([[len(ids) for ids in of_rank] for of_rank in named])
    ids = torch.tensor([id for of_rank in named for ids in of_rank for id in ids], dtype=torch.int64)  # fmt: skip
    one = torch.ones(len(batches), dtype=torch.int64)
    plan = _native.make_plan(listed(ids, counts), 0 * one, one)
    sight.see(counts, plan)
    return plan.unique_ids.numpy()


@settings(max_examples=80, deadline=None)
@given(
    window=st.sampled_from([0, 1, 2, 5, 100]),
    quota=st.sampled_from([0, 1, 3, 8, 1000]),
    least=st.sampled_from([2, 3, 5]),
    chance=st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.7, 1.0]),
    passes=st.booleans(),
    many=st.sampled_from([3, 10, MANY]),
    spread=st.sampled_from([4, 12, 60]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_decides_row_by_row(window, quota, least, chance, passes, many, spread, seed):
    with patch("colonnade.cache.sight.MANY", many):
        check_each_row(window, quota, Worth(least, chance, passes), spread, seed)


def check_each_row(window, quota, worth, spread, seed):
    batches = stream(np.random.default_rng(seed), 50, 3, spread)
    fast = Sight(3, [quota], [worth], holds=window > 0)
    slow = SlowSight(3, quota, worth, holds=window > 0)
    shown, lies_with, copies = [], {}, {}
    for t, batch in enumerate(batches):
        while len(shown) < min(len(batches), t + window + 1):
            slow.see(batches[len(shown)])
            shown.append(show(fast, 3, batches[len(shown)]))
        fast.is_over = slow.is_over = len(shown) == len(batches)
        ids = shown[t]
        found, (has, keeps, copied, readers, back) = fast.decide(), slow.decide()
        assert set(ids[found.has].tolist()) == has
        assert set(ids[found.keeps].tolist()) == keeps
        assert set(ids[found.copied].tolist()) == copied
        is_read = found.reader != NOBODY
        said = zip(ids[is_read].tolist(), found.reader[is_read].tolist(), strict=True)
        assert dict(said) == readers
        recalled = list(
            zip(
                found.recalled.tolist(),
                found.holders.tolist(),
                found.recopied.tolist(),
                strict=True,
            )
        )
        assert set(recalled) == back and len(recalled) == len(back)
        # What it is for: nobody needs a row that another has, and a copy is as its owner's row is.
        for id, holder, is_copied in recalled:
            assert lies_with.pop(id) == holder and id not in batch
            if is_copied:
                copies[id] = holder
        for id, users in batch.items():
            assert {lies_with.get(id, min(users))} <= users and (id in has) == (id in lies_with)
            assert id not in has or len(users) == 1
            assert copies.pop(id, None) == readers.get(id)
            assert id not in readers or (readers[id] in users and len(users) > 1)
            lies_with.pop(id, None)
            if id in keeps:
                (lies_with[id],) = users
            if id in copied:
                (copies[id],) = users
        counts = np.bincount([*lies_with.values(), *copies.values()], minlength=3)
        assert (counts <= quota).all()
    assert lies_with == slow.holder and not copies, (
        "what nobody used when the end came into sight stays until it is given back"
    )


def test_no_table_knows_of_another():
    """Two at once decide as each alone."""
    random, worths = np.random.default_rng(3), [SGD, Worth(3, 0.4, False)]
    streams = [stream(random, 30, 3, spread) for spread in (12, 40)]
    both = Sight(3, [4, 9], worths, holds=True)
    alone = [Sight(3, [quota], [each], holds=True) for quota, each in zip([4, 9], worths, strict=True)]  # fmt: skip
    for seen, batches in enumerate(zip(*streams, strict=True)):
        show(both, 3, *batches)
        for sight, batch in zip(alone, batches, strict=True):
            show(sight, 3, batch)
        if seen < 3:
            continue
        found, parts = both.decide(), [sight.decide() for sight in alone]
        names = "has", "keeps", "copied", "reader", "recalled", "holders", "recopied"
        for name in names:
            of_parts = [getattr(part, name) for part in parts]
            np.testing.assert_array_equal(getattr(found, name), np.concatenate(of_parts))
        assert found.tables.tolist() == [t for t in range(2) for _ in parts[t].recalled]


def test_it_refuses_what_no_ranks_named():
    sight = Sight(2, [1], [SGD], holds=True)
    with pytest.raises(ValueError, match="see one first"):
        sight.decide()
    with pytest.raises(ValueError, match="wanted a plan of what ranks named"):
        show(sight, 3, {7: {2}})


def decided(users, window, worth=SGD, **how):
    """Of one row, used by these (empty: by nobody): by batch, whether its user has it, keeps it and gives it back but
    for a copy, who reads a copy, and what comes back."""
    sight, seen, found = Sight(2, [10], [worth], **how), 0, []
    for t in range(len(users)):
        while seen < min(len(users), t + window + 1):
            show(sight, 2, {7: users[seen]} if users[seen] else {})
            seen += 1
        said = sight.decide()
        rows = zip(
            said.has.tolist(), said.keeps.tolist(), said.copied.tolist(), said.reader.tolist(), strict=True
        )  # fmt: skip
        found.append((*rows, *zip(said.recalled.tolist(), said.recopied.tolist(), strict=True)))
    return found


BOTH, NONE = {0, 1}, set()
PLAIN = (False, False, False, NOBODY)
LENT, STAYS, BACK = (False, True, False, NOBODY), (True, True, False, NOBODY), (True, False, False, NOBODY)  # fmt: skip
NEVER = Worth(2, 1.0, False)
"""Nothing is expected."""


def test_a_row_stays_with_its_only_user_alone():
    said = decided([{0}, {0}, BOTH, {0}, {1}, {1}], 6, NEVER, holds=False)
    copied = (True, False, True, NOBODY)
    assert said == [(LENT,), (copied,), ((False, False, False, 0),), (PLAIN,), (LENT,), (BACK,)]


def test_a_row_is_lent_for_one_use_where_its_user_reads_it_next():
    said = decided([{1}, BOTH, {1}, {0}], 6, holds=False)
    assert said == [((False, False, True, NOBODY),), ((False, False, False, 1),), (PLAIN,), (PLAIN,)]  # fmt: skip
    assert decided([{1}, BOTH], 6, NEVER, holds=False) == [(PLAIN,), (PLAIN,)]


@pytest.mark.parametrize(("last", "is_copied"), [({1}, False), (BOTH, True)])
def test_a_row_that_is_lent_waits_until_somebody_else_comes_into_sight(last, is_copied):
    assert decided([{0}, {0}, NONE, NONE, {0}, NONE, NONE, last], 1, NEVER, holds=True) == [
        (LENT,), (STAYS,), (), (), (STAYS,), (), ((7, is_copied),),
        ((False, False, False, 0 if is_copied else NOBODY),),
    ]  # fmt: skip


def test_a_row_is_lent_out_of_sight_as_often_as_that_paid():
    """Half of what is not known yet."""
    users = [{0}, NONE, NONE, {1}, NONE, NONE, {0}, NONE, NONE, {1}]
    never = [(PLAIN,) if each else () for each in users]
    assert decided(users, 1, Worth(2, 0.5, False), holds=True) == never
    once = decided(users, 1, Worth(2, 0.4, False), holds=True)
    assert once == [(LENT,), (), ((7, False),), *never[3:]]
    always = decided(users, 1, Worth(2, 0.1, False), holds=True)
    assert always[:6] == [(LENT,), (), ((7, False),)] * 2


def test_rows_that_come_in_turns_do_not_drive_each_other_out():
    """More of them than there is room for: values and gradients of 64 bytes, records of 136 each way."""
    sight, seen, moved = Sight(1, [60], [worth_of(64, 64, 272)], holds=True), 0, 0
    for t in range(120):
        while seen < min(120, t + 3):
            show(sight, 1, {int(id): {0} for id in (np.arange(10) + 10 * seen) % 90})
            seen += 1
        sight.is_over = seen == 120
        said = sight.decide()
        plain = ~(said.has | said.keeps)
        records = (said.has != said.keeps).sum() + len(said.recalled)
        moved += int(128 * plain.sum() + 136 * records)
    assert moved < 0.6 * 120 * 10 * 128


@pytest.mark.parametrize(
    ("value", "moved", "least", "passes"),
    [
        (64, 2 * 64, 2, True),  # SGD
        (64, 4 * 64, 3, False),  # a number of state for each weight
        (64, 6 * 64 + 4, 4, False),  # two of them, and a clock that is lent
        (4, 8 * 4 + 4, 5, False),  # narrow rows: the clock weighs
    ],
)
def test_state_that_travels_is_made_up_for(value, moved, least, passes):
    worth = worth_of(value, value, moved)
    assert (worth.least, worth.passes) == (least, passes)
    assert least * 2 * value > moved >= (least - 1) * 2 * value
    # So many uses in a row, the mean of what is to be expected, save what lending costs.
    assert 2 * value / (1 - worth.chance) == pytest.approx(moved + NAME_BYTES)
