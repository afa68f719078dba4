"""Memory that tables need: rows of the batches in flight, and reads at any number of rows, from a profile.

Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from colonnade.plan.cost.memory import Floats, MemoryDemand, build_budget_error
from colonnade.plan.measure.popularity import (
    OPEN_ROOM,
    Popularity,
    expected_used_rows,
    predict_counting_cache_reads,
)
from colonnade.plan.measure.profile import Profile, RunBatches
from colonnade.store.budget import slot_bytes
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, max_rows_per_owner

CURVE_POINTS = 256
SPREAD = 4.0
"""Number of standard deviations above the mean that the rows of a batch may reach."""


def predict_demands(
    tables: Sequence[Table],
    profile: Profile,
    batches: RunBatches,
    *,
    num_ranks: int = 1,
    fixed_bytes: Mapping[str, int] | None = None,
    shardings: Sequence[Sharding] | None = None,
) -> list[MemoryDemand]:
    """Predict each table's mean memory demand over the batches of a run.

    fixed_bytes: budgets of single tables, by name. shardings: by table, each demand is that of an owner rank; without,
    all of `num_ranks` ranks own rows. Raises BudgetExceeded for a budget of a single table that is too small.
    """
    demands = []
    for t, table in enumerate(tables):
        owners = num_ranks if shardings is None else shardings[t].num_owners
        demand = _predict_demand(table, profile, t, batches, owners)
        if fixed_bytes and table.name in fixed_bytes:
            demand = _fix_demand(demand, fixed_bytes[table.name], batches.at_once)
        demands.append(demand)
    return demands


def _predict_demand(
    table: Table, profile: Profile, table_index: int, batches: RunBatches, num_owners: int
) -> MemoryDemand:
    popularity = profile.tables[table_index].popularity(table.rows)
    lookups = profile.lookups_per_sample(table_index) * batches.batch_size
    possible = _count_possible_rows(profile, table_index, table, batches.num_samples)
    in_flight = min(popularity.unique(lookups * batches.window), possible) / num_owners
    at_once_rows = min(_predict_rows_in_flight(profile, table_index, popularity, batches), possible)
    first, last = (
        expected_used_rows(popularity, lookups, min(batch, batches.batches_per_epoch))
        for batch in (batches.first_batch, batches.last_batch)
    )
    if table.rows is None:
        max_rows = max(1, math.ceil(max(last * OPEN_ROOM, at_once_rows) / num_owners))
    else:
        max_rows = max(1, max_rows_per_owner(table.rows, num_owners))
    least_mean = _upper_bound(at_once_rows / num_owners, at_once_rows, num_owners > 1)
    least = min(max_rows, max(1, math.ceil(least_mean)))
    window_rows = min(max_rows, math.ceil(_upper_bound(in_flight, possible / num_owners)))
    births = (last - first) / batches.span / num_owners
    rows, reads = _average_read_curves(popularity, lookups, batches)
    rows = rows / num_owners
    reads = reads / num_owners
    # Rows in transit take slots in addition to those of cached rows.
    rows = rows + np.minimum(batches.window * (reads + births), in_flight)
    order = np.argsort(rows, kind="stable")
    rows = np.append(np.minimum(rows[order], max_rows), max_rows)
    reads = np.append(np.minimum.accumulate(reads[order]), 0.0)
    return MemoryDemand(
        table.name,
        slot_bytes(table),
        least,
        max_rows,
        tuple(rows.tolist()),
        tuple(reads.tolist()),
        unique=popularity.unique(lookups) / num_owners,
        births=births,
        is_open=table.rows is None,
        window_rows=max(least, window_rows),
    )


def _fix_demand(demand: MemoryDemand, own_bytes: int, pinned_batches: int) -> MemoryDemand:
    """Return the demand of a table with bytes of its own."""
    rows = min(demand.max_rows, max(1, own_bytes // demand.slot_bytes))
    if rows < demand.least_rows:
        setting = f"plan.memory.tables.{demand.name}"
        raise build_budget_error(demand, own_bytes, setting, pinned_batches)
    return replace(
        demand,
        least_rows=rows,
        window_rows=rows,
        max_rows=rows,
        rows=(0.0,),
        reads=(demand.reads_at(rows),),
    )


def _average_read_curves(
    popularity: Popularity,
    lookups_per_batch: float,
    batches: RunBatches,
) -> tuple[Floats, Floats]:
    """Return the mean of the read curves at several moments, at the rows of all their points."""
    curves = [
        predict_counting_cache_reads(
            popularity, lookups_per_batch, moment, batches.batches_per_epoch
        )
        for moment in batches.moments
    ]
    rows = np.unique(np.concatenate([curve[0] for curve in curves]))
    if len(rows) > CURVE_POINTS:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, CURVE_POINTS).round().astype(np.int64))]
    return rows, np.mean([np.interp(rows, *curve) for curve in curves], axis=0)


def _count_possible_rows(
    profile: Profile, table_index: int, table: Table, num_samples: int | None
) -> float:
    """Return the largest number of distinct rows that any number of batches can have, over all ranks."""
    possible = math.inf if table.rows is None else float(table.rows)
    if num_samples is None:
        return possible
    stats = profile.tables[table_index]
    if profile.samples >= num_samples:  # The sample is the whole data set.
        return min(possible, stats.rows)
    more_samples = num_samples - profile.samples
    return min(possible, stats.rows + more_samples * profile.lookups_per_sample(table_index))


def _predict_rows_in_flight(
    profile: Profile, table_index: int, popularity: Popularity, batches: RunBatches
) -> float:
    """Return the distinct rows of `at_once` full batches; from counts, if the sample has batches of this size."""
    batch_size = batches.batch_size
    at_once = batches.at_once
    counted = profile.tables[table_index].most_unique if batch_size == profile.largest_batch else 0
    lookups = profile.lookups_per_sample(table_index) * batch_size
    if not counted:
        return popularity.unique(lookups * at_once)
    return min(counted * at_once, max(counted, popularity.unique(lookups * at_once)))


def _upper_bound(mean: float, max_rows: float, is_random: bool = True) -> float:
    """Return a number of rows that batches hardly ever exceed, at most `max_rows`."""
    return min(max_rows, mean + SPREAD * math.sqrt(mean)) if is_random else min(max_rows, mean)
