"""The one table of supported consistencies."""

from __future__ import annotations

from collections.abc import Sequence

from colonnade.consistency.bounded import Bounded
from colonnade.consistency.contract import Consistency
from colonnade.consistency.synchronous import Synchronous

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
