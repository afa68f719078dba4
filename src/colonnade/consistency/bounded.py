"""PERSIA's bounded staleness, made exact: the read for step t sees the updates of steps <= t-1-k and no other.

The read happens k steps before its use, right after update t-1-k, and its values wait in a delay line.
So the same k gives the same bits, and k = 0 is synchronous (Lian et al. 2021 bound k from above only).
"""

from __future__ import annotations

from dataclasses import dataclass

from colonnade.errors import ConfigError


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
