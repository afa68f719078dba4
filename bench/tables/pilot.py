"""Search for the learning rate with the best AUC, by pilots that are rows of the bench's result file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from harness import ArmFile, Measured

PREFIX = "AUC at "
"""Beginning of the unit of a pilot's row; the learning rate follows."""


def find_best_rate(
    file: ArmFile,
    case: str,
    system: str,
    choices: Sequence[float],
    run_pilot: Callable[[float], list[float]],
    *,
    is_quick: bool = False,
) -> float:
    """Run the pilots that the file lacks, and return the learning rate whose AUCs have the largest mean.

    choices: learning rates in ascending order. run_pilot: train at a learning rate and return AUCs. is_quick: one pilot
    only.
    """
    while True:
        scored = read_scored_rates(file.measured, case, system)
        lr = None if scored and is_quick else choose_next_rate(choices, scored)
        if lr is None:
            return max(scored, key=lambda rate: scored[rate])
        file.add([Measured(case, system, f"{PREFIX}{lr}", run_pilot(lr))])


def read_scored_rates(measured: Sequence[Measured], case: str, system: str) -> dict[float, float]:
    """Return the mean AUC of a system's pilots by learning rate."""
    return {
        float(m.unit.removeprefix(PREFIX)): fmean(m.values)
        for m in measured
        if (m.case, m.system) == (case, system)
    }


def choose_next_rate(choices: Sequence[float], scored: Mapping[float, float]) -> float | None:
    """Return the learning rate that is tried next, from the middle to the neighbours of the best one; None if both of
    them are worse."""
    if not scored:
        return choices[len(choices) // 2]
    best = choices.index(max(scored, key=lambda rate: scored[rate]))
    near = [choices[i] for i in (best - 1, best + 1) if 0 <= i < len(choices)]
    return next((rate for rate in near if rate not in scored), None)
