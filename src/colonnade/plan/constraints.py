"""Constraints on a plan: what a configuration says of shardings, exchanges and towers, table by table, and what it
leaves to be chosen.

A table is in the tower of the features that read it. There its rows are dealt to all ranks (`row_wise`, `host_wise`),
cut by columns over them (`column_wise`), or lie whole on the one that has least (`table_wise`, `auto`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colonnade.config.plan import PlanConfig, TablePlanConfig
from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import tower_of
from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.search.candidates import Choice, Forced
from colonnade.plan.search.cutting import CUT, everywhere
from colonnade.table import Feature, Table
from colonnade.topology.sharding import (
    Kind,
    Sharding,
    column_wise,
    grid,
    host_wise,
    on_ranks,
    replicated,
    row_wise,
    row_wise_in,
    table_wise,
)
from colonnade.topology.towers import Partition, striped, tower_ranks
from colonnade.topology.world import World


def forced_by(config: PlanConfig, tables: Sequence[Table], world: World) -> dict[str, Forced]:
    """By table name; None where "auto". Raises ConfigError for tables that are not there and ranks this world lacks."""
    names = [table.name for table in tables]
    for name in config.tables:
        if name not in names:
            raise ConfigError(
                f"plan.tables: got {name!r}, wanted a table of this model: {', '.join(names)}"
            )
    return {name: _forced(config, name, world) for name in names}


def _forced(config: PlanConfig, name: str, world: World) -> Forced:
    own = config.tables.get(name, TablePlanConfig())
    exchange: Any = own.exchange or config.exchange
    kind: Any = own.kind or config.sharding
    if kind == "replicated" and own.exchange not in (None, "auto"):
        raise ConfigError(
            f"table {name!r}: got exchange={own.exchange} with sharding=replicated; of replicated rows only "
            "gradients travel: leave exchange out, or give the table another sharding"
        )
    ranks: tuple[int, ...] | None = None
    if isinstance(own.sharding, Sharding):
        ranks = own.sharding.ranks
        _check_ranks(f"plan.tables.{name}.sharding", ranks, world)
    elif own.ranks is not None:
        ranks = tuple(sorted(own.ranks))
        _check_ranks(f"plan.tables.{name}.ranks", ranks, world)
        _check_groups(f"plan.tables.{name}.ranks", list(ranks), kind, exchange, world)
    if kind == "replicated":
        if world.has_servers:
            raise ConfigError(
                f"table {name!r}: got replicated rows with plan.servers={world.servers_per_host}; copies lie with the "
                "samples, and where there are servers trainers have no rows. Leave servers out, or choose another "
                "sharding"
            )
        return Forced(kind)
    # A Sharding value may cut rows all the same: their values travel then, and no operator is evaluated at owners.
    if exchange == "partials" and kind in CUT and not isinstance(own.sharding, Sharding):
        raise ConfigError(
            f"table {name!r}: got exchange=partials with sharding={kind}; operators are evaluated on whole rows, "
            "wanted table_wise, row_wise or host_wise, or exchange pooled"
        )
    return Forced(None if kind == "auto" else kind, None if exchange == "auto" else exchange, ranks)


def _check_ranks(setting: str, ranks: tuple[int, ...], world: World) -> None:
    """Raise ConfigError for a rank that this world does not have, or that can have no rows."""
    if ranks[-1] >= world.num_ranks:
        raise ConfigError(
            f"{setting}: got ranks {list(ranks)}, but this world has ranks 0 .. {world.num_ranks - 1}; name one of "
            "them, or leave it out"
        )
    if trainers := [rank for rank in ranks if rank not in world.owners]:
        raise ConfigError(
            f"{setting}: got ranks {list(ranks)}, but with plan.servers={world.servers_per_host} rank {trainers[0]} "
            f"trains and has no rows; name servers: {', '.join(map(str, world.owners))}"
        )


def _check_groups(setting: str, ranks: list[int], kind: Kind, exchange: str, world: World) -> None:
    """Raise ConfigError for ranks that are not those of whole hosts, where the kind of sharding wants these."""
    if kind == "grid":
        hosts = sorted({world.host(rank) for rank in ranks})
        if list(grid(world, hosts).ranks) != ranks:
            raise ConfigError(
                f"{setting}: got {ranks}, wanted all ranks of two or more hosts, such as "
                f"{list(grid(world, [0, 1]).ranks)}"
            )
    if kind == "host_wise" and exchange not in BY_TOWERS:  # whose groups are towers (`in_towers`)
        wanted = list(host_wise(world, world.host(ranks[0])).ranks)
        if ranks != wanted:
            raise ConfigError(
                f"{setting}: got {ranks}, wanted all ranks of one host, such as {wanted}"
            )


def settle_tables(
    config: PlanConfig, tables: Sequence[Table], world: World
) -> dict[str, tuple[Sharding, str] | None]:
    """Return the sharding and exchange of each table; None where a sample is to decide. Raises ConfigError."""
    settled: dict[str, tuple[Sharding, str] | None] = {}
    for name, forced in forced_by(config, tables, world).items():
        own = config.tables.get(name, TablePlanConfig()).sharding
        sharding = own if isinstance(own, Sharding) else _settle_sharding(forced, world)
        exchange = "replicated" if sharding and sharding.is_replicated else forced.exchange
        if exchange is None and world.num_ranks == 1:
            exchange = "rows"
        settled[name] = (sharding, exchange) if sharding and exchange else None
    return settled


def _settle_sharding(forced: Forced, world: World) -> Sharding | None:
    if world.num_ranks == 1:
        return row_wise(1)
    if forced.kind == "replicated":
        return replicated(world.num_ranks)
    if forced.kind is None:
        return None
    if forced.ranks is not None:
        return on_ranks(forced.kind, forced.ranks, world)
    if forced.kind in CUT:
        return everywhere(forced.kind, world)
    if forced.kind == "row_wise":
        return row_wise_in(world)
    if forced.kind == "host_wise" and world.num_hosts == 1:
        return host_wise(world, 0)
    return None


def is_settled(config: PlanConfig, tables: Sequence[Table], world: World) -> bool:
    """Return whether nothing is left to be chosen, hot rows included. Raises as `forced_by`."""
    counts = [own.replicated_rows for own in config.tables.values()]
    if world.num_ranks > 1 and any(count for count in counts if isinstance(count, int)):
        return False
    return None not in settle_tables(config, tables, world).values()


def settle_plan(
    config: PlanConfig,
    tables: Sequence[Table],
    world: World,
    choice: Choice | None = None,
    hot: Mapping[str, Sequence[int]] | None = None,
) -> PlanConfig:
    """Return `config` with the sharding, exchange and replicated ids of every table, as `build_plan` wants it.

    choice: decides what is open; without it, such tables are row-wise and travel as rows. hot: ids by name of tables
    whose number of replicated rows is configured; a replicated table needs none. In a world of one rank nothing
    travels, so every exchange is "rows". Raises ConfigError.
    """
    own_settings = {}
    for name, settled in settle_tables(config, tables, world).items():
        if settled is None and choice is not None:
            side = name if name in choice.shardings else f"{name}[cold]"
            settled = choice.shardings[side], choice.exchanges[side]
        sharding, exchange = settled or (row_wise_in(world), "rows")
        own, ids = config.tables.get(name, TablePlanConfig()), (hot or {}).get(name)
        if isinstance(own.sharding, Sharding):  # the search knows its kind and ranks alone
            sharding = own.sharding
        if ids is None:
            ids = () if isinstance(own.replicated_rows, int) else own.replicated_rows
        is_copied = sharding.is_replicated
        own_settings[name] = own.model_copy(
            update={
                "sharding": sharding,
                "ranks": None,
                "exchange": None if is_copied else exchange if world.num_ranks > 1 else "rows",
                "replicated_rows": () if is_copied else tuple(ids),
            }
        )
    return config.model_copy(update={"tables": own_settings})


OPEN_ROWS = 1_000_000
"""Rows of an open table, of which nobody knows how many there will be, where tables are weighed."""


def towers_of_tables(
    tables: Sequence[Table], features: Sequence[Feature], partition: Partition
) -> dict[str, int]:
    """By name: the tower of each table that a feature of the partition reads. Raises ConfigError for features that the
    model has not, and for a table that is read in two towers."""
    readers = {feature.name: feature.table for feature in features}
    found: dict[str, tuple[int, str]] = {}
    for number, names in enumerate(partition.towers):
        for name in names:
            if name not in readers:
                raise ConfigError(
                    f"tower {number}: got feature {name!r}, wanted one of this model: {', '.join(readers)}; the "
                    "partition is for another model"
                )
            table = readers[name]
            before, by = found.setdefault(table, (number, name))
            if before != number:
                raise ConfigError(
                    f"table {table!r}: got feature {by!r} in tower {before} and {name!r} in tower {number}, wanted all "
                    "features that read one table in one tower: its rows lie in one"
                )
    return {table.name: found[table.name][0] for table in tables if table.name in found}


def in_towers(
    tables: Sequence[Table],
    features: Sequence[Feature],
    towers: Partition | int,
    world: World,
    kinds: Mapping[str, Kind] | None = None,
) -> dict[str, TablePlanConfig]:
    """Place tables inside their towers. Returns their settings (`plan.tables`), a sharding each.

    towers: which features stand together, or how many towers tables are dealt to in turn. kinds: by name, default
    `table_wise`. Raises ConfigError.
    """
    if isinstance(towers, int):
        if towers > len(tables):
            raise ConfigError(
                f"got {towers} towers for {len(tables)} tables, wanted at least one table in each; name fewer "
                "(plan.towers)"
            )
        partition = striped([table.name for table in tables], towers)
        places = {name: number for number, some in enumerate(partition.towers) for name in some}
        count = towers
    else:
        places, count = towers_of_tables(tables, features, towers), len(towers.towers)
    ranks = tower_ranks(world, count)
    owners = [[rank for rank in each if rank in world.owners] for each in ranks]
    for number in set(places.values()):
        if not owners[number]:
            raise ConfigError(
                f"got {count} towers with plan.servers={world.servers_per_host}: tower {number} has no server for its "
                "rows; name fewer towers"
            )
    held = dict.fromkeys(range(world.num_ranks), 0)
    found: dict[str, Sharding] = {}
    for table in sorted(tables, key=lambda each: -_bytes(each)):  # the largest first
        if table.name not in places:
            continue
        mine = owners[places[table.name]]
        kind = (kinds or {}).get(table.name, "table_wise")
        if kind == "table_wise" or len(mine) == 1:
            rank = min(mine, key=lambda each: held[each])
            held[rank] += _bytes(table)
            found[table.name] = table_wise(rank)
            continue
        found[table.name] = (
            column_wise(mine[: table.width])
            if kind == "column_wise"
            else Sharding("host_wise", tuple(mine))
        )
        for rank in mine:
            held[rank] += _bytes(table) // len(mine)
    return {
        table.name: TablePlanConfig(sharding=found[table.name])
        for table in tables
        if table.name in found
    }


def towered(
    config: PlanConfig,
    tables: Sequence[Table],
    features: Sequence[Feature],
    partition: Partition | None,
    world: World,
) -> PlanConfig:
    """`config` with a sharding and ranks for each table that travels by towers and that has none of its own;
    `partition`: that of `config.towers`, where it names one. In a world of one: as it is, and where exchanges are yet
    to be chosen, beside a number. Raises ConfigError."""
    if world.num_ranks == 1:
        return config
    by_towers = [table for table in tables if _exchange(config, table.name) in BY_TOWERS]
    if not by_towers:
        if isinstance(config.towers, int) and config.exchange == "auto":
            tower_ranks(world, config.towers)  # as many as the chooser may fill
        elif config.towers is not None:
            raise ConfigError(
                f"got plan.towers={config.towers} where no table travels by towers; set plan.exchange=towers, or leave "
                "plan.towers out"
            )
        return config
    count = num_towers(config, partition, world)
    config = config.model_copy(update={"towers": count})
    by_kind = {name: own for name, own in config.tables.items() if own.kind not in (None, "auto")}
    ranks = tower_ranks(world, count)
    for name, own in by_kind.items():
        if own.kind != "host_wise" or _exchange(config, name) not in BY_TOWERS:
            continue
        sharding = own.sharding
        if not isinstance(sharding, Sharding):
            if own.ranks is None:
                continue
            sharding = Sharding("host_wise", tuple(sorted(own.ranks)))
        if tower_of(sharding, ranks) is None:
            raise ConfigError(
                f"plan.tables.{name}: got ranks {list(sharding.ranks)}, wanted ranks of one tower, such as "
                f"{list(ranks[0])}"
            )
    free = [table for table in by_towers if table.name not in by_kind]
    if not free or config.sharding in ("grid", "replicated"):
        return config
    kinds: dict[str, Kind] = {}
    if config.sharding != "auto":
        kinds = dict.fromkeys([table.name for table in free], config.sharding)
    names = {table.name for table in free}
    towers: Partition | int = count if partition is None else partition
    laid = in_towers(tables, features, towers, world, kinds)
    placed = {}
    for name, own in laid.items():
        if name in names:
            before = config.tables.get(name, TablePlanConfig())
            placed[name] = before.model_copy(update={"sharding": own.sharding})
    return config.model_copy(update={"tables": {**config.tables, **placed}})


def num_towers(config: PlanConfig, partition: Partition | None, world: World) -> int:
    """As it is said, or one for each host."""
    if partition is not None:
        return len(partition.towers)
    return config.towers if isinstance(config.towers, int) else world.num_hosts


def _exchange(config: PlanConfig, name: str) -> str:
    own = config.tables.get(name)
    return (own.exchange if own is not None else None) or config.exchange


def _bytes(table: Table) -> int:
    return table.record_bytes * (table.rows or OPEN_ROWS)
