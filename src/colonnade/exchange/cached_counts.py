"""What copies of rows were good for: rows that were used without a word, asked for and sent, and how old they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colonnade.cache.directory import HIT, LEASE_OVER, MISS, Decision


@dataclass
class CacheCounts:
    """Rows of training's batches since the run was opened, each once a batch. Pushes are counted on the rank that sends
    them, whole rows on the rank that sends them."""

    hits: int = 0  # used without a word
    misses: int = 0
    lease_over: int = 0
    renewed: int = 0  # of these, copies that were still what the owner has: a bit
    pushed_full: int = 0  # more batches pending than the write bound
    pushed_leaving: int = 0  # the copy leaves with the batch that used it
    pushed_evicted: int = 0  # driven out
    ticks: int = 0  # batches in all that was pushed

    def add(self, decision: Decision, sign: int = 1) -> None:
        """decision: of all tables, `joined`. sign -1: it is undone."""
        sorts = np.bincount(decision.asked, minlength=3) * sign
        self.hits += int(sorts[HIT])
        self.misses += int(sorts[MISS])
        self.lease_over += int(sorts[LEASE_OVER])
        leaving = int((decision.pushed & decision.leaving).sum()) * sign
        self.pushed_leaving += leaving
        self.pushed_full += int(decision.pushed.sum()) * sign - leaving
        self.pushed_evicted += len(decision.evicted_ids) * sign
        ticks = int(decision.ticks[decision.pushed].sum()) + int(decision.evicted_ticks.sum())
        self.ticks += ticks * sign


AGES = 32
"""Of a count of rows by how old the copy was that was read: 0 batches, 1, 2 to 3, 4 to 7, and so on."""


def ages_of(decisions: Sequence[Decision]) -> np.ndarray:
    """(AGES,) int64: the rows of a batch, by batches since their owner was asked; 0: with this one. Of each other rank
    a read misses at most so many batches, and those whose gradients waited there then: `write_bound` at most."""
    ages = [np.where(each.asked == HIT, each.ages, 0) for each in decisions]
    return np.bincount(np.frexp(np.concatenate(ages))[1], minlength=AGES)
