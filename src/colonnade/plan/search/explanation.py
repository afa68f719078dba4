"""Explanation of a choice: its cost table by table, beside what else each table could have, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.comm_volume import CHANNELS, MATES_BYTES, TABLE_BYTES, ExchangeName
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad
from colonnade.plan.cost.partials import Floats, Partials, is_cut
from colonnade.plan.cost.paths import blocks_added
from colonnade.plan.cost.tower_paths import HopTraffic
from colonnade.plan.search.candidates import (
    BY_OWNERS,
    OPTIONS,
    Choice,
    ConsumerChoice,
    Cost,
    Forced,
    TableChoice,
)
from colonnade.plan.search.cutting import CUT, most_slices
from colonnade.plan.search.search import Search, State
from colonnade.topology.sharding import Kind, Sharding


def consumer_choices(
    partials: Partials,
    owners: Floats,
    exchanges: Sequence[str],
    names: Sequence[str],
    later: float | None = None,
    *,
    inside: Mapping[int, int] | None = None,
) -> tuple[ConsumerChoice, ...]:
    """By consumer. owners (T, N): the part of a table's columns that a rank has rows of, whatever its exchange; by
    table: `exchanges`, `names`; later: by how many seconds a step is longer where partials travel, if it is known;
    inside: consumers that are evaluated inside a tower, and which."""
    model, inside = partials.model, inside or {}
    under = [exchange == "partials" for exchange in exchanges]
    mine = owners * [[float(each)] for each in under]
    are_cut = is_cut(owners)
    some = partials.cut(mine)
    counts = (owners > 0).sum(1)
    floats = partials.dims * partials.rows * owners.sum(1)[partials.tables]
    found = []
    for c, consumer in enumerate(model.consumers):
        values = float(floats[partials.takes[c]].sum())
        if c in inside:
            why = f"evaluated inside tower {inside[c]}, which fewer floats leave"
            width = float(consumer.inside_width or 0)
            found.append(ConsumerChoice(consumer.name, True, width, values, why))
            continue
        partial = None if consumer.width is None else partials.partial_floats(c, owners)
        tables = partials.tables_of(consumer)
        others = [names[t] for t in tables if not under[t]]
        cut = [names[t] for t in tables if are_cut[t]]
        if c in some:
            why = _reason_for_partials(consumer)
        elif len({exchanges[t] for t in tables}) == 1 and exchanges[tables[0]] in BY_TOWERS:
            why = "its fields do not all lie in one tower, or what it gives there is not less than values"
        elif partial is None:
            why = consumer.barred or "its operator has no partial that adds up"
        elif cut:
            why = f"rows of table {cut[0]} are cut by columns"
        elif others:
            why = _reason_of_others(tables, under, exchanges, names)
            if not some and later is not None:
                why += f"; with partials a step takes {1e3 * later:.3g} ms more"
            elif partial >= values:
                why += f"; a partial is {_floats(partial)} floats, values {_floats(values)}"
        else:
            why = _costs_more(partials, c, some, floats, partial)
        split = _split_bags(model, consumer, counts)
        if split and partial is not None and c not in some and others:
            why += f"; bags of {split[0]} are split"
        found.append(
            ConsumerChoice(consumer.name, c in some, partial, values, why, consumer.is_apart)
        )
    return tuple(found)


def _reason_for_partials(consumer: ConsumerLoad) -> str:
    """Say why partials of a consumer travel."""
    why = "rows of its sequence stay where they lie" if consumer.sequences else "fewer floats"
    if consumer.beside:
        why += f"; of table {consumer.beside}, which has hot rows, values travel"
    return why


def _reason_of_others(
    tables: Sequence[int], under: Sequence[bool], exchanges: Sequence[str], names: Sequence[str]
) -> str:
    """Say which exchange the tables of a consumer have, some of which are not `under` the one of partials."""
    others = [t for t in tables if not under[t]]
    if len(others) == len(tables):
        return f"its tables are under {', '.join(sorted({exchanges[t] for t in tables}))}"
    return f"table {names[others[0]]} is under {exchanges[others[0]]}"


def _split_bags(model: ModelLoad, consumer: ConsumerLoad, counts: Floats) -> list[str]:
    """Return the fields that a consumer needs whole bags of, which lie on several ranks. counts (T,): ranks of each."""
    fields = [model.fields[f] for f in consumer.fields if consumer.needs_bags]
    return [each.name for each in fields if each.has_bags and counts[each.table] > 1]


def _costs_more(
    partials: Partials, c: int, some: Sequence[int], floats: Floats, partial: float
) -> str:
    takes, model = partials.takes, partials.model
    values = float(floats[takes[c]].sum())
    if partial >= values:
        return f"costs more: {_floats(partial)} floats, not {_floats(values)}"
    others = [
        k for k in range(len(model.consumers))
        if k != c and k not in some and (takes[k] & takes[c]).any()
    ]  # fmt: skip
    if not others:
        return f"saves nothing: {_floats(partial)} floats, not {_floats(values)}"
    rest = takes[c] & ~takes[others].any(0)
    first = ", ".join(model.consumers[k].name for k in others)
    if not rest.any():
        return f"values travel anyway for {first}"
    left = float(floats[rest].sum())
    return (
        f"values travel anyway for {first}, all but {_floats(left)} floats; a partial is "
        f"{_floats(partial)}"
    )


def _floats(count: float | None) -> str:
    return f"{count or 0:,.0f}"


def explained(search: Search, state: State, later: float | None) -> Choice:
    """later: by how many seconds a step is longer where partials travel, at best; None: that was not tried."""
    tables = []
    for t, load in enumerate(search.loads):
        search.add(state, t, *state.chosen[t], -1.0)
        now = search.with_(state, t, *state.chosen[t])
        mine = cost(search, state, t, *state.chosen[t], now)
        others = []
        for exchange, kind in OPTIONS:
            if (exchange, kind) == mine.option or not _has(search, t, exchange, kind):
                continue
            if exchange == "partials" and not _is_shown(search, t):
                continue
            if exchange in BY_TOWERS:  # of single tables that says nothing
                continue
            places = [
                cost(search, state, t, exchange, place, now)
                for place in search.places(state, t, kind)
            ]
            others += sorted(places, key=lambda cost: cost.more)[:1]
        search.add(state, t, *state.chosen[t])
        others.sort(key=lambda cost: cost.more)
        tables.append(TableChoice(load.name, mine, tuple(others), search.forced[t] != Forced()))
    sent = {(p, link): 0.0 for p in CHANNELS for link in ("local", "remote")}
    for table in tables:
        for key, size in table.chosen.sent.items():
            sent[key] += size
    used = [exchange for exchange, users in state.users.items() if users]
    for link, count in search.paths.asked_of_all.by_link.items():
        sent["route", link] += search.fixed_bytes(used) * count
    if "tower_rows" in used:
        for link, count in search.paths.mates.by_link.items():
            sent["route", link] += MATES_BYTES * count
    _, fetch, push = state.links.max(1).tolist()
    seconds = search.seconds(state)
    # Half of what a step waits for: values that are fetched ahead cost it nothing as they are.
    halved = (push + (0.0 if seconds.is_fetched_ahead else fetch)) / 2
    consumers = _consumers(search, state, later)
    return Choice(tuple(tables), seconds, sent, halved, consumers)


def _consumers(search: Search, state: State, later: float | None) -> tuple[ConsumerChoice, ...]:
    owners = np.zeros((len(search.loads), search.world.num_ranks))
    for t, (_, sharding) in enumerate(state.chosen):
        owners[t, list(sharding.ranks)] = 1 / sharding.slices
    exchanges = [exchange for exchange, _ in state.chosen]
    return consumer_choices(
        search.partials, owners, exchanges, [each.name for each in search.loads], later,
        inside=state.narrowed.inside,
    )  # fmt: skip


def _has(search: Search, t: int, exchange: ExchangeName, kind: Kind) -> bool:
    load = search.loads[t]
    if kind == "replicated" and search.world.has_servers:
        return False
    if kind in CUT and most_slices(load, kind, search.world) < 2:
        return False
    return search.may_pool(t, exchange) and (kind != "host_wise" or search.has_hosts)


def _is_shown(search: Search, t: int) -> bool:
    """Whether it is of use to say what the table would cost under `partials`, all others staying as they are."""
    return search.is_known and t in search.grouped and not search.are_held


def cost(
    search: Search, state: State, t: int, exchange: ExchangeName, sharding: Sharding, now: float
) -> Cost:
    bytes_, _ = search.costs(t, exchange, sharding)
    world, owners = search.world, sharding.ranks
    of_host = np.bincount(np.array(owners) // world.ranks_per_host, minlength=world.num_hosts)
    asking = world.trainers_per_host  # of a host; an owner that asks has its own rows
    local = float(asking - (not world.has_servers)) * len(owners) / world.num_ranks
    remote = float((of_host * (world.num_trainers - asking)).sum()) / world.num_ranks
    sent: dict[tuple[str, str], float] = {}
    ids = search.paths.asked_to(sharding).by_link
    for link, count in ids.items():
        sent["route", link] = bytes_.route * count
    for channel, size in (("fetch", bytes_.fetch), ("push", bytes_.push)):
        sent[channel, "local"], sent[channel, "remote"] = size * local, size * remote
    if exchange in BY_OWNERS and search.paths.are_added(sharding):
        near, far = blocks_added(world)
        for channel, size in (("fetch", bytes_.fetch), ("push", bytes_.push)):
            sent[channel, "local"], sent[channel, "remote"] = size * near, size * far
    by = search.paths.by_towers(sharding) if exchange in BY_TOWERS else None
    if by is not None:
        rows = bytes_.of_rows
        if rows is not None:
            every = search.paths.mates.by_link
            for link, count in by.peers.by_link.items():
                asked = rows.asked * by.owners.by_link[link]
                sent["route", link] = (
                    bytes_.route * count + asked + TABLE_BYTES["rows"] * every[link]
                )
        for channel, size in (("fetch", bytes_.fetch), ("push", bytes_.push)):
            for link, inside, between in (
                ("local", by.inside.near, by.between.near), ("remote", by.inside.far, by.between.far)
            ):  # fmt: skip
                sent[channel, link] = bytes_.inside * inside + size * between
                if rows is not None:
                    of_rows = rows.values if channel == "fetch" else rows.gradients
                    sent[channel, link] += of_rows * by.owners.by_link[link]
        if state.chosen[t] == (exchange, sharding):
            _narrow(search, state, t, by.between, sent)
            asked = state.narrowed.asked.get(t, 0.0) / len(owners)
            for link, count in ids.items():
                sent["route", link] += asked * count
    seconds = search.mean_seconds(t, exchange, sharding)
    if exchange == "partials":
        seconds += _share_of(search, state, t, sharding, sent)
    for link, count in search.paths.asked_of_all.by_link.items():
        sent["route", link] += TABLE_BYTES[exchange] * sharding.slices * count
    more = search.with_(state, t, exchange, sharding) - now
    return Cost(exchange, sharding, sent, seconds, more)


def _narrow(
    search: Search, state: State, t: int, hop: HopTraffic, sent: dict[tuple[str, str], float]
) -> None:
    """Into `sent`: what operators inside towers leave of a table's bytes between them."""
    less = state.narrowed
    for channel, by_table in (("fetch", less.values), ("push", less.gradients)):
        size = search.samples * by_table.get(t, 0.0)
        sent[channel, "local"] += size * hop.near
        sent[channel, "remote"] += size * hop.far


def _share_of(
    search: Search, state: State, t: int, sharding: Sharding, sent: dict[tuple[str, str], float]
) -> float:
    """Into `sent`: bytes of values, partials and gradients that are this table's, were it so beside all others.
    Returns seconds of links, as `mean_seconds`."""
    search.add(state, t, "partials", sharding)
    joint, world = state.joint, search.world
    assert joint is not None
    shares = search.partials.shares(joint, state.owners, t)
    search.add(state, t, "partials", sharding, -1.0)
    far = world.num_trainers - world.trainers_per_host
    near = world.trainers_per_host - (not world.has_servers)
    here, there = blocks_added(world)
    for channel, each in zip(("fetch", "push"), shares, strict=True):
        size = each.straight * search.samples / world.num_ranks
        sent[channel, "local"], sent[channel, "remote"] = size * near, size * far
        size = each.common * search.samples
        sent[channel, "local"] += size * here
        sent[channel, "remote"] += size * there
    added = joint.added.get(t, 0.0) / len(sharding.ranks)
    for link, count in search.paths.asked_to(sharding).by_link.items():
        sent["route", link] += added * count
    straight = sum(share.straight for share in shares) / len(sharding.ranks)
    common = sum(share.common for share in shares)
    seconds = straight * search.paths.to(sharding)[2]
    if common:
        seconds += common * search.paths.added[2]
    return search.samples * seconds
