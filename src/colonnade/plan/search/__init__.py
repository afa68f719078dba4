"""Planner: search for the fastest sharding and exchange of each table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from colonnade.hops.kinds import BY_TOWERS
from colonnade.hops.load import TableLoad
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad, add_squares
from colonnade.plan.cost.partials import check_tables_with_partials
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search.candidates import OPTIONS, Constraint, Memory, Option, PlanDecision
from colonnade.plan.search.explanation import explain_choice
from colonnade.plan.search.initial_candidates import build_initial_states
from colonnade.plan.search.runners_up import build_runner_up_states
from colonnade.plan.search.search import Search, State
from colonnade.topology.sharding import Kind
from colonnade.topology.towers import list_tower_ranks
from colonnade.topology.world import World

KIND: Kind = "table_wise"


def choose(
    loads: Sequence[TableLoad],
    world: World,
    *,
    memory: Memory | None = None,
    rates: Sequence[RowRate] = (),
    forced: Mapping[str, Constraint] | None = None,
    options: Collection[Option] = OPTIONS,
    is_fetched_ahead: bool = False,
    model: ModelLoad | None = None,
    towers: int | None = None,
    num_runners_up: int = 0,
) -> PlanDecision:
    """Choose the fastest of `options` for each table under the constraints `forced` (by table name).

    rates: measured speeds of gathering and updating rows, and of planning and packing lookups. is_fetched_ahead:
    whether staleness allows to fetch values early. model: consumers of the tables' fields; `partials` is only
    considered with it. towers: number of towers, default one for each host. num_runners_up: largest number of decisions
    of other kinds to return beside it. Raises ConfigError for constraints that cannot be met."""
    if model is not None:
        loads = add_squares(loads, model)
    search = Search(
        loads,
        world,
        memory or Memory(),
        rates,
        forced or {},
        options,
        is_fetched_ahead,
        model,
        towers or world.num_hosts,
    )
    initial_states = list(build_initial_states(search))
    if search.is_large:
        initial_states = sorted(initial_states, key=search.compute_objective)[:2]
    states = [search.improve_by_local_search(state) for state in initial_states]
    best = min(states, key=search.compute_objective)
    others = build_runner_up_states(search, best, num_runners_up) if num_runners_up else []
    for state in (best, *others):
        search.apply_tower_compression(state)
    check_tables_with_partials(best.partials, search.partials.model, loads, best.chosen)
    without_towers = explain_choice(search, best, _find_partials_delay(search, states, best))
    decisions = [without_towers]
    for exchange in BY_TOWERS:
        in_towers = model and constrain_to_towers(
            loads,
            world,
            model,
            search.num_towers,
            memory=search.memory,
            forced=forced or {},
            options=options,
            exchange=exchange,
        )
        if in_towers:
            constraints = {**(forced or {}), **in_towers}
            other = choose(
                loads,
                world,
                memory=memory,
                rates=rates,
                forced=constraints,
                options=options,
                is_fetched_ahead=is_fetched_ahead,
                model=model,
                towers=towers,
            )
            decisions.append(unforce_tables(other, without_towers, in_towers))
    choice = min(decisions, key=lambda decision: decision.seconds.step)
    if not num_runners_up:
        return choice
    decisions += [explain_choice(search, state, None) for state in others]
    runners_up = sorted(
        (decision for decision in decisions if decision is not choice),
        key=lambda decision: decision.seconds.step,
    )
    return replace(choice, runners_up=tuple(runners_up[:num_runners_up]))


def constrain_to_towers(
    loads: Sequence[TableLoad],
    world: World,
    model: ModelLoad,
    num_towers: int,
    *,
    memory: Memory,
    forced: Mapping[str, Constraint],
    options: Collection[Option],
    exchange: str,
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


def _find_partials_delay(search: Search, states: Sequence[State], best: State) -> float | None:
    """Return the seconds that a step takes longer in the best state with partials; None: there is none."""
    steps = [
        search.compute_objective(state)
        for state in states
        if state.partials is not None and state.partials.consumers
    ]
    return max(min(steps) - search.compute_objective(best), 0.0) if steps else None
