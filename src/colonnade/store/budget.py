"""Slots of each table from a byte budget: a pure function of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from colonnade.table import Table
from colonnade.topology.sharding import Shard

# Index, id, pins, eviction score and flags of a resident row, less half its clock; rounded up.
SLOT_OVERHEAD_BYTES = 16


def slot_bytes(table: Table) -> int:
    """Return the bytes of a resident row: weights, state, clock and bookkeeping."""
    # A clock takes 4 bytes in memory.
    state_bytes = table.record_bytes - table.width * table.itemsize - 4
    padding = -state_bytes % (8 if table.dtype == "float64" else 4)
    return table.record_bytes + SLOT_OVERHEAD_BYTES + padding


def split_memory_budget(
    tables: Sequence[Table],
    budget_bytes: int | None,
    shards: Sequence[Shard],
    *,
    fixed_bytes: Mapping[str, int] | None = None,
    open_rows: int = 2**27,
    row_bytes: Callable[[Table], int] = slot_bytes,
) -> list[int]:
    """Return the number of slots of each table on one rank.

    shards: by table, this rank's; a table without rows on this rank gets no slot. Without a budget: every row of a
    vocabulary table, room for `open_rows` of an open one (address space only). With one: tables share it evenly by
    bytes, and small tables leave their excess to the others. `fixed_bytes`, by name: tables with bytes of their own,
    subtracted from the budget before it is shared. `row_bytes`: bytes of a row.
    """
    fixed_bytes = fixed_bytes or {}
    local_tables = [t for t, shard in enumerate(shards) if shard.owner_index is not None]
    wanted = [0] * len(tables)
    num_slots = [0] * len(tables)
    for t in local_tables:
        rows = tables[t].rows
        wanted[t] = open_rows if rows is None else max(1, shards[t].max_rows(rows))
        fixed = fixed_bytes.get(tables[t].origin[0], 0) // row_bytes(tables[t])
        num_slots[t] = max(1, min(wanted[t], fixed))
    unmet = [t for t in local_tables if tables[t].origin[0] not in fixed_bytes]
    if budget_bytes is None:
        shared = set(unmet)
        return [wanted[t] if t in shared else rows for t, rows in enumerate(num_slots)]
    remaining = budget_bytes - sum(
        num_slots[t] * row_bytes(table)
        for t, table in enumerate(tables)
        if table.origin[0] in fixed_bytes
    )
    shares = _share_evenly(
        [wanted[t] for t in unmet],
        [row_bytes(tables[t]) for t in unmet],
        max(0, remaining),
        least=1,
    )
    for t, rows in zip(unmet, shares, strict=True):
        num_slots[t] = rows
    return num_slots


def _share_evenly(
    wanted: Sequence[int], row_bytes: Sequence[int], budget: int, *, least: int
) -> list[int]:
    """Share a budget evenly by bytes among tables that want so many rows; each gets `least` rows or more."""
    rows = [0] * len(wanted)
    # Smallest first: a table that needs less than an even share takes all it needs.
    unmet = sorted(range(len(wanted)), key=lambda t: wanted[t] * row_bytes[t])
    while unmet:
        t = unmet.pop(0)
        even = budget // (len(unmet) + 1)
        rows[t] = max(least, min(wanted[t], even // row_bytes[t]))
        budget = max(0, budget - rows[t] * row_bytes[t])
    return rows


def cached_row_bytes(table: Table) -> int:
    """Return the bytes of a row in the cache below main memory: weights, state, clock. Its index is in main memory."""
    return slot_bytes(table) - SLOT_OVERHEAD_BYTES


def split_cache_budget(
    tables: Sequence[Table],
    budget_bytes: int,
    shards: Sequence[Shard],
    resident_rows: Sequence[int | None],
    *,
    open_rows: int = 2**27,
) -> list[int]:
    """Return the rows of each table in a cache of evicted rows, on one rank. Tables share it evenly by bytes.

    resident_rows: by table, rows in the memory above, which are not in the cache; None: nothing is evicted.
    """
    wanted = [0] * len(tables)
    for t, (table, shard) in enumerate(zip(tables, shards, strict=True)):
        resident = resident_rows[t]
        if shard.owner_index is not None and resident is not None:
            wanted[t] = (
                open_rows if table.rows is None else max(0, shard.max_rows(table.rows) - resident)
            )
    return _share_evenly(wanted, list(map(cached_row_bytes, tables)), budget_bytes, least=0)


def split_hbm_budget(tables: Sequence[Table], hbm_bytes: int, shards: Sequence[Shard]) -> list[int]:
    """Return the slots of each table in one rank's device memory: a record each; bookkeeping is in main memory."""
    return split_memory_budget(
        tables,
        hbm_bytes,
        shards,
        open_rows=2**31 - 1,
        row_bytes=lambda table: table.record_bytes,
    )


def min_budget_bytes(tables: Sequence[Table]) -> int:
    """Return the bytes of one row of each table: no smaller budget can work."""
    return sum(map(slot_bytes, tables))


def choose_mapped_tables(
    tables: Sequence[Table],
    capacities: Sequence[int],
    mapped_bytes: int | None,
    shards: Sequence[Shard],
) -> list[int]:
    """Choose the tables of one rank that are stored whole in byte-addressable memory.

    They are the tables that `capacities` does not cover, smallest first, while they fit in `mapped_bytes` (None: no
    limit). Open tables have no known size and are not chosen.
    """
    chosen: list[int] = []
    remaining = mapped_bytes
    num_rows = {
        t: shards[t].max_rows(table.rows or 0)
        for t, table in enumerate(tables)
        if shards[t].owner_index is not None
    }
    for t in sorted(num_rows, key=lambda t: num_rows[t] * slot_bytes(tables[t])):
        size = num_rows[t] * slot_bytes(tables[t])
        if (
            tables[t].rows is None
            or capacities[t] >= num_rows[t]
            or (remaining is not None and size > remaining)
        ):
            continue
        chosen.append(t)
        remaining = None if remaining is None else remaining - size
    return sorted(chosen)
