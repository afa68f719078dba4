"""Towers: features that are looked up together on one group of ranks, and which ranks those are.

Disaggregated Multi-Tower (Luo et al. 2024): what crosses the slow links leaves a tower once, from a rank that has all
of its features. Pure values and functions of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from colonnade.errors import ConfigError
from colonnade.formats import check_stamp, stamp
from colonnade.topology.world import World


@dataclass(frozen=True, slots=True)
class Partition:
    """Which features stand in which tower, by name: each in one, in the order in which the tower sees them."""

    towers: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.towers:
            raise ConfigError("got a partition without towers, wanted at least one")
        seen: dict[str, int] = {}
        for number, features in enumerate(self.towers):
            if not features:
                raise ConfigError(f"tower {number}: got no features, wanted at least one")
            for name in features:
                if name in seen:
                    raise ConfigError(
                        f"feature {name!r}: got it in towers {seen[name]} and {number}, wanted each feature in one"
                    )
                seen[name] = number

    @property
    def features(self) -> tuple[str, ...]:
        """Tower after tower."""
        return tuple(name for tower in self.towers for name in tower)

    def tower_of(self, feature: str) -> int:
        """Raises KeyError."""
        for number, features in enumerate(self.towers):
            if feature in features:
                return number
        raise KeyError(feature)

    def to_json(self) -> str:
        return json.dumps(
            {**stamp("colonnade towers"), "towers": [list(tower) for tower in self.towers]},
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Raises ConfigError, CheckpointError for another version."""
        try:
            fields = json.loads(text)
            towers = fields["towers"]
            check_stamp(
                "partition", fields, "colonnade towers", is_needed=False
            )  # people write them, too
            if not all(
                isinstance(tower, list) for tower in towers
            ):  # letters of a name are no features
                raise TypeError
            named = tuple(tuple(map(str, tower)) for tower in towers)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                'got a partition that cannot be read, wanted {"towers": [["feature", ...], ...]}, as `colonnade '
                "towers` writes it"
            ) from None
        return cls(named)


def striped(features: Sequence[str], num_towers: int) -> Partition:
    """Feature i in tower i modulo `num_towers`: what is left to do where nothing is known of them."""
    if not 1 <= num_towers <= len(features):
        raise ConfigError(
            f"got {num_towers} towers for {len(features)} features, wanted 1 .. {len(features)}"
        )
    return Partition(tuple(tuple(features[i::num_towers]) for i in range(num_towers)))


def tower_ranks(world: World, num_towers: int) -> tuple[tuple[int, ...], ...]:
    """By tower, the ranks that have its rows: equal runs of neighbours, parts of hosts or whole ones or several. One
    tower on each host is what pays. Raises ConfigError where the world cannot be dealt so."""
    if num_towers < 1 or world.num_ranks % num_towers:
        raise ConfigError(
            f"got {num_towers} towers on {world.num_ranks} ranks, wanted a number of towers that divides the ranks"
        )
    size = world.num_ranks // num_towers
    local = world.ranks_per_host
    if size % local and local % size:
        raise ConfigError(
            f"got {num_towers} towers of {size} ranks on hosts of {local}, wanted towers that are whole hosts or that "
            "divide one"
        )
    return tuple(tuple(range(t * size, (t + 1) * size)) for t in range(num_towers))
