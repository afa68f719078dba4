"""Plan of one run: the frozen value that says where rows are stored, what travels and how stale reads may be.

Making, printing and comparing a plan touches no device and no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from colonnade.config.plan import CacheTier, PlanConfig
from colonnade.errors import ConfigError
from colonnade.exchange import EXCHANGES, implied_exchange
from colonnade.exchange.cached import TableCache
from colonnade.formats import read_stamped, stamp
from colonnade.plan.caching import caches_of, check_caches
from colonnade.plan.constraints import forced_by, settled
from colonnade.plan.cost.memory import Tier
from colonnade.plan.hot import beside_hot, with_hot
from colonnade.plan.search.candidates import Choice
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
from colonnade.topology.sharding import HotRows, Shard, Sharding, distinct_loads, row_wise, share
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS, EXACT, Codecs


def check_staleness(of_tables: Mapping[str, int], names: Sequence[str]) -> None:
    """Raises ConfigError for bounds of tables that are not there, or that cannot be kept."""
    for name, steps in of_tables.items():
        if name not in names:
            raise ConfigError(
                f"staleness: got {name!r}, wanted a table of this model: {', '.join(names)}"
            )
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ConfigError(
                f"table {name!r}: got staleness_steps={steps!r}, wanted a number of steps, 0 or more"
            )


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


DEEP = 8
"""Batches that "auto" looks ahead where several ranks' rows rest in files and nothing is known of their speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    name: str
    sharding: Sharding
    """Which ranks have its rows."""
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
    tables: Sequence[Table],
    num_ranks: int = 1,
    *,
    dram_bytes: int | None = None,
    hbm_bytes: int | None = None,
    table_bytes: Mapping[str, int] | None = None,
    mapped: Place | None = None,
    ssd: Sequence[Place] = (),
    lookahead: int | Literal["auto"] = 2,
    write_budget: int | None = None,
    staleness_steps: int = 0,
    staleness: Mapping[str, int] | None = None,
    exchange: str = "rows",
    exchanges: Mapping[str, str] | None = None,
    shardings: Mapping[str, Sharding] | None = None,
    replicated_rows: Mapping[str, Iterable[int] | Tensor] | None = None,
    codecs: Codecs = EXACT,
    servers: Sequence[int] = (),
    towers: int | None = None,
    caches: Mapping[str, TableCache] | None = None,
    cache_tier: CacheTier = "dram",
) -> Plan:
    """Every table alike (`plan.placement` prefers some). Pure. Raises ConfigError for numbers that cannot work.

    By table name: `table_bytes`, memory of single tables, out of `dram_bytes`; `staleness`, how late its reads are,
    where that is not `staleness_steps`; `exchanges`, where it is not
    `exchange`; `shardings`, where rows are not dealt to all ranks; `replicated_rows`, ids of rows that lie on every
    rank, in memory (on one rank they mean nothing). `servers`: the only ranks that rows may lie on. `towers`: how
    many groups of neighbouring ranks the exchange `towers` goes by, default one for each host; rows are where
    `shardings` say (`plan.constraints.in_towers` makes some). `caches`: by table, copies of its rows that each rank
    keeps; on one rank they mean nothing. `cache_tier`: where copies lie, in memory or (hbm) in that of the device
    the collection is on when it is opened.
    """
    exchanges, shardings, staleness = exchanges or {}, shardings or {}, staleness or {}
    table_bytes = table_bytes or {}
    _check_names((exchange, *exchanges.values()), codecs)
    check_staleness(staleness, [table.name for table in tables])
    _check_shardings(shardings, tables, num_ranks, servers)
    _check_numbers(lookahead, staleness_steps, dram_bytes)
    everywhere = Sharding("row_wise", tuple(servers)) if servers else row_wise(num_ranks)
    of_tables = [shardings.get(table.name, everywhere) for table in tables]
    of_tables = with_hot(tables, of_tables, replicated_rows or {}, num_ranks, servers)
    caches = (caches or {}) if num_ranks > 1 else {}
    of_exchanges = [
        implied_exchange(each, exchanges.get(table.name, exchange))
        for table, each in zip(tables, of_tables, strict=True)
    ]
    check_caches(
        caches, tables, of_tables, of_exchanges,
        staleness_steps=staleness_steps or max(staleness.values(), default=0),
        codecs=codecs, hbm_bytes=hbm_bytes, servers=servers, tier=cache_tier,
    )  # fmt: skip
    capacities = _divide_memory(
        tables, of_tables, num_ranks, dram_bytes, hbm_bytes, table_bytes, mapped
    )
    planned = tuple(
        TablePlan(
            name=table.name,
            sharding=of_tables[t],
            exchange="cached" if table.name in caches else of_exchanges[t],
            cache=caches.get(table.name),
            capacity_rows=capacities[t].rows,
            fits=capacities[t].fits,
            tier=capacities[t].tier,
            rest="-" if capacities[t].fits else "ssd" if ssd else "run folder",
            hbm_rows=capacities[t].hbm_rows,
            staleness_steps=staleness.get(table.name),
        )
        for t, table in enumerate(tables)
    )
    plan = Plan(
        num_ranks=num_ranks, dram_bytes=dram_bytes, lookahead=lookahead, staleness_steps=staleness_steps,
        tables=planned, mapped=mapped, ssd=tuple(ssd), write_budget=write_budget, hbm_bytes=hbm_bytes,
        codecs=codecs, servers=tuple(servers), towers=towers, cache_tier=cache_tier,
    )  # fmt: skip
    if lookahead == "auto" and (num_ranks > 1 or not plan.needs_backing):
        # Ranks must agree on a depth; and with nothing at rest there is nothing to wait for.
        return replace(plan, lookahead=DEEP if plan.needs_backing else 2)
    return plan


def _check_names(exchanges: Iterable[str], codecs: Codecs) -> None:
    """Raise ConfigError for an exchange or a codec that does not exist."""
    for name in exchanges:
        if name not in EXCHANGES:
            raise ConfigError(
                f"unknown exchange {name!r}; choose from {', '.join(sorted(EXCHANGES))}"
            )
    for name in (codecs.values, codecs.gradients, codecs.dense):
        if name not in CODECS:
            raise ConfigError(f"unknown codec {name!r}; choose from {', '.join(CODECS)}")


def _check_shardings(
    shardings: Mapping[str, Sharding],
    tables: Sequence[Table],
    num_ranks: int,
    servers: Sequence[int],
) -> None:
    """Raise ConfigError for a sharding of an unknown table, or on a rank that can have no rows."""
    names = [table.name for table in tables]
    for name, sharding in shardings.items():
        if name not in names:
            raise ConfigError(
                f"shardings: got {name!r}, wanted a table of this model: {', '.join(names)}"
            )
        if sharding.ranks[-1] >= num_ranks:
            raise ConfigError(
                f"table {name!r}: got a sharding on rank {sharding.ranks[-1]}, wanted ranks 0 .. {num_ranks - 1}"
            )
        if servers and (others := sorted(set(sharding.ranks) - set(servers))):
            raise ConfigError(
                f"table {name!r}: got a sharding on rank {others[0]}, which trains; where there are servers all rows "
                f"lie on them: {', '.join(map(str, servers))}"
            )


def _check_numbers(
    lookahead: int | Literal["auto"], staleness_steps: int, dram_bytes: int | None
) -> None:
    """Raise ConfigError for a number below the least that it may be."""
    depth = 2 if lookahead == "auto" else lookahead
    if not all(isinstance(each, int) and each >= 0 for each in (depth, staleness_steps)):
        raise ConfigError(
            f"got lookahead={lookahead}, staleness_steps={staleness_steps}; wanted 0 or more (of lookahead, or auto)"
        )
    if dram_bytes is not None and dram_bytes < 1:
        raise ConfigError(
            f"got dram_bytes={dram_bytes}; wanted a positive number of bytes, or None"
        )


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
    dram_bytes: int | None,
    hbm_bytes: int | None,
    table_bytes: Mapping[str, int],
    mapped: Place | None,
) -> list[_Capacity]:
    """Divide the memory of each rank among its tables. Returns by table what the fullest rank has room for.

    Raises ConfigError for budgets that hold not even a row of each table.
    """
    every, is_limited = lay_out(tables, shardings), dram_bytes is not None
    dram_bytes = beside_hot(every, dram_bytes, "plan.memory.dram", slot_bytes)
    hbm_bytes = beside_hot(every, hbm_bytes, "plan.memory.hbm", lambda table: table.record_bytes)
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
            or not (is_limited or table.name in table_bytes),
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


def plan_of(
    config: PlanConfig,
    tables: Sequence[Table],
    world: World,
    choice: Choice | None = None,
    hot: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """`build_plan` with a configuration's settings. `choice`: what was found for tables of which it leaves something
    open; without, their rows are dealt to all ranks and travel as rows. `hot`: by name, of tables whose
    `replicated_rows` it asks for; where copies of all rows were chosen, they mean nothing. Raises ConfigError."""
    memory = config.memory
    shardings, exchanges = {}, {}
    for name, said in forced_by(config, tables, world).items():
        found = settled(said, world)
        if found is None and choice is not None:
            side = name if name in choice.shardings else f"{name}[cold]"
            found = choice.shardings[side], choice.exchanges[side]
        if found is not None:
            shardings[name], exchanges[name] = found
    copied = [name for name, sharding in shardings.items() if sharding.is_replicated]
    return build_plan(
        tables,
        world.num_ranks,
        dram_bytes=memory.dram,
        hbm_bytes=memory.hbm,
        table_bytes=memory.tables,
        mapped=memory.mapped_place,
        ssd=memory.ssd_places,
        lookahead=config.lookahead,
        write_budget=config.write_budget,
        staleness_steps=config.staleness_steps,
        staleness={
            name: said.staleness_steps
            for name, said in config.tables.items()
            if said.staleness_steps is not None
        },
        exchanges=exchanges,
        shardings=shardings,
        replicated_rows={name: ids for name, ids in (hot or {}).items() if name not in copied},
        codecs=Codecs(config.wire.values, config.wire.gradients, config.wire.dense),
        servers=world.servers,
        caches=caches_of(config.cache, tables),
        cache_tier="dram" if config.cache is None else config.cache.tier,
        towers=config.towers if isinstance(config.towers, int) and world.num_ranks > 1 else None,
    )


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
