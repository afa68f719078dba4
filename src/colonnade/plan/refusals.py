"""Bounds and budgets that a plan cannot keep, refused before there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colonnade.errors import ConfigError
from colonnade.store.budget import least_bytes, slot_bytes
from colonnade.table import Table


def check_staleness(of_tables: Mapping[str, int], names: Sequence[str]) -> None:
    """Raises ConfigError for bounds of tables that are not there, or that cannot be kept."""
    for name, steps in of_tables.items():
        if name not in names:
            raise ConfigError(
                f"staleness: got {name!r}, wanted a table of this model: {', '.join(names)}"
            )
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ConfigError(
                f"table {name!r}: got staleness_steps={steps!r}, wanted a number of steps, 0 or more"
            )


def check_budget(
    tables: Sequence[Table],
    held: Sequence[Table],
    dram_bytes: int | None,
    table_bytes: Mapping[str, int],
) -> None:
    """Raises ConfigError for budgets that hold not even a row of each table that one rank has, or name tables that are
    not there."""
    by_name = {table.name: table for table in tables}
    for name, size in table_bytes.items():
        if name not in by_name:
            raise ConfigError(
                f"plan.memory.tables: got {name!r}, wanted a table of this model: {', '.join(by_name)}"
            )
        if size < slot_bytes(by_name[name]):
            raise ConfigError(
                f"plan.memory.tables.{name}: got {size:,} bytes, wanted at least {slot_bytes(by_name[name])} for one "
                "row, and enough for the rows of a window of batches"
            )
    if dram_bytes is None:
        return
    others = least_bytes([table for table in held if table.origin[0] not in table_bytes])
    singles = sum(table_bytes.get(table.origin[0], 0) for table in held)
    least = singles + others
    if dram_bytes < least:
        given = f" and the {singles:,} bytes of single tables" if singles else ""
        raise ConfigError(
            f"plan.memory.dram: got {dram_bytes:,} bytes, wanted at least {least:,}: one row of each of "
            f"{len(held)} tables{given}; and enough for the rows of a window of batches"
        )
