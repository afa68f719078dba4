"""Staleness: which updates a read of rows sees, for each table.

`bounded(k)`: rows for step t are read k steps before their use, right after update t-1-k, and the values wait in a
delay line. The same k therefore gives the same bits, and k = 0 is synchronous. (PERSIA, Lian et al. 2021, only bounds k
from above.)

`row_clock(s)`: ranks cache copies of rows (HET). A rank uses a cached row for `read_bound` batches after its last
comparison with the owner's row, and accumulates gradients of up to `write_bound` batches before it sends their sum to
the owner. The row clock counts the batches that use a row. A cached row misses two kinds of updates of another rank:
those that were not yet sent when the row was read (at most write_bound batches) and those made since (at most
read_bound). So s = read_bound + write_bound. A rank misses none of its own updates. A write bound alone would leave the
gradients of a row that few batches use at the cache for most of a run; so they are also sent when they are of more than
`write_share` of the row's own uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from colonnade.errors import ConfigError


def list_steps_ahead(read_bounds: Sequence[int], is_read_table: Sequence[bool]) -> list[int]:
    """Return the steps that each table is read ahead.

    read_bounds: staleness of each table, in steps. is_read_table: whether a feature reads the table; a table that no
    feature reads gets the largest bound. The largest bound sets the length of the delay line."""
    latest = max(
        bound
        for bound, is_table_read in zip(read_bounds, is_read_table, strict=True)
        if is_table_read
    )
    return [
        bound if is_table_read else latest
        for bound, is_table_read in zip(read_bounds, is_read_table, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class RowClock:
    """Bounds of a row cache (HET's per-embedding clocks): how stale a cached row may be, by row and batch."""

    read_bound: int
    """Batches for which a cached row is used after its read, without a request to its owner."""
    write_bound: int
    """Batches whose gradients of a row may accumulate in the cache before they are sent."""
    write_share: float = 1.0
    """Largest part of the batches of this rank that used the row so far whose gradients may accumulate. So gradients of
    rows that few batches use reach their owners, too. 1: no limit."""
    step_bound: int | None = None
    """Batches after which a row that every batch uses is sent and read again, whatever the other bounds. Ranks train
    their copies apart, and the owner adds up all their steps, like one step at a many times higher learning rate. A row
    whose last two uses are g batches apart may be used g times as often in between. None: no limit."""

    def __post_init__(self) -> None:
        for name in ("read_bound", "write_bound"):
            object.__setattr__(self, name, _check_num_batches(name, getattr(self, name)))
        if not 0 <= self.write_share <= 1:
            raise ConfigError(
                f"row_clock: got write_share={self.write_share!r}, wanted 0 .. 1: a share of the row's own uses"
            )
        if self.step_bound is not None and _check_num_batches("step_bound", self.step_bound) < 1:
            raise ConfigError(
                f"row_clock: got step_bound={self.step_bound!r}, wanted 1 or more batches, or None for no limit"
            )

    @property
    def staleness(self) -> int:
        """Largest number of batches of each other rank that a read misses (s)."""
        return self.read_bound + self.write_bound

    @property
    def is_late(self) -> bool:
        """True if a read may miss updates."""
        return self.staleness > 0


def _check_num_batches(name: str, value: object) -> int:
    """Return a number of batches as an int; NumPy integers are accepted. Raises ConfigError for anything else."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and index(value) >= 0:
        return index(value)
    raise ConfigError(f"row_clock: got {name}={value!r}, wanted 0 or more batches")


def row_clock(
    staleness: int,
    read_bound: int | None = None,
    write_bound: int | None = None,
    write_share: float = 1.0,
    step_bound: int | None = None,
) -> RowClock:
    """Return a row clock with s = `staleness`. By default half of s is the read bound and the rest the write bound; if
    you pass one bound, the other gets the rest. write_share, step_bound: as in `RowClock`.

    Raises ConfigError if a bound is larger than `staleness`, or both do not add up to it."""
    staleness = _check_num_batches("staleness", staleness)
    bounds = {"read_bound": read_bound, "write_bound": write_bound}
    for name, bound in bounds.items():
        if bound is not None and _check_num_batches(name, bound) > staleness:
            raise ConfigError(
                f"row_clock: got {name}={bound} with staleness={staleness}, wanted at most that; raise staleness, "
                "which is the sum of the two bounds, or leave it out"
            )
    if read_bound is None:
        read_bound = staleness // 2 if write_bound is None else staleness - write_bound
    if write_bound is None:
        write_bound = staleness - read_bound
    if read_bound + write_bound != staleness:
        raise ConfigError(
            f"row_clock: got staleness={staleness} with read_bound={read_bound} and write_bound={write_bound}, wanted "
            "bounds that add up to staleness; leave one of the three out"
        )
    return RowClock(read_bound, write_bound, write_share, step_bound)


@dataclass(frozen=True, slots=True)
class TableCache:
    """Cache settings of one table on one rank."""

    rows: int
    clock: RowClock
    policy: str = "lru"
    window: int = 0
    """Number of coming batches that policy lookahead knows the ids of."""
