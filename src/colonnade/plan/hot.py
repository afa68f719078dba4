"""Hot rows in a plan: their shardings and memory.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.store.table_shards import TableShard
from colonnade.table import Table, check_hot_rows
from colonnade.topology.sharding import Sharding, build_hot_rows


def add_hot_rows_to_shardings(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    table_hot_ids: Mapping[str, Iterable[int] | Tensor],
    num_ranks: int,
    server_ranks: Sequence[int] = (),
) -> list[Sharding]:
    """Return the shardings with the hot rows of `table_hot_ids` (ids by table name); unchanged on one rank.

    Raises ConfigError for a table that cannot have hot rows."""
    combined = []
    for table, sharding in zip(tables, shardings, strict=True):
        ids = [*table_hot_ids.get(table.name, ())]
        if num_ranks > 1 and ids:
            sharding = replace(sharding, hot=build_hot_rows(map(int, ids), num_ranks))
        if sharding.hot is not None:
            check_hot_rows(table, sharding.hot.ids)
            if sharding.hot.num_ranks != num_ranks:
                raise ConfigError(
                    f"table {table.name!r}: got hot rows on {sharding.hot.num_ranks} of {num_ranks} ranks, wanted a "
                    "copy on each"
                )
            if server_ranks:
                raise ConfigError(
                    f"table {table.name!r}: got hot rows and servers; hot rows are copied to trainers, and with "
                    "servers trainers have no rows. Leave servers out, or hot rows"
                )
        combined.append(sharding)
    return combined


def subtract_hot_row_bytes(
    shards: Sequence[TableShard],
    budget_bytes: int | None,
    setting_name: str,
    count_row_bytes: Callable[[Table], int],
) -> int | None:
    """Return a memory budget less the bytes of each rank's copies of hot rows; None: no limit.

    setting_name: setting of the budget. Raises ConfigError if nothing remains."""
    hot_bytes = sum(
        shard.max_resident_rows(0) * count_row_bytes(shard.table)
        for shard in shards
        if shard.is_hot
    )
    if budget_bytes is None or budget_bytes > hot_bytes:
        return None if budget_bytes is None else budget_bytes - hot_bytes
    raise ConfigError(
        f"{setting_name}: got {budget_bytes:,} bytes, wanted more than the {hot_bytes:,} of hot rows, which "
        "are always in memory; "
        "raise it, or name fewer hot rows"
    )
