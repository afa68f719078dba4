"""Sharding of a table: which ranks hold its rows, and which rows, called hot, every rank holds.

Where a table is cut by columns, each slice of its rows has owners of its own.

Pure values and functions of numbers; the native core computes the same owners (`_native.owner_of`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import ConfigError
from colonnade.topology.world import World

Side = Literal["both", "hot", "cold"]


@dataclass(frozen=True, slots=True)
class HotRows:
    """Of one table. A lookup is of a hot row or of a cold one by this list alone, which all ranks have."""

    ids: tuple[int, ...] = field(repr=False)
    """Ascending, each once."""
    num_ranks: int
    """All of which have a copy."""
    side: Side = "both"
    """Of a sharding: a whole table's, or that of its hot or its cold rows alone."""

    def __post_init__(self) -> None:
        if not self.ids or list(self.ids) != sorted(set(self.ids)):
            raise ConfigError("hot rows: got ids that are none, or not ascending and each once")

    def __str__(self) -> str:
        return f"{len(self.ids):,} hot rows on each of {self.num_ranks} ranks"

    @property
    def tensor(self) -> Tensor:
        """(H,) int64, ascending."""
        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def word(self) -> str:
        """Short, of this list and no other: folders of rows have it in their names."""
        return hashlib.sha256(np.array(self.ids, "<i8").tobytes()).hexdigest()[:12]

    def owns(self, ids: Tensor) -> Tensor:
        """ids (N,) int64 -> (N,) bool: whether they are of this side."""
        if self.side == "both":
            return torch.ones(len(ids), dtype=torch.bool)
        return is_hot(ids, self.tensor) == (self.side == "hot")


def hot_rows(ids: Iterable[int] | Tensor, num_ranks: int) -> HotRows:
    """Of ids in any order, some more than once."""
    listed = ids.tolist() if isinstance(ids, Tensor) else ids
    return HotRows(tuple(sorted({int(each) for each in listed})), num_ranks)


def is_hot(ids: Tensor, hot: Tensor) -> Tensor:
    """ids (N,) int64, hot (H,) int64 ascending -> (N,) bool: which of them are in the list."""
    return hot[torch.searchsorted(hot, ids).clamp(max=len(hot) - 1)] == ids


Kind = Literal["row_wise", "host_wise", "table_wise", "column_wise", "grid", "replicated"]
KINDS: tuple[Kind, ...] = (
    "row_wise",
    "host_wise",
    "table_wise",
    "column_wise",
    "grid",
    "replicated",
)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a table: the rows dealt to owner `place` of `num_owners`; None: no rows."""

    num_owners: int = 1
    place: int | None = 0
    hot: HotRows | None = None
    """Of these rows, those of its side."""

    def most_rows(self, rows: int) -> int:
        """Of a vocabulary table of `rows` rows."""
        return 0 if self.place is None else share(rows, self.num_owners)

    def owns(self, ids: Tensor, rows: int | None) -> Tensor:
        """(N,) bool; ids (N,) int64 of a vocabulary table of `rows` rows, or of an open one."""
        if self.place is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        owner = torch.as_tensor(_native.owner_of(ids, rows or 0, self.num_owners))
        return (
            owner == self.place if self.hot is None else (owner == self.place) & self.hot.owns(ids)
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """Of one table. `row_wise`: rows are dealt to all ranks; `host_wise`: to the ranks of one host; `table_wise`: one
    rank has them all; `replicated`: every rank has every row, and all apply the same updates. Where some ranks are
    servers, those are "all ranks", and nothing is replicated.

    Of `row_wise`, `host_wise` and `table_wise`, some rows may be `hot`: these lie on every rank.

    `column_wise`: rows are cut into slices of columns, and one rank has a slice of all of them; `grid`: each slice is
    dealt to the ranks of a host."""

    kind: Kind
    ranks: tuple[int, ...]
    """Ascending. A row's owner is ranks[owner_of(id, table.rows, len(ranks))], unless each of them has it; a slice's is
    that among the slice's own ranks."""
    slices: int = 1
    """Into how many its rows are cut: slice i, counted from the left, has the i-th of as many runs of `ranks`."""
    hot: HotRows | None = None
    """Rows that lie on every rank; the kind says who owns the others."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"sharding: got kind {self.kind!r}, wanted one of {', '.join(KINDS)}")
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)) or self.ranks[0] < 0:
            raise ConfigError(
                f"sharding {self.kind}: got ranks {list(self.ranks)}, wanted at least one, each once, ascending"
            )
        if self.kind == "table_wise" and len(self.ranks) > 1:
            raise ConfigError(
                f"sharding table_wise: got ranks {list(self.ranks)}, wanted the one that has the table"
            )
        if self.slices < 1 or len(self.ranks) % self.slices:
            raise ConfigError(
                f"sharding {self.kind}: got {len(self.ranks)} ranks for {self.slices} slices, wanted as many for each"
            )
        if self.slices > 1 and self.kind not in ("column_wise", "grid"):
            raise ConfigError(
                f"sharding {self.kind}: got {self.slices} slices, wanted column_wise or grid, which cut rows"
            )
        if self.kind == "column_wise" and self.slices != len(self.ranks):
            raise ConfigError(
                f"sharding column_wise: got {len(self.ranks)} ranks for {self.slices} slices, wanted one for each"
            )
        if self.has_hot and (self.is_replicated or self.kind in ("column_wise", "grid")):
            raise ConfigError(
                f"sharding {self.kind}: got hot rows, wanted row_wise, host_wise or table_wise, whose other rows are "
                "whole and have one owner each"
            )

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        where = f"rank {first}" if len(self.ranks) == 1 else f"ranks {first} .. {last}"
        cut = f", {self.slices} slices" if self.kind == "grid" else ""
        hot = f", {self.hot}" if self.hot is not None else ""
        return f"{self.kind}, {where}{cut}{hot}"

    @property
    def num_owners(self) -> int:
        """Ranks that its rows are dealt to; those of each slice are."""
        return 1 if self.kind == "replicated" else len(self.ranks) // self.slices

    @property
    def is_replicated(self) -> bool:
        return self.kind == "replicated"

    @property
    def has_hot(self) -> bool:
        """Of a table's, whose hot rows have not been taken apart from the cold ones."""
        return self.hot is not None and self.hot.side == "both"

    @property
    def of_hot(self) -> Sharding:
        """Of the hot rows alone, of a sharding that has some."""
        assert self.hot is not None
        return replace(replicated(self.hot.num_ranks), hot=replace(self.hot, side="hot"))

    @property
    def of_cold(self) -> Sharding:
        """Of the others."""
        assert self.hot is not None
        return replace(self, hot=replace(self.hot, side="cold"))

    def shard_of(self, rank: int) -> Shard:
        """What lies on `rank`."""
        if rank not in self.ranks:
            return Shard(self.num_owners, None)
        place = 0 if self.is_replicated else self.ranks.index(rank) % self.num_owners
        return Shard(self.num_owners, place, self.hot)

    @property
    def of_slices(self) -> tuple[Sharding, ...]:
        """That of each slice by itself, from the left; this one, where rows are whole."""
        if self.slices == 1:
            return (self,)
        kind: Kind = "table_wise" if self.num_owners == 1 else "host_wise"
        runs = [range(i * self.num_owners, (i + 1) * self.num_owners) for i in range(self.slices)]
        return tuple(Sharding(kind, tuple(self.ranks[i] for i in run)) for run in runs)

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
        """Ranks that have all its rows (of the first slice) between them, each once, in order of their places."""
        return self.ranks[: self.num_owners]

    def plain(self) -> dict[str, Any]:
        """As JSON has it, short in large worlds: ranks as runs [first, last]. `sharding_from` reads it."""
        runs: list[list[int]] = []
        for rank in self.ranks:
            if runs and runs[-1][1] == rank - 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        cut = {"slices": self.slices} if self.slices > 1 else {}
        hot = {} if self.hot is None else {"hot": list(self.hot.ids), "copies": self.hot.num_ranks}
        return {"kind": self.kind, "ranks": runs, **cut, **hot}


def sharding_from(said: Mapping[str, Any]) -> Sharding:
    """Of `Sharding.plain`."""
    ranks = (rank for first, last in said["ranks"] for rank in range(first, last + 1))
    hot = HotRows(tuple(said["hot"]), said["copies"]) if "hot" in said else None
    return Sharding(said["kind"], tuple(ranks), said.get("slices", 1), hot)


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


def column_wise(ranks: Sequence[int]) -> Sharding:
    """A slice for each of these ranks."""
    return Sharding("column_wise", tuple(sorted(ranks)), len(ranks))


def grid(world: World, hosts: Sequence[int]) -> Sharding:
    """A slice for each of these hosts, whose ranks share it."""
    if len(hosts) < 2:
        raise ConfigError(
            f"sharding grid: got {len(hosts)} of {world.num_hosts} hosts, wanted two or more, a slice of columns for "
            "each; on one host, column_wise cuts rows over its ranks"
        )
    ranks = [rank for host in sorted(hosts) for rank in host_wise(world, host).ranks]
    return Sharding("grid", tuple(ranks), len(hosts))


def on_ranks(kind: Kind, ranks: tuple[int, ...], world: World) -> Sharding:
    """Of a kind that takes some ranks; of a grid, all those of its hosts."""
    slices = {"column_wise": len(ranks), "grid": len(ranks) // world.ranks_per_host}
    return Sharding(kind, ranks, slices.get(kind, 1))


def columns_of(width: int, slices: int) -> list[tuple[int, int]]:
    """(first, last + 1) of each slice of rows that wide: as alike as can be."""
    ends = [width * i // slices for i in range(slices + 1)]
    return list(pairwise(ends))


def replicated(num_ranks: int) -> Sharding:
    return Sharding("replicated", tuple(range(num_ranks)))


def share(rows: int, num_owners: int) -> int:
    """Most rows of a vocabulary table that one of its owners has: ids come in runs of num_owners, one for each."""
    return -(-rows // num_owners)


def distinct_loads(shardings: Sequence[Sharding], num_ranks: int) -> list[list[Shard]]:
    """What ranks have, by table, once for all ranks that have shards of the same tables. Pure."""
    has = np.zeros((num_ranks, len(shardings)), dtype=bool)
    for t, sharding in enumerate(shardings):
        has[list(sharding.ranks), t] = True
    _, ranks = np.unique(np.packbits(has, axis=1), axis=0, return_index=True)
    return [[sharding.shard_of(rank) for sharding in shardings] for rank in sorted(ranks.tolist())]
