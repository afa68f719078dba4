"""Which rows get the memory: from what each table would read at any size to a size for each, within the budgets.

A cache of n rows of a table holds, in time, the n rows used most: that is what giving a table n rows means. What a
table would read falls with its rows, ever slower along its lower hull; the next byte always goes where it saves
most. On curves that are their own hulls that is the best there is, but for the last rounding.

Pure functions of numbers. "Rows" are one rank's, "reads" and "births" those of one batch of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import BudgetExceeded
from colonnade.plan.measure.popularity import (
    OPEN_ROOM,
    Popularity,
    counting_curve,
    recency_curve,
    seen,
)
from colonnade.plan.measure.profile import Profile
from colonnade.store.budget import slot_bytes
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, distinct_shard_lists, max_rows_per_owner

Floats = NDArray[np.float64]

Tier = Literal["dram", "mapped"]
"""Where rows of a table rest: in memory, or in exported files that are mapped."""
MOMENTS = 6
"""Of a run's batches, at which its reads are foretold; their mean is the run's."""
CURVE_POINTS = 256
Policy = Callable[[Popularity, float, float, float], tuple[Floats, Floats]]
POLICIES: dict[str, Policy] = {"counting": counting_curve, "recency": recency_curve}
SPREAD = 4.0
"""Standard deviations by which a batch may have more rows than the mean."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one table asks of one rank's memory."""

    name: str
    slot_bytes: int
    least_rows: int
    """Of the batches that must be in memory at once: one, without staleness."""
    most_rows: int
    """More would not help, or is not wanted."""
    rows: tuple[float, ...]
    reads: tuple[float, ...]
    """With rows[i] rows in memory, reads[i] rows a batch come from files. Between the points: straight lines."""
    unique: float
    """Different rows of a batch."""
    births: float
    """Rows of a batch that were never used before."""
    is_open: bool = False
    window_rows: int = 0
    """Of all batches in flight, as far ahead as is looked: a window that does not fit becomes shorter."""

    def reads_at(self, rows: float) -> float:
        return float(np.interp(rows, self.rows, self.reads))

    @property
    def most_bytes(self) -> int:
        return self.most_rows * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """What one table got."""

    name: str
    rows: int
    reads: float
    tier: Tier = "dram"


def demands(
    tables: Sequence[Table],
    profile: Profile,
    *,
    batch_size: int,
    window: int,
    at_once: int = 1,
    num_ranks: int = 1,
    num_samples: int | None = None,
    first_batch: int = 0,
    last_batch: int,
    fixed_bytes: Mapping[str, int] | None = None,
    policy: str = "counting",
    shardings: Sequence[Sharding] | None = None,
) -> list[Demand]:
    """What a run's batches first_batch .. last_batch ask, on the mean, `window` of them being in flight and `at_once`
    of those in memory whatever happens.

    `num_samples`: of the data set, where that is known: no batch has more different rows than it. `fixed_bytes`, by
    name: tables that have bytes of their own. `policy`: a key of POLICIES. `shardings`, by table: who has rows, of
    which each demand is a rank's; without, all ranks do.
    """
    span = max(last_batch - first_batch, 1)
    epoch = math.inf if num_samples is None else max(num_samples / batch_size, 1.0)
    moments = [first_batch + span * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    found = []
    for t, table in enumerate(tables):
        owners = num_ranks if shardings is None else shardings[t].num_owners
        of = profile.tables[t].popularity(table.rows)
        lookups = profile.lookups_per_sample(t) * batch_size
        unique = of.unique(lookups) / owners
        possible = _possible_rows(profile, t, table, num_samples)
        held = min(of.unique(lookups * window), possible) / owners
        full = min(_rows_at_once(profile, t, of, batch_size, at_once), possible)
        if table.rows is None:
            whole = max(seen(of, lookups, min(last_batch, epoch)) * OPEN_ROOM, full) / owners
        else:
            whole = max_rows_per_owner(table.rows, owners)
        most = max(1, math.ceil(whole))
        least = min(most, max(1, math.ceil(_spread(full / owners, full, owners > 1))))
        wished = min(most, math.ceil(_spread(held, possible / owners)))
        first, last = (seen(of, lookups, min(n, epoch)) for n in (first_batch, last_batch))
        born = (last - first) / span / owners
        rows, reads = _mean_curve(of, lookups, moments, epoch, POLICIES[policy])
        rows, reads = rows / owners, reads / owners
        # Rows on their way through take room beside those that are kept.
        rows = rows + np.minimum(window * (reads + born), held)
        order = np.argsort(rows, kind="stable")
        rows = np.append(np.minimum(rows[order], most), most)
        reads = np.append(np.minimum.accumulate(reads[order]), 0.0)
        demand = Demand(
            table.name, slot_bytes(table), least, most, tuple(rows.tolist()), tuple(reads.tolist()),
            unique, born, table.rows is None, max(least, wished),
        )  # fmt: skip
        if fixed_bytes and table.name in fixed_bytes:
            fixed = min(most, max(1, fixed_bytes[table.name] // slot_bytes(table)))
            if fixed < least:
                raise _too_small(
                    demand, fixed_bytes[table.name], f"plan.memory.tables.{table.name}", at_once
                )
            demand = replace(
                demand,
                least_rows=fixed,
                window_rows=fixed,
                most_rows=fixed,
                rows=(0.0,),
                reads=(demand.reads_at(fixed),),
            )
        found.append(demand)
    return found


def place(
    wanted: Sequence[Demand],
    dram_bytes: int | None,
    mapped_bytes: int | None = 0,
    *,
    at_once: int = 1,
) -> list[Placed]:
    """Rows of each table in memory. None: no limit. Raises BudgetExceeded, naming the table and the numbers, where the
    `at_once` batches that must be in memory do not fit. The window of batches in flight comes before anything else.

    Tables that memory would have to read most of, for their size, lie whole in `mapped_bytes` of byte-addressable
    memory, whose rows are never read from files.
    """
    if dram_bytes is None:
        return [Placed(each.name, each.most_rows, 0.0) for each in wanted]
    rows = _share(wanted, dram_bytes, at_once)
    if mapped_bytes == 0:
        return _placed(wanted, rows, set())
    chosen: set[int] = set()
    while True:
        left = (
            None
            if mapped_bytes is None
            else mapped_bytes - sum(wanted[t].most_bytes for t in chosen)
        )
        gains = {
            t: each.reads_at(rows[t]) / each.most_bytes
            for t, each in enumerate(wanted)
            if t not in chosen and not each.is_open and rows[t] < each.most_rows
            and (left is None or each.most_bytes <= left)
        }  # fmt: skip
        best = max(gains, key=lambda t: gains[t], default=None)
        if best is None or gains[best] <= 0:
            return _placed(wanted, rows, chosen)
        chosen.add(best)
        others = [t for t in range(len(wanted)) if t not in chosen]
        shares = iter(_share([wanted[t] for t in others], dram_bytes, at_once))
        rows = [each.most_rows if t in chosen else next(shares) for t, each in enumerate(wanted)]


def place_on_ranks(
    wanted: Sequence[Demand],
    shardings: Sequence[Sharding],
    num_ranks: int,
    dram_bytes: int | None,
    mapped_bytes: int | None = 0,
    *,
    at_once: int = 1,
) -> list[Placed]:
    """`place` where ranks have different tables: each rank's memory goes to those it has, and a table gets what every
    rank with rows of it can give. `wanted`: of these shardings, by table. Raises as `place` does."""
    loads = [
        [t for t, shard in enumerate(shards) if shard.place is not None]
        for shards in distinct_shard_lists(shardings, num_ranks)
    ]
    loads = [held for held in loads if held]
    given = [_placed_at(wanted, held, dram_bytes, mapped_bytes, at_once) for held in loads]
    tiers = {t: {by_table[t].tier for by_table in given if t in by_table} for t in range(len(wanted))}  # fmt: skip
    if any(len(kinds) > 1 for kinds in tiers.values()):
        # Some rank has no mapped room for a table: then it is in memory on all, and leaves that to others.
        mapped = {t for t, kinds in tiers.items() if kinds == {"mapped"}}
        given = [
            {t: Placed(wanted[t].name, wanted[t].most_rows, 0.0, "mapped") for t in held if t in mapped}
            | _placed_at(wanted, [t for t in held if t not in mapped], dram_bytes, 0, at_once)
            for held in loads
        ]  # fmt: skip
    return [
        min((by_table[t] for by_table in given if t in by_table), key=lambda placed: placed.rows)
        for t in range(len(wanted))
    ]


def _placed_at(
    wanted: Sequence[Demand],
    held: Sequence[int],
    dram_bytes: int | None,
    mapped_bytes: int | None,
    at_once: int,
) -> dict[int, Placed]:
    """By table, on a rank that has rows of those `held`."""
    found = place([wanted[t] for t in held], dram_bytes, mapped_bytes, at_once=at_once)
    return dict(zip(held, found, strict=True))


def mean_over_ranks(
    wanted: Sequence[Demand],
    placed: Sequence[Placed],
    shardings: Sequence[Sharding],
    num_ranks: int,
) -> tuple[list[Demand], list[Placed]]:
    """What ranks with rows of a table read and give birth to, as the mean over all ranks."""
    parts = [len(sharding.ranks) / num_ranks for sharding in shardings]
    return (
        [
            replace(
                each, reads=tuple(part * reads for reads in each.reads),
                unique=part * each.unique, births=part * each.births,
            )
            for each, part in zip(wanted, parts, strict=True)
        ],
        [replace(each, reads=part * each.reads) for each, part in zip(placed, parts, strict=True)],
    )  # fmt: skip


def window_fits(wanted: Sequence[Demand], dram_bytes: int | None) -> bool:
    """Whether all batches in flight fit at once, so that none waits for another's end."""
    return dram_bytes is None or _bytes(wanted, [_window(each) for each in wanted]) <= dram_bytes


def hull(rows: Sequence[float], reads: Sequence[float]) -> tuple[Floats, Floats]:
    """The lower convex hull of a falling curve: what mixing two sizes would reach."""
    kept: list[tuple[float, float]] = []
    for x, y in zip(rows, reads, strict=True):
        if kept and x <= kept[-1][0]:
            continue
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (x - kept[-2][0]) >= (
            y - kept[-2][1]
        ) * (kept[-1][0] - kept[-2][0]):
            kept.pop()
        kept.append((x, y))
    found = np.array(kept)
    return found[:, 0], found[:, 1]


def _mean_curve(
    of: Popularity, lookups: float, moments: Sequence[float], epoch: float, policy: Policy
) -> tuple[Floats, Floats]:
    """The mean of a policy's curves at several moments, at rows where one of them has a point."""
    curves = [policy(of, lookups, moment, epoch) for moment in moments]
    rows = np.unique(np.concatenate([curve[0] for curve in curves]))
    if len(rows) > CURVE_POINTS:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, CURVE_POINTS).round().astype(np.int64))]
    return rows, np.mean([np.interp(rows, *curve) for curve in curves], axis=0)


def _possible_rows(profile: Profile, t: int, table: Table, num_samples: int | None) -> float:
    """Different rows that any number of batches can have, on all ranks."""
    possible = math.inf if table.rows is None else float(table.rows)
    if num_samples is None:
        return possible
    of = profile.tables[t]
    if profile.samples >= num_samples:  # the sample is all there is
        return min(possible, of.rows)
    return min(possible, of.rows + (num_samples - profile.samples) * profile.lookups_per_sample(t))


def _rows_at_once(profile: Profile, t: int, of: Popularity, batch_size: int, at_once: int) -> float:
    """Different rows of a full batch, or several in a row: as counted, where the sample has such batches."""
    counted = profile.tables[t].most_unique if batch_size == profile.largest_batch else 0
    lookups = profile.lookups_per_sample(t) * batch_size
    if not counted:
        return of.unique(lookups * at_once)
    return min(counted * at_once, max(counted, of.unique(lookups * at_once)))


def _spread(mean: float, most: float, is_drawn: bool = True) -> float:
    """A number of rows that is hardly ever exceeded, of `most` that there are."""
    return min(most, mean + SPREAD * math.sqrt(mean)) if is_drawn else min(most, mean)


def _window(each: Demand) -> int:
    return min(each.most_rows, max(each.least_rows, each.window_rows))


def _bytes(wanted: Sequence[Demand], rows: Sequence[int]) -> int:
    return sum(n * each.slot_bytes for n, each in zip(rows, wanted, strict=True))


def _first_rows(wanted: Sequence[Demand], budget: int, at_once: int) -> list[int]:
    """What every table gets before the rest goes where it saves most: its window, or as much of it as fits, each
    table the same part."""
    least = _bytes(wanted, [each.least_rows for each in wanted])
    if least > budget:
        largest = max(wanted, key=lambda each: each.least_rows * each.slot_bytes)
        raise _too_small(largest, budget, "plan.memory.dram", at_once, least)
    more = _bytes(wanted, [_window(each) for each in wanted]) - least
    part = 1.0 if more <= budget - least else (budget - least) / more
    return [
        each.least_rows + math.floor(part * (_window(each) - each.least_rows)) for each in wanted
    ]


def _share(wanted: Sequence[Demand], budget: int, at_once: int) -> list[int]:
    first = _first_rows(wanted, budget, at_once)
    left = budget - _bytes(wanted, first)
    steps: list[tuple[float, int, int, float]] = []
    for t, each in enumerate(wanted):
        if each.most_rows <= first[t]:
            continue
        inner = [x for x in each.rows if first[t] < x < each.most_rows]
        places = [float(first[t]), *inner, float(each.most_rows)]
        rows, reads = hull(places, [each.reads_at(x) for x in places])
        saved, sizes = -np.diff(reads), np.diff(rows)
        # Earlier pieces of a table save more a byte than later ones, so that they come in order.
        steps += [
            (-float(saved[i] / (sizes[i] * each.slot_bytes)), t, i, float(sizes[i]))
            for i in range(len(sizes))
            if saved[i] > 0
        ]
    given = [float(n) for n in first]
    free = float(left)
    for _, t, _, size in sorted(steps):
        taken = min(size, free / wanted[t].slot_bytes)
        given[t] += taken
        free -= taken * wanted[t].slot_bytes
        if free <= 0:
            break
    floored = [min(each.most_rows, math.floor(given[t] + 1e-6)) for t, each in enumerate(wanted)]
    return _spend(wanted, floored, budget)


def _spend(wanted: Sequence[Demand], rows: list[int], budget: int) -> list[int]:
    """What saves nothing that is foretold still serves what is not: whole tables first, then evenly."""
    left = budget - _bytes(wanted, rows)
    lacking = [t for t, each in enumerate(wanted) if rows[t] < each.most_rows]
    lacking.sort(key=lambda t: (wanted[t].most_rows - rows[t]) * wanted[t].slot_bytes)
    for place, t in enumerate(lacking):
        each = wanted[t]
        more = min(each.most_rows - rows[t], left // (len(lacking) - place) // each.slot_bytes)
        rows[t] += more
        left -= more * each.slot_bytes
    return rows


def _placed(wanted: Sequence[Demand], rows: Sequence[int], mapped: set[int]) -> list[Placed]:
    return [
        Placed(
            each.name,
            rows[t],
            0.0 if t in mapped else each.reads_at(rows[t]),
            "mapped" if t in mapped else "dram",
        )
        for t, each in enumerate(wanted)
    ]


def _too_small(
    table: Demand, budget: int, setting: str, at_once: int, needed: int | None = None
) -> BudgetExceeded:
    least = table.least_rows * table.slot_bytes
    others = f", and all tables together {needed:,}" if needed is not None else ""
    batches = "a batch" if at_once == 1 else f"the {at_once} batches that are read before an update"
    lower = "the batch size" if at_once == 1 else "the batch size or the staleness"
    return BudgetExceeded(
        f"{setting}: got {budget:,} bytes, but table {table.name!r} needs {table.least_rows:,} rows ({least:,} bytes) "
        f"for {batches}{others}. Raise it, or lower {lower}"
    )
