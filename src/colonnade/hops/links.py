"""Links of a world, and the load that each pattern of blocks puts on them.

A pattern says which ranks send a block to which others. Blocks of ids and gradients are sent forward, from the samples'
ranks to the rows; blocks of values are sent in reverse.

Legend: N ranks, H hosts, T towers of S ranks, R = 2 N + 2 H link directions: out of and into each rank inside its host,
out of and into each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colonnade.hops.kinds import Pattern
from colonnade.topology.towers import list_tower_ranks, tower_of
from colonnade.topology.world import World

if TYPE_CHECKING:
    from colonnade.topology.sharding import Sharding

Floats = NDArray[np.float64]
MAX_CACHED_SHARDINGS = 4096
"""Number of shardings for which results are cached."""
CALL_MESSAGES = 1.4
"""Processor cost of an all-to-all call in addition to its messages, counted in messages: 0.63 ms for 3 messages,
0.34 ms for 1 (gloo, 4 ranks, 2 cores)."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Load of the links by one byte of each block of a pattern."""

    forward: Floats
    """Seconds of every link direction for ids or gradients, (R,)."""
    reverse: Floats
    """Seconds of every link direction for values, (R,)."""
    local_blocks: float
    """Number of blocks that a rank sends to ranks of its host; the mean over ranks."""
    remote_blocks: float
    """Number of blocks that a rank sends to ranks of other hosts; the mean over ranks."""
    balanced: float
    """Seconds if all links of a kind had the same load."""

    @property
    def by_link(self) -> dict[str, float]:
        """Number of blocks by link, "local" or "remote"."""
        return {"local": self.local_blocks, "remote": self.remote_blocks}

    def seconds(self, channel: str) -> Floats:
        """Return the seconds of every link direction for one byte of each block on a channel, (R,)."""
        return self.reverse if channel == "fetch" else self.forward


class Links:
    """Link loads of one world with `num_towers` towers, cached by sharding."""

    def __init__(self, world: World, num_towers: int = 1) -> None:
        self.world = world
        self.num_towers = num_towers
        self.is_trainer = np.ones(world.num_ranks)  # (N,) 1.0 for trainers, 0.0 for servers
        self.is_trainer[list(world.servers)] = 0.0
        self.adds_in_host = sums_inside_hosts(world)
        self._loads: dict[Any, LinkLoad] = {}
        self._has_tower: dict[Any, bool] = {}

    def load(self, block_pattern: Pattern, sharding: Sharding | None = None) -> LinkLoad:
        """Return the load of the links by a pattern of blocks for a table.

        sharding: None for patterns that do not depend on it."""
        if block_pattern == "bags":
            is_summed = self.adds_in_host and sharding is not None and sharding.kind == "row_wise"
            block_pattern = "host_sums" if is_summed else "owners"
        key: Any = block_pattern
        if sharding is not None and block_pattern not in ("host_sums", "everyone", "tower"):
            key = block_pattern, _ranks_key(sharding), sharding.slices
        if key not in self._loads:
            if len(self._loads) > MAX_CACHED_SHARDINGS:
                self._loads.clear()
            self._loads[key] = self._compute_pattern_load(block_pattern, sharding)
        return self._loads[key]

    def is_in_towers(self, sharding: Sharding) -> bool:
        """Return whether all rows of a table, or of each of its slices, are in one tower."""
        key = _ranks_key(sharding), sharding.slices
        if key not in self._has_tower:
            if len(self._has_tower) > MAX_CACHED_SHARDINGS:
                self._has_tower.clear()
            towers = list_tower_ranks(self.world, self.num_towers)
            self._has_tower[key] = all(
                tower_of(part, towers) is not None for part in sharding.slice_shardings
            )
        return self._has_tower[key]

    def resolve_exchange(self, exchange_name: str, sharding: Sharding) -> str:
        """Return the exchange that serves a table with exchange `exchange_name`, whose rows are sharded like this.

        Replicated rows need no values. Under `towers`, rows outside of one tower are sent as under `pooled`."""
        if sharding.is_replicated:
            return "replicated"
        if exchange_name == "towers" and not self.is_in_towers(sharding):
            return "pooled"
        return exchange_name

    def tower_of(self, sharding: Sharding) -> int | None:
        """Return the tower that owns all rows; None if there is none."""
        return tower_of(sharding, list_tower_ranks(self.world, self.num_towers))

    def count_rank_blocks(self, block_pattern: Pattern, num_owners: int) -> tuple[float, float]:
        """Return the blocks of a pattern that a trainer, and an owner, sends or receives.

        num_owners: of all slices together. Blocks that stay on a rank are not counted."""
        world = self.world
        size = world.num_ranks // self.num_towers
        if block_pattern in ("owners", "bags", "host_sums"):
            remote_part = 1.0 if world.has_servers else (world.num_ranks - 1) / world.num_ranks
            return num_owners * remote_part, world.num_trainers * remote_part
        if block_pattern in ("relays", "relay_slices"):
            # Every block is sent once and received once.
            return 2 * (1 - 1 / self.num_towers), 0.0
        if block_pattern == "relay_bags":
            in_tower_part = 1 - self.num_towers / world.num_ranks
            return num_owners * in_tower_part, world.num_trainers * in_tower_part
        if block_pattern == "relay_rows":
            # Every rank of a tower requests rows from all owners in it: a T-th of the owners, averaged over towers.
            other_part = 1 - 1 / size
            return num_owners * other_part / self.num_towers, size * other_part
        return 0.0, 0.0

    def compute_load(self, is_sender: Floats, owner_blocks: Floats) -> LinkLoad:
        """Compute the load of blocks between any senders and owners.

        is_sender (N,): 1.0 for each sender. owner_blocks (N,): blocks that each sender sends to each owner."""
        size = self.world.ranks_per_host
        host_senders, host_blocks = (
            by_rank.reshape(self.world.num_hosts, size).sum(1)
            for by_rank in (is_sender, owner_blocks)
        )
        return self._build_load(
            is_sender * (np.repeat(host_blocks, size) - owner_blocks),
            owner_blocks * (np.repeat(host_senders, size) - is_sender),
            host_senders * (owner_blocks.sum() - host_blocks),
            host_blocks * (is_sender.sum() - host_senders),
        )

    def _build_load(
        self, local_out: Floats, local_in: Floats, remote_out: Floats, remote_in: Floats
    ) -> LinkLoad:
        """Return the load of blocks counted out of and into each rank inside its host, (N,), and each host, (H,)."""
        world = self.world
        local = 1 / world.local_bytes_per_second
        remote = 1 / world.remote_bytes_per_second
        return LinkLoad(
            np.concatenate(
                [local_out * local, local_in * local, remote_out * remote, remote_in * remote]
            ),
            np.concatenate(
                [local_in * local, local_out * local, remote_in * remote, remote_out * remote]
            ),
            float(local_out.sum()) / world.num_ranks,
            float(remote_out.sum()) / world.num_ranks,
            max(float(local_out.mean()) * local, float(remote_out.mean()) * remote),
        )

    def _sum_blocks(self, blocks: Sequence[tuple[int, int, float]]) -> LinkLoad:
        """Sum blocks by link. blocks: (sender, receiver, count) each."""
        world = self.world
        size = world.ranks_per_host
        senders, receivers = (
            np.array([block[i] for block in blocks], dtype=np.int64) for i in (0, 1)
        )
        counts = np.array([block[2] for block in blocks]) * (senders != receivers)
        is_local = senders // size == receivers // size
        local = counts * is_local
        remote = counts * ~is_local

        def count(ranks: NDArray[np.int64], blocks: Floats, num: int) -> Floats:
            return np.bincount(ranks, blocks, num).astype(np.float64)

        return self._build_load(
            count(senders, local, world.num_ranks),
            count(receivers, local, world.num_ranks),
            count(senders // size, remote, world.num_hosts),
            count(receivers // size, remote, world.num_hosts),
        )

    def _compute_pattern_load(self, block_pattern: Pattern, sharding: Sharding | None) -> LinkLoad:
        world = self.world
        ranks = range(world.num_ranks)
        size = world.num_ranks // self.num_towers
        if block_pattern == "everyone":
            return self.compute_load(np.ones(world.num_ranks), np.ones(world.num_ranks))
        if block_pattern == "tower":
            pairs = [(r, o, 1.0) for r in ranks for o in ranks if r // size == o // size]
            return self._sum_blocks(pairs)
        if block_pattern == "host_sums":
            local = np.full(world.num_ranks, float((world.ranks_per_host - 1) * world.num_hosts))
            remote = np.full(world.num_hosts, float(world.ranks_per_host * (world.num_hosts - 1)))
            return self._build_load(local, local, remote, remote)
        assert sharding is not None
        if block_pattern == "owners":
            owner_blocks = np.zeros(world.num_ranks)
            owner_blocks[list(sharding.ranks)] = 1.0
            return self.compute_load(self.is_trainer, owner_blocks)
        towers = self._list_slices_in_towers(sharding)
        if block_pattern in ("relays", "relay_slices"):
            part = 1.0 if block_pattern == "relay_slices" else 1 / sharding.slices
            return self._sum_blocks(
                [
                    (rank, tower[rank % size], part * float(self.is_trainer[rank]))
                    for _, tower in towers
                    for rank in ranks
                ]
            )
        # Trainers by local rank: the peers that a rank with this local rank serves.
        num_peers = [float(self.is_trainer[local_rank::size].sum()) for local_rank in range(size)]
        if block_pattern == "relay_rows":
            num_peers = [min(count, 1.0) for count in num_peers]
        return self._sum_blocks(
            [
                (rank, owner, num_peers[rank % size])
                for owners, tower in towers
                for owner in owners
                for rank in tower
            ]
        )

    def _list_slices_in_towers(
        self, sharding: Sharding
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """List the owners of each slice and the ranks of its tower."""
        towers = list_tower_ranks(self.world, self.num_towers)
        return [
            (part.ranks, towers[tower_of(part, towers) or 0]) for part in sharding.slice_shardings
        ]


def sums_inside_hosts(world: World) -> bool:
    """Return whether hosts sum blocks to which all ranks contribute before sending them (wire/transport.py)."""
    return world.num_hosts > 1 and world.ranks_per_host > 1 and not world.has_servers


def tower_call_seconds(world: World, num_towers: int) -> float:
    """Return the seconds of both hops of an all-to-all by towers with empty messages."""
    size = world.num_ranks // num_towers
    inside_local = min(size, world.ranks_per_host) - 1
    between_local = max(0, world.ranks_per_host // size - 1)  # other towers of the host
    remote = size - 1 - inside_local + num_towers - 1 - between_local
    local = inside_local + between_local
    return local * world.message_seconds + remote * world.remote_message_seconds


def predict_saved_processor_seconds(world: World, num_towers: int, num_chunks: int = 1) -> float:
    """Return the processor time that each rank saves per step if values and gradients are sent by towers.

    num_chunks: number of pipelined chunks inside a tower. Towers need fewer messages than direct sending, in more
    calls; the result is negative if the calls cost more. Relayed bytes are counted elsewhere."""
    others = world.num_ranks - 1
    size = world.num_ranks // num_towers
    if size == 1 or num_towers == 1:  # one call with the same number of messages
        return 0.0
    fewer = others - (num_chunks * (size - 1) + num_towers - 1)
    # The measured seconds of a message include its part of the cost of a call.
    message_seconds = world.message_processor_seconds * others / (others + CALL_MESSAGES)
    return 2 * (fewer - num_chunks * CALL_MESSAGES) * message_seconds


def _ranks_key(sharding: Sharding) -> Any:
    """Return a cache key; consecutive ranks as (first, count), because hashing a thousand ranks takes too long."""
    first = sharding.ranks[0]
    count = len(sharding.ranks)
    return (first, count) if sharding.ranks[-1] - first + 1 == count else sharding.ranks
