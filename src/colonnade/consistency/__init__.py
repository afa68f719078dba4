"""The one table of supported consistencies."""

from __future__ import annotations

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
