"""Choice of towers: whether a model's tower modules are worth it, where their tables would be stored, and how far
operators inside towers compress what leaves them.

What an operator gives is its tables', by the widths of the fields it takes: together they sum to the truth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from colonnade.exchange.operator_cut import sets
from colonnade.plan.cost.comm_volume import ExchangeName
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.search.candidates import Choice, Forced, Memory, Option
from colonnade.topology.sharding import Kind
from colonnade.topology.towers import tower_ranks
from colonnade.topology.world import World


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Bytes of a sample more than its values, most of them less than 0; by table."""

    inside: Mapping[int, int] = field(default_factory=dict)
    """Consumers that are evaluated inside, and the tower of each."""
    values: Mapping[int, float] = field(default_factory=dict)
    gradients: Mapping[int, float] = field(default_factory=dict)
    asked: Mapping[int, float] = field(default_factory=dict)
    """Of a rank's batch, to all owners: weights of lookups whose bags are split and divided there."""


def narrowed(
    model: ModelLoad,
    towers: Sequence[int | None],
    num_owners: Sequence[int],
    cut: Sequence[bool],
    exchanges: Sequence[str],
) -> Narrowed:
    """By table: `towers`, where it goes by one; on how many ranks its bags come together, before they are pooled;
    whether its rows are `cut` by columns; its exchange."""
    fields = model.fields
    able = {}
    for c, consumer in enumerate(model.consumers):
        tables = {fields[f].table for f in consumer.fields}
        of_towers, of_exchanges = {towers[t] for t in tables}, {exchanges[t] for t in tables}
        can_be_inside = consumer.inside_width is not None and not any(cut[t] for t in tables)
        if can_be_inside and len(of_towers) == len(of_exchanges) == 1 and of_towers != {None}:
            able[str(c)] = next(iter(of_towers))
    if not able:
        return Narrowed()

    def needed(some: Sequence[str]) -> set[int]:
        taken = {f for each in model.consumers for f in each.fields}
        others = [each for c, each in enumerate(model.consumers) if str(c) not in some]
        alone = {f for f in range(len(fields)) if f not in taken}
        return alone.union(*(each.fields for each in others))

    def floats(some: Sequence[str]) -> float:
        widths = sum(model.consumers[int(c)].inside_width or 0 for c in some)
        return widths + sum(fields[f].dim for f in needed(some))

    best: tuple[str, ...] = ()
    for some in sets(list(able), floats):
        if floats(some) < floats(best):
            best = tuple(some)
    inside = {int(c): tower for c in best if (tower := able[c]) is not None}
    return _bytes_of(model, best, needed(best), num_owners, inside)


def _bytes_of(
    model: ModelLoad,
    names: Sequence[str],
    needed: Collection[int],
    num_owners: Sequence[int],
    inside: Mapping[int, int],
) -> Narrowed:
    """Count by table what travels otherwise where the consumers of these `names` are evaluated `inside` towers.

    needed: fields whose values leave their tower all the same.
    """
    fields = model.fields
    values, gradients, id_bytes = dict[int, float](), dict[int, float](), dict[int, float]()
    weighed = set()
    for f in {f for name in names for f in model.consumers[int(name)].fields}:
        each = fields[f]
        if f not in needed:
            values[each.table] = values.get(each.table, 0.0) - each.value_bytes
            gradients[each.table] = gradients.get(each.table, 0.0) - each.gradient_bytes
        if each.added_bytes and num_owners[each.table] > 1 and each.feature not in weighed:
            weighed.add(each.feature)
            id_bytes[each.table] = id_bytes.get(each.table, 0.0) + each.added_bytes
    for name in names:
        consumer = model.consumers[int(name)]
        width = sum(fields[f].dim for f in consumer.fields)
        for f in consumer.fields:
            table, part = fields[f].table, fields[f].dim / width
            values[table] = values.get(table, 0.0) + part * consumer.inside_value_bytes
            gradients[table] = gradients.get(table, 0.0) + part * consumer.inside_gradient_bytes
    return Narrowed(inside, values, gradients, id_bytes)


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
