"""Constraints on a plan: sharding, exchange and tower of each table as configured, and what the planner may choose.

A table belongs to the tower of the features that read it. Its rows are sharded over all ranks of the tower (`row_wise`,
`host_wise`), cut by columns over them (`column_wise`), or stored whole on the rank with the fewest bytes (`table_wise`,
`auto`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colonnade.config.plan import CacheConfig, PlanConfig, TableCacheConfig, TablePlanConfig
from colonnade.errors import ConfigError
from colonnade.hops.kinds import BY_TOWERS, get_exchange_setting
from colonnade.plan.names import Constraint
from colonnade.table import Feature, Table
from colonnade.topology.sharding import (
    COLUMN_KINDS,
    Kind,
    Sharding,
    column_wise,
    grid,
    host_wise,
    replicated,
    row_wise,
    row_wise_over_owners,
    shard_columns_everywhere,
    sharding_on_ranks,
    table_wise,
)
from colonnade.topology.towers import (
    Partition,
    build_round_robin_partition,
    list_tower_ranks,
    tower_of,
)
from colonnade.topology.world import World

if TYPE_CHECKING:  # who builds a plan needs no planner
    from colonnade.plan.search.candidates import PlanDecision


def read_table_constraints(
    config: PlanConfig, tables: Sequence[Table], world: World
) -> dict[str, Constraint]:
    """Return the configured constraint of each table by name, with None for "auto".

    Raises ConfigError for unknown tables and for ranks that the world does not have."""
    names = [table.name for table in tables]
    for name in config.tables:
        if name not in names:
            raise ConfigError(
                f"plan.tables: got {name!r}, wanted a table of this model: {', '.join(names)}"
            )
    return {name: _read_table_constraint(config, name, world) for name in names}


def _read_table_constraint(config: PlanConfig, table_name: str, world: World) -> Constraint:
    own = config.tables.get(table_name, TablePlanConfig())
    exchange: Any = own.exchange or config.exchange
    kind: Any = own.kind or config.sharding
    if kind == "replicated" and own.exchange not in (None, "auto"):
        raise ConfigError(
            f"table {table_name!r}: got exchange={own.exchange} with sharding=replicated; replicated tables send only "
            "gradients: leave exchange out, or give the table another sharding"
        )
    ranks: tuple[int, ...] | None = None
    if isinstance(own.sharding, Sharding):
        ranks = own.sharding.ranks
        _check_owner_ranks(f"plan.tables.{table_name}.sharding", ranks, world)
    elif own.ranks is not None:
        ranks = tuple(sorted(own.ranks))
        _check_owner_ranks(f"plan.tables.{table_name}.ranks", ranks, world)
        _check_whole_hosts(f"plan.tables.{table_name}.ranks", list(ranks), kind, exchange, world)
    if kind == "replicated":
        if world.has_servers:
            raise ConfigError(
                f"table {table_name!r}: got replicated rows with plan.servers={world.servers_per_host}; copies are "
                "stored "
                "on trainers, and with servers trainers have no rows. Leave servers out, or choose another sharding"
            )
        return Constraint(kind)
    # A `Sharding` value may cut rows all the same: owners then send values and evaluate no operator.
    if exchange == "partials" and kind in COLUMN_KINDS and not isinstance(own.sharding, Sharding):
        raise ConfigError(
            f"table {table_name!r}: got exchange=partials with sharding={kind}; operators are evaluated on whole rows, "
            "wanted table_wise, row_wise or host_wise, or exchange pooled"
        )
    return Constraint(
        None if kind == "auto" else kind, None if exchange == "auto" else exchange, ranks
    )


def _check_owner_ranks(setting_name: str, owner_ranks: tuple[int, ...], world: World) -> None:
    """Raise ConfigError for a rank that the world does not have, or that cannot own rows."""
    if owner_ranks[-1] >= world.num_ranks:
        raise ConfigError(
            f"{setting_name}: got ranks {list(owner_ranks)}, but this world has ranks 0 .. "
            f"{world.num_ranks - 1}; name one of "
            "them, or leave it out"
        )
    if trainers := [rank for rank in owner_ranks if rank not in world.owners]:
        raise ConfigError(
            f"{setting_name}: got ranks {list(owner_ranks)}, but with plan.servers={world.servers_per_host} "
            f"rank {trainers[0]} "
            f"trains and has no rows; name servers: {', '.join(map(str, world.owners))}"
        )


def _check_whole_hosts(
    setting_name: str, owner_ranks: list[int], sharding_kind: Kind, exchange_name: str, world: World
) -> None:
    """Raise ConfigError for ranks that are not whole hosts if the kind of sharding requires whole hosts."""
    if sharding_kind == "grid":
        hosts = sorted({world.host(rank) for rank in owner_ranks})
        if list(grid(world, hosts).ranks) != owner_ranks:
            raise ConfigError(
                f"{setting_name}: got {owner_ranks}, wanted all ranks of two or more hosts, such as "
                f"{list(grid(world, [0, 1]).ranks)}"
            )
    if (
        sharding_kind == "host_wise" and exchange_name not in BY_TOWERS
    ):  # With towers, the ranks are those of a tower (`shard_in_towers`).
        wanted = list(host_wise(world, world.host(owner_ranks[0])).ranks)
        if owner_ranks != wanted:
            raise ConfigError(
                f"{setting_name}: got {owner_ranks}, wanted all ranks of one host, such as {wanted}"
            )


def resolve_fixed_tables(
    config: PlanConfig, tables: Sequence[Table], world: World
) -> dict[str, tuple[Sharding, str] | None]:
    """Return the sharding and exchange of each table by name; None if a sample has to decide. Raises ConfigError."""
    resolved: dict[str, tuple[Sharding, str] | None] = {}
    for name, constraint in read_table_constraints(config, tables, world).items():
        own = config.tables.get(name, TablePlanConfig()).sharding
        sharding = own if isinstance(own, Sharding) else _resolve_sharding(constraint, world)
        exchange = "replicated" if sharding and sharding.is_replicated else constraint.exchange
        if exchange is None and world.num_ranks == 1:
            exchange = "rows"
        resolved[name] = (sharding, exchange) if sharding and exchange else None
    return resolved


def _resolve_sharding(table_constraint: Constraint, world: World) -> Sharding | None:
    """Return the sharding that a constraint determines; None if it leaves a choice."""
    if world.num_ranks == 1:
        return row_wise(1)
    if table_constraint.kind == "replicated":
        return replicated(world.num_ranks)
    if table_constraint.kind is None:
        return None
    if table_constraint.ranks is not None:
        return sharding_on_ranks(table_constraint.kind, table_constraint.ranks, world)
    if table_constraint.kind in COLUMN_KINDS:
        return shard_columns_everywhere(table_constraint.kind, world)
    if table_constraint.kind == "row_wise":
        return row_wise_over_owners(world)
    if table_constraint.kind == "host_wise" and world.num_hosts == 1:
        return host_wise(world, 0)
    return None


def is_settled(config: PlanConfig, tables: Sequence[Table], world: World) -> bool:
    """Return whether the settings determine every sharding, exchange and hot row. Raises like
    `read_table_constraints`."""
    counts = [own.replicated_rows for own in config.tables.values()]
    if world.num_ranks > 1 and any(count for count in counts if isinstance(count, int)):
        return False
    return None not in resolve_fixed_tables(config, tables, world).values()


def resolve_plan_config(
    config: PlanConfig,
    tables: Sequence[Table],
    world: World,
    plan_decision: PlanDecision | None = None,
    table_hot_ids: Mapping[str, Sequence[int]] | None = None,
) -> PlanConfig:
    """Return `config` with the sharding, exchange and replicated ids of every table, as `build_plan` requires.

    plan_decision: the planner's decision for open settings; without it, open tables are row-wise and exchange rows.
    table_hot_ids: ids by table name, for tables with a configured number of replicated rows; a replicated table needs
    none. One rank sends nothing, so every exchange is "rows" there. Raises ConfigError.
    """
    own_settings = {}
    uncached: list[str] = []
    for name, resolved in resolve_fixed_tables(config, tables, world).items():
        if resolved is None and plan_decision is not None:
            side = name if name in plan_decision.shardings else f"{name}[cold]"
            exchange = plan_decision.exchanges[side]
            if side == name and exchange != "cached":
                uncached.append(name)
            resolved = plan_decision.shardings[side], get_exchange_setting(exchange)
        sharding, exchange = resolved or (row_wise_over_owners(world), "rows")
        own = config.tables.get(name, TablePlanConfig())
        ids = (table_hot_ids or {}).get(name)
        if isinstance(own.sharding, Sharding):  # The search knows only its kind and ranks.
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
    return config.model_copy(
        update={
            "tables": own_settings,
            "cache": drop_unchosen_caches(config, own_settings, uncached),
        }
    )


def drop_unchosen_caches(
    config: PlanConfig, table_names: Iterable[str], uncached: Collection[str]
) -> CacheConfig | None:
    """Return `plan.cache` without the tables of `uncached` whose exchange is "auto": a choice dropped their caches."""
    dropped = {name for name in uncached if _exchange(config, name) == "auto"}
    cache = config.cache
    if cache is None or not dropped:
        return cache
    tables = {}
    for name in table_names:
        if name not in dropped:
            own = cache.tables.get(name, TableCacheConfig())
            tables[name] = own.model_copy(update={"size": own.size or cache.size})
    return cache.model_copy(update={"size": None, "tables": tables})


OPEN_ROWS = 1_000_000
"""Assumed number of rows of an open table, for balancing bytes over ranks."""


def assign_tables_to_towers(
    tables: Sequence[Table], features: Sequence[Feature], partition: Partition
) -> dict[str, int]:
    """Return by name the tower of each table that a feature of the partition reads.

    Raises ConfigError for features that the model does not have, and for a table that two towers read."""
    table_of = {feature.name: feature.table for feature in features}
    towers: dict[
        str, tuple[int, str]
    ] = {}  # tower, and the first feature of it that reads the table
    for tower, names in enumerate(partition.towers):
        for name in names:
            if name not in table_of:
                raise ConfigError(
                    f"tower {tower}: got feature {name!r}, wanted one of this model: {', '.join(table_of)}; the "
                    "partition is for another model"
                )
            table = table_of[name]
            first_tower, first_feature = towers.setdefault(table, (tower, name))
            if first_tower != tower:
                raise ConfigError(
                    f"table {table!r}: got feature {first_feature!r} in tower {first_tower} and {name!r} in tower "
                    f"{tower}, wanted all features that read one table in one tower, which stores its rows"
                )
    return {table.name: towers[table.name][0] for table in tables if table.name in towers}


def shard_in_towers(
    tables: Sequence[Table],
    features: Sequence[Feature],
    towers: Partition | int,
    world: World,
    kinds: Mapping[str, Kind] | None = None,
) -> dict[str, TablePlanConfig]:
    """Shard tables inside their towers. Returns their settings (`plan.tables`) by name, each with a sharding.

    towers: partition of the features, or number of towers, to which tables are assigned round-robin. kinds: kind of
    sharding by table name, default `table_wise`. Raises ConfigError.
    """
    if isinstance(towers, int):
        if towers > len(tables):
            raise ConfigError(
                f"got {towers} towers for {len(tables)} tables, wanted at least one table in each; name fewer "
                "(plan.towers)"
            )
        partition = build_round_robin_partition([table.name for table in tables], towers)
        tower_by_table = {
            name: tower for tower, names in enumerate(partition.towers) for name in names
        }
        count = towers
    else:
        tower_by_table = assign_tables_to_towers(tables, features, towers)
        count = len(towers.towers)
    owners = [
        [rank for rank in ranks if rank in world.owners] for ranks in list_tower_ranks(world, count)
    ]
    for tower in set(tower_by_table.values()):
        if not owners[tower]:
            raise ConfigError(
                f"got {count} towers with plan.servers={world.servers_per_host}: tower {tower} has no server for its "
                "rows; name fewer towers"
            )
    rank_bytes = dict.fromkeys(range(world.num_ranks), 0)
    shardings: dict[str, Sharding] = {}
    for table in sorted(tables, key=lambda table: -_table_bytes(table)):  # largest first
        if table.name not in tower_by_table:
            continue
        tower_owners = owners[tower_by_table[table.name]]
        kind = (kinds or {}).get(table.name, "table_wise")
        if kind == "table_wise" or len(tower_owners) == 1:
            rank = min(tower_owners, key=lambda rank: rank_bytes[rank])
            rank_bytes[rank] += _table_bytes(table)
            shardings[table.name] = table_wise(rank)
            continue
        shardings[table.name] = (
            column_wise(tower_owners[: table.width])
            if kind == "column_wise"
            else Sharding("host_wise", tuple(tower_owners))
        )
        for rank in tower_owners:
            rank_bytes[rank] += _table_bytes(table) // len(tower_owners)
    return {
        table.name: TablePlanConfig(sharding=shardings[table.name])
        for table in tables
        if table.name in shardings
    }


def apply_towers(
    config: PlanConfig,
    tables: Sequence[Table],
    features: Sequence[Feature],
    partition: Partition | None,
    world: World,
) -> PlanConfig:
    """Return `config` with a sharding for each table that is exchanged by towers and has no sharding of its own.

    partition: the features' partition that `config.towers` names, if it names one. `config` is returned unchanged on
    one rank, and if `config.towers` is only a limit on the towers that the planner may choose. Raises ConfigError."""
    if world.num_ranks == 1:
        return config
    by_towers = [table for table in tables if _exchange(config, table.name) in BY_TOWERS]
    if not by_towers:
        if isinstance(config.towers, int) and config.exchange == "auto":
            list_tower_ranks(
                world, config.towers
            )  # The planner may use this number of towers; check it.
        elif config.towers is not None:
            raise ConfigError(
                f"got plan.towers={config.towers} but no table is exchanged by towers; set plan.exchange=towers, or "
                "leave plan.towers out"
            )
        return config
    count = count_towers(config, partition, world)
    config = config.model_copy(update={"towers": count})
    with_kind = {name: own for name, own in config.tables.items() if own.kind not in (None, "auto")}
    ranks = list_tower_ranks(world, count)
    for name, own in with_kind.items():
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
    free = [table for table in by_towers if table.name not in with_kind]
    if not free or config.sharding in ("grid", "replicated"):
        return config
    kinds: dict[str, Kind] = {}
    if config.sharding != "auto":
        kinds = dict.fromkeys([table.name for table in free], config.sharding)
    names = {table.name for table in free}
    towers: Partition | int = count if partition is None else partition
    sharded = {}
    for name, settings in shard_in_towers(tables, features, towers, world, kinds).items():
        if name in names:
            own = config.tables.get(name, TablePlanConfig())
            sharded[name] = own.model_copy(update={"sharding": settings.sharding})
    return config.model_copy(update={"tables": {**config.tables, **sharded}})


def count_towers(config: PlanConfig, partition: Partition | None, world: World) -> int:
    """Return the number of towers: that of the partition, the configured one, or one for each host."""
    if partition is not None:
        return len(partition.towers)
    return config.towers if isinstance(config.towers, int) else world.num_hosts


def _exchange(config: PlanConfig, name: str) -> str:
    own = config.tables.get(name)
    return (own.exchange if own is not None else None) or config.exchange


def _table_bytes(table: Table) -> int:
    return table.record_bytes * (table.rows or OPEN_ROWS)
