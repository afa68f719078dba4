"""How a byte budget becomes slots per table: a pure function of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from colonnade.table import Table
from colonnade.topology.sharding import share

SLOT_OVERHEAD_BYTES = 16  # index, id, pins and padding of one resident row, rounded up


def slot_bytes(table: Table) -> int:
    """Bytes a resident row takes: weights, state, clock and bookkeeping."""
    return table.record_bytes + SLOT_OVERHEAD_BYTES


def capacity_rows(
    tables: Sequence[Table], budget_bytes: int | None, num_ranks: int, *, open_rows: int = 2**27
) -> list[int]:
    """Slots of each table on one rank.

    Without a budget: every row of a vocabulary table, room for `open_rows` of an open one (address
    space only). With one: tables share it evenly by bytes, and what small tables leave goes to the rest.
    """
    wanted = [open_rows if t.rows is None else max(1, share(t.rows, num_ranks)) for t in tables]
    if budget_bytes is None:
        return wanted
    given = [0] * len(tables)
    left, unmet = budget_bytes, list(range(len(tables)))
    # Smallest first: whoever needs less than an even share takes all it needs.
    unmet.sort(key=lambda t: wanted[t] * slot_bytes(tables[t]))
    while unmet:
        t = unmet.pop(0)
        even = left // (len(unmet) + 1)
        given[t] = max(1, min(wanted[t], even // slot_bytes(tables[t])))
        left = max(0, left - given[t] * slot_bytes(tables[t]))
    return given
