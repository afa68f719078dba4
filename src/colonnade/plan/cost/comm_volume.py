"""Communication volume and processor time of one table under each sharding and exchange, per step.

Every trainer requests rows from every owner, and all pairs exchange the same bytes on average, because rows are hashed
over owners and samples are divided evenly. So two numbers describe a choice: the number of owners, and the bytes per
(trainer, owner) pair. `paths.py` maps these bytes to links, and knows which values hosts sum before sending them.

If rows are cut by columns, each of k slices has n owners. Every slice receives all ids and sends a k-th of the bytes.

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
    expected_id_list_bytes,
    expected_numbers_bytes,
    expected_unsorted_list_bytes,
    list_header_bytes,
)

HEAD_BYTES = SIZE_BYTES + 3
"""Header bytes of a message: its size, the number of samples (2 bytes for 128 .. 16,383), a flag for codes."""
NORMAL_QUADRATURE = (
    (0.0, 0.53333), (1.35563, 0.22208), (-1.35563, 0.22208), (2.85697, 0.01126), (-2.85697, 0.01126)
)  # fmt: skip
"""Nodes, in standard deviations, and weights of a quadrature that averages over a normal distribution."""


def expected_length_bytes(longest: int, lookups: float, samples: float, owners: int) -> float:
    """Return the bytes of a column's bag lengths in a message to each owner; the first byte tells their encoding."""
    bits = count_bag_length_bits(longest, lookups, samples, owners)
    return 2.0 if not bits else 1 + samples * bits / 8


def count_bag_length_bits(longest: int, lookups: float, samples: float, owners: int) -> int:
    """Return the bits of a bag's length in a message to one owner; 0: all lengths are equal.

    longest: lookups of the feature's longest bag. lookups, samples: of a rank's batch."""
    is_equal = abs(lookups - longest * samples) < 0.5
    if owners == 1:
        return 0 if is_equal else _fitting_bits(longest)
    # Find the longest part of a bag at one owner that occurs in more than half a sample of a batch on average.
    share = longest
    expected_samples = 0.0
    while share > 0:
        expected_samples += (
            math.comb(longest, share)
            * (owners - 1) ** (longest - share)
            / owners**longest
            * samples
        )
        if expected_samples > 0.5:
            break
        share -= 1
    return _fitting_bits(max(1, share))


def _fitting_bits(length: int) -> int:
    return next(bits for bits in BITS if length < 2**bits)


def expected_id_bytes(
    lookups: float,
    unique: float,
    rows: int,
    num_owners: int,
    *,
    list_ratio: float = 1.0,
    raw_list_ratio: float = 1.0,
) -> float:
    """Return the bytes of one table's ids in a message to one owner.

    lookups: number of lookups of the owner's rows; unique: distinct rows among them. rows: of the table; 0: an
    open table. list_ratio, raw_list_ratio: as in `TableLoad`."""
    if lookups <= 0:
        return 0.0
    head = list_header_bytes(lookups, rows)
    raw_list = (
        expected_unsorted_list_bytes(lookups, rows, num_owners) - head
    ) * raw_list_ratio + head
    # The number of distinct ids at an owner is random in the rows of the batch and in the owners of these rows.
    deviation = math.sqrt(unique * max(0.0, 1 - unique / (lookups * num_owners)))
    indices = sum(
        weight * expected_numbers_bytes(lookups, max(1.0, unique + deviations * deviation))
        for deviations, weight in NORMAL_QUADRATURE
    )
    distinct = expected_id_list_bytes(unique, rows, num_owners) * list_ratio + indices
    return 1 + min(raw_list, distinct)


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
"""Number of all-to-alls of a step by channel, in addition to the two that send sizes and ids for all exchanges."""
EXTRA_EXCHANGE_SECONDS = 2.5e-3
"""Processor time of a rank per step for every exchange after the first, whatever its tables: planning, packing,
pooling, pushing and updating start once more, and the rows of all tables are listed again. Measured by splitting the
tables of one exchange into two and three (26 fields, 4 ranks on 2 processors), without the time of their messages."""
SHARED_BYTES = float(WEIGHT.size)
"""Bytes that each rank sends every other rank whatever the exchanges: the weight of its batch."""
FIXED_BYTES = {
    "rows": float(SIZE_BYTES + FLAG_BYTES),
    "pooled": float(HEAD_BYTES),
    "partials": float(HEAD_BYTES),
    "towers": float(HEAD_BYTES),
    "tower_rows": float(SIZE_BYTES + SAMPLES.size),
    "replicated": float(SIZE_BYTES + FLAG_BYTES),
}
"""Bytes that each rank sends every other rank for each exchange in use."""
TABLE_BYTES = {
    "rows": 1.0, "pooled": 0.0, "partials": 0.0, "towers": 0.0, "tower_rows": 0.0, "replicated": 1.0,
}  # fmt: skip
"""Bytes that each rank sends every other rank for each table: a flag for whether ids follow."""
TOWER_RANK_BYTES = SHARED_BYTES + FIXED_BYTES["rows"]
"""Bytes that each rank sends every other rank of its tower under `tower_rows`, which requests rows there as `rows`
does; TABLE_BYTES are added."""


@dataclass(frozen=True, slots=True)
class PairTraffic:
    """Bytes between a trainer and one owner per step, on average."""

    route: float
    """Bytes of ids, trainer to owner."""
    fetch: float
    """Bytes of values, owner to trainer."""
    push: float
    """Bytes of gradients, trainer to owner."""
    inside: float = 0.0
    """Bytes of values, and of gradients, between an owner and a rank of its tower for one rank's samples, if the
    exchange goes by towers. `fetch` and `push` then count all slices, between a tower and a rank of another one."""
    of_rows: TowerRowTraffic | None = None
    """Replaces `inside` if rows are sent to a rank of the tower and pooled there."""


@dataclass(frozen=True, slots=True)
class TowerRowTraffic:
    """Bytes between a rank of a tower and an owner in it, for the samples of all of the rank's peers."""

    ids: float
    values: float
    gradients: float

    @property
    def total(self) -> float:
        """Bytes of ids, values and gradients together."""
        return self.ids + self.values + self.gradients


@dataclass(frozen=True, slots=True)
class ProcessorSeconds:
    """Processor time per step."""

    trainer: float
    """Seconds of every trainer, for its own samples."""
    owner: float
    """Seconds of every owner, for all samples."""

    def __add__(self, other: ProcessorSeconds) -> ProcessorSeconds:
        return ProcessorSeconds(self.trainer + other.trainer, self.owner + other.owner)


def predict_pair_traffic(
    load: TableLoad,
    exchange: ExchangeName,
    num_owners: int,
    slices: int = 1,
    unique_peers: float = 0.0,
) -> PairTraffic:
    """Predict the bytes of one table between a trainer and an owner, without the bytes that all tables share.

    unique_peers: distinct rows in the batches of one rank of each tower together, for `tower_rows`."""
    n = num_owners
    unique = load.unique_rank
    if exchange == "replicated":
        ids = (
            load.list_ratio * expected_id_list_bytes(unique, load.vocabulary, 1)
            - TABLE_BYTES[exchange]
        )
        return PairTraffic(ids, 0.0, unique * load.gradient_bytes)
    if exchange == "rows":
        ids = load.list_ratio * expected_id_list_bytes(unique / n, load.vocabulary, n)
        ids -= TABLE_BYTES[exchange]
        owner_rows = unique / (n * slices)
        return PairTraffic(ids, owner_rows * load.value_bytes, owner_rows * load.gradient_bytes)
    if exchange == "tower_rows":
        # A peer rank gets all lookups of the table and requests rows from the owners as under `rows`, without codec.
        to_peer = predict_pair_traffic(load, "pooled", 1)
        owner_rows = unique_peers / (n * slices)
        ids = load.list_ratio * expected_id_list_bytes(unique_peers / n, load.vocabulary, n)
        of_rows = TowerRowTraffic(
            ids - TABLE_BYTES["rows"],
            owner_rows * load.row_bytes,
            owner_rows * load.width * load.weight_bytes,
        )
        return replace(to_peer, of_rows=of_rows)
    # Every owner sends and receives a block for all bags, with zeros for bags without a row of it. Values under
    # `partials` depend on all its tables together (plan/cost/partials.py).
    route = expected_id_bytes(
        load.lookups / n,
        unique / n,
        load.vocabulary,
        n,
        list_ratio=load.list_ratio,
        raw_list_ratio=load.raw_list_ratio,
    )
    for column in load.columns:
        route += expected_length_bytes(column.longest, column.lookups, load.samples, n)
        route += column.lookups * load.weight_bytes / n if column.is_weighted else 0.0
    if exchange == "partials":
        return PairTraffic(route, 0.0, 0.0)
    if exchange == "towers":
        inside = load.bags * load.width * load.weight_bytes / slices  # without codec
        return PairTraffic(
            route, load.bags * load.bag_bytes, load.bags * load.gradient_bytes, inside
        )
    values = load.bags * load.bag_bytes + load.samples * load.squares_bytes
    gradients = load.bags * load.gradient_bytes + load.samples * load.squares_gradient_bytes
    return PairTraffic(route, values / slices, gradients / slices)


def predict_processor_seconds(
    load: TableLoad,
    exchange: ExchangeName,
    num_owners: int,
    num_ranks: int,
    rates: Sequence[RowRate],
    slices: int = 1,
    unique_peers: float = 0.0,
    tower_size: int = 1,
) -> ProcessorSeconds:
    """Predict the processor time of one table from measured rates of gathering, updating, planning and packing.

    Returns zeros without rates. unique_peers: as in `predict_pair_traffic`. tower_size: ranks of a tower."""
    if not rates:
        return ProcessorSeconds(0.0, 0.0)
    gather, update = interpolate_row_seconds(rates, max(load.width // slices, 1))  # of one slice
    plan_seconds, pack_seconds = mean_lookup_seconds(rates)
    n = num_owners
    requested_rows = num_ranks * load.unique_rank
    if exchange == "replicated":
        own = load.lookups * (2 * gather + plan_seconds)
        merge = requested_rows * (gather + plan_seconds)
        return ProcessorSeconds(own + merge + load.unique_world * update, 0.0)
    updates = load.unique_world / n * update
    if exchange == "rows":
        # Trainers pool values and sum gradients; owners copy rows, sum gradients again and apply them.
        trainer = load.lookups * (2 * gather + plan_seconds) * slices
        owner = requested_rows / n * (2 * gather + plan_seconds) + updates
        return ProcessorSeconds(trainer, owner)
    trainer = load.lookups * slices * pack_seconds / 2
    if exchange == "tower_rows":
        # Ranks of a tower join, plan, pool and sum for their peers: on average as many lookups as a rank has.
        trainer += load.lookups * (2 * gather + plan_seconds + pack_seconds / 2) * slices
        trainer += 2 * load.bags * gather * slices
        owner = tower_size * unique_peers / n * (2 * gather + plan_seconds) + updates
        return ProcessorSeconds(trainer, owner)
    if exchange != "partials":
        trainer += (n + 1) * load.bags * gather * slices
    served_lookups = num_ranks * load.lookups / n
    owner = served_lookups * (2 * gather + plan_seconds + pack_seconds / 2) + updates
    return ProcessorSeconds(trainer, owner)


def predict_transfer_seconds(
    traffic: PairTraffic, num_owners: int, world: World, num_towers: int = 1
) -> ProcessorSeconds:
    """Predict the processor time of sending and receiving one table's bytes. Bytes that stay on a rank cost nothing."""
    per_byte = world.byte_processor_seconds
    num_trainers = world.num_trainers
    remote_part = 1.0 if world.has_servers else (world.num_ranks - 1) / world.num_ranks
    if traffic.of_rows is not None:
        tower_size = world.num_ranks // num_towers
        within = (1 - 1 / tower_size) * traffic.of_rows.total * per_byte
        ids = 2 * (1 - 1 / num_towers) * traffic.route * per_byte
        between = tower_crossing_seconds(traffic.fetch + traffic.push, world, num_towers)
        # Every rank of a tower requests rows from all owners in it: a T-th of the owners, averaged over towers.
        return ProcessorSeconds(
            ids + between + num_owners * within / num_towers, tower_size * within
        )
    if traffic.inside:
        # Owners send to ranks of their tower, and these to the ranks with their local number in other towers.
        in_tower_part = 1 - num_towers / world.num_ranks
        served = (remote_part * traffic.route + in_tower_part * 2 * traffic.inside) * per_byte
        between = tower_crossing_seconds(traffic.fetch + traffic.push, world, num_towers)
        return ProcessorSeconds(num_owners * served + between, num_trainers * served)
    size = traffic.route + traffic.fetch + traffic.push
    pair_seconds = remote_part * size * per_byte
    return ProcessorSeconds(num_owners * pair_seconds, num_trainers * pair_seconds)


def tower_crossing_seconds(size: float, world: World, num_towers: int) -> float:
    """Return every rank's processor time for `size` bytes between each tower and a rank of another one.

    Every byte is sent once and received once."""
    return 2 * (1 - 1 / num_towers) * size * world.byte_processor_seconds


def predict_single_rank_seconds(load: TableLoad, rates: Sequence[RowRate]) -> float:
    """Return the processor time of a table on a rank that owns all its rows.

    A micro-benchmark on one process has this time in its step already."""
    if not rates:
        return 0.0
    gather, update = interpolate_row_seconds(rates, load.width)
    plan_seconds, _ = mean_lookup_seconds(rates)
    return load.lookups * (2 * gather + plan_seconds) + load.unique_rank * update


def mean_lookup_seconds(rates: Sequence[RowRate]) -> tuple[float, float]:
    """Return the seconds of planning one lookup, and of packing and joining one: means of the measured rates.

    Returns zeros if nothing was measured."""
    known = [rate for rate in rates if rate.planned and rate.packed]
    if not known:
        return 0.0, 0.0
    return fmean(1 / rate.planned for rate in known), fmean(1 / rate.packed for rate in known)


def interpolate_row_seconds(rates: Sequence[RowRate], width: int) -> tuple[float, float]:
    """Return the seconds of gathering one row of `width` floats, and of updating one.

    Interpolates between the measured widths; proportional to the width above them."""
    known = sorted(rates, key=lambda rate: rate.width)
    widths = [rate.width for rate in known]
    scale = width / min(max(width, widths[0]), widths[-1])
    scale = max(scale, 1.0)
    return (
        scale * float(np.interp(width, widths, [1 / rate.gathered for rate in known])),
        scale * float(np.interp(width, widths, [1 / rate.updated for rate in known])),
    )


def step_seconds(processor: float, waited: float, behind: float, crowding: float) -> float:
    """Return the seconds of a rank's step.

    processor: seconds of computing on a processor of its own. waited: seconds of waiting for links. behind: seconds of
    messages sent in the background of both. crowding: `World.crowding`."""
    return max(processor * crowding, processor + waited, behind)
