"""The one table of supported consistencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from colonnade.consistency.bounded import Bounded
from colonnade.consistency.contract import Consistency
from colonnade.consistency.synchronous import Synchronous
from colonnade.consistency.unbounded import Unbounded

CONSISTENCIES = {"synchronous": Synchronous, "bounded": Bounded, "unbounded": Unbounded}


def consistency(staleness_steps: int | Literal["unbounded"], deepest: int = 0) -> Consistency:
    """0: synchronous; k > 0: every read misses exactly the newest k updates; "unbounded": as many as happens. deepest:
    batches that a lookahead may hold."""
    if staleness_steps == "unbounded":
        return Unbounded(deepest)
    return Synchronous() if staleness_steps == 0 else Bounded(staleness_steps)


def of_tables(
    bounds: Sequence[int | Literal["unbounded"]], is_read: Sequence[bool], deepest: int = 0
) -> tuple[Consistency, list[int]]:
    """By table: what it is told, and whether a feature reads it -> that of the latest that is read, which batches enter
    the line by; and how many steps each is read ahead. Tables that nobody reads are as the latest."""
    said = [consistency(bound, deepest) for bound in bounds]
    read = [each for each, is_one in zip(said, is_read, strict=True) if is_one]
    latest = max(read, key=lambda each: (not each.is_exact, each.reads_ahead))
    return latest, [
        (each if is_one else latest).reads_ahead for each, is_one in zip(said, is_read, strict=True)
    ]
