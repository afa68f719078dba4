"""The order of an epoch: a permutation whatever the window, found by arithmetic alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.tabular.source import READ_SAMPLES, plan_shuffle_windows

lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(np.array)


def samples_read(lengths, plan):
    """Return (block, sample) in the order of the epoch, by walking the windows one sample at a time."""
    read = []
    for w in range(len(plan.bounds) - 1):
        inside = [
            (int(block), i)
            for block in plan.blocks[plan.bounds[w] : plan.bounds[w + 1]]
            for i in range(lengths[block])
        ]
        order = plan.permute_window(w)
        read += inside if order is None else [inside[i] for i in order]
    return read


@given(lengths_of, st.integers(1, 2000), st.integers(0, 2**64 - 1))
def test_every_sample_once(lengths, window, key):
    read = samples_read(lengths, plan_shuffle_windows(lengths, window, key))
    assert sorted(read) == [(b, i) for b, length in enumerate(lengths) for i in range(length)]
    assert read == samples_read(lengths, plan_shuffle_windows(lengths, window, key))


@given(lengths_of, st.integers(1, 2000), st.integers(0, 2**64 - 1))
def test_windows_hold_what_they_say(lengths, window, key):
    plan = plan_shuffle_windows(lengths, window, key)
    sizes = np.diff(plan.starts)
    assert plan.starts[-1] == lengths.sum()
    assert (sizes[:-1] >= window).all() and (sizes < window + lengths.max()).all()
    for sample in {0, int(lengths.sum()) // 2, int(lengths.sum()) - 1}:
        at = plan.find_window(sample)
        assert plan.starts[at] <= sample < plan.starts[at + 1]


@given(lengths_of)
def test_without_a_key_the_order_is_the_files(lengths):
    plan = plan_shuffle_windows(lengths, 0, None)
    assert samples_read(lengths, plan) == [(b, i) for b, n in enumerate(lengths) for i in range(n)]
    assert (np.diff(plan.starts)[:-1] >= READ_SAMPLES).all()


def test_epochs_differ_and_a_window_of_everything_mixes_everything():
    lengths = np.full(50, 20)
    one, other = (samples_read(lengths, plan_shuffle_windows(lengths, 1000, key)) for key in (1, 2))
    assert one != other
    place = {sample: i for i, sample in enumerate(one)}
    first = sorted(place[0, i] for i in range(20))
    # Twenty neighbours in the file spread over the whole epoch.
    assert first[0] < 200 and first[-1] > 800


def test_a_window_of_one_block_keeps_blocks_together():
    lengths = np.full(10, 20)
    read = samples_read(lengths, plan_shuffle_windows(lengths, 1, 3))
    blocks = [block for block, _ in read]
    assert sorted(set(blocks)) == list(range(10)) and blocks != sorted(blocks)
    assert all(len(set(blocks[i : i + 20])) == 1 for i in range(0, 200, 20))
