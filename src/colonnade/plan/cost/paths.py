"""Load of the links of a world: which links carry the bytes between trainers and owners of rows.

Legend: N ranks, H hosts, R = 2 N + 2 H link directions: out of and into each rank inside its host, out of and into
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
from colonnade.plan.cost.tower_paths import (
    HopTraffic,
    TowerTraffic,
    predict_tower_all_to_all,
    predict_tower_traffic,
)
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import list_tower_ranks
from colonnade.topology.world import World

Floats = NDArray[np.float64]
MAX_CACHED_SHARDINGS = 4096
"""Number of shardings for which results are cached."""


@dataclass(frozen=True, slots=True)
class IdTraffic:
    """Load of the links by ids: one byte from each trainer to each owner."""

    seconds: Floats
    """Seconds of every link direction, (R,)."""
    local_bytes: float
    """Bytes that a rank sends to ranks of its host, the mean over ranks."""
    remote_bytes: float
    """Bytes that a rank sends to ranks of other hosts, the mean over ranks."""

    @property
    def by_link(self) -> dict[str, float]:
        """Bytes by link, "local" or "remote"."""
        return {"local": self.local_bytes, "remote": self.remote_bytes}


class Paths:
    """Link loads of one world with `num_towers` towers, cached by sharding."""

    def __init__(self, world: World, num_towers: int = 1) -> None:
        self.world = world
        self.num_towers = num_towers
        self._tower_traffic: dict[Any, TowerTraffic | None] = {}
        self._id_traffic: dict[Any, IdTraffic] = {}
        self.is_trainer = np.ones(world.num_ranks)  # (N,) 1.0 for trainers, 0.0 for servers
        self.is_trainer[list(world.servers)] = 0.0
        self._link_seconds: dict[Any, tuple[Floats, Floats, float]] = {}
        self.adds_in_host = sums_inside_hosts(world)

    def predict_tower_traffic(self, sharding: Sharding) -> TowerTraffic | None:
        """Return the blocks of each hop by towers; None: values are sent as under `pooled`."""
        key = _sharding_key(sharding), sharding.slices
        if key not in self._tower_traffic:
            if len(self._tower_traffic) > MAX_CACHED_SHARDINGS:
                self._tower_traffic.clear()
            self._tower_traffic[key] = predict_tower_traffic(self.world, sharding, self.num_towers)
        return self._tower_traffic[key]

    @cached_property
    def tower_all_to_all(self) -> HopTraffic:
        """Traffic of one byte from every rank to every other rank of its tower."""
        return predict_tower_all_to_all(self.world, self.num_towers)

    def tower_of(self, sharding: Sharding) -> int | None:
        """Return the tower that owns all rows; None if there is none."""
        return tower_of(sharding, list_tower_ranks(self.world, self.num_towers))

    def predict_value_seconds(
        self, sharding: Sharding, exchange: str
    ) -> tuple[Floats, Floats, float]:
        """Return `link_seconds` for values and gradients of an exchange.

        Under `pooled`, and under tower exchanges for tables in no tower, hosts sum values to which all ranks
        contribute."""
        if exchange in ("pooled", *BY_TOWERS) and self.is_host_summed(sharding):
            return self.host_summed_seconds
        return self.predict_link_seconds(sharding)

    def is_host_summed(self, sharding: Sharding) -> bool:
        """Return whether hosts sum the pooled values of such rows before sending them."""
        return self.adds_in_host and sharding.kind == "row_wise"

    def predict_id_traffic(self, sharding: Sharding) -> IdTraffic:
        """Return the load of one byte of ids from each trainer to each owner of a table."""
        key = _sharding_key(sharding)
        if key not in self._id_traffic:
            if len(self._id_traffic) > MAX_CACHED_SHARDINGS:
                self._id_traffic.clear()
            owner_bytes = np.zeros(self.world.num_ranks)
            owner_bytes[list(sharding.ranks)] = 1.0
            self._id_traffic[key] = self.build_id_traffic(self.is_trainer, owner_bytes)
        return self._id_traffic[key]

    def build_id_traffic(self, is_sender: Floats, owner_bytes: Floats) -> IdTraffic:
        """Compute the load of ids. Arguments as in `compute_link_seconds`."""
        world = self.world
        host_senders, host_bytes = (
            by_rank.reshape(world.num_hosts, -1).sum(1) for by_rank in (is_sender, owner_bytes)
        )
        local = float(host_senders @ host_bytes - is_sender @ owner_bytes) / world.num_ranks
        remote = (
            float(is_sender.sum() * owner_bytes.sum() - host_senders @ host_bytes) / world.num_ranks
        )
        seconds, _, _ = self.compute_link_seconds(is_sender, owner_bytes)
        return IdTraffic(seconds, local, remote)

    @cached_property
    def all_to_all(self) -> IdTraffic:
        """Traffic of one byte from every rank to every other."""
        ones = np.ones(self.world.num_ranks)
        return self.build_id_traffic(ones, ones)

    @cached_property
    def peak_seconds(self) -> float:
        """Seconds of the busiest link direction for one byte from every rank to every other."""
        return float(self.all_to_all.seconds.max())

    @cached_property
    def host_summed_seconds(self) -> tuple[Floats, Floats, float]:
        """Result of `link_seconds` if all ranks are owners and hosts sum values before sending them."""
        world = self.world
        local = float((world.ranks_per_host - 1) * world.num_hosts) / world.local_bytes_per_second
        remote = float(world.ranks_per_host * (world.num_hosts - 1)) / world.remote_bytes_per_second
        seconds = np.repeat([local, remote], [2 * world.num_ranks, 2 * world.num_hosts])
        return seconds, seconds, max(local, remote)

    def predict_link_seconds(self, sharding: Sharding) -> tuple[Floats, Floats, float]:
        """Return the link seconds of one byte from each trainer to each owner, and of one byte in return.

        Both are (R,), by link direction. The third result is the mean over the links of the slower kind."""
        key = _sharding_key(sharding)
        if key not in self._link_seconds:
            if len(self._link_seconds) > MAX_CACHED_SHARDINGS:
                self._link_seconds.clear()
            owner_bytes = np.zeros(self.world.num_ranks)
            owner_bytes[list(sharding.ranks)] = 1.0
            self._link_seconds[key] = self.compute_link_seconds(self.is_trainer, owner_bytes)
        return self._link_seconds[key]

    def compute_link_seconds(
        self, is_sender: Floats, owner_bytes: Floats
    ) -> tuple[Floats, Floats, float]:
        """Compute `link_seconds` for any senders and owners.

        is_sender (N,): 1.0 for each sender. owner_bytes (N,): bytes that each sender sends, or receives from, each
        owner."""
        world = self.world
        size = self.world.ranks_per_host
        host_senders, host_bytes = (
            by_rank.reshape(world.num_hosts, size).sum(1) for by_rank in (is_sender, owner_bytes)
        )
        local_out = is_sender * (np.repeat(host_bytes, size) - owner_bytes)
        local_in = owner_bytes * (np.repeat(host_senders, size) - is_sender)
        remote_out = host_senders * (owner_bytes.sum() - host_bytes)
        remote_in = host_bytes * (is_sender.sum() - host_senders)
        local = 1 / world.local_bytes_per_second
        remote = 1 / world.remote_bytes_per_second
        forward = [local_out * local, local_in * local, remote_out * remote, remote_in * remote]
        reverse = [local_in * local, local_out * local, remote_in * remote, remote_out * remote]
        slowest = max(float(seconds.mean()) for seconds in forward)
        return np.concatenate(forward), np.concatenate(reverse), slowest


def sums_inside_hosts(world: World) -> bool:
    """Return whether hosts sum blocks to which all ranks contribute before sending them (wire/transport.py)."""
    return world.num_hosts > 1 and world.ranks_per_host > 1 and not world.has_servers


def count_host_summed_blocks(world: World) -> tuple[float, float]:
    """Return the blocks of one rank's samples that each rank sends inside its host and to other hosts, if hosts sum."""
    return float((world.ranks_per_host - 1) * world.num_hosts), float(world.num_hosts - 1)


def _sharding_key(sharding: Sharding) -> Any:
    """Return a cache key; consecutive ranks as (first, count), because hashing a thousand ranks takes too long."""
    first = sharding.ranks[0]
    count = len(sharding.ranks)
    return (first, count) if sharding.ranks[-1] - first + 1 == count else sharding.ranks
