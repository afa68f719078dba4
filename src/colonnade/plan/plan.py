"""Plan of one run: a frozen value with each table's storage, sharding, exchange and staleness.

Building, printing and comparing a plan touches no device and no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from colonnade.config.plan import CacheTier, MemoryConfig, PlanConfig
from colonnade.errors import ColonnadeError, ConfigError, CorruptionError
from colonnade.exchange.cached import TableCache
from colonnade.formats import make_format_stamp, parse_stamped_json
from colonnade.hops.kinds import EXCHANGES
from colonnade.plan.caching import build_table_caches, check_cache_settings
from colonnade.plan.comparison import PlanComparison, describe_exchanges
from colonnade.plan.constraints import resolve_fixed_tables
from colonnade.plan.cost.memory import Tier
from colonnade.plan.hot import add_hot_rows_to_shardings, subtract_hot_row_bytes
from colonnade.sizes import StorageLocation, format_bytes
from colonnade.staleness import RowClock
from colonnade.store.budget import (
    cached_row_bytes,
    choose_mapped_tables,
    min_budget_bytes,
    slot_bytes,
    split_cache_budget,
    split_hbm_budget,
    split_memory_budget,
)
from colonnade.store.table_shards import TableShard, shard_tables
from colonnade.table import Table, check_column_slices
from colonnade.topology.sharding import (
    HotRows,
    Shard,
    Sharding,
    list_distinct_shards,
    max_rows_per_owner,
)
from colonnade.topology.towers import list_tower_ranks
from colonnade.topology.world import World
from colonnade.wire.codec import EXACT, Codecs


def check_memory_budget(
    tables: Sequence[Table],
    rank_tables: Sequence[Table],
    dram_bytes: int | None,
    table_bytes: Mapping[str, int],
) -> None:
    """Check that memory budgets have room for one row of each table of a rank.

    rank_tables: tables, or slices, with rows on the rank. table_bytes: budgets of single tables by name. Raises
    ConfigError, also for names of unknown tables."""
    by_name = {table.name: table for table in tables}
    for name, size in table_bytes.items():
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
    others = min_budget_bytes(
        [table for table in rank_tables if table.origin[0] not in table_bytes]
    )
    singles = sum(table_bytes.get(table.origin[0], 0) for table in rank_tables)
    least = singles + others
    if dram_bytes < least:
        own_budgets = f" and the {singles:,} bytes of single tables" if singles else ""
        raise ConfigError(
            f"plan.memory.dram: got {dram_bytes:,} bytes, wanted at least {least:,}: one row of each of "
            f"{len(rank_tables)} tables{own_budgets}; and enough for the rows of a window of batches"
        )


DEFAULTS = PlanConfig()
AUTO_LOOKAHEAD_ON_FILES = 8
"""Number of batches that lookahead "auto" prefetches if several ranks have rows in files and no speed is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """Plan of one table: sharding, memory, exchange and staleness."""

    name: str
    sharding: Sharding
    """Owner ranks of the table's rows."""
    capacity_rows: int
    """Number of rows of the table that fit in memory on each of its ranks; the fullest rank decides."""
    fits: bool
    """True if every row of each owner fits in memory, so that no row is ever evicted."""
    tier: Tier = "dram"
    """Memory of the resident rows."""
    rest: str = "-"
    """Storage of the other rows: "run folder", "ssd", or "-" if there are none."""
    hbm_rows: int = 0
    """Number of rows that fit in device memory, as copies above main memory; 0: no such tier."""
    mapped_rows: int = 0
    """Number of rows evicted from memory that fit in byte-addressable memory, above the files; 0: no such tier."""
    exchange: str = "rows"
    """Exchange between ranks: a key of `hops.kinds.EXCHANGES`."""
    staleness_steps: int | None = None
    """Number of steps that reads are late; None: that of the plan."""
    cache: TableCache | None = None
    """Row cache on each rank, under exchange "cached"."""
    has_own_budget: bool = False
    """True if its memory is a setting of its own, which no placement changes."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ConfigError(
                f"table {self.name!r}: got exchange {self.exchange!r}, wanted one of {', '.join(EXCHANGES)}"
            )
        late = self.staleness_steps
        if late is not None and (not isinstance(late, int) or isinstance(late, bool) or late < 0):
            raise ConfigError(
                f"table {self.name!r}: got staleness_steps={late!r}, wanted a number of steps, 0 or more, or None"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Storage, sharding, exchange and staleness of every table for one run: one choice per axis.

    `build_plan` builds a plan. Plans can be printed, compared and converted to and from JSON.
    """

    num_ranks: int
    dram_bytes: int | None
    """Memory for rows on each rank; None: no limit."""
    lookahead: int | Literal["auto"]
    """Number of batches to prefetch ahead of training; "auto": adjusted while training."""
    staleness_steps: int
    """Number of steps that reads are late, for tables without a number of their own."""
    tables: tuple[TablePlan, ...]
    mapped: StorageLocation | None = None
    """Directory on byte-addressable memory for tables of tier "mapped", and for evicted rows of the others."""
    ssd: tuple[StorageLocation, ...] = ()
    """Directories over which files of rows are striped; empty: the run folder."""
    write_budget: int | None = None
    """Largest rate of writes on each rank, in bytes per second; None: no limit."""
    hbm_bytes: int | None = None
    """Device memory for rows on each rank; None: rows are in main memory only."""
    codecs: Codecs = EXACT
    """Encoding of rows and gradients in messages."""
    servers: tuple[int, ...] = ()
    """Ranks that only store rows; empty: the ranks that train store the rows."""
    towers: int | None = None
    """Number of towers, groups of neighbouring ranks, for exchange by towers; None: one for each host."""
    cache_tier: CacheTier = "dram"
    """Memory of row caches: main memory, or that of each rank's device."""
    placement: str = "even"
    """Division of memory among tables: "even", or "profiled" by the reads that a sample predicts."""
    prediction: Mapping[str, Any] | None = None
    """`plan.cost.prediction.Prediction` as plain values, if the plan was made from a profile."""
    comparison: PlanComparison | None = None
    """Plans that the run chose from, if its settings left shardings or exchanges open."""

    def check_world(self, num_ranks: int, servers: Sequence[int]) -> None:
        """Raise ConfigError if the plan is for another world."""
        if self.num_ranks != num_ranks:
            raise ConfigError(
                f"the plan is for {self.num_ranks} ranks, this world has {num_ranks}; build the plan for this world"
            )
        if self.servers != tuple(servers):
            raise ConfigError(
                f"the plan has servers {list(self.servers)}, this world has {list(servers)}; build the plan for "
                "this world"
            )

    def check_tables(self, names: Sequence[str]) -> None:
        """Raise ConfigError if the plan is for other tables, or for the same tables in another order."""
        if (planned := [table.name for table in self.tables]) != list(names):
            raise ConfigError(
                f"the plan is for tables {', '.join(planned)}, this collection has {', '.join(names)}; build the plan "
                "from the collection's tables"
            )

    @property
    def needs_backing(self) -> bool:
        """True if some rows do not fit in memory and are stored in files."""
        return not all(table.fits for table in self.tables)

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """Sharding of each table."""
        return tuple(table.sharding for table in self.tables)

    @property
    def staleness_by_table(self) -> tuple[int, ...]:
        """Number of steps that reads of each table are late."""
        return tuple(
            self.staleness_steps if table.staleness_steps is None else table.staleness_steps
            for table in self.tables
        )

    @property
    def max_staleness_steps(self) -> int:
        """Largest number of steps that reads of any table are late."""
        return max(self.staleness_by_table)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Distinct exchanges of the tables, sorted."""
        return tuple(sorted({table.exchange for table in self.tables}))

    def describe_exchanges(self) -> str:
        """Describe exchanges and shardings of the tables in words."""
        return describe_exchanges((table.exchange, table.sharding.kind) for table in self.tables)

    def to_json(self) -> str:
        """Return the text of `plan.json`."""
        return json.dumps({**make_format_stamp("colonnade plan"), **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of `plan.json`. Raises CorruptionError for fields that no plan has, ConfigError for settings
        that cannot work, CheckpointError for another format version."""
        values = parse_stamped_json("plan.json", text, "colonnade plan")
        try:
            return cls._from_fields(values)
        except ColonnadeError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"plan.json: got fields that no plan has ({type(error).__name__}: {error}), wanted those that "
                "Colonnade writes; restore it from a copy"
            ) from None

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Plan:
        tables = tuple(
            TablePlan(
                **{
                    **table,
                    "sharding": _read_sharding(table["sharding"]),
                    "cache": _read_cache(table.get("cache")),
                }
            )
            for table in values.pop("tables")
        )
        mapped = values.pop("mapped", None)
        comparison = values.pop("comparison", None)
        return cls(
            tables=tables,
            mapped=None if mapped is None else StorageLocation(**mapped),
            ssd=tuple(StorageLocation(**location) for location in values.pop("ssd", ())),
            codecs=Codecs(**values.pop("codecs", {})),
            servers=tuple(values.pop("servers", ())),
            comparison=None if comparison is None else PlanComparison.from_dict(comparison),
            **values,
        )


def _read_sharding(fields: dict[str, Any]) -> Sharding:
    hot = fields.get("hot")
    if hot is not None:
        hot = HotRows(tuple(hot["ids"]), hot["num_ranks"])
    return Sharding(fields["kind"], tuple(fields["ranks"]), fields.get("slices", 1), hot)


def _read_cache(fields: dict[str, Any] | None) -> TableCache | None:
    if fields is None:
        return None
    return TableCache(**{**fields, "clock": RowClock(**fields["clock"])})


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
        world = World(ranks_per_host=world, servers_per_host=config.servers)
    shardings, exchanges = _read_shardings(config, tables, world)
    if isinstance(config.towers, str) and world.num_ranks > 1:
        raise ConfigError(
            f"plan.towers: got {config.towers!r}, wanted a number of towers, with shardings inside them (`in_towers`)"
        )
    if isinstance(config.towers, int) and world.num_ranks > 1:
        list_tower_ranks(world, config.towers)  # Raises for towers of different sizes.
    caches = build_table_caches(config.cache, tables)
    if world.num_ranks == 1:  # The settings are checked above all the same.
        caches = {}
    check_cache_settings(config, caches, tables, shardings, exchanges, world.servers)
    capacities = _divide_memory(tables, shardings, world.num_ranks, config.memory)
    return _assemble_plan(config, tables, world, shardings, exchanges, caches, capacities)


def _read_shardings(
    config: PlanConfig, tables: Sequence[Table], world: World
) -> tuple[list[Sharding], list[str]]:
    """Return shardings with their hot rows, and exchanges, by table. Raises ConfigError if one is open."""
    resolved = resolve_fixed_tables(config, tables, world)
    for name, pair in resolved.items():
        if pair is None:
            raise ConfigError(
                f"table {name!r}: got a sharding or an exchange that only a sample can decide (auto, or ranks left "
                f"open), wanted both named: set plan.tables.{name}.sharding (in Python, to a Sharding) and exchange"
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
    config: PlanConfig,
    tables: Sequence[Table],
    world: World,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
    caches: Mapping[str, TableCache],
    capacities: Sequence[_Capacity],
) -> Plan:
    memory = config.memory
    codec = config.codec
    planned = []
    rest = "ssd" if memory.ssd else "run folder"
    for table, sharding, exchange, capacity in zip(
        tables, shardings, exchanges, capacities, strict=True
    ):
        own = config.tables.get(table.name)
        cache = caches.get(table.name)
        planned.append(
            TablePlan(
                name=table.name,
                sharding=sharding,
                exchange=exchange if cache is None else "cached",
                cache=cache,
                capacity_rows=capacity.rows,
                fits=capacity.fits,
                tier=capacity.tier,
                rest="-" if capacity.fits else rest,
                hbm_rows=capacity.hbm_rows,
                staleness_steps=None if own is None else own.staleness_steps,
                has_own_budget=table.name in memory.tables,
            )
        )
    plan = Plan(
        num_ranks=world.num_ranks,
        dram_bytes=memory.dram,
        lookahead=config.lookahead,
        staleness_steps=config.staleness_steps,
        tables=tuple(planned),
        mapped=memory.mapped_location,
        ssd=memory.ssd_locations,
        write_budget=config.write_budget,
        hbm_bytes=memory.hbm,
        codecs=Codecs(codec.values, codec.gradients, codec.dense),
        servers=world.servers,
        towers=config.towers if isinstance(config.towers, int) and world.num_ranks > 1 else None,
        cache_tier="dram" if config.cache is None else config.cache.tier,
    )
    if plan.lookahead == "auto" and (world.num_ranks > 1 or not plan.needs_backing):
        # Ranks must agree on a depth. Without rows in files there is nothing to wait for.
        plan = replace(plan, lookahead=AUTO_LOOKAHEAD_ON_FILES if plan.needs_backing else 2)
    return _add_mapped_rows(plan, tables)


@dataclass(frozen=True, slots=True)
class _Capacity:
    """Memory for one table on each rank that has rows of it."""

    rows: int
    hbm_rows: int
    """Number of rows that fit in device memory."""
    tier: Tier
    """Memory of `rows`."""
    fits: bool
    """True if no row is ever evicted: all rows of an owner fit, or no budget limits the table."""


def _divide_memory(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    num_ranks: int,
    memory: MemoryConfig,
) -> list[_Capacity]:
    """Divide the memory of each rank among its tables. Returns by table the capacity of the fullest rank.

    Raises ConfigError for budgets without room for one row of each table.
    """
    all_shards = shard_tables(tables, shardings)
    mapped = memory.mapped_location
    table_bytes = memory.tables
    if mapped is not None and memory.dram is None and not table_bytes:
        raise ConfigError(
            f"plan.memory.mapped: got {mapped.path} without plan.memory.dram, so every row is in main memory; set dram "
            "to what main memory may take, or leave mapped out"
        )
    dram_bytes = subtract_hot_row_bytes(all_shards, memory.dram, "plan.memory.dram", slot_bytes)
    hbm_bytes = subtract_hot_row_bytes(
        all_shards, memory.hbm, "plan.memory.hbm", lambda table: table.record_bytes
    )
    table_shards = [shard for shard in all_shards if not shard.is_hot]
    slices = [shard.table for shard in table_shards]
    for t, table in enumerate(tables):
        check_column_slices(table, [shard.table for shard in table_shards if shard.number == t])
    by_rank = list_distinct_shards([shard.sharding for shard in table_shards], num_ranks)
    for shards in by_rank:
        rank_slices = [
            table
            for table, shard in zip(slices, shards, strict=True)
            if shard.owner_index is not None
        ]
        check_memory_budget(tables, rank_slices, dram_bytes, table_bytes)
        _check_hbm_budget(rank_slices, hbm_bytes)
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
        capacities = [
            _divide_memory_of_unmapped(slices, shards, mapped_slices, divide) for shards in by_rank
        ]
    in_memory = _min_over_slices(table_shards, _min_rows_over_ranks(by_rank, capacities))
    on_device = _min_over_slices(table_shards, on_device)
    mapped_tables = {table_shards[s].number for s in mapped_slices}
    return [
        _Capacity(
            rows=rows,
            hbm_rows=on_device[t],
            tier="mapped" if t in mapped_tables else "dram",
            fits=(
                table.rows is not None
                and rows >= max_rows_per_owner(table.rows, shardings[t].num_owners)
            )
            or not (memory.dram is not None or table.name in table_bytes),
        )
        for t, (table, rows) in enumerate(zip(tables, in_memory, strict=True))
    ]


def _check_hbm_budget(rank_tables: Sequence[Table], hbm_bytes: int | None) -> None:
    """Raise ConfigError if device memory has no room for one row of each table of a rank."""
    least = sum(table.record_bytes for table in rank_tables)
    if hbm_bytes is not None and hbm_bytes < least:
        raise ConfigError(
            f"plan.memory.hbm: got {hbm_bytes:,} bytes, wanted at least {least:,}: one row of each of "
            f"{len(rank_tables)} tables; and enough for the rows of a window of batches"
        )


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


def _divide_memory_of_unmapped(
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


def apply_placement(
    plan: Plan,
    tables: Sequence[Table],
    rows: Mapping[str, tuple[int, Tier]],
    *,
    lookahead: int | Literal["auto"],
) -> Plan:
    """Return `plan` with the memory that the profiled placement chose: (rows, tier) by table name."""
    is_limited = plan.dram_bytes is not None
    rest = "ssd" if plan.ssd else "run folder"
    planned = []
    for table, before in zip(tables, plan.tables, strict=True):
        count, tier = rows[table.name]
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
                tier=tier,
                rest="-" if fits else rest,
            )
        )
    plan = replace(plan, tables=tuple(planned), lookahead=lookahead, placement="profiled")
    return _add_mapped_rows(plan, tables)


def _add_mapped_rows(plan: Plan, tables: Sequence[Table]) -> Plan:
    """Divide the mapped memory that whole tables leave among evicted rows of the others.

    Mapped memory without a size is for whole tables only. Raises ConfigError if it has no room for any row.
    """
    mapped = plan.mapped
    if mapped is None or mapped.bytes is None or not plan.needs_backing:
        return replace(plan, tables=tuple(replace(table, mapped_rows=0) for table in plan.tables))
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
    if not any(cached) and all(table.tier == "dram" for table in plan.tables):
        evicting = [
            table for table, count in zip(slices, resident, strict=True) if count is not None
        ]
        raise ConfigError(
            f"plan.memory.mapped: got {mapped.bytes:,} bytes, wanted at least "
            f"{sum(map(cached_row_bytes, evicting)):,}: one row of each of {len(evicting)} tables that do not fit in "
            "dram; raise it, or leave mapped out"
        )
    return replace(
        plan,
        tables=tuple(
            replace(table, mapped_rows=count)
            for table, count in zip(plan.tables, cached, strict=True)
        ),
    )


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
    return planned.mapped_rows * max(cached_row_bytes(shard.table) for shard in slices)


def _exchange_columns(table: TablePlan) -> dict[str, str]:
    return {"sharding": str(table.sharding), "exchange": table.exchange}


def describe_planned_tables(plan: Plan, tables: Sequence[Table]) -> list[dict[str, str]]:
    """Describe a plan as one printable line per table, by column title."""
    lines = []
    has_mapped_rows = any(planned.mapped_rows for planned in plan.tables)
    for table, planned, late in zip(tables, plan.tables, plan.staleness_by_table, strict=True):
        owners = planned.sharding.num_owners
        owned = "any" if table.rows is None else f"{max_rows_per_owner(table.rows, owners):,}"
        memory = memory_bytes(table, planned)
        unbounded = table.rows is None and planned.fits
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
                "rest": planned.rest,
                **({} if len(set(plan.staleness_by_table)) == 1 else {"staleness": f"{late}"}),
                **({} if plan.num_ranks == 1 else _exchange_columns(planned)),
                "optimizer": ", ".join(dict.fromkeys(part.optimizer.name for part in table.parts)),
            }
        )
    return lines
