"""Best evaluation of a run, by one metric of the validation part: early stopping and `--at best` go by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from colonnade.errors import ConfigError

LESS_IS_BETTER = ("loss", "entropy", "error", "mean rank")
NOT_JUDGED = ("num_", "positive_rate", "calibration")


def is_less_better(metric: str) -> bool:
    return any(word in metric for word in LESS_IS_BETTER)


def is_judged(metric: str) -> bool:
    """Whether more or less of it is better. Of several tasks the label's name ends a metric's."""
    return "error" in metric or not any(word in metric for word in NOT_JUDGED)


def check_monitor(monitor: str, metrics: Iterable[str]) -> None:
    """Raise ConfigError where `train.monitor` is none of the metrics that can be better or worse."""
    judged = sorted(metric for metric in metrics if is_judged(metric))
    if monitor not in judged:
        raise ConfigError(
            f"got train.monitor={monitor}, wanted a metric of the validation part: {', '.join(judged)}"
        )


@dataclass(slots=True)
class Best:
    """A small state that every rank keeps alike, because every rank hears the same metrics."""

    monitor: str
    """Name of the metric that decides, with its part: "validation_auc"."""
    min_delta: float = 0.0
    score: float | None = None
    step: int | None = None
    """Of the best score; None where no evaluation had one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything that evaluation found; without any score, the newest's."""
    num_since: int = 0
    """Evaluations since the best score that had no better one; 0 until there is a score."""

    def hear(self, metrics: Mapping[str, float], step: int) -> bool:
        """One evaluation, after `step` updates. Returns whether its score is the best so far; NaN never is."""
        score = metrics.get(self.monitor)
        if score is None:
            if self.step is None:
                self.metrics = dict(metrics)
            return False
        sign = -1.0 if is_less_better(self.monitor) else 1.0
        better = not math.isnan(score) and (
            self.score is None or sign * (score - self.score) > self.min_delta
        )
        if better:
            self.score, self.step, self.metrics, self.num_since = score, step, dict(metrics), 0
        elif self.score is None:  # NaN every time, as AUC where all samples are of one class
            self.metrics = dict(metrics)
        else:
            self.num_since += 1
        return better

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `monitor` and `min_delta` are the run's settings."""
        return {k: v for k, v in asdict(self).items() if k not in ("monitor", "min_delta")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
