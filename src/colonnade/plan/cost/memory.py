"""Division of memory among tables: from each table's reads at any size to a number of rows, within the budgets.

A cache of n rows of a table converges to the n most used rows. So the reads of a table fall with its rows, ever more
slowly along the lower convex hull of the curve. Each next byte goes to the table where it saves most reads: optimal for
convex curves, except for the last rounding.

Pure functions. Rows are those of one rank; reads and births those of one batch of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import BudgetExceeded
from colonnade.plan.measure.popularity import (
    OPEN_ROOM,
    Popularity,
    expected_used_rows,
    predict_counting_cache_reads,
)
from colonnade.plan.measure.profile import Profile
from colonnade.store.budget import slot_bytes
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, list_distinct_shards, max_rows_per_owner

Floats = NDArray[np.float64]

Tier = Literal["dram", "mapped"]
"""Memory of a table's rows: main memory, or mapped files on byte-addressable memory."""
MOMENTS = 6
"""Number of points in a run at which reads are predicted; the run's reads are their mean."""
CURVE_POINTS = 256
SPREAD = 4.0
"""Number of standard deviations above the mean that the rows of a batch may reach."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Memory demand of one table on one rank."""

    name: str
    slot_bytes: int
    least_rows: int
    """Number of rows of the batches that must be in memory at once: one batch without staleness."""
    max_rows: int
    """Number of rows beyond which memory saves nothing, or that the table may not exceed."""
    rows: tuple[float, ...]
    """Numbers of rows in memory, the points of the read curve."""
    reads: tuple[float, ...]
    """Rows of a batch that are read from files with rows[i] rows in memory; linear between the points."""
    unique: float
    """Number of distinct rows of a batch."""
    births: float
    """Number of rows of a batch that were never used before."""
    is_open: bool = False
    """True for an open table."""
    window_rows: int = 0
    """Number of rows of all batches in flight; a window that does not fit becomes shorter."""
    limit_rows: int | None = None
    """Number of rows that the table may never exceed in memory; None: an open table may grow beyond `max_rows`."""

    def reads_at(self, rows: float) -> float:
        """Return the rows read from files per batch with `rows` rows in memory."""
        return float(np.interp(rows, self.rows, self.reads))

    @property
    def max_bytes(self) -> int:
        """Bytes of memory of `max_rows`."""
        return self.max_rows * self.slot_bytes

    def limit_to(self, rows: int) -> MemoryDemand:
        """Return the demand of the table if it may have at most `rows` rows in memory."""
        return replace(
            self,
            max_rows=min(self.max_rows, rows),
            least_rows=min(self.least_rows, rows),
            limit_rows=rows,
        )


@dataclass(frozen=True, slots=True)
class TableMemory:
    """Memory assigned to one table: its rows, and the rows read from files per batch."""

    name: str
    rows: int
    reads: float
    tier: Tier = "dram"


def predict_demands(
    tables: Sequence[Table],
    profile: Profile,
    *,
    batch_size: int,
    window: int,
    at_once: int = 1,
    num_ranks: int = 1,
    num_samples: int | None = None,
    first_batch: int = 0,
    last_batch: int,
    fixed_bytes: Mapping[str, int] | None = None,
    shardings: Sequence[Sharding] | None = None,
) -> list[MemoryDemand]:
    """Predict each table's mean memory demand over batches first_batch .. last_batch of a run.

    window: batches in flight. at_once: batches that must be in memory at once. num_samples: size of the data set, if
    known; no batch has more distinct rows than the data set. fixed_bytes: budgets of single tables, by name.
    shardings: by table, each demand is that of an owner rank; without, all ranks own rows.
    """
    span = max(last_batch - first_batch, 1)
    epoch = math.inf if num_samples is None else max(num_samples / batch_size, 1.0)
    moments = [first_batch + span * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    results = []
    for t, table in enumerate(tables):
        owners = num_ranks if shardings is None else shardings[t].num_owners
        popularity = profile.tables[t].popularity(table.rows)
        lookups = profile.lookups_per_sample(t) * batch_size
        unique = popularity.unique(lookups) / owners
        possible = _count_possible_rows(profile, t, table, num_samples)
        in_flight = min(popularity.unique(lookups * window), possible) / owners
        at_once_rows = min(
            _predict_rows_in_flight(profile, t, popularity, batch_size, at_once), possible
        )
        if table.rows is None:
            used_rows = expected_used_rows(popularity, lookups, min(last_batch, epoch))
            whole = max(used_rows * OPEN_ROOM, at_once_rows) / owners
        else:
            whole = max_rows_per_owner(table.rows, owners)
        max_rows = max(1, math.ceil(whole))
        least_mean = _upper_bound(at_once_rows / owners, at_once_rows, owners > 1)
        least = min(max_rows, max(1, math.ceil(least_mean)))
        window_rows = min(max_rows, math.ceil(_upper_bound(in_flight, possible / owners)))
        first, last = (
            expected_used_rows(popularity, lookups, min(n, epoch))
            for n in (first_batch, last_batch)
        )
        births = (last - first) / span / owners
        rows, reads = _average_read_curves(popularity, lookups, moments, epoch)
        rows = rows / owners
        reads = reads / owners
        # Rows in transit take slots in addition to those of cached rows.
        rows = rows + np.minimum(window * (reads + births), in_flight)
        order = np.argsort(rows, kind="stable")
        rows = np.append(np.minimum(rows[order], max_rows), max_rows)
        reads = np.append(np.minimum.accumulate(reads[order]), 0.0)
        demand = MemoryDemand(
            table.name,
            slot_bytes(table),
            least,
            max_rows,
            tuple(rows.tolist()),
            tuple(reads.tolist()),
            unique,
            births,
            table.rows is None,
            max(least, window_rows),
        )
        if fixed_bytes and table.name in fixed_bytes:
            fixed = min(max_rows, max(1, fixed_bytes[table.name] // slot_bytes(table)))
            if fixed < least:
                raise _build_budget_error(
                    demand, fixed_bytes[table.name], f"plan.memory.tables.{table.name}", at_once
                )
            demand = replace(
                demand,
                least_rows=fixed,
                window_rows=fixed,
                max_rows=fixed,
                rows=(0.0,),
                reads=(demand.reads_at(fixed),),
            )
        results.append(demand)
    return results


def divide_memory(
    table_demands: Sequence[MemoryDemand],
    dram_bytes: int | None,
    mapped_bytes: int | None = 0,
    *,
    at_once: int = 1,
) -> list[TableMemory]:
    """Divide a rank's memory among its tables; budgets of None have no limit.

    Batches in flight come first. Whole tables move to `mapped_bytes` of byte-addressable memory, those with the most
    reads for their size first; mapped rows are never read from files. Where the `at_once` batches that must be in
    memory do not fit, tables with the most bytes of these batches move before all others. Raises BudgetExceeded with
    the table and the numbers if the batches do not fit even so.
    """
    if dram_bytes is None:
        return [TableMemory(demand.name, demand.max_rows, 0.0) for demand in table_demands]
    mapped = _map_tables_of_large_batches(table_demands, dram_bytes, mapped_bytes)
    rows = _divide_memory_of_unmapped(table_demands, mapped, dram_bytes, at_once)
    while True:
        free = (
            None
            if mapped_bytes is None
            else mapped_bytes - sum(table_demands[t].max_bytes for t in mapped)
        )
        gains = {
            t: demand.reads_at(rows[t]) / demand.max_bytes
            for t, demand in enumerate(table_demands)
            if t not in mapped
            and not demand.is_open
            and rows[t] < demand.max_rows
            and (free is None or demand.max_bytes <= free)
        }
        best = max(gains, key=lambda t: gains[t], default=None)
        if best is None or gains[best] <= 0:
            return _assign_rows(table_demands, rows, mapped)
        mapped.add(best)
        rows = _divide_memory_of_unmapped(table_demands, mapped, dram_bytes, at_once)


def _map_tables_of_large_batches(
    table_demands: Sequence[MemoryDemand], dram_bytes: int, mapped_bytes: int | None
) -> set[int]:
    """Return the tables to map whole so that the batches of all others fit in main memory, largest batches first.

    Returns no table if the batches fit anyway, or if they do not fit even so.
    """
    least_bytes = [demand.least_rows * demand.slot_bytes for demand in table_demands]
    excess = sum(least_bytes) - dram_bytes
    free = mapped_bytes
    mapped: set[int] = set()
    for t in sorted(range(len(table_demands)), key=lambda t: -least_bytes[t]):
        demand = table_demands[t]
        # Mapped memory stores whole tables only: none that may grow, or that has a budget of its own.
        if demand.is_open or len(demand.rows) == 1:
            continue
        if excess <= 0:
            break
        if free is None or demand.max_bytes <= free:
            mapped.add(t)
            excess -= least_bytes[t]
            free = None if free is None else free - demand.max_bytes
    return mapped if excess <= 0 else set()


def _divide_memory_of_unmapped(
    table_demands: Sequence[MemoryDemand],
    mapped: Collection[int],
    dram_bytes: int,
    at_once: int,
) -> list[int]:
    """Divide main memory among the tables that are not mapped. Returns rows by table; all rows of mapped ones."""
    others = [demand for t, demand in enumerate(table_demands) if t not in mapped]
    shares = iter(_divide_memory_budget(others, dram_bytes, at_once))
    return [
        demand.max_rows if t in mapped else next(shares) for t, demand in enumerate(table_demands)
    ]


def divide_memory_on_ranks(
    table_demands: Sequence[MemoryDemand],
    shardings: Sequence[Sharding],
    num_ranks: int,
    dram_bytes: int | None,
    mapped_bytes: int | None = 0,
    *,
    at_once: int = 1,
) -> list[TableMemory]:
    """Divide memory as `divide_memory` does if ranks own rows of different tables.

    Each rank divides its memory among its own tables; a table gets the smallest number of rows of its ranks.
    table_demands: under these shardings. Raises as `divide_memory`."""
    rank_tables = [
        [t for t, shard in enumerate(shards) if shard.owner_index is not None]
        for shards in list_distinct_shards(shardings, num_ranks)
    ]
    rank_tables = [tables for tables in rank_tables if tables]
    by_rank = [
        _divide_rank_memory(table_demands, tables, dram_bytes, mapped_bytes, at_once)
        for tables in rank_tables
    ]
    tiers = {
        t: {placed[t].tier for placed in by_rank if t in placed} for t in range(len(table_demands))
    }
    if any(len(kinds) > 1 for kinds in tiers.values()):
        # A rank has no mapped room for some table: that table stays in main memory on all ranks.
        mapped = {t for t, kinds in tiers.items() if kinds == {"mapped"}}
        by_rank = [
            {
                t: TableMemory(table_demands[t].name, table_demands[t].max_rows, 0.0, "mapped")
                for t in tables
                if t in mapped
            }
            | _divide_rank_memory(
                table_demands, [t for t in tables if t not in mapped], dram_bytes, 0, at_once
            )
            for tables in rank_tables
        ]
    return [
        min((placed[t] for placed in by_rank if t in placed), key=lambda memory: memory.rows)
        for t in range(len(table_demands))
    ]


def _divide_rank_memory(
    table_demands: Sequence[MemoryDemand],
    tables: Sequence[int],
    dram_bytes: int | None,
    mapped_bytes: int | None,
    at_once: int,
) -> dict[int, TableMemory]:
    """Divide the memory of a rank with rows of these tables. Returns the memory by table."""
    placed = divide_memory(
        [table_demands[t] for t in tables], dram_bytes, mapped_bytes, at_once=at_once
    )
    return dict(zip(tables, placed, strict=True))


def average_over_ranks(
    table_demands: Sequence[MemoryDemand],
    placed: Sequence[TableMemory],
    shardings: Sequence[Sharding],
    num_ranks: int,
) -> tuple[list[MemoryDemand], list[TableMemory]]:
    """Average the reads, distinct rows and births of tables over all ranks, including ranks without rows of a table."""
    parts = [len(sharding.ranks) / num_ranks for sharding in shardings]
    return (
        [
            replace(
                demand,
                reads=tuple(part * reads for reads in demand.reads),
                unique=part * demand.unique,
                births=part * demand.births,
            )
            for demand, part in zip(table_demands, parts, strict=True)
        ],
        [
            replace(memory, reads=part * memory.reads)
            for memory, part in zip(placed, parts, strict=True)
        ],
    )


def fits_batches_in_flight(table_demands: Sequence[MemoryDemand], dram_bytes: int | None) -> bool:
    """Return whether all batches in flight fit in memory at once, so that none waits for another to finish."""
    if dram_bytes is None:
        return True
    return (
        _total_bytes(table_demands, [_window_rows(demand) for demand in table_demands])
        <= dram_bytes
    )


def lower_convex_hull(rows: Sequence[float], reads: Sequence[float]) -> tuple[Floats, Floats]:
    """Return the lower convex hull of a falling curve, which mixtures of two sizes reach."""
    points: list[tuple[float, float]] = []
    for x, y in zip(rows, reads, strict=True):
        if points and x <= points[-1][0]:
            continue
        while len(points) > 1 and (points[-1][1] - points[-2][1]) * (x - points[-2][0]) >= (
            y - points[-2][1]
        ) * (points[-1][0] - points[-2][0]):
            points.pop()
        points.append((x, y))
    curve = np.array(points)
    return curve[:, 0], curve[:, 1]


def _average_read_curves(
    popularity: Popularity,
    lookups: float,
    moments: Sequence[float],
    epoch: float,
) -> tuple[Floats, Floats]:
    """Return the mean of the read curves at several moments, at the rows of all their points."""
    curves = [
        predict_counting_cache_reads(popularity, lookups, moment, epoch) for moment in moments
    ]
    rows = np.unique(np.concatenate([curve[0] for curve in curves]))
    if len(rows) > CURVE_POINTS:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, CURVE_POINTS).round().astype(np.int64))]
    return rows, np.mean([np.interp(rows, *curve) for curve in curves], axis=0)


def _count_possible_rows(
    profile: Profile, table_index: int, table: Table, num_samples: int | None
) -> float:
    """Return the largest number of distinct rows that any number of batches can have, over all ranks."""
    possible = math.inf if table.rows is None else float(table.rows)
    if num_samples is None:
        return possible
    stats = profile.tables[table_index]
    if profile.samples >= num_samples:  # The sample is the whole data set.
        return min(possible, stats.rows)
    more_samples = num_samples - profile.samples
    return min(possible, stats.rows + more_samples * profile.lookups_per_sample(table_index))


def _predict_rows_in_flight(
    profile: Profile, table_index: int, popularity: Popularity, batch_size: int, at_once: int
) -> float:
    """Return the distinct rows of `at_once` full batches; from counts, if the sample has batches of this size."""
    counted = profile.tables[table_index].most_unique if batch_size == profile.largest_batch else 0
    lookups = profile.lookups_per_sample(table_index) * batch_size
    if not counted:
        return popularity.unique(lookups * at_once)
    return min(counted * at_once, max(counted, popularity.unique(lookups * at_once)))


def _upper_bound(mean: float, max_rows: float, is_random: bool = True) -> float:
    """Return a number of rows that batches hardly ever exceed, at most `max_rows`."""
    return min(max_rows, mean + SPREAD * math.sqrt(mean)) if is_random else min(max_rows, mean)


def _window_rows(demand: MemoryDemand) -> int:
    return min(demand.max_rows, max(demand.least_rows, demand.window_rows))


def _total_bytes(table_demands: Sequence[MemoryDemand], rows: Sequence[int]) -> int:
    return sum(n * demand.slot_bytes for n, demand in zip(rows, table_demands, strict=True))


def _share_window_rows(
    table_demands: Sequence[MemoryDemand], budget: int, at_once: int
) -> list[int]:
    """Return the rows that each table gets first: those of its window, or the same part of every table's window."""
    least = _total_bytes(table_demands, [demand.least_rows for demand in table_demands])
    if least > budget:
        largest = max(table_demands, key=lambda demand: demand.least_rows * demand.slot_bytes)
        raise _build_budget_error(largest, budget, "plan.memory.dram", at_once, least)
    more = _total_bytes(table_demands, [_window_rows(demand) for demand in table_demands]) - least
    part = 1.0 if more <= budget - least else (budget - least) / more
    return [
        demand.least_rows + math.floor(part * (_window_rows(demand) - demand.least_rows))
        for demand in table_demands
    ]


def _divide_memory_budget(
    table_demands: Sequence[MemoryDemand], budget: int, at_once: int
) -> list[int]:
    """Return the rows of each table in memory: its window first, then the rows that save most reads per byte."""
    first = _share_window_rows(table_demands, budget, at_once)
    steps: list[tuple[float, int, int, float]] = []
    for t, demand in enumerate(table_demands):
        if demand.max_rows <= first[t]:
            continue
        inner = [x for x in demand.rows if first[t] < x < demand.max_rows]
        points = [float(first[t]), *inner, float(demand.max_rows)]
        rows, reads = lower_convex_hull(points, [demand.reads_at(x) for x in points])
        saved = -np.diff(reads)
        sizes = np.diff(rows)
        # Earlier pieces of a table's hull save more per byte than later ones, so sorting keeps their order.
        steps += [
            (-float(saved[i] / (sizes[i] * demand.slot_bytes)), t, i, float(sizes[i]))
            for i in range(len(sizes))
            if saved[i] > 0
        ]
    table_rows = [float(n) for n in first]
    free = float(budget - _total_bytes(table_demands, first))
    for _, t, _, size in sorted(steps):
        more = min(size, free / table_demands[t].slot_bytes)
        table_rows[t] += more
        free -= more * table_demands[t].slot_bytes
        if free <= 0:
            break
    floored = [
        min(demand.max_rows, math.floor(table_rows[t] + 1e-6))
        for t, demand in enumerate(table_demands)
    ]
    return _divide_unused_memory(table_demands, floored, budget)


def _divide_unused_memory(
    table_demands: Sequence[MemoryDemand], rows: list[int], budget: int
) -> list[int]:
    """Divide memory that saves no predicted reads, in case these are wrong: complete small tables, then evenly.

    Open tables share the rest evenly, up to their limits: they may grow beyond `max_rows`, which is estimated.
    """
    free = budget - _total_bytes(table_demands, rows)
    lacking = [t for t, demand in enumerate(table_demands) if rows[t] < demand.max_rows]
    lacking.sort(key=lambda t: (table_demands[t].max_rows - rows[t]) * table_demands[t].slot_bytes)
    for i, t in enumerate(lacking):
        demand = table_demands[t]
        more = min(demand.max_rows - rows[t], free // (len(lacking) - i) // demand.slot_bytes)
        rows[t] += more
        free -= more * demand.slot_bytes
    room = {
        t: math.inf
        if demand.limit_rows is None
        else (demand.limit_rows - rows[t]) * demand.slot_bytes
        for t, demand in enumerate(table_demands)
        if demand.is_open and len(demand.rows) > 1
    }
    for i, t in enumerate(sorted(room, key=lambda t: room[t])):
        slot = table_demands[t].slot_bytes
        more = int(min(room[t], free // (len(room) - i)) // slot)
        rows[t] += more
        free -= more * slot
    return rows


def _assign_rows(
    table_demands: Sequence[MemoryDemand], rows: Sequence[int], mapped: set[int]
) -> list[TableMemory]:
    return [
        TableMemory(
            demand.name,
            rows[t],
            0.0 if t in mapped else demand.reads_at(rows[t]),
            "mapped" if t in mapped else "dram",
        )
        for t, demand in enumerate(table_demands)
    ]


def _build_budget_error(
    table: MemoryDemand, budget: int, setting: str, at_once: int, needed: int | None = None
) -> BudgetExceeded:
    least = table.least_rows * table.slot_bytes
    others = f", and all tables together {needed:,}" if needed is not None else ""
    batches = "a batch" if at_once == 1 else f"the {at_once} batches that are read before an update"
    lower = "the batch size" if at_once == 1 else "the batch size or the staleness"
    return BudgetExceeded(
        f"{setting}: got {budget:,} bytes, but table {table.name!r} needs {table.least_rows:,} rows ({least:,} bytes) "
        f"for {batches}{others}. Raise it, or lower {lower}"
    )
