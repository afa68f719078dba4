"""Bisection for the highest rate at which a server meets a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_RATE = 1.0
NEAR = 1.3
"""Ratio of the bounds at which the lower one is doubted, if no rate has met the limit."""
FALL = 0.4
"""Factor from the upper bound to the lower one then."""


@dataclass
class RateSearch:
    """Search between two rates, a window at a time: `rate` is the next to try, `add` notes what came of it.

    `high` is assumed to miss the limit. `low` may miss it, too: while no rate has met the limit, lower and lower ones
    are tried.
    """

    low: float
    high: float
    tolerance: float
    """Ratio of the two bounds, less 1, at which the search is over."""
    best: float = 0.0
    """Highest rate that met the limit; 0: none."""

    @property
    def is_done(self) -> bool:
        if not self.best:
            return self.high <= MIN_RATE * (1 + self.tolerance)
        return self.high / self.best <= 1 + self.tolerance

    @property
    def rate(self) -> float:
        """Rate to try next: the geometric middle, so that each window halves the ratio of the bounds."""
        return math.sqrt(max(self.low, MIN_RATE) * self.high)

    def add(self, rate: float, *, is_met: bool) -> None:
        """Note whether a rate met the limit."""
        if is_met:
            self.low = self.best = max(self.best, rate)
            return
        self.high = min(self.high, rate)
        if not self.best and self.high <= self.low * NEAR:
            self.low = self.high * FALL
