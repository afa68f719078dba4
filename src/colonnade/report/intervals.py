"""Student's intervals of means, and of differences that are paired by blocks of test samples."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from statistics import fmean, stdev

STUDENT_95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)  # fmt: skip
"""Quantiles by degrees of freedom, from 1; beyond, the normal distribution's 1.96 is close."""


def compute_confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval, nan for a single value."""
    count = len(values)
    if count < 2:
        return fmean(values), nan
    factor = STUDENT_95[count - 2] if count - 2 < len(STUDENT_95) else 1.96
    return fmean(values), factor * stdev(values) / count**0.5


BlockValues = tuple[str, list[float]]
"""Digest of the test part's samples, and a metric of each of their fixed blocks; NaN where a block has none."""


def are_within_noise(first_values: BlockValues | None, second_values: BlockValues | None) -> bool:
    """Return whether two runs differ by less than two standard errors; False if they cannot be paired by block."""
    if first_values is None or second_values is None or first_values[0] != second_values[0]:
        return False
    pairs = zip(first_values[1], second_values[1], strict=False)
    mean, half_width = compute_confidence_interval(
        [a - b for a, b in pairs if not isnan(a - b)] or [nan]
    )
    return abs(mean) <= half_width
