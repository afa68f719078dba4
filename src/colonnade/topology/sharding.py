"""Who owns a row: a table's sharding names the ranks that hold its rows, and a mixed hash picks one of them for each.

Pure values and functions of numbers; the native core computes the same owners (`_native.owner_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import ConfigError
from colonnade.topology.world import World

Kind = Literal["row_wise", "host_wise", "table_wise", "replicated"]
KINDS: tuple[Kind, ...] = ("row_wise", "host_wise", "table_wise", "replicated")


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a table: the rows dealt to owner `place` of `num_owners`; None: no rows."""

    num_owners: int = 1
    place: int | None = 0

    def most_rows(self, rows: int) -> int:
        """Of a vocabulary table of `rows` rows."""
        return 0 if self.place is None else share(rows, self.num_owners)

    def owns(self, ids: Tensor, rows: int | None) -> Tensor:
        """(N,) bool; ids (N,) int64 of a vocabulary table of `rows` rows, or of an open one."""
        if self.place is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        return torch.as_tensor(_native.owner_of(ids, rows or 0, self.num_owners)) == self.place


@dataclass(frozen=True, slots=True)
class Sharding:
    """Of one table. `row_wise`: rows are dealt to all ranks; `host_wise`: to the ranks of one host; `table_wise`: one
    rank has them all; `replicated`: every rank has every row, and all apply the same updates. Where some ranks are
    servers, those are "all ranks", and nothing is replicated."""

    kind: Kind
    ranks: tuple[int, ...]
    """Ascending. A row's owner is ranks[owner_of(id, table.rows, len(ranks))], unless each of them has it."""

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)) or self.ranks[0] < 0:
            raise ConfigError(
                f"sharding {self.kind}: got ranks {list(self.ranks)}, wanted at least one, each once, ascending"
            )
        if self.kind == "table_wise" and len(self.ranks) > 1:
            raise ConfigError(
                f"sharding table_wise: got ranks {list(self.ranks)}, wanted the one that has the table"
            )

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        where = f"rank {first}" if len(self.ranks) == 1 else f"ranks {first} .. {last}"
        return f"{self.kind}, {where}"

    @property
    def num_owners(self) -> int:
        """Ranks that its rows are dealt to."""
        return 1 if self.kind == "replicated" else len(self.ranks)

    @property
    def is_replicated(self) -> bool:
        return self.kind == "replicated"

    def shard_of(self, rank: int) -> Shard:
        """What lies on `rank`."""
        if rank not in self.ranks:
            return Shard(self.num_owners, None)
        return Shard(self.num_owners, 0 if self.is_replicated else self.ranks.index(rank))

    def home_of(self, rank: int) -> str | None:
        """The name of the folder in a run's `rows` that holds what lies on `rank`: rows that are dealt to as many lie
        at the same place, whatever the kind and whichever the ranks. None: no rows do."""
        place = self.shard_of(rank).place
        if place is None:
            return None
        return f"copy-{rank}" if self.is_replicated else f"{place}-of-{self.num_owners}"

    def continues(self, before: Sharding, rank: int) -> bool:
        """Whether what lies on `rank` is what one folder held under `before`; `home_of`."""
        if self.is_replicated or before.is_replicated:
            return self.is_replicated and before.is_replicated and rank in before.ranks
        return self.num_owners == before.num_owners

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that have all its rows between them, each row once, in order of their places."""
        return self.ranks[:1] if self.is_replicated else self.ranks

    def plain(self) -> dict[str, Any]:
        """As JSON has it, short in large worlds: ranks as runs [first, last]. `sharding_from` reads it."""
        runs: list[list[int]] = []
        for rank in self.ranks:
            if runs and runs[-1][1] == rank - 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        return {"kind": self.kind, "ranks": runs}


def sharding_from(said: Mapping[str, Any]) -> Sharding:
    """Of `Sharding.plain`."""
    ranks = (rank for first, last in said["ranks"] for rank in range(first, last + 1))
    return Sharding(said["kind"], tuple(ranks))


def row_wise(num_ranks: int) -> Sharding:
    return Sharding("row_wise", tuple(range(num_ranks)))


def row_wise_in(world: World) -> Sharding:
    """Dealt to all ranks that rows may lie on."""
    return Sharding("row_wise", world.owners)


def host_wise(world: World, host: int) -> Sharding:
    """Dealt to those of one host."""
    first = host * world.ranks_per_host
    if world.has_servers:
        first += world.trainers_per_host
    return Sharding("host_wise", tuple(range(first, (host + 1) * world.ranks_per_host)))


def table_wise(rank: int) -> Sharding:
    return Sharding("table_wise", (rank,))


def replicated(num_ranks: int) -> Sharding:
    return Sharding("replicated", tuple(range(num_ranks)))


def share(rows: int, num_owners: int) -> int:
    """Most rows of a vocabulary table that one of its owners has: ids come in runs of num_owners, one for each."""
    return -(-rows // num_owners)
