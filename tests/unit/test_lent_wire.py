"""What travels where rows are lent: read as it was said, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import WorldError
from colonnade.exchange.cached_wire import tables_of
from colonnade.exchange.lent_wire import (
    listed_order,
    pack_numbers,
    read_requests,
    read_said,
    said_messages,
)
from colonnade.exchange.loans import NONE, Loans
from colonnade.exchange.packing import pack_requests
from colonnade.exchange.said import Said, listed_back

ROWS = 40


class Slow:
    """Both ends of one rank's loans to `num_ranks`, beside a dict: {(table, id): [holder, is it a copy]}."""

    def __init__(self, seed, num_ranks, num_tables):
        self.random, self.shape = np.random.default_rng(seed), (num_ranks, num_tables)
        rows = [ROWS, None, ROWS][:num_tables]
        self.lent, self.had = Loans(num_ranks, rows), Loans(num_ranks, rows)
        self.held = {}

    def batch(self):
        """What is asked for by all, which of it stays and is a copy, and what is called back."""
        ranks, tables = self.shape
        asked = []
        for t in range(tables):
            for id in self.random.choice(ROWS, self.random.integers(0, ROWS // 2), replace=False):
                holder = self.held.get((t, int(id)), [None, False])
                users = set(np.flatnonzero(self.random.random(ranks) < 0.3).tolist())
                if holder[0] is not None:  # nobody needs a row that is elsewhere
                    users = users | {holder[0]} if holder[1] else {holder[0]}
                asked += [(rank, t, int(id), len(users) == 1) for rank in users]
        self.asked = sorted(asked)
        names = {row[1:3] for row in asked}
        self.idle = [row for row in sorted(self.held) if row not in names]
        self.idle = [row for row in self.idle if not self.held[row][1]]
        self.idle = [row for row in self.idle if self.random.random() < 0.3]

    def said(self, listed):
        """Of rows (rank, table, id, is_alone): has, keeps, copied; and those called back."""
        has = np.array([self.held.get(row[1:3], [None])[0] == row[0] for row in listed], bool)
        copy = np.array([self.held.get(row[1:3], [None, False])[1] for row in listed], bool) & has
        alone = np.array([row[3] for row in listed], bool)
        draw = self.random.random((2, len(listed))) < 0.6
        keeps = alone & ~copy & draw[0]
        counts = np.zeros(self.shape, np.int64)
        for rank, t, *_ in listed:
            counts[rank, t] += 1
        said = Said(counts, has, keeps, np.where(keeps, draw[1], copy))
        copied = self.random.random(len(self.idle)) < 0.5
        holders = np.array([self.held[row][0] for row in self.idle], np.int64)
        tables, ids = np.array(self.idle, np.int64).reshape(-1, 2).T
        return said, listed_back(holders, tables, ids, copied, self.shape)

    def decide(self, listed, said, back):
        for (rank, *row, _), has, keeps, copied in zip(
            listed, said.has, said.keeps, said.copied, strict=True
        ):
            if has and not keeps:
                del self.held[tuple(row)]
            if keeps:
                self.held[tuple(row)] = [rank, bool(copied)]
        for t, id, copied in zip(back.tables, back.ids.tolist(), back.copied, strict=True):
            if copied:
                self.held[int(t), id][1] = True
            else:
                del self.held[int(t), id]


def requests_of(here, numbers, listed, counts):
    """What all ranks send to place 0 of 1: what `lent` makes of its plan."""
    is_plain = numbers == NONE
    ids = torch.tensor([row[2] for row in listed], dtype=torch.int64)[torch.from_numpy(is_plain)]
    before, ends = np.concatenate([[0], np.cumsum(is_plain)]), counts.ravel().cumsum()
    firsts, lasts = (before[at].reshape(counts.shape) for at in (ends - counts.ravel(), ends))
    tables = counts.shape[1]
    rows, one = torch.full((tables,), ROWS), torch.ones(tables, dtype=torch.int64)
    plain = pack_requests(ids, firsts, lasts, rows, one, np.zeros_like(counts), codes=None)
    named = pack_numbers(numbers, counts.sum(1))
    messages = [np.concatenate(each) for each in zip(named, plain, strict=True)]
    return read_requests(messages, here.lent, rows, one, 0 * one)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_it_is_read_as_it_was_said(seed, num_ranks, num_tables):
    """Many batches: requests by number and by id, what is said of them, and what both ends know afterwards."""
    here = Slow(seed, num_ranks, num_tables)
    for _ in range(12):
        here.batch()
        counts = np.zeros(here.shape, np.int64)
        for rank, t, *_ in here.asked:
            counts[rank, t] += 1
        ids = np.array([row[2] for row in here.asked], np.int64)
        numbers = here.had.numbers(tables_of(counts), ids)
        holders = [here.held.get(row[1:3], [None])[0] for row in here.asked]
        numbers[[row[0] != mine for row, mine in zip(here.asked, holders, strict=True)]] = NONE
        order = listed_order(counts, np.arange(len(ids)), numbers)
        requests = requests_of(here, numbers, here.asked, counts)
        assert (requests.counts == counts).all()
        assert requests.ids.tolist() == ids[order].tolist()
        listed = [here.asked[i] for i in order]
        said, back = here.said(listed)
        recalled = here.lent.numbers(back.tables, back.ids.numpy())
        messages = said_messages(said, back, recalled)
        found, found_back = read_said(messages, counts, numbers[order], here.had)
        for name in ("counts", "has", "keeps", "copied"):
            assert (getattr(found, name) == getattr(said, name)).all(), name
        assert (found_back.counts == back.counts).all()
        assert (found_back.copied == back.copied).all() and torch.equal(found_back.ids, back.ids)
        here.lent.decide(said, ids[order], back)
        here.had.decide(found, ids[order], found_back)
        here.decide(listed, said, back)
        every = [(t, id) for t in range(num_tables) for id in range(ROWS)]
        for end in (here.lent, here.had):
            known = end.numbers(*np.array(every).T)
            assert ((known != NONE) == [row in here.held for row in every]).all()
            for rank in range(num_ranks):
                mine = [row in here.held and here.held[row][0] == rank for row in every]
                assert len(set(known[mine])) == sum(mine)
                rows = np.stack(end.rows(rank, known[mine]), 1).tolist()
                assert rows == [list(row) for row, is_mine in zip(every, mine, strict=True) if is_mine]  # fmt: skip


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


def lent_rows():
    """Two ranks that have rows 0 to 8 and 9 to 17 of one table: the loans, and a batch that calls two of each back."""
    counts, ids = np.array([[9], [9]]), np.arange(18)
    none, every = np.zeros(18, bool), np.ones(18, bool)
    nothing = listed_back(*(np.empty((3, 0), np.int64)), none[:0], (2, 1))
    lent, had = Loans(2, [18]), Loans(2, [18])
    for loans in (lent, had):
        loans.decide(Said(counts, none, every, none), ids, nothing)
    called, holders = np.array([1, 7, 9, 12]), np.array([0, 0, 1, 1])
    back = listed_back(holders, 0 * holders, called, none[:4], (2, 1))
    asked = Said(np.array([[3], [3]]), none[:6], every[:6], none[:6])
    return lent, had, asked, said_messages(asked, back, lent.numbers(back.tables, back.ids.numpy()))


def test_a_number_is_nobodys_until_the_next_row_takes_it():
    lent, _, _, _ = lent_rows()
    numbers, none = lent.numbers(np.zeros(18, np.int64), np.arange(18)), np.zeros(2, bool)
    back = listed_back(np.zeros(2, int), np.zeros(2, int), np.array([1, 7]), none, (2, 1))
    lent.decide(Said(np.zeros((2, 1), int), none[:0], none[:0], none[:0]), np.arange(0), back)
    with pytest.raises(ValueError, match="not lent"):
        lent.rows(0, numbers[[2, 7]])
    nothing = listed_back(*(np.empty((3, 0), np.int64)), none[:0], (2, 1))
    lent.decide(Said(np.array([[1], [0]]), none[:1], ~none[:1], none[:1]), np.array([1]), nothing)
    assert lent.rows(0, numbers[[2, 7]])[1].tolist() == [2, 1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message: message[:0],
        lambda message: message[:2],
        lambda message: message[:-1],
        lambda message: np.append(message, np.uint8(0)),
        lambda message: np.concatenate([np.array([1, 8, 200], np.uint8), message[3:]]),
    ],
)
def test_what_nobody_says_is_an_error(spoil):
    lent, had, asked, messages = lent_rows()
    unknown = np.full(6, NONE)
    said, back = read_said(messages, asked.counts, unknown, had)
    assert said.keeps.all() and back.ids.tolist() == [1, 7, 9, 12]
    messages[1] = spoil(messages[1])
    with pytest.raises(WorldError, match=r"rank 1 sent .* not what a rank says of"):
        read_said(messages, asked.counts, unknown, had)
    one, plain = torch.ones(1, dtype=torch.int64), np.zeros((2, 1), np.int64)
    requests = pack_requests(torch.arange(0), plain, plain, 18 * one, one, plain, codes=None)
    for numbers in ([0, 30], [17, 18]):
        named = pack_numbers(np.array([0, *numbers]), np.array([1, 2]))
        asks = [np.concatenate(each) for each in zip(named, requests, strict=True)]
        with pytest.raises(WorldError, match=r"rank 1 sent .* not what a rank asks for"):
            read_requests(asks, lent, 18 * one, one, 0 * one)
