"""What can be chosen for each table, what is, and what it costs: the values of plan/search/search.py.

All bytes and seconds are of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.comm_volume import ExchangeName, step_seconds
from colonnade.topology.sharding import Kind, Sharding

Option = tuple[ExchangeName, Kind]
OPTIONS: tuple[Option, ...] = (
    ("rows", "row_wise"),
    ("rows", "host_wise"),
    ("rows", "table_wise"),
    ("pooled", "row_wise"),
    ("pooled", "host_wise"),
    ("pooled", "table_wise"),
    ("rows", "column_wise"),
    ("pooled", "column_wise"),
    ("rows", "grid"),
    ("pooled", "grid"),
    ("partials", "row_wise"),
    ("partials", "host_wise"),
    ("partials", "table_wise"),
    ("towers", "table_wise"),
    ("tower_rows", "table_wise"),
    ("replicated", "replicated"),
)
"""Pairs of exchange and sharding that the search tries, those by towers only for a model's tower modules. Settings may
lay tables out in towers otherwise."""
BY_OWNERS = ("pooled", "partials", *BY_TOWERS)
"""Exchanges under which bags are pooled before they come to the samples."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of each rank, for rows."""

    bytes: int | None = None
    """None: no limit."""
    seconds_per_byte: float = float("inf")
    """What a byte more than fits costs a step, in reads of files; inf: there are no files."""


@dataclass(frozen=True, slots=True)
class Forced:
    """What a person said of one table; None: as is best."""

    kind: Kind | None = None
    exchange: ExchangeName | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one table under one choice, beside the choices of all others."""

    exchange: ExchangeName
    sharding: Sharding
    sent: Mapping[tuple[str, str], float]
    """Bytes that a rank sends, the mean over ranks, by (channel, "local" or "remote")."""
    seconds: float
    """Of links and processors, if all of them had the same to do: the table's part of a step."""
    more: float
    """By how much this choice makes the whole step longer than the chosen one, all other tables staying as they are."""

    @property
    def option(self) -> Option:
        return self.exchange, self.sharding.kind

    def bytes_over(self, link: str) -> float:
        return sum(size for (_, over), size in self.sent.items() if over == link)


@dataclass(frozen=True, slots=True)
class TableChoice:
    name: str
    chosen: Cost
    others: tuple[Cost, ...]
    """The other choices that this table has, cheapest first."""
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerChoice:
    """Of one of the model's first operators: what of it travels. Floats are those of a sample, from all owners."""

    name: str
    is_partial: bool
    """Else its fields' values travel, or their rows."""
    partial_floats: float | None
    """None: it has no partial that adds up."""
    value_floats: float
    why: str
    is_apart: bool = False
    """It would have a partial, were it not for how rows of a table are laid out."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of the slowest rank or uplink."""

    processor: float
    route: float
    fetch: float
    push: float
    crowding: float = 1.0
    """`World.crowding`"""
    is_fetched_ahead: bool = False

    @property
    def step(self) -> float:
        """Ranks that share processors compute while others of them wait."""
        return step_seconds(self.processor, self.waited, self.behind, self.crowding)

    @property
    def waited(self) -> float:
        """For links, while the processor has nothing to do: gradients must be gone before the next rows come."""
        return self.push + (0.0 if self.is_fetched_ahead else self.fetch)

    @property
    def behind(self) -> float:
        """On links while the processor computes."""
        return self.route + (self.fetch if self.is_fetched_ahead else 0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    tables: tuple[TableChoice, ...]
    seconds: Seconds
    sent: Mapping[tuple[str, str], float]
    """Bytes that a rank sends, the mean over ranks, by (channel, "local" or "remote"), headers included."""
    halved_seconds: float
    """What a step would save if values and gradients travelled as 16 bits (which is never chosen: it is not exact)."""
    consumers: tuple[ConsumerChoice, ...] = ()
    """Where the model's are known, in its order."""

    @property
    def shardings(self) -> dict[str, Sharding]:
        return {table.name: table.chosen.sharding for table in self.tables}

    @property
    def exchanges(self) -> dict[str, str]:
        return {table.name: table.chosen.exchange for table in self.tables}
