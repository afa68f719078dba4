"""Student's intervals of differences that are paired by test samples and by seeds.

Two things vary: which samples are tested (all systems score the same ones, in the same K blocks) and where training
began (seeds). Each has an interval of its own, and the half widths add up as squares; of one seed there is the first
alone, which says nothing of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, isnan

import numpy as np
from numpy.typing import ArrayLike

from colonnade.report.intervals import compute_confidence_interval


def interval(differences: Sequence[ArrayLike]) -> tuple[float, float]:
    """Return the mean of differences (K,) by seed, and half the width of its 95 % interval."""
    mean, of_samples = compute_confidence_interval(
        np.mean(np.asarray(differences), axis=0).tolist()
    )
    of_seeds = compute_confidence_interval(
        [float(np.mean(np.asarray(difference))) for difference in differences]
    )[1]
    return mean, of_samples if isnan(of_seeds) else hypot(of_samples, of_seeds)
