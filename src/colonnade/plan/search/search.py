"""Which sharding and exchange each table gets: the fewest predicted seconds of a step, within the memory of each rank.

A step is as slow as its busiest rank and its busiest uplink, so a table cannot be judged alone: tables change one after
another, each to what is best beside all the others, until none gains. That is done from several beginnings, for where
few tables pay only together. Pure functions of numbers; 500 tables on 1,000 ranks take seconds.

Legend: N ranks, H hosts, R = 2 N + 2 H directions of links: out of and into each rank inside its host, out of and into
each host. All bytes and seconds are of one step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import ConfigError
from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.comm_volume import (
    BESIDE_SECONDS,
    CALLS,
    FIXED_BYTES,
    MATES_BYTES,
    SHARED_BYTES,
    TABLE_BYTES,
    ExchangeName,
    Pair,
    Work,
    crossing,
    moving,
    pair,
    work,
)
from colonnade.plan.cost.consumers import ModelLoad, bare
from colonnade.plan.cost.partials import Joint, Partials, burden
from colonnade.plan.cost.paths import Paths, adds_in_host
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.cost.tower_paths import call_seconds, spared_seconds
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search.candidates import (
    BY_OWNERS,
    OPTIONS,
    Forced,
    Memory,
    Option,
    Seconds,
)
from colonnade.plan.search.cutting import CUT, cut_places, everywhere, most_slices
from colonnade.plan.search.tower_choice import Narrowed, narrowed
from colonnade.topology.sharding import (
    Kind,
    Sharding,
    host_wise,
    on_ranks,
    replicated,
    row_wise_in,
    table_wise,
)
from colonnade.topology.world import World

Floats = NDArray[np.float64]

SWEEPS = 4
GAIN = 1e-3
"""Part of a step that all tables' changes together must save for another round of them."""
TRIED = 4
"""Least loaded ranks and hosts that a table may go to; one of them in a large world."""
MANY = 10_000
"""Tables times ranks beyond which only the two best beginnings are gone on from."""
FEW = 150
"""The same beyond which tables under `partials` stay as they began: each move asks for the cost of all of them."""
TIE = 0.01
"""Weight of what is not the bottleneck: of two choices as fast, the one that leaves more room."""


@dataclass(slots=True)
class State:
    chosen: list[tuple[ExchangeName, Sharding]]
    links: Floats  # (3, R) seconds by channel
    processor: Floats  # (N,) seconds
    held: Floats  # (N,) bytes of all rows
    in_use: Floats  # (N,) bytes of the rows of one step
    users: dict[str, int] = field(default_factory=dict)  # tables by exchange
    owners: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # (T, N) of `Partials`
    joint: Joint | None = None  # of the tables under `partials`
    burden: tuple[Floats, Floats] | None = None  # its seconds, as they were added
    narrowed: Narrowed = field(
        default_factory=Narrowed
    )  # by operators inside towers, once all is chosen


class Search:
    def __init__(
        self,
        loads: Sequence[TableLoad],
        world: World,
        memory: Memory,
        rates: Sequence[RowRate],
        forced: Mapping[str, Forced],
        options: Collection[Option],
        is_fetched_ahead: bool,
        model: ModelLoad | None,
        towers: int,
    ) -> None:
        self.loads, self.world, self.memory, self.rates = loads, world, memory, rates
        self.is_fetched_ahead = is_fetched_ahead
        # Else a host is the world, or a rank.
        self.has_hosts = world.num_hosts > 1 and world.ranks_per_host > 1
        self.forced = [forced.get(load.name, Forced()) for load in loads]
        self.is_known = model is not None
        self.partials = Partials(model or bare(loads), len(loads), adds_in_host=adds_in_host(world))
        self.grouped = {t for group in self.partials.groups for t in group}
        self.samples = loads[0].samples if loads else 0.0
        self.whole = self.partials.tables_of_bags
        self.are_held = len(loads) * world.num_ranks > FEW
        self.is_large = len(loads) * world.num_ranks > MANY
        self.possible = [
            self._possible(t, load, forced, options)
            for t, (load, forced) in enumerate(zip(loads, self.forced, strict=True))
        ]
        self.owners = np.array(world.owners)
        self.paths, self.num_towers = Paths(world, towers), towers
        self.asks = self.paths.asks
        self.even = sum(load.total_bytes for load in loads) / len(self.owners)
        self.tried = 1 if self.is_large else TRIED
        self.pairs: dict[tuple[int, ExchangeName, int, int], tuple[Pair, Work]] = {}
        self.everywhere = dict(row_wise=row_wise_in(world), replicated=replicated(world.num_ranks))
        self.scale = 1.0

    def _possible(
        self, t: int, load: TableLoad, forced: Forced, options: Collection[Option]
    ) -> list[Option]:
        tried = [each for each in OPTIONS if each in options]
        if forced.exchange in BY_TOWERS and forced.kind not in (None, "replicated"):
            # As a person or `towers.placement` laid it out.
            tried = [(forced.exchange, forced.kind)]
        candidates = [
            (exchange, kind)
            for exchange, kind in tried
            if forced.kind in (None, kind)
            and forced.exchange in (None, exchange)
            and self._has_exchange(t, exchange, kind, forced)
            and self._has_sharding(load, kind, forced)
        ]
        if candidates:
            return candidates
        wanted = ", ".join(str(each) for each in (forced.exchange, forced.kind) if each) or "any"
        why = "a feature reads it as a sequence" if not load.is_pooled else "no choice has both"
        raise ConfigError(
            f"table {load.name!r}: got {wanted}, which it cannot have ({why}); set another plan.exchange or "
            f"plan.sharding, or plan.tables.{load.name}"
        )

    def _has_exchange(self, t: int, exchange: ExchangeName, kind: Kind, forced: Forced) -> bool:
        """Tell whether a table of this kind of sharding may have this exchange, or is forced to."""
        if exchange == "partials":
            if forced.exchange != exchange and t not in self.grouped:
                return False
            if not forced.kind and kind != "table_wise" and t in self.whole:
                return False
        if exchange in BY_TOWERS and forced.exchange != exchange:
            return False
        return self.may_pool(t, exchange)

    def _has_sharding(self, load: TableLoad, kind: Kind, forced: Forced) -> bool:
        """Tell whether this world has this kind of sharding for a table, or it is forced."""
        if kind == "replicated" and self.world.has_servers:
            return False
        if forced.kind == kind:
            return True
        if kind == "host_wise" and not self.has_hosts:
            return False
        return kind not in CUT or most_slices(load, kind, self.world) > 1

    def may_pool(self, t: int, exchange: ExchangeName) -> bool:
        """Whether owners can serve a table so: rows of sequences travel one by one, or not at all."""
        load = self.loads[t]
        is_attended = exchange == "partials" and t in self.partials.attended
        return exchange not in BY_OWNERS or (
            len(load.columns) > 0 and (load.is_pooled or is_attended)
        )

    def costs(self, t: int, exchange: ExchangeName, sharding: Sharding) -> tuple[Pair, Work]:
        slices = sharding.slices
        n = len(sharding.ranks) // slices
        key = (t, exchange, n, slices)
        if exchange in BY_TOWERS and self.paths.by_towers(sharding) is None:
            exchange, key = "pooled", (t, "pooled", n, slices)
        if key not in self.pairs:
            load, size = self.loads[t], self.world.num_ranks // self.num_towers
            peers = load.unique_of(self.num_towers, self.world) if exchange == "tower_rows" else 0.0
            bytes_ = pair(load, exchange, n, slices, peers)
            seconds = work(
                load, exchange, n, self.world.num_trainers, self.rates, slices, peers, size
            )
            moved = moving(bytes_, n * slices, self.world, self.num_towers)
            self.pairs[key] = bytes_, seconds + moved
        return self.pairs[key]

    def empty(self) -> State:
        n, links = self.world.num_ranks, np.zeros((3, len(self.paths.asked_of_all.there)))
        owners = np.zeros((len(self.loads), n))
        return State([], links, np.zeros(n), np.zeros(n), np.zeros(n), owners=owners)

    def add(
        self, state: State, t: int, exchange: ExchangeName, sharding: Sharding, sign: float = 1.0
    ) -> None:
        """In place; `chosen` is left as it is."""
        bytes_, seconds = self.costs(t, exchange, sharding)
        given, back, _ = self.paths.values_to(sharding, exchange)
        load = self.loads[t]
        by = self.paths.by_towers(sharding) if exchange in BY_TOWERS else None
        if by is not None and (inside := bytes_.of_rows) is not None:
            state.links[0] += (sign * bytes_.route) * by.peers.back
            state.links[0] += (sign * inside.asked) * by.owners.back
            state.links[0] += (sign * TABLE_BYTES["rows"]) * self.paths.mates.back
        else:
            state.links[0] += (sign * bytes_.route) * self.paths.asked_to(sharding).there
        if TABLE_BYTES[exchange]:
            more = sign * TABLE_BYTES[exchange] * sharding.slices
            state.links[0] += more * self.paths.asked_of_all.there
        if by is None:
            state.links[1] += (sign * bytes_.fetch) * back
            state.links[2] += (sign * bytes_.push) * given
        else:
            state.links[1] += (sign * bytes_.fetch) * by.between.back
            state.links[2] += (sign * bytes_.push) * by.between.given
            if bytes_.of_rows is None:
                state.links[1] += (sign * bytes_.inside) * by.inside.back
                state.links[2] += (sign * bytes_.inside) * by.inside.given
            else:
                state.links[1] += (sign * bytes_.of_rows.values) * by.owners.given
                state.links[2] += (sign * bytes_.of_rows.gradients) * by.owners.back
        state.processor += (sign * seconds.asker) * self.asks
        owners = _index(sharding.ranks)
        share = sharding.num_owners * sharding.slices
        state.processor[owners] += sign * seconds.owner
        state.held[owners] += sign * load.total_bytes / share
        in_use = min(load.unique_world, load.rows) * load.slot_bytes
        state.in_use[owners] += sign * in_use / share
        state.users[exchange] = state.users.get(exchange, 0) + int(sign)
        if exchange == "partials":
            state.owners[t, owners] = 1 / sharding.slices if sign > 0 else 0.0
            self._join(state)

    def _join(self, state: State) -> None:
        """In place: what the tables under `partials` cost together, as they are now."""
        if state.burden is not None:
            state.links -= state.burden[0]
            state.processor -= state.burden[1]
        state.joint = state.burden = None
        if state.users.get("partials"):
            state.joint = self.partials.joint(state.owners)
            state.burden = burden(state.joint, state.owners, self.samples, self.paths, self.rates)
            state.links += state.burden[0]
            state.processor += state.burden[1]

    def seconds(self, state: State) -> Seconds:
        phases = state.links.max(1)
        used = [exchange for exchange, users in state.users.items() if users]
        computed = float(state.processor.max())
        if self.world.has_servers:  # rows' ranks work, then the samples', then again the rows'
            asks = self.asks > 0
            computed = float(state.processor[asks].max() + state.processor[~asks].max())
        if used and self.world.num_ranks > 1:
            calls = np.sum([CALLS[exchange] for exchange in used], axis=0)
            calls[0] += 1  # the header
            if state.joint is not None:
                calls[1:] += 2 * state.joint.rounds
            world, towers = self.world, self.num_towers
            phases = phases + calls * world.call_seconds
            phases[0] += self.fixed_bytes(used) * self.paths.peak
            # And of what all exchanges route with, the sizes.
            computed += (float(calls.sum()) + 1) * world.call_processor_seconds
            if self.rates:  # else nobody asks what computing takes
                computed += (len(used) - 1) * BESIDE_SECONDS
            less = world.call_seconds - call_seconds(world, towers)  # of a call that goes by them
            phases[1:] -= less * sum(each in BY_TOWERS for each in used)
            if "towers" in used:
                computed -= spared_seconds(world, towers, turns=2)
            if "tower_rows" in used:
                computed -= spared_seconds(world, towers)
                phases[0] += MATES_BYTES * float(self.paths.mates.back.max())
        route, fetch, push = phases.tolist()
        # What operators inside towers give leaves when it is used.
        is_ahead = self.is_fetched_ahead and not state.narrowed.inside
        return Seconds(computed, route, fetch, push, self.world.crowding, is_ahead)

    def fixed_bytes(self, used: Sequence[str]) -> float:
        """From each rank to each other, whatever the tables are."""
        return SHARED_BYTES + sum(FIXED_BYTES[exchange] for exchange in used)

    def objective(self, state: State) -> float:
        found = self.seconds(state)
        total = found.step
        budget = self.memory.bytes
        if budget is not None:
            over = float(state.held.max()) - max(budget, self.even * (1 + 1e-9))
            if over > 0:
                total += over * self.memory.seconds_per_byte
            if state.in_use.max() > max(budget, self.in_use_at_least):
                return float("inf")
        if state.joint is not None and (state.joint.split or state.joint.lone is not None):
            return float("inf")
        if state.joint is not None and not state.joint.consumers:
            total *= 1 + GAIN  # `pooled` is that, too
        spare = float(state.links.sum()) / state.links.shape[1] + found.behind
        spare += float(state.processor.sum()) / self.world.num_ranks
        uneven = float(state.held.max()) / max(self.even, 1.0)
        return total + TIE * (spare + 0.01 * self.scale * uneven)

    @property
    def in_use_at_least(self) -> float:
        """Rows of a step on a rank when all are dealt evenly: less cannot be had."""
        rows = sum(min(each.unique_world, each.rows) * each.slot_bytes for each in self.loads)
        return rows / len(self.owners)

    def mean_seconds(self, t: int, exchange: ExchangeName, sharding: Sharding) -> float:
        """Of the links if all ranks and uplinks had the same to carry, and of processors likewise."""
        n = len(sharding.ranks)
        bytes_, seconds = self.costs(t, exchange, sharding)
        links = (bytes_.fetch + bytes_.push) * self.paths.values_to(sharding, exchange)[2]
        if exchange in BY_TOWERS and (by := self.paths.by_towers(sharding)) is not None:
            links = (bytes_.fetch + bytes_.push) * by.between.slowest
            links += 2 * bytes_.inside * by.inside.slowest
            if (inside := bytes_.of_rows) is not None:
                links += (inside.values + inside.gradients) * by.owners.slowest
        return links + seconds.asker + seconds.owner * n / self.world.num_ranks

    def order(self) -> list[int]:
        """Tables, those first that weigh most."""
        return sorted(
            range(len(self.loads)),
            key=lambda t: -self.loads[t].unique_rank * self.loads[t].gradient_bytes,
        )

    def shardings(self, state: State, t: int, kind: Kind) -> list[Sharding]:
        said = self.forced[t].ranks
        return self.places(state, t, kind) if said is None else [on_ranks(kind, said, self.world)]

    def places(self, state: State, t: int, kind: Kind) -> list[Sharding]:
        world = self.world
        if kind in self.everywhere:
            return [self.everywhere[kind]]
        if kind in CUT and self.forced[t].kind == kind:
            return [everywhere(kind, world)]
        busy = self.busy(state)
        if kind in CUT:
            return cut_places(self.loads[t], kind, world, busy)
        if kind == "table_wise":
            least = _least(busy[self.owners], self.tried)
            return [table_wise(int(rank)) for rank in self.owners[least]]
        hosts = busy.reshape(world.num_hosts, -1).mean(1)
        return [host_wise(world, int(host)) for host in _least(hosts, self.tried)]

    def busy(self, state: State) -> Floats:
        """(N,) seconds that an owner already has to answer, and a little for what it holds."""
        world, n = self.world, self.world.num_ranks
        fetch, push = state.links[1], state.links[2]
        uplink = fetch[2 * n : 2 * n + world.num_hosts] + push[2 * n + world.num_hosts :]
        found = fetch[:n] + push[n : 2 * n] + state.processor
        found = found + np.repeat(uplink, world.ranks_per_host)
        held = state.held / max(self.even, 1.0)
        budget = self.memory.bytes
        if budget is not None:
            found = found + np.maximum(0.0, state.held - max(budget, self.even)) * min(
                self.memory.seconds_per_byte, 1.0
            )
        return found + 0.01 * self.scale * held

    def with_(self, state: State, t: int, exchange: ExchangeName, sharding: Sharding) -> float:
        """The objective with one table more."""
        self.add(state, t, exchange, sharding)
        found = self.objective(state)
        self.add(state, t, exchange, sharding, -1.0)
        return found

    def improved(self, state: State) -> State:
        """Tables change one after another while that helps."""
        for _ in range(SWEEPS):
            before = self.objective(state)
            for t in self.order():
                exchange, sharding = state.chosen[t]
                now = self.objective(state)
                if self.are_held and exchange == "partials":
                    continue
                before_joint = state.joint
                self.add(state, t, exchange, sharding, -1.0)
                best, least = (exchange, sharding), now * (1 - 1e-6)
                for other, kind in self.possible[t]:
                    if other == "partials" and (self.are_held or before_joint is None):
                        continue  # alone it saves nothing
                    for place in self.shardings(state, t, kind):
                        found = self.with_(state, t, other, place)
                        if found < least:
                            best, least = (other, place), found
                self.add(state, t, *best)
                state.chosen[t] = best
            if self.objective(state) > before * (1 - GAIN):
                break
        return self.rebuilt(state)

    def narrow(self, state: State) -> None:
        """In place, once: operators inside towers leave less between them. Where tables are does not depend on it, for
        the search puts none into a tower."""
        chosen = state.chosen
        by = [
            self.paths.tower_of(sharding) if exchange in BY_TOWERS else None
            for exchange, sharding in chosen
        ]
        # Where rows come together in a tower, so do bags.
        owners = [1 if each == "tower_rows" else of.num_owners for each, of in chosen]
        cut = [sharding.slices > 1 for _, sharding in chosen]
        beside = any(
            exchange in BY_TOWERS and tower is None and not each
            for (exchange, _), tower, each in zip(chosen, by, cut, strict=True)
        )
        if beside and self.is_fetched_ahead:
            return
        exchanges = [exchange for exchange, _ in chosen]
        found = narrowed(self.partials.model, by, owners, cut, exchanges)
        for t, (_, sharding) in enumerate(chosen):
            if (way := self.paths.by_towers(sharding)) is None:
                continue
            values, gradients = found.values.get(t, 0.0), found.gradients.get(t, 0.0)
            state.links[1] += self.samples * values * way.between.back
            state.links[2] += self.samples * gradients * way.between.given
            more = crossing(self.samples * (values + gradients), self.world, self.num_towers)
            state.processor += more * self.asks
            asked = found.asked.get(t, 0.0) / sharding.num_owners
            state.links[0] += asked * self.paths.asked_to(sharding).there
        state.narrowed = found

    def rebuilt(self, state: State) -> State:
        """The same without what rounding left of tables that came and went."""
        found = self.empty()
        found.chosen = list(state.chosen)
        for t, chosen in enumerate(state.chosen):
            self.add(found, t, *chosen)
        return found


def _least(values: Floats, count: int) -> NDArray[np.intp]:
    if len(values) <= 2 * count:
        return np.argsort(values, kind="stable")
    some = np.argpartition(values, count)[:count]
    return some[np.argsort(values[some], kind="stable")]


def _index(ranks: tuple[int, ...]) -> Any:
    """Of the ranks' elements in an array of all ranks."""
    first, last = ranks[0], ranks[-1]
    return slice(first, last + 1) if last - first + 1 == len(ranks) else list(ranks)
