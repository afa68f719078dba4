"""What owners say of rows that are lent: read as it was said, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import WorldError
from colonnade.exchange.lending import Back, Said
from colonnade.exchange.lent_wire import read_said, said_messages


def drawn(seed, num_ranks, num_tables, most):
    """What one owner says to each rank."""
    random = np.random.default_rng(seed)
    counts, others = random.integers(0, most + 1, (2, num_ranks, num_tables))
    has, keeps, copied = random.random((3, counts.sum())) < 0.4
    ids = random.integers(-(2**63), 2**63, others.sum(), dtype=np.int64)
    return (
        Said(counts, has, keeps, copied & (has | keeps)),
        Back(others, torch.from_numpy(ids), random.random(len(ids)) < 0.5),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1, 5, 40])
)
def test_it_is_read_as_it_was_said(seed, num_ranks, num_tables, most):
    said, back = drawn(seed, num_ranks, num_tables, most)
    messages = said_messages(said, back)
    found, found_back = read_said(messages, said.counts)
    for name in ("counts", "has", "keeps", "copied"):
        assert (getattr(found, name) == getattr(said, name)).all()
    assert (found_back.counts == back.counts).all() and (found_back.copied == back.copied).all()
    assert torch.equal(found_back.ids, back.ids)
    for rank, message in enumerate(messages):
        special = said.counted(~said.plain)[rank].sum()
        bits = [back.counts[rank].sum(), 2 * said.counts[rank].sum(), special]
        size = 4 * num_tables + 8 * back.counts[rank].sum() + sum(-(-each // 8) for each in bits)
        assert len(message) == size


def test_every_row_goes_one_way():
    """By (has, keeps, copied): who updates it, and what travels."""
    states = [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 0, 0), (1, 1, 1), (1, 0, 1)]
    has, keeps, copied = np.array(states, bool).T
    said = Said(np.array([[len(states)]]), has, keeps, copied)
    assert said.plain.tolist() == [True] + [False] * 6
    assert said.borrowed.tolist() == [False, True, True, False, False, False, False]
    assert said.returned.tolist() == [False, False, True, False, True, True, False]
    assert said.read.tolist() == [False] * 6 + [True]
    assert said.pushed.tolist() == [True] + [False] * 5 + [True]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message: message[:3],
        lambda message: message[:-1],
        lambda message: np.append(message, np.uint8(0)),
        lambda message: np.concatenate([np.full(4, 255, np.uint8), message[4:]]),
        lambda message: np.concatenate([np.array([255, 255, 255, 127], np.uint8), message[4:]]),
        lambda message: message[:0],
    ],
)
def test_what_no_owner_says_is_an_error(spoil):
    said, back = drawn(5, 2, 2, 9)
    messages = said_messages(said, back)
    messages[1] = spoil(messages[1])
    with pytest.raises(WorldError, match=r"rank 1 sent .* not what an owner says"):
        read_said(messages, said.counts)
