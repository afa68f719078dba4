"""Choice of towers: placement of the tables of tower modules, and compression of values by operators inside towers.

The bytes of an operator's result are divided among its tables by the widths of its fields, so that their sum is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from colonnade.exchange.operator_cut import propose_consumer_sets
from colonnade.plan.cost.comm_volume import ExchangeName
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.search.candidates import Constraint, Memory, Option, PlanDecision
from colonnade.topology.sharding import Kind
from colonnade.topology.towers import list_tower_ranks
from colonnade.topology.world import World


@dataclass(frozen=True, slots=True)
class TowerCompression:
    """Change of the bytes between towers by operators inside towers: per sample, by table, mostly negative."""

    inside: Mapping[int, int] = field(default_factory=dict)
    """Tower of each consumer that is evaluated inside one, by index of the consumer."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Additional bytes of values."""
    gradients: Mapping[int, float] = field(default_factory=dict)
    """Additional bytes of gradients."""
    weight_bytes: Mapping[int, float] = field(default_factory=dict)
    """Bytes of lookup weights that a rank's batch sends to all owners, for bags that are split over owners."""


def find_tower_compression(
    model: ModelLoad,
    towers: Sequence[int | None],
    num_owners: Sequence[int],
    is_cut: Sequence[bool],
    exchanges: Sequence[str],
) -> TowerCompression:
    """Find the consumers to evaluate inside towers so that the fewest floats leave them.

    By table: towers, the tower with all its rows, if any; num_owners, ranks that hold parts of its bags before they are
    pooled; is_cut, whether its rows are cut by columns; exchanges."""
    fields = model.fields
    candidates = {}
    for c, consumer in enumerate(model.consumers):
        tables = {fields[f].table for f in consumer.fields}
        table_towers, table_exchanges = {towers[t] for t in tables}, {exchanges[t] for t in tables}
        can_be_inside = consumer.inside_width is not None and not any(is_cut[t] for t in tables)
        if (
            can_be_inside
            and len(table_towers) == len(table_exchanges) == 1
            and table_towers != {None}
        ):
            candidates[str(c)] = next(iter(table_towers))
    if not candidates:
        return TowerCompression()

    def find_sent_fields(inside: Sequence[str]) -> set[int]:
        read = {f for consumer in model.consumers for f in consumer.fields}
        others = [consumer for c, consumer in enumerate(model.consumers) if str(c) not in inside]
        unread = {f for f in range(len(fields)) if f not in read}
        return unread.union(*(consumer.fields for consumer in others))

    def count_floats(inside: Sequence[str]) -> float:
        widths = sum(model.consumers[int(c)].inside_width or 0 for c in inside)
        return widths + sum(fields[f].dim for f in find_sent_fields(inside))

    best: tuple[str, ...] = ()
    for subset in propose_consumer_sets(list(candidates), count_floats):
        if count_floats(subset) < count_floats(best):
            best = tuple(subset)
    inside = {int(c): tower for c in best if (tower := candidates[c]) is not None}
    return _count_byte_changes(model, best, find_sent_fields(best), num_owners, inside)


def _count_byte_changes(
    model: ModelLoad,
    names: Sequence[str],
    sent_fields: Collection[int],
    num_owners: Sequence[int],
    inside: Mapping[int, int],
) -> TowerCompression:
    """Count the change of bytes by table if the consumers `names` are evaluated inside towers.

    sent_fields: fields with values that leave their tower all the same.
    """
    fields = model.fields
    values, gradients, weight_bytes = dict[int, float](), dict[int, float](), dict[int, float]()
    weighted = set()
    for f in {f for name in names for f in model.consumers[int(name)].fields}:
        load = fields[f]
        if f not in sent_fields:
            values[load.table] = values.get(load.table, 0.0) - load.value_bytes
            gradients[load.table] = gradients.get(load.table, 0.0) - load.gradient_bytes
        if load.added_bytes and num_owners[load.table] > 1 and load.feature not in weighted:
            weighted.add(load.feature)
            weight_bytes[load.table] = weight_bytes.get(load.table, 0.0) + load.added_bytes
    for name in names:
        consumer = model.consumers[int(name)]
        width = sum(fields[f].dim for f in consumer.fields)
        for f in consumer.fields:
            table, part = fields[f].table, fields[f].dim / width
            values[table] = values.get(table, 0.0) + part * consumer.inside_value_bytes
            gradients[table] = gradients.get(table, 0.0) + part * consumer.inside_gradient_bytes
    return TowerCompression(inside, values, gradients, weight_bytes)


KIND: Kind = "table_wise"


def constrain_to_towers(
    loads: Sequence[TableLoad],
    world: World,
    model: ModelLoad,
    num_towers: int,
    *,
    memory: Memory,
    forced: Mapping[str, Constraint],
    options: Collection[Option],
    exchange: ExchangeName,
) -> dict[str, Constraint]:
    """Return constraints, by table name, that put the tables of each tower module on ranks of one tower.

    Whole tables are balanced over towers and ranks by bytes, with this exchange. Returns no constraints on one host, if
    memory has no room, or if no module has tables that are all unconstrained."""
    if world.num_hosts < 2 or world.has_servers or (exchange, KIND) not in options:
        return {}
    groups = [
        tables
        for tables in _find_module_tables(model)
        if all(loads[t].is_pooled and _is_free(forced.get(loads[t].name)) for t in tables)
    ]
    towers = list_tower_ranks(world, num_towers)
    rank_bytes = dict.fromkeys(range(world.num_ranks), 0.0)
    constraints: dict[str, Constraint] = {}
    for tables in sorted(groups, key=lambda group: -sum(loads[t].total_bytes for t in group)):
        ranks = min(towers, key=lambda tower: sum(rank_bytes[rank] for rank in tower))
        for t in sorted(tables, key=lambda t: -loads[t].total_bytes):
            rank = min(ranks, key=lambda rank: rank_bytes[rank])
            rank_bytes[rank] += loads[t].total_bytes
            constraints[loads[t].name] = Constraint(KIND, exchange, (rank,))
    if memory.bytes is not None and max(rank_bytes.values()) > memory.bytes:
        return {}
    return constraints


def unforce_tables(
    choice: PlanDecision, before: PlanDecision, names: Collection[str]
) -> PlanDecision:
    """Return `choice` with the tables `names` as free decisions, not constraints; `before` supplies alternatives."""
    old = {table.name: table for table in before.tables}
    tables = tuple(
        replace(table, is_forced=False, others=(old[table.name].chosen, *old[table.name].others))
        if table.name in names
        else table
        for table in choice.tables
    )
    return replace(choice, tables=tables)


def _find_module_tables(model: ModelLoad) -> list[set[int]]:
    """Return groups of tables that must be in one tower: those of each module, merged if modules share a table."""
    groups: list[set[int]] = []
    for consumer in model.consumers:
        if not _is_compressing(model, consumer):
            continue
        tables = {model.fields[f].table for f in consumer.fields}
        shared = [group for group in groups if group & tables]
        groups = [group for group in groups if not group & tables]
        groups.append(tables.union(*shared))
    return groups


def _is_compressing(model: ModelLoad, consumer: ConsumerLoad) -> bool:
    """Return whether a consumer is a tower module with a result smaller than its fields."""
    floats = sum(model.fields[f].dim for f in consumer.fields)
    inside = consumer.inside_width
    return consumer.is_whole and inside is not None and inside < floats


def _is_free(constraint: Constraint | None) -> bool:
    return constraint is None or (
        constraint.exchange is None and constraint.ranks is None and constraint.kind in (None, KIND)
    )
