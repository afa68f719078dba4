"""Which links a byte takes between the ranks that ask and the ranks that own: geometry of a world.

Legend: N ranks, H hosts, R = 2 N + 2 H directions of links: out of and into each rank inside its host, out of and into
each host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.exchange.operator_cut import tower_of
from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.tower_paths import HopTraffic, Towered, mates, towered
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import tower_ranks
from colonnade.topology.world import World

Floats = NDArray[np.float64]
MOST = 4096
"""Shardings whose paths are kept."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Load of the links by ids: one byte from each rank that asks to each that owns."""

    there: Floats
    """(R,) seconds of every direction of links."""
    near: float
    """Bytes that a rank sends to ranks of its host, the mean over ranks."""
    far: float
    """Bytes that a rank sends to ranks of other hosts, the mean over ranks."""

    @property
    def by_link(self) -> dict[str, float]:
        return {"local": self.near, "remote": self.far}


class Paths:
    """Of one world, whose ranks stand in so many towers."""

    def __init__(self, world: World, num_towers: int = 1) -> None:
        self.world, self.num_towers = world, num_towers
        self._by_towers: dict[Any, Towered | None] = {}
        self._asked: dict[Any, Asked] = {}
        self.asks = np.ones(world.num_ranks)  # (N,) 1 for those with samples
        self.asks[list(world.servers)] = 0.0
        self._known: dict[Any, tuple[Floats, Floats, float]] = {}
        self.adds_in_host = adds_in_host(world)

    def by_towers(self, sharding: Sharding) -> Towered | None:
        """Where its values go by towers; None: they go as under `pooled`."""
        key = _key(sharding), sharding.slices
        if key not in self._by_towers:
            if len(self._by_towers) > MOST:
                self._by_towers.clear()
            self._by_towers[key] = towered(self.world, sharding, self.num_towers)
        return self._by_towers[key]

    @cached_property
    def mates(self) -> HopTraffic:
        """A byte from every rank to every other of its tower."""
        return mates(self.world, self.num_towers)

    def tower_of(self, sharding: Sharding) -> int | None:
        """The one that has all its rows."""
        return tower_of(sharding, tower_ranks(self.world, self.num_towers))

    def values_to(self, sharding: Sharding, exchange: str) -> tuple[Floats, Floats, float]:
        """`to`, of values of samples and gradients of them: `pooled` adds up what all ranks have a share of, and so
        does `towers`, of what lies in no tower."""
        if exchange in ("pooled", *BY_TOWERS) and self.are_added(sharding):
            return self.added
        return self.to(sharding)

    def are_added(self, sharding: Sharding) -> bool:
        """Whether values pooled of such rows are added up inside a host first."""
        return self.adds_in_host and sharding.kind == "row_wise"

    def asked_to(self, sharding: Sharding) -> Asked:
        """Ids of a table, a byte for each of its owners."""
        key = _key(sharding)
        if key not in self._asked:
            if len(self._asked) > MOST:
                self._asked.clear()
            owns = np.zeros(self.world.num_ranks)
            owns[list(sharding.ranks)] = 1.0
            self._asked[key] = self.asked(self.asks, owns)
        return self._asked[key]

    def asked(self, asks: Floats, owns: Floats) -> Asked:
        """For asks (N,), 1 for each rank that asks, and owns (N,) bytes that each of them sends each owner."""
        world = self.world
        asking, owning = (each.reshape(world.num_hosts, -1).sum(1) for each in (asks, owns))
        near = float(asking @ owning - asks @ owns) / world.num_ranks
        far = float(asks.sum() * owns.sum() - asking @ owning) / world.num_ranks
        there, _, _ = self.of(asks, owns)
        return Asked(there, near, far)

    @cached_property
    def asked_of_all(self) -> Asked:
        """A byte from every rank to every other."""
        ones = np.ones(self.world.num_ranks)
        return self.asked(ones, ones)

    @cached_property
    def peak(self) -> float:
        """Seconds of the busiest direction of links for a byte from every rank to every other."""
        return float(self.asked_of_all.there.max())

    @cached_property
    def added(self) -> tuple[Floats, Floats, float]:
        """`to`, where all ranks own, and add up inside a host what goes to another."""
        world = self.world
        local = float((world.ranks_per_host - 1) * world.num_hosts) / world.local_bytes_per_second
        far = float(world.ranks_per_host * (world.num_hosts - 1)) / world.remote_bytes_per_second
        found = np.repeat([local, far], [2 * world.num_ranks, 2 * world.num_hosts])
        return found, found, max(local, far)

    def to(self, sharding: Sharding) -> tuple[Floats, Floats, float]:
        """(R,) seconds of every direction of links for a byte from each asker to each owner, and for one back; and of
        the slowest, were all of its kind alike."""
        key = _key(sharding)
        if key not in self._known:
            if len(self._known) > MOST:
                self._known.clear()
            owns = np.zeros(self.world.num_ranks)
            owns[list(sharding.ranks)] = 1.0
            self._known[key] = self.of(self.asks, owns)
        return self._known[key]

    def of(self, asks: Floats, owns: Floats) -> tuple[Floats, Floats, float]:
        """`to`, for asks (N,), 1 for each rank that asks, and owns (N,) bytes that each of them sends each owner, or
        is sent."""
        world, size = self.world, self.world.ranks_per_host
        asking, owning = (each.reshape(world.num_hosts, size).sum(1) for each in (asks, owns))
        local_out = asks * (np.repeat(owning, size) - owns)
        local_in = owns * (np.repeat(asking, size) - asks)
        remote_out = asking * (owns.sum() - owning)
        remote_in = owning * (asks.sum() - asking)
        near, far = 1 / world.local_bytes_per_second, 1 / world.remote_bytes_per_second
        there = [local_out * near, local_in * near, remote_out * far, remote_in * far]
        back = [local_in * near, local_out * near, remote_in * far, remote_out * far]
        slowest = max(float(each.mean()) for each in there)
        return np.concatenate(there), np.concatenate(back), slowest


def adds_in_host(world: World) -> bool:
    """Whether blocks that all ranks have a share of are added up inside a host first (wire/transport.py)."""
    return world.num_hosts > 1 and world.ranks_per_host > 1 and not world.has_servers


def blocks_added(world: World) -> tuple[float, float]:
    """Blocks of so many samples as a rank has, that each rank sends inside its host and to others, where they are."""
    return float((world.ranks_per_host - 1) * world.num_hosts), float(world.num_hosts - 1)


def _key(sharding: Sharding) -> Any:
    """Ranks in a row are told by the first and how many: hashing a thousand takes longer than what is looked up."""
    first, count = sharding.ranks[0], len(sharding.ranks)
    return (first, count) if sharding.ranks[-1] - first + 1 == count else sharding.ranks
