"""Local search for the sharding and exchange of each table with the fastest step, within the memory of each rank.

A step is as slow as its busiest rank and its busiest uplink, so a table cannot be judged alone. Tables change one after
another, each to the best option given all the others, until none gains. The search starts from several initial
candidates, because some tables only gain if they change together. Pure; 500 tables on 1,000 ranks take seconds.

Legend: N ranks, H hosts, R = 2 N + 2 H link directions: out of and into each rank inside its host, out of and into
each host. All bytes and seconds are those of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import ConfigError
from colonnade.hops.kinds import (
    BY_TOWERS,
    CHANNELS,
    EXCHANGES,
    SHARED_BYTES,
    Flow,
    RelayHop,
    Split,
    TableNeeds,
    find_refusal,
    list_flows,
)
from colonnade.hops.links import (
    Links,
    predict_saved_processor_seconds,
    sums_inside_hosts,
    tower_call_seconds,
)
from colonnade.hops.load import TableLoad
from colonnade.lookup.views import is_merged_at_samples
from colonnade.plan.cost.consumers import (
    TowerCompression,
    build_model_load_without_consumers,
    find_tower_compression,
)
from colonnade.plan.cost.partials import (
    Partials,
    PartialsTraffic,
    predict_operator_partials_seconds,
)
from colonnade.plan.cost.step_time import (
    EXTRA_EXCHANGE_SECONDS,
    ProcessorSeconds,
    predict_processor_seconds,
    predict_transfer_seconds,
)
from colonnade.plan.search.candidates import OPTIONS, Constraint, Option, Problem, StepSeconds
from colonnade.topology.sharding import (
    COLUMN_KINDS,
    Kind,
    Sharding,
    column_wise,
    grid,
    host_wise,
    replicated,
    row_wise_over_owners,
    shard_columns_everywhere,
    sharding_on_ranks,
    table_wise,
)
from colonnade.topology.world import World

Floats = NDArray[np.float64]

MAX_SWEEPS = 4
MIN_GAIN = 1e-3
"""Part of a step that a sweep over all tables must save for another sweep to follow."""
NUM_TRIED = 4
"""Number of least loaded ranks and hosts that are tried for a table; one in a large world."""
LARGE_SEARCH = 10_000
"""Number of tables times ranks above which the search continues only from the two best initial candidates."""
FIXED_PARTIALS_SEARCH = 150
"""Number of tables times ranks above which tables under `partials` do not move: each move costs all of them anew."""
MIN_SLICE_COLUMNS = 16
"""Smallest width of a slice that the planner chooses itself, because ids are sent once for each slice."""
TIE_WEIGHT = 0.01
"""Weight of costs outside the bottleneck: of two equally fast choices, the one with more reserve wins."""


@dataclass(slots=True)
class State:
    """Candidate plan of the search: the choice of each table, and sums of the costs of all tables."""

    chosen: list[tuple[str, Sharding]]
    links: Floats  # (3, R) seconds by channel
    processor: Floats  # (N,) seconds
    owned_bytes: Floats  # (N,) bytes of all rows
    step_bytes: Floats  # (N,) bytes of the rows of one step
    num_tables: dict[str, int] = field(default_factory=dict)  # by exchange
    owners: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # (T, N) of `Partials`
    apart: NDArray[np.bool_] = field(
        default_factory=lambda: np.zeros(0, bool)
    )  # (T,) of `Partials`
    partials: PartialsTraffic | None = None  # of the tables under `partials`
    partials_seconds: tuple[Floats, Floats] | None = None  # included in `links` and `processor`
    tower_compression: TowerCompression = field(default_factory=TowerCompression)  # set at the end


class Search:
    """Local search over the shardings and exchanges of all tables, with predicted seconds as the objective."""

    def __init__(self, problem: Problem) -> None:
        loads = problem.loads
        world = problem.world
        self.problem = problem
        self.loads = loads
        self.world = world
        # Otherwise every host is the whole world, or a single rank.
        self.has_hosts = world.num_hosts > 1 and world.ranks_per_host > 1
        self.forced = [problem.forced.get(load.name, Constraint()) for load in loads]
        self.partials = Partials(
            problem.model or build_model_load_without_consumers(loads),
            len(loads),
            adds_in_host=sums_inside_hosts(world),
        )
        self.partials_tables = {t for group in self.partials.table_groups for t in group}
        self.samples = loads[0].samples if loads else 0.0
        self.row_tables = {f.table for f in self.partials.model.fields if f.needs_rows}
        self.has_fixed_partials = len(loads) * world.num_ranks > FIXED_PARTIALS_SEARCH
        self.is_large = len(loads) * world.num_ranks > LARGE_SEARCH
        self.options = [self._find_table_options(t) for t in range(len(loads))]
        self.owners = np.array(world.owners)
        self.links = Links(world, problem.num_towers)
        self.is_trainer = self.links.is_trainer
        self.even_bytes = sum(load.total_bytes for load in loads) / len(self.owners)
        self.num_tried = 1 if self.is_large else NUM_TRIED
        self.cached_costs: dict[
            tuple[int, str, int, int], tuple[tuple[Flow, ...], ProcessorSeconds]
        ] = {}
        self.fixed_shardings = dict(
            row_wise=row_wise_over_owners(world), replicated=replicated(world.num_ranks)
        )
        self.scale = 1.0  # seconds of a step, set from the first candidate

    def _find_table_options(self, table_index: int) -> list[Option]:
        """Return the options of a table under its constraint. Raises ConfigError if there is none."""
        constraint = self.forced[table_index]
        name = self.loads[table_index].name
        tried = OPTIONS
        if constraint.exchange in BY_TOWERS and constraint.kind not in (None, "replicated"):
            # The user or `plan.constraints.in_towers` determined the sharding.
            tried = ((constraint.exchange, constraint.kind),)
        candidates = [
            (exchange, kind)
            for exchange, kind in tried
            if constraint.kind in (None, kind)
            and constraint.exchange in (None, exchange)
            and (constraint.exchange == exchange or self.is_worth_trying(table_index, exchange))
            and (constraint.kind == kind or self._is_kind_possible(table_index, exchange, kind))
            and self.find_refusal(table_index, exchange) is None
        ]
        if candidates:
            return candidates
        required = [str(value) for value in (constraint.exchange, constraint.kind) if value]
        wanted = ", ".join(required) or "any"
        reason = "no choice has both"
        if constraint.exchange is not None:
            reason = self.find_refusal(table_index, constraint.exchange) or reason
        raise ConfigError(
            f"table {name!r}: got {wanted}, which it cannot have ({reason}); set another plan.exchange or "
            f"plan.sharding, or plan.tables.{name}"
        )

    def is_worth_trying(self, table_index: int, exchange: str) -> bool:
        """Return whether a free table may gain from an exchange: towers are for modules, partials for consumers, and
        `cached` is for tables that may be late."""
        if exchange == "partials":
            return table_index in self.partials_tables
        if exchange == "cached":
            return self.loads[table_index].cache is not None
        return exchange not in BY_TOWERS

    def _is_kind_possible(self, table_index: int, exchange: str, kind: Kind) -> bool:
        """Return whether the world and the table's bags allow this kind of sharding, if no constraint demands it."""
        if exchange == "partials" and kind != "table_wise":
            if table_index in self.partials.whole_bag_tables:
                return False
        return self.can_shard(table_index, kind)

    def can_shard(self, table_index: int, kind: Kind) -> bool:
        """Return whether the world allows this kind of sharding for a table."""
        if kind in COLUMN_KINDS:
            return count_max_slices(self.loads[table_index], kind, self.world) > 1
        return kind != "host_wise" or self.has_hosts

    def find_refusal(self, table_index: int, exchange: str) -> str | None:
        """Return why an exchange cannot serve a table; None: it can."""
        load = self.loads[table_index]
        needs = TableNeeds(
            is_read=len(load.columns) > 0,
            is_pooled=load.is_pooled,
            is_attended=table_index in self.partials.attention_tables,
            needs_rows=table_index in self.row_tables,
        )
        return find_refusal(exchange, needs, self.world)

    def predict_table_costs(
        self, table_index: int, exchange: str, sharding: Sharding
    ) -> tuple[tuple[Flow, ...], ProcessorSeconds]:
        """Predict what is sent for a table, and its processor time; results are cached."""
        exchange = self.resolve(exchange, sharding)
        num_owners = len(sharding.ranks) // sharding.slices
        key = (table_index, exchange, num_owners, sharding.slices)
        if key not in self.cached_costs:
            load = self.loads[table_index]
            world = self.world
            split = Split(
                owners=num_owners,
                slices=sharding.slices,
                trainers=world.num_trainers,
                tower_size=world.num_ranks // self.links.num_towers,
                unique_peers=load.expected_unique_rows(self.links.num_towers, world)
                if exchange in BY_TOWERS
                else 0.0,
            )
            flows = list_flows(exchange, load, split)
            seconds = predict_processor_seconds(exchange, load, split, self.problem.rates)
            transfer = predict_transfer_seconds(flows, split.owners * split.slices, self.links)
            self.cached_costs[key] = flows, seconds + transfer
        return self.cached_costs[key]

    def resolve(self, exchange: str, sharding: Sharding) -> str:
        """Return the exchange whose costs a table has: without a tower of its own, that of `pooled`."""
        if exchange in BY_TOWERS and not self.links.is_in_towers(sharding):
            return "pooled"
        return exchange

    def empty_state(self) -> State:
        """Return a state without tables."""
        n = self.world.num_ranks
        links = np.zeros((3, 2 * n + 2 * self.world.num_hosts))
        owners = np.zeros((len(self.loads), n))
        apart = np.zeros(len(self.loads), bool)
        return State([], links, np.zeros(n), np.zeros(n), np.zeros(n), owners=owners, apart=apart)

    def add_table_costs(
        self,
        state: State,
        table_index: int,
        exchange_name: str,
        sharding: Sharding,
        cost_sign: float = 1.0,
    ) -> None:
        """Add the costs of a table to a state, or remove them with sign -1. `state.chosen` does not change."""
        flows, seconds = self.predict_table_costs(table_index, exchange_name, sharding)
        load = self.loads[table_index]
        for flow in flows:
            links = self.links.load(flow.pattern, sharding).seconds(flow.channel)
            state.links[CHANNELS.index(flow.channel)] += (cost_sign * flow.bytes) * links
        state.processor += (cost_sign * seconds.trainer) * self.is_trainer
        owners = _rank_index(sharding.ranks)
        num_shards = sharding.num_owners * sharding.slices
        state.processor[owners] += cost_sign * seconds.owner
        state.owned_bytes[owners] += cost_sign * load.total_bytes / num_shards
        step_bytes = min(load.unique_world, load.rows) * load.slot_bytes
        state.step_bytes[owners] += cost_sign * step_bytes / num_shards
        state.num_tables[exchange_name] = state.num_tables.get(exchange_name, 0) + int(cost_sign)
        if is_apart := is_merged_at_samples(sharding):
            state.apart[table_index] = cost_sign > 0
        if exchange_name == "partials":
            state.owners[table_index, owners] = 1 / sharding.slices if cost_sign > 0 else 0.0
        if exchange_name == "partials" or (is_apart and state.num_tables.get("partials")):
            self._update_partials_cost(state)

    def _update_partials_cost(self, state: State) -> None:
        """Replace the joint cost of the tables under `partials` in a state by the current one."""
        if state.partials_seconds is not None:
            state.links -= state.partials_seconds[0]
            state.processor -= state.partials_seconds[1]
        state.partials = state.partials_seconds = None
        if state.num_tables.get("partials"):
            state.partials = self.partials.predict_traffic(state.owners, state.apart)
            state.partials_seconds = predict_operator_partials_seconds(
                state.partials, state.owners, self.samples, self.links, self.problem.rates
            )
            state.links += state.partials_seconds[0]
            state.processor += state.partials_seconds[1]

    def predict_step_seconds(self, state: State) -> StepSeconds:
        """Predict the seconds of a step by phase."""
        phases = state.links.max(1)
        used = [exchange for exchange, count in state.num_tables.items() if count]
        computed = float(state.processor.max())
        if self.world.has_servers:  # Servers work, then trainers, then servers again.
            is_trainer = self.is_trainer > 0
            computed = float(state.processor[is_trainer].max() + state.processor[~is_trainer].max())
        if used and self.world.num_ranks > 1:
            hops = [hop for exchange in used for hop in EXCHANGES[exchange]]
            calls = np.sum([hop.calls for hop in hops], axis=0)
            calls[0] += 1  # ids of all exchanges
            if state.partials is not None:
                calls[1:] += 2 * state.partials.query_rounds
            world = self.world
            phases = phases + calls * world.call_seconds
            for flow in self.list_fixed_flows(used):
                busiest = float(self.links.load(flow.pattern).forward.max())
                phases[CHANNELS.index(flow.channel)] += flow.bytes * busiest
            # The call that sends sizes for all exchanges costs processor time only.
            computed += (float(calls.sum()) + 1) * world.call_processor_seconds
            if self.problem.rates:  # Without measured rates, processor time is not predicted.
                computed += (len(used) - 1) * EXTRA_EXCHANGE_SECONDS
            for relay in hops:
                if isinstance(relay, RelayHop):
                    phases[1:] -= world.call_seconds - tower_call_seconds(
                        world, self.links.num_towers
                    )
                    computed -= predict_saved_processor_seconds(
                        world, self.links.num_towers, relay.num_chunks
                    )
        route, fetch, push = phases.tolist()
        # Results of operators inside towers are sent in the step that uses them.
        is_ahead = self.problem.is_fetched_ahead and not state.tower_compression.inside
        return StepSeconds(computed, route, fetch, push, self.world.crowding, is_ahead)

    def list_fixed_flows(self, used_exchanges: Sequence[str]) -> list[Flow]:
        """List what is sent for these exchanges whatever the tables, and the weight of each rank's batch."""
        shared = Flow("route", "everyone", SHARED_BYTES)
        return [
            shared,
            *(
                flow
                for name in used_exchanges
                for hop in EXCHANGES[name]
                for flow in hop.fixed_flows
            ),
        ]

    def compute_objective(self, state: State) -> float:
        """Return the seconds of a step, with penalties for memory over budget and a small weight on reserves.

        Returns inf for a state that cannot run."""
        seconds = self.predict_step_seconds(state)
        total = seconds.step
        budget = self.problem.memory.bytes
        if budget is not None:
            over = float(state.owned_bytes.max()) - max(budget, self.even_bytes * (1 + 1e-9))
            if over > 0:
                total += over * self.problem.memory.seconds_per_byte
            if state.step_bytes.max() > max(budget, self.min_step_bytes):
                return float("inf")
        partials = state.partials
        if partials is not None and (partials.split_bag or partials.unsendable_field is not None):
            return float("inf")
        if partials is not None and not partials.consumers:
            total *= 1 + MIN_GAIN  # `pooled` does the same.
        reserve = float(state.links.sum()) / state.links.shape[1] + seconds.behind
        reserve += float(state.processor.sum()) / self.world.num_ranks
        imbalance = float(state.owned_bytes.max()) / max(self.even_bytes, 1.0)
        return float(total + TIE_WEIGHT * (reserve + 0.01 * self.scale * imbalance))

    @property
    def min_step_bytes(self) -> float:
        """Bytes of a step's rows on a rank if all are sharded evenly: the least possible."""
        step_bytes = sum(min(load.unique_world, load.rows) * load.slot_bytes for load in self.loads)
        return step_bytes / len(self.owners)

    def predict_balanced_seconds(
        self, table_index: int, exchange: str, sharding: Sharding
    ) -> float:
        """Return a table's seconds of links and processors if all ranks and uplinks were equally loaded."""
        n = len(sharding.ranks)
        flows, seconds = self.predict_table_costs(table_index, exchange, sharding)
        links = sum(
            flow.bytes * self.links.load(flow.pattern, sharding).balanced
            for flow in flows
            if flow.channel != "route"
        )
        return links + seconds.trainer + seconds.owner * n / self.world.num_ranks

    def place_table(self, state: State, table_index: int, option: Option) -> None:
        """Add a table to a state with this exchange and kind of sharding, on the ranks where it costs least."""
        exchange, kind = option
        sharding = min(
            self.candidate_shardings(state, table_index, kind),
            key=lambda sharding: self.compute_objective_with_table(
                state, table_index, exchange, sharding
            ),
        )
        self.add_table_costs(state, table_index, exchange, sharding)
        state.chosen[table_index] = exchange, sharding

    def order_tables(self) -> list[int]:
        """Return the tables by bytes of gradients, largest first."""
        return sorted(
            range(len(self.loads)),
            key=lambda t: -self.loads[t].unique_rank * self.loads[t].gradient_bytes,
        )

    def candidate_shardings(self, state: State, t: int, kind: Kind) -> list[Sharding]:
        """Return the shardings to try for a table: on the ranks of its constraint, or else the proposed ones."""
        ranks = self.forced[t].ranks
        if ranks is None:
            return self.propose_shardings(state, t, kind)
        return [sharding_on_ranks(kind, ranks, self.world)]

    def propose_shardings(self, state: State, table_index: int, kind: Kind) -> list[Sharding]:
        """Propose shardings of a kind on the least busy ranks or hosts."""
        world = self.world
        if kind in self.fixed_shardings:
            return [self.fixed_shardings[kind]]
        if kind in COLUMN_KINDS and self.forced[table_index].kind == kind:
            return [shard_columns_everywhere(kind, world)]
        rank_seconds = self.predict_rank_seconds(state)
        if kind in COLUMN_KINDS:
            return propose_column_shardings(self.loads[table_index], kind, world, rank_seconds)
        if kind == "table_wise":
            least = _smallest(rank_seconds[self.owners], self.num_tried)
            return [table_wise(int(rank)) for rank in self.owners[least]]
        host_seconds = rank_seconds.reshape(world.num_hosts, -1).mean(1)
        return [host_wise(world, int(host)) for host in _smallest(host_seconds, self.num_tried)]

    def predict_rank_seconds(self, state: State) -> Floats:
        """Predict the seconds that each rank is busy as an owner, plus a small weight on its bytes, (N,)."""
        world = self.world
        n = self.world.num_ranks
        fetch = state.links[1]
        push = state.links[2]
        uplink = fetch[2 * n : 2 * n + world.num_hosts] + push[2 * n + world.num_hosts :]
        seconds: Floats = fetch[:n] + push[n : 2 * n] + state.processor
        seconds = seconds + np.repeat(uplink, world.ranks_per_host)
        relative_bytes = state.owned_bytes / max(self.even_bytes, 1.0)
        budget = self.problem.memory.bytes
        if budget is not None:
            over = np.maximum(0.0, state.owned_bytes - max(budget, self.even_bytes))
            seconds = seconds + over * min(self.problem.memory.seconds_per_byte, 1.0)
        return seconds + 0.01 * self.scale * relative_bytes

    def compute_objective_with_table(
        self, state: State, table_index: int, exchange: str, sharding: Sharding
    ) -> float:
        """Return the objective with one more table; the state is restored afterwards."""
        self.add_table_costs(state, table_index, exchange, sharding)
        objective = self.compute_objective(state)
        self.add_table_costs(state, table_index, exchange, sharding, -1.0)
        return objective

    def improve_by_local_search(self, state: State) -> State:
        """Change tables one after another to their best option, until a sweep over all tables gains too little."""
        for _ in range(MAX_SWEEPS):
            before = self.compute_objective(state)
            for t in self.order_tables():
                exchange, sharding = state.chosen[t]
                current = self.compute_objective(state)
                if self.has_fixed_partials and exchange == "partials":
                    continue
                partials_before = state.partials
                self.add_table_costs(state, t, exchange, sharding, -1.0)
                best = (exchange, sharding)
                least = current * (1 - 1e-6)
                for other, kind in self.options[t]:
                    # A single table under `partials` saves nothing.
                    if other == "partials" and (self.has_fixed_partials or partials_before is None):
                        continue
                    for candidate in self.candidate_shardings(state, t, kind):
                        objective = self.compute_objective_with_table(state, t, other, candidate)
                        if objective < least:
                            best = (other, candidate)
                            least = objective
                self.add_table_costs(state, t, *best)
                state.chosen[t] = best
            if self.compute_objective(state) > before * (1 - MIN_GAIN):
                break
        return self.recompute_state_costs(state)

    def apply_tower_compression(self, state: State) -> None:
        """Subtract the bytes between towers that operators inside towers save. Call once, at the end of the search.

        The placement of tables does not depend on it, because the search moves no table into a tower."""
        chosen = state.chosen
        towers = [
            self.links.tower_of(sharding) if exchange in BY_TOWERS else None
            for exchange, sharding in chosen
        ]
        # Under `tower_rows` one rank of the tower has whole bags.
        owners = [
            1 if exchange == "tower_rows" else sharding.num_owners for exchange, sharding in chosen
        ]
        is_cut = [sharding.slices > 1 for _, sharding in chosen]
        has_table_outside = any(
            exchange in BY_TOWERS and tower is None and not cut
            for (exchange, _), tower, cut in zip(chosen, towers, is_cut, strict=True)
        )
        if has_table_outside and self.problem.is_fetched_ahead:
            return
        exchanges = [exchange for exchange, _ in chosen]
        compression = find_tower_compression(self.partials.model, towers, owners, is_cut, exchanges)
        for t, (_, sharding) in enumerate(chosen):
            if not self.links.is_in_towers(sharding):
                continue
            changes = compression.list_flows(t, self.samples, sharding.num_owners)
            for flow in changes:
                links = self.links.load(flow.pattern, sharding).seconds(flow.channel)
                state.links[CHANNELS.index(flow.channel)] += flow.bytes * links
            crossing = predict_transfer_seconds(changes, 0, self.links).trainer
            state.processor += crossing * self.is_trainer
        state.tower_compression = compression

    def recompute_state_costs(self, state: State) -> State:
        """Sum the costs of a state anew, without rounding errors from tables that were added and removed."""
        rebuilt = self.empty_state()
        rebuilt.chosen = list(state.chosen)
        for t, chosen in enumerate(state.chosen):
            self.add_table_costs(rebuilt, t, *chosen)
        return rebuilt


def count_max_slices(table_load: TableLoad, sharding_kind: Kind, world: World) -> int:
    """Return the largest number of slices of a table's rows; 1: rows may not be cut."""
    if not table_load.may_be_cut:
        return 1
    has_hosts = world.num_hosts > 1 and world.ranks_per_host > 1
    owners = len(world.owners)
    if sharding_kind == "grid":
        owners = world.num_hosts * (has_hosts and not world.has_servers)
    return max(1, min(owners, table_load.width // MIN_SLICE_COLUMNS))


def propose_column_shardings(
    table_load: TableLoad, sharding_kind: Kind, world: World, rank_seconds: Floats
) -> list[Sharding]:
    """Propose shardings with as many slices as possible on the least busy ranks, or on the least busy host.

    rank_seconds (N,): seconds that each rank is busy already."""
    slices = count_max_slices(table_load, sharding_kind, world)
    hosts = rank_seconds.reshape(world.num_hosts, -1).mean(1).argsort(kind="stable").tolist()
    if sharding_kind == "grid":
        return [grid(world, hosts[:slices])]
    owners = sorted(world.owners, key=lambda rank: rank_seconds[rank])
    shardings = [column_wise(owners[:slices])]
    if 1 < world.ranks_per_host < slices and not world.has_servers:
        shardings.append(column_wise(host_wise(world, hosts[0]).ranks))
    return shardings


def _smallest(values: Floats, count: int) -> NDArray[np.intp]:
    """Return the indices of the smallest values, ascending: at least `count`, or all of a short array."""
    if len(values) <= 2 * count:
        return np.argsort(values, kind="stable")
    smallest = np.argpartition(values, count)[:count]
    return smallest[np.argsort(values[smallest], kind="stable")]


def _rank_index(ranks: tuple[int, ...]) -> Any:
    """Return an index of these ranks' elements in an array of all ranks; a slice if the ranks are consecutive."""
    first = ranks[0]
    last = ranks[-1]
    return slice(first, last + 1) if last - first + 1 == len(ranks) else list(ranks)
