"""Where the time of a step goes: what the training thread computes, and what it waits for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from colonnade.comm.traffic import waited

WAITING = "wait for rows"
"""The phase in which the training thread has nothing to do."""
EXPOSED = {
    "fetch": "exchange: rows",
    "push": "exchange: row gradients",
    "dense": "exchange: dense gradients",
    "gather": "exchange: samples",
}
"""Purposes of the mesh -> phases: waits for other ranks inside a step, taken out of the phase they interrupt."""
OTHER = "exchange: other"


@dataclass(slots=True)
class Phases:
    """Seconds spent, by phase, on the training thread. They add up to no more than its time."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str, *, whole: bool = False) -> Iterator[None]:
        """`whole`: what it waits for other ranks inside is its own."""
        start, before = time.perf_counter(), dict(waited())
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            if not whole:
                for channel, seconds in waited().items():
                    gained = seconds - before.get(channel, 0.0)
                    if gained:
                        self.seconds[EXPOSED.get(channel, OTHER)] += gained
                        spent -= gained
            self.seconds[name] += spent
