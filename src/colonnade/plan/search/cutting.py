"""Candidate shardings by columns: the ranks that the planner tries for slices of a table.

Legend: N ranks, H hosts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colonnade.hops.load import TableLoad
from colonnade.topology.sharding import COLUMN_KINDS as COLUMN_KINDS
from colonnade.topology.sharding import Kind, Sharding, column_wise, grid, host_wise
from colonnade.topology.sharding import shard_columns_everywhere as shard_columns_everywhere
from colonnade.topology.world import World

MIN_SLICE_COLUMNS = 16
"""Smallest width of a slice that the planner chooses itself, because ids are sent once for each slice."""


def count_max_slices(load: TableLoad, kind: Kind, world: World) -> int:
    """Return the largest number of slices of a table's rows; 1: rows may not be cut."""
    if not load.may_be_cut:
        return 1
    has_hosts = world.num_hosts > 1 and world.ranks_per_host > 1
    owners = len(world.owners)
    if kind == "grid":
        owners = world.num_hosts * (has_hosts and not world.has_servers)
    return max(1, min(owners, load.width // MIN_SLICE_COLUMNS))


def propose_column_shardings(
    load: TableLoad, kind: Kind, world: World, rank_seconds: NDArray[np.float64]
) -> list[Sharding]:
    """Propose shardings with as many slices as possible on the least busy ranks, or on the least busy host.

    rank_seconds (N,): seconds that each rank is busy already."""
    slices = count_max_slices(load, kind, world)
    hosts = rank_seconds.reshape(world.num_hosts, -1).mean(1).argsort(kind="stable").tolist()
    if kind == "grid":
        return [grid(world, hosts[:slices])]
    owners = sorted(world.owners, key=lambda rank: rank_seconds[rank])
    shardings = [column_wise(owners[:slices])]
    if 1 < world.ranks_per_host < slices and not world.has_servers:
        shardings.append(column_wise(host_wise(world, hosts[0]).ranks))
    return shardings
