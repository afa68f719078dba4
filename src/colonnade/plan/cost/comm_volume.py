"""Communication volume and work of one table under each sharding and exchange, per step.

A sharding names the ranks that own rows; every rank asks, and each owner serves each asker alike, because owners are
dealt rows by a hash and ranks are dealt samples. So a choice is two numbers of owners and of bytes per (asker, owner).
Which links these take, and that hosts add up what all their ranks have a share of, is `paths.py`'s.

Rows that are cut by columns have n owners for each of k slices, each of which is asked for all ids and has a k-th of
a row's bytes.

Legend: N ranks, n owners (of each slice), k slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.measure.device import RowRate
from colonnade.topology.world import World
from colonnade.wire.bags import BITS
from colonnade.wire.id_distribution import SAMPLES, SIZE_BYTES, WEIGHT
from colonnade.wire.packing import (
    FLAG_BYTES,
    expected_list_bytes,
    expected_listed_bytes,
    expected_numbers_bytes,
    listed_head_bytes,
)

HEAD_BYTES = SIZE_BYTES + 3
"""Of a message: its size, how many samples (2 bytes for 128 .. 16,383) and whether codes follow."""
SPREAD = ((0.0, 0.53333), (1.35563, 0.22208), (-1.35563, 0.22208), (2.85697, 0.01126), (-2.85697, 0.01126))  # fmt: skip
"""Where to look, in standard deviations, and the weight of what is found there: the mean over a normal distribution."""


def lengths_bytes(longest: int, lookups: float, samples: float, owners: int) -> float:
    """Of one column, to each of its owners: a byte says how lengths lie."""
    bits = length_bits(longest, lookups, samples, owners)
    return 2.0 if not bits else 1 + samples * bits / 8


def length_bits(longest: int, lookups: float, samples: float, owners: int) -> int:
    """Of the length of a bag, at one of its owners; 0: all are equal. Of a feature: lookups of the longest bag, and
    of a rank's batch of so many samples."""
    is_equal = abs(lookups - longest * samples) < 0.5
    if owners == 1:
        return 0 if is_equal else _holding(longest)
    # The longest share that more than half a sample of a batch is expected to have.
    share, likely = longest, 0.0
    while share > 0:
        likely += (
            math.comb(longest, share)
            * (owners - 1) ** (longest - share)
            / owners**longest
            * samples
        )
        if likely > 0.5:
            break
        share -= 1
    return _holding(max(1, share))


def _holding(length: int) -> int:
    return next(bits for bits in BITS if length < 2**bits)


def ids_bytes(
    lookups: float,
    unique: float,
    rows: int,
    num_owners: int,
    *,
    list_ratio: float = 1.0,
    listed_ratio: float = 1.0,
) -> float:
    """Of one table, to one owner that has the rows of so many lookups, `unique` of them different. rows 0: an open
    table. Ratios: of measured ids to evenly spread ones, of a list of different ids and of ids as they come."""
    if lookups <= 0:
        return 0.0
    head = listed_head_bytes(lookups, rows)
    listed = (expected_listed_bytes(lookups, rows, num_owners) - head) * listed_ratio + head
    # Different ids at an owner vary by which rows come, and by which of them are its own.
    deviation = math.sqrt(unique * max(0.0, 1 - unique / (lookups * num_owners)))
    which = sum(
        weight * expected_numbers_bytes(lookups, max(1.0, unique + deviations * deviation))
        for deviations, weight in SPREAD
    )
    distinct = expected_list_bytes(unique, rows, num_owners) * list_ratio + which
    return 1 + min(listed, distinct)


ExchangeName = Literal["rows", "pooled", "partials", "towers", "tower_rows", "replicated"]
CHANNELS = ("route", "fetch", "push")
CALLS = {
    "rows": (0, 1, 1),
    "pooled": (0, 1, 1),
    "partials": (0, 1, 1),
    "towers": (0, 1, 1),
    "tower_rows": (2, 1, 1),
    "replicated": (0, 0, 1),
}
"""All-to-alls of a step, by channel, beside the two that all exchanges route with: sizes, and what is asked for."""
BESIDE_SECONDS = 2.5e-3
"""Of a rank's processor in a step, for every exchange beside the first, whatever its tables are: planning, packing,
pooling, pushing and updating begin once more, and rows of all tables are listed anew. Measured: the tables of one
exchange between two and three ends of it (26 fields, 4 ranks on 2 processors), without what their messages take."""
SHARED_BYTES = float(WEIGHT.size)
"""Of those, from each rank to each other: the weight of its batch."""
FIXED_BYTES = {
    "rows": float(SIZE_BYTES + FLAG_BYTES),
    "pooled": float(HEAD_BYTES),
    "partials": float(HEAD_BYTES),
    "towers": float(HEAD_BYTES),
    "tower_rows": float(SIZE_BYTES + SAMPLES.size),
    "replicated": float(SIZE_BYTES + FLAG_BYTES),
}
"""From each rank to each other, of an exchange that any table uses."""
TABLE_BYTES = {
    "rows": 1.0, "pooled": 0.0, "partials": 0.0, "towers": 0.0, "tower_rows": 0.0, "replicated": 1.0,
}  # fmt: skip
"""From each rank to each other, of each table: that no ids of it follow."""
MATES_BYTES = SHARED_BYTES + FIXED_BYTES["rows"]
"""From each rank to each other of its tower, under `tower_rows`, which asks there as `rows` does; and TABLE_BYTES."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Bytes that a rank and one other that owns rows send each other per step, on the mean."""

    route: float
    """Asker to owner."""
    fetch: float
    """Owner to asker."""
    push: float
    """Asker to owner."""
    inside: float = 0.0
    """Of values, and again of gradients, where they go by towers: between an owner and a rank of its tower, for as many
    samples as a rank has. `fetch` and `push` are then of all slices, between a tower and a rank of another."""
    of_rows: OfRows | None = None
    """Instead of that, where rows come together in the tower."""


@dataclass(frozen=True, slots=True)
class OfRows:
    """Bytes between a rank of a tower and an owner in it, for the samples of all of the rank's peers."""

    asked: float
    values: float
    gradients: float

    @property
    def all(self) -> float:
        return self.asked + self.values + self.gradients


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a processor per step."""

    asker: float
    """Of every rank, for its own samples."""
    owner: float
    """Of every rank that owns rows, for all samples."""

    def __add__(self, other: Work) -> Work:
        return Work(self.asker + other.asker, self.owner + other.owner)


def pair(
    load: TableLoad,
    exchange: ExchangeName,
    num_owners: int,
    slices: int = 1,
    unique_peers: float = 0.0,
) -> Pair:
    """What each exchange counts of one table, beside what is the same for all. unique_peers: rows of the batches of one
    rank of each tower together, for `tower_rows`."""
    n, unique = num_owners, load.unique_rank
    if exchange == "replicated":
        ids = (
            load.list_ratio * expected_list_bytes(unique, load.vocabulary, 1)
            - TABLE_BYTES[exchange]
        )
        return Pair(ids, 0.0, unique * load.gradient_bytes)
    if exchange == "rows":
        ids = load.list_ratio * expected_list_bytes(unique / n, load.vocabulary, n)
        ids -= TABLE_BYTES[exchange]
        each = unique / (n * slices)
        return Pair(ids, each * load.value_bytes, each * load.gradient_bytes)
    if exchange == "tower_rows":
        # A peer is asked for all lookups of the table, and asks the owners as under `rows`; in there nothing is coded.
        peer, each = pair(load, "pooled", 1), unique_peers / (n * slices)
        ids = load.list_ratio * expected_list_bytes(unique_peers / n, load.vocabulary, n)
        of_rows = OfRows(
            ids - TABLE_BYTES["rows"], each * load.row_bytes, each * load.width * load.weight_bytes
        )
        return replace(peer, of_rows=of_rows)
    # Every owner sends a block of all bags, and is sent one: 0 where it has no row of a bag. Under `partials` what
    # travels so is known of all its tables together (plan/cost/partials.py).
    route = ids_bytes(
        load.lookups / n, unique / n, load.vocabulary, n,
        list_ratio=load.list_ratio, listed_ratio=load.listed_ratio,
    )  # fmt: skip
    for column in load.columns:
        route += lengths_bytes(column.longest, column.lookups, load.samples, n)
        route += column.lookups * load.weight_bytes / n if column.is_weighted else 0.0
    if exchange == "partials":
        return Pair(route, 0.0, 0.0)
    if exchange == "towers":
        inside = load.bags * load.width * load.weight_bytes / slices  # never coded
        return Pair(route, load.bags * load.bag_bytes, load.bags * load.gradient_bytes, inside)
    bags = load.bags / slices
    return Pair(route, bags * load.bag_bytes, bags * load.gradient_bytes)


def work(
    load: TableLoad,
    exchange: ExchangeName,
    num_owners: int,
    num_ranks: int,
    rates: Sequence[RowRate],
    slices: int = 1,
    unique_peers: float = 0.0,
    tower_size: int = 1,
) -> Work:
    """By how fast rows are gathered and updated here, and lookups planned and packed; nothing where nobody measured.
    unique_peers: as of `pair`; tower_size: ranks of a tower."""
    if not rates:
        return Work(0.0, 0.0)
    gather, update = row_seconds(rates, max(load.width // slices, 1))  # of a slice
    planned, packed = lookup_seconds(rates)
    n, asked = num_owners, num_ranks * load.unique_rank
    if exchange == "replicated":
        mine = load.lookups * (2 * gather + planned)
        return Work(mine + asked * (gather + planned) + load.unique_world * update, 0.0)
    updates = load.unique_world / n * update
    if (
        exchange == "rows"
    ):  # pooled and summed where the samples are; copied, summed again and applied where rows are
        asker = load.lookups * (2 * gather + planned) * slices
        return Work(asker, asked / n * (2 * gather + planned) + updates)
    asker = load.lookups * slices * packed / 2
    if exchange == "tower_rows":
        # Ranks of a tower join, plan, pool and sum for their peers, on the mean as many lookups as a rank has.
        asker += load.lookups * (2 * gather + planned + packed / 2) * slices
        asker += 2 * load.bags * gather * slices
        return Work(asker, tower_size * unique_peers / n * (2 * gather + planned) + updates)
    if exchange != "partials":
        asker += (n + 1) * load.bags * gather * slices
    heard = num_ranks * load.lookups / n
    return Work(asker, heard * (2 * gather + planned + packed / 2) + updates)


def moving(bytes_: Pair, num_owners: int, world: World, num_towers: int = 1) -> Work:
    """For the bytes of one table: every rank that trains asks its owners, every owner serves all of those; what stays
    on a rank is not moved."""
    per_byte, num_trainers = world.byte_processor_seconds, world.num_trainers
    others = 1.0 if world.has_servers else (world.num_ranks - 1) / world.num_ranks
    if bytes_.of_rows is not None:
        mates = world.num_ranks // num_towers
        within = (1 - 1 / mates) * bytes_.of_rows.all * per_byte
        asked = 2 * (1 - 1 / num_towers) * bytes_.route * per_byte
        over = crossing(bytes_.fetch + bytes_.push, world, num_towers)
        # Of a tower's ranks each asks all owners; on the mean over towers, a T-th as much.
        return Work(asked + over + num_owners * within / num_towers, mates * within)
    if (
        bytes_.inside
    ):  # owners to their towers' ranks, and these to the ranks of their numbers in other towers
        near = 1 - num_towers / world.num_ranks
        served = (others * bytes_.route + near * 2 * bytes_.inside) * per_byte
        over = crossing(bytes_.fetch + bytes_.push, world, num_towers)
        return Work(num_owners * served + over, num_trainers * served)
    size = bytes_.route + bytes_.fetch + bytes_.push
    each = others * size * per_byte
    return Work(num_owners * each, num_trainers * each)


def crossing(size: float, world: World, num_towers: int) -> float:
    """Seconds of every rank's processor for so many bytes between each tower and a rank of another: each is sent by one
    and got by one."""
    return 2 * (1 - 1 / num_towers) * size * world.byte_processor_seconds


def alone(load: TableLoad, rates: Sequence[RowRate]) -> float:
    """`work` of a rank that has all rows to itself: what a rehearsal on one process has in its step already."""
    if not rates:
        return 0.0
    gather, update = row_seconds(rates, load.width)
    planned, _ = lookup_seconds(rates)
    return load.lookups * (2 * gather + planned) + load.unique_rank * update


def lookup_seconds(rates: Sequence[RowRate]) -> tuple[float, float]:
    """(planned, packed and joined): seconds of one lookup, the mean over what was measured; 0 where nothing was."""
    known = [rate for rate in rates if rate.planned and rate.packed]
    if not known:
        return 0.0, 0.0
    return fmean(1 / rate.planned for rate in known), fmean(1 / rate.packed for rate in known)


def row_seconds(rates: Sequence[RowRate], width: int) -> tuple[float, float]:
    """(gathered, updated): seconds of one row of so many floats, between the widths that were measured; beyond them in
    proportion."""
    known = sorted(rates, key=lambda rate: rate.width)
    widths = [rate.width for rate in known]
    scale = width / min(max(width, widths[0]), widths[-1])
    scale = max(scale, 1.0)
    return (
        scale * float(np.interp(width, widths, [1 / rate.gathered for rate in known])),
        scale * float(np.interp(width, widths, [1 / rate.updated for rate in known])),
    )


def step_seconds(processor: float, waited: float, behind: float, crowding: float) -> float:
    """Of a rank that computes for `processor` seconds where it has a processor to itself, waits for links, and lets
    messages travel behind both."""
    return max(processor * crowding, processor + waited, behind)
