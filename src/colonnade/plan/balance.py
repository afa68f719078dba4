"""Division of memory that follows the traffic: at a commit, by the rows that batches used since the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from colonnade.errors import BudgetExceeded
from colonnade.plan.cost.memory import MemoryDemand, divide_memory, predict_demands
from colonnade.plan.measure.profile import Profile, profile_ids
from colonnade.store.budget import slot_bytes
from colonnade.store.traffic import TrafficSample
from colonnade.table import Table

MIN_BATCHES = 8
"""Number of batches below which a sample goes on to the next commit."""
LEAST_SAVING = 0.05
"""Part of the reads that a new division must save: predictions are not better than that."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Change of the division, to be judged by later traffic."""

    before: Mapping[int, int]
    rows: int
    """Rows that left memory for it."""


class MemoryBalancer:
    """Decisions at commits whether memory moves between the tables of a rank.

    A division changes if it saves more reads until the next commit, should traffic stay as it is, than the number of
    rows that leave memory for it. Where traffic then does not stay, the balancer waits: for one commit, three, seven,
    and so on, until a change has paid off. So traffic that moves every time costs ever fewer changes.
    """

    def __init__(self, tables: Mapping[int, Table], window: int, at_once: int) -> None:
        """tables: by index in the store, the tables that may change, with the rows that this rank may have of them.

        window: batches in flight. at_once: batches that must be in memory at once.
        """
        self.tables, self.window, self.at_once = dict(tables), window, at_once
        self._last: _Move | None = None
        self._waits, self._delay = 0, 0

    def choose(
        self, capacities: Mapping[int, int], num_resident: Mapping[int, int], traffic: TrafficSample, step: int
    ) -> dict[int, int]:  # fmt: skip
        """Choose the slots of each table, by index; {}: as they are. Clears the traffic if it was enough to judge.

        capacities, num_resident: slots and rows in memory, by index. step: steps that were trained.
        """
        tables = {t: table for t, table in self.tables.items() if t in capacities}
        if traffic.num_sampled < MIN_BATCHES or len(tables) < 2:
            return {}
        interval = traffic.num_batches
        demands = predict_traffic_demands(tables, traffic, self.window, self.at_once, step)
        traffic.clear()
        self._judge_last_move(demands, capacities, interval)
        if self._waits:
            self._waits -= 1
            return {}
        budget = sum(capacities[t] * slot_bytes(table) for t, table in tables.items())
        try:
            placed = divide_memory(list(demands.values()), budget, at_once=self.at_once)
        except BudgetExceeded:  # batches share rows, so that less than predicted is enough so far
            return {}
        chosen = {t: memory.rows for t, memory in zip(demands, placed, strict=True)}
        present, best = _count_reads(demands, capacities), _count_reads(demands, chosen)
        moved = sum(max(0, num_resident[t] - chosen[t]) for t in chosen)
        if present - best <= LEAST_SAVING * present or (present - best) * interval <= moved:
            return {}
        self._last = _Move({t: capacities[t] for t in chosen}, moved)
        return chosen

    def _judge_last_move(
        self, demands: Mapping[int, MemoryDemand], capacities: Mapping[int, int], interval: int
    ) -> None:
        """Wait longer if the traffic since the last change made it a loss; forget earlier losses if it paid off."""
        if self._last is None:
            return
        saved = _count_reads(demands, self._last.before) - _count_reads(demands, capacities)
        self._delay = 0 if saved * interval > self._last.rows else 2 * self._delay + 1
        self._waits, self._last = self._delay, None


def predict_traffic_demands(
    tables: Mapping[int, Table], traffic: TrafficSample, window: int, at_once: int, step: int
) -> dict[int, MemoryDemand]:
    """Predict the memory demand of each table from its traffic. A lookup is the use of a row by a batch."""
    profiles, by_table = [], traffic.by_table()
    for t, table in tables.items():
        batches = by_table[t]
        mean = sum(map(len, batches)) / len(batches)
        own = profile_ids(table.name, np.concatenate(batches), mean, is_brief=True)
        profiles.append(replace(own, most_unique=traffic.peaks[t]))
    num = len(by_table[0])
    profile = Profile(num, num, tuple(profiles), largest_batch=1)
    demands = predict_demands(
        list(tables.values()), profile, batch_size=1, window=window, at_once=at_once, first_batch=step,
        last_batch=step + traffic.num_batches,
    )  # fmt: skip
    return dict(zip(tables, demands, strict=True))


def describe_change(
    tables: Sequence[Table], before: Mapping[int, int], after: Mapping[int, int]
) -> str:
    """Describe a change of slots in a line: the tables that change most first."""
    changes = {t: after[t] - before[t] for t in after if after[t] != before[t]}
    order = sorted(changes, key=lambda t: -abs(changes[t]) * slot_bytes(tables[t]))
    words = [f"{tables[t].name} {before[t]:,} -> {after[t]:,}" for t in order[:4]]
    others = f", and {len(order) - 4} other tables" if len(order) > 4 else ""
    return f"memory moves with the traffic: rows of {', '.join(words)}{others}"


def _count_reads(demands: Mapping[int, MemoryDemand], rows: Mapping[int, int]) -> float:
    """Return the rows read for each batch with these numbers of rows in memory."""
    return sum(demand.reads_at(rows[t]) for t, demand in demands.items())
