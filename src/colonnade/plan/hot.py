"""Hot rows in a plan: their selection, shardings and memory, and profiles that count hot and cold rows as tables.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import ConfigError
from colonnade.lookup.hot import split_hot_rows
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.views import slices_of
from colonnade.plan.measure.profile import Profile, profile_batches
from colonnade.store.table_shards import TableShard
from colonnade.table import Table, check_hot_rows
from colonnade.topology.sharding import Sharding, build_hot_rows, row_wise


def add_hot_rows_to_shardings(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    hot: Mapping[str, Iterable[int] | Tensor],
    num_ranks: int,
    servers: Sequence[int] = (),
) -> list[Sharding]:
    """Return the shardings with the hot rows of `hot` (ids by table name); unchanged on one rank.

    Raises ConfigError for a table that cannot have hot rows."""
    combined = []
    for table, sharding in zip(tables, shardings, strict=True):
        ids = [*hot.get(table.name, ())]
        if num_ranks > 1 and ids:
            sharding = replace(sharding, hot=build_hot_rows(map(int, ids), num_ranks))
        if sharding.hot is not None:
            check_hot_rows(table, sharding.hot.ids)
            if sharding.hot.num_ranks != num_ranks:
                raise ConfigError(
                    f"table {table.name!r}: got hot rows on {sharding.hot.num_ranks} of {num_ranks} ranks, wanted a "
                    "copy on each"
                )
            if servers:
                raise ConfigError(
                    f"table {table.name!r}: got hot rows and servers; hot rows are copied to trainers, and with "
                    "servers trainers have no rows. Leave servers out, or hot rows"
                )
        combined.append(sharding)
    return combined


def subtract_hot_row_bytes(
    shards: Sequence[TableShard],
    budget: int | None,
    setting: str,
    row_bytes: Callable[[Table], int],
) -> int | None:
    """Return a memory budget less the bytes of each rank's copies of hot rows; None: no limit.

    setting: setting of the budget. Raises ConfigError if nothing remains."""
    hot_bytes = sum(
        shard.max_resident_rows(0) * row_bytes(shard.table) for shard in shards if shard.is_hot
    )
    if budget is None or budget > hot_bytes:
        return None if budget is None else budget - hot_bytes
    raise ConfigError(
        f"{setting}: got {budget:,} bytes, wanted more than the {hot_bytes:,} of hot rows, which are always in memory; "
        "raise it, or name fewer hot rows"
    )


def find_most_popular_ids(
    batches: Sequence[Batch], features: Iterable[str], count: int
) -> list[int]:
    """Return the `count` ids that these features look up most often, ascending; of equally frequent ids the smaller.

    Returns fewer if the batches have fewer ids."""
    ids = [batch.ids[name].values.numpy() for name in features for batch in batches]
    values, lookups = np.unique(np.concatenate([*ids, np.zeros(0, np.int64)]), return_counts=True)
    first = np.lexsort((values, -lookups))[:count]
    return sorted(values[first].tolist())


def profile_hot_and_cold(
    declared: EmbeddingDeclaration,
    hot: Mapping[str, Iterable[int] | Tensor],
    batches: Iterable[Batch],
) -> tuple[EmbeddingDeclaration, Profile]:
    """Split each table with hot rows into a hot and a cold table, and profile a sample of the data split likewise.

    Returns the declaration with the split tables and the profile. Consumers of no split table are unchanged."""
    tables = declared.tables
    # Any sharding and any exchange that evaluates operators gives the same split.
    shardings = add_hot_rows_to_shardings(tables, [row_wise(2)] * len(tables), hot, 2)
    slices = slices_of(declared, shardings, ["partials"] * len(tables))
    split_batches = (split_hot_rows(batch, declared, slices.hot_ids).batch for batch in batches)
    sides = slices.declaration
    declared_consumers = {
        name: consumer for name, consumer in sides.consumers.items() if name in declared.consumers
    }
    sides = replace(sides, consumers=declared_consumers)
    return sides, profile_batches(sides.tables, sides.features, split_batches)
