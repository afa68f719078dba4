"""Every read sees every earlier update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Synchronous:
    name = "synchronous"
    reads_ahead = 0

    def newest_visible(self, step: int) -> int:
        return step - 1
