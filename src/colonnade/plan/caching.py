"""Row caches in a plan: size, staleness bounds and policy of each table's cache, and checks of what excludes a cache.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colonnade.config.plan import CacheConfig, CacheSize, PlanConfig, TableCacheConfig
from colonnade.errors import ConfigError
from colonnade.staleness import TableCache, row_clock
from colonnade.table import ITEM_BYTES, Table

BOOKKEEPING = 42
"""Bytes of a cached row in addition to its record and the sum of its gradients: 30 in the directory, 12 in `Copies`."""

DEFAULT_STALENESS = 100
"""Staleness of caches whose settings have no bound."""
LOOKAHEAD = "lookahead"
LOOKAHEAD_WINDOW = 64
"""Eviction policy that reads coming batches, and its default number of batches; their samples take memory."""


def remote_copy_bytes(table: Table) -> int:
    """Return the bytes of one cached row with its gradients and bookkeeping."""
    return table.record_bytes + table.width * ITEM_BYTES[table.compute_dtype] + BOOKKEEPING


def full_cache_bytes(cache: TableCache | None, table: Table) -> int:
    """Return the bytes of a full cache of a table on one rank, not counting rows that the rank owns."""
    if cache is None:
        return 0
    rows = cache.rows if table.rows is None else min(cache.rows, table.rows)
    return rows * remote_copy_bytes(table)


def count_cached_rows(size: CacheSize, table: Table) -> int:
    """Convert the size of a table's cache to rows. Raises ConfigError for a fraction of an open table."""
    if size.part is not None:
        if table.rows is None:
            raise ConfigError(
                f"plan.cache: got size={size} for table {table.name!r}, which takes any id and has no number of rows; "
                f"give it rows or bytes: plan.cache.tables.{table.name}.size=64MiB"
            )
        return int(size.part * table.rows)
    if size.num_bytes is not None:
        return size.num_bytes // remote_copy_bytes(table)
    assert size.rows is not None
    return size.rows


def build_table_caches(
    config: CacheConfig | None, tables: Sequence[Table]
) -> dict[str, TableCache]:
    """Return the cache of each table by name; tables without a size have none. Raises ConfigError."""
    if config is None:
        return {}
    names = [table.name for table in tables]
    if unknown := sorted(set(config.tables) - set(names)):
        raise ConfigError(
            f"plan.cache.tables: got {unknown[0]!r}, wanted a table of this model: {', '.join(names)}"
        )
    policies = {name: own.policy or config.policy for name, own in config.tables.items()}
    if config.window is not None and LOOKAHEAD not in {config.policy, *policies.values()}:
        raise ConfigError(
            f"plan.cache: got window={config.window} with policy={config.policy}, wanted "
            "policy=lookahead, which reads the batches of a window ahead; leave window out"
        )
    window = LOOKAHEAD_WINDOW if config.window is None else config.window
    caches = {}
    for table in tables:
        own = config.tables.get(table.name, TableCacheConfig())
        size = own.size or config.size
        if size is None:
            continue
        bounds = (own.staleness, own.read_bound, own.write_bound)
        if bounds == (None, None, None):
            bounds = (config.staleness, config.read_bound, config.write_bound)
        staleness, read_bound, write_bound = bounds
        if bounds == (None, None, None):
            staleness = DEFAULT_STALENESS
        elif staleness is None:
            staleness = (read_bound or 0) + (write_bound or 0)
        try:
            clock = row_clock(
                staleness,
                read_bound,
                write_bound,
                config.write_share if own.write_share is None else own.write_share,
                own.step_bound or config.step_bound,
            )
        except ConfigError as error:
            raise ConfigError(f"plan.cache: table {table.name!r}: {error}") from None
        rows = count_cached_rows(size, table)
        policy = policies.get(table.name, config.policy)
        batches_ahead = window if policy == LOOKAHEAD else 0
        caches[table.name] = TableCache(rows, clock, policy, batches_ahead)
    return caches


def check_cache_settings(
    config: PlanConfig,
    caches: Mapping[str, TableCache],
    tables: Sequence[Table],
    exchanges: Sequence[str],
) -> None:
    """Raise ConfigError for settings that exclude row caches. tables and exchanges: by table."""
    if not caches:
        return
    if config.memory.hbm is not None:
        raise ConfigError(
            f"plan.cache: got plan.memory.hbm={config.memory.hbm} with it; caches copy rows from their owners' main "
            "memory: set plan.cache.tier=hbm to have the copies on the device, and leave memory.hbm out, or leave "
            "plan.cache out"
        )
    for table, exchange in zip(tables, exchanges, strict=True):
        if table.name not in caches:
            continue
        if exchange != "rows":
            raise ConfigError(
                f"plan.cache: got exchange={exchange} for table {table.name!r}, wanted rows, the only exchange with a "
                "cache; set plan.exchange=rows"
            )
        if table.admission is not None or table.eviction is not None:
            raise ConfigError(
                f"plan.cache: got table {table.name!r} with admission or eviction, which decide at the owner at every "
                "update of a row, while a cache sends the sum of several updates; leave one of them out"
            )
