"""Rows that ranks have in their owners' place (`plan.cache.staleness=exact`): how many of each table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colonnade.errors import ConfigError
from colonnade.exchange.cached import TableCache
from colonnade.exchange.lending import Lending
from colonnade.plan_config import CacheConfig, CacheTier
from colonnade.table import Table

WINDOW = 16
"""Batches in sight by default: most rows that one rank uses twice in a row are used again by then. All of them wait in
memory, with their samples."""
BOUNDS = ("read_bound", "write_bound")


def lendings_of(
    config: CacheConfig, tables: Sequence[Table], sizes: Mapping[str, int]
) -> dict[str, Lending]:
    """By name; sizes: rows, by name. Raises ConfigError for what nothing follows from."""
    given = {name: getattr(config, name) for name in BOUNDS}
    given["policy"] = None if config.policy == "lru" else config.policy
    for name, own in config.tables.items():
        said = {"staleness": own.staleness, "policy": own.policy}
        said |= {bound: getattr(own, bound) for bound in BOUNDS}
        given |= {f"tables.{name}.{what}": value for what, value in said.items()}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"plan.cache: got {name}={value} with staleness=exact, which is for all tables and where nothing waits "
                f"and nobody is driven out; leave {name} out, or give a number of batches as staleness"
            )
    window = WINDOW if config.window is None else config.window
    return {table.name: Lending(sizes[table.name], window) for table in tables}


def check_lendings(
    caches: Mapping[str, TableCache | Lending], tables: Sequence[Table], tier: CacheTier
) -> None:
    """Raises ConfigError where some tables are lent and others not, or not alike, or to a device."""
    lent = {name: each for name, each in caches.items() if isinstance(each, Lending)}
    if not lent:
        return
    if tier != "dram":
        raise ConfigError(
            f"plan.cache: got tier={tier} with rows that are lent (staleness=exact), which lie in memory wherever they "
            "are; leave tier out, or give a number of batches as staleness"
        )
    for table in tables:
        if table.name not in lent:
            raise ConfigError(
                f"plan.cache: got rows of table {next(iter(lent))!r} that are lent, and those of {table.name!r} not; "
                "give all tables a Lending, of 0 rows where none is wanted"
            )
    windows = sorted({each.window for each in lent.values()})
    least = min(each.rows for each in lent.values())
    if len(windows) > 1 or min(windows) < 0 or least < 0:
        raise ConfigError(
            f"plan.cache: got windows of {windows} batches, and {least} rows at the least; wanted one window for all "
            "tables, and both 0 or more"
        )
