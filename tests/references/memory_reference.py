"""Division of memory by three algorithms, frozen: the twin that the division of `plan.cost.memory` is held against.

An even split of a plan's budgets, a division by predicted reads, and an even split of mapped memory among evicted rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from colonnade.config.plan import MemoryConfig
from colonnade.plan.cost.memory import MemoryDemand, TableMemory, lower_convex_hull
from colonnade.plan.hot import subtract_hot_row_bytes
from colonnade.plan.plan import Plan
from colonnade.sizes import StorageLocation
from colonnade.store.budget import row_bytes_below_dram, slot_bytes
from colonnade.store.table_shards import TableShard, shard_tables
from colonnade.table import Table
from colonnade.topology.sharding import Shard, Sharding, list_distinct_shards, max_rows_per_owner


class DoesNotFit(Exception):
    """Batches in flight do not fit in main memory."""


def split_memory_budget(
    tables: Sequence[Table],
    budget_bytes: int | None,
    shards: Sequence[Shard],
    *,
    fixed_bytes: Mapping[str, int] | None = None,
    open_rows: int = 2**27,
    row_bytes: Callable[[Table], int] = slot_bytes,
) -> list[int]:
    """Return the number of slots of each table on one rank.

    shards: by table, this rank's; a table without rows on this rank gets no slot. Without a budget: every row of a
    vocabulary table, room for `open_rows` of an open one (address space only). With one: tables share it evenly by
    bytes, and small tables leave their excess to the others. `fixed_bytes`, by name: tables with bytes of their own,
    subtracted from the budget before it is shared. `row_bytes`: bytes of a row.
    """
    fixed_bytes = fixed_bytes or {}
    local_tables = [t for t, shard in enumerate(shards) if shard.owner_index is not None]
    wanted = [0] * len(tables)
    num_slots = [0] * len(tables)
    for t in local_tables:
        rows = tables[t].rows
        wanted[t] = open_rows if rows is None else max(1, shards[t].max_rows(rows))
        fixed = fixed_bytes.get(tables[t].origin[0], 0) // row_bytes(tables[t])
        num_slots[t] = max(1, min(wanted[t], fixed))
    unmet = [t for t in local_tables if tables[t].origin[0] not in fixed_bytes]
    if budget_bytes is None:
        shared = set(unmet)
        return [wanted[t] if t in shared else rows for t, rows in enumerate(num_slots)]
    remaining = budget_bytes - sum(
        num_slots[t] * row_bytes(table)
        for t, table in enumerate(tables)
        if table.origin[0] in fixed_bytes
    )
    shares = _share_evenly(
        [wanted[t] for t in unmet],
        [row_bytes(tables[t]) for t in unmet],
        max(0, remaining),
        least=1,
    )
    for t, rows in zip(unmet, shares, strict=True):
        num_slots[t] = rows
    return num_slots


def _share_evenly(
    wanted: Sequence[int], row_bytes: Sequence[int], budget: int, *, least: int
) -> list[int]:
    """Share a budget evenly by bytes among tables that want so many rows; each gets `least` rows or more."""
    rows = [0] * len(wanted)
    # Smallest first: a table that needs less than an even share takes all it needs.
    unmet = sorted(range(len(wanted)), key=lambda t: wanted[t] * row_bytes[t])
    while unmet:
        t = unmet.pop(0)
        even = budget // (len(unmet) + 1)
        rows[t] = max(least, min(wanted[t], even // row_bytes[t]))
        budget = max(0, budget - rows[t] * row_bytes[t])
    return rows


def split_cache_budget(
    tables: Sequence[Table],
    budget_bytes: int,
    shards: Sequence[Shard],
    resident_rows: Sequence[int | None],
    *,
    open_rows: int = 2**27,
) -> list[int]:
    """Return the rows of each table in a cache of evicted rows, on one rank. Tables share it evenly by bytes.

    resident_rows: by table, rows in the memory above, which are not in the cache; None: nothing is evicted.
    """
    wanted = [0] * len(tables)
    for t, (table, shard) in enumerate(zip(tables, shards, strict=True)):
        resident = resident_rows[t]
        if shard.owner_index is not None and resident is not None:
            wanted[t] = (
                open_rows if table.rows is None else max(0, shard.max_rows(table.rows) - resident)
            )
    return _share_evenly(wanted, list(map(row_bytes_below_dram, tables)), budget_bytes, least=0)


def split_hbm_budget(tables: Sequence[Table], hbm_bytes: int, shards: Sequence[Shard]) -> list[int]:
    """Return the slots of each table in one rank's device memory: a record each; bookkeeping is in main memory."""
    return split_memory_budget(
        tables,
        hbm_bytes,
        shards,
        open_rows=2**31 - 1,
        row_bytes=lambda table: table.record_bytes,
    )


def choose_mapped_tables(
    tables: Sequence[Table],
    capacities: Sequence[int],
    mapped_bytes: int | None,
    shards: Sequence[Shard],
) -> list[int]:
    """Choose the tables of one rank that are stored whole in byte-addressable memory.

    They are the tables that `capacities` does not cover, smallest first, while they fit in `mapped_bytes` (None: no
    limit). Open tables have no known size and are not chosen.
    """
    chosen: list[int] = []
    remaining = mapped_bytes
    num_rows = {
        t: shards[t].max_rows(table.rows or 0)
        for t, table in enumerate(tables)
        if shards[t].owner_index is not None
    }
    for t in sorted(num_rows, key=lambda t: num_rows[t] * slot_bytes(tables[t])):
        size = num_rows[t] * slot_bytes(tables[t])
        if (
            tables[t].rows is None
            or capacities[t] >= num_rows[t]
            or (remaining is not None and size > remaining)
        ):
            continue
        chosen.append(t)
        remaining = None if remaining is None else remaining - size
    return sorted(chosen)


def divide_evenly(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    num_ranks: int,
    memory: MemoryConfig,
) -> list[tuple[int, int, str, bool]]:
    """Return the rows in memory, rows on the device, tier and whether all fit, by table."""
    all_shards = shard_tables(tables, shardings)
    mapped = memory.mapped_location
    table_bytes = memory.tables
    dram_bytes = subtract_hot_row_bytes(all_shards, memory.dram, "plan.memory.dram", slot_bytes)
    hbm_bytes = subtract_hot_row_bytes(
        all_shards, memory.hbm, "plan.memory.hbm", lambda table: table.record_bytes
    )
    table_shards = [shard for shard in all_shards if not shard.is_hot]
    slices = [shard.table for shard in table_shards]
    by_rank = list_distinct_shards([shard.sharding for shard in table_shards], num_ranks)
    on_device = [0] * len(slices)
    if hbm_bytes is not None:
        on_device = _min_rows_over_ranks(
            by_rank, [split_hbm_budget(slices, hbm_bytes, shards) for shards in by_rank]
        )
    divide = partial(split_memory_budget, budget_bytes=dram_bytes, fixed_bytes=table_bytes)
    capacities = [divide(slices, shards=shards) for shards in by_rank]
    mapped_slices: set[int] = set()
    if mapped is not None:
        mapped_slices = _choose_mapped_slices(table_shards, by_rank, capacities, mapped)
        capacities = [_split_unmapped(slices, shards, mapped_slices, divide) for shards in by_rank]
    in_memory = _min_over_slices(table_shards, _min_rows_over_ranks(by_rank, capacities))
    on_device = _min_over_slices(table_shards, on_device)
    mapped_tables = {table_shards[s].number for s in mapped_slices}
    return [
        (
            rows,
            on_device[t],
            "mapped" if t in mapped_tables else "dram",
            (
                table.rows is not None
                and rows >= max_rows_per_owner(table.rows, shardings[t].num_owners)
            )
            or not (memory.dram is not None or table.name in table_bytes),
        )
        for t, (table, rows) in enumerate(zip(tables, in_memory, strict=True))
    ]


def _choose_mapped_slices(
    table_shards: Sequence[TableShard],
    by_rank: Sequence[Sequence[Shard]],
    capacities: Sequence[Sequence[int]],
    mapped: StorageLocation,
) -> set[int]:
    """Choose the slices to store in mapped memory: those of tables that fit there on each of their ranks.

    capacities: rows in main memory by rank and slice, if nothing were mapped.
    """
    slices = [shard.table for shard in table_shards]
    without_room: set[int] = set()
    for rank_capacities, shards in zip(capacities, by_rank, strict=True):
        fitting = set(choose_mapped_tables(slices, rank_capacities, mapped.bytes, shards))
        absent = {s for s, shard in enumerate(shards) if shard.owner_index is None}
        without_room |= set(range(len(slices))) - fitting - absent
    # All slices of a table are in the same memory.
    unmapped = {table_shards[s].number for s in without_room}
    return {s for s, shard in enumerate(table_shards) if shard.number not in unmapped}


def _split_unmapped(
    slices: Sequence[Table],
    shards: Sequence[Shard],
    mapped_slices: Collection[int],
    divide: Callable[..., list[int]],
) -> list[int]:
    """Divide one rank's memory among the slices that are not mapped. Returns rows by slice; all rows of mapped ones."""
    others = [s for s in range(len(slices)) if s not in mapped_slices]
    rows = divide([slices[s] for s in others], shards=[shards[s] for s in others])
    rows_of = dict(zip(others, rows, strict=True))
    return [rows_of.get(s, shards[s].max_rows(table.rows or 0)) for s, table in enumerate(slices)]


def divide_mapped_cache(plan: Plan, tables: Sequence[Table]) -> list[int]:
    """Return the rows of each table in the cache of evicted rows."""
    mapped = plan.mapped
    if mapped is None or mapped.bytes is None or not plan.needs_backing:
        return [0] * len(tables)
    table_shards = [shard for shard in shard_tables(tables, plan.shardings) if not shard.is_hot]
    slices = [shard.table for shard in table_shards]
    planned = [plan.tables[shard.number] for shard in table_shards]
    resident = [None if table.fits else table.capacity_rows for table in planned]
    by_rank = list_distinct_shards([shard.sharding for shard in table_shards], plan.num_ranks)
    rows = []
    for shards in by_rank:
        whole_bytes = sum(
            shard.max_rows(table.rows or 0) * slot_bytes(table)
            for table, shard, table_plan in zip(slices, shards, planned, strict=True)
            if table_plan.tier == "mapped"
        )
        cache_bytes = max(0, mapped.bytes - whole_bytes)
        rows.append(split_cache_budget(slices, cache_bytes, shards, resident))
    cached = _min_over_slices(table_shards, _min_rows_over_ranks(by_rank, rows))
    return cached


def _min_rows_over_ranks(
    by_rank: Sequence[Sequence[Shard]], rows: Sequence[Sequence[int]]
) -> list[int]:
    """Return for each slice the smallest number of rows that fit on a rank with rows of it.

    by_rank, rows: by rank, then by slice."""
    return [
        min(
            rank_rows[t]
            for rank_rows, shards in zip(rows, by_rank, strict=True)
            if shards[t].owner_index is not None
        )
        for t in range(len(rows[0]))
    ]


def _min_over_slices(table_shards: Sequence[TableShard], rows: Sequence[int]) -> list[int]:
    """Return for each table the smallest number of rows of its slices. rows: by slice."""
    table_rows: dict[int, int] = {}
    for shard, count in zip(table_shards, rows, strict=True):
        table_rows[shard.number] = min(count, table_rows.get(shard.number, count))
    return list(table_rows.values())


def divide_memory_on_ranks(
    table_demands: Sequence[MemoryDemand],
    shardings: Sequence[Sharding],
    num_ranks: int,
    dram_bytes: int | None,
    mapped_bytes: int | None = 0,
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
        _divide_rank_memory(table_demands, tables, dram_bytes, mapped_bytes)
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
                table_demands, [t for t in tables if t not in mapped], dram_bytes, 0
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
) -> dict[int, TableMemory]:
    """Divide the memory of a rank with rows of these tables. Returns the memory by table."""
    placed = divide_memory([table_demands[t] for t in tables], dram_bytes, mapped_bytes)
    return dict(zip(tables, placed, strict=True))


def divide_memory(
    table_demands: Sequence[MemoryDemand],
    dram_bytes: int | None,
    mapped_bytes: int | None = 0,
) -> list[TableMemory]:
    """Divide a rank's memory among its tables; budgets of None have no limit.

    Batches in flight come first. Whole tables move to `mapped_bytes` of byte-addressable memory, those with the most
    reads for their size first; mapped rows are never read from files.
    """
    if dram_bytes is None:
        return [TableMemory(demand.name, demand.max_rows, 0.0) for demand in table_demands]
    mapped = _map_tables_of_large_batches(table_demands, dram_bytes, mapped_bytes)
    rows = _divide_memory_of_unmapped(table_demands, mapped, dram_bytes)
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
        rows = _divide_memory_of_unmapped(table_demands, mapped, dram_bytes)


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
) -> list[int]:
    """Divide main memory among the tables that are not mapped. Returns rows by table; all rows of mapped ones."""
    others = [demand for t, demand in enumerate(table_demands) if t not in mapped]
    shares = iter(_divide_memory_budget(others, dram_bytes))
    return [
        demand.max_rows if t in mapped else next(shares) for t, demand in enumerate(table_demands)
    ]


def _window_rows(demand: MemoryDemand) -> int:
    return min(demand.max_rows, max(demand.least_rows, demand.window_rows))


def _total_bytes(table_demands: Sequence[MemoryDemand], rows: Sequence[int]) -> int:
    return sum(n * demand.slot_bytes for n, demand in zip(rows, table_demands, strict=True))


def _share_window_rows(table_demands: Sequence[MemoryDemand], budget: int) -> list[int]:
    """Return the rows that each table gets first: those of its window, or the same part of every table's window."""
    least = _total_bytes(table_demands, [demand.least_rows for demand in table_demands])
    if least > budget:
        raise DoesNotFit
    more = _total_bytes(table_demands, [_window_rows(demand) for demand in table_demands]) - least
    part = 1.0 if more <= budget - least else (budget - least) / more
    return [
        demand.least_rows + math.floor(part * (_window_rows(demand) - demand.least_rows))
        for demand in table_demands
    ]


def _divide_memory_budget(table_demands: Sequence[MemoryDemand], budget: int) -> list[int]:
    """Return the rows of each table in memory: its window first, then the rows that save most reads per byte."""
    first = _share_window_rows(table_demands, budget)
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
