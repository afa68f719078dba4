"""Division of memory among tables: the rows of each table in each memory, within the budgets of every rank.

A cache of n rows of a table converges to the n most used rows. So the reads of a table fall with its rows, ever more
slowly along the lower convex hull of the curve. Each next byte goes to the table where it saves most reads: optimal for
convex curves, except for the last rounding. A table without a prediction has a flat curve: no byte saves reads, and
tables share memory evenly.

Pure functions. Rows are those of one rank; reads and births those of one batch of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import BudgetExceeded
from colonnade.plan.names import Tier
from colonnade.topology.sharding import Sharding, list_distinct_shards

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Memory demand of one table, or of one slice of it, on one rank."""

    name: str
    """Name of the table; slices of one table share it."""
    slot_bytes: int
    least_rows: int
    """Number of rows of the batches that must be in memory at once: one batch without staleness."""
    max_rows: int
    """Number of rows beyond which memory saves nothing, or that the table may not exceed."""
    rows: tuple[float, ...]
    """Numbers of rows in memory, the points of the read curve."""
    reads: tuple[float, ...]
    """Rows of a batch that are read from files with rows[i] rows in memory; linear between the points."""
    unique: float = 0.0
    """Number of distinct rows of a batch."""
    births: float = 0.0
    """Number of rows of a batch that were never used before."""
    is_open: bool = False
    """True for an open table."""
    window_rows: int = 0
    """Number of rows of all batches in flight; a window that does not fit becomes shorter."""
    limit_rows: int | None = None
    """Number of rows that the table may never exceed in memory; None: an open table may grow beyond `max_rows`."""
    min_share: int = 0
    """Number of rows that the table gets even where its even share of the memory is smaller."""

    def reads_at(self, rows: float) -> float:
        """Return the rows read from files per batch with `rows` rows in memory."""
        return float(np.interp(rows, self.rows, self.reads))

    @property
    def is_flat(self) -> bool:
        """True if memory saves no predicted reads: the table has bytes of its own, or there is no prediction."""
        return len(self.rows) == 1

    @property
    def max_bytes(self) -> int:
        """Bytes of memory of `max_rows`."""
        return self.max_rows * self.slot_bytes

    @property
    def main_rows(self) -> int:
        """Number of rows that the table can use in main memory."""
        return self.max_rows if self.limit_rows is None else min(self.max_rows, self.limit_rows)

    def limit_to(self, rows: int) -> MemoryDemand:
        """Return the demand of the table if it may have at most `rows` rows in memory."""
        return replace(
            self,
            max_rows=min(self.max_rows, rows),
            least_rows=min(self.least_rows, rows),
            limit_rows=rows,
        )


def demand_even_share(
    name: str,
    slot_bytes: int,
    max_rows: int,
    *,
    own_rows: int | None = None,
    is_open: bool = False,
    min_share: int = 1,
) -> MemoryDemand:
    """Return the demand of a table without a prediction. own_rows: rows of the bytes that are set for it alone."""
    fixed = 0 if own_rows is None else max(1, min(max_rows, own_rows))
    return MemoryDemand(
        name,
        slot_bytes,
        fixed,
        max_rows,
        rows=(0.0,),
        reads=(1.0,),
        is_open=is_open,
        limit_rows=fixed or None,
        min_share=min_share,
    )


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of memory for rows on each rank; None: no limit."""

    main: int | None
    mapped: int | None = 0
    """Bytes of byte-addressable memory, for whole tables."""
    setting: str = "plan.memory.dram"
    """Setting of the main memory, for error messages."""
    at_once: int = 1
    """Number of batches that must be in memory at once, for error messages."""


@dataclass(frozen=True, slots=True)
class TableMemory:
    """Memory assigned to one table: its rows, and the rows read from files per batch."""

    name: str
    rows: int
    reads: float
    tier: Tier = "dram"


def list_rank_demands(shardings: Sequence[Sharding], num_ranks: int) -> list[list[int]]:
    """List the demands with rows on a rank, by index, once for all ranks with the same ones. shardings: by demand."""
    rank_demands = [
        [t for t, shard in enumerate(shards) if shard.owner_index is not None]
        for shards in list_distinct_shards(shardings, num_ranks)
    ]
    return [indices for indices in rank_demands if indices]


def divide(
    demands: Sequence[MemoryDemand],
    budgets: Budgets,
    rank_demands: Sequence[Sequence[int]] | None = None,
) -> list[TableMemory]:
    """Divide the memory of each rank among its tables. Returns the memory of each table on its fullest rank.

    Batches in flight come first. Whole tables move to mapped memory, those with the most reads for their size first;
    mapped rows are never read from files. Where the batches that must be in memory at once do not fit, tables with the
    most bytes of these batches move before all others. A table has one tier on all ranks and for all slices: it is
    mapped if every rank with rows of it has the room.
    rank_demands: demands of each rank, by index (`list_rank_demands`); None: one rank has all. Raises BudgetExceeded
    with the table and the numbers if the batches do not fit even so.
    """
    if rank_demands is None:
        rank_demands = [range(len(demands))]
    unmapped = {
        demands[t].name
        for own in rank_demands
        for t in set(own) - _choose_mapped_tables(demands, own, budgets)
    }
    mapped = {t for t, demand in enumerate(demands) if demand.name not in unmapped}
    result: dict[str, TableMemory] = {}
    for own in rank_demands:
        for t, rows in _divide_main_memory(demands, own, mapped, budgets).items():
            name = demands[t].name
            if name not in result or rows < result[name].rows:
                reads = 0.0 if t in mapped else demands[t].reads_at(rows)
                tier: Tier = "mapped" if t in mapped else "dram"
                result[name] = TableMemory(name, rows, reads, tier)
    return [result[name] for name in dict.fromkeys(demand.name for demand in demands)]


def check_batches_fit(demands: Sequence[MemoryDemand], budgets: Budgets) -> None:
    """Raise BudgetExceeded if batches that must be in memory at once do not fit, whatever else memory is given to."""
    if budgets.main is not None:
        mapped = _map_tables_of_large_batches(demands, range(len(demands)), budgets)
        unmapped = {t: demand for t, demand in enumerate(demands) if t not in mapped}
        _share_window_rows(unmapped, budgets.main, budgets)


def _choose_mapped_tables(
    demands: Sequence[MemoryDemand], demand_indices: Sequence[int], budgets: Budgets
) -> set[int]:
    """Choose the demands of one rank to store in mapped memory."""
    if budgets.mapped == 0:
        return set()
    mapped = _map_tables_of_large_batches(demands, demand_indices, budgets)
    rows = _divide_main_memory(demands, demand_indices, mapped, budgets)
    while True:
        free = _count_free_mapped_bytes(demands, mapped, budgets)
        gains = {
            t: demands[t].reads_at(rows[t]) / demands[t].max_bytes
            for t in demand_indices
            if t not in mapped
            and not demands[t].is_open
            and rows[t] < demands[t].max_rows
            and demands[t].max_bytes <= free
        }
        best = max(gains, key=lambda t: gains[t], default=None)
        if best is None or gains[best] <= 0:
            return mapped
        mapped.add(best)
        # Without predictions, all tables that an even split leaves short move, as far as there is room.
        if not demands[best].is_flat:
            rows = _divide_main_memory(demands, demand_indices, mapped, budgets)


def _map_tables_of_large_batches(
    demands: Sequence[MemoryDemand], demand_indices: Sequence[int], budgets: Budgets
) -> set[int]:
    """Return the tables to map whole so that the batches of all others fit in main memory, largest batches first.

    Returns no table if the batches fit anyway, or if they do not fit even so.
    """
    if budgets.main is None:
        return set()
    least_bytes = {t: demands[t].least_rows * demands[t].slot_bytes for t in demand_indices}
    excess = sum(least_bytes.values()) - budgets.main
    mapped: set[int] = set()
    for t in sorted(demand_indices, key=lambda t: -least_bytes[t]):
        # Mapped memory stores whole tables only: none that may grow, or that has a budget of its own.
        if demands[t].is_open or demands[t].is_flat:
            continue
        if excess <= 0:
            break
        if demands[t].max_bytes <= _count_free_mapped_bytes(demands, mapped, budgets):
            mapped.add(t)
            excess -= least_bytes[t]
    return mapped if excess <= 0 else set()


def _count_free_mapped_bytes(
    demands: Sequence[MemoryDemand], mapped: Collection[int], budgets: Budgets
) -> float:
    if budgets.mapped is None:
        return math.inf
    return budgets.mapped - sum(demands[t].max_bytes for t in mapped)


def _divide_main_memory(
    demands: Sequence[MemoryDemand],
    demand_indices: Sequence[int],
    mapped_demands: Collection[int],
    budgets: Budgets,
) -> dict[int, int]:
    """Divide one rank's main memory among its demands that are not in mapped memory: windows first, then what saves
    most reads per byte. Returns rows by demand; all rows of mapped ones."""
    own_demands = {t: demands[t] for t in demand_indices if t not in mapped_demands}
    if budgets.main is None:
        rows = {t: demand.main_rows for t, demand in own_demands.items()}
    else:
        rows = _share_window_rows(own_demands, budgets.main, budgets)
        _add_rows_that_save_reads(own_demands, rows, budgets.main)
        _share_unused_memory(own_demands, rows, budgets.main)
    return rows | {t: demands[t].max_rows for t in demand_indices if t in mapped_demands}


def _share_window_rows(
    demands: Mapping[int, MemoryDemand], budget_bytes: int, budgets: Budgets
) -> dict[int, int]:
    """Return the rows that each table gets first: those of its window, or the same part of every table's window."""
    least = sum(demand.least_rows * demand.slot_bytes for demand in demands.values())
    if least > budget_bytes:
        largest = max(demands.values(), key=lambda demand: demand.least_rows * demand.slot_bytes)
        raise build_budget_error(largest, budget_bytes, budgets.setting, budgets.at_once, least)
    more = count_window_bytes(demands.values()) - least
    part = 1.0 if more <= budget_bytes - least else (budget_bytes - least) / more
    return {
        t: demand.least_rows + math.floor(part * (_window_rows(demand) - demand.least_rows))
        for t, demand in demands.items()
    }


def _add_rows_that_save_reads(
    demands: Mapping[int, MemoryDemand], rows_by_demand: dict[int, int], budget_bytes: int
) -> None:
    """Add to `rows_by_demand` those that save most reads per byte, as far as the budget goes."""
    pieces: list[tuple[float, int, int, float]] = []
    for t, demand in demands.items():
        if demand.is_flat or demand.max_rows <= rows_by_demand[t]:
            continue
        inner = [x for x in demand.rows if rows_by_demand[t] < x < demand.max_rows]
        points = [float(rows_by_demand[t]), *inner, float(demand.max_rows)]
        hull_rows, reads = lower_convex_hull(points, [demand.reads_at(x) for x in points])
        saved = -np.diff(reads)
        sizes = np.diff(hull_rows)
        # Earlier pieces of a table's hull save more per byte than later ones, so sorting keeps their order.
        pieces += [
            (-float(saved[i] / (sizes[i] * demand.slot_bytes)), t, i, float(sizes[i]))
            for i in range(len(sizes))
            if saved[i] > 0
        ]
    free = float(budget_bytes - _count_bytes(demands, rows_by_demand))
    exact_rows = {t: float(count) for t, count in rows_by_demand.items()}
    for _, t, _, size in sorted(pieces):
        more = min(size, free / demands[t].slot_bytes)
        exact_rows[t] += more
        free -= more * demands[t].slot_bytes
        if free <= 0:
            break
    for t, demand in demands.items():
        rows_by_demand[t] = min(demand.max_rows, math.floor(exact_rows[t] + 1e-6))


def _share_unused_memory(
    demands: Mapping[int, MemoryDemand], rows_by_demand: dict[int, int], budget_bytes: int
) -> None:
    """Add to `rows_by_demand` the memory that saves no predicted reads, in case these are wrong: complete small
    tables, then evenly.

    Open tables share the rest evenly, up to their limits: they may grow beyond `max_rows`, which is estimated.
    """
    lacking = {t: demand.main_rows - rows_by_demand[t] for t, demand in demands.items()}
    _share_evenly(demands, rows_by_demand, lacking, budget_bytes)
    growth = {
        t: math.inf if demand.limit_rows is None else demand.limit_rows - rows_by_demand[t]
        for t, demand in demands.items()
        if demand.is_open and not demand.is_flat
    }
    _share_evenly(demands, rows_by_demand, growth, budget_bytes)


def _share_evenly(
    demands: Mapping[int, MemoryDemand],
    rows_by_demand: dict[int, int],
    wanted_rows: Mapping[int, float],
    budget_bytes: int,
) -> None:
    """Add to `rows_by_demand` an even share of the unused bytes for each table that wants more rows.

    Smallest first: a table that wants less than its share leaves the rest to the others.
    """
    free = budget_bytes - _count_bytes(demands, rows_by_demand)
    wanting = [t for t, count in wanted_rows.items() if count > 0]
    wanting.sort(key=lambda t: wanted_rows[t] * demands[t].slot_bytes)
    for i, t in enumerate(wanting):
        slot_bytes = demands[t].slot_bytes
        share = free // (len(wanting) - i) // slot_bytes
        more = max(int(min(wanted_rows[t], share)), demands[t].min_share - rows_by_demand[t])
        rows_by_demand[t] += more
        free = max(0, free - more * slot_bytes)


def _window_rows(demand: MemoryDemand) -> int:
    return min(demand.max_rows, max(demand.least_rows, demand.window_rows))


def count_window_bytes(demands: Collection[MemoryDemand]) -> int:
    """Count the bytes of all batches in flight."""
    return sum(_window_rows(demand) * demand.slot_bytes for demand in demands)


def _count_bytes(demands: Mapping[int, MemoryDemand], rows: Mapping[int, int]) -> int:
    return sum(rows[t] * demand.slot_bytes for t, demand in demands.items())


def average_over_ranks(
    demands: Sequence[MemoryDemand],
    placed_memory: Sequence[TableMemory],
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
            for demand, part in zip(demands, parts, strict=True)
        ],
        [
            replace(memory, reads=part * memory.reads)
            for memory, part in zip(placed_memory, parts, strict=True)
        ],
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


def build_budget_error(
    table_demand: MemoryDemand,
    budget_bytes: int,
    setting_name: str,
    pinned_batches: int,
    needed_bytes: int | None = None,
) -> BudgetExceeded:
    """Build the error of a budget in which the batches that must be in memory do not fit. needed_bytes: by all
    tables."""
    least = table_demand.least_rows * table_demand.slot_bytes
    others = f", and all tables together {needed_bytes:,}" if needed_bytes is not None else ""
    batches = (
        "a batch"
        if pinned_batches == 1
        else f"the {pinned_batches} batches that are read before an update"
    )
    lower = "the batch size" if pinned_batches == 1 else "the batch size or the staleness"
    return BudgetExceeded(
        f"{setting_name}: got {budget_bytes:,} bytes, but table {table_demand.name!r} needs "
        f"{table_demand.least_rows:,} rows ({least:,} bytes) "
        f"for {batches}{others}. Raise it, or lower {lower}"
    )
