"""Opening of a plan's exchange: for each kind of hop the function that opens the part that runs it.

A part is one exchange with the tables that chose it. Tables whose rows are read ahead by other steps are other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from colonnade.comm.mesh import TRAINING, Mesh
from colonnade.comm.process_groups import open_tower_mesh
from colonnade.errors import ConfigError
from colonnade.exchange.bag_layout import (
    BagLayout,
    LastHop,
    build_bag_layout,
    find_evaluated_fields,
)
from colonnade.exchange.bags import BagHops, BagsExchange
from colonnade.exchange.cached import CachedExchange
from colonnade.exchange.contract import ExchangePart
from colonnade.exchange.exchange import Exchange
from colonnade.exchange.operator_cut import (
    choose_remote_consumers,
    choose_tower_evaluated_consumers,
    explain_not_remote,
    map_fields_to_towers,
    restrict_declaration_to_tables,
)
from colonnade.exchange.operators import Operators, RemoteAttention, RemoteEvaluation
from colonnade.exchange.replicated import ReplicatedExchange
from colonnade.exchange.rows import RowsExchange
from colonnade.hops.kinds import (
    EXCHANGES,
    BagsHop,
    CachedHop,
    CopiesHop,
    Hop,
    PartialsHop,
    RelayHop,
    RowsHop,
    check_hops,
)
from colonnade.hops.links import Links
from colonnade.interaction import TargetAttention
from colonnade.lookup.contract import TowerConsumers
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.plan.plan import EXACT, Codecs
from colonnade.staleness import TableCache
from colonnade.topology.sharding import Sharding, table_wise
from colonnade.topology.towers import list_tower_ranks, tower_of
from colonnade.wire.coding import Coding
from colonnade.wire.owner_map import build_owner_map
from colonnade.wire.tower_transport import PeerTransport, TowerTransport, order_peers
from colonnade.wire.transport import LastTransport, LocalTransport, WorldTransport, select_columns

TOWER_THREADS = ("lookahead", TRAINING)
"""Threads that issue the calls of a tower's small world."""


def check_sharding_fits_exchange(
    table_name: str, exchange: str, sharding: Sharding, num_ranks: int
) -> None:
    """Check that a table's sharding fits the world and its exchange; else raise ConfigError."""
    if sharding.ranks[-1] >= num_ranks:
        raise ConfigError(
            f"table {table_name!r}: got a sharding on rank {sharding.ranks[-1]}, wanted ranks 0 .. {num_ranks - 1}"
        )
    if sharding.is_replicated and len(sharding.ranks) < num_ranks:
        raise ConfigError(
            f"table {table_name!r}: got copies on {len(sharding.ranks)} of {num_ranks} ranks, wanted one on each: "
            "replicated(num_ranks)"
        )
    if exchange == "replicated" and not sharding.is_replicated:
        raise ConfigError(
            f"table {table_name!r}: got exchange=replicated for rows that are sharded {sharding.kind}, wanted the "
            "sharding "
            "replicated, which implies it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableExchange:
    """Exchange of one table, or of one slice of a table."""

    exchange: str
    """Name of its hops: a key of EXCHANGES."""
    sharding: Sharding
    reads_ahead: int = 0
    """Number of steps between reading a row and its use."""
    cache: TableCache | None = None
    """Cache of a table whose exchange is "cached"."""


def open_exchange(
    declaration: EmbeddingDeclaration,
    mesh: Mesh,
    tables: Sequence[TableExchange],
    *,
    codecs: Codecs = EXACT,
    seed: int = 0,
    towers: int | None = None,
    copies_on: torch.device | None = None,
) -> Exchange:
    """Open this rank's side of a plan's exchange. Collective.

    seed: the run's, of the random bits that codecs round gradients with and updates rows. towers: number of towers,
    default one for each host. copies_on: device with a cache's copies; None: main memory. Raises ConfigError for
    exchanges that cannot work in this world."""
    world = mesh.world
    links = Links(world, 1 if world.num_ranks == 1 else towers or world.num_hosts)
    shardings = [own.sharding for own in tables]
    kinds = [
        (links.resolve_exchange(own.exchange, own.sharding), own.reads_ahead) for own in tables
    ]
    for table, (name, _), sharding in zip(declaration.tables, kinds, shardings, strict=True):
        check_sharding_fits_exchange(table.name, name, sharding, mesh.num_ranks)
    looked_up = {feature.table for feature in declaration.features}
    tables_of_kind = {
        kind: {t.name for t, of in zip(declaration.tables, kinds, strict=True) if of == kind}
        & looked_up
        for kind in sorted(set(kinds))
    }
    used = {kind: members for kind, members in tables_of_kind.items() if members} or {
        kinds[0]: set()
    }
    repeated = {name for name, _ in used if sum(name == other for other, _ in used) > 1}
    parts: dict[str, ExchangePart[Any]] = {}
    for (name, late), members in used.items():
        part = PartSettings(
            declaration=declaration
            if len(used) == 1
            else restrict_declaration_to_tables(declaration, members, name),
            mesh=mesh,
            shardings=shardings,
            coding=Coding(codecs, seed),
            num_towers=links.num_towers,
            reads_ahead=late,
            caches=[own.cache for own in tables],
            copies_on=copies_on,
        )
        key = f"{name}@{late}" if name in repeated else name
        parts[key] = open_exchange_part(EXCHANGES[name], part)
    return Exchange(declaration, mesh, parts, [late for _, late in used])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSettings:
    """Settings of one part of an exchange; lists are by table of the whole declaration."""

    declaration: EmbeddingDeclaration
    """Features and consumers of the part's tables."""
    mesh: Mesh
    shardings: Sequence[Sharding]
    coding: Coding
    num_towers: int
    reads_ahead: int
    """Number of steps between reading a row and its use."""
    caches: Sequence[TableCache | None] = ()
    copies_on: torch.device | None = None
    """Device of a cache's copies; None: main memory."""


def open_exchange_part(hops: Sequence[Hop], part: PartSettings) -> ExchangePart[Any]:
    """Open an exchange of these hops. Collective. Raises ConfigError for hops that are no exchange."""
    check_hops(hops)
    if part.reads_ahead and not hops[0].sends_unique_ids:
        _check_no_squares(part.declaration)
    return OPENERS[type(hops[0])](hops, part)


def _open_rows(hops: Sequence[Hop], part: PartSettings) -> RowsExchange:
    return RowsExchange(part.declaration, part.mesh, part.shardings, part.coding)


def _open_copies(hops: Sequence[Hop], part: PartSettings) -> ExchangePart[Any]:
    if part.mesh.num_ranks == 1:
        return _open_rows(hops, part)
    return ReplicatedExchange(part.declaration, part.mesh, part.coding)


def _open_cached(hops: Sequence[Hop], part: PartSettings) -> CachedExchange:
    return CachedExchange(
        part.declaration, part.mesh, part.shardings, part.caches, part.coding, part.copies_on
    )


def _open_bags_exchange(hops: Sequence[Hop], part_settings: PartSettings) -> BagsExchange:
    """Open an exchange of bags that owners pool and, where the hop replies with partials, evaluate operators of."""
    declaration = part_settings.declaration
    mesh = part_settings.mesh
    shardings = part_settings.shardings
    evaluates = isinstance(hops[0], PartialsHop)
    consumers: tuple[str, ...] = ()
    if evaluates:
        consumers = choose_remote_consumers(
            declaration, shardings, world=mesh.world, reads_ahead=part_settings.reads_ahead
        )
        _check_sequence_consumers(declaration, mesh, consumers, part_settings.reads_ahead)
    evaluated = find_evaluated_fields(declaration, shardings, consumers, has_whole_bags=False)
    layout = build_bag_layout(
        declaration, shardings, mesh.num_ranks, evaluated, sums_groups=not part_settings.reads_ahead
    )
    messages = [layout.sent_columns(rank) for rank in range(mesh.num_ranks)]
    sent = messages[mesh.rank]
    dtype = declaration.compute_dtype
    transport: LastTransport
    if mesh.num_ranks == 1:
        transport = LocalTransport(sent, layout.arriving, dtype)
    else:
        transport = WorldTransport(mesh, messages, layout.arriving, part_settings.coding, dtype)
    evaluation = RemoteEvaluation(attention=_build_attention(layout, mesh, shardings))
    if evaluates:
        operators = Operators(
            declaration, consumers, evaluated.taken_by, evaluators="the rows' owners"
        )
        evaluation = replace(evaluation, operators=operators, keeps_pooled=True)
    return BagsExchange(
        layout,
        build_owner_map(shardings, mesh.num_ranks),
        mesh,
        BagHops(LastHop(transport, layout.pooled_columns(mesh.rank), sent)),
        part_settings.coding,
        evaluation,
    )


def _check_no_squares(declaration: EmbeddingDeclaration) -> None:
    """Raise ConfigError for consumers of squares, whose gradients need the vectors that owners read ahead: a checkpoint
    has sums of bags, not these."""
    squared = {field.name for field in declaration.fields if field.is_squared}
    for name, consumer in declaration.consumers.items():
        for field in declaration.fields:
            if field.name in squared.intersection(consumer.features):
                table = declaration.tables[declaration.parts[field.part][0]].name
                raise ConfigError(
                    f"table {table!r}: got an exchange of bags with rows that are read ahead, and consumer {name!r} "
                    f"over ids, wanted rows or no staleness: set plan.tables.{table}.exchange=rows or "
                    f"plan.tables.{table}.staleness_steps=0, or use over='fields'"
                )


def _check_sequence_consumers(
    declaration: EmbeddingDeclaration, mesh: Mesh, consumers: Sequence[str], reads_ahead: int
) -> None:
    """Check that consumers of sequences can be evaluated on the ranks of their rows; else raise ConfigError."""
    for name, consumer in declaration.consumers.items():
        if not consumer.interaction.sequences or name in consumers:
            continue
        why = explain_not_remote(declaration, name, world=mesh.world, reads_ahead=reads_ahead)
        by_name = {field.name: declaration.features[field.feature] for field in declaration.fields}
        feature = by_name[consumer.features[-1]]
        raise ConfigError(
            f"feature {feature.name!r} of table {feature.table!r}: got exchange partials for a sequence that "
            f"consumer {name!r} takes, but {why}; give this table exchange rows"
        )


def _build_attention(
    layout: BagLayout, mesh: Mesh, shardings: Sequence[Sharding]
) -> dict[str, RemoteAttention]:
    """Return attention by consumer, for consumers of sequences that owners evaluate."""
    declaration = layout.declaration
    attention = {}
    for name, (query, sequence) in layout.evaluated.attended.items():
        interaction = declaration.consumers[name].interaction
        assert isinstance(interaction, TargetAttention)
        feature = declaration.features[declaration.fields[sequence].feature]
        ranks = shardings[declaration.table_index_of(feature)].ranks
        attention[name] = RemoteAttention(interaction, mesh, ranks, query, sequence)
    return attention


def _open_relay(hops: Sequence[Hop], part: PartSettings) -> BagsExchange:
    """Open an exchange of bags by towers: one rank of a tower sends a sample's values. Where it pools rows, the hop
    inside the tower is an exchange of rows."""
    if part.mesh.num_ranks == 1:
        return _open_bags_exchange([BagsHop()], part)
    declaration = part.declaration
    mesh = part.mesh
    shardings = part.shardings
    reads_ahead = part.reads_ahead
    towers = list_tower_ranks(mesh.world, part.num_towers)
    size = len(towers[0])
    own = mesh.rank // size
    sends_rows = isinstance(hops[1], RowsHop)
    pooled_on = shardings
    if sends_rows:
        _check_tables_in_towers(declaration, shardings, towers)
        pooled_on = _shard_tables_over_peers(mesh.rank, shardings, towers)
    consumers = choose_tower_evaluated_consumers(
        declaration, pooled_on, mesh.world, num_towers=len(towers), reads_ahead=reads_ahead
    )
    evaluated = find_evaluated_fields(declaration, pooled_on, consumers, has_whole_bags=True)
    layout = build_bag_layout(declaration, pooled_on, mesh.num_ranks, evaluated)
    by_field = map_fields_to_towers(declaration, pooled_on, towers)
    inside = [
        select_columns(layout.fields.columns, _fields_in_tower(by_field, tower))
        for tower in range(len(towers))
    ]
    carried = [
        select_columns(
            layout.arriving,
            [
                key
                for key in layout.arriving.dims
                if by_field[layout.fields_of_column(key)[0]] == tower
            ],
        )
        for tower in range(len(towers))
    ]
    dtype = declaration.compute_dtype
    peers = order_peers(mesh.rank, size, mesh.num_ranks)
    last = PeerTransport(mesh, size, carried, layout.arriving, part.coding, dtype)
    inner = []
    tower = None
    if sends_rows:
        tower = RowsExchange(
            layout.pooled_declaration(mesh.rank),
            open_tower_mesh(mesh, size, TOWER_THREADS),
            _shard_tables_in_tower(mesh.rank, shardings, towers),
        )
    else:
        messages = [layout.pooled_columns(rank) for rank in range(mesh.num_ranks)]
        inner = [TowerTransport(mesh, size, messages, inside[own], dtype)]
    tower_by_consumer = {
        name: number
        for name, fields in evaluated.taken_by.items()
        if (number := by_field[fields[0]]) is not None
    }
    operators = None
    if consumers:
        operators = Operators(
            declaration,
            consumers,
            evaluated.taken_by,
            evaluators="ranks of a tower",
            inside=TowerConsumers(size, tower_by_consumer),
        )
    return BagsExchange(
        layout,
        build_owner_map(pooled_on, mesh.num_ranks),
        mesh,
        BagHops(LastHop(last, inside[own], carried[own]), inner, tower, peers),
        part.coding,
        RemoteEvaluation(operators, waits_in_tower=bool(reads_ahead and consumers)),
    )


def _fields_in_tower(by_field: Sequence[int | None], tower: int) -> list[int]:
    """Return the fields whose rows are all in this tower."""
    return [i for i, home in enumerate(by_field) if home == tower]


def _check_tables_in_towers(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    towers: Sequence[Sequence[int]],
) -> None:
    """Check that the rows of each looked-up table are in one tower; else raise ConfigError."""
    for feature in declaration.features:
        sharding = shardings[declaration.table_index_of(feature)]
        if tower_of(sharding, towers) is None and feature.pooling != "sequence":
            raise ConfigError(
                f"table {feature.table!r}: got exchange tower_rows and rows on ranks {list(sharding.ranks)}, "
                f"wanted all of them in one of {len(towers)} towers, such as ranks {list(towers[0])}; give it "
                "such a sharding, or exchange towers"
            )


def _shard_tables_over_peers(
    rank: int, shardings: Sequence[Sharding], towers: Sequence[Sequence[int]]
) -> list[Sharding]:
    """Return shardings for this rank's samples: each table is on this rank's peer in the table's tower."""
    size = len(towers[0])
    return [
        table_wise((tower_of(sharding, towers) or 0) * size + rank % size) for sharding in shardings
    ]


def _shard_tables_in_tower(
    rank: int, shardings: Sequence[Sharding], towers: Sequence[Sequence[int]]
) -> list[Sharding]:
    """Return shardings in the small world of this rank's tower; arbitrary ones for tables of other towers."""
    size = len(towers[0])
    first = rank // size * size
    return [
        replace(sharding, ranks=tuple(member - first for member in sharding.ranks))
        if tower_of(sharding, towers) == first // size
        else table_wise(0)
        for sharding in shardings
    ]


OPENERS: dict[type[Hop], Callable[[Sequence[Hop], PartSettings], ExchangePart[Any]]] = {
    RowsHop: _open_rows,
    CopiesHop: _open_copies,
    BagsHop: _open_bags_exchange,
    PartialsHop: _open_bags_exchange,
    RelayHop: _open_relay,
    CachedHop: _open_cached,
}
"""Function that opens an exchange, by the kind of its first hop. Collective."""
