"""Rows that lie with others than their owners, numbered alike on both ends, so that few bits name one.

Of each other rank a rank keeps which rows it has lent to it, and which it has borrowed. Both ends hear of every
decision in its order, so a number needs no word: what a rank has of another's rows is numbered from 0, what ends gives
its number to the next one. On the thread that decides; what ranks say of batches that are not decided on yet uses the
numbers of the newest decision.

Legend: N ranks, T tables, n rows, listed rank by rank, table by table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colonnade.exchange.cached_wire import ranks_of, tables_of
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
        # By rank and number; the table of one that nothing has is NONE.
        self._ids = np.empty((num_ranks, 0), np.int64)
        self._tables = np.empty((num_ranks, 0), np.int32)
        self._copied = np.empty((num_ranks, 0), bool)
        self._sizes = np.zeros(num_ranks, np.int64)  # numbers of each rank, free ones among them
        self._free = [np.empty(0, np.int64) for _ in range(num_ranks)]  # who ended last comes last

    def numbers(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """(n,) int64 of rows in any order: NONE of others."""
        return self._numbers.get(tables, ids)

    def rows(self, rank: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tables (n,), ids (n,)) of what that rank has, or lent. Raises ValueError for a number that nothing has."""
        are_known = (numbers < self._sizes[rank]).all()
        tables = self._tables[rank][numbers] if are_known else np.array([NONE])
        if (tables == NONE).any():
            raise ValueError("got the number of a row that is not lent")
        return tables, self._ids[rank][numbers]

    def copied(self, counts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """(n,) bool, of rows as listed, counts (N, T) of them: what lies there is a copy."""
        found, has = np.zeros(len(numbers), bool), np.flatnonzero(numbers != NONE)
        found[has] = self._copied[ranks_of(counts)[has], numbers[has]]
        return found

    def decide(self, said: Said, ids: np.ndarray, recalled: Back) -> None:
        """A batch was decided on: ids (n,) of rows that were asked for, as listed; others that come back with it."""
        rows = np.flatnonzero(said.has | said.keeps)  # nothing is known of the others
        ranks, tables = ranks_of(said.counts)[rows], tables_of(said.counts)[rows]
        has, keeps, copied, ids = (each[rows] for each in (said.has, said.keeps, said.copied, ids))
        others = ranks_of(recalled.counts), recalled.tables, recalled.ids.numpy()
        numbers, other_numbers = self.numbers(tables, ids), self.numbers(*others[1:])
        self._copied[others[0], other_numbers] = True
        ends, begins, left = has & ~keeps, ~has & keeps, ~recalled.copied
        of, ended_tables, ended_ids = (
            np.concatenate([one[ends], other[left]])
            for one, other in zip((ranks, tables, ids), others, strict=True)
        )
        ended = np.concatenate([numbers[ends], other_numbers[left]])
        self._numbers.erase(ended_tables, ended_ids)
        self._tables[of, ended] = NONE
        wanted = np.bincount(ranks[begins], minlength=len(self._free))
        numbers[begins] = self._exchanged(of, ended, wanted)
        self._numbers.put(tables[begins], ids[begins], numbers[begins])
        self._ids[ranks[begins], numbers[begins]] = ids[begins]
        self._tables[ranks[begins], numbers[begins]] = tables[begins]
        self._copied[ranks[keeps], numbers[keeps]] = copied[keeps]

    def _exchanged(self, ranks: np.ndarray, ended: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Numbers ended (m,) of these ranks are free; so many as are wanted (N,) of each are taken, rank by rank."""
        order, sizes = np.argsort(ranks, kind="stable"), np.bincount(ranks, minlength=len(wanted))
        ends, taken = sizes.cumsum().tolist(), []
        parts = zip([0, *ends], ends, wanted.tolist(), strict=False)
        for rank, (first, last, count) in enumerate(parts):
            free = np.concatenate([self._free[rank], ended[order[first:last]]])
            if count > len(free):
                free = np.concatenate([self._more(rank, count - len(free)), free])
            kept = len(free) - count
            self._free[rank] = free[:kept]
            taken.append(free[kept:])
        return np.concatenate(taken)

    def _more(self, rank: int, count: int) -> np.ndarray:
        """Numbers that the rank did not have yet, descending."""
        size = int(self._sizes[rank])
        self._sizes[rank] += max(count, size // 2)
        short = int(self._sizes.max()) - self._ids.shape[1]
        if short > 0:
            for name, none in (("_ids", 0), ("_tables", NONE), ("_copied", False)):
                more = np.pad(getattr(self, name), ((0, 0), (0, short)), constant_values=none)
                setattr(self, name, more)
        return np.arange(size, self._sizes[rank])[::-1]
