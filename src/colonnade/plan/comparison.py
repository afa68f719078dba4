"""Comparison of the plans that a run chose from: predicted and measured seconds of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colonnade.sizes import format_digits

MAX_PREDICTED_GAP = 2.0
"""Predicted step of a plan, relative to the fastest one, above which it is not timed. Steps of one exchange were up to
1.9 times as long as predicted, relative to those of another (benchmark `partials`)."""


def order_plans_to_time(exchanges: Sequence[Sequence[str]], seconds: Sequence[float]) -> list[int]:
    """Order plans by what timing them may tell, because the time for it is limited. Returns indices. Pure.

    The first plan stays first; then the fastest of each other exchange, the second ones, and so on; last, plans beyond
    MAX_PREDICTED_GAP. exchanges: of each plan's tables; most of them count. seconds: predicted for a step."""
    mains = [Counter(names).most_common(1)[0][0] for names in exchanges]
    num_before: Counter[str] = Counter(mains[:1])
    keys: dict[int, tuple[bool, int, float]] = {}
    for i in sorted(range(1, len(mains)), key=lambda i: seconds[i]):
        is_far = seconds[i] > MAX_PREDICTED_GAP * seconds[0]
        keys[i] = (is_far, num_before[mains[i]], seconds[i])
        num_before[mains[i]] += 1
    return [0, *sorted(keys, key=lambda i: keys[i])]


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """Plan that a run could have."""

    exchanges: str
    """Exchanges and shardings of its tables in words (`describe_exchanges`)."""
    predicted_seconds: float
    """Predicted seconds of a step."""
    measured_seconds: float | None = None
    """Measured seconds of a step on the slowest rank; None: predicted only."""


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """Plans that a run chose from: the planner's choice, then its runners-up; and the one that it trains with."""

    plans: tuple[ComparedPlan, ...]
    chosen: int = 0
    """Index in `plans` of the plan that the run trains with."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanComparison:
        """Read what `dataclasses.asdict` makes of a comparison."""
        plans = tuple(ComparedPlan(**plan) for plan in values["plans"])
        if not 0 <= values["chosen"] < len(plans):
            raise ValueError(f"got plan {values['chosen']} of {len(plans)}, wanted one of them")
        return cls(plans, values["chosen"])

    def describe(self) -> list[str]:
        """Describe in words which plan the run trains with, and why: a line, then one for each plan."""
        if self.plans[self.chosen].measured_seconds is None:
            return [f"plan: {self.plans[self.chosen].exchanges}, by prediction"]
        reason = "as predicted" if self.chosen == 0 else "though another one was predicted faster"
        lines = [f"plan: {self.plans[self.chosen].exchanges}, measured the fastest, {reason}"]
        for plan in self.plans:
            measured = "not measured"
            if plan.measured_seconds is not None:
                measured = f"measured {format_digits(1e3 * plan.measured_seconds)} ms a step"
            lines.append(
                f"  {plan.exchanges}: {measured}, predicted {format_digits(1e3 * plan.predicted_seconds)} ms"
            )
        return lines


def describe_exchanges(options: Iterable[tuple[str, str]]) -> str:
    """Describe the exchange and kind of sharding of each table in words, most frequent first."""
    counts = Counter(
        exchange if exchange == kind else f"{exchange} {kind}" for exchange, kind in options
    )
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count} tables)" for name, count in counts.most_common())
