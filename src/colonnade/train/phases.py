"""Phases of a step: time that the training thread computes, and time that it waits."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from colonnade.comm.traffic import waiting_seconds

WAITING = "wait for rows"
"""Phase in which the training thread is idle."""
EXPOSED = {
    "fetch": "exchange: rows",
    "push": "exchange: row gradients",
    "dense": "exchange: dense gradients",
    "gather": "exchange: samples",
}
"""Phase of each channel of the mesh. Waits for other ranks in a step are subtracted from the phase around them."""
OTHER = "exchange: other"


@dataclass(slots=True)
class Phases:
    """Seconds of the training thread by phase. Their sum is at most its elapsed time."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str, *, include_waits: bool = False) -> Iterator[None]:
        """Time a phase. include_waits: waits for other ranks inside count as this phase."""
        start = time.perf_counter()
        waited_before = dict(waiting_seconds())
        try:
            yield
        finally:
            duration = time.perf_counter() - start
            if not include_waits:
                for channel, seconds in waiting_seconds().items():
                    waited_seconds = seconds - waited_before.get(channel, 0.0)
                    if waited_seconds:
                        self.seconds[EXPOSED.get(channel, OTHER)] += waited_seconds
                        duration -= waited_seconds
            self.seconds[name] += duration
