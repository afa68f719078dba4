"""Complete plans that the search begins with, and plans of other kinds that a run times beside its result.

Several plans begin, because some tables only gain if they change together. Functions of a `Search`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from colonnade.plan.search.candidates import Option
from colonnade.plan.search.search import Search, State
from colonnade.topology.sharding import COLUMN_KINDS, Kind, host_wise, row_wise, table_wise

DEFAULT: Option = ("rows", "row_wise")
NUM_PARTIALS_STATES = 2
"""Number of best initial candidates with partials to continue from."""
MAX_PER_EXCHANGE = 3
"""Largest number of states with one exchange, the decision's included: others are more likely to differ."""


def build_initial_states(search: Search) -> Iterator[State]:
    """Build the initial candidates: all tables row-wise; then plans with fewer and more exchanges.

    The latter choose each table's option by its cost in a balanced world, and put the largest tables first on the
    least loaded ranks."""
    first = _build_search_state(
        search, lambda t, options: DEFAULT if DEFAULT in options else options[0]
    )
    search.scale = search.predict_step_seconds(first).step
    yield first
    names = {exchange for options in search.options for exchange, _ in options}
    names -= {"partials"}
    singles: list[set[str]] = [{name} for name in sorted(names)]
    pairs: list[set[str]] = [{"rows", "pooled"}, {"rows", "replicated"}]
    for exchanges in (*singles, *pairs, names):
        if exchanges <= names:
            yield _build_search_state(
                search,
                lambda t, options, exchanges=exchanges: _find_cheapest_balanced_option(
                    search, t, options, exchanges
                ),
            )
    kinds: list[Kind] = ["row_wise", "table_wise"]
    kinds += ["host_wise"] if search.has_hosts else []
    with_partials = [
        _build_search_state(
            search,
            lambda t, options, group=group, kind=kind: _choose_partials_option(
                search, t, options, group, kind, names
            ),
        )
        for group in (search.partials.table_groups)
        for kind in kinds
    ]
    yield from sorted(with_partials, key=search.compute_objective)[:NUM_PARTIALS_STATES]


def _choose_partials_option(
    search: Search,
    table_index: int,
    options: Sequence[Option],
    table_group: Sequence[int],
    sharding_kind: Kind,
    other_exchanges: Collection[str],
) -> Option:
    """Return the option with `partials` for a table of the group, with this kind of sharding if possible.

    Other tables get the cheapest option with the exchanges `other_exchanges`."""
    with_partials = [option for option in options if option[0] == "partials"]
    if table_index not in table_group or not with_partials:
        return _find_cheapest_balanced_option(search, table_index, options, other_exchanges)
    if ("partials", sharding_kind) in with_partials:
        return "partials", sharding_kind
    return with_partials[-1]


def _build_search_state(search: Search, pick_option: Callable[..., Option]) -> State:
    """Build a state table by table. pick_option: called with a table's index and its options."""
    state = search.empty_state()
    state.chosen = [("rows", row_wise(1))] * len(search.loads)
    for t in search.order_tables():
        search.place_table(state, t, pick_option(t, search.options[t]))
    return state


def _find_cheapest_balanced_option(
    search: Search, table_index: int, options: Sequence[Option], allowed_exchanges: Collection[str]
) -> Option:
    """Return the option with one of `allowed_exchanges` that costs a table least if all ranks and links are equally
    loaded."""
    options = [option for option in options if option[0] in allowed_exchanges] or list(options)
    world = search.world
    examples = {
        **search.fixed_shardings,
        "host_wise": host_wise(world, 0),
        "table_wise": table_wise(int(search.owners[0])),
    }
    for _, kind in options:
        if kind in COLUMN_KINDS:
            examples[kind] = search.propose_shardings(search.empty_state(), table_index, kind)[0]

    def predict_most_seconds(option: Option) -> float:
        # By itself, a table under `partials` costs at most what it does under `pooled`.
        exchange = "pooled" if option[0] == "partials" else option[0]
        return search.predict_balanced_seconds(table_index, exchange, examples[option[1]])

    return min(options, key=predict_most_seconds)


def build_runner_up_states(search: Search, best_state: State, max_states: int) -> list[State]:
    """Build up to `max_states` states in which most tables have other options than in `best_state`, fastest first.

    The tables under the option that costs most, or all tables, get another option; the rest is as in `best_state`.
    States that do not fit in memory or cannot run are left out."""
    main = _find_main_option(search, best_state)
    main_tables = [t for t, option in enumerate(_list_options(best_state)) if option == main]
    every_table = range(len(search.loads))
    states: list[tuple[float, Option, State]] = []
    for option in dict.fromkeys(option for options in search.options for option in options):
        if option == main:
            continue
        variants = [
            _change_tables(search, best_state, option, tables)
            for tables in (main_tables, every_table)
        ]
        state = min(variants, key=search.compute_objective)
        objective = search.compute_objective(state)
        saves_nothing = state.partials is not None and not state.partials.consumers
        if objective == float("inf") or saves_nothing or state.chosen == best_state.chosen:
            continue
        states.append((objective, option, state))
    runners_up: list[State] = []
    num_with_exchange = Counter([main[0]])
    for _, (exchange, _), state in sorted(states, key=lambda entry: entry[0]):
        is_new = all(state.chosen != other.chosen for other in runners_up)
        if (
            is_new
            and num_with_exchange[exchange] < MAX_PER_EXCHANGE
            and len(runners_up) < max_states
        ):
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


def _change_tables(
    search: Search, best_state: State, option: Option, table_indices: Collection[int]
) -> State:
    """Return `best_state` with this option for those of the tables that may have it, each where it costs least."""
    moved = [t for t in search.order_tables() if t in table_indices and option in search.options[t]]
    state = search.empty_state()
    state.chosen = list(best_state.chosen)
    for t in range(len(search.loads)):
        if t not in moved:
            search.add_table_costs(state, t, *best_state.chosen[t])
    for t in moved:
        search.place_table(state, t, option)
    return state
