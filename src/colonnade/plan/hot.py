"""Hot rows in a plan: shardings that have them, and what they leave of memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.store.slices import Laid
from colonnade.table import Table, check_hot
from colonnade.topology.hot import hot_rows
from colonnade.topology.sharding import Sharding


def with_hot(
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    hot: Mapping[str, Iterable[int] | Tensor],
    num_ranks: int,
    servers: Sequence[int] = (),
) -> list[Sharding]:
    """By table: with the hot rows that `hot` names; on one rank, as they are. Raises ConfigError where there can be
    none."""
    names = [table.name for table in tables]
    for name in hot:
        if name not in names:
            raise ConfigError(
                f"hot: got {name!r}, wanted a table of this model: {', '.join(names)}"
            )
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
