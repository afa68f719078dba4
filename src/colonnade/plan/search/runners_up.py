"""Runners-up of a decision: the best states of other kinds, which a run times beside the predicted fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from colonnade.plan.search.candidates import Option
from colonnade.plan.search.search import Search, State

MAX_PER_EXCHANGE = 3
"""Largest number of states with one exchange, the decision's included: others are more likely to differ."""


def build_runner_up_states(search: Search, best: State, count: int) -> list[State]:
    """Build up to `count` states in which most tables have other options than in `best`, fastest first.

    The tables under the option that costs most, or all tables, get another option; the rest is as in `best`. States
    that do not fit in memory or cannot run are left out."""
    main = _find_main_option(search, best)
    main_tables = [t for t, option in enumerate(_list_options(best)) if option == main]
    every_table = range(len(search.loads))
    states: list[tuple[float, Option, State]] = []
    for option in dict.fromkeys(option for options in search.options for option in options):
        if option == main:
            continue
        variants = [
            _change_tables(search, best, option, tables) for tables in (main_tables, every_table)
        ]
        state = min(variants, key=search.compute_objective)
        objective = search.compute_objective(state)
        saves_nothing = state.partials is not None and not state.partials.consumers
        if objective == float("inf") or saves_nothing or state.chosen == best.chosen:
            continue
        states.append((objective, option, state))
    runners_up: list[State] = []
    num_with_exchange = Counter([main[0]])
    for _, (exchange, _), state in sorted(states, key=lambda entry: entry[0]):
        is_new = all(state.chosen != other.chosen for other in runners_up)
        if is_new and num_with_exchange[exchange] < MAX_PER_EXCHANGE and len(runners_up) < count:
            num_with_exchange[exchange] += 1
            runners_up.append(search.recompute_state_costs(state))
    return runners_up


def _list_options(state: State) -> list[Option]:
    """Return the exchange and kind of sharding of each table."""
    return [(exchange, sharding.kind) for exchange, sharding in state.chosen]


def _find_main_option(search: Search, state: State) -> Option:
    """Return the option with the most predicted seconds of all tables that have a choice; of all, if none has."""
    seconds: Counter[Option] = Counter()
    for t, option in enumerate(_list_options(state)):
        if len(search.options[t]) > 1:
            seconds[option] += search.predict_balanced_seconds(t, *state.chosen[t])  # type: ignore[assignment]
    return max(seconds, key=lambda option: seconds[option]) if seconds else _list_options(state)[0]


def _change_tables(search: Search, best: State, option: Option, tables: Collection[int]) -> State:
    """Return `best` with this option for those of the tables that may have it, each where it costs least."""
    moved = [t for t in search.order_tables() if t in tables and option in search.options[t]]
    state = search.empty_state()
    state.chosen = list(best.chosen)
    for t in range(len(search.loads)):
        if t not in moved:
            search.add_table_costs(state, t, *best.chosen[t])
    for t in moved:
        search.place_table(state, t, option)
    return state
