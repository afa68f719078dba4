"""Towers: groups of features that are looked up together, and the group of ranks that owns each tower's rows.

Disaggregated Multi-Tower (Luo et al. 2024): values cross the slow links between towers once, from a rank that has all
features of the tower. Plain values and pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colonnade.errors import ConfigError
from colonnade.formats import check_format_version, make_format_stamp
from colonnade.topology.world import World

if TYPE_CHECKING:
    from colonnade.topology.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Partition:
    """Assignment of features to towers, by name. Each feature is in exactly one tower."""

    towers: tuple[tuple[str, ...], ...]
    """Names of each tower's features, in the order in which the tower reads them."""

    def __post_init__(self) -> None:
        if not self.towers:
            raise ConfigError("got a partition without towers, wanted at least one")
        tower_by_feature: dict[str, int] = {}
        for tower, features in enumerate(self.towers):
            if not features:
                raise ConfigError(f"tower {tower}: got no features, wanted at least one")
            for name in features:
                if name in tower_by_feature:
                    raise ConfigError(
                        f"feature {name!r}: got it in towers {tower_by_feature[name]} and {tower}, wanted each feature "
                        "in one"
                    )
                tower_by_feature[name] = tower

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all features, tower after tower."""
        return tuple(name for tower in self.towers for name in tower)

    def tower_of(self, feature: str) -> int:
        """Return the index of a feature's tower. Raises KeyError for an unknown feature."""
        for tower, features in enumerate(self.towers):
            if feature in features:
                return tower
        raise KeyError(feature)

    def to_json(self) -> str:
        """Return the text of a partition file."""
        return json.dumps(
            {
                **make_format_stamp("colonnade towers"),
                "towers": [list(tower) for tower in self.towers],
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Read the text of a partition file. Raises ConfigError; CheckpointError for another format version."""
        try:
            fields = json.loads(text)
            towers = fields["towers"]
            # Users write partition files by hand, without a stamp.
            check_format_version("partition", fields, "colonnade towers", is_needed=False)
            # A string would iterate by letters.
            if not all(isinstance(tower, list) for tower in towers):
                raise TypeError
            feature_names = tuple(tuple(map(str, tower)) for tower in towers)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                'got a partition that cannot be read, wanted {"towers": [["feature", ...], ...]}, as `colonnade '
                "towers` writes it"
            ) from None
        return cls(feature_names)


def build_round_robin_partition(features: Sequence[str], num_towers: int) -> Partition:
    """Return a round-robin partition, feature i in tower i modulo `num_towers`: the default without measured
    affinities."""
    if not 1 <= num_towers <= len(features):
        raise ConfigError(
            f"got {num_towers} towers for {len(features)} features, wanted 1 .. {len(features)}"
        )
    return Partition(tuple(tuple(features[i::num_towers]) for i in range(num_towers)))


def list_tower_ranks(world: World, num_towers: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each tower: equal runs of neighbouring ranks that divide a host or are whole hosts.

    One tower on each host saves most. Raises ConfigError if the world cannot be divided like this."""
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


def tower_of(sharding: Sharding, towers: Sequence[Sequence[int]]) -> int | None:
    """Return the tower that has all rows of a table; None: its rows are in several."""
    size = len(towers[0])
    first = sharding.ranks[0] // size
    last = sharding.ranks[-1] // size
    return first if first == last else None
