"""Which links a byte takes between the ranks that ask and the ranks that own: geometry of a world.

Legend: N ranks, H hosts, R = 2 N + 2 H directions of links: out of and into each rank inside its host, out of and into
each host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World

Floats = NDArray[np.float64]
MOST = 4096
"""Shardings whose paths are kept."""


class Paths:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asks = np.ones(world.num_ranks)  # (N,) 1 for those with samples
        self.asks[list(world.servers)] = 0.0
        self._known: dict[Any, tuple[Floats, Floats, float]] = {}

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


def _key(sharding: Sharding) -> Any:
    """Ranks in a row are told by the first and how many: hashing a thousand takes longer than what is looked up."""
    first, count = sharding.ranks[0], len(sharding.ranks)
    return (first, count) if sharding.ranks[-1] - first + 1 == count else sharding.ranks
