"""Sharding of a table: its owner ranks, and its hot rows, which are copied to every rank.

If a table is cut by columns, each slice of its rows has owners of its own.

Plain values and pure functions; the native core computes the same owners (`_native.owner_of`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from colonnade import _native
from colonnade.errors import ConfigError
from colonnade.topology.world import ShardingKind, World

if TYPE_CHECKING:  # who reads a plan needs no torch
    from torch import Tensor

Side = Literal["both", "hot", "cold"]
Kind = ShardingKind


@dataclass(frozen=True, slots=True)
class HotRows:
    """Hot rows of one table. All ranks have the list; it alone decides whether a lookup reads a hot or a cold row."""

    ids: tuple[int, ...] = field(repr=False)
    """Ids of the hot rows, ascending, without duplicates."""
    num_ranks: int
    """Number of ranks; each of them has a copy of every hot row."""
    side: Side = "both"
    """Rows that the sharding with this list covers: all rows of the table, its hot rows or its cold rows."""

    def __post_init__(self) -> None:
        if not self.ids or list(self.ids) != sorted(set(self.ids)):
            raise ConfigError("hot rows: got no ids, or ids that are not ascending and unique")

    def __str__(self) -> str:
        return f"{len(self.ids):,} hot rows on each of {self.num_ranks} ranks"

    @property
    def tensor(self) -> Tensor:
        """Ids of the hot rows, (H,) int64, ascending."""
        import torch

        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def digest(self) -> str:
        """Short hash of the id list, used in names of row folders."""
        return hashlib.sha256(np.array(self.ids, "<i8").tobytes()).hexdigest()[:12]

    def owns(self, ids: Tensor) -> Tensor:
        """Return whether each id belongs to `side`. ids (N,) int64 -> (N,) bool."""
        import torch

        if self.side == "both":
            return torch.ones(len(ids), dtype=torch.bool)
        return is_hot(ids, self.tensor) == (self.side == "hot")


def build_hot_rows(ids: Iterable[int] | Tensor, num_ranks: int) -> HotRows:
    """Build the hot rows of a table from ids in any order, with or without duplicates."""
    return HotRows(tuple(sorted({int(row_id) for row_id in ids})), num_ranks)


def is_hot(ids: Tensor, hot: Tensor) -> Tensor:
    """Return which ids are hot. ids (N,) int64, hot (H,) int64 ascending -> (N,) bool."""
    import torch

    return hot[torch.searchsorted(hot, ids).clamp(max=len(hot) - 1)] == ids


KINDS: tuple[Kind, ...] = get_args(Kind)


COLUMN_KINDS = ("column_wise", "grid")
"""Kinds that cut rows by columns."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of a table on one rank: those of owner `owner_index` out of `num_owners`."""

    num_owners: int = 1
    owner_index: int | None = 0
    """Index of this rank among the row owners; None: the rank has no rows of the table."""
    hot: HotRows | None = None
    """Hot rows of the table; only rows on its `side` belong to the shard."""

    def max_rows(self, rows: int) -> int:
        """Return the largest number of rows this shard can have of a vocabulary table with `rows` rows."""
        return 0 if self.owner_index is None else max_rows_per_owner(rows, self.num_owners)

    def owns(self, ids: Tensor, num_table_rows: int | None) -> Tensor:
        """Return which ids belong to this shard.

        ids (N,) int64 of a vocabulary table with `num_table_rows` rows, or of an open table (None) -> (N,) bool."""
        import torch

        if self.owner_index is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        owner = torch.as_tensor(_native.owner_of(ids, num_table_rows or 0, self.num_owners))
        return (
            owner == self.owner_index
            if self.hot is None
            else (owner == self.owner_index) & self.hot.owns(ids)
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """Distribution of one table over ranks.

    `row_wise`: rows are hashed over all ranks. `host_wise`: rows are hashed over the ranks of one host. `table_wise`:
    one rank owns all rows. `replicated`: every rank has every row, and all apply the same updates. `column_wise`: rows
    are cut into slices of columns, and one rank owns each slice of all rows. `grid`: rows are cut likewise, and each
    slice is hashed over the ranks of one host. If some ranks are servers, "all ranks" are the servers, and nothing is
    replicated.

    Tables of kinds `row_wise`, `host_wise` and `table_wise` can have `hot` rows with a copy on every rank."""

    kind: Kind
    ranks: tuple[int, ...]
    """Owner ranks, ascending. The owner of a row is ranks[owner_of(id, table.rows, len(ranks))], unless the table is
    replicated; the owner of a row's slice is found likewise among the ranks of the slice."""
    slices: int = 1
    """Number of column slices. `ranks` splits into equal runs; slice i, counted from the left, has the i-th run."""
    hot: HotRows | None = None
    """Rows with a copy on every rank; the kind determines the owners of the others."""

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
        if self.slices > 1 and self.kind not in COLUMN_KINDS:
            raise ConfigError(
                f"sharding {self.kind}: got {self.slices} slices, wanted column_wise or grid, which cut rows"
            )
        if self.kind == "column_wise" and self.slices != len(self.ranks):
            raise ConfigError(
                f"sharding column_wise: got {len(self.ranks)} ranks for {self.slices} slices, wanted one for each"
            )
        if self.has_hot and (self.is_replicated or self.kind in COLUMN_KINDS):
            raise ConfigError(
                f"sharding {self.kind}: got hot rows, wanted row_wise, host_wise or table_wise: the other rows must be "
                "whole and have one owner each"
            )

    def __str__(self) -> str:
        first = self.ranks[0]
        last = self.ranks[-1]
        ranks = f"rank {first}" if len(self.ranks) == 1 else f"ranks {first} .. {last}"
        cut = f", {self.slices} slices" if self.kind == "grid" else ""
        hot = f", {self.hot}" if self.hot is not None else ""
        return f"{self.kind}, {ranks}{cut}{hot}"

    @property
    def num_owners(self) -> int:
        """Number of ranks over which the rows (of each slice) are distributed."""
        return 1 if self.kind == "replicated" else len(self.ranks) // self.slices

    @property
    def is_replicated(self) -> bool:
        """True if every rank has every row."""
        return self.kind == "replicated"

    @property
    def has_hot(self) -> bool:
        """True if the sharding covers a whole table with hot rows, not one side of it."""
        return self.hot is not None and self.hot.side == "both"

    @property
    def hot_sharding(self) -> Sharding:
        """Sharding of the hot rows alone; requires hot rows."""
        assert self.hot is not None
        return replace(replicated(self.hot.num_ranks), hot=replace(self.hot, side="hot"))

    @property
    def cold_sharding(self) -> Sharding:
        """Sharding of the cold rows alone; requires hot rows."""
        assert self.hot is not None
        return replace(self, hot=replace(self.hot, side="cold"))

    def shard_of(self, rank: int) -> Shard:
        """Return the shard of the table on `rank`."""
        if rank not in self.ranks:
            return Shard(self.num_owners, None)
        owner_index = 0 if self.is_replicated else self.ranks.index(rank) % self.num_owners
        return Shard(self.num_owners, owner_index, self.hot)

    @property
    def slice_shardings(self) -> tuple[Sharding, ...]:
        """Sharding of each column slice, from the left; only this sharding if rows are not cut."""
        if self.slices == 1:
            return (self,)
        kind: Kind = "table_wise" if self.num_owners == 1 else "host_wise"
        runs = [range(i * self.num_owners, (i + 1) * self.num_owners) for i in range(self.slices)]
        return tuple(Sharding(kind, tuple(self.ranks[i] for i in run)) for run in runs)

    def row_folder_name(self, rank: int) -> str | None:
        """Return the name of the folder under a run's `rows` with the rows of `rank`; None if it has no rows.

        The name depends on the number of owners only, so shardings of other kinds or ranks share folders."""
        owner_index = self.shard_of(rank).owner_index
        if owner_index is None:
            return None
        return f"copy-{rank}" if self.is_replicated else f"{owner_index}-of-{self.num_owners}"

    def reuses_folder(self, before: Sharding, rank: int) -> bool:
        """Return whether the rows of `rank` are those of one folder (`row_folder_name`) written under `before`."""
        if self.is_replicated or before.is_replicated:
            return self.is_replicated and before.is_replicated and rank in before.ranks
        return self.num_owners == before.num_owners

    @property
    def row_owners(self) -> tuple[int, ...]:
        """Ranks that together store every row (of the first slice) once, in order of their owner index."""
        return self.ranks[: self.num_owners]

    def to_dict(self) -> dict[str, Any]:
        """Return the sharding as JSON values, with ranks as runs [first, last]. `read_sharding` reads them."""
        runs: list[list[int]] = []
        for rank in self.ranks:
            if runs and runs[-1][1] == rank - 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        cut = {"slices": self.slices} if self.slices > 1 else {}
        hot = {} if self.hot is None else {"hot": list(self.hot.ids), "copies": self.hot.num_ranks}
        return {"kind": self.kind, "ranks": runs, **cut, **hot}


def read_sharding(fields: Mapping[str, Any]) -> Sharding:
    """Build a sharding from the values of `Sharding.to_dict`."""
    ranks = (rank for first, last in fields["ranks"] for rank in range(first, last + 1))
    hot = HotRows(tuple(fields["hot"]), fields["copies"]) if "hot" in fields else None
    return Sharding(fields["kind"], tuple(ranks), fields.get("slices", 1), hot)


def row_wise(num_ranks: int) -> Sharding:
    """Return the sharding of rows over ranks 0 .. num_ranks - 1."""
    return Sharding("row_wise", tuple(range(num_ranks)))


def row_wise_over_owners(world: World) -> Sharding:
    """Return the sharding of rows over all ranks that can own rows: the servers, or else all ranks."""
    return Sharding("row_wise", world.owners)


def host_wise(world: World, host: int) -> Sharding:
    """Return the sharding of rows over the ranks of one host, or over its servers if it has any."""
    first = host * world.ranks_per_host
    if world.has_servers:
        first += world.trainers_per_host
    return Sharding("host_wise", tuple(range(first, (host + 1) * world.ranks_per_host)))


def table_wise(rank: int) -> Sharding:
    """Return the sharding of a whole table on one rank."""
    return Sharding("table_wise", (rank,))


def column_wise(ranks: Sequence[int]) -> Sharding:
    """Return the sharding by columns, one slice for each of these ranks."""
    return Sharding("column_wise", tuple(sorted(ranks)), len(ranks))


def grid(world: World, hosts: Sequence[int]) -> Sharding:
    """Return the sharding by columns over hosts; the ranks of a host share the rows of its slice."""
    if len(hosts) < 2:
        raise ConfigError(
            f"sharding grid: got {len(hosts)} of {world.num_hosts} hosts, wanted two or more, a slice of columns for "
            "each; on one host, column_wise cuts rows over its ranks"
        )
    ranks = [rank for host in sorted(hosts) for rank in host_wise(world, host).ranks]
    return Sharding("grid", tuple(ranks), len(hosts))


def shard_columns_everywhere(kind: Kind, world: World) -> Sharding:
    """Return the sharding with a slice on every rank, or every host for `grid`: the default without named ranks.

    Raises ConfigError for a grid on one host."""
    if kind == "grid":
        return grid(world, range(world.num_hosts))
    return column_wise(world.owners)


def sharding_on_ranks(kind: Kind, ranks: tuple[int, ...], world: World) -> Sharding:
    """Return the sharding of a kind on given ranks. `grid` requires all ranks of each of its hosts."""
    slices = {"column_wise": len(ranks), "grid": len(ranks) // world.ranks_per_host}
    return Sharding(kind, ranks, slices.get(kind, 1))


def slice_columns(width: int, slices: int) -> list[tuple[int, int]]:
    """Return the column range (first, last + 1) of each slice of `width` columns, of widths as equal as possible."""
    ends = [width * i // slices for i in range(slices + 1)]
    return list(pairwise(ends))


def replicated(num_ranks: int) -> Sharding:
    """Return the sharding with a copy of the table on each of `num_ranks` ranks."""
    return Sharding("replicated", tuple(range(num_ranks)))


def max_rows_per_owner(rows: int, num_owners: int) -> int:
    """Return the largest number of rows of a vocabulary table that one owner has.

    The owner function assigns each run of num_owners ids one to each owner."""
    return -(-rows // num_owners)


def list_distinct_shards(shardings: Sequence[Sharding], num_ranks: int) -> list[list[Shard]]:
    """Return the shards of one rank from each group of ranks that have shards of the same tables, by table."""
    has_shard = np.zeros((num_ranks, len(shardings)), dtype=bool)
    for t, sharding in enumerate(shardings):
        has_shard[list(sharding.ranks), t] = True
    _, ranks = np.unique(np.packbits(has_shard, axis=1), axis=0, return_index=True)
    return [[sharding.shard_of(rank) for sharding in shardings] for rank in sorted(ranks.tolist())]
