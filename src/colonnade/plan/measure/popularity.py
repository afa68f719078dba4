"""Popularity of rows, estimated from a sample also for rows that it does not contain, and reads of caches of any size.

A popularity groups the rows of a table into bins: each of the `rows[k]` rows of bin k is looked up with probability
`chance[k]`. Frequent rows of the sample keep their counts. The remaining probability mass (Good and Turing) follows a
power law of rank, with the exponent that reproduces the sample's rate of first uses. Lookups are assumed independent
(independent reference model), so that the reads of a cache of the rows with the highest use counts have a closed form:
P(count >= k) of a Poisson count.

Messages of row caches (`cache.directory`) follow from the same probabilities: closed forms for a row that stays in the
cache, the characteristic time of Che et al. (2002) for evictions. A run's start is part of the means: first uses, and
first sums of gradients, which are sent only after some uses. Eviction policy lfu is predicted as lru.

A *use* of a row is a batch with at least one lookup of it. All functions are pure; floats are float64. Legend: K bins,
E moments of a run, J pushes of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.hops.load import CacheLoad
from colonnade.staleness import RowClock, TableCache

Floats = NDArray[np.float64]

OPEN_ROOM = 1.2
"""Factor of the predicted rows of an open table for which memory is reserved."""
COUNTED = 8
"""Number of lookups in the sample from which a row keeps its count as popularity."""
TAIL_BINS = 64
HEAD_BINS = 96
STEPS = np.linspace(0, 1, TAIL_BINS + 1)
MAX_EXPONENT = 6.0
MAX_BOUND_BATCHES = 1000
"""Batches up to which the chance that a step bound ends a copy or a sum is counted one by one."""
NUM_SPANS = 24
"""Number of spans of a run, in each of which the pushes of a use are constant. Later spans are longer."""
COUNTED_PUSHES = 48
"""Number of pushes of a copy that are counted by the distribution of its uses; later ones by their mean."""
WAITS, WAIT_WEIGHTS = np.polynomial.laguerre.laggauss(4)
"""Nodes and weights of a quadrature that averages over an exponential distribution of mean 1."""
FOREVER = 1e15
"""Number of batches that no run reaches."""
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


def predict_cache_load(
    popularity: Popularity,
    lookups: float,
    unique_rank: float,
    cache: TableCache,
    num_ranks: int,
    batches: tuple[int, int],
    record_bytes: int,
) -> CacheLoad:
    """Predict the mean messages of one rank's cache over the batches from `batches[0]` to before `batches[1]`.

    lookups, unique_rank: lookups, and measured number of distinct rows, of one rank's batch; all of `num_ranks` ranks
    have such a cache. record_bytes: those of a row that an owner sends."""
    clock = cache.clock
    use = np.clip(popularity.use_probability(lookups), 1e-12, 1 - 1e-9)
    lifetime = _solve_lifetime(popularity.rows, use, cache)
    miss = np.maximum(np.exp(lifetime * np.log1p(-use)), 1e-15)
    moments = np.geomspace(batches[0] + 1, max(batches) + 2, NUM_SPANS + 1) - 1
    time = moments[:, None]
    # Until the cache is full, rows miss at their first use. Then copies are evicted, too.
    full = min(lifetime, moments[-1])
    filling = np.minimum(time, full)
    evicting = np.maximum(time, full) - full
    read_bound, write_bound = _mean_bounds(use, clock)
    push_uses, growth = _list_push_uses(write_bound, clock.write_share)
    misses = -np.expm1(filling * np.log1p(-use)) + use * miss * evicting
    expired = _count_expired(use, miss, lifetime, read_bound, filling, evicting + full)
    ruled = sum(
        _count_pushes(use, stay, push_uses, write_bound, growth, until)
        for stay, until in ((np.ones_like(use), filling), (1 - miss, evicting + full))
    )
    # A copy that is evicted between two pushes sends its pending gradients.
    pending = 1 - miss * ((1 - miss) ** (push_uses - 1)).sum(0)
    evicted = use * miss * pending * evicting

    spans = np.diff(time, axis=0)
    misses, expired, ruled, evicted = (
        np.diff(counts, axis=0) / spans for counts in (misses, expired, ruled, evicted)
    )
    push_share = np.clip((ruled + evicted) / use, 1e-9, 1.0)
    changed = expired * _predict_changed(use, push_share, read_bound, num_ranks)
    # A row that is requested and pushed in one batch is listed once.
    listed_twice = misses * (push_uses[0] == 1) + expired * np.minimum(ruled / use, 1)
    if lifetime <= cache.window or lifetime < 1:  # Copies leave with the batch that used them.
        listed_twice += (misses + expired) / use * evicted
    weights = popularity.rows * unique_rank / (use @ popularity.rows) * spans / spans.sum()
    return CacheLoad(
        listed=float((weights * (misses + expired + ruled + evicted - listed_twice)).sum()),
        # Without bounds, owners send every requested row.
        renewed=float((weights * expired).sum()) if clock.is_late else 0.0,
        fetched=float((weights * (misses + (changed if clock.is_late else expired))).sum()),
        pushed=float((weights * (ruled + evicted)).sum()),
        record_bytes=record_bytes,
    )


def _solve_lifetime(rows: Floats, use: Floats, cache: TableCache) -> float:
    """Return the number of batches without a use after which copies are evicted; with lookahead, between two uses.

    Lookahead keeps rows until their next use, in the next `window` batches, and others after them."""

    def count_free_rows(log_batches: float) -> float:
        batches = math.exp(log_batches)
        absent = np.exp(batches * np.log1p(-use)) * (1 + min(batches, cache.window) * use)
        return cache.rows - float(rows @ (1 - absent))

    return math.exp(_solve_falling_function(count_free_rows, 0.0, -20.0, math.log(FOREVER)))


def _count_expired(
    use: Floats,
    miss: Floats,
    lifetime: float,
    read_bound: Floats,
    filling: Floats,
    evicting: Floats,
) -> Floats:
    """Return the requests of copies older than `read_bound` batches (K,), (E, K), up to moments before and after the
    cache is full."""
    cycle = read_bound + 1 / use
    ends = use * miss
    # A copy that is evicted earlier than it expires must outlast several uses to expire.
    stay = np.maximum(1 - miss, 1e-300)
    gap = np.maximum((stay - lifetime * ends) / (use * stay), 1)
    often = ends / np.expm1(np.clip(-np.log(stay) / gap * (read_bound + gap), 1e-12, 700))
    rate = np.where(lifetime < read_bound, often, np.maximum(1 / cycle - ends, 0))
    # Renewals begin later than the first use: the renewal theorem's constant.
    delay = (cycle - (1 - use) / use**2 / cycle) / 2
    before, after = (np.maximum(time - delay, 0) for time in (filling, evicting))
    later_uses, uses = (use * time + np.expm1(time * np.log1p(-use)) for time in (before, after))
    return np.asarray((later_uses / cycle + uses * rate) / use)


def _mean_bounds(use: np.ndarray, clock: RowClock) -> tuple[np.ndarray, np.ndarray]:
    """Return the read and write bounds, in batches, that rows of these use probabilities have in the mean.

    Under `step_bound` a copy or a sum ends at a use that follows the one before by `gap` batches, with the probability
    1 - (1 - use)**gap that the distance is no longer, once it is old enough for that gap."""
    bounds = [np.full_like(use, bound) for bound in (clock.read_bound, clock.write_bound)]
    step_bound = clock.step_bound
    if step_bound is None:
        return bounds[0], bounds[1]
    survival = np.ones_like(use)
    age = np.ones_like(use)
    for batch in range(1, min(clock.read_bound, MAX_BOUND_BATCHES) + 1):
        gap = (math.isqrt(1 + 4 * step_bound * batch) - 1) // (2 * step_bound)
        survival = survival * (1 - use * (1 - (1 - use) ** gap))
        age += survival
    rest = max(0, clock.read_bound - MAX_BOUND_BATCHES)
    reads = np.maximum(0, age + survival * (rest + 1 / use - 1) - 1 / use)
    survival = np.ones_like(use)
    writes = np.zeros_like(use)
    for ticks in range(1, min(clock.write_bound, MAX_BOUND_BATCHES) + 1):
        survival = survival * (1 - use) ** ((ticks - 1) // step_bound)
        writes += survival
    writes += survival * max(0, clock.write_bound - MAX_BOUND_BATCHES)
    return np.rint(reads), np.rint(writes)


def _list_push_uses(write_bound: Floats, write_share: float) -> tuple[Floats, float]:
    """Return the number of uses of a copy with each of its first pushes by the write rule, (J, K), and the number of
    pending batches that the share allows for each use before them."""
    growth = max(write_share / max(1 - write_share, 1e-9), 1e-9)
    uses = [write_bound * (write_share == 1) + 1]
    for _ in range(COUNTED_PUSHES - 1):
        uses.append(uses[-1] + np.floor(np.minimum(write_bound, growth * uses[-1] + 1e-9)) + 1)
    return np.stack(uses), growth


def _count_pushes(
    use: Floats, stay: Floats, push_uses: Floats, write_bound: Floats, growth: float, time: Floats
) -> Floats:
    """Return the pushes by the write rule in the first `time` batches, (E, K), of copies with a next use with
    probability `stay`."""
    mean = use * time
    last = push_uses[-1]
    # Later pushes grow with the logarithm of uses, then by the write bound.
    bounded = np.maximum(write_bound / growth, last)
    between = np.clip(mean, last, bounded)
    later = np.log((growth * between + 1) / (growth * last + 1)) / growth
    later += np.maximum(mean - bounded, 0) / (write_bound + 1)
    pushes: Floats = stay ** (last - 1) * later
    for count in push_uses:
        chance = _chance_of_uses(count, use, time)
        if (stay < 1).any():  # Further copies of the row begin to count anew.
            more = mean * chance - count * _chance_of_uses(count + 1, use, time)
            chance = chance + (1 - stay) * np.maximum(more, 0)
        pushes += stay ** (count - 1) * chance
    return pushes


def _predict_changed(use: Floats, push_share: Floats, read_bound: Floats, num_ranks: int) -> Floats:
    """Return the probability that a rank has pushed a row since a copy that expires now was read, (E, K)."""
    unchanged = np.zeros_like(push_share)
    for wait, weight in zip(WAITS, WAIT_WEIGHTS, strict=True):
        age = read_bound + 1 + (1 / use - 1) * wait
        unchanged += weight * _chance_of_no_push(use, push_share, age) ** (num_ranks - 1)
    # The rank itself used the row when it read it, which may have been a push, and then not after `read_bound`.
    other_uses = push_share / np.maximum(1 - push_share, 1e-9)
    return 1 - (1 - push_share) * _chance_of_no_push(use, other_uses, read_bound) * unchanged


def _chance_of_no_push(use: Floats, push_share: Floats, batches: Floats) -> Floats:
    """Return the probability that none of `batches` batches of a rank pushes a row, if uses are pushed at equal
    intervals."""
    fewer_uses, uses = (1 - _chance_of_uses(1 / push_share + more, use, batches) for more in (1, 0))
    return np.clip(fewer_uses - push_share * use * batches * uses, 0.0, 1.0)


def _chance_of_uses(count: Floats, use: Floats, batches: Floats) -> Floats:
    """Return the probability that `batches` batches use a row `count` times or more: by a gamma distribution with the
    mean and the variance of the binomial one."""
    shape = np.maximum((count - use / 2) / (1 - use), 1e-300)
    scaled = use * batches / (1 - use)
    return np.asarray(torch.special.gammainc(torch.tensor(shape), torch.tensor(scaled)))


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
