"""Best evaluation of a run by one validation metric, for early stopping and `--at best`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from colonnade.config.run import MonitorMode
from colonnade.errors import ConfigError

HIGHER = 1
LOWER = -1
NEITHER = 0
DIRECTIONS = {
    **dict.fromkeys(
        ("auc", "group_auc", "mrr", "hits", "recall", "ndcg", "hit_rate", "precision"), HIGHER
    ),
    **dict.fromkeys(
        ("loss", "log_loss", "normalized_entropy", "expected_calibration_error", "mean rank"), LOWER
    ),
    **dict.fromkeys(("rmse", "mse", "mae", "mape", "nlpd", "perplexity"), LOWER),
    **dict.fromkeys(
        ("num_samples", "positive_rate", "calibration", "popularity", "relevance"), NEITHER
    ),
}
"""Direction of better values of each metric, by its name without a cutoff ("@20") and without a label ("_buy")."""
LOWER_WORDS = ("loss", "entropy", "error", "mean rank", "mean_rank")
"""Words in the names of other metrics whose lower values are better."""


def get_direction(metric: str, *, is_guessed: bool = True) -> int:
    """Return HIGHER or LOWER, whichever value of a metric is better, or NEITHER.

    With several tasks a metric's name ends in its label, which may contain any word. is_guessed: the direction of a
    metric that DIRECTIONS does not have is guessed from its name; else it is NEITHER.
    """
    bases = [name for name in DIRECTIONS if f"{metric}_".startswith((f"{name}_", f"{name}@"))]
    if bases:
        return DIRECTIONS[max(bases, key=len)]
    if metric.startswith("num_") or not is_guessed:
        return NEITHER
    return LOWER if any(word in metric for word in LOWER_WORDS) else HIGHER


def is_judged(metric: str) -> bool:
    """Return whether a metric can be better or worse."""
    return get_direction(metric) != NEITHER


def select_judged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics, named part_metric as "validation_auc", that can be better or worse and are defined."""
    return {
        name: value
        for name, value in metrics.items()
        if "_" in name and is_judged(name.partition("_")[2]) and not math.isnan(value)
    }


def check_monitor_metric(monitor: str, metrics: Iterable[str]) -> None:
    """Raise ConfigError unless `train.monitor` is one of the metrics that can be better or worse."""
    judged = sorted(metric for metric in metrics if is_judged(metric))
    if monitor not in judged:
        raise ConfigError(
            f"got train.monitor={monitor}, wanted a metric of the validation part: {', '.join(judged)}"
        )


@dataclass(slots=True)
class Best:
    """Best score so far. Every rank has the same state, because every rank receives the same metrics."""

    monitor: str
    """Name of the deciding metric, with its part: "validation_auc"."""
    min_delta: float = 0.0
    mode: MonitorMode | None = None
    """Better scores: lower or higher; None: known by the monitor's name."""
    score: float | None = None
    step: int | None = None
    """Step of the best score; None if no evaluation had a score."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the best evaluation; without any score, of the newest."""
    num_since: int = 0
    """Number of evaluations since the best score; 0 before the first score."""

    def record_evaluation(self, metrics: Mapping[str, float], step: int) -> bool:
        """Record an evaluation after `step` updates. Returns whether its score is the best so far; NaN never is."""
        score = metrics.get(self.monitor)
        if score is None:
            if self.step is None:
                self.metrics = dict(metrics)
            return False
        direction = get_direction(self.monitor.removeprefix("validation_"))
        if self.mode is not None:
            direction = LOWER if self.mode == "min" else HIGHER
        is_better = not math.isnan(score) and (
            self.score is None or direction * (score - self.score) > self.min_delta
        )
        if is_better:
            self.score = score
            self.step = step
            self.metrics = dict(metrics)
            self.num_since = 0
        elif self.score is None:  # NaN in every evaluation, as AUC if all samples have one class
            self.metrics = dict(metrics)
        else:
            self.num_since += 1
        return is_better

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without `monitor`, `min_delta` and `mode`, which are settings."""
        return {k: v for k, v in asdict(self).items() if k not in ("monitor", "min_delta", "mode")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)
