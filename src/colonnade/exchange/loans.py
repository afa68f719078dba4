"""Rows that lie with others than their owners, numbered alike on both ends, so that few bits name one.

Of each other rank a rank keeps which rows it has lent to it, and which it has borrowed. Both ends hear of every
decision in its order, so a number needs no word: what a rank has of another's rows is numbered from 0, what ends gives
its number to the next one. On the thread that decides; what ranks say of batches that are not decided on yet uses the
numbers of the newest decision.

Legend: N ranks, T tables, n rows, listed rank by rank, table by table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from colonnade.exchange.cached_wire import tables_of
from colonnade.exchange.row_numbers import ABSENT, RowNumbers
from colonnade.exchange.said import Back, Said

NONE = ABSENT
"""No number: the row lies with its owner alone."""


class Loans:
    """One end: of rows that a rank has lent to the others, or that they lent to it. At any time a row, or a copy of it,
    lies with one rank beside its owner at most."""

    def __init__(self, num_ranks: int, rows: Sequence[int | None]) -> None:
        """rows: of each table; None: open."""
        self._numbers = RowNumbers(rows)
        # By rank, then by number; the table of one that nothing has is NONE.
        self._ids = [np.empty(0, np.int64) for _ in range(num_ranks)]
        self._tables = [np.empty(0, np.int32) for _ in range(num_ranks)]
        self._copied = [np.empty(0, bool) for _ in range(num_ranks)]
        self._free = [np.empty(0, np.int64) for _ in range(num_ranks)]  # who ended last comes last

    def numbers(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """(n,) int64 of rows in any order: NONE of others."""
        return self._numbers.get(tables, ids)

    def rows(self, rank: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tables (n,), ids (n,)) of what that rank has, or lent. Raises ValueError for a number that nothing has."""
        are_known = (numbers < len(self._ids[rank])).all()
        tables = self._tables[rank][numbers] if are_known else np.array([NONE])
        if (tables == NONE).any():
            raise ValueError("got the number of a row that is not lent")
        return tables, self._ids[rank][numbers]

    def copied(self, counts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """(n,) bool, of rows as listed, counts (N, T) of them: what lies there is a copy."""
        found = np.zeros(len(numbers), bool)
        for rank, mine in _by_rank(counts):
            has = numbers[mine] != NONE
            found[mine][has] = self._copied[rank][numbers[mine][has]]
        return found

    def decide(self, said: Said, ids: np.ndarray, recalled: Back) -> None:
        """A batch was decided on: ids (n,) of rows that were asked for, as listed; others that come back with it."""
        tables, others = tables_of(said.counts), recalled.ids.numpy()
        numbers, recalled_numbers = (
            self.numbers(tables, ids),
            self.numbers(recalled.tables, others),
        )
        ends, begins = said.has & ~said.keeps, said.borrowed
        left = ~recalled.copied
        self._numbers.erase(tables[ends], ids[ends])
        self._numbers.erase(recalled.tables[left], others[left])
        given = zip(_by_rank(said.counts), _by_rank(recalled.counts), strict=True)
        for (rank, mine), (_, back) in given:
            self._copied[rank][recalled_numbers[back]] = True
            ended = np.concatenate([numbers[mine][ends[mine]], recalled_numbers[back][left[back]]])
            self._tables[rank][ended] = NONE
            self._free[rank] = np.concatenate([self._free[rank], ended])
            new = begins[mine]
            numbers[mine][new] = self._take(rank, int(new.sum()))
            self._ids[rank][numbers[mine][new]] = ids[mine][new]
            self._tables[rank][numbers[mine][new]] = tables[mine][new]
            stays = said.keeps[mine]
            self._copied[rank][numbers[mine][stays]] = said.copied[mine][stays]
        self._numbers.put(tables[begins], ids[begins], numbers[begins])

    def _take(self, rank: int, count: int) -> np.ndarray:
        free, size = self._free[rank], len(self._ids[rank])
        if count > len(free):
            more = max(count - len(free), size // 2)
            for arrays, none in ((self._ids, 0), (self._tables, NONE), (self._copied, False)):
                new = np.full(more, none, arrays[rank].dtype)
                arrays[rank] = np.concatenate([arrays[rank], new])
            free = np.concatenate([np.arange(size, size + more)[::-1], free])
        kept = len(free) - count
        self._free[rank] = free[:kept]
        return free[kept:]


def _by_rank(counts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Where each rank's rows are, as listed."""
    ends = [0, *counts.sum(1).cumsum().tolist()]
    return ((rank, slice(ends[rank], ends[rank + 1])) for rank in range(len(counts)))
