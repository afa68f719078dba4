"""Explanation of a decision: costs table by table, alternatives of each table, and reasons in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colonnade.hops.kinds import BY_TOWERS, CHANNELS, Flow
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad
from colonnade.plan.cost.partials import Floats, Partials, is_cut
from colonnade.plan.search.candidates import (
    OPTIONS,
    Constraint,
    ConsumerChoice,
    PlanDecision,
    TableChoice,
    TableCost,
)
from colonnade.plan.search.search import Search, State
from colonnade.sizes import format_digits
from colonnade.topology.sharding import Kind, Sharding


def explain_consumers(
    search: Search, state: State, partials_delay: float | None
) -> tuple[ConsumerChoice, ...]:
    """Explain for each consumer whether partials or values are sent, and why.

    partials_delay: seconds that a step takes longer with partials, if known."""
    partials = search.partials
    model = partials.model
    inside = state.tower_compression.inside
    exchanges = [exchange for exchange, _ in state.chosen]
    names = [load.name for load in search.loads]
    owners = _list_owners(state)
    are_cut = is_cut(owners)
    remote = () if state.partials is None else state.partials.consumers
    floats = partials.dims * partials.rows * owners.sum(1)[partials.tables]
    choices = []
    for c, consumer in enumerate(model.consumers):
        values = float(floats[partials.reads[c]].sum())
        if c in inside:
            reason = f"evaluated inside tower {inside[c]}, which sends fewer floats"
            width = float(consumer.inside_width or 0)
            choices.append(ConsumerChoice(consumer.name, True, width, values, reason))
            continue
        partial = None if consumer.width is None else partials.partial_floats(c, owners)
        tables = partials.tables_of(consumer)
        others = [t for t in tables if exchanges[t] != "partials"]
        cut = [names[t] for t in tables if are_cut[t]]
        if c in remote:
            reason = _explain_partials(consumer, state, names, tables)
        elif len({exchanges[t] for t in tables}) == 1 and exchanges[tables[0]] in BY_TOWERS:
            reason = "its fields are not all in one tower, or its result there is not smaller than values"
        elif partial is None:
            reason = consumer.why_not_partial or "its operator has no partial that can be summed"
        elif cut:
            reason = f"rows of table {cut[0]} are cut by columns"
        elif others:
            reason = _explain_other_exchange(state, names, tables)
            if not remote and partials_delay is not None:
                reason += (
                    f"; with partials a step takes {format_digits(1e3 * partials_delay)} ms more"
                )
            elif partial >= values:
                reason += f"; a partial is {partial:,.0f} floats, values {values:,.0f}"
        else:
            reason = _explain_partials_save_nothing(partials, c, remote, floats, partial)
        split = _find_split_bags(model, consumer, owners)
        if split and partial is not None and c not in remote and others:
            reason += f"; bags of {split[0]} are split"
        choices.append(
            ConsumerChoice(
                consumer.name, c in remote, partial, values, reason, consumer.depends_on_hot_rows
            )
        )
    return tuple(choices)


def _list_owners(state: State) -> Floats:
    """Return the part of each table's columns that a rank owns rows of, under any exchange, (T, N)."""
    owners = np.zeros_like(state.owners)
    for t, (_, sharding) in enumerate(state.chosen):
        owners[t, list(sharding.ranks)] = 1 / sharding.slices
    return owners


def _find_split_bags(model: ModelLoad, consumer: ConsumerLoad, owners: Floats) -> list[str]:
    """Return the fields of a consumer that needs whole bags with bags on several ranks. owners: `_list_owners`."""
    fields = [model.fields[f] for f in sorted(consumer.whole_bags)]
    return [f.name for f in fields if f.has_bags and (owners[f.table] > 0).sum() > 1]


def _explain_other_exchange(state: State, names: Sequence[str], tables: Sequence[int]) -> str:
    """Name the exchange of a consumer's tables that are not under `partials`. names: of all tables."""
    exchanges = [state.chosen[t][0] for t in tables]
    others = [t for t in tables if state.chosen[t][0] != "partials"]
    if len(others) == len(tables):
        return f"its tables are under {', '.join(sorted(set(exchanges)))}"
    return f"table {names[others[0]]} is under {state.chosen[others[0]][0]}"


def _explain_partials(
    consumer: ConsumerLoad, state: State, table_names: Sequence[str], tables: Sequence[int]
) -> str:
    """Explain why partials of a consumer are sent. table_names: of all tables. tables: those of the consumer."""
    apart = [table_names[t] for t in tables if state.apart[t]]
    reason = "rows of its sequence stay on their owners" if consumer.sequences else "fewer floats"
    if consumer.hot_table:
        reason += f"; table {consumer.hot_table}, which has hot rows, sends values"
    if apart:
        reason += (
            f"; the samples' ranks add table {apart[0]}, which is cut by columns or replicated"
        )
    return reason


def _explain_partials_save_nothing(
    partials: Partials,
    consumer_index: int,
    remote_consumers: Sequence[int],
    field_floats: Floats,
    partial_floats: float,
) -> str:
    """Explain why partials of consumer c would not save floats. field_floats (F,): of each field's values."""
    reads = partials.reads
    model = partials.model
    values = float(field_floats[reads[consumer_index]].sum())
    if partial_floats >= values:
        return f"costs more: {partial_floats:,.0f} floats, not {values:,.0f}"
    others = [
        k
        for k in range(len(model.consumers))
        if k != consumer_index
        and k not in remote_consumers
        and (reads[k] & reads[consumer_index]).any()
    ]
    if not others:
        return f"saves nothing: {partial_floats:,.0f} floats, not {values:,.0f}"
    own_fields = reads[consumer_index] & ~reads[others].any(0)
    other_names = ", ".join(model.consumers[k].name for k in others)
    if not own_fields.any():
        return f"values are sent anyway for {other_names}"
    own_floats = float(field_floats[own_fields].sum())
    return (
        f"values are sent anyway for {other_names}, all but {own_floats:,.0f} floats; a partial is "
        f"{partial_floats:,.0f}"
    )


def explain_choice(
    search: Search, best_state: State, partials_delay_seconds: float | None
) -> PlanDecision:
    """Build the planner's decision from the best state, with costs and alternatives of each table.

    partials_delay_seconds: seconds that the best state with partials takes longer; None: there is none."""
    tables = []
    for t, load in enumerate(search.loads):
        search.add_table_costs(best_state, t, *best_state.chosen[t], -1.0)
        objective = search.compute_objective_with_table(best_state, t, *best_state.chosen[t])
        chosen = predict_table_cost(search, best_state, t, *best_state.chosen[t], objective)
        others = []
        for exchange, kind in OPTIONS:
            if (exchange, kind) == chosen.option or not _is_alternative(search, t, exchange, kind):
                continue
            costs = [
                predict_table_cost(search, best_state, t, exchange, sharding, objective)
                for sharding in search.propose_shardings(best_state, t, kind)
            ]
            others += sorted(costs, key=lambda cost: cost.more)[:1]
        search.add_table_costs(best_state, t, *best_state.chosen[t])
        others.sort(key=lambda cost: cost.more)
        tables.append(
            TableChoice(load.name, chosen, tuple(others), search.forced[t] != Constraint())
        )
    used = [exchange for exchange, count in best_state.num_tables.items() if count]
    sent = dict.fromkeys(tables[0].chosen.sent, 0.0)
    for table in tables:
        for key, size in table.chosen.sent.items():
            sent[key] += size
    _add_bytes(search, sent, search.list_fixed_flows(used), None)
    _, fetch, push = best_state.links.max(1).tolist()
    seconds = search.predict_step_seconds(best_state)
    # Values fetched ahead cost no waiting, so halving their bytes saves nothing.
    halved_seconds = (push + (0.0 if seconds.is_fetched_ahead else fetch)) / 2
    consumers = explain_consumers(search, best_state, partials_delay_seconds)
    return PlanDecision(tuple(tables), seconds, sent, halved_seconds, consumers)


def _is_alternative(search: Search, table_index: int, exchange: str, kind: Kind) -> bool:
    """Return whether the cost of an option is shown for a table: it could have it if its constraint allowed it.

    The cost of one table alone in a tower is meaningless, as is that under `partials` where no table moves to it."""
    if exchange in BY_TOWERS or not search.can_shard(table_index, kind):
        return False
    if exchange == "partials" and search.has_fixed_partials:
        return False
    is_worth_trying = search.is_worth_trying(table_index, exchange)
    return is_worth_trying and search.find_refusal(table_index, exchange) is None


def predict_table_cost(
    search: Search,
    search_state: State,
    table_index: int,
    exchange_name: str,
    sharding: Sharding,
    state_objective: float,
) -> TableCost:
    """Predict the cost of table t under an exchange and sharding, given the other tables of `search_state`.

    search_state: without table t. state_objective: of the state with the chosen option of table t."""
    flows, _ = search.predict_table_costs(table_index, exchange_name, sharding)
    seconds = search.predict_balanced_seconds(table_index, exchange_name, sharding)
    is_chosen = search_state.chosen[table_index] == (exchange_name, sharding)
    if is_chosen and exchange_name in BY_TOWERS and search.links.is_in_towers(sharding):
        compression = search_state.tower_compression
        flows = (*flows, *compression.list_flows(table_index, search.samples, len(sharding.ranks)))
    if exchange_name == "partials":
        joint_flows = _list_partials_flows(search, search_state, table_index, sharding)
        flows = (*flows, *joint_flows)
        seconds += sum(
            flow.bytes * search.links.load(flow.pattern, sharding).balanced
            for flow in joint_flows
            if flow.channel != "route"
        )
    sent: dict[tuple[str, str], float] = {
        (channel, link): 0.0 for channel in CHANNELS for link in ("local", "remote")
    }
    _add_bytes(search, sent, flows, sharding)
    more = (
        search.compute_objective_with_table(search_state, table_index, exchange_name, sharding)
        - state_objective
    )
    return TableCost(exchange_name, sharding, sent, seconds, more)


def _add_bytes(
    search: Search,
    sent: dict[tuple[str, str], float],
    flows: Sequence[Flow],
    sharding: Sharding | None,
) -> None:
    """Add the bytes that a rank sends for these flows, the mean over ranks, to `sent`, by (channel, link)."""
    for flow in flows:
        for link, count in search.links.load(flow.pattern, sharding).by_link.items():
            sent[flow.channel, link] += flow.bytes * count


def _list_partials_flows(
    search: Search, state: State, table_index: int, sharding: Sharding
) -> list[Flow]:
    """List the values, partials and gradients that are sent for a table under `partials`, given all other tables."""
    search.add_table_costs(state, table_index, "partials", sharding)
    partials = state.partials
    assert partials is not None
    parts = search.partials.predict_table_bytes(partials, state.owners, table_index)
    search.add_table_costs(state, table_index, "partials", sharding, -1.0)
    num_owners = len(sharding.ranks)
    flows = [Flow("route", "owners", partials.weight_bytes.get(table_index, 0.0) / num_owners)]
    for channel, part in zip(CHANNELS[1:], parts, strict=True):
        flows.append(Flow(channel, "owners", part.direct * search.samples / num_owners))
        flows.append(Flow(channel, "host_sums", part.host_summed * search.samples))
    return flows
