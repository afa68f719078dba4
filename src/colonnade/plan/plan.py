"""Plan of one run: the frozen value that says where rows are stored, what travels and how stale reads may be.

Making, printing and comparing a plan touches no device and no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from colonnade.config.plan import CacheTier, MemoryConfig, PlanConfig
from colonnade.errors import ConfigError
from colonnade.exchange.cached import TableCache
from colonnade.formats import read_stamped, stamp
from colonnade.lookup.hops import EXCHANGES
from colonnade.plan.caching import caches_of, check_caches
from colonnade.plan.constraints import settle_tables
from colonnade.plan.cost.memory import Tier
from colonnade.plan.hot import beside_hot, with_hot
from colonnade.sizes import Place
from colonnade.staleness import RowClock
from colonnade.store.budget import (
    capacity_rows,
    hbm_rows,
    least_bytes,
    mapped_tables,
    slot_bytes,
)
from colonnade.store.table_shards import Laid, lay_out
from colonnade.table import Table, check_slices
from colonnade.topology.sharding import HotRows, Shard, Sharding, distinct_loads, share
from colonnade.topology.towers import tower_ranks
from colonnade.topology.world import World
from colonnade.wire.codec import EXACT, Codecs


def check_budget(
    tables: Sequence[Table],
    held: Sequence[Table],
    dram_bytes: int | None,
    table_bytes: Mapping[str, int],
) -> None:
    """Raises ConfigError for budgets that hold not even a row of each table that one rank has, or name tables that are
    not there."""
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
    others = least_bytes([table for table in held if table.origin[0] not in table_bytes])
    singles = sum(table_bytes.get(table.origin[0], 0) for table in held)
    least = singles + others
    if dram_bytes < least:
        given = f" and the {singles:,} bytes of single tables" if singles else ""
        raise ConfigError(
            f"plan.memory.dram: got {dram_bytes:,} bytes, wanted at least {least:,}: one row of each of "
            f"{len(held)} tables{given}; and enough for the rows of a window of batches"
        )


DEFAULTS = PlanConfig()
DEEP = 8
"""Batches that "auto" looks ahead where several ranks' rows rest in files and nothing is known of their speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    name: str
    sharding: Sharding
    """Ranks that have its rows."""
    capacity_rows: int
    """Rows of the table that may be in the memory of each rank that has some at once: what the fullest has room for."""
    fits: bool
    """Every row a rank owns has room: nothing of this table is ever evicted."""
    tier: Tier = "dram"
    """Where the resident rows lie."""
    rest: str = "-"
    """Where the others rest: "run folder", "ssd", or "-" where there are none."""
    hbm_rows: int = 0
    """Rows that may be in device memory at once, above those in memory; 0: there is no such tier."""
    exchange: str = "rows"
    """What of it travels between ranks: a key of `exchange.EXCHANGES`, or "cached"."""
    staleness_steps: int | None = None
    """How late its reads are; None: as the plan says."""
    cache: TableCache | None = None
    """Copies that each rank keeps, of exchange "cached"."""

    def __post_init__(self) -> None:
        if self.exchange not in (*EXCHANGES, "cached"):
            raise ConfigError(
                f"table {self.name!r}: got exchange {self.exchange!r}, wanted one of {', '.join(EXCHANGES)}, cached"
            )
        late = self.staleness_steps
        if late is not None and (not isinstance(late, int) or isinstance(late, bool) or late < 0):
            raise ConfigError(
                f"table {self.name!r}: got staleness_steps={late!r}, wanted a number of steps, 0 or more, or None"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where each table's rows live, what travels between ranks, how late reads may be: one choice per axis, for a run.

    `build_plan` makes one; it prints, compares, and round-trips through JSON.
    """

    num_ranks: int
    dram_bytes: int | None
    """Memory for rows on each rank; None: as much as they take."""
    lookahead: int | Literal["auto"]
    """Batches whose ids travel ahead of training; "auto": as many as it takes, found while training."""
    staleness_steps: int
    tables: tuple[TablePlan, ...]
    mapped: Place | None = None
    """Byte-addressable memory that the tables of tier "mapped" lie in."""
    ssd: tuple[Place, ...] = ()
    """Directories that rows rest in, striped; none: the run folder."""
    write_budget: int | None = None
    """Bytes per second that may be written on each rank."""
    hbm_bytes: int | None = None
    """Memory of each rank's device for rows, above memory; None: no row is kept there."""
    codecs: Codecs = EXACT
    """What rows and their gradients look like while they travel."""
    servers: tuple[int, ...] = ()
    """Ranks that have rows and nothing else; none: the ranks that train have the rows."""
    towers: int | None = None
    """Groups of neighbouring ranks that the exchange `towers` goes by; None: one for each host."""
    cache_tier: CacheTier = "dram"
    """Where ranks' copies of rows lie: in memory, or in that of each rank's device."""
    placement: str = "even"
    prediction: Mapping[str, Any] | None = None
    """`plan.prediction.Prediction` as plain values, where the plan was made from a profile."""

    def check_world(self, num_ranks: int, servers: Sequence[int]) -> None:
        """Raises ConfigError where it is for another world."""
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
        """Raise ConfigError where it is for other tables, or for these in another order."""
        if (planned := [table.name for table in self.tables]) != list(names):
            raise ConfigError(
                f"the plan is for tables {', '.join(planned)}, this collection has {', '.join(names)}; build the plan "
                "from the collection's tables"
            )

    @property
    def needs_backing(self) -> bool:
        return not all(table.fits for table in self.tables)

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """By table."""
        return tuple(table.sharding for table in self.tables)

    @property
    def bounds(self) -> tuple[int, ...]:
        """How late reads are, by table."""
        return tuple(
            self.staleness_steps if table.staleness_steps is None else table.staleness_steps
            for table in self.tables
        )

    @property
    def latest(self) -> int:
        """How late reads of the latest table are."""
        return max(self.bounds)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """All that travel, by name."""
        return tuple(sorted({table.exchange for table in self.tables}))

    def to_json(self) -> str:
        return json.dumps({**stamp("colonnade plan"), **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = read_stamped("plan.json", text, "colonnade plan")
        tables = tuple(
            TablePlan(
                **{
                    **table,
                    "sharding": _sharding_from(table["sharding"]),
                    "cache": _cache_from(table.get("cache")),
                }
            )
            for table in values.pop("tables")
        )
        mapped = values.pop("mapped", None)
        return cls(
            tables=tables,
            mapped=None if mapped is None else Place(**mapped),
            ssd=tuple(Place(**place) for place in values.pop("ssd", ())),
            codecs=Codecs(**values.pop("codecs", {})),
            servers=tuple(values.pop("servers", ())),
            **values,
        )


def _sharding_from(said: dict[str, Any]) -> Sharding:
    hot = said.get("hot")
    if hot is not None:
        hot = HotRows(tuple(hot["ids"]), hot["num_ranks"])
    return Sharding(said["kind"], tuple(said["ranks"]), said.get("slices", 1), hot)


def _cache_from(said: dict[str, Any] | None) -> TableCache | None:
    return None if said is None else TableCache(**{**said, "clock": RowClock(**said["clock"])})


def build_plan(
    tables: Sequence[Table], world: World | int = 1, config: PlanConfig = DEFAULTS
) -> Plan:
    """Plan a run as `config` says, without any choice of its own. Pure.

    world: the ranks, or how many there are on one host. Every table needs a sharding and an exchange: `fit` and
    `colonnade plan` choose what a configuration leaves open ("auto", the rank of a `table_wise` table, numbers of
    replicated rows) from a sample, and `in_towers` places tables in towers. In a world of one rank there are no caches,
    towers or replicated rows. Raises ConfigError for what cannot work.
    """
    if isinstance(world, int):
        world = World(ranks_per_host=world, servers_per_host=config.servers)
    shardings, exchanges = _settle(config, tables, world)
    if isinstance(config.towers, str) and world.num_ranks > 1:
        raise ConfigError(
            f"plan.towers: got {config.towers!r}, wanted a number of towers, with shardings inside them (`in_towers`)"
        )
    if isinstance(config.towers, int) and world.num_ranks > 1:
        tower_ranks(world, config.towers)  # refuses towers that would differ in size
    caches = caches_of(config.cache, tables)
    if world.num_ranks == 1:  # settings are checked all the same
        caches = {}
    check_caches(config, caches, tables, shardings, exchanges, world.servers)
    capacities = _divide_memory(tables, shardings, world.num_ranks, config.memory)
    return _assemble(config, tables, world, shardings, exchanges, caches, capacities)


def _settle(
    config: PlanConfig, tables: Sequence[Table], world: World
) -> tuple[list[Sharding], list[str]]:
    """Return shardings, with their hot rows, and exchanges by table. Raises ConfigError where one is left open."""
    settled = settle_tables(config, tables, world)
    for name, pair in settled.items():
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
    pairs = [pair for pair in settled.values() if pair is not None]
    shardings = [sharding for sharding, _ in pairs]
    shardings = with_hot(tables, shardings, ids, world.num_ranks, world.servers)
    return shardings, [exchange for _, exchange in pairs]


def _assemble(
    config: PlanConfig,
    tables: Sequence[Table],
    world: World,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
    caches: Mapping[str, TableCache],
    capacities: Sequence[_Capacity],
) -> Plan:
    memory, codec, planned = config.memory, config.codec, []
    rest = "ssd" if memory.ssd else "run folder"
    for table, sharding, exchange, capacity in zip(
        tables, shardings, exchanges, capacities, strict=True
    ):
        own, cache = config.tables.get(table.name), caches.get(table.name)
        planned.append(
            TablePlan(
                name=table.name, sharding=sharding, exchange=exchange if cache is None else "cached",
                cache=cache, capacity_rows=capacity.rows, fits=capacity.fits, tier=capacity.tier,
                rest="-" if capacity.fits else rest, hbm_rows=capacity.hbm_rows,
                staleness_steps=None if own is None else own.staleness_steps,
            )
        )  # fmt: skip
    plan = Plan(
        num_ranks=world.num_ranks, dram_bytes=memory.dram, lookahead=config.lookahead,
        staleness_steps=config.staleness_steps, tables=tuple(planned), mapped=memory.mapped_place,
        ssd=memory.ssd_places, write_budget=config.write_budget, hbm_bytes=memory.hbm,
        codecs=Codecs(codec.values, codec.gradients, codec.dense), servers=world.servers,
        towers=config.towers if isinstance(config.towers, int) and world.num_ranks > 1 else None,
        cache_tier="dram" if config.cache is None else config.cache.tier,
    )  # fmt: skip
    if plan.lookahead == "auto" and (world.num_ranks > 1 or not plan.needs_backing):
        # Ranks must agree on a depth; and with nothing at rest there is nothing to wait for.
        return replace(plan, lookahead=DEEP if plan.needs_backing else 2)
    return plan


@dataclass(frozen=True, slots=True)
class _Capacity:
    """Memory that each rank with rows of one table has for them."""

    rows: int
    hbm_rows: int
    """Rows in the memory of its device."""
    tier: Tier
    """Kind of the memory that `rows` lie in."""
    fits: bool
    """Nothing is ever evicted: all rows that a rank owns have room, or no budget limits the table."""


def _divide_memory(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    num_ranks: int,
    memory: MemoryConfig,
) -> list[_Capacity]:
    """Divide the memory of each rank among its tables. Returns by table what the fullest rank has room for.

    Raises ConfigError for budgets that hold not even a row of each table.
    """
    every, mapped, table_bytes = lay_out(tables, shardings), memory.mapped_place, memory.tables
    dram_bytes = beside_hot(every, memory.dram, "plan.memory.dram", slot_bytes)
    hbm_bytes = beside_hot(every, memory.hbm, "plan.memory.hbm", lambda table: table.record_bytes)
    laid = [each for each in every if not each.is_hot]
    slices = [each.table for each in laid]
    for t, table in enumerate(tables):
        check_slices(table, [each.table for each in laid if each.number == t])
    loads = distinct_loads([each.sharding for each in laid], num_ranks)
    for shards in loads:
        held = [
            table for table, shard in zip(slices, shards, strict=True) if shard.place is not None
        ]
        check_budget(tables, held, dram_bytes, table_bytes)
        _check_hbm(held, hbm_bytes)
    on_device = [0] * len(slices)
    if hbm_bytes is not None:
        on_device = _fullest(loads, [hbm_rows(slices, hbm_bytes, shards) for shards in loads])
    divide = partial(capacity_rows, budget_bytes=dram_bytes, fixed_bytes=table_bytes)
    by_load = [divide(slices, shards=shards) for shards in loads]
    mapped_slices: set[int] = set()
    if mapped is not None:
        mapped_slices = _choose_mapped(laid, loads, by_load, mapped)
        by_load = [_beside_mapped(slices, shards, mapped_slices, divide) for shards in loads]
    in_memory = _least_by_table(laid, _fullest(loads, by_load))
    on_device = _least_by_table(laid, on_device)
    mapped_numbers = {laid[s].number for s in mapped_slices}
    return [
        _Capacity(
            rows=rows,
            hbm_rows=on_device[t],
            tier="mapped" if t in mapped_numbers else "dram",
            fits=(table.rows is not None and rows >= share(table.rows, shardings[t].num_owners))
            or not (memory.dram is not None or table.name in table_bytes),
        )
        for t, (table, rows) in enumerate(zip(tables, in_memory, strict=True))
    ]


def _check_hbm(held: Sequence[Table], hbm_bytes: int | None) -> None:
    """Raise ConfigError where device memory has no room for one row of each table that a rank has rows of."""
    least = sum(table.record_bytes for table in held)
    if hbm_bytes is not None and hbm_bytes < least:
        raise ConfigError(
            f"plan.memory.hbm: got {hbm_bytes:,} bytes, wanted at least {least:,}: one row of each of "
            f"{len(held)} tables; and enough for the rows of a window of batches"
        )


def _choose_mapped(
    laid: Sequence[Laid],
    loads: Sequence[Sequence[Shard]],
    by_load: Sequence[Sequence[int]],
    mapped: Place,
) -> set[int]:
    """Choose the slices that lie in mapped memory: of tables for which each of their ranks has room there.

    by_load: rows in memory by load and slice, if nothing were mapped.
    """
    slices = [each.table for each in laid]
    without_room: set[int] = set()
    for capacities, shards in zip(by_load, loads, strict=True):
        fitting = set(mapped_tables(slices, capacities, mapped.bytes, shards))
        absent = {s for s, shard in enumerate(shards) if shard.place is None}
        without_room |= set(range(len(slices))) - fitting - absent
    unmapped = {laid[s].number for s in without_room}  # slices of a table lie alike
    return {s for s, each in enumerate(laid) if each.number not in unmapped}


def _beside_mapped(
    slices: Sequence[Table],
    shards: Sequence[Shard],
    mapped_slices: Collection[int],
    divide: Callable[..., list[int]],
) -> list[int]:
    """Divide one rank's memory among the slices that are not mapped. Returns rows by slice; of mapped ones, all."""
    others = [s for s in range(len(slices)) if s not in mapped_slices]
    rows = divide([slices[s] for s in others], shards=[shards[s] for s in others])
    rows_of = dict(zip(others, rows, strict=True))
    return [rows_of.get(s, shards[s].most_rows(table.rows or 0)) for s, table in enumerate(slices)]


def placed_plan(
    plan: Plan,
    tables: Sequence[Table],
    rows: Mapping[str, tuple[int, Tier]],
    *,
    lookahead: int,
) -> Plan:
    """`plan` with other rows in memory, by name: (rows, tier); as `plan.placement` gave them."""
    is_limited = plan.dram_bytes is not None
    rest = "ssd" if plan.ssd else "run folder"
    planned = []
    for table, before in zip(tables, plan.tables, strict=True):
        count, tier = rows[table.name]
        owned = None if table.rows is None else share(table.rows, before.sharding.num_owners)
        if before.sharding.slices > 1:  # memory for so many whole rows holds more of their slices
            count *= before.sharding.slices
            count = count if owned is None else min(count, owned)
        whole = owned is not None and count >= owned
        fits = whole or (before.fits and not is_limited)
        planned.append(
            replace(
                before,
                capacity_rows=before.capacity_rows if fits and not whole else count,
                fits=fits,
                tier=tier,
                rest="-" if fits else rest,
            )
        )
    return replace(
        plan,
        tables=tuple(planned),
        lookahead=lookahead,
        placement="profiled",
    )


def _fullest(loads: Sequence[Sequence[Shard]], rows: Sequence[Sequence[int]]) -> list[int]:
    """By table: the least that a rank with rows of it has room for; both by load, then by table."""
    return [
        min(
            given[t]
            for given, shards in zip(rows, loads, strict=True)
            if shards[t].place is not None
        )
        for t in range(len(rows[0]))
    ]


def _least_by_table(laid: Sequence[Laid], rows: Sequence[int]) -> list[int]:
    """rows by slice -> what each slice of a table has room for."""
    found: dict[int, int] = {}
    for each, count in zip(laid, rows, strict=True):
        found[each.number] = min(count, found.get(each.number, count))
    return list(found.values())


def held_bytes(table: Table, sharding: Sharding) -> int:
    """That one row takes in the memory of a rank that has it, or a slice of it; the widest."""
    return max(slot_bytes(each.table) for each in lay_out([table], [sharding]))


def memory_bytes(table: Table, planned: TablePlan) -> int:
    """Of each rank that has some of its rows: what is planned for them, and for copies of its hot ones."""
    hot = planned.sharding.hot
    copies = 0 if hot is None else len(hot.ids) * slot_bytes(table)
    return planned.capacity_rows * held_bytes(table, planned.sharding) + copies


def _travels(table: TablePlan) -> dict[str, str]:
    return {"sharding": str(table.sharding), "exchange": table.exchange}


def explain(plan: Plan, tables: Sequence[Table]) -> list[dict[str, str]]:
    """One line per table, in words and numbers, for a person to read."""
    lines = []
    for table, planned, late in zip(tables, plan.tables, plan.bounds, strict=True):
        owners = planned.sharding.num_owners
        owned = "any" if table.rows is None else f"{share(table.rows, owners):,}"
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
                "memory": "as trained" if unbounded else f"{memory / 2**20:,.1f} MiB",
                "tier": planned.tier,
                "rest": planned.rest,
                **({} if len(set(plan.bounds)) == 1 else {"staleness": f"{late}"}),
                **({} if plan.num_ranks == 1 else _travels(planned)),
                "optimizer": ", ".join(dict.fromkeys(part.optimizer.name for part in table.parts)),
            }
        )
    return lines
