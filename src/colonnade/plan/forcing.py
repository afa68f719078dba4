"""What a configuration says of shardings and exchanges, table by table, and what it leaves to be chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colonnade.errors import ConfigError
from colonnade.exchange.tower_cut import BY_TOWERS
from colonnade.plan.chosen import Forced
from colonnade.plan.cutting import CUT, everywhere
from colonnade.plan_config import PlanConfig
from colonnade.table import Table
from colonnade.topology.sharding import (
    Kind,
    Sharding,
    grid,
    host_wise,
    on_ranks,
    replicated,
    row_wise,
    row_wise_in,
)
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
    own = config.tables.get(name)
    exchange: Any = config.exchange
    kind: Any = config.sharding
    ranks = None
    if own is not None:
        exchange, kind = own.exchange or exchange, own.sharding or kind
        if kind == "replicated" and own.exchange not in (None, "auto"):
            raise ConfigError(
                f"table {name!r}: got exchange={own.exchange} with sharding=replicated; of replicated rows only "
                "gradients travel: leave exchange out, or give the table another sharding"
            )
        ranks = (
            None if own.ranks is None else _ranks(name, sorted(own.ranks), kind, exchange, world)
        )
    if kind == "replicated":
        if world.has_servers:
            raise ConfigError(
                f"table {name!r}: got replicated rows with plan.servers={world.servers_per_host}; copies lie with the "
                "samples, and where there are servers trainers have no rows. Leave servers out, or choose another "
                "sharding"
            )
        return Forced(kind)
    if exchange == "substitute" and kind in CUT:
        raise ConfigError(
            f"table {name!r}: got exchange=substitute with sharding={kind}; operators are evaluated on whole rows, "
            "wanted table_wise, row_wise or host_wise, or exchange pooled"
        )
    return Forced(None if kind == "auto" else kind, None if exchange == "auto" else exchange, ranks)


def _ranks(name: str, ranks: list[int], kind: Kind, exchange: str, world: World) -> tuple[int, ...]:
    if ranks[-1] >= world.num_ranks:
        raise ConfigError(
            f"plan.tables.{name}.ranks: got {ranks}, but this world has ranks 0 .. {world.num_ranks - 1}; name one of "
            "them, or leave ranks out"
        )
    if trainers := [rank for rank in ranks if rank not in world.owners]:
        raise ConfigError(
            f"plan.tables.{name}.ranks: got {ranks}, but with plan.servers={world.servers_per_host} rank {trainers[0]} "
            f"trains and has no rows; name servers: {', '.join(map(str, world.owners))}"
        )
    if kind == "grid":
        hosts = sorted({world.host(rank) for rank in ranks})
        if list(grid(world, hosts).ranks) != ranks:
            raise ConfigError(
                f"plan.tables.{name}.ranks: got {ranks}, wanted all ranks of two or more hosts, such as "
                f"{list(grid(world, [0, 1]).ranks)}"
            )
    if (
        kind == "host_wise" and exchange not in BY_TOWERS
    ):  # whose groups are towers (towers/placement.py)
        wanted = list(host_wise(world, world.host(ranks[0])).ranks)
        if ranks != wanted:
            raise ConfigError(
                f"plan.tables.{name}.ranks: got {ranks}, wanted all ranks of one host, such as {wanted}"
            )
    return tuple(ranks)


def settled(said: Forced, world: World) -> tuple[Sharding, str] | None:
    """The sharding and exchange of a table of which everything is said; None: something is to be chosen."""
    if world.num_ranks == 1:
        return row_wise(1), "rows"
    if said.kind == "replicated":
        return replicated(world.num_ranks), "replicated"
    if said.kind is None or said.exchange is None:
        return None
    if said.ranks is not None:
        return on_ranks(said.kind, said.ranks, world), said.exchange
    if said.kind in CUT:
        return everywhere(said.kind, world), said.exchange
    if said.kind == "row_wise":
        return row_wise_in(world), said.exchange
    if said.kind == "host_wise" and world.num_hosts == 1:
        return host_wise(world, 0), said.exchange
    return None


def is_settled(config: PlanConfig, tables: Sequence[Table], world: World) -> bool:
    """Return whether nothing is left to be chosen, hot rows included. Raises as `forced_by`."""
    has_hot = any(table.hot_rows for table in config.tables.values())
    if world.num_ranks > 1 and has_hot:
        return False
    said = forced_by(config, tables, world).values()
    return all(settled(each, world) is not None for each in said)
