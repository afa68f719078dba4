"""Planner: search for the fastest sharding and exchange of each table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.consumers import ModelLoad, add_squares
from colonnade.plan.cost.partials import check_tables_with_partials
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search.candidates import OPTIONS, Constraint, Memory, Option, PlanDecision
from colonnade.plan.search.explanation import explain_choice
from colonnade.plan.search.initial_candidates import build_initial_states
from colonnade.plan.search.runners_up import build_runner_up_states
from colonnade.plan.search.search import Search
from colonnade.plan.search.tower_choice import constrain_to_towers, unforce_tables
from colonnade.topology.world import World


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
        loads, world, memory or Memory(), rates, forced or {}, options, is_fetched_ahead, model,
        towers or world.num_hosts,
    )  # fmt: skip
    initial_states = list(build_initial_states(search))
    if search.is_large:
        initial_states = sorted(initial_states, key=search.compute_objective)[:2]
    states = [search.improve_by_local_search(state) for state in initial_states]
    best = min(states, key=search.compute_objective)
    others = build_runner_up_states(search, best, num_runners_up) if num_runners_up else []
    for state in (best, *others):
        search.apply_tower_compression(state)
    check_tables_with_partials(best.partials, search.partials.model, loads, best.chosen)
    with_partials = [
        state for state in states if state.partials is not None and state.partials.consumers
    ]
    partials_step = min((search.compute_objective(state) for state in with_partials), default=None)
    partials_delay = (
        None if partials_step is None else max(partials_step - search.compute_objective(best), 0.0)
    )
    without_towers = explain_choice(search, best, partials_delay)
    decisions = [without_towers]
    for exchange in BY_TOWERS:
        in_towers = {} if model is None else constrain_to_towers(
            loads, world, model, search.num_towers, memory=search.memory, forced=forced or {}, options=options,
            exchange=exchange,
        )  # fmt: skip
        if not in_towers:
            continue
        other = choose(
            loads, world, memory=memory, rates=rates, forced={**(forced or {}), **in_towers}, options=options,
            is_fetched_ahead=is_fetched_ahead, model=model, towers=towers,
        )  # fmt: skip
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
