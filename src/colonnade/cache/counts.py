"""Counts of a row cache: how rows were read and pushed, and how old the copies were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colonnade.cache.directory import EXPIRED, HIT, MISS, Decision


@dataclass
class CacheCounts:
    """Counts of rows of training's batches since the run was opened, each row once a batch. Pushes are counted on the
    rank that sends them, and so are whole rows."""

    hits: int = 0  # used without a request
    misses: int = 0
    lease_over: int = 0
    renewed: int = (
        0  # part of `lease_over`: copies that had not changed at the owner, which sent a bit
    )
    pushed_full: int = 0  # because more batches were pending than the write rule allows
    pushed_leaving: int = 0  # because the copy is dropped with the batch that used it
    pushed_evicted: int = 0  # because the copy was evicted
    ticks: int = 0  # batches with gradients in all that was pushed

    def add_decision(self, joined_decision: Decision, sign: int = 1) -> None:
        """Add the counts of a decision of all tables, `join_decisions`. sign -1: subtract them, to undo it."""
        num_by_outcome = np.bincount(joined_decision.outcomes, minlength=3) * sign
        self.hits += int(num_by_outcome[HIT])
        self.misses += int(num_by_outcome[MISS])
        self.lease_over += int(num_by_outcome[EXPIRED])
        leaving = int((joined_decision.pushed & joined_decision.leaving).sum()) * sign
        self.pushed_leaving += leaving
        self.pushed_full += int(joined_decision.pushed.sum()) * sign - leaving
        self.pushed_evicted += len(joined_decision.evicted_ids) * sign
        ticks = int(joined_decision.ticks[joined_decision.pushed].sum()) + int(
            joined_decision.evicted_ticks.sum()
        )
        self.ticks += ticks * sign


AGES = 32
"""Number of bins of counts of rows by age of the copy that was read: 0 batches, 1, 2 to 3, 4 to 7, and so on."""


def count_rows_by_age(decisions: Sequence[Decision]) -> np.ndarray:
    """Count a batch's rows by age: batches since they were last requested from their owner, 0 with this one. (AGES,)
    int64.

    A read misses at most that many batches of every other rank, and the batches whose gradients were pending there at
    the request: at most `write_bound`."""
    ages = [np.where(decision.outcomes == HIT, decision.ages, 0) for decision in decisions]
    return np.bincount(np.frexp(np.concatenate(ages))[1], minlength=AGES)
