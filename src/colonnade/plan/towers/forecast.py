"""Forecast of what towers save in worlds that do not run here: seconds of a step's exchange.

Compares direct exchange (flat), towers with features that cross slow links once (SPTT), and towers with modules that
compress features first (Luo et al. 2024). Predictions of a cost model, not measurements.
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
"""Number of directions: values to the ranks of the samples, and gradients in reverse."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds of a step's exchange of pooled values and gradients."""

    world: World
    num_towers: int
    flat: float
    """Seconds without towers."""
    towers: float
    """Seconds with towers."""
    modules: dict[int, float]
    """Seconds with tower modules, by compression ratio."""


def forecast_exchange_seconds(
    world: World, *, num_tables: int, floats: int, samples: int
) -> Forecast:
    """Predict the seconds of a step's exchange without towers, with towers and with tower modules.

    floats: number of floats of all pooled features of a sample, 4 bytes each. samples: per rank and step. There is one
    tower on each host, or on several hosts if there are fewer tables than hosts. Ids, which are sent ahead, and
    processor time are left out. The model assumes that effective bandwidth does not depend on the number of ranks,
    which favours flat. Raises ConfigError for a world of one host, in which nothing crosses a slow link.
    """
    if world.num_hosts < 2:
        raise ConfigError(
            f"got a world of {world.num_hosts} host, wanted two or more: towers save what crosses between hosts"
        )
    if min(num_tables, floats, samples) < 1:
        raise ConfigError(
            f"got {num_tables} tables, {floats} floats and {samples} samples, wanted 1 or more of each"
        )
    num_towers = count_towers(world, num_tables)
    return Forecast(
        world,
        num_towers,
        DIRECTIONS * flat_seconds(world, floats * 4.0 * samples),
        DIRECTIONS * predict_tower_seconds(world, floats * 4.0 * samples, num_towers),
        {
            ratio: DIRECTIONS
            * predict_tower_seconds(world, floats * 4.0 * samples, num_towers, ratio=ratio)
            for ratio in RATIOS
        },
    )


def count_towers(world: World, num_tables: int) -> int:
    """Return the number of towers: one on each host, or on several hosts if there are fewer tables than hosts."""
    hosts = range(1, world.num_hosts + 1)
    return max(t for t in hosts if not world.num_hosts % t and t <= num_tables)


def flat_seconds(world: World, size: float) -> float:
    """Return the seconds of one direction of `size` bytes a rank without towers.

    Whole tables are anywhere, so every rank receives messages from all ranks of other hosts."""
    messages = (world.num_ranks - world.ranks_per_host) * world.remote_message_seconds
    return messages + _uplink_seconds(world, size * (1 - 1 / world.num_hosts))


def predict_tower_seconds(
    world: World, size: float, num_towers: int, *, ratio: float = 1.0
) -> float:
    """Return the seconds of one direction with towers: inside the tower, then one message from each other tower.

    Messages between towers are `ratio` times smaller. A tower of one host has fast links inside. A tower of several
    hosts has slow links inside, too, which carry values before modules compress them."""
    ranks, local = world.num_ranks // num_towers, world.ranks_per_host
    inside = (local - 1) * world.message_seconds
    inside += size * (local - 1) / ranks / world.local_bytes_per_second
    inside += (ranks - local) * world.remote_message_seconds
    inside += _uplink_seconds(world, size * (ranks - local) / ranks)
    between = (num_towers - 1) * world.remote_message_seconds
    return inside + between + _uplink_seconds(world, size * (1 - 1 / num_towers) / ratio)


def _uplink_seconds(world: World, size: float) -> float:
    """Return the seconds of `size` bytes for each rank of a host over their shared uplink."""
    return size * world.ranks_per_host / world.remote_bytes_per_second
