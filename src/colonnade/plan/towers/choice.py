"""Whether a model's tower modules are worth their towers: where their tables would lie, for the choice to be made both
ways. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from colonnade.plan.chosen import Choice, Forced, Memory, Option
from colonnade.plan.consumers import ConsumerLoad, ModelLoad
from colonnade.plan.flows import ExchangeName
from colonnade.plan.loads import TableLoad
from colonnade.topology.sharding import Kind
from colonnade.topology.towers import tower_ranks
from colonnade.topology.world import World

KIND: Kind = "table_wise"


def inside_towers(
    loads: Sequence[TableLoad],
    world: World,
    model: ModelLoad,
    num_towers: int,
    *,
    memory: Memory,
    forced: Mapping[str, Forced],
    options: Collection[Option],
    exchange: ExchangeName,
) -> dict[str, Forced]:
    """By name: whole tables of tower modules on ranks of one tower for each, towers and ranks alike in bytes, and that
    exchange. Empty where there are none of which all tables are free to go there, on one host, or where memory has no
    room."""
    if world.num_hosts < 2 or world.has_servers or (exchange, KIND) not in options:
        return {}
    groups = [
        tables
        for tables in _groups(model)
        if all(loads[t].is_pooled and _is_free(forced.get(loads[t].name)) for t in tables)
    ]
    towers = tower_ranks(world, num_towers)
    held = dict.fromkeys(range(world.num_ranks), 0.0)
    found: dict[str, Forced] = {}
    for tables in sorted(groups, key=lambda some: -sum(loads[t].total_bytes for t in some)):
        ranks = min(towers, key=lambda each: sum(held[rank] for rank in each))
        for t in sorted(tables, key=lambda t: -loads[t].total_bytes):
            rank = min(ranks, key=lambda each: held[each])
            held[rank] += loads[t].total_bytes
            found[loads[t].name] = Forced(KIND, exchange, (rank,))
    if memory.bytes is not None and max(held.values()) > memory.bytes:
        return {}
    return found


def freely(choice: Choice, before: Choice, names: Collection[str]) -> Choice:
    """`choice`, of which those tables were not what a person said: beside them stands what each had `before`."""
    old = {table.name: table for table in before.tables}
    tables = tuple(
        replace(table, is_forced=False, others=(old[table.name].chosen, *old[table.name].others))
        if table.name in names
        else table
        for table in choice.tables
    )
    return replace(choice, tables=tables)


def _groups(model: ModelLoad) -> list[set[int]]:
    """Tables that must lie in one tower: those of each module, and of all that share one."""
    found: list[set[int]] = []
    for consumer in model.consumers:
        if not _is_narrow(model, consumer):
            continue
        mine = {model.fields[f].table for f in consumer.fields}
        shared = [some for some in found if some & mine]
        found = [some for some in found if not some & mine]
        found.append(mine.union(*shared))
    return found


def _is_narrow(model: ModelLoad, consumer: ConsumerLoad) -> bool:
    """A tower module that less leaves than enters."""
    floats = sum(model.fields[f].dim for f in consumer.fields)
    inside = consumer.inside_width
    return consumer.is_whole and inside is not None and inside < floats


def _is_free(said: Forced | None) -> bool:
    return said is None or (
        said.exchange is None and said.ranks is None and said.kind in (None, KIND)
    )
