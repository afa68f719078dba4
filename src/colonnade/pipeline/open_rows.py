"""Opening of a collection's rows as planned: exchange, store and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from colonnade.comm.mesh import Mesh
from colonnade.exchange import TableExchange, open_exchange
from colonnade.exchange.cached import CachedExchange, find_cached_part
from colonnade.exchange.exchange import Exchange
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.views import Slices, check_attention_under_partials, slices_of
from colonnade.plan.placement import MemoryBalancer, describe_slot_changes
from colonnade.plan.plan import Plan
from colonnade.sizes import StorageLocation
from colonnade.staleness import list_steps_ahead
from colonnade.store.budget import slot_bytes
from colonnade.store.contract import Backing, Resident
from colonnade.store.dram import DramStore, MappedTier, open_dram_store
from colonnade.store.hbm import open_hbm_store
from colonnade.store.policies import RowPolicy, check_retention_policies, open_retention_policies
from colonnade.store.traffic import TrafficSample
from colonnade.topology.sharding import Shard


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Rows of an open collection on this rank: the store that has them and the exchange that reads them."""

    plan: Plan
    mesh: Mesh
    views: Slices
    shards: tuple[Shard, ...]
    """Shard of this rank, by table as it is sharded."""
    exchange: Exchange
    store: Resident
    memory: DramStore
    """Store in main memory: `store`, or the one below it."""
    policies: Mapping[int, RowPolicy]
    """Policies that decide which rows are forgotten, by table as it is sharded."""
    balancer: MemoryBalancer | None
    """Decisions to move memory between tables at commits; None if it stays as planned."""
    cached: CachedExchange | None
    """Part of the exchange that caches rows; None if no table has a cache."""
    staleness_bounds: tuple[int, ...]
    """Staleness bounds of the tables: steps between a read and its use, ascending."""

    @property
    def reads_ahead(self) -> int:
        """Number of steps between the earliest read of a batch and its use."""
        return self.staleness_bounds[-1]

    def balance_memory(self, step: int) -> str:
        """Move memory between tables if the traffic since the last call asks for it. Between steps, not in a commit.

        Changes no value of a row. Returns a line that describes the change; "" if there is none.
        """
        store = self.memory
        if self.balancer is None or store.traffic is None:
            return ""
        before = store.capacities()
        num_resident = {t: store.num_rows(t) for t in before}
        chosen = self.balancer.choose(before, num_resident, store.traffic, step)
        if not chosen:
            return ""
        store.resize(chosen)
        return describe_slot_changes(store.tables, before, store.capacities())


def open_rows(
    declaration: EmbeddingDeclaration,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    device: torch.device,
    backings: Sequence[Backing],
    policies: Mapping[str, RowPolicy],
) -> OpenRows:
    """Open the rows of a collection as planned. Collective.

    device: the collection's, for rows and copies in its memory; backings: by table, for rows that memory has no room
    for; policies: by table, instead of its own admission and eviction. Raises ConfigError for a plan that cannot work
    in this world."""
    is_read = [declaration.is_looked_up(table) for table in declaration.tables]
    steps_ahead = list_steps_ahead(plan.staleness_by_table, is_read)
    names = [table_plan.exchange for table_plan in plan.tables]
    views = slices_of(declaration, plan.shardings, names, steps_ahead)
    check_attention_under_partials(views, plan.shardings, names)
    table_shards = views.table_shards
    shards = tuple(table_shard.sharding.shard_of(mesh.rank) for table_shard in table_shards)
    exchange = open_exchange(
        views.declaration,
        mesh,
        [
            TableExchange(
                exchange=names[table_shard.number],
                sharding=table_shard.sharding,
                reads_ahead=steps_ahead[table_shard.number],
                cache=None if table_shard.is_hot else plan.tables[table_shard.number].cache,
            )
            for table_shard in table_shards
        ],
        codecs=plan.codecs,
        seed=seed,
        towers=plan.towers,
        copies_on=device if plan.cache_tier == "hbm" else None,
    )
    memory, store = _open_row_store(views, plan, shards, seed, device, backings)
    cached = find_cached_part(exchange.parts, memory)
    return OpenRows(
        plan,
        mesh,
        views,
        shards,
        exchange,
        store,
        memory,
        _open_retention_policies(views, shards, seed, cached, policies),
        _open_balancer(views, plan, shards, memory),
        cached,
        tuple(sorted(set(steps_ahead))),
    )


def _open_row_store(
    table_views: Slices,
    plan: Plan,
    rank_shards: Sequence[Shard],
    seed: int,
    device: torch.device,
    shard_backings: Sequence[Backing],
) -> tuple[DramStore, Resident]:
    """Make room for this rank's rows in memory, mapped memory and, above these, device memory. Return the store in
    memory, and the topmost one."""
    planned = plan.tables
    table_shards = table_views.table_shards
    memory = open_dram_store(
        [table_shard.stored for table_shard in table_shards],
        [
            table_shard.max_resident_rows(planned[table_shard.number].capacity_rows)
            for table_shard in table_shards
        ],
        seed=seed,
        shards=rank_shards,
        backings=shard_backings,
        mapped=None if plan.mapped is None else _open_mapped_tier(table_views, plan, plan.mapped),
        most_rows=_count_max_resident_rows(table_views, plan) if shard_backings else (),
    )
    if plan.hbm_bytes is None:
        return memory, memory
    slots = [
        0
        if shard.owner_index is None
        else table_shard.max_resident_rows(planned[table_shard.number].hbm_rows)
        for shard, table_shard in zip(rank_shards, table_shards, strict=True)
    ]
    return memory, open_hbm_store(memory, slots, device, seed=seed)


def _open_mapped_tier(views: Slices, plan: Plan, location: StorageLocation) -> MappedTier:
    shards = [(shard.is_hot, plan.tables[shard.number]) for shard in views.table_shards]
    return MappedTier(
        Path(location.path),
        [t for t, (is_hot, table) in enumerate(shards) if not is_hot and table.tier == "mapped"],
        [0 if is_hot else table.mapped_rows for is_hot, table in shards],
    )


MOST_GROWTH = 16
"""Largest growth of a table's memory, which bounds the address space that tables reserve."""


def _count_max_resident_rows(table_views: Slices, plan: Plan) -> list[int]:
    """Return the rows that each table may have in memory when memory has moved; 0: as many as planned."""
    limits = []
    for table_shard in table_views.table_shards:
        planned = plan.tables[table_shard.number]
        can_move = not (table_shard.is_hot or planned.has_own_budget or planned.tier == "mapped")
        limit = 0
        if plan.placement == "profiled" and plan.dram_bytes is not None and can_move:
            whole = plan.dram_bytes // slot_bytes(table_shard.stored)
            limit = min(whole, MOST_GROWTH * planned.capacity_rows)
        limits.append(limit)
    return limits


def _open_balancer(
    table_views: Slices, plan: Plan, rank_shards: Sequence[Shard], store: DramStore
) -> MemoryBalancer | None:
    """Open the decisions to move memory between tables, and let the store sample its traffic; None for nothing to move.

    A table with all its rows in memory has them at fixed addresses, and keeps them.
    """
    resizable = store.capacities()
    limits = _count_max_resident_rows(table_views, plan)
    movable = {}
    for t, limit in enumerate(limits):
        table = table_views.table_shards[t].stored
        local = None if table.rows is None else rank_shards[t].max_rows(table.rows)
        if limit and t in resizable and local != 0:  # 0: this rank owns none of its rows
            movable[t] = replace(table, rows=local)
    if len(movable) < 2:
        return None
    store.traffic = TrafficSample(len(store.tables))
    late = plan.max_staleness_steps
    depth = 2 if plan.lookahead == "auto" else plan.lookahead
    return MemoryBalancer(movable, depth + 1 + late, 1 + late, {t: limits[t] for t in movable})


def _open_retention_policies(
    table_views: Slices,
    rank_shards: Sequence[Shard],
    seed: int,
    cached_exchange: CachedExchange | None,
    policies_by_table: Mapping[str, RowPolicy],
) -> dict[int, RowPolicy]:
    """Open the policies of each table's admission and eviction. policies_by_table: policies by table, instead of
    these."""
    tables = [table_shard.table for table_shard in table_views.table_shards]
    declared = open_retention_policies(tables, rank_shards, seed=seed)
    number_of = table_views.declared.table_index
    overrides = {
        table_views.slices_of_table[number_of(name)]: policy
        for name, policy in policies_by_table.items()
    }
    check_retention_policies(
        overrides, declared, tables, has_copies=cached_exchange.is_cached if cached_exchange else []
    )
    return declared | {t: policy for (t,), policy in overrides.items()}
