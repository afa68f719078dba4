"""How a byte budget becomes slots per table: a pure function of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from colonnade.table import Table
from colonnade.topology.sharding import Shard

SLOT_OVERHEAD_BYTES = (
    16  # index, id, pins, worth and bits of one resident row, less half its clock; rounded up
)


def slot_bytes(table: Table) -> int:
    """Bytes a resident row takes: weights, state, clock and bookkeeping."""
    state_bytes = (
        table.record_bytes - table.width * table.itemsize - 4
    )  # with the clock, 4 bytes in memory
    padding = -state_bytes % (8 if table.dtype == "float64" else 4)
    return table.record_bytes + SLOT_OVERHEAD_BYTES + padding


def capacity_rows(
    tables: Sequence[Table],
    budget_bytes: int | None,
    shards: Sequence[Shard],
    *,
    fixed_bytes: Mapping[str, int] | None = None,
    open_rows: int = 2**27,
    row_bytes: Callable[[Table], int] = slot_bytes,
) -> list[int]:
    """Slots of each table on one rank. shards: by table, what it has of it; where it has no rows, there is no slot.

    Without a budget: every row of a vocabulary table, room for `open_rows` of an open one (address
    space only). With one: tables share it evenly by bytes, and what small tables leave goes to the rest.
    `fixed_bytes`, by name: tables that have bytes of their own, taken out of the budget before it is shared.
    `row_bytes`: what a row takes there.
    """
    fixed_bytes = fixed_bytes or {}
    here = [t for t, shard in enumerate(shards) if shard.place is not None]
    wanted, given = [0] * len(tables), [0] * len(tables)
    for t in here:
        rows = tables[t].rows
        wanted[t] = open_rows if rows is None else max(1, shards[t].most_rows(rows))
        fixed = fixed_bytes.get(tables[t].origin[0], 0) // row_bytes(tables[t])
        given[t] = max(1, min(wanted[t], fixed))
    unmet = [t for t in here if tables[t].origin[0] not in fixed_bytes]
    if budget_bytes is None:
        shared = set(unmet)
        return [wanted[t] if t in shared else rows for t, rows in enumerate(given)]
    left = budget_bytes - sum(
        given[t] * row_bytes(table)
        for t, table in enumerate(tables)
        if table.origin[0] in fixed_bytes
    )
    left = max(0, left)
    # Smallest first: whoever needs less than an even share takes all it needs.
    unmet.sort(key=lambda t: wanted[t] * row_bytes(tables[t]))
    while unmet:
        t = unmet.pop(0)
        even = left // (len(unmet) + 1)
        given[t] = max(1, min(wanted[t], even // row_bytes(tables[t])))
        left = max(0, left - given[t] * row_bytes(tables[t]))
    return given


def hbm_rows(tables: Sequence[Table], hbm_bytes: int, shards: Sequence[Shard]) -> list[int]:
    """Slots of each table in one rank's device memory: a record each, whose bookkeeping is in main memory."""
    return capacity_rows(
        tables,
        hbm_bytes,
        shards,
        open_rows=2**31 - 1,
        row_bytes=lambda table: table.record_bytes,
    )


def least_bytes(tables: Sequence[Table]) -> int:
    """Of one row of each table: no budget below this can work."""
    return sum(map(slot_bytes, tables))


def mapped_tables(
    tables: Sequence[Table],
    capacities: Sequence[int],
    mapped_bytes: int | None,
    shards: Sequence[Shard],
) -> list[int]:
    """Which of one rank's tables lie whole in byte-addressable memory: those of which `capacities` holds not every row,
    smallest first, while they fit in `mapped_bytes` (None: no limit). Open tables, whose size nobody knows, do not."""
    taken: list[int] = []
    left = mapped_bytes
    whole = {
        t: shards[t].most_rows(table.rows or 0)
        for t, table in enumerate(tables)
        if shards[t].place is not None
    }
    for t in sorted(whole, key=lambda t: whole[t] * slot_bytes(tables[t])):
        size = whole[t] * slot_bytes(tables[t])
        if (
            tables[t].rows is None
            or capacities[t] >= whole[t]
            or (left is not None and size > left)
        ):
            continue
        taken.append(t)
        left = None if left is None else left - size
    return sorted(taken)
