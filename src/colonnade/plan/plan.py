"""The frozen value that says where rows live, what travels and how stale reads may be, for one run.

Making, printing and comparing a plan touches no device and no file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from colonnade.errors import ConfigError
from colonnade.exchange import EXCHANGES
from colonnade.store.budget import capacity_rows, slot_bytes
from colonnade.table import Table
from colonnade.topology.sharding import share


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    name: str
    sharding: str
    capacity_rows: int
    """Rows of the table that may be in one rank's memory at once."""
    fits: bool
    """Every row a rank owns has room: nothing of this table is ever evicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where each table's rows live, what travels between ranks, how late reads may be: one choice per axis, for a run.

    `build_plan` makes one; it prints, compares, and round-trips through JSON.
    """

    num_ranks: int
    dram_bytes: int | None
    """Memory for rows on each rank; None: as much as they take."""
    lookahead: int
    """Batches whose ids travel ahead of training."""
    staleness_steps: int
    exchange: str
    tables: tuple[TablePlan, ...]

    @property
    def needs_backing(self) -> bool:
        return not all(table.fits for table in self.tables)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        tables = tuple(TablePlan(**table) for table in values.pop("tables"))
        return cls(tables=tables, **values)


def build_plan(
    tables: Sequence[Table],
    num_ranks: int = 1,
    *,
    dram_bytes: int | None = None,
    lookahead: int = 2,
    staleness_steps: int = 0,
    exchange: str = "rows",
) -> Plan:
    """Pure. Raises ConfigError for numbers that cannot work."""
    if exchange not in EXCHANGES:
        raise ConfigError(
            f"unknown exchange {exchange!r}; choose from {', '.join(sorted(EXCHANGES))}"
        )
    if lookahead < 0 or staleness_steps < 0:
        raise ConfigError(
            f"got lookahead={lookahead}, staleness_steps={staleness_steps}; wanted 0 or more"
        )
    if dram_bytes is not None and dram_bytes < 1:
        raise ConfigError(
            f"got dram_bytes={dram_bytes}; wanted a positive number of bytes, or None"
        )
    capacities = capacity_rows(tables, dram_bytes, num_ranks)
    planned = tuple(
        TablePlan(
            name=table.name,
            sharding="row_wise",
            capacity_rows=rows,
            fits=dram_bytes is None
            or (table.rows is not None and rows >= share(table.rows, num_ranks)),
        )
        for table, rows in zip(tables, capacities, strict=True)
    )
    return Plan(
        num_ranks=num_ranks,
        dram_bytes=dram_bytes,
        lookahead=lookahead,
        staleness_steps=staleness_steps,
        exchange=exchange,
        tables=planned,
    )


def explain(plan: Plan, tables: Sequence[Table]) -> list[dict[str, str]]:
    """One line per table, in words and numbers, for a person to read."""
    lines = []
    for table, planned in zip(tables, plan.tables, strict=True):
        owned = "any" if table.rows is None else f"{share(table.rows, plan.num_ranks):,}"
        memory = planned.capacity_rows * slot_bytes(table)
        unbounded = table.rows is None and plan.dram_bytes is None
        lines.append(
            {
                "table": table.name,
                "dim": " + ".join(str(part.dim) for part in table.parts),
                "rows per rank": owned,
                "rows in memory": "as trained" if unbounded else f"{planned.capacity_rows:,}",
                "memory": "as trained" if unbounded else f"{memory / 2**20:,.1f} MiB",
                "rest": "-" if planned.fits else "file",
                "optimizer": ", ".join(dict.fromkeys(part.optimizer.name for part in table.parts)),
            }
        )
    return lines
