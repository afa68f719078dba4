"""Initial candidates of the search: several complete plans, because some tables only gain if they change together.

Functions of a `Search`, before any table has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from colonnade.plan.search.candidates import Option
from colonnade.plan.search.cutting import COLUMN_KINDS
from colonnade.plan.search.search import Search, State
from colonnade.topology.sharding import Kind, host_wise, row_wise, table_wise

DEFAULT: Option = ("rows", "row_wise")
NUM_PARTIALS_STATES = 2
"""Number of best initial candidates with partials to continue from."""


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
    group: Sequence[int],
    kind: Kind,
    others: Collection[str],
) -> Option:
    """Return the option with `partials` for a table of the group, with this kind of sharding if possible.

    Other tables get the cheapest option with the exchanges `others`."""
    with_partials = [option for option in options if option[0] == "partials"]
    if table_index not in group or not with_partials:
        return _find_cheapest_balanced_option(search, table_index, options, others)
    if ("partials", kind) in with_partials:
        return "partials", kind
    return with_partials[-1]


def _build_search_state(search: Search, pick_option: Callable[..., Option]) -> State:
    """Build a state table by table. pick_option: called with a table's index and its options."""
    state = search.empty_state()
    state.chosen = [("rows", row_wise(1))] * len(search.loads)
    for t in search.order_tables():
        search.place_table(state, t, pick_option(t, search.options[t]))
    return state


def _find_cheapest_balanced_option(
    search: Search, table_index: int, options: Sequence[Option], exchanges: Collection[str]
) -> Option:
    """Return the option with one of `exchanges` that costs a table least if all ranks and links are equally loaded."""
    options = [option for option in options if option[0] in exchanges] or list(options)
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
