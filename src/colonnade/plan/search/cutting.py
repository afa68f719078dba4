"""Where slices of a table's columns may go: what the chooser tries of the shardings that cut rows.

Legend: N ranks, H hosts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colonnade.plan.cost.table_stats import TableLoad
from colonnade.topology.sharding import Kind, Sharding, column_wise, grid, host_wise
from colonnade.topology.world import World

CUT = ("column_wise", "grid")
LEAST_COLUMNS = 16
"""Of a slice that nobody asked for: ids travel once for each slice."""


def most_slices(load: TableLoad, kind: Kind, world: World) -> int:
    """Into how many rows may be cut; 1: they may not."""
    if not load.may_be_cut:
        return 1
    has_hosts = world.num_hosts > 1 and world.ranks_per_host > 1
    places = world.num_ranks if kind == "column_wise" else world.num_hosts * has_hosts
    return max(1, min(places, load.width // LEAST_COLUMNS))


def everywhere(kind: Kind, world: World) -> Sharding:
    """A slice on every rank, or host: what is meant where no ranks are named. Raises ConfigError for one host."""
    if kind == "grid":
        return grid(world, range(world.num_hosts))
    return column_wise(range(world.num_ranks))


def cut_places(
    load: TableLoad, kind: Kind, world: World, busy: NDArray[np.float64]
) -> list[Sharding]:
    """busy (N,) seconds: as many slices as may be, on those with least to do; and on the ranks of the host that has."""
    slices = most_slices(load, kind, world)
    hosts = busy.reshape(world.num_hosts, -1).mean(1).argsort(kind="stable").tolist()
    if kind == "grid":
        return [grid(world, hosts[:slices])]
    found = [column_wise(busy.argsort(kind="stable")[:slices].tolist())]
    if 1 < world.ranks_per_host < slices:
        found.append(column_wise(host_wise(world, hosts[0]).ranks))
    return found
