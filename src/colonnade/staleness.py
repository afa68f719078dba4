"""Staleness: which updates a read of rows sees, by table.

The read happens k steps before its use, right after update t-1-k, and its values wait in a delay line.
So the same k gives the same bits, and k = 0 is synchronous (Lian et al. 2021 bound k from above only).

A rank keeps copies of rows. A copy is read without a word for `read_bound` batches after it was last compared with its
owner's row; gradients of up to `write_bound` batches wait at a copy before their sum goes to the owner. A batch that
uses a row is one tick of it. What another rank had yet to send of a row when it was read (at most write_bound ticks),
and what it did since then (at most read_bound), is all that the copy misses: s = read_bound + write_bound ticks. A rank
misses nothing of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol, SupportsIndex

from colonnade.errors import ConfigError


class Consistency(Protocol):
    """A pure value. Only row values may be stale: dense weights are always those of the step."""

    @property
    def name(self) -> str: ...

    @property
    def reads_ahead(self) -> int:
        """Steps between a batch's read and its use; also the number of fetched batches held in between."""
        ...

    def newest_visible(self, step: int) -> int:
        """The newest update (by step) that the read for `step` sees; below 0: none. It sees every older one. With a row
        clock it may see newer ones."""
        ...


@dataclass(frozen=True, slots=True)
class Synchronous:
    name = "synchronous"
    reads_ahead = 0

    def newest_visible(self, step: int) -> int:
        return step - 1


@dataclass(frozen=True, slots=True)
class Bounded:
    reads_ahead: int
    """k, in steps."""

    name = "bounded"

    def __post_init__(self) -> None:
        if self.reads_ahead < 0:
            raise ConfigError(f"bounded staleness: got {self.reads_ahead} steps, wanted 0 or more")

    def newest_visible(self, step: int) -> int:
        return step - 1 - self.reads_ahead


CONSISTENCIES = {"synchronous": Synchronous, "bounded": Bounded}


def consistency(staleness_steps: int) -> Consistency:
    """0: synchronous; k > 0: every read misses exactly the newest k updates."""
    return Synchronous() if staleness_steps == 0 else Bounded(staleness_steps)


def of_tables(bounds: Sequence[int], is_read: Sequence[bool]) -> tuple[Consistency, list[int]]:
    """By table: what it is told, and whether a feature reads it -> that of the latest that is read, which batches enter
    the line by; and how many steps each is read ahead. Tables that nobody reads are as the latest."""
    latest = max(bound for bound, is_one in zip(bounds, is_read, strict=True) if is_one)
    return consistency(latest), [
        bound if is_one else latest for bound, is_one in zip(bounds, is_read, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class RowClock:
    read_bound: int
    """Batches that a copy is used for after it was read, without asking its owner."""
    write_bound: int
    """Batches whose gradients of a row may wait at its copy."""

    name = "row_clock"
    reads_ahead = 0

    def __post_init__(self) -> None:
        for name in ("read_bound", "write_bound"):
            object.__setattr__(self, name, _batches(name, getattr(self, name)))

    @property
    def staleness(self) -> int:
        """s: batches of each other rank that a read misses at most."""
        return self.read_bound + self.write_bound

    @property
    def is_late(self) -> bool:
        """Whether a read may miss anything."""
        return self.staleness > 0

    def newest_visible(self, step: int) -> int:
        """See the contract; of updates by other ranks."""
        return step - 1 - self.staleness


def _batches(name: str, value: object) -> int:
    """A whole number, of NumPy or not. Raises ConfigError."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and index(value) >= 0:
        return index(value)
    raise ConfigError(f"row_clock: got {name}={value!r}, wanted 0 or more batches")


def row_clock(
    staleness: int, read_bound: int | None = None, write_bound: int | None = None
) -> RowClock:
    """s = `staleness`, half of it for reads and the rest for writes; one bound that is given leaves the other the rest.
    Raises ConfigError where both are given and are not `staleness` together, and where one is beyond it."""
    staleness = _batches("staleness", staleness)
    given = {"read_bound": read_bound, "write_bound": write_bound}
    for name, bound in given.items():
        if bound is not None and _batches(name, bound) > staleness:
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
            "bounds whose sum it is; leave one of the three out"
        )
    return RowClock(read_bound, write_bound)
