"""Bytes of a row of a table in main memory, and in the memory below it."""

from __future__ import annotations

from colonnade.table import Table

# Index, id, pins, eviction score and flags of a resident row, less half its clock; rounded up.
SLOT_OVERHEAD_BYTES = 16


def slot_bytes(table: Table) -> int:
    """Return the bytes of a resident row: weights, state, clock and bookkeeping."""
    # A clock takes 4 bytes in memory.
    state_bytes = table.record_bytes - table.width * table.itemsize - 4
    padding = -state_bytes % (8 if table.dtype == "float64" else 4)
    return table.record_bytes + SLOT_OVERHEAD_BYTES + padding


def row_bytes_below_dram(table: Table) -> int:
    """Return the bytes of a row in the cache below main memory: weights, state, clock. Its index is in main memory."""
    return slot_bytes(table) - SLOT_OVERHEAD_BYTES
