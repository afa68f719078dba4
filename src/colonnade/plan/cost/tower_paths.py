"""Load of the links by tower exchanges: values are sent inside their owner's tower first, then between peer ranks.

Operators inside towers compress these values (`TowerCompression`).

Legend: N ranks, T towers of S ranks, R link directions as in `paths.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from colonnade.exchange.operator_cut import propose_consumer_sets, tower_of
from colonnade.plan.cost.consumers import ModelLoad
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import list_tower_ranks
from colonnade.topology.world import World

Floats = NDArray[np.float64]
CALL_MESSAGES = 1.4
"""Processor cost of an all-to-all call in addition to its messages, counted in messages: 0.63 ms for 3 messages,
0.34 ms for 1 (gloo, 4 ranks, 2 cores)."""


@dataclass(frozen=True, slots=True)
class HopTraffic:
    """Load of the links by the blocks of one hop; a block holds values for the samples of one rank."""

    value_seconds: Floats
    """Seconds of every link direction for one byte of each block of values, (R,)."""
    gradient_seconds: Floats
    """Seconds of every link direction for one byte of each block of gradients, sent in reverse, (R,)."""
    local_blocks: float
    """Number of blocks of values, and of gradients, that a rank sends to ranks of its host; the mean over ranks."""
    remote_blocks: float
    """Number of blocks that a rank sends to ranks of other hosts; the mean over ranks."""
    balanced_seconds: float
    """Seconds for one byte of each block if all links of a kind had the same load."""

    @property
    def by_link(self) -> dict[str, float]:
        """Number of blocks by link, "local" or "remote"."""
        return {"local": self.local_blocks, "remote": self.remote_blocks}


@dataclass(frozen=True, slots=True)
class TowerTraffic:
    """Load of the links by one table under a tower exchange."""

    inside: HopTraffic
    """Blocks from each owner to the ranks of its tower, for the samples of each rank."""
    between: HopTraffic
    """Blocks from the ranks of the table's tower to their peers, for the samples of each rank."""
    peers: HopTraffic
    """Blocks from each trainer to its peer in the table's tower, one for each slice."""
    owners: HopTraffic
    """Blocks from each rank of the tower to each owner in it."""


def predict_tower_traffic(world: World, sharding: Sharding, num_towers: int) -> TowerTraffic | None:
    """Predict the link loads of a table under tower exchanges.

    Returns None if the rows, or those of one slice, are not all in one tower: they are sent as under `pooled`."""
    towers = list_tower_ranks(world, num_towers)
    size = len(towers[0])
    is_trainer = np.ones(world.num_ranks)
    is_trainer[list(world.servers)] = 0.0
    # Trainers by local rank: the peers that a rank with this local rank serves.
    num_peers = [float(is_trainer[local_rank::size].sum()) for local_rank in range(size)]
    inside: list[tuple[int, int, float]] = []
    between: list[tuple[int, int, float]] = []
    peers: list[tuple[int, int, float]] = []
    owners: list[tuple[int, int, float]] = []
    for slice_sharding in sharding.slice_shardings:
        tower = tower_of(slice_sharding, towers)
        if tower is None:
            return None
        ranks = towers[tower]
        inside += [
            (o, rank, num_peers[rank % size]) for o in slice_sharding.ranks for rank in ranks
        ]
        owners += [
            (rank, o, float(num_peers[rank % size] > 0))
            for o in slice_sharding.ranks
            for rank in ranks
        ]
        peers += [
            (rank, ranks[rank % size], float(is_trainer[rank])) for rank in range(world.num_ranks)
        ]
        between += [
            (rank, peer, float(is_trainer[peer]) / sharding.slices)
            for rank in ranks
            for peer in range(rank % size, world.num_ranks, size)
        ]
    return TowerTraffic(
        *(_sum_blocks(world, blocks) for blocks in (inside, between, peers, owners))
    )


def predict_tower_all_to_all(world: World, num_towers: int) -> HopTraffic:
    """Predict the link loads of one block from each rank to each other rank of its tower."""
    size = world.num_ranks // num_towers
    ranks = range(world.num_ranks)
    return _sum_blocks(world, [(r, o, 1.0) for r in ranks for o in ranks if r // size == o // size])


def count_tower_messages(world: World, num_towers: int) -> tuple[int, int]:
    """Return the messages that each rank sends in both hops of an all-to-all by towers: local and remote ones."""
    size = world.num_ranks // num_towers
    inside_local = min(size, world.ranks_per_host) - 1
    between_local = max(0, world.ranks_per_host // size - 1)  # other towers of the host
    remote = size - 1 - inside_local + num_towers - 1 - between_local
    return inside_local + between_local, remote


def tower_call_seconds(world: World, num_towers: int) -> float:
    """Return the seconds of both hops of an all-to-all by towers with empty messages."""
    local, remote = count_tower_messages(world, num_towers)
    return local * world.message_seconds + remote * world.remote_message_seconds


def predict_saved_processor_seconds(world: World, num_towers: int, chunks: int = 1) -> float:
    """Return the processor time that each rank saves per step if values and gradients are sent by towers.

    chunks: number of pipelined chunks inside a tower. Towers need fewer messages than direct sending, in more calls;
    the result is negative if the calls cost more. Relayed bytes are counted elsewhere."""
    others = world.num_ranks - 1
    size = world.num_ranks // num_towers
    if size == 1 or num_towers == 1:  # one call with the same number of messages
        return 0.0
    fewer = others - (chunks * (size - 1) + num_towers - 1)
    # The measured seconds of a message include its part of the cost of a call.
    message_seconds = world.message_processor_seconds * others / (others + CALL_MESSAGES)
    return 2 * (fewer - chunks * CALL_MESSAGES) * message_seconds


def _sum_blocks(world: World, blocks: Sequence[tuple[int, int, float]]) -> HopTraffic:
    """Sum blocks by link. blocks: (sender, receiver, count) each."""
    senders, receivers = (np.array([block[i] for block in blocks], dtype=np.int64) for i in (0, 1))
    return _sum_counts_by_link(world, senders, receivers, np.array([block[2] for block in blocks]))


def _sum_counts_by_link(
    world: World, senders: NDArray[np.int64], receivers: NDArray[np.int64], counts: Floats
) -> HopTraffic:
    n = world.num_ranks
    hosts = world.num_hosts
    size = world.ranks_per_host
    counts = counts * (senders != receivers)
    is_local = senders // size == receivers // size
    local = counts * is_local
    remote = counts * ~is_local
    sums = [
        np.bincount(senders, local, n),
        np.bincount(receivers, local, n),
        np.bincount(senders // size, remote, hosts),
        np.bincount(receivers // size, remote, hosts),
    ]
    rates = (1 / world.local_bytes_per_second, 1 / world.remote_bytes_per_second)
    local_out, local_in, remote_out, remote_in = (
        blocks * rates[i // 2] for i, blocks in enumerate(sums)
    )
    return HopTraffic(
        np.concatenate([local_out, local_in, remote_out, remote_in]),
        np.concatenate([local_in, local_out, remote_in, remote_out]),
        float(local.sum()) / n,
        float(remote.sum()) / n,
        max(float(local_out.mean()), float(remote_out.mean())),
    )


@dataclass(frozen=True, slots=True)
class TowerCompression:
    """Change of the bytes between towers by operators inside towers: per sample, by table, mostly negative.

    The bytes of an operator's result are divided among its tables by the widths of its fields, so that their sum is
    exact.
    """

    inside: Mapping[int, int] = field(default_factory=dict)
    """Tower of each consumer that is evaluated inside one, by index of the consumer."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Additional bytes of values."""
    gradients: Mapping[int, float] = field(default_factory=dict)
    """Additional bytes of gradients."""
    weight_bytes: Mapping[int, float] = field(default_factory=dict)
    """Bytes of lookup weights that a rank's batch sends to all owners, for bags that are split over owners."""


def find_tower_compression(
    model: ModelLoad,
    towers: Sequence[int | None],
    num_owners: Sequence[int],
    is_cut: Sequence[bool],
    exchanges: Sequence[str],
) -> TowerCompression:
    """Find the consumers to evaluate inside towers so that the fewest floats leave them.

    By table: towers, the tower with all its rows, if any; num_owners, ranks that hold parts of its bags before they are
    pooled; is_cut, whether its rows are cut by columns; exchanges."""
    fields = model.fields
    candidates = {}
    for c, consumer in enumerate(model.consumers):
        tables = {fields[f].table for f in consumer.fields}
        table_towers = {towers[t] for t in tables}
        table_exchanges = {exchanges[t] for t in tables}
        can_be_inside = consumer.inside_width is not None and not any(is_cut[t] for t in tables)
        if (
            can_be_inside
            and len(table_towers) == len(table_exchanges) == 1
            and table_towers != {None}
        ):
            candidates[str(c)] = next(iter(table_towers))
    if not candidates:
        return TowerCompression()

    def find_sent_fields(inside: Sequence[str]) -> set[int]:
        read = {f for consumer in model.consumers for f in consumer.fields}
        others = [consumer for c, consumer in enumerate(model.consumers) if str(c) not in inside]
        unread = {f for f in range(len(fields)) if f not in read}
        return unread.union(*(consumer.fields for consumer in others))

    def count_floats(inside: Sequence[str]) -> float:
        widths = sum(model.consumers[int(c)].inside_width or 0 for c in inside)
        return widths + sum(fields[f].dim for f in find_sent_fields(inside))

    best: tuple[str, ...] = ()
    for subset in propose_consumer_sets(list(candidates), count_floats):
        if count_floats(subset) < count_floats(best):
            best = tuple(subset)
    inside = {int(c): tower for c in best if (tower := candidates[c]) is not None}
    return _count_byte_changes(model, best, find_sent_fields(best), num_owners, inside)


def _count_byte_changes(
    model: ModelLoad,
    names: Sequence[str],
    sent_fields: Collection[int],
    num_owners: Sequence[int],
    inside: Mapping[int, int],
) -> TowerCompression:
    """Count the change of bytes by table if the consumers `names` are evaluated inside towers.

    sent_fields: fields with values that leave their tower all the same.
    """
    fields = model.fields
    values = dict[int, float]()
    gradients = dict[int, float]()
    weight_bytes = dict[int, float]()
    weighted = set()
    for f in {f for name in names for f in model.consumers[int(name)].fields}:
        load = fields[f]
        if f not in sent_fields:
            values[load.table] = values.get(load.table, 0.0) - load.value_bytes
            gradients[load.table] = gradients.get(load.table, 0.0) - load.gradient_bytes
        if load.added_bytes and num_owners[load.table] > 1 and load.feature not in weighted:
            weighted.add(load.feature)
            weight_bytes[load.table] = weight_bytes.get(load.table, 0.0) + load.added_bytes
    for name in names:
        consumer = model.consumers[int(name)]
        width = sum(fields[f].dim for f in consumer.fields)
        for f in consumer.fields:
            table = fields[f].table
            part = fields[f].dim / width
            values[table] = values.get(table, 0.0) + part * consumer.inside_value_bytes
            gradients[table] = gradients.get(table, 0.0) + part * consumer.inside_gradient_bytes
    return TowerCompression(inside, values, gradients, weight_bytes)
