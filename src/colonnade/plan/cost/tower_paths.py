"""Which links a byte takes that goes by towers: values inside the tower of their owner first, then between ranks of one
number.

Legend: N ranks, T towers of S ranks, R directions of links as `paths.py` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.exchange.operator_cut import tower_of
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import tower_ranks
from colonnade.topology.world import World

Floats = NDArray[np.float64]
CALL_MESSAGES = 1.4
"""Messages that a call costs a processor beside its own: 0.63 ms of 3 messages, 0.34 of 1 (gloo, 4 ranks, 2 cores)."""


@dataclass(frozen=True, slots=True)
class HopTraffic:
    """Of blocks for as many samples as a rank has."""

    back: Floats
    """(R,) seconds of every direction of links, for a byte of each block of values."""
    given: Floats
    """(R,) of gradients, which go the other way."""
    near: float
    """Blocks that a rank sends to ranks of its host, the mean over ranks: of values, and of gradients."""
    far: float
    """And to those of others."""
    slowest: float
    """Seconds for a byte of each block, were all links of a kind alike."""

    @property
    def by_link(self) -> dict[str, float]:
        return {"local": self.near, "remote": self.far}


@dataclass(frozen=True, slots=True)
class Towered:
    """Of one table's values."""

    inside: HopTraffic
    """A block of each owner's share, for each sample of each rank."""
    between: HopTraffic
    """A block of the table's values, for each sample of each rank."""
    peers: HopTraffic
    """A block from each rank that asks to its peer in the tower, for each slice."""
    owners: HopTraffic
    """A block from each rank of a tower to each owner in it."""


def towered(world: World, sharding: Sharding, num_towers: int) -> Towered | None:
    """None: some of its rows, or of a slice of them, do not all lie in one tower, and travel as under `pooled`."""
    towers = tower_ranks(world, num_towers)
    size, asks = len(towers[0]), np.ones(world.num_ranks)
    asks[list(world.servers)] = 0.0
    inside: list[tuple[int, int, float]] = []
    between: list[tuple[int, int, float]] = []
    waiting = [float(asks[number::size].sum()) for number in range(size)]  # for a rank's peers
    peers: list[tuple[int, int, float]] = []
    owners: list[tuple[int, int, float]] = []
    for of_slice in sharding.of_slices:
        tower = tower_of(of_slice, towers)
        if tower is None:
            return None
        mates = towers[tower]
        inside += [(o, mate, waiting[mate % size]) for o in of_slice.ranks for mate in mates]
        owners += [
            (mate, o, float(waiting[mate % size] > 0)) for o in of_slice.ranks for mate in mates
        ]
        peers += [(rank, mates[rank % size], float(asks[rank])) for rank in range(world.num_ranks)]
        between += [
            (mate, peer, float(asks[peer]) / sharding.slices)
            for mate in mates
            for peer in range(mate % size, world.num_ranks, size)
        ]
    return Towered(*(_hop_of(world, blocks) for blocks in (inside, between, peers, owners)))


def mates(world: World, num_towers: int) -> HopTraffic:
    """A block from each rank to each other of its tower."""
    size = world.num_ranks // num_towers
    every = range(world.num_ranks)
    return _hop_of(world, [(r, o, 1.0) for r in every for o in every if r // size == o // size])


def messages(world: World, num_towers: int) -> tuple[int, int]:
    """That each rank sends in both hops of an all-to-all by towers: to ranks of its host, and of others."""
    size = world.num_ranks // num_towers
    local = min(size, world.ranks_per_host) - 1
    near = max(0, world.ranks_per_host // size - 1)  # other towers of the host
    return local + near, size - 1 - local + num_towers - 1 - near


def call_seconds(world: World, num_towers: int) -> float:
    """Of an all-to-all by towers that carries next to nothing: both hops of it."""
    near, far = messages(world, num_towers)
    return near * world.message_seconds + far * world.remote_message_seconds


def spared_seconds(world: World, num_towers: int, turns: int = 1) -> float:
    """Of each rank's processor in a step, where values and gradients go by towers, in so many turns each inside a
    tower. Fewer messages than straight, in more calls; less than 0 where these cost more. What is handed on counts by
    its bytes."""
    others, size = world.num_ranks - 1, world.num_ranks // num_towers
    if size == 1 or num_towers == 1:  # one call, of as many messages
        return 0.0
    fewer = others - (turns * (size - 1) + num_towers - 1)
    # Whose messages had their part of a call's cost.
    each = world.message_processor_seconds * others / (others + CALL_MESSAGES)
    return 2 * (fewer - turns * CALL_MESSAGES) * each


def _hop_of(world: World, blocks: Sequence[tuple[int, int, float]]) -> HopTraffic:
    """blocks: (sender, receiver, how many)."""
    senders, receivers = (np.array([each[i] for each in blocks], dtype=np.int64) for i in (0, 1))
    return _hop(world, senders, receivers, np.array([each[2] for each in blocks]))


def _hop(
    world: World, senders: NDArray[np.int64], receivers: NDArray[np.int64], counts: Floats
) -> HopTraffic:
    n, hosts, local = world.num_ranks, world.num_hosts, world.ranks_per_host
    counts = counts * (senders != receivers)
    is_near = senders // local == receivers // local
    near, far = counts * is_near, counts * ~is_near
    sums = [
        np.bincount(senders, near, n), np.bincount(receivers, near, n),
        np.bincount(senders // local, far, hosts), np.bincount(receivers // local, far, hosts),
    ]  # fmt: skip
    rates = (1 / world.local_bytes_per_second, 1 / world.remote_bytes_per_second)
    out_near, in_near, out_far, in_far = (each * rates[i // 2] for i, each in enumerate(sums))
    return HopTraffic(
        np.concatenate([out_near, in_near, out_far, in_far]),
        np.concatenate([in_near, out_near, in_far, out_far]),
        float(near.sum()) / n,
        float(far.sum()) / n,
        max(float(out_near.mean()), float(out_far.mean())),
    )
