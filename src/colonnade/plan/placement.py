"""Placement of rows in memory by a profile: memory goes to the tables where a byte saves most reads. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from colonnade.config.plan import MemoryConfig
from colonnade.errors import BudgetExceeded
from colonnade.plan.cost.memory import MemoryDemand, divide_memory_on_ranks, predict_demands
from colonnade.plan.hot import subtract_hot_row_bytes
from colonnade.plan.measure.profile import Profile
from colonnade.plan.plan import Plan, apply_placement
from colonnade.store.budget import slot_bytes
from colonnade.store.table_shards import shard_tables
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, max_rows_per_owner


def is_memory_limited(plan: Plan, tables: Sequence[Table]) -> bool:
    """Return whether rows of some table do not fit in a memory that the plan divides among tables."""
    return (
        plan.needs_backing
        or any(planned.tier == "mapped" for planned in plan.tables)
        or any(
            plan.hbm_bytes is not None
            and (
                table.rows is None or planned.hbm_rows < _count_owned_rows(table, planned.sharding)
            )
            for table, planned in zip(tables, plan.tables, strict=True)
        )
    )


def place_rows(
    plan: Plan,
    tables: Sequence[Table],
    profile: Profile,
    memory: MemoryConfig,
    *,
    batch_size: int,
    num_samples: int | None,
    first_batch: int,
    last_batch: int,
) -> Plan:
    """Return `plan` with the rows in memory that save most reads over batches first_batch .. last_batch of the run.

    profile: of these tables. Raises BudgetExceeded if a batch of the profile's size does not fit.
    """
    late, shardings = plan.max_staleness_steps, plan.shardings
    shards = shard_tables(tables, shardings)
    owners = len(plan.servers) or plan.num_ranks
    depth = 2 if plan.lookahead == "auto" else plan.lookahead

    def predict(fixed_bytes: dict[str, int]) -> list[MemoryDemand]:
        return predict_demands(
            tables, profile, batch_size=batch_size, window=depth + 1 + late, at_once=1 + late, num_ranks=owners,
            num_samples=num_samples, first_batch=first_batch, last_batch=max(last_batch, first_batch + 1),
            fixed_bytes=fixed_bytes, shardings=shardings,
        )  # fmt: skip

    mapped_bytes = 0 if plan.mapped is None else plan.mapped.bytes
    dram_bytes = subtract_hot_row_bytes(shards, memory.dram, "plan.memory.dram", slot_bytes)
    placed = divide_memory_on_ranks(
        predict(memory.tables), shardings, plan.num_ranks, dram_bytes, mapped_bytes, at_once=1 + late
    )  # fmt: skip
    rows = {table.name: (table.rows, table.tier) for table in placed}
    plan = apply_placement(plan, tables, rows, lookahead=plan.lookahead)
    return place_rows_on_device(plan, tables, predict({}), memory.hbm)


def place_rows_on_device(
    plan: Plan, tables: Sequence[Table], demands: Sequence[MemoryDemand], hbm_bytes: int | None
) -> Plan:
    """Return `plan` with device memory divided by the reads that it saves main memory; unchanged without `hbm_bytes`.

    demands: without budgets of single tables, which are of main memory. Raises as `place_rows`.
    """
    if hbm_bytes is None:
        return plan
    shardings, at_once = plan.shardings, 1 + plan.max_staleness_steps
    free = subtract_hot_row_bytes(
        shard_tables(tables, shardings), hbm_bytes, "plan.memory.hbm", lambda table: table.record_bytes
    )  # fmt: skip
    on_device = [
        replace(demand, slot_bytes=table.record_bytes)
        for demand, table in zip(demands, tables, strict=True)
    ]
    try:
        placed = divide_memory_on_ranks(on_device, shardings, plan.num_ranks, free, at_once=at_once)
    except BudgetExceeded as error:  # which names the setting of main memory
        raise BudgetExceeded(str(error).replace("plan.memory.dram", "plan.memory.hbm")) from None
    planned = []
    for table, before, own in zip(tables, plan.tables, placed, strict=True):
        rows = own.rows * before.sharding.slices  # a slice of a row takes a part of its bytes
        if table.rows is not None:
            rows = min(rows, _count_owned_rows(table, before.sharding))
        planned.append(replace(before, hbm_rows=rows))
    return replace(plan, tables=tuple(planned))


def _count_owned_rows(table: Table, sharding: Sharding) -> int:
    """Return the rows of a vocabulary table on its fullest rank."""
    return max_rows_per_owner(table.rows or 0, sharding.num_owners)
