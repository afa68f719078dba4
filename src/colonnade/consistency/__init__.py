"""The one table of supported consistencies."""

from __future__ import annotations

from colonnade.consistency.bounded import Bounded
from colonnade.consistency.contract import Consistency
from colonnade.consistency.synchronous import Synchronous

CONSISTENCIES = {"synchronous": Synchronous, "bounded": Bounded}


def consistency(staleness_steps: int) -> Consistency:
    """0: synchronous; k > 0: every read misses exactly the newest k updates."""
    return Synchronous() if staleness_steps == 0 else Bounded(staleness_steps)
