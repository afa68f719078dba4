"""Plans built from a complete configuration, their memory divided, and their description in a table.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.errors import ConfigError
from colonnade.plan.caching import build_table_caches, check_cache_settings
from colonnade.plan.constraints import resolve_fixed_tables
from colonnade.plan.cost.memory import (
    Budgets,
    MemoryDemand,
    TableMemory,
    demand_even_share,
    divide,
    list_rank_demands,
)
from colonnade.plan.hot import add_hot_rows_to_shardings, subtract_hot_row_bytes
from colonnade.plan.plan import Codecs, Plan, TablePlan
from colonnade.sizes import format_bytes
from colonnade.store.budget import row_bytes_below_dram, slot_bytes
from colonnade.store.table_shards import TableShard, shard_tables
from colonnade.table import Table, check_column_slices
from colonnade.topology.sharding import Sharding, max_rows_per_owner
from colonnade.topology.towers import list_tower_ranks
from colonnade.topology.world import World

DEFAULTS = PlanConfig()
AUTO_LOOKAHEAD_ON_FILES = 8
"""Number of batches that lookahead "auto" prefetches if several ranks have rows in files and no speed is known."""
OPEN_ROWS = 2**27
"""Rows of an open table that main or mapped memory has addresses for, at most."""
OPEN_DEVICE_ROWS = 2**31 - 1
"""Rows of an open table that device memory has addresses for, at most."""


def check_memory_budget(
    tables: Sequence[Table],
    rank_tables: Sequence[Table],
    dram_bytes: int | None,
    own_table_bytes: Mapping[str, int],
) -> None:
    """Check that memory budgets have room for one row of each table of a rank.

    rank_tables: tables, or slices, with rows on the rank. own_table_bytes: budgets of single tables by name. Raises
    ConfigError, also for names of unknown tables."""
    by_name = {table.name: table for table in tables}
    for name, size in own_table_bytes.items():
        if name not in by_name:
            raise ConfigError(
                f"plan.memory.tables: got {name!r}, wanted a table of this model: {', '.join(by_name)}"
            )
        if size < slot_bytes(by_name[name]):
            raise ConfigError(
                f"plan.memory.tables.{name}: got {size:,} bytes, wanted at least {slot_bytes(by_name[name])} for one "
                "row, and enough for the rows of a window of batches"
            )
    if dram_bytes is None:
        return
    others = sum(
        slot_bytes(table) for table in rank_tables if table.origin[0] not in own_table_bytes
    )
    singles = sum(own_table_bytes.get(table.origin[0], 0) for table in rank_tables)
    least = singles + others
    if dram_bytes < least:
        own_budgets = f" and the {singles:,} bytes of single tables" if singles else ""
        raise ConfigError(
            f"plan.memory.dram: got {dram_bytes:,} bytes, wanted at least {least:,}: one row of each of "
            f"{len(rank_tables)} tables{own_budgets}; and enough for the rows of a window of batches"
        )


def build_plan(
    tables: Sequence[Table], world: World | int = 1, config: PlanConfig = DEFAULTS
) -> Plan:
    """Build the plan that a complete configuration describes, without choices of its own: memory is divided evenly.
    Pure function.

    world: the world, or the number of ranks on one host. Every table needs a sharding and an exchange. `fit` and
    `colonnade plan` choose settings that a configuration leaves open ("auto", the rank of a `table_wise` table, numbers
    of replicated rows) from a sample of the data; `in_towers` shards tables inside towers. One rank has no caches,
    towers or replicated rows. Raises ConfigError for a configuration that cannot work.
    """
    if isinstance(world, int):
        world = World(ranks_per_host=world, servers_per_host=config.num_servers)
    shardings, exchanges = _read_shardings(config, tables, world)
    if isinstance(config.towers, str) and world.num_ranks > 1:
        raise ConfigError(
            f"plan.towers: got {config.towers!r}, wanted a number of towers, with shardings inside them (`in_towers`)"
        )
    if isinstance(config.towers, int) and world.num_ranks > 1:
        list_tower_ranks(world, config.towers)  # Raises for towers of different sizes.
    caches = build_table_caches(config.cache, tables)
    for table, sharding in zip(tables, shardings, strict=True):
        # Every rank has replicated rows, and one rank has all rows. The settings were checked all the same.
        if sharding.is_replicated or world.num_ranks == 1:
            caches.pop(table.name, None)
    check_cache_settings(config, caches, tables, exchanges)
    memory = _divide_evenly(tables, shardings, world.num_ranks, config.memory)
    device_rows = _divide_device_evenly(tables, shardings, world.num_ranks, config.memory)
    planned = []
    for t, (table, sharding, exchange) in enumerate(zip(tables, shardings, exchanges, strict=True)):
        own = config.tables.get(table.name)
        cache = caches.get(table.name)
        is_limited = config.memory.dram is not None or table.name in config.memory.tables
        planned.append(
            TablePlan(
                name=table.name,
                sharding=sharding,
                exchange=exchange if cache is None else "cached",
                cache=cache,
                capacity_rows=memory[t].rows,
                fits=not is_limited or _has_all_rows(table, sharding, memory[t].rows),
                tier=memory[t].tier,
                hbm_rows=device_rows[t],
                staleness_steps=None if own is None else own.staleness_steps,
                has_own_budget=table.name in config.memory.tables,
            )
        )
    return _assemble_plan(config, tables, world, planned)


def _read_shardings(
    config: PlanConfig, tables: Sequence[Table], world: World
) -> tuple[list[Sharding], list[str]]:
    """Return shardings with their hot rows, and exchanges, by table. Raises ConfigError if one is open."""
    resolved = resolve_fixed_tables(config, tables, world)
    for name, pair in resolved.items():
        if pair is None:
            raise ConfigError(
                f"table {name!r}: got a sharding or an exchange that only a sample can decide (auto, or ranks left "
                f"open), wanted both fixed: set plan.tables.{name}.sharding (in Python, to a Sharding) and exchange"
            )
    ids = {}
    for name, own in config.tables.items():
        if not isinstance(own.replicated_rows, int):
            ids[name] = own.replicated_rows
        elif own.replicated_rows and world.num_ranks > 1:
            raise ConfigError(
                f"plan.tables.{name}.replicated_rows: got {own.replicated_rows}, the number of rows, wanted their ids; "
                "`fit` finds them in a sample"
            )
    pairs = [pair for pair in resolved.values() if pair is not None]
    shardings = [sharding for sharding, _ in pairs]
    shardings = add_hot_rows_to_shardings(tables, shardings, ids, world.num_ranks, world.servers)
    return shardings, [exchange for _, exchange in pairs]


def _assemble_plan(
    config: PlanConfig, tables: Sequence[Table], world: World, table_plans: Sequence[TablePlan]
) -> Plan:
    memory = config.memory
    codec = config.codec
    plan = Plan(
        num_ranks=world.num_ranks,
        dram_bytes=memory.dram,
        lookahead=config.lookahead,
        staleness_steps=config.staleness_steps,
        tables=tuple(table_plans),
        mapped=memory.mapped_location,
        ssd=memory.ssd_locations,
        write_budget=config.write_budget,
        hbm_bytes=memory.hbm,
        codecs=Codecs(codec.values, codec.gradients, codec.choose_dense_codec()),
        servers=world.servers,
        towers=config.towers if isinstance(config.towers, int) and world.num_ranks > 1 else None,
        cache_tier="dram" if config.cache is None else config.cache.tier,
    )
    if plan.lookahead == "auto" and (world.num_ranks > 1 or not plan.needs_backing):
        # Ranks must agree on a depth. Without rows in files there is nothing to wait for.
        plan = replace(plan, lookahead=AUTO_LOOKAHEAD_ON_FILES if plan.needs_backing else 2)
    return add_mapped_rows(plan, tables)


def _has_all_rows(table: Table, sharding: Sharding, rows: int) -> bool:
    """Return whether so many rows in memory are all rows of an owner."""
    return table.rows is not None and rows >= max_rows_per_owner(table.rows, sharding.num_owners)


def _list_cold_shards(
    tables: Sequence[Table], shardings: Sequence[Sharding], num_ranks: int
) -> tuple[list[TableShard], list[list[int]]]:
    """List the shards that memory is divided among, slices from the left, and the shards of each rank by index."""
    shards = [shard for shard in shard_tables(tables, shardings) if not shard.is_hot]
    return shards, list_rank_demands([shard.sharding for shard in shards], num_ranks)


def _demand_even_shares(
    shards: Sequence[TableShard],
    count_row_bytes: Callable[[Table], int],
    open_table_rows: int,
    own_table_bytes: Mapping[str, int],
) -> list[MemoryDemand]:
    """Return the demand of each shard. own_table_bytes: of single tables, by name."""
    demands = []
    for shard in shards:
        table = shard.table
        name = table.origin[0]
        rows = open_table_rows
        if table.rows is not None:
            rows = max_rows_per_owner(table.rows, shard.sharding.num_owners)
        size = count_row_bytes(table)
        own_rows = own_table_bytes[name] // size if name in own_table_bytes else None
        demands.append(
            demand_even_share(name, size, rows, own_rows=own_rows, is_open=table.rows is None)
        )
    return demands


def _divide_evenly(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    num_ranks: int,
    memory: MemoryConfig,
) -> list[TableMemory]:
    """Divide the memory of each rank evenly among its tables. Returns by table the memory of the fullest rank.

    Raises ConfigError for budgets without room for one row of each table.
    """
    mapped = memory.mapped_location
    if mapped is not None and memory.dram is None and not memory.tables:
        raise ConfigError(
            f"plan.memory.mapped: got {mapped.path} without plan.memory.dram, so every row is in main memory; set dram "
            "to what main memory may take, or leave mapped out"
        )
    main_bytes = subtract_hot_row_bytes(
        shard_tables(tables, shardings), memory.dram, "plan.memory.dram", slot_bytes
    )
    shards, rank_shards = _list_cold_shards(tables, shardings, num_ranks)
    for t, table in enumerate(tables):
        check_column_slices(table, [shard.table for shard in shards if shard.number == t])
    for own in rank_shards:
        check_memory_budget(tables, [shards[s].table for s in own], main_bytes, memory.tables)
    demands = _demand_even_shares(shards, slot_bytes, OPEN_ROWS, memory.tables)
    budgets = Budgets(main_bytes, 0 if mapped is None else mapped.bytes)
    return divide(demands, budgets, rank_shards)


def _divide_device_evenly(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    num_ranks: int,
    memory: MemoryConfig,
) -> list[int]:
    """Divide the device memory of each rank evenly. Returns rows by table: a record each, bookkeeping is in main
    memory; 0 without such memory. Raises as `_divide_evenly`."""
    hbm_bytes = subtract_hot_row_bytes(
        shard_tables(tables, shardings), memory.hbm, "plan.memory.hbm", get_record_bytes
    )
    if hbm_bytes is None:
        return [0] * len(tables)
    shards, rank_shards = _list_cold_shards(tables, shardings, num_ranks)
    demands = _demand_even_shares(shards, get_record_bytes, OPEN_DEVICE_ROWS, {})
    for own in rank_shards:
        least = sum(demands[s].slot_bytes for s in own)
        if hbm_bytes < least:
            raise ConfigError(
                f"plan.memory.hbm: got {hbm_bytes:,} bytes, wanted at least {least:,}: one row of each of "
                f"{len(own)} tables; and enough for the rows of a window of batches"
            )
    return [table.rows for table in divide(demands, Budgets(hbm_bytes), rank_shards)]


def get_record_bytes(table: Table) -> int:
    """Return the bytes of a row in device memory."""
    return table.record_bytes


def apply_placement(
    plan: Plan,
    tables: Sequence[Table],
    placed_memory: Sequence[TableMemory],
    *,
    lookahead: int | Literal["auto"],
) -> Plan:
    """Return `plan` with the memory that the profiled placement chose, by table."""
    is_limited = plan.dram_bytes is not None
    planned = []
    for table, before, memory in zip(tables, plan.tables, placed_memory, strict=True):
        count = memory.rows
        owned = (
            None
            if table.rows is None
            else max_rows_per_owner(table.rows, before.sharding.num_owners)
        )
        if before.sharding.slices > 1:  # The memory of `count` whole rows has room for more slices.
            count *= before.sharding.slices
            count = count if owned is None else min(count, owned)
        is_whole = owned is not None and count >= owned
        fits = is_whole or (before.fits and not is_limited)
        planned.append(
            replace(
                before,
                capacity_rows=before.capacity_rows if fits and not is_whole else count,
                fits=fits,
                tier=memory.tier,
            )
        )
    plan = replace(plan, tables=tuple(planned), lookahead=lookahead, placement="profiled")
    return add_mapped_rows(plan, tables)


def add_mapped_rows(plan: Plan, tables: Sequence[Table]) -> Plan:
    """Divide the mapped memory that whole tables leave among evicted rows of the others.

    Mapped memory without a size is for whole tables only. Raises ConfigError if it has no room for any row.
    """
    mapped = plan.mapped
    if mapped is None or mapped.bytes is None or not plan.needs_backing:
        return replace(plan, tables=tuple(replace(table, mapped_rows=0) for table in plan.tables))
    shards, rank_shards = _list_cold_shards(tables, plan.shardings, plan.num_ranks)
    whole = _demand_even_shares(shards, slot_bytes, OPEN_ROWS, {})
    planned = [plan.tables[shard.number] for shard in shards]
    evicted = [
        demand_even_share(
            demand.name,
            row_bytes_below_dram(shard.table),
            0
            if table.fits
            else demand.max_rows
            if demand.is_open
            else max(0, demand.max_rows - table.capacity_rows),
            min_share=0,
        )
        for shard, demand, table in zip(shards, whole, planned, strict=True)
    ]
    rows: dict[str, int] = {}
    for own in rank_shards:
        whole_bytes = sum(whole[s].max_bytes for s in own if planned[s].tier == "mapped")
        free = Budgets(max(0, mapped.bytes - whole_bytes))
        for memory in divide([evicted[s] for s in own], free):
            rows[memory.name] = min(memory.rows, rows.get(memory.name, memory.rows))
    if not any(rows.values()) and all(table.tier == "dram" for table in plan.tables):
        evicting = [
            shard.table for shard, table in zip(shards, planned, strict=True) if not table.fits
        ]
        raise ConfigError(
            f"plan.memory.mapped: got {mapped.bytes:,} bytes, wanted at least "
            f"{sum(map(row_bytes_below_dram, evicting)):,}: one row of each of {len(evicting)} tables that do not fit "
            "in dram; raise it, or leave mapped out"
        )
    return replace(
        plan,
        tables=tuple(replace(table, mapped_rows=rows[table.name]) for table in plan.tables),
    )


def resident_row_bytes(table: Table, sharding: Sharding) -> int:
    """Return the bytes of memory that one row, or its widest slice, takes on an owner rank."""
    return max(slot_bytes(shard.table) for shard in shard_tables([table], [sharding]))


def memory_bytes(table: Table, planned: TablePlan) -> int:
    """Return the bytes planned for a table on each of its ranks, with copies of its hot rows."""
    hot = planned.sharding.hot
    copies = 0 if hot is None else len(hot.ids) * slot_bytes(table)
    return planned.capacity_rows * resident_row_bytes(table, planned.sharding) + copies


def mapped_cache_bytes(table: Table, planned: TablePlan) -> int:
    """Return the bytes planned for a table's evicted rows in byte-addressable memory, on each of its ranks."""
    slices = shard_tables([table], [planned.sharding])
    return planned.mapped_rows * max(row_bytes_below_dram(shard.table) for shard in slices)


def find_row_files(plan: Plan, table: TablePlan) -> str:
    """Return where a table's rows that do not fit in memory are: "run folder", "ssd", or "-" if there are none."""
    if table.fits:
        return "-"
    return "ssd" if plan.ssd else "run folder"


def describe_planned_tables(plan: Plan, tables: Sequence[Table]) -> list[dict[str, str]]:
    """Describe a plan as one printable line per table, by column title."""
    lines = []
    has_mapped_rows = any(planned.mapped_rows for planned in plan.tables)
    for table, planned, late in zip(tables, plan.tables, plan.staleness_by_table, strict=True):
        owners = planned.sharding.num_owners
        owned = "any" if table.rows is None else f"{max_rows_per_owner(table.rows, owners):,}"
        memory = memory_bytes(table, planned)
        unbounded = table.rows is None and planned.fits
        exchange = {"sharding": str(planned.sharding), "exchange": planned.exchange}
        if plan.num_ranks == 1:
            exchange = {}
        hbm = {}
        if plan.hbm_bytes is not None:
            hbm = {"rows in hbm": f"{planned.hbm_rows:,}"}
        lines.append(
            {
                "table": table.name,
                "dim": " + ".join(str(part.dim) for part in table.parts),
                "rows per rank": owned,
                **hbm,
                "rows in memory": "as trained" if unbounded else f"{planned.capacity_rows:,}",
                "memory": "as trained" if unbounded else format_bytes(memory),
                "tier": planned.tier,
                **({"rows in mapped": f"{planned.mapped_rows:,}"} if has_mapped_rows else {}),
                "rest": find_row_files(plan, planned),
                **({} if len(set(plan.staleness_by_table)) == 1 else {"staleness": f"{late}"}),
                **exchange,
                "optimizer": ", ".join(dict.fromkeys(part.optimizer.name for part in table.parts)),
            }
        )
    return lines
