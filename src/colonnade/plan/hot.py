"""Hot rows in a plan: which they are, shardings that have them, what they leave of memory, and what a sample says of
hot and cold rows as the tables that exchanges take them for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import ConfigError
from colonnade.lookup.hot import deal
from colonnade.lookup.layout import Declaration
from colonnade.lookup.views import slices_of
from colonnade.plan.measure.profile import Profile, profile
from colonnade.store.table_shards import Laid
from colonnade.table import Table, check_hot
from colonnade.topology.sharding import Sharding, hot_rows, row_wise


def with_hot(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    hot: Mapping[str, Iterable[int] | Tensor],
    num_ranks: int,
    servers: Sequence[int] = (),
) -> list[Sharding]:
    """By table: with the hot rows that `hot` names; on one rank, as they are. Raises ConfigError where there can be
    none."""
    found = []
    for table, sharding in zip(tables, shardings, strict=True):
        ids = hot.get(table.name, ())
        if num_ranks > 1 and len(listed := [*ids]):
            sharding = replace(sharding, hot=hot_rows(map(int, listed), num_ranks))
        if sharding.hot is not None:
            check_hot(table, sharding.hot.ids)
            if sharding.hot.num_ranks != num_ranks:
                raise ConfigError(
                    f"table {table.name!r}: got hot rows on {sharding.hot.num_ranks} of {num_ranks} ranks, wanted a "
                    "copy on each"
                )
            if servers:
                raise ConfigError(
                    f"table {table.name!r}: got hot rows beside servers; copies lie with the samples, and where there "
                    "are servers trainers have no rows. Leave servers out, or hot rows"
                )
        found.append(sharding)
    return found


def beside_hot(
    laid: Sequence[Laid], budget: int | None, name: str, row_bytes: Callable[[Table], int]
) -> int | None:
    """What each rank's copies of hot rows leave of a budget of memory. Raises ConfigError where that is nothing."""
    taken = sum(each.room(0) * row_bytes(each.table) for each in laid if each.is_hot)
    if budget is None or budget > taken:
        return None if budget is None else budget - taken
    raise ConfigError(
        f"{name}: got {budget:,} bytes, wanted more than the {taken:,} of hot rows, which are always in memory; raise "
        "it, or name fewer hot rows"
    )


def popular(batches: Sequence[Batch], features: Iterable[str], count: int) -> list[int]:
    """So many ids that these features look up most often, ascending; of equal ones the smaller. Fewer, where there are
    no more."""
    ids = [batch.ids[name].values.numpy() for name in features for batch in batches]
    values, lookups = np.unique(np.concatenate([*ids, np.zeros(0, np.int64)]), return_counts=True)
    first = np.lexsort((values, -lookups))[:count]
    return sorted(values[first].tolist())


def sides_of(
    declared: Declaration, hot: Mapping[str, Iterable[int] | Tensor], batches: Iterable[Batch]
) -> tuple[Declaration, Profile]:
    """A declaration with hot rows beside cold ones, table by table, and the profile of a sample of such. Consumers that
    take no field of such a table are as they were."""
    tables = declared.tables
    two = with_hot(tables, [row_wise(2)] * len(tables), hot, 2)  # whoever owns the cold ones
    slices = slices_of(declared, two, ["partials"] * len(tables))  # or whatever else evaluates
    dealt = (deal(batch, declared, slices.hot).batch for batch in batches)
    sides = slices.declaration
    known = {name: each for name, each in sides.consumers.items() if name in declared.consumers}
    sides = replace(sides, consumers=known)  # fields alone are nobody's
    return sides, profile(sides.tables, sides.features, dealt)
