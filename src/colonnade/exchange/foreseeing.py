"""Batches of a lookahead, each handed out once those of a window after it have been read: what `cached` decides by.

A rank's copies serve its own batches alone, so its own reader says when they are used again: nothing travels for it,
nothing is pinned, and every rank reads as many batches before it routes one.

Legend: T tables, U unique rows of one table in this rank's batch.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from colonnade import _native
from colonnade.batch import Batch
from colonnade.cache.foresight import Foreseen, Foresight
from colonnade.exchange.layout import Lookups

Planned = tuple[Lookups, _native.Plan]
Rows = tuple[np.ndarray, np.ndarray]
"""Of one table: where they are in the plan (U,), and their ids, ascending."""


@dataclass(slots=True)
class Seen:
    """What is known of a batch before it is routed."""

    planned: Planned
    rows: Sequence[Rows]  # by table
    told: list[Foreseen | None] = field(default_factory=list)  # by table, once it is handed out


def rows_of(plan: _native.Plan, ends: Sequence[int]) -> list[Rows]:
    """By table. ends (T + 1,): where its rows are in the plan."""
    unique = np.asarray(plan.unique_ids)
    found = []
    for first, last in pairwise(ends):
        order = np.argsort(unique[first:last])
        found.append((order + first, unique[first:last][order]))
    return found


def in_sight(
    batches: Iterable[Batch],
    see: Callable[[Batch], Seen],
    windows: Sequence[int],
) -> Iterator[Batch]:
    """The same batches, each `foreseen`. windows: by table, one number, or 0: nothing of it has to be known. An error
    of reading, or of `see`, is raised so many batches earlier."""
    sights = [Foresight(window) if window else None for window in windows]
    waiting: deque[Batch] = deque()
    most = max(windows)

    def told() -> Batch:
        batch = waiting.popleft()
        batch.foreseen.told = [None if sight is None else sight.next() for sight in sights]
        return batch

    for batch in batches:
        mine = copy.copy(batch)  # the caller may hand the same one twice
        mine.foreseen = see(mine)
        for sight, (_, ids) in zip(sights, mine.foreseen.rows, strict=True):
            if sight is not None:
                sight.see(ids)
        waiting.append(mine)
        if len(waiting) > most:
            yield told()
    while waiting:
        yield told()
