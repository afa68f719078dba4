"""What towers would save where nobody can look: seconds of a step's exchange in worlds that do not run here.

A cost model of numbers alone: flat, towers whose features cross the slow links once (SPTT), and towers whose modules
make less of them first (Luo et al. 2024). Predictions, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from colonnade.errors import ConfigError
from colonnade.topology.world import World

PAPER = (
    "up to 1.9x against the paper's baselines, of whole training steps (Luo et al. 2024, abstract)"
)
RATIOS = (2, 4, 8)
DIRECTIONS = 2
"""Values to the samples' ranks, and their gradients back the same way."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of a step's exchange of pooled values and gradients; `modules` by compression ratio."""

    world: World
    num_towers: int
    flat: float
    towers: float
    modules: dict[int, float]


def forecast(world: World, *, num_tables: int, floats: int, samples: int) -> Forecast:
    """floats: of all pooled features of a sample, 4 bytes each. samples: of a rank and step.

    One tower on each host, or on several where there are fewer tables than hosts. Ids travel ahead and are left out,
    and so is the processor. Effective bandwidth is taken not to depend on how many ranks take part, which favours
    flat. Raises ConfigError for a world of one host, where nothing crosses a slow link.
    """
    if world.num_hosts < 2:
        raise ConfigError(
            f"got a world of {world.num_hosts} host, wanted two or more: towers save what crosses between hosts"
        )
    if min(num_tables, floats, samples) < 1:
        raise ConfigError(
            f"got {num_tables} tables, {floats} floats and {samples} samples, wanted 1 or more of each"
        )
    num = towers_of(world, num_tables)
    return Forecast(
        world,
        num,
        DIRECTIONS * flat_seconds(world, floats * 4.0 * samples),
        DIRECTIONS * tower_seconds(world, floats * 4.0 * samples, num),
        {
            ratio: DIRECTIONS * tower_seconds(world, floats * 4.0 * samples, num, ratio=ratio)
            for ratio in RATIOS
        },
    )


def towers_of(world: World, num_tables: int) -> int:
    """One on each host, or on several where there are fewer tables than hosts."""
    hosts = range(1, world.num_hosts + 1)
    return max(t for t in hosts if not world.num_hosts % t and t <= num_tables)


def flat_seconds(world: World, size: float) -> float:
    """One way of `size` bytes a rank, whole tables anywhere: every rank hears from every rank of another host."""
    return (world.num_ranks - world.ranks_per_host) * world.remote_message_seconds + _remote(
        world, size * (1 - 1 / world.num_hosts)
    )


def tower_seconds(world: World, size: float, num_towers: int, *, ratio: float = 1.0) -> float:
    """The same by towers: inside the tower first, then one message from each other tower, `ratio` times smaller.

    A tower of one host is inside fast links. One of several hosts has slow links inside it, too, for what its modules
    have not yet made smaller."""
    ranks, local = world.num_ranks // num_towers, world.ranks_per_host
    inside = (local - 1) * world.message_seconds
    inside += size * (local - 1) / ranks / world.local_bytes_per_second
    inside += (ranks - local) * world.remote_message_seconds
    inside += _remote(world, size * (ranks - local) / ranks)
    across = (num_towers - 1) * world.remote_message_seconds
    return inside + across + _remote(world, size * (1 - 1 / num_towers) / ratio)


def _remote(world: World, size: float) -> float:
    """A host's uplink is shared by its ranks."""
    return size * world.ranks_per_host / world.remote_bytes_per_second
