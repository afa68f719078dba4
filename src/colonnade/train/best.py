"""Which evaluation was best, and how long ago: what early stopping and `--at best` go by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Best:
    """A small state that every rank keeps alike, because every rank hears the same metrics."""

    monitor: str
    """The metric that decides; less is better if its name ends in "loss"."""
    min_delta: float = 0.0
    score: float | None = None
    step: int | None = None
    """Of the best score; None where no evaluation had one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything that evaluation found; without any score, the newest's."""
    num_since: int = 0
    """Evaluations since that had no better score."""

    def hear(self, metrics: Mapping[str, float], step: int) -> bool:
        """One evaluation, after `step` updates. Returns whether its score is the best so far; NaN never is."""
        score = metrics.get(self.monitor)
        if score is None:
            if self.step is None:
                self.metrics = dict(metrics)
            return False
        sign = -1.0 if self.monitor.endswith("loss") else 1.0
        better = not math.isnan(score) and (
            self.score is None or sign * (score - self.score) > self.min_delta
        )
        if better:
            self.score, self.step, self.metrics, self.num_since = score, step, dict(metrics), 0
        else:
            self.num_since += 1
            self.metrics = self.metrics or dict(metrics)
        return better

    def state(self) -> dict[str, Any]:
        """What a commit keeps; `monitor` and `min_delta` are the run's settings."""
        return {k: v for k, v in asdict(self).items() if k not in ("monitor", "min_delta")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
