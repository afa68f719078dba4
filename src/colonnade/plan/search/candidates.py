"""Values of the search: options of a table, constraints, costs and the planner's decision.

All bytes and seconds are those of one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colonnade.hops.kinds import EXCHANGES
from colonnade.hops.load import TableLoad
from colonnade.plan.cost.consumers import ModelLoad
from colonnade.plan.cost.step_time import step_seconds
from colonnade.plan.measure.device import RowRate
from colonnade.plan.names import Constraint as Constraint
from colonnade.topology.sharding import Kind, Sharding
from colonnade.topology.world import World

Option = tuple[str, Kind]
OPTIONS: tuple[Option, ...] = tuple(
    (exchange, kind) for exchange, hops in EXCHANGES.items() for kind in hops[0].shardings
)
"""Pairs of exchange and sharding that the search tries, tower exchanges only for a model's tower modules. Settings may
shard tables in towers in other ways."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory for rows on each rank."""

    bytes: int | None = None
    """Bytes of memory; None: no limit."""
    seconds_per_byte: float = float("inf")
    """Seconds of file reads per step for each byte of rows that does not fit; inf: rows must fit."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that a decision depends on: tables, ranks and links, measured speeds, and what settings fix."""

    loads: Sequence[TableLoad]
    world: World
    memory: Memory = Memory()
    rates: Sequence[RowRate] = ()
    """Measured speeds of gathering and updating rows, and of planning and packing lookups; empty: not measured."""
    forced: Mapping[str, Constraint] = field(default_factory=dict)
    """Constraints by table name; a table without one is free."""
    is_fetched_ahead: bool = False
    """True if staleness allows to fetch values early."""
    model: ModelLoad | None = None
    """Consumers of the tables' fields; `partials` is only considered with it."""
    towers: int | None = None
    """Number of towers; None: one for each host."""

    @property
    def num_towers(self) -> int:
        """Number of towers."""
        return self.towers or self.world.num_hosts


@dataclass(frozen=True, slots=True)
class TableCost:
    """Cost of one table under one sharding and exchange, given those of all other tables."""

    exchange: str
    sharding: Sharding
    sent: Mapping[tuple[str, str], float]
    """Bytes that a rank sends, the mean over ranks, by (channel, "local" or "remote")."""
    seconds: float
    """Seconds of the step for this table: those of links and processors if all of them were equally loaded."""
    more: float
    """Seconds that this choice adds to the step compared with the decision, all other tables unchanged."""

    @property
    def option(self) -> Option:
        """Exchange and kind of sharding."""
        return self.exchange, self.sharding.kind

    def bytes_over(self, link: str) -> float:
        """Return the bytes sent over a kind of links, "local" or "remote"."""
        return sum(size for (_, over), size in self.sent.items() if over == link)


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Decision for one table, with the cost of its alternatives."""

    name: str
    chosen: TableCost
    """Sharding and exchange that the planner chose, and their cost."""
    others: tuple[TableCost, ...]
    """Alternatives, cheapest first."""
    is_forced: bool = False
    """True if the configuration constrains the table."""


@dataclass(frozen=True, slots=True)
class ConsumerChoice:
    """Decision for one of the model's first operators: partials or values. Floats are per sample, from all owners."""

    name: str
    is_partial: bool
    """True if partials are sent, False if the values or rows of its fields are."""
    partial_floats: float | None
    """Number of floats of its partials; None: it has no partial that can be summed."""
    value_floats: float
    """Number of floats of its fields' values."""
    why: str
    """Reason of the decision, for messages."""
    depends_on_hot_rows: bool = False
    """True if only the hot rows of a table keep it from having a partial."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Predicted seconds of a step on the slowest rank or uplink, by phase."""

    processor: float
    route: float
    """Seconds of sending ids."""
    fetch: float
    """Seconds of sending values."""
    push: float
    """Seconds of sending gradients."""
    crowding: float = 1.0
    """Slowdown by threads that share processors (`World.crowding`)."""
    is_fetched_ahead: bool = False
    """True if staleness allows to fetch values of later steps early."""

    @property
    def step(self) -> float:
        """Seconds of the step. Ranks that share processors compute while others wait."""
        return step_seconds(self.processor, self.waited, self.behind, self.crowding)

    @property
    def waited(self) -> float:
        """Seconds of waiting for links with an idle processor: gradients must be sent before the next rows arrive."""
        return self.push + (0.0 if self.is_fetched_ahead else self.fetch)

    @property
    def behind(self) -> float:
        """Seconds of links that the processor hides by computing."""
        return self.route + (self.fetch if self.is_fetched_ahead else 0.0)


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """Decision of the planner for all tables, with its cost."""

    tables: tuple[TableChoice, ...]
    seconds: StepSeconds
    sent: Mapping[tuple[str, str], float]
    """Bytes that a rank sends, the mean over ranks, by (channel, "local" or "remote"), headers included."""
    halved_seconds: float
    """Seconds that a step would save with 16-bit values and gradients; never chosen, because it is not exact."""
    consumers: tuple[ConsumerChoice, ...] = ()
    """Decisions for the model's consumers in its order; empty if the model is unknown."""
    runners_up: tuple[PlanDecision, ...] = ()
    """Best decisions of other kinds, fastest first by prediction, as many as were requested."""

    @property
    def shardings(self) -> dict[str, Sharding]:
        """Sharding of each table by name."""
        return {table.name: table.chosen.sharding for table in self.tables}

    @property
    def exchanges(self) -> dict[str, str]:
        """Exchange of each table by name."""
        return {table.name: table.chosen.exchange for table in self.tables}
