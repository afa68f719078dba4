"""Asynchronous reads, as peers have them, for comparison: late by what happens, which is measured, not promised.

A batch is read between two steps, as soon as its ids have come on every rank, whatever has been applied by then, and
its values wait for their turn. So no read waits for an update and no update for a read, but rows that come from files
are waited for. How many updates a read misses is a matter of timing: from none to one less than the lookahead's depth,
for no more batches are made ready. There is no other bound, and no promise of the same bits: not of the same run again,
and not of one that is gone on with. A read sees all of an update or nothing of it, and rows of a batch are all of one
moment. Dense weights are those of the step; commits hold what was read, and evaluation sees every update.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unbounded:
    reads_ahead: int
    """The lookahead's depth, in steps."""

    name = "unbounded"
    is_exact = False

    def newest_visible(self, step: int) -> int:
        return step - 1 - self.reads_ahead
