"""How often each row of a table is used, estimated from a sample, beyond what the sample saw; and what that means for
a cache of any size at any time of a run.

The rows of a table are bins: `rows[k]` rows of which each lookup names one with probability `chance[k]`. Rows that
the sample saw often are counted; the mass of the others (Good and Turing) lies on a power law of rank whose
exponent makes the rate of first touches that of the sample. Lookups are taken as independent (the independent
reference model), so that cache curves have closed forms: Che's for LRU, and for a cache that keeps the rows
it has counted most uses of, with P(count >= k) of a Poisson count.

A *use* is a batch that looks a row up, however often. All functions are pure; floats are float64. Legend: K bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OPEN_ROOM = 1.2
"""Of an open table: room for so many times the rows that are foretold."""
COUNTED = 8
"""A row seen at least this often in the sample is taken as it was counted."""
TAIL_BINS = 64
HEAD_BINS = 96
STEPS = np.linspace(0, 1, TAIL_BINS + 1)
MAX_EXPONENT = 6.0
THRESHOLDS = np.unique(np.round(np.geomspace(1, 2.0**24, 80))).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    rows: Floats  # (K,)
    chance: Floats  # (K,) of one lookup to name one of these rows: sum(rows * chance) = 1

    def uses(self, lookups: float) -> Floats:
        """(K,) chance of a row to be in a batch of so many lookups."""
        return -np.expm1(-self.chance * lookups)

    def unique(self, lookups: float) -> float:
        """Different rows among so many lookups."""
        return float(self.rows @ self.uses(lookups))


def popularity(counts: Floats, table_rows: int | None) -> Popularity:
    """From how often each row of the sample was seen, (N,) of at least 1, in any order.

    `table_rows`: of a vocabulary table, whose rows not seen are there too; None: nobody knows how many there are.
    """
    values, rows = np.unique(np.asarray(counts, dtype=np.float64), return_counts=True)
    return from_spectrum(values, rows.astype(np.float64), table_rows)


def from_spectrum(values: Floats, rows: Floats, table_rows: int | None) -> Popularity:
    """As `popularity`: `rows[i]` rows were seen `values[i]` times each; values ascend."""
    total = float(values @ rows)
    if total == 0:
        return Popularity(np.array([float(table_rows or 1)]), np.array([1.0 / (table_rows or 1)]))
    steepness = _steepness(values, rows)
    counted = values >= COUNTED
    seen = float(rows.sum())
    if table_rows is not None and seen >= table_rows and not (values < 3).any():
        counted[:] = True  # every row was seen, often enough
    # A row counted r times is rather one that is expected a little less often (regression to the mean).
    expected = np.where(counted, np.maximum(values - steepness, values / 2), 0.0)
    if counted.all():
        expected = values
    head_rows, head_mass = rows[counted], (expected * rows)[counted] / total
    head = Popularity(head_rows, head_mass / np.maximum(head_rows, 1e-300))
    mass = 1.0 - float(head_mass.sum())
    num_head = float(head_rows.sum())
    if counted.all() or mass <= 1e-12:
        return _thinned(head)
    singles = float(rows[values == 1].sum())
    wanted = min(singles / total, mass)  # the chance that the next lookup is of a row never seen
    num_seen_tail = seen - num_head
    if table_rows is not None:
        most = max(float(table_rows) - num_head, num_seen_tail)
        exponent = _solve(
            lambda a: _unseen(_tail(num_head, most, mass, a), total), wanted, 0.0, MAX_EXPONENT
        )
    else:  # both the number of rows and the exponent: from the rate at the end of the sample and before
        least = np.log(max(num_seen_tail, 1.0))

        def size_for(exponent: float) -> float:
            return float(np.exp(_solve(
                lambda x: -_unseen(_tail(num_head, np.exp(x), mass, exponent), total),
                -wanted, least, least + 16,
            )))  # fmt: skip

        def miss(exponent: float) -> float:
            tail = _tail(num_head, size_for(exponent), mass, exponent)
            return sum(
                (np.log((_unseen(tail, total * part) + _unseen(head, total * part)) / rate)) ** 2
                for part, rate in earlier
            )

        parts = (0.125, 0.25, 0.5)
        earlier = [
            (part, float(rows @ (values * (1 - part) ** (values - 1))) / total) for part in parts
        ]
        earlier = [(part, rate) for part, rate in earlier if rate > 0]
        exponent = min(np.linspace(0.0, 3.0, 13).tolist(), key=miss)
        around = np.linspace(max(exponent - 0.2, 0.0), exponent + 0.2, 9)
        exponent = min(around.tolist(), key=miss)
        most = size_for(exponent)
    tail = _tail(num_head, most, mass, exponent)
    return _thinned(
        Popularity(
            np.concatenate([head.rows, tail.rows]), np.concatenate([head.chance, tail.chance])
        )
    )


def births(of: Popularity, lookups: float, batches: float) -> float:
    """Rows of the next batch that none of `batches` batches before it named."""
    use = of.uses(lookups)
    return float(of.rows @ (use * _never(use, batches)))


def seen(of: Popularity, lookups: float, batches: float) -> float:
    """Different rows of so many batches."""
    return float(of.rows @ -np.expm1(batches * np.log1p(-np.minimum(of.uses(lookups), 1 - 1e-12))))


def counting_curve(
    of: Popularity, lookups: float, batches: float, epoch: float = math.inf
) -> tuple[Floats, Floats]:
    """A cache that keeps the rows with most uses so far: (capacity, reads of the next batch), ascending capacity.

    Reads are of rows that are at rest; those never used before are born, not read. Straight lines between the
    points are what a cache does that holds some of the rows of one count. `epoch`: batches after which the same samples
    come again, and with them just the rows that they have named, as often as before.
    """
    use = of.uses(lookups)
    expected = torch.from_numpy(use * min(batches, epoch))
    most = max(float(expected.max()) * 2 + 20, 2.0)
    thresholds = THRESHOLDS[THRESHOLDS <= most]
    thresholds = np.append(thresholds, most)
    held = _at_least(thresholds, expected)
    at_rest, hits = held[0], held
    if batches >= epoch:
        # A row used C times in an epoch has C uses in the next: C of weight C is C - 1 of weight 1, and one more.
        at_rest, hits = np.ones(len(use)), _at_least(thresholds - 1, expected)
    capacity = held @ of.rows
    reads = np.maximum((at_rest - hits) @ (of.rows * use), 0.0)
    capacity, reads = (
        np.append(capacity, 0.0)[::-1],
        np.append(reads, at_rest @ (of.rows * use))[::-1],
    )
    return capacity, reads


def _at_least(thresholds: Floats, expected: torch.Tensor) -> Floats:
    """(len(thresholds), K) P(Poisson(m) >= k): the regularised lower incomplete gamma function of (k, m)."""
    found = torch.special.gammainc(
        torch.from_numpy(thresholds)[:, None].clamp_min(1e-300),
        expected.clamp_min(1e-300)[None, :],
    ).numpy()
    found[thresholds == 0] = 1.0
    return found


def recency_curve(
    of: Popularity, lookups: float, batches: float, epoch: float = math.inf
) -> tuple[Floats, Floats]:
    """As `counting_curve` of a cache that keeps the rows used last (Che's approximation)."""
    use, batches = of.uses(lookups), min(batches, epoch)
    back = np.append(np.geomspace(0.05, max(batches, 0.1), 96), batches) if batches else np.zeros(1)
    logs = np.log1p(-np.minimum(use, 1 - 1e-12))
    held = -np.expm1(np.sort(back)[:, None] * logs[None, :])
    capacity = held @ of.rows
    reads = np.maximum((held[-1:] - held) @ (of.rows * use), 0.0)
    return np.insert(capacity, 0, 0.0), np.insert(reads, 0, held[-1] @ (of.rows * use))


def best_curve(of: Popularity, lookups: float) -> tuple[Floats, Floats]:
    """A cache that holds the rows used most from the start, as one who knows all chances would: (capacity, misses of
    a batch), first touches included."""
    order = np.argsort(-of.chance, kind="stable")
    use = of.uses(lookups)[order]
    capacity = np.concatenate([[0.0], np.cumsum(of.rows[order])])
    hits = np.concatenate([[0.0], np.cumsum(of.rows[order] * use)])
    return capacity, hits[-1] - hits


def _never(use: Floats, batches: float) -> Floats:
    return np.exp(batches * np.log1p(-np.minimum(use, 1 - 1e-12)))


def _tail(num_head: float, num_rows: float, mass: float, exponent: float) -> Popularity:
    """Rows of ranks num_head .. num_head + num_rows, of chances proportional to rank ** -exponent, `mass` together."""
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
    return Popularity(rows, mass * weights / weights.sum() / rows)


def _unseen(of: Popularity, lookups: float) -> float:
    """The chance that a lookup names a row that so many before it did not."""
    return float(of.rows @ (of.chance * np.exp(-of.chance * lookups)))


def _steepness(values: Floats, rows: Floats) -> float:
    """1 / a where chances fall as rank ** -a, by the slope of how many rows were seen at least so often."""
    at_least = np.cumsum(rows[::-1])[::-1]
    use = (values >= 2) & (at_least >= 5)
    if use.sum() < 3:
        return 1.0
    x, y = np.log(values[use]), np.log(at_least[use])
    weights = np.sqrt(rows[use])
    x = x - np.average(x, weights=weights)
    slope = float(np.sum(weights * x * y) / np.sum(weights * x * x))
    return float(np.clip(-slope, 0.2, 2.0))


def _solve(falling, wanted: float, low: float, high: float) -> float:
    """Where a falling function takes a value, or the nearer end."""
    if falling(low) <= wanted:
        return low
    if falling(high) >= wanted:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        if falling(middle) > wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _thinned(of: Popularity) -> Popularity:
    """At most HEAD_BINS + TAIL_BINS bins, neighbours in chance taken together."""
    order = np.argsort(-of.chance, kind="stable")
    rows, mass = of.rows[order], (of.rows * of.chance)[order]
    if len(rows) > HEAD_BINS + TAIL_BINS:
        ranks = np.cumsum(rows)
        bins = np.floor(np.log(ranks) * HEAD_BINS / np.log(ranks[-1] + 2)).astype(np.int64)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        rows, mass = np.add.reduceat(rows, starts), np.add.reduceat(mass, starts)
    return Popularity(rows, mass / rows / mass.sum())
