"""Predicted messages of cached rows against those that directories of several ranks and their owners decide."""

from __future__ import annotations

import numpy as np
import pytest

from colonnade.cache.directory import EXPIRED, HIT, MISS, Directory, VersionLog
from colonnade.plan.measure.popularity import Popularity, predict_cache_load
from colonnade.staleness import RowClock, TableCache

RECORD_BYTES, GRADIENT_BYTES, ID_BYTES, AGE_BYTES = 64, 32, 3, 2
STREAMS = {"zipf": (3000, 400, 1.1), "uniform": (1200, 240, 0.0)}
"""Rows, lookups of a batch, and exponent of the popularity."""


def draw_popularity(stream: str) -> tuple[np.ndarray, Popularity]:
    """Return each row's chance, and the same in bins of neighbouring rows."""
    num_rows, _, exponent = STREAMS[stream]
    chance = np.arange(1.0, num_rows + 1) ** -exponent
    chance /= chance.sum()
    starts = np.unique(np.geomspace(1, num_rows, 120).astype(int)) - 1
    rows = np.diff([*starts, num_rows]).astype(float)
    return chance, Popularity(rows, np.add.reduceat(chance, starts) / rows)


def predict(popularity, lookups, cache, num_ranks, batches):
    unique = popularity.unique(lookups)
    return predict_cache_load(popularity, lookups, unique, cache, num_ranks, batches, RECORD_BYTES)


def count_messages(
    stream: str, cache: TableCache, num_ranks: int, batches: tuple[int, int]
) -> dict[str, float]:
    """Count the rows in messages of a rank in a batch, the mean."""
    num_rows, lookups, _ = STREAMS[stream]
    chance, _ = draw_popularity(stream)
    random = np.random.default_rng(3)
    ids_by_rank = random.permutation(num_rows)
    ends = chance.cumsum() / chance.sum()
    directories = [Directory(cache.rows, cache.clock, cache.policy) for _ in range(num_ranks)]
    log = VersionLog([num_rows])
    counts = dict.fromkeys(("listed", "renewed", "fetched", "pushed"), 0)
    for number in range(batches[1]):
        decisions = []
        for directory in directories:
            ids = np.unique(ids_by_rank[np.searchsorted(ends, random.random(lookups))])
            decisions.append((ids, directory.decide_batch(ids)))
        for ids, decision in decisions if number >= batches[0] else ():
            is_expired = decision.outcomes == EXPIRED
            age = decision.ages[is_expired]
            changed = log.has_changed_since(0, ids[is_expired], decision.number - age)
            sent = changed.sum() if cache.clock.is_late else is_expired.sum()
            num_evicted = len(decision.evicted_ids)
            counts["listed"] += ((decision.outcomes != HIT) | decision.pushed).sum() + num_evicted
            counts["renewed"] += is_expired.sum() if cache.clock.is_late else 0
            counts["fetched"] += (decision.outcomes == MISS).sum() + sent
            counts["pushed"] += decision.pushed.sum() + num_evicted
        for ids, decision in decisions:
            written = np.concatenate([ids[decision.pushed], decision.evicted_ids])
            log.record_row_changes(0, written, decision.number)
    total = num_ranks * (batches[1] - batches[0])
    return {name: float(count) / total for name, count in counts.items()}


def message_bytes(counts: dict[str, float]) -> float:
    return (
        counts["listed"] * ID_BYTES
        + counts["renewed"] * AGE_BYTES
        + counts["fetched"] * RECORD_BYTES
        + counts["pushed"] * GRADIENT_BYTES
    )


def check_prediction(stream, cache, num_ranks, batches):
    counted = count_messages(stream, cache, num_ranks, batches)
    _, popularity = draw_popularity(stream)
    load = predict(popularity, STREAMS[stream][1], cache, num_ranks, batches)
    predicted = {name: getattr(load, name) for name in counted}
    assert message_bytes(predicted) == pytest.approx(message_bytes(counted), rel=0.1), (
        predicted,
        counted,
    )
    return predicted, counted


FAST = [
    ("zipf", 50, 1.0, 4, 1.0, "lru"),
    ("zipf", 5, 0.05, 2, 0.1, "lru"),
    ("zipf", 5, 1.0, 4, 0.1, "lfu"),
    ("uniform", 5, 1.0, 4, 1.0, "lru"),
    ("uniform", 50, 0.05, 2, 0.1, "lru"),
]
GRID = [
    (stream, bound, share, num_ranks, part, "lru")
    for stream in STREAMS
    for bound in (0, 5, 50)
    for share in (1.0, 0.05)
    for num_ranks in (2, 4)
    for part in (0.1, 1.0)
]


@pytest.mark.parametrize(
    ("stream", "bound", "share", "num_ranks", "part", "policy"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in FAST)],
)
def test_messages_are_those_that_directories_decide(stream, bound, share, num_ranks, part, policy):
    rows = int(part * STREAMS[stream][0])
    cache = TableCache(rows, RowClock(bound, bound, share), policy)
    check_prediction(stream, cache, num_ranks, (0, 500))


@pytest.mark.parametrize(
    "rule",
    [RowClock(5, 50), RowClock(50, 5), RowClock(20, 60, 0.3, 8), RowClock(50, 50, 0.05, 4)],
)
def test_bounds_may_differ_and_steps_limit_rows_of_most_batches(rule):
    predicted, counted = check_prediction("zipf", TableCache(3000, rule), 2, (0, 400))
    assert predicted["pushed"] == pytest.approx(counted["pushed"], rel=0.1)


def test_a_run_that_is_under_way_has_fewer_first_uses():
    cache = TableCache(3000, RowClock(20, 20, 0.1))
    _, popularity = draw_popularity("zipf")
    load = predict(popularity, 400, cache, 4, (0, 100))
    predicted, _ = check_prediction("zipf", cache, 4, (300, 400))
    assert predicted["fetched"] < load.fetched and predicted["pushed"] < 0.5 * load.pushed


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_pushes_by_a_share_are_those_of_a_row_that_every_batch_uses(share):
    row = Popularity(np.ones(1), np.ones(1))
    cache = TableCache(1, RowClock(50, 10**6, share))
    load = predict(row, 1e6, cache, 1, (0, 20_000))
    pushes = waiting = 0
    for use in range(1, 20_001):
        waiting += 1
        if waiting > share * use:
            pushes, waiting = pushes + 1, 0
    assert load.pushed * 20_000 == pytest.approx(pushes, rel=0.03)


def test_lookahead_misses_less_than_lru():
    _, popularity = draw_popularity("zipf")
    clock = RowClock(50, 50)
    lru, ahead = (
        predict(popularity, 400, TableCache(300, clock, *policy), 4, (0, 500))
        for policy in (("lru", 0), ("lookahead", 64))
    )
    assert ahead.fetched < 0.7 * lru.fetched


def test_the_measured_number_of_rows_scales_the_result():
    _, popularity = draw_popularity("zipf")
    cache = TableCache(300, RowClock(5, 5))
    load = predict(popularity, 400, cache, 2, (0, 100))
    half = popularity.unique(400) / 2
    scaled = predict_cache_load(popularity, 400, half, cache, 2, (0, 100), RECORD_BYTES)
    assert scaled.listed == pytest.approx(load.listed / 2)
