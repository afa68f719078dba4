"""Where the search for a choice begins: from several plans, for where few tables pay only together.

Functions of a `Search`, before any table has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from colonnade.plan.cost.comm_volume import ExchangeName
from colonnade.plan.search.candidates import Option
from colonnade.plan.search.cutting import CUT
from colonnade.plan.search.search import Search, State
from colonnade.topology.sharding import Kind, host_wise, row_wise, table_wise

DEFAULT: Option = ("rows", "row_wise")
TOGETHER = 2
"""Best beginnings with partials that are gone on from."""


def beginnings(search: Search) -> Iterator[State]:
    """All dealt to all ranks; then, with fewer and more exchanges, each table by what it would cost if everything
    were in balance, the largest first to whoever has least."""
    first = _begun(search, lambda t, options: DEFAULT if DEFAULT in options else options[0])
    search.scale = search.seconds(first).step
    yield first
    names = {exchange for options in search.possible for exchange, _ in options}
    names -= {"partials"}
    alone: list[set[ExchangeName]] = [{name} for name in sorted(names)]
    pairs: list[set[ExchangeName]] = [{"rows", "pooled"}, {"rows", "replicated"}]
    for some in (*alone, *pairs, names):
        if some <= names:
            yield _begun(search, lambda t, options, some=some: _balanced(search, t, options, some))
    kinds: list[Kind] = ["row_wise", "table_wise"]
    kinds += ["host_wise"] if search.has_hosts else []
    laid = [
        _begun(
            search,
            lambda t, options, group=group, kind=kind: _together(search, t, options, group, kind, names),
        )
        for group in (search.partials.groups if search.is_known else ())
        for kind in kinds
    ]  # fmt: skip
    yield from sorted(laid, key=search.objective)[:TOGETHER]


def _together(
    search: Search,
    t: int,
    options: Sequence[Option],
    group: Sequence[int],
    kind: Kind,
    others: Collection[str],
) -> Option:
    """A table of the group under `partials`, as that kind of sharding where it may be."""
    mine = [each for each in options if each[0] == "partials"]
    if t not in group or not mine:
        return _balanced(search, t, options, others)
    if ("partials", kind) in mine:
        return "partials", kind
    return mine[-1]


def _begun(search: Search, pick: Callable[..., Option]) -> State:
    """pick: of a table, by number, and its options."""
    state = search.empty()
    state.chosen = [("rows", row_wise(1))] * len(search.loads)
    for t in search.order():
        exchange, kind = pick(t, search.possible[t])
        sharding = min(
            search.shardings(state, t, kind),
            key=lambda each: search.with_(state, t, exchange, each),
        )
        search.add(state, t, exchange, sharding)
        state.chosen[t] = exchange, sharding
    return state


def _balanced(search: Search, t: int, options: Sequence[Option], some: Collection[str]) -> Option:
    options = [each for each in options if each[0] in some] or list(options)
    world = search.world
    anywhere = {
        **search.everywhere, "host_wise": host_wise(world, 0), "table_wise": table_wise(int(search.owners[0])),
    }  # fmt: skip
    for _, kind in options:
        if kind in CUT:
            anywhere[kind] = search.places(search.empty(), t, kind)[0]
    return min(options, key=lambda each: search.mean_seconds(t, _alone(each[0]), anywhere[each[1]]))


def _alone(exchange: ExchangeName) -> ExchangeName:
    """What a table costs at most by itself, whatever others do."""
    return "pooled" if exchange == "partials" else exchange
