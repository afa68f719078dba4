"""Kinds of hops, and the exchanges that are made of them: who sends what to whom, as values without torch.

A hop is the way between the ranks of the samples and those of the rows. Ids go forward over an exchange's hops, values
come back in reverse order, gradients go forward again. A hop says what it sends (`flows`), what it computes (`work`)
and which tables it cannot serve (`refuses`); `exchange/__init__.py` has the function that opens each kind. Bytes of a
flow are those of one block of its pattern (`links.py`), so that the bytes on any link follow from both.

Legend: n owners of each of k slices of a table; N ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from colonnade.errors import ConfigError
from colonnade.hops.message_bytes import (
    BATCH_WEIGHT,
    FLAG_BYTES,
    HEAD_BYTES,
    NUM_SAMPLES,
    SIZE_BYTES,
    expected_id_bytes,
    expected_id_list_bytes,
    expected_length_bytes,
)

if TYPE_CHECKING:
    from colonnade.hops.load import TableLoad
    from colonnade.topology.sharding import Kind
    from colonnade.topology.world import World

Channel = Literal["route", "fetch", "push"]
CHANNELS: tuple[Channel, ...] = ("route", "fetch", "push")
"""Channels of ids, values and gradients."""
Pattern = Literal[
    "owners",
    "bags",
    "host_sums",
    "relays",
    "relay_slices",
    "relay_bags",
    "relay_rows",
    "everyone",
    "tower",
]
"""Blocks that are sent for one table.

owners: between each trainer and each owner. host_sums: from all ranks to each, summed by hosts on their way. bags: as
host_sums for rows on all ranks of a world with hosts that sum, else as owners.
relays: between each trainer and its peer in the table's tower. relay_slices: the same, one block for each slice.
relay_bags: between that peer and each owner, for each trainer. relay_rows: between each rank of the tower that has
peers, and each owner, for all of them. everyone, tower: between all ranks, or all ranks of each tower.
"""
Group = Literal["world", "tower"]
WHOLE_ROWS: tuple[Kind, ...] = ("row_wise", "host_wise", "table_wise")
COLUMNS: tuple[Kind, ...] = ("column_wise", "grid")
SHARED_BYTES = float(BATCH_WEIGHT.size)
"""Bytes that each rank sends every other rank whatever the exchanges: the weight of its batch."""
LIST_FLAG_BYTES = 1.0
"""Bytes that each rank sends every other rank for each list of unique ids: a flag for whether ids follow."""

CACHE_HEAD_BYTES = 5.0
"""Bytes that each rank with cached rows sends every other rank: a size, and half a byte after each of two lists of
bits (cache/messages.py)."""
LISTED_BITS = 3
"""Bits of each listed row in a message of a rank with cached rows."""
RENEWED_BITS = 17
"""Bits of each renewed copy in addition: its age, and the owner's reply."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of each block of a pattern on one channel in a step."""

    channel: Channel
    pattern: Pattern
    bytes: float


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of ranks and slices that the rows of a table are split over."""

    owners: int
    """Number of owners n of each slice."""
    slices: int = 1
    """Number of slices k of the columns."""
    trainers: int = 1
    """Number of ranks with samples."""
    tower_size: int = 1
    """Number of ranks of a tower."""
    unique_peers: float = 0.0
    """Number of distinct rows in the batches of one rank of each tower together."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """Operations on rows and lookups in a step."""

    gathered: float = 0.0
    """Number of rows read, or added to a sum."""
    updated: float = 0.0
    """Number of rows updated by the optimizer."""
    planned: float = 0.0
    """Number of lookups sorted and made unique."""
    packed: float = 0.0
    """Number of lookups packed into messages and joined again."""


@dataclass(frozen=True, slots=True)
class TableNeeds:
    """Needs of a table's features and of the consumers that read them."""

    is_read: bool = True
    """True if any feature reads the table."""
    is_pooled: bool = True
    """True if no feature reads the rows as a sequence."""
    is_attended: bool = False
    """True if owners can evaluate all consumers of its sequences."""
    needs_rows: bool = False
    """True if a consumer over ids needs each row, and rows are read ahead."""


class Hop(ABC):
    """Hop between the samples' ranks and the rows' owners: the base of all kinds, which are frozen values."""

    __slots__ = ()
    name: ClassVar[str]
    sends_unique_ids: ClassVar[bool] = False
    """True if each row's id is sent once, False if every lookup of a bag is."""
    evaluates: ClassVar[bool] = False
    """True if operators may be evaluated before the values are sent."""
    shardings: ClassVar[tuple[Kind, ...]] = ()
    """Kinds of sharding that the planner tries for exchanges that begin with this hop."""
    implied_by: ClassVar[str | None] = None
    """Setting that implies such an exchange; None: users choose it by name."""

    @property
    def calls(self) -> tuple[int, int, int]:
        """Number of all-to-alls of a step by channel, in addition to the two of sizes and ids of all exchanges."""
        return (0, 1, 1)

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        """Flows of a step whatever the tables."""
        return ()

    @abstractmethod
    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        """Return what is sent for one table in a step."""

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        """Return the work of every trainer, for its own samples, and of every owner, for all samples."""
        return RowWork(), RowWork()

    def refuses(self, table: TableNeeds, world: World) -> str | None:
        """Return why this hop cannot serve a table in this world; None: it can."""
        return None


@dataclass(frozen=True, slots=True)
class RowsHop(Hop):
    """Unique ids are sent to the owners, and rows in reply; the samples' ranks pool them."""

    group: Group = "world"
    """Ranks that it is between: all, or those of a tower, each of which asks for the lookups of all of its peers."""
    name: ClassVar[str] = "rows"
    sends_unique_ids: ClassVar[bool] = True
    shardings: ClassVar[tuple[Kind, ...]] = WHOLE_ROWS + COLUMNS

    @property
    def calls(self) -> tuple[int, int, int]:
        # In a tower, two calls send sizes and ids; its values are sent within those of the relay.
        return (2, 0, 0) if self.group == "tower" else (0, 1, 1)

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        size = float(SIZE_BYTES + FLAG_BYTES)
        if self.group == "tower":
            return (Flow("route", "tower", SHARED_BYTES + size),)
        return (Flow("route", "everyone", size),)

    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        n = rank_split.owners
        pattern: Pattern = "owners"
        flags = Flow("route", "everyone", LIST_FLAG_BYTES * rank_split.slices)
        unique = table_load.unique_rank
        value_bytes = table_load.value_bytes
        gradient_bytes = table_load.gradient_bytes
        if self.group == "tower":
            pattern = "relay_rows"
            flags = Flow("route", "tower", LIST_FLAG_BYTES)
            unique = rank_split.unique_peers
            value_bytes = table_load.row_bytes  # no codec inside a tower
            gradient_bytes = table_load.width * table_load.weight_bytes
        ids = table_load.list_ratio * expected_id_list_bytes(unique / n, table_load.vocabulary, n)
        owner_rows = unique / (n * rank_split.slices)
        return (
            Flow("route", pattern, ids - LIST_FLAG_BYTES),
            flags,
            Flow("fetch", pattern, owner_rows * value_bytes),
            Flow("push", pattern, owner_rows * gradient_bytes),
        )

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        requested = rank_split.trainers * table_load.unique_rank
        trainer = RowWork(
            gathered=2 * table_load.lookups * rank_split.slices,
            planned=table_load.lookups * rank_split.slices,
        )
        if self.group == "tower":
            requested = rank_split.tower_size * rank_split.unique_peers
            trainer = RowWork()
        # Owners copy rows, sum gradients and apply them.
        owner = RowWork(
            gathered=2 * requested / rank_split.owners,
            updated=table_load.unique_world / rank_split.owners,
            planned=requested / rank_split.owners,
        )
        return trainer, owner


@dataclass(frozen=True, slots=True)
class CopiesHop(Hop):
    """Hop without values, because ranks have all rows: unique ids and gradients are sent to all, and no values."""

    name: ClassVar[str] = "copies"
    sends_unique_ids: ClassVar[bool] = True
    shardings: ClassVar[tuple[Kind, ...]] = ("replicated",)
    implied_by: ClassVar[str | None] = "sharding=replicated"

    @property
    def calls(self) -> tuple[int, int, int]:
        return (0, 0, 1)

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        return (Flow("route", "everyone", float(SIZE_BYTES + FLAG_BYTES)),)

    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        ids = table_load.list_ratio * expected_id_list_bytes(
            table_load.unique_rank, table_load.vocabulary, 1
        )
        return (
            Flow("route", "owners", ids - LIST_FLAG_BYTES),
            Flow("route", "everyone", LIST_FLAG_BYTES * rank_split.slices),
            Flow("push", "owners", table_load.unique_rank * table_load.gradient_bytes),
        )

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        requested = rank_split.trainers * table_load.unique_rank
        trainer = RowWork(
            gathered=2 * table_load.lookups + requested,
            updated=table_load.unique_world,
            planned=table_load.lookups + requested,
        )
        return trainer, RowWork()

    def refuses(self, table: TableNeeds, world: World) -> str | None:
        return "servers have no samples that read copies" if world.has_servers else None


@dataclass(frozen=True, slots=True)
class BagsHop(Hop):
    """Lookups are sent to the owners, which pool the rows of each bag and send the sums."""

    group: Group = "world"
    """Ranks that the sums are sent between: all, or those of a tower, one of which relays them."""
    name: ClassVar[str] = "bags"
    shardings: ClassVar[tuple[Kind, ...]] = WHOLE_ROWS + COLUMNS

    @property
    def calls(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self.group == "tower" else (0, 1, 1)

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        return (Flow("route", "everyone", float(HEAD_BYTES)),)

    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        route = Flow("route", "owners", _expected_lookup_bytes(table_load, rank_split.owners))
        if self.group == "tower":  # without codec
            inside = (
                table_load.bags * table_load.width * table_load.weight_bytes / rank_split.slices
            )
            return route, Flow("fetch", "relay_bags", inside), Flow("push", "relay_bags", inside)
        # Every owner sends and receives a block for all bags, with zeros for bags without a row of it.
        values = (
            table_load.bags * table_load.bag_bytes + table_load.samples * table_load.squares_bytes
        )
        gradients = (
            table_load.bags * table_load.gradient_bytes
            + table_load.samples * table_load.squares_gradient_bytes
        )
        return (
            route,
            Flow("fetch", "bags", values / rank_split.slices),
            Flow("push", "bags", gradients / rank_split.slices),
        )

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        lookups = table_load.lookups * rank_split.slices
        sums = (rank_split.owners + 1) * table_load.bags * rank_split.slices
        return RowWork(gathered=sums, packed=lookups / 2), _owner_work_of_bags(
            table_load, rank_split
        )

    def refuses(self, table: TableNeeds, world: World) -> str | None:
        if table.needs_rows:
            return "its rows are read ahead, and a consumer over ids needs each of them"
        if not table.is_read:
            return "no feature reads it"
        return None if table.is_pooled else "a feature reads it as a sequence"


@dataclass(frozen=True, slots=True)
class PartialsHop(Hop):
    """Lookups are sent to the owners, which pool bags and evaluate operators of them.

    Values and gradients depend on all tables together (plan/cost/partials.py): its flows are those of ids."""

    name: ClassVar[str] = "partials"
    evaluates: ClassVar[bool] = True
    shardings: ClassVar[tuple[Kind, ...]] = WHOLE_ROWS

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        return BagsHop().fixed_flows

    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        return (Flow("route", "owners", _expected_lookup_bytes(table_load, rank_split.owners)),)

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        trainer = RowWork(packed=table_load.lookups * rank_split.slices / 2)
        return trainer, _owner_work_of_bags(table_load, rank_split)

    def refuses(self, table: TableNeeds, world: World) -> str | None:
        # Owners attend to the rows of a sequence where they are.
        is_served = table.is_pooled or table.is_attended
        return BagsHop().refuses(replace(table, is_pooled=is_served), world)


@dataclass(frozen=True, slots=True)
class RelayHop(Hop):
    """Relay of values: one rank of the table's tower sends them to its peer, and may evaluate operators of them."""

    pools_rows: bool
    """True if the peer also receives the lookups, and pools rows that it requests from its tower."""
    name: ClassVar[str] = "relay"
    evaluates: ClassVar[bool] = True
    shardings: ClassVar[tuple[Kind, ...]] = ("table_wise",)

    @property
    def num_chunks(self) -> int:
        """Number of pipelined chunks in which values are sent inside a tower."""
        return 1 if self.pools_rows else 2

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        if not self.pools_rows:
            return ()
        return (Flow("route", "everyone", float(SIZE_BYTES + NUM_SAMPLES.size)),)

    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        if self.pools_rows:
            ids, values, gradients = BagsHop().flows(table_load, Split(1))
            return (
                Flow("route", "relay_slices", ids.bytes),
                Flow("fetch", "relays", values.bytes),
                Flow("push", "relays", gradients.bytes),
            )
        return (
            Flow("fetch", "relays", table_load.bags * table_load.bag_bytes),
            Flow("push", "relays", table_load.bags * table_load.gradient_bytes),
        )

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        if not self.pools_rows:
            return RowWork(), RowWork()
        # Ranks of a tower join, plan, pool and sum for their peers: on average as many lookups as a rank has.
        lookups = table_load.lookups * rank_split.slices
        sums = 2 * (table_load.lookups + table_load.bags) * rank_split.slices
        return RowWork(gathered=sums, planned=lookups, packed=lookups), RowWork()

    def refuses(self, table: TableNeeds, world: World) -> str | None:
        return BagsHop().refuses(table, world)


@dataclass(frozen=True, slots=True)
class CachedHop(Hop):
    """Copies of rows stay on the ranks of the samples for some steps, and their gradients wait there."""

    rows: RowsHop
    """Hop of the rows that are not copied."""
    name: ClassVar[str] = "cached"
    sends_unique_ids: ClassVar[bool] = True
    shardings: ClassVar[tuple[Kind, ...]] = WHOLE_ROWS + COLUMNS
    implied_by: ClassVar[str | None] = "plan.cache"

    @property
    def calls(self) -> tuple[int, int, int]:
        return (1, 1, 1)  # The first one sends the bits of renewed copies.

    @property
    def fixed_flows(self) -> tuple[Flow, ...]:
        return (*self.rows.fixed_flows, Flow("route", "everyone", CACHE_HEAD_BYTES))

    def flows(self, table_load: TableLoad, rank_split: Split) -> tuple[Flow, ...]:
        cache = table_load.cache
        if cache is None:
            return self.rows.flows(table_load, rank_split)
        n = rank_split.owners
        ids = table_load.list_ratio * expected_id_list_bytes(
            cache.listed / n, table_load.vocabulary, n
        )
        shards = n * rank_split.slices
        flags = (LISTED_BITS * cache.listed + RENEWED_BITS * cache.renewed) / (8 * n)
        return (
            Flow("route", "owners", ids - LIST_FLAG_BYTES + flags),
            Flow("route", "everyone", LIST_FLAG_BYTES * rank_split.slices),
            Flow("fetch", "owners", cache.fetched / shards * cache.record_bytes),
            Flow("push", "owners", cache.pushed / shards * table_load.gradient_bytes),
        )

    def work(self, table_load: TableLoad, rank_split: Split) -> tuple[RowWork, RowWork]:
        cache = table_load.cache
        if cache is None:
            return self.rows.work(table_load, rank_split)
        # Each batch updates its copies, and adds its gradients to the pending ones.
        trainer = RowWork(
            gathered=2 * table_load.lookups + table_load.unique_rank + cache.fetched + cache.pushed,
            updated=table_load.unique_rank,
            planned=table_load.lookups + table_load.unique_rank + cache.listed,
        )
        served = rank_split.trainers / rank_split.owners
        owner = RowWork(
            gathered=served * (cache.fetched + cache.pushed),
            updated=min(served * cache.pushed, table_load.unique_world / rank_split.owners),
            planned=served * (cache.listed + cache.pushed),
        )
        return trainer, owner


EXCHANGES: dict[str, tuple[Hop, ...]] = {
    "rows": (RowsHop(),),
    "replicated": (CopiesHop(),),
    "pooled": (BagsHop(),),
    "partials": (PartialsHop(),),
    "towers": (RelayHop(pools_rows=False), BagsHop("tower")),
    "tower_rows": (RelayHop(pools_rows=True), RowsHop("tower")),
    "cached": (CachedHop(RowsHop()),),
}
"""Hops by an exchange's name, from the samples to the rows."""
EXCHANGE_CHOICES = (
    *(name for name, hops in EXCHANGES.items() if hops[0].implied_by is None),
    "auto",
)
"""Values of the setting `plan.exchange`."""
BY_TOWERS = tuple(name for name, hops in EXCHANGES.items() if isinstance(hops[0], RelayHop))
"""Exchanges whose values are sent between peers of towers."""
EVALUATING = tuple(name for name, hops in EXCHANGES.items() if hops[0].evaluates)
"""Exchanges that may evaluate consumers before values are sent."""


def check_hops(hops: Sequence[Hop]) -> None:
    """Check that hops are those of an exchange in EXCHANGES; else raise ConfigError."""
    if tuple(hops) not in EXCHANGES.values():
        valid = "; ".join(f"{name}: {list(exchange)}" for name, exchange in EXCHANGES.items())
        raise ConfigError(f"got hops {list(hops)}, wanted those of an exchange: {valid}")


def get_exchange_setting(exchange: str) -> str:
    """Return the value of `plan.exchange` with which a table has an exchange: cached rows are `rows` with a cache."""
    return "rows" if exchange == "cached" else exchange


def list_flows(exchange: str, load: TableLoad, split: Split) -> tuple[Flow, ...]:
    """Return what all hops of an exchange send for one table in a step."""
    return tuple(flow for hop in EXCHANGES[exchange] for flow in hop.flows(load, split))


def find_refusal(exchange: str, table: TableNeeds, world: World) -> str | None:
    """Return why an exchange cannot serve a table in this world; None: it can."""
    reasons = (hop.refuses(table, world) for hop in EXCHANGES[exchange])
    return next((reason for reason in reasons if reason is not None), None)


def _expected_lookup_bytes(table_load: TableLoad, num_owners: int) -> float:
    """Return the bytes of a table's lookups, bag lengths and lookup weights in a message to one owner."""
    n = num_owners
    size = expected_id_bytes(
        table_load.lookups / n,
        table_load.unique_rank / n,
        table_load.vocabulary,
        n,
        list_ratio=table_load.list_ratio,
        raw_list_ratio=table_load.raw_list_ratio,
    )
    for column in table_load.columns:
        size += expected_length_bytes(column.longest, column.lookups, table_load.samples, n)
        size += column.lookups * table_load.weight_bytes / n if column.is_weighted else 0.0
    return size


def _owner_work_of_bags(table_load: TableLoad, rank_split: Split) -> RowWork:
    """Return the work of an owner that pools the bags of all trainers."""
    served = rank_split.trainers * table_load.lookups / rank_split.owners
    return RowWork(
        gathered=2 * served,
        updated=table_load.unique_world / rank_split.owners,
        planned=served,
        packed=served / 2,
    )
