"""Churn: how much the predictions of two models for the same samples differ (Anil et al. 2018, section 3.5).

Two runs that differ in their seed alone tell how reproducible a prediction is. An underfitted model has little churn,
so log losses belong beside it.

Legend: S samples, G groups, N blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError
from colonnade.models.ranking import NUM_BLOCKS, assign_blocks
from colonnade.train.metrics import compute_log_losses

TOP = 10
"""Number of samples with the highest scores of a group that are compared."""
Float64s = NDArray[np.float64]


class Estimate(NamedTuple):
    """Mean over samples or groups, with its standard error by the jackknife over blocks; NaN without values."""

    value: float
    standard_error: float


def measure_churn(
    first: Float64s,
    second: Float64s,
    labels: Float64s,
    *,
    weights: Float64s | None = None,
    groups: NDArray[np.int64] | None = None,
) -> dict[str, Estimate]:
    """Measure how much two models' probabilities (S,) of the same samples differ, and how well each fits.

        churn            mean |p - p'|
        relative churn   the same, divided by the mean probability of the two
        flips            share of samples with one probability above 1/2 and the other not
        jaccard@10       mean over groups of more than 10 samples: size of the intersection of the two lists of the 10
                         samples with the highest probabilities, over that of their union; among equals the first ones
        log loss 1, log loss 2, log loss 2 - 1    of samples whose label is not NaN

    labels (S,) 0, 1 or NaN; weights (S,) default 1; groups (S,) integers. Blocks are of samples, with groups of groups.
    Raises DataError if the lengths differ.
    """
    columns = (first, second, labels, *(c for c in (weights, groups) if c is not None))
    if len(lengths := {len(column) for column in columns}) > 1:
        raise DataError(f"got columns of {sorted(lengths)} samples, wanted as many of each")
    w = np.ones(len(first)) if weights is None else weights
    blocks = assign_blocks(np.arange(len(first)))
    if groups is not None:
        names, groups = np.unique(groups, return_inverse=True)
        blocks = assign_blocks(np.arange(len(names)))[groups]
    gap = np.abs(first - second)
    measured = {
        "churn": estimate_ratio(w * gap, w, blocks),
        "relative churn": estimate_ratio(w * gap, w * (first + second) / 2, blocks),
        "flips": estimate_ratio(w * ((first > 0.5) != (second > 0.5)), w, blocks),
    }
    if groups is not None:
        overlaps = compute_group_overlaps(first, second, groups)
        is_large = ~np.isnan(overlaps)
        measured[f"jaccard@{TOP}"] = estimate_ratio(
            overlaps[is_large], np.ones(is_large.sum()), assign_blocks(np.flatnonzero(is_large))
        )
    known = ~np.isnan(labels)
    losses = [compute_log_losses(p[known], labels[known]) for p in (first, second)]
    for name, loss in (("1", losses[0]), ("2", losses[1]), ("2 - 1", losses[1] - losses[0])):
        measured[f"log loss {name}"] = estimate_ratio(w[known] * loss, w[known], blocks[known])
    return measured


def estimate_ratio(
    numerators: Float64s, denominators: Float64s, blocks: NDArray[np.int64]
) -> Estimate:
    """Estimate sum(numerators) / sum(denominators), (S,) each, and its standard error: by leaving out each block."""
    tops, bottoms = (
        np.bincount(blocks, x, minlength=NUM_BLOCKS) for x in (numerators, denominators)
    )
    tops, bottoms = tops[bottoms > 0], bottoms[bottoms > 0]
    num_blocks = len(bottoms)
    if num_blocks == 0:
        return Estimate(np.nan, np.nan)
    value = float(tops.sum() / bottoms.sum())
    if num_blocks == 1:
        return Estimate(value, np.nan)
    others = (tops.sum() - tops) / (bottoms.sum() - bottoms)
    return Estimate(value, float(np.sqrt((num_blocks - 1) * np.var(others))))


def compute_group_overlaps(
    first: Float64s, second: Float64s, groups: NDArray[np.int64]
) -> Float64s:
    """Compute the Jaccard index of each group's two top lists, (G,); NaN for a group of TOP samples or fewer.

    groups (S,): 0 .. G-1.
    """
    sizes = np.bincount(groups)
    is_top = [_mark_top_of_groups(scores, groups, sizes) for scores in (first, second)]
    shared = np.bincount(groups, is_top[0] & is_top[1], minlength=len(sizes))
    return np.where(sizes > TOP, shared / (2 * TOP - shared), np.nan)


def _mark_top_of_groups(
    scores: Float64s, groups: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark the TOP samples of each group with the highest scores, (S,); among equal scores the first ones."""
    order = np.lexsort((-scores, groups))
    first_of_group = np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_top = np.empty(len(scores), np.bool_)
    is_top[order] = np.arange(len(scores)) - first_of_group < TOP
    return is_top
