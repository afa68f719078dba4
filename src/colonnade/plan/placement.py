"""Placement of rows in memory: memory goes to the tables where a byte saves most reads.

`place_rows` places them before a run by a profile; `MemoryBalancer` lets memory follow the traffic at checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from colonnade.errors import BudgetExceeded
from colonnade.plan.build import apply_placement, get_record_bytes
from colonnade.plan.cost.demands import predict_demands
from colonnade.plan.cost.memory import (
    Budgets,
    MemoryDemand,
    TableMemory,
    divide,
    list_rank_demands,
)
from colonnade.plan.hot import subtract_hot_row_bytes
from colonnade.plan.measure.profile import Profile, RunBatches, profile_ids
from colonnade.plan.plan import Plan
from colonnade.store.budget import slot_bytes
from colonnade.store.table_shards import shard_tables
from colonnade.store.traffic import MIN_BATCHES, TrafficSample
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, max_rows_per_owner

LEAST_SAVING = 0.05
"""Part of the reads that a new division must save: predictions are not better than that."""


def is_memory_limited(plan: Plan, tables: Sequence[Table]) -> bool:
    """Return whether rows of some table do not fit in a memory that the plan divides among tables."""
    return (
        plan.needs_backing
        or any(planned.tier == "mapped" for planned in plan.tables)
        or any(
            plan.hbm_bytes is not None
            and (
                table.rows is None or planned.hbm_rows < _count_owned_rows(table, planned.sharding)
            )
            for table, planned in zip(tables, plan.tables, strict=True)
        )
    )


def place_rows(
    plan: Plan,
    tables: Sequence[Table],
    profile: Profile,
    batches: RunBatches,
    table_bytes: Mapping[str, int],
) -> Plan:
    """Return `plan` with the rows in memory that save most reads over the batches of the run.

    profile: of these tables. table_bytes: budgets of single tables by name. Raises BudgetExceeded if a batch of the
    profile's size does not fit.
    """
    owners = len(plan.servers) or plan.num_ranks

    def predict(fixed_bytes: Mapping[str, int]) -> list[MemoryDemand]:
        return predict_demands(
            tables,
            profile,
            batches,
            num_ranks=owners,
            fixed_bytes=fixed_bytes,
            shardings=plan.shardings,
        )

    placed = divide_planned_memory(plan, tables, predict(table_bytes))
    placed_plan = apply_placement(plan, tables, placed, lookahead=plan.lookahead)
    if plan.hbm_bytes is None:
        return placed_plan
    return place_rows_on_device(placed_plan, tables, predict({}))


def forecast_batches(
    plan: Plan,
    *,
    batch_size: int,
    num_samples: int | None,
    first_batch: int = 0,
    last_batch: int,
    lookahead_depth: int | None = None,
) -> RunBatches:
    """Return the batches of a run under a plan. lookahead_depth: lookahead in batches; None: the plan's, or 2 if it is
    "auto"."""
    if lookahead_depth is None:
        lookahead_depth = 2 if plan.lookahead == "auto" else plan.lookahead
    at_once = 1 + plan.max_staleness_steps
    return RunBatches(
        batch_size=batch_size,
        window=lookahead_depth + at_once,
        at_once=at_once,
        num_samples=num_samples,
        first_batch=first_batch,
        last_batch=last_batch,
    )


def read_budgets(plan: Plan, tables: Sequence[Table]) -> Budgets:
    """Return the main and mapped memory of a plan's ranks without their copies of hot rows."""
    return Budgets(
        subtract_hot_row_bytes(
            shard_tables(tables, plan.shardings), plan.dram_bytes, "plan.memory.dram", slot_bytes
        ),
        0 if plan.mapped is None else plan.mapped.bytes,
        at_once=1 + plan.max_staleness_steps,
    )


def divide_planned_memory(
    plan: Plan, tables: Sequence[Table], demands: Sequence[MemoryDemand]
) -> list[TableMemory]:
    """Divide a plan's main and mapped memory by the reads that it saves."""
    rank_demands = list_rank_demands(plan.shardings, plan.num_ranks)
    return divide(demands, read_budgets(plan, tables), rank_demands)


def place_rows_on_device(
    plan: Plan, tables: Sequence[Table], demands: Sequence[MemoryDemand]
) -> Plan:
    """Return `plan` with device memory divided by the reads that it saves main memory.

    demands: without budgets of single tables, which are of main memory. Raises as `place_rows`.
    """
    budgets = Budgets(
        subtract_hot_row_bytes(
            shard_tables(tables, plan.shardings),
            plan.hbm_bytes,
            "plan.memory.hbm",
            get_record_bytes,
        ),
        setting="plan.memory.hbm",
        at_once=1 + plan.max_staleness_steps,
    )
    on_device = [
        replace(demand, slot_bytes=get_record_bytes(table))
        for demand, table in zip(demands, tables, strict=True)
    ]
    placed = divide(on_device, budgets, list_rank_demands(plan.shardings, plan.num_ranks))
    planned = []
    for table, before, own in zip(tables, plan.tables, placed, strict=True):
        rows = own.rows * before.sharding.slices  # a slice of a row takes a part of its bytes
        if table.rows is not None:
            rows = min(rows, _count_owned_rows(table, before.sharding))
        planned.append(replace(before, hbm_rows=rows))
    return replace(plan, tables=tuple(planned))


def _count_owned_rows(table: Table, sharding: Sharding) -> int:
    """Return the rows of a vocabulary table on its fullest rank."""
    return max_rows_per_owner(table.rows or 0, sharding.num_owners)


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

    def __init__(
        self,
        tables: Mapping[int, Table],
        window: int,
        at_once: int,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        """tables: by index in the store, the tables that may change, with the rows that this rank may have of them.

        window: batches in flight. at_once: batches that must be in memory at once. limits: by index, the largest number
        of rows that the store can have in memory; None: any number.
        """
        self.tables = dict(tables)
        self.window = window
        self.at_once = at_once
        self.limits = dict(limits or {})
        self._last: _Move | None = None
        self._waits = 0
        self._delay = 0

    def choose(
        self,
        slot_capacities: Mapping[int, int],
        resident_rows: Mapping[int, int],
        traffic_sample: TrafficSample,
        step: int,
    ) -> dict[int, int]:
        """Choose the slots of each table, by index; {}: as they are. Clears the traffic if it was enough to judge.

        slot_capacities, resident_rows: slots and rows in memory, by index. step: steps that were trained.
        """
        tables = {t: table for t, table in self.tables.items() if t in slot_capacities}
        if traffic_sample.num_sampled < MIN_BATCHES or len(tables) < 2:
            return {}
        interval = traffic_sample.num_batches
        demands = predict_traffic_demands(tables, traffic_sample, self.window, self.at_once, step)
        traffic_sample.clear()
        self._judge_last_move(demands, slot_capacities, interval)
        if self._waits:
            self._waits -= 1
            return {}
        budget = sum(slot_capacities[t] * slot_bytes(table) for t, table in tables.items())
        limited = [
            demand.limit_to(max(self.limits[t], slot_capacities[t])) if t in self.limits else demand
            for t, demand in demands.items()
        ]
        try:
            placed = divide(limited, Budgets(budget, at_once=self.at_once))
        except BudgetExceeded:  # batches share rows, so that less than predicted is enough so far
            return {}
        chosen = {t: memory.rows for t, memory in zip(demands, placed, strict=True)}
        present = _count_reads(demands, slot_capacities)
        best = _count_reads(demands, chosen)
        moved = sum(max(0, resident_rows[t] - chosen[t]) for t in chosen)
        if present - best <= LEAST_SAVING * present or (present - best) * interval <= moved:
            return {}
        self._last = _Move({t: slot_capacities[t] for t in chosen}, moved)
        return chosen

    def _judge_last_move(
        self,
        demands: Mapping[int, MemoryDemand],
        slot_capacities: Mapping[int, int],
        interval_steps: int,
    ) -> None:
        """Wait longer if the traffic since the last change made it a loss; forget earlier losses if it paid off."""
        if self._last is None:
            return
        saved = _count_reads(demands, self._last.before) - _count_reads(demands, slot_capacities)
        self._delay = 0 if saved * interval_steps > self._last.rows else 2 * self._delay + 1
        self._waits = self._delay
        self._last = None


def predict_traffic_demands(
    tables: Mapping[int, Table],
    traffic_sample: TrafficSample,
    window_batches: int,
    pinned_batches: int,
    step: int,
) -> dict[int, MemoryDemand]:
    """Predict the memory demand of each table from its traffic. A lookup is the use of a row by a batch."""
    profiles = []
    by_table = traffic_sample.by_table()
    for t, table in tables.items():
        batches = by_table[t]
        mean = sum(map(len, batches)) / len(batches)
        own = profile_ids(table.name, np.concatenate(batches), mean)
        profiles.append(replace(own, most_unique=traffic_sample.peaks[t]))
    num = len(by_table[0])
    profile = Profile(num, num, tuple(profiles), largest_batch=1)
    demands = predict_demands(
        list(tables.values()),
        profile,
        RunBatches(
            batch_size=1,
            window=window_batches,
            at_once=pinned_batches,
            first_batch=step,
            last_batch=step + traffic_sample.num_batches,
        ),
    )
    return dict(zip(tables, demands, strict=True))


def describe_slot_changes(
    tables: Sequence[Table], slots_before: Mapping[int, int], slots_after: Mapping[int, int]
) -> str:
    """Describe a change of slots in a line: the tables that change most first."""
    changes = {
        t: slots_after[t] - slots_before[t]
        for t in slots_after
        if slots_after[t] != slots_before[t]
    }
    order = sorted(changes, key=lambda t: -abs(changes[t]) * slot_bytes(tables[t]))
    words = [f"{tables[t].name} {slots_before[t]:,} -> {slots_after[t]:,}" for t in order[:4]]
    others = f", and {len(order) - 4} other tables" if len(order) > 4 else ""
    return f"memory moves with the traffic: rows of {', '.join(words)}{others}"


def _count_reads(demands: Mapping[int, MemoryDemand], rows: Mapping[int, int]) -> float:
    """Return the rows read for each batch with these numbers of rows in memory."""
    return sum(demand.reads_at(rows[t]) for t, demand in demands.items())
