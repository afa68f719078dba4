"""Next uses of rows, against a look at every batch in sight."""

from __future__ import annotations

import numpy as np
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.cache.next_use import NextUseWindow

ENDS = np.array([-(2**63), -1, 0, 2**63 - 1])


def slowly(batches: list[list[int]], step: int, window: int) -> tuple[list[int], list[int] | None]:
    """The definition: what `next` says of batch `step`, row by row."""
    in_sight = batches[step + 1 : step + 1 + window]
    results = []
    for id in batches[step]:
        later = [n for n, item in enumerate(in_sight, 1) if id in item]
        results.append(later[0] if later else 0)
    return results, in_sight[-1] if len(in_sight) == window else None


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    window=st.sampled_from([1, 2, 3, 7, 50]),
    limit=st.sampled_from([0, 1, 6, 40]),
    steps=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_says_of_each_row_when_it_is_used_again(window, limit, steps, seed):
    """Batches of any size, some empty, ids of all 64 bits; to the end, where less is in sight."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(steps):
        drawn = random.pareto(0.7, random.integers(0, limit + 1)).astype(np.int64) % 61 - 9
        ends = random.choice(ENDS, random.integers(0, min(limit, 3) + 1))
        batches.append(np.unique(np.concatenate([drawn, ends])))
    plain = [ids.tolist() for ids in batches]
    sight, uses = NextUseWindow(window), []
    for number, ids in enumerate(batches):
        sight.add_batch_rows(ids)
        if number >= window:
            uses.append(sight.pop_next_uses())
    while len(uses) < steps:
        uses.append(sight.pop_next_uses())
    for step, text in enumerate(uses):
        next_uses, coming = slowly(plain, step, window)
        assert text.next_uses.tolist() == next_uses
        assert (None if text.coming is None else text.coming.tolist()) == coming


def test_what_it_remembers_is_what_is_in_sight():
    """However many batches pass, each with rows of its own."""
    sight = NextUseWindow(3)
    for number in range(400):
        sight.add_batch_rows(np.arange(100) + 50 * number)
        if number >= 3:
            sight.pop_next_uses()
    assert len(sight._newest) == 2 * 50 + 100
    assert len(sight._next_batch) <= 8 * 100
