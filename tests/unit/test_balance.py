"""Tables over ranks and hosts: even in bytes and in lookups, quickly, whatever the numbers."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import ConfigError
from colonnade.topology.balance import (
    TableLoad,
    balanced,
    host_wise_shardings,
    table_wise_shardings,
)
from colonnade.topology.world import World


def loads_of(bytes_, lookups):
    return [
        TableLoad(bytes=float(b), lookups=float(n)) for b, n in zip(bytes_, lookups, strict=True)
    ]


def least_peak(loads, num_places):
    """No layout is less full, of shares of everything: one table is on one place, and the fullest has the mean."""
    found = 1 / num_places
    for values in zip(*((each.bytes, each.lookups) for each in loads), strict=True):
        if sum(values) > 0:
            found = max(found, max(values) / sum(values))
    return found


def peak(loads, found, num_places):
    totals = np.zeros((num_places, 2))
    for place, each in zip(found.places, loads, strict=True):
        totals[place] += each.bytes, each.lookups
    assert np.allclose(totals[:, 0], found.bytes) and np.allclose(totals[:, 1], found.lookups)
    whole = totals.sum(0)
    return float((totals / np.where(whole > 0, whole, 1)).max())


AMOUNT = st.floats(0, 1e9) | st.just(0.0) | st.just(1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(AMOUNT, AMOUNT), min_size=1, max_size=40), st.integers(1, 9))
def test_every_table_has_a_place_and_none_is_too_full(pairs, num_places):
    loads = loads_of(*zip(*pairs, strict=True))
    found = balanced(loads, num_places)
    assert len(found.places) == len(loads) and set(found.places) <= set(range(num_places))
    # Of two loads at once, list scheduling gives at most the mean of both and the longest of each.
    assert (
        peak(loads, found, num_places) <= 2 / num_places + 2 * least_peak(loads, num_places) + 1e-9
    )
    assert balanced(loads, num_places) == found


def test_known_layouts():
    equal = loads_of([1] * 12, [1] * 12)
    assert balanced(equal, 4).imbalance == pytest.approx(1.0)
    # Large tables that are rarely asked for go with small ones that often are.
    opposed = loads_of([9, 9, 1, 1], [1, 1, 9, 9])
    found = balanced(opposed, 2)
    assert found.bytes == (10.0, 10.0) and found.lookups == (10.0, 10.0)
    # Longest first alone gives 11 here: 5, 5, 4, 4, 3, 3, 3 over 3 places; the best is 9.
    assert max(balanced(loads_of([5, 5, 4, 4, 3, 3, 3], [0] * 7), 3).bytes) == 9.0
    beside = loads_of([100, 0], [100, 0])
    assert set(balanced(loads_of([10, 10], [10, 10]), 2, beside=beside).places) == {1}
    assert balanced([], 3).imbalance == 1.0


def test_a_thousand_ranks():
    """5,000 tables of sizes as in large models: a second or so, and within a few percent of what can be."""
    random = np.random.default_rng(1)
    loads = loads_of(random.lognormal(0, 0.7, 5000), random.lognormal(0, 0.5, 5000))
    began = time.process_time()
    world = World(num_hosts=125, ranks_per_host=8)
    shardings = table_wise_shardings(loads, world)
    hosts = host_wise_shardings(loads, world)
    assert time.process_time() - began < 4
    places = [sharding.ranks[0] for sharding in shardings]
    assert set(places) == set(range(1000))
    found = balanced(loads, 1000)
    assert found.places == tuple(places)
    assert peak(loads, found, 1000) <= 1.2 * least_peak(loads, 1000)
    by_host = balanced(loads, 125)
    assert peak(loads, by_host, 125) <= 1.05 * least_peak(loads, 125)
    assert [sharding.ranks for sharding in hosts] == [
        tuple(range(8 * host, 8 * host + 8)) for host in by_host.places
    ]


def test_refusals():
    with pytest.raises(ConfigError, match="got 0 places"):
        balanced([], 0)
    with pytest.raises(ConfigError, match="below 0 or not finite"):
        balanced(loads_of([1, -1], [1, 1]), 2)
    with pytest.raises(ConfigError, match="below 0 or not finite"):
        balanced(loads_of([1, float("nan")], [1, 1]), 2)
    with pytest.raises(ConfigError, match="loads of 1 places, wanted 2"):
        balanced([], 2, beside=loads_of([1], [1]))
