"""The table of exchanges: what travels between the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colonnade.comm.mesh import Mesh
from colonnade.errors import ConfigError
from colonnade.exchange.cached import CachedExchange, TableCache
from colonnade.exchange.grouped import End, SeveralExchanges
from colonnade.exchange.operator_cut import part_of
from colonnade.exchange.partials import SubstituteExchange
from colonnade.exchange.pooled import PooledExchange
from colonnade.exchange.replicated import ReplicatedExchange
from colonnade.exchange.rows import RowsExchange
from colonnade.exchange.towers import TowerRowsExchange, TowersExchange
from colonnade.lookup.contract import BY_TOWERS, Exchange
from colonnade.lookup.layout import Declaration
from colonnade.topology.sharding import Sharding, row_wise_in
from colonnade.wire.codec import EXACT, Codecs
from colonnade.wire.coding import Coding

EXCHANGES: dict[str, type[PooledExchange] | type[RowsExchange]] = {
    "pooled": PooledExchange,
    "replicated": ReplicatedExchange,
    "rows": RowsExchange,
    "substitute": SubstituteExchange,
    "tower_rows": TowerRowsExchange,
    "towers": TowersExchange,
}


def implied_exchange(sharding: Sharding, name: str) -> str:
    """The exchange of a table for which `name` was asked: of replicated rows, nothing but ids and gradients travels."""
    return "replicated" if sharding.is_replicated else name


def check_exchange(table: str, name: str, sharding: Sharding, num_ranks: int) -> None:
    """Raises ConfigError where a table's sharding is of another world, or not one for its exchange."""
    if sharding.ranks[-1] >= num_ranks:
        raise ConfigError(
            f"table {table!r}: got a sharding on rank {sharding.ranks[-1]}, wanted ranks 0 .. {num_ranks - 1}"
        )
    if sharding.is_replicated and len(sharding.ranks) < num_ranks:
        raise ConfigError(
            f"table {table!r}: got copies on {len(sharding.ranks)} of {num_ranks} ranks, wanted one on each: "
            "replicated(num_ranks)"
        )
    if name == "replicated" and not sharding.is_replicated:
        raise ConfigError(
            f"table {table!r}: got exchange=replicated for rows that are sharded {sharding.kind}, wanted the sharding "
            "replicated, which implies it"
        )


def open_exchange(
    declaration: Declaration,
    mesh: Mesh,
    *,
    exchanges: Sequence[str] | None = None,
    shardings: Sequence[Sharding] | None = None,
    codecs: Codecs = EXACT,
    seed: int = 0,
    reads_ahead: Sequence[int] | None = None,
    towers: int | None = None,
    caches: Sequence[TableCache | None] = (),
    copies_on: torch.device | None = None,
) -> Exchange:
    """One rank's end of what travels. By table: `exchanges`, keys of EXCHANGES or "cached", default "rows";
    `caches` of the latter, copies in memory or in that of `copies_on`; `shardings`, default row_wise;
    `reads_ahead`, steps between reading a row and its use, default 0. seed: the run's, of the random bits that codecs
    round gradients with and updates rows. towers: groups of ranks that `towers` goes by, default one for each host.
    Collective. Raises ConfigError where this cannot work in this world."""
    num_tables = len(declaration.tables)
    shardings = shardings or [row_wise_in(mesh.world)] * num_tables
    coding = Coding(codecs, seed)
    names = [
        implied_exchange(sharding, name)
        for sharding, name in zip(shardings, exchanges or ["rows"] * num_tables, strict=True)
    ]
    for table, name, sharding in zip(declaration.tables, names, shardings, strict=True):
        check_exchange(table.name, name, sharding, mesh.num_ranks)
    looked_up = {feature.table for feature in declaration.features}
    kinds = list(zip(names, reads_ahead or [0] * num_tables, strict=True))
    tables = {
        kind: {t.name for t, of in zip(declaration.tables, kinds, strict=True) if of == kind}
        for kind in sorted(set(kinds))
    }
    used = {kind: mine & looked_up for kind, mine in tables.items() if mine & looked_up}

    def end_of(name: str, late: int, part: Declaration) -> End:
        if name == "substitute":
            return SubstituteExchange(part, mesh, shardings, coding, reads_ahead=late)
        if name == "cached":
            return CachedExchange(part, mesh, shardings, caches, copies_on)
        if name == "tower_rows" and mesh.num_ranks > 1:
            return TowerRowsExchange(
                part, mesh, shardings, coding, num_towers=towers, reads_ahead=late
            )
        if name in BY_TOWERS:
            return TowersExchange(
                part, mesh, shardings, coding, num_towers=towers, reads_ahead=late
            )
        return EXCHANGES[name](part, mesh, shardings, coding)

    if len(used) < 2:
        return end_of(*next(iter(used), kinds[0]), declaration)
    several = {name for name, _ in used if sum(name == other for other, _ in used) > 1}
    ends = {
        f"{name}@{late}" if name in several else name: end_of(
            name, late, part_of(declaration, mine, name)
        )
        for (name, late), mine in used.items()
    }
    return SeveralExchanges(declaration, mesh, ends, [late for _, late in used])
