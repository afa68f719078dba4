"""Popularity of rows, estimated from a sample also for rows that it does not contain, and reads of caches of any size.

A popularity groups the rows of a table into bins: each of the `rows[k]` rows of bin k is looked up with probability
`chance[k]`. Frequent rows of the sample keep their counts. The remaining probability mass (Good and Turing) follows a
power law of rank, with the exponent that reproduces the sample's rate of first uses. Lookups are assumed independent
(independent reference model), so that the reads of a cache of the rows with the highest use counts have a closed form:
P(count >= k) of a Poisson count.

A *use* of a row is a batch with at least one lookup of it. All functions are pure; floats are float64. Legend: K bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OPEN_ROOM = 1.2
"""Factor of the predicted rows of an open table for which memory is reserved."""
COUNTED = 8
"""Number of lookups in the sample from which a row keeps its count as popularity."""
TAIL_BINS = 64
HEAD_BINS = 96
STEPS = np.linspace(0, 1, TAIL_BINS + 1)
MAX_EXPONENT = 6.0
THRESHOLDS = np.unique(np.round(np.geomspace(1, 2.0**24, 80))).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Lookup probabilities of a table's rows, grouped into K bins."""

    rows: Floats  # (K,) number of rows
    chance: Floats  # (K,) probability that a lookup is of one given row of the bin: sum(rows * chance) = 1

    def use_probability(self, lookups: float) -> Floats:
        """Return the probability that a row occurs in a batch of `lookups` lookups, by bin, (K,)."""
        return -np.expm1(-self.chance * lookups)

    def unique(self, lookups: float) -> float:
        """Return the expected number of distinct rows among `lookups` lookups."""
        return float(self.rows @ self.use_probability(lookups))


def estimate_from_spectrum(values: Floats, rows: Floats, table_rows: int | None) -> Popularity:
    """Estimate the popularity from count frequencies: `rows[i]` rows have count `values[i]`; values ascend."""
    total = float(values @ rows)
    if total == 0:
        return Popularity(np.array([float(table_rows or 1)]), np.array([1.0 / (table_rows or 1)]))
    steepness = _fit_power_law_steepness(values, rows)
    counted = values >= COUNTED
    sampled_rows = float(rows.sum())
    if table_rows is not None and sampled_rows >= table_rows and not (values < 3).any():
        counted[:] = True  # The sample contains every row often enough.
    # The expected count of a row with count r is a little less than r (regression to the mean).
    expected = np.where(counted, np.maximum(values - steepness, values / 2), 0.0)
    if counted.all():
        expected = values
    head_rows = rows[counted]
    head_mass = (expected * rows)[counted] / total
    head = Popularity(head_rows, head_mass / np.maximum(head_rows, 1e-300))
    mass = 1.0 - float(head_mass.sum())
    num_head = float(head_rows.sum())
    if counted.all() or mass <= 1e-12:
        return _merge_popularity_bins(head)
    singles = float(rows[values == 1].sum())
    new_row_rate = min(singles / total, mass)  # probability that the next lookup is of a new row
    sampled_tail = sampled_rows - num_head
    if table_rows is not None:
        num_tail = max(float(table_rows) - num_head, sampled_tail)
        exponent = _solve_falling_function(
            lambda a: _first_use_rate(_power_law_tail(num_head, num_tail, mass, a), total),
            new_row_rate,
            0.0,
            MAX_EXPONENT,
        )
    else:
        # Fit the number of rows to the rate of new rows at the end of the sample, the exponent to earlier rates.
        min_log_rows = np.log(max(sampled_tail, 1.0))

        def fit_num_tail(exponent: float) -> float:
            return float(
                np.exp(
                    _solve_falling_function(
                        lambda x: (
                            -_first_use_rate(
                                _power_law_tail(num_head, np.exp(x), mass, exponent), total
                            )
                        ),
                        -new_row_rate,
                        min_log_rows,
                        min_log_rows + 16,
                    )
                )
            )

        def fit_error(exponent: float) -> float:
            tail = _power_law_tail(num_head, fit_num_tail(exponent), mass, exponent)
            return sum(
                float(
                    np.log(
                        (_first_use_rate(tail, total * part) + _first_use_rate(head, total * part))
                        / rate
                    )
                )
                ** 2
                for part, rate in earlier_rates
            )

        parts = (0.125, 0.25, 0.5)
        earlier_rates = [
            (part, float(rows @ (values * (1 - part) ** (values - 1))) / total) for part in parts
        ]
        earlier_rates = [(part, rate) for part, rate in earlier_rates if rate > 0]
        exponent = min(np.linspace(0.0, 3.0, 13).tolist(), key=fit_error)
        nearby = np.linspace(max(exponent - 0.2, 0.0), exponent + 0.2, 9)
        exponent = min(nearby.tolist(), key=fit_error)
        num_tail = fit_num_tail(exponent)
    tail = _power_law_tail(num_head, num_tail, mass, exponent)
    return _merge_popularity_bins(
        Popularity(
            np.concatenate([head.rows, tail.rows]), np.concatenate([head.chance, tail.chance])
        )
    )


def expected_used_rows(popularity: Popularity, lookups: float, batches: float) -> float:
    """Return the distinct rows that `batches` batches of `lookups` lookups use."""
    use = np.minimum(popularity.use_probability(lookups), 1 - 1e-12)
    return float(popularity.rows @ -np.expm1(batches * np.log1p(-use)))


def predict_counting_cache_reads(
    popularity: Popularity,
    lookups_per_batch: float,
    num_past_batches: float,
    batches_per_epoch: float = math.inf,
) -> tuple[Floats, Floats]:
    """Return the reads of a cache of the rows with the most uses so far: (capacity, reads of the next batch).

    Capacity ascends. Only rows used before are read; rows used for the first time are initialised. Straight lines
    between the points describe a cache with some of the rows of one count. batches_per_epoch: batches after which the
    same samples repeat, with the same rows as often as before.
    """
    use = popularity.use_probability(lookups_per_batch)
    expected = torch.from_numpy(use * min(num_past_batches, batches_per_epoch))
    max_count = max(float(expected.max()) * 2 + 20, 2.0)
    thresholds = THRESHOLDS[THRESHOLDS <= max_count]
    thresholds = np.append(thresholds, max_count)
    is_cached = _poisson_at_least(thresholds, expected)
    has_record = is_cached[0]
    hits = is_cached
    if num_past_batches >= batches_per_epoch:
        # A row with C uses in an epoch has C uses in the next. Weighting a count C by C shifts the Poisson count by 1.
        has_record = np.ones(len(use))
        hits = _poisson_at_least(thresholds - 1, expected)
    capacity = is_cached @ popularity.rows
    reads = np.maximum((has_record - hits) @ (popularity.rows * use), 0.0)
    capacity = np.append(capacity, 0.0)[::-1]
    reads = np.append(reads, has_record @ (popularity.rows * use))[::-1]
    return capacity, reads


def _poisson_at_least(thresholds: Floats, expected_counts: torch.Tensor) -> Floats:
    """Return P(Poisson(m) >= k), (len(thresholds), K): the regularised lower incomplete gamma function of (k, m)."""
    probability: Floats = torch.special.gammainc(
        torch.from_numpy(thresholds)[:, None].clamp_min(1e-300),
        expected_counts.clamp_min(1e-300)[None, :],
    ).numpy()
    probability[thresholds == 0] = 1.0
    return probability


def _power_law_tail(
    num_head: float, num_rows: float, total_chance: float, exponent: float
) -> Popularity:
    """Return rows of ranks num_head .. num_head + num_rows, with chances ~ rank ** -exponent that sum to
    `total_chance`."""
    first = max(num_head, 0.5)
    edges = first * np.exp(STEPS * np.log1p(max(num_rows, 1e-9) / first))
    rows = np.diff(edges)
    logs = np.log(edges)
    if abs(exponent - 1) < 1e-6:
        weights = np.diff(logs)
    else:
        power = np.exp((1 - exponent) * (logs - logs[0]))
        weights = np.diff(power) / (1 - exponent)
    weights = np.maximum(weights, 1e-300)
    return Popularity(rows, total_chance * weights / weights.sum() / rows)


def _first_use_rate(popularity: Popularity, lookups: float) -> float:
    """Return the probability that a lookup is of a row that none of `lookups` lookups before it read."""
    return float(popularity.rows @ (popularity.chance * np.exp(-popularity.chance * lookups)))


def _fit_power_law_steepness(use_counts: Floats, row_counts: Floats) -> float:
    """Fit 1 / a for chances that fall as rank ** -a: the slope of the number of rows with at least a given count."""
    at_least = np.cumsum(row_counts[::-1])[::-1]
    is_used = (use_counts >= 2) & (at_least >= 5)
    if is_used.sum() < 3:
        return 1.0
    x = np.log(use_counts[is_used])
    y = np.log(at_least[is_used])
    weights = np.sqrt(row_counts[is_used])
    x = x - np.average(x, weights=weights)
    slope = float(np.sum(weights * x * y) / np.sum(weights * x * x))
    return float(np.clip(-slope, 0.2, 2.0))


def _solve_falling_function(
    function: Callable[[float], float],
    target_value: float,
    lowest_argument: float,
    highest_argument: float,
) -> float:
    """Find the argument at which a falling function takes a value, by bisection; the nearer end if there is none."""
    low = lowest_argument
    high = highest_argument
    if function(low) <= target_value:
        return low
    if function(high) >= target_value:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        if function(middle) > target_value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _merge_popularity_bins(popularity: Popularity) -> Popularity:
    """Merge bins with neighbouring chances, to about HEAD_BINS + TAIL_BINS bins."""
    order = np.argsort(-popularity.chance, kind="stable")
    rows = popularity.rows[order]
    mass = (popularity.rows * popularity.chance)[order]
    if len(rows) > HEAD_BINS + TAIL_BINS:
        ranks = np.cumsum(rows)
        bins = np.floor(np.log(ranks) * HEAD_BINS / np.log(ranks[-1] + 2)).astype(np.int64)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        rows = np.add.reduceat(rows, starts)
        mass = np.add.reduceat(mass, starts)
    return Popularity(rows, mass / rows / mass.sum())
