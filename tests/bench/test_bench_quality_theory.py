"""`bench quality`, suite theory: the derived loss is that of the delayed recursion, and runs come close to it."""

import math
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

from harness import Measured  # noqa: E402
from tables import quality as tables  # noqa: E402
from workers import quality_theory as theory  # noqa: E402
from workers.quality_case import Run  # noqa: E402


@pytest.mark.parametrize("late", [0, 1, 16, 64])
def test_the_derived_variance_is_that_of_a_delayed_recursion(late: int) -> None:
    """x' = x - a x(late steps ago) + noise, whose covariance is a sum over powers of its companion matrix."""
    curvature = 0.2
    step = np.eye(late + 1, k=-1)
    step[0, 0] = 1.0
    step[0, late] -= theory.RATE * curvature
    noise = np.zeros((late + 1, late + 1))
    noise[0, 0] = theory.RATE**2 * curvature
    covariance, power = noise.copy(), step.copy()
    while np.abs(power).max() > 1e-9:  # doubles the number of summed powers
        covariance += power @ covariance @ power.T
        power = power @ power
    expected = theory.ACTIVE * curvature / 2 * covariance[0, 0]
    assert theory.predict_loss(curvature, late) == pytest.approx(expected, rel=2e-3)


def test_a_rate_at_which_late_reads_diverge_is_infinitely_bad() -> None:
    assert theory.predict_loss(0.2, 156) < math.inf == theory.predict_loss(0.2, 157)


def test_late_reads_cost_what_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "USES", 2000)
    results = {late: theory.train_late(1.0, late, Run(seed=0)) for late in (0, 64)}
    measured, derived = (
        fmean(results[64][unit]) - fmean(results[0][unit])
        for unit in ("excess loss", "predicted loss")
    )
    assert measured == pytest.approx(derived, rel=0.3)
    rare = [fmean(theory.train_late(0.1, late, Run(seed=0))["excess loss"]) for late in (0, 64)]
    assert abs(rare[1] - rare[0]) < 0.3 * measured, "a tenth of the samples, a tenth of the cost"


def test_the_explained_part_is_over_all_cells() -> None:
    def cell(group: str, arm: str, loss: float, derived: float) -> list[Measured]:
        case = f"{group}{tables.SEED}0"
        units = {tables.EXCESS: [loss, loss + 2], tables.PREDICTED: [derived]}
        return [Measured(case, arm, unit, values) for unit, values in units.items()]

    measured = [
        *cell("one", tables.ON_TIME, 0.0, 1.0), *cell("one", "1 steps late", 1.0, 2.0),
        *cell("two", tables.ON_TIME, 0.0, 1.0), *cell("two", "4 steps late", 3.0, 3.0),
    ]  # fmt: skip
    # Measured 1 and 3, derived 1 and 2: an error of 1 of a variance of 2.
    assert tables.ratios_of(measured)["theory_r2"] == 0.5
