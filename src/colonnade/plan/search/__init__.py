"""Planner: search for the fastest sharding and exchange of each table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from colonnade.hops.kinds import BY_TOWERS
from colonnade.plan.cost.consumers import ModelLoad, add_squares
from colonnade.plan.cost.partials import check_tables_with_partials
from colonnade.plan.search.candidates import Constraint, PlanDecision, Problem
from colonnade.plan.search.explanation import explain_choice
from colonnade.plan.search.search import Search, State
from colonnade.plan.search.states import build_initial_states, build_runner_up_states
from colonnade.topology.sharding import Kind
from colonnade.topology.towers import list_tower_ranks

KIND: Kind = "table_wise"


def choose(problem: Problem, num_runners_up: int = 0) -> PlanDecision:
    """Choose the fastest of OPTIONS for each table under its constraint.

    num_runners_up: largest number of decisions of other kinds to return beside it. Raises ConfigError for constraints
    that cannot be met."""
    model = problem.model
    if model is not None:
        problem = replace(problem, loads=add_squares(problem.loads, model))
    search = Search(problem)
    initial_states = list(build_initial_states(search))
    if search.is_large:
        initial_states = sorted(initial_states, key=search.compute_objective)[:2]
    states = [search.improve_by_local_search(state) for state in initial_states]
    best = min(states, key=search.compute_objective)
    others = build_runner_up_states(search, best, num_runners_up) if num_runners_up else []
    for state in (best, *others):
        search.apply_tower_compression(state)
    check_tables_with_partials(best.partials, search.partials.model, problem.loads, best.chosen)
    without_towers = explain_choice(search, best, _find_partials_delay(search, states, best))
    decisions = [without_towers]
    for exchange in BY_TOWERS:
        in_towers = model and constrain_module_tables_to_towers(problem, model, exchange)
        if in_towers:
            forced = {**problem.forced, **in_towers}
            other = choose(replace(problem, forced=forced))
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


def constrain_module_tables_to_towers(
    problem: Problem, model_load: ModelLoad, exchange_name: str
) -> dict[str, Constraint]:
    """Return constraints, by table name, that put the tables of each tower module on ranks of one tower.

    Whole tables are balanced over towers and ranks by bytes, with this exchange. Returns no constraints on one host, if
    memory has no room, or if no module has tables that are all unconstrained."""
    loads = problem.loads
    world = problem.world
    if world.num_hosts < 2 or world.has_servers:
        return {}
    groups = [
        tables
        for tables in _find_module_tables(model_load)
        if all(loads[t].is_pooled and _is_free(problem.forced.get(loads[t].name)) for t in tables)
    ]
    towers = list_tower_ranks(world, problem.num_towers)
    rank_bytes = dict.fromkeys(range(world.num_ranks), 0.0)
    constraints: dict[str, Constraint] = {}
    for tables in sorted(groups, key=lambda group: -sum(loads[t].total_bytes for t in group)):
        ranks = min(towers, key=lambda tower: sum(rank_bytes[rank] for rank in tower))
        for t in sorted(tables, key=lambda t: -loads[t].total_bytes):
            rank = min(ranks, key=lambda rank: rank_bytes[rank])
            rank_bytes[rank] += loads[t].total_bytes
            constraints[loads[t].name] = Constraint(KIND, exchange_name, (rank,))
    budget = problem.memory.bytes
    if budget is not None and max(rank_bytes.values()) > budget:
        return {}
    return constraints


def unforce_tables(
    forced_decision: PlanDecision, free_decision: PlanDecision, table_names: Collection[str]
) -> PlanDecision:
    """Return `forced_decision` with the tables `table_names` as free decisions, not constraints; `free_decision`
    supplies alternatives."""
    old = {table.name: table for table in free_decision.tables}
    tables = tuple(
        replace(table, is_forced=False, others=(old[table.name].chosen, *old[table.name].others))
        if table.name in table_names
        else table
        for table in forced_decision.tables
    )
    return replace(forced_decision, tables=tables)


def _find_module_tables(model: ModelLoad) -> list[set[int]]:
    """Return groups of tables that must be in one tower: those of each tower module with a result smaller than its
    fields, merged if modules share a table."""
    groups: list[set[int]] = []
    for consumer in model.consumers:
        floats = sum(model.fields[f].dim for f in consumer.fields)
        inside = consumer.inside_width
        if not consumer.is_whole or inside is None or inside >= floats:
            continue
        tables = {model.fields[f].table for f in consumer.fields}
        shared = [group for group in groups if group & tables]
        groups = [group for group in groups if not group & tables]
        groups.append(tables.union(*shared))
    return groups


def _is_free(constraint: Constraint | None) -> bool:
    return constraint is None or (
        constraint.exchange is None and constraint.ranks is None and constraint.kind in (None, KIND)
    )


def _find_partials_delay(
    search: Search, states: Sequence[State], best_state: State
) -> float | None:
    """Return the seconds that a step takes longer in the best state with partials; None: there is none."""
    steps = [
        search.compute_objective(state)
        for state in states
        if state.partials is not None and state.partials.consumers
    ]
    return max(min(steps) - search.compute_objective(best_state), 0.0) if steps else None
