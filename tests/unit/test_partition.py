"""The tower partitioner: affinity, plane, bounded k-means, and what comes of them for features in planted groups."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import ConfigError, DataError
from colonnade.plan.towers.affinity import (
    Cosines,
    LogitInteractions,
    affinity_distances,
    compute_agreement,
    compute_mean_affinities,
)
from colonnade.plan.towers.partition import (
    Capacity,
    FeatureLoad,
    TowerMap,
    assign_by_local_search,
    assign_by_min_cost_flow,
    assign_to_bins,
    build_tower_map,
    embed_in_plane,
    max_bin_fill,
)
from colonnade.topology.towers import Partition


def loads_of(num: int, *, tables: int | None = None, sizes=None) -> list[FeatureLoad]:
    """Feature i of table i modulo `tables`."""
    tables = tables or num
    return [
        FeatureLoad(f"f{i}", f"t{i % tables}", 100.0 if sizes is None else sizes[i % tables], 1.0)
        for i in range(num)
    ]


def planted(num: int, groups: int, *, noise: float = 0.8, seed: int = 0):
    """Return affinity, and group by feature: vectors of a group's features have a direction in common, sample by
    sample."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(num) % groups
    vectors = rng.normal(size=(256, groups, 16))[:, group]
    vectors = vectors + noise * rng.normal(size=vectors.shape)
    result = Cosines([f"f{i}" for i in range(num)])
    for half in (vectors[:100], vectors[100:]):
        result.add_batch_vectors(list(half.transpose(1, 0, 2)))
    return result.matrix(), group


def purity(result: TowerMap, group) -> float:
    label = np.array([result.partition.tower_of(f"f{i}") for i in range(len(group))])
    return sum(np.bincount(group[label == t]).max() for t in np.unique(label)) / len(group)


def test_affinity_is_the_mean_over_samples_that_have_both():
    rng = np.random.default_rng(1)
    vectors = [rng.normal(size=(40, dim)).astype(np.float32) for dim in (4, 4, 4, 3, 3)]
    vectors[1][::2] = 0.0  # empty bags
    vectors[2][:] = 0.0
    result = Cosines(list("abcde"))
    result.add_batch_vectors(vectors)
    matrix = result.matrix()
    assert result.silent == ("c",) and result.num_samples == 40
    cosines = []
    for s in range(1, 40, 2):
        a, b = (vectors[i][s].astype(np.float64) for i in (0, 1))
        cosines.append(abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b))
    assert matrix[0, 1] == pytest.approx(np.mean(cosines), rel=1e-9)
    assert (np.diag(matrix) == 1).all() and (matrix == matrix.T).all()
    assert (matrix[2, [0, 1, 3, 4]] == 0).all()  # no direction: like nobody
    known = [matrix[0, 1], matrix[3, 4]]  # of one dim; others are taken for the mean of these
    assert matrix[0, 3] == pytest.approx(np.mean(known)) == matrix[1, 4]


def test_vectors_of_any_length_count_alike():
    rng = np.random.default_rng(2)
    subset = [rng.normal(size=(30, 5)) for _ in range(4)]
    result, scaled = Cosines("abcd"), Cosines("abcd")
    result.add_batch_vectors(subset)
    scaled.add_batch_vectors(
        [item * scale for item, scale in zip(subset, (1e-200, 1e200, -3.0, 1.0), strict=True)]
    )
    np.testing.assert_allclose(result.matrix(), scaled.matrix(), rtol=1e-12)


def test_vectors_that_are_not_finite_are_refused():
    bad = np.ones((3, 2))
    bad[1, 1] = math.nan
    with pytest.raises(DataError, match=r"'b'.*not finite"):
        Cosines("ab").add_batch_vectors([np.ones((3, 2)), bad])


def test_interactions_are_scaled_by_what_each_feature_does():
    strong, weak = LogitInteractions("abcd"), LogitInteractions("abcd")
    for factor, result in ((1.0, weak), (100.0, strong)):
        result.add_pair_differences(0, 1, np.array([[3.0], [-5.0]]) * factor)  # of a and b
        result.add_pair_differences(0, 2, np.array([[0.5], [0.5]]))
        result.num_samples += 2
    matrix = weak.matrix()
    assert matrix[0, 1] == 1 == matrix[1, 0], "the largest"
    # Means 4 and 0.5: over the roots of the features' sums 4.5, 4 and 0.5.
    assert matrix[0, 2] == pytest.approx((0.5 / (4.5 * 0.5) ** 0.5) / (4 / (4.5 * 4) ** 0.5))
    assert (np.diag(matrix) == 1).all() and (matrix == matrix.T).all()
    assert weak.silent == ("d",) and (matrix[3, :3] == 0).all()
    assert (strong + weak).num_samples == 4
    np.testing.assert_allclose((strong + strong).matrix(), strong.matrix())
    with pytest.raises(DataError, match=r"'b' and 'd'.*not finite"):
        weak.add_pair_differences(1, 3, np.array([[math.nan]]))


def test_nothing_that_interacts():
    nothing = LogitInteractions("abc")
    nothing.add_pair_differences(0, 1, np.zeros((5, 1)))
    assert nothing.silent == ("a", "b", "c")
    np.testing.assert_array_equal(nothing.matrix(), np.eye(3))
    rounded = LogitInteractions("abc")
    rounded.add_pair_differences(0, 1, np.ones((5, 1)))
    rounded.add_pair_differences(0, 2, np.full((5, 1), 1e-9))
    assert rounded.silent == ("c",)


def test_towers_of_both_halves_are_compared():
    affinity, _ = planted(12, 3)
    same = build_tower_map(affinity, loads_of(12), 3, halves=(affinity, affinity))
    assert same.agreement == 1 and TowerMap.from_json(same.to_json()) == same
    other, _ = planted(12, 3, seed=1)
    different = build_tower_map(affinity, loads_of(12), 3, halves=(affinity, other))
    assert 0 <= different.agreement < 0.5
    # Of pairs in one tower: 01, 23 and 02, 13.
    assert compute_agreement(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])) == 0
    assert compute_agreement(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2])) == 0.5
    assert compute_agreement(np.array([0, 1]), np.array([1, 0])) == 1, "no pairs"


def test_a_map_without_a_kind_is_one_of_cosines():
    affinity, _ = planted(12, 3)
    fields = json.loads(build_tower_map(affinity, loads_of(12), 3).to_json())
    del fields["affinity"], fields["agreement"]
    read = TowerMap.from_json(json.dumps(fields))
    assert read.affinity == "cosine" and read.agreement is None


def test_the_plane_keeps_distances_that_a_plane_can_have():
    points = np.random.default_rng(0).normal(size=(20, 2))
    wanted = np.linalg.norm(points[:, None] - points[None], axis=-1)
    result, stress = embed_in_plane(wanted)
    assert stress < 1e-12
    np.testing.assert_allclose(
        np.linalg.norm(result[:, None] - result[None], axis=-1), wanted, atol=1e-6
    )


def test_majorisation_never_makes_it_worse_than_classical_scaling():
    from colonnade.plan.towers.partition import _stress, classical_scaling

    for seed in range(5):
        rng = np.random.default_rng(seed)
        wanted = rng.uniform(size=(15, 15))
        wanted = (wanted + wanted.T) / 2
        np.fill_diagonal(wanted, 0.0)
        points, stress = embed_in_plane(wanted)
        before = _stress(classical_scaling(wanted, 2), wanted)
        assert stress * (wanted**2).sum() == pytest.approx(_stress(points, wanted))
        assert _stress(points, wanted) < before


@pytest.mark.parametrize("num", [1, 2, 3])
def test_few_or_equal_features_have_places(num):
    for wanted in (np.zeros((num, num)), 1 - np.eye(num)):
        points, stress = embed_in_plane(wanted)
        assert points.shape == (num, 2) and np.isfinite(points).all() and stress < 1e-6


@settings(max_examples=examples(20, 60), deadline=None)
@given(st.integers(0, 10**6))
def test_the_flow_is_the_cheapest_of_all_assignments(seed):
    """Slow twin: every assignment."""
    rng = np.random.default_rng(seed)
    places = int(rng.integers(1, 4))
    num = int(rng.integers(places, 7))
    max_items = int(rng.integers(-(-num // places), num + 1))
    costs = rng.normal(size=(num, places)).round(1)  # with ties
    best = min(
        costs[np.arange(num), list(label)].sum()
        for label in itertools.product(range(places), repeat=num)
        if all(1 <= label.count(p) <= max_items for p in range(places))
    )
    for label in (
        assign_by_min_cost_flow(costs, max_items),
        assign_to_bins(costs, np.ones((num, 2)), np.array([max_items, np.inf])),
    ):
        stored = np.bincount(label, minlength=places)
        assert stored.min() >= 1 and stored.max() <= max_items
        assert costs[np.arange(num), label].sum() == pytest.approx(best)


@settings(max_examples=examples(20, 60), deadline=None)
@given(st.integers(0, 10**6))
def test_the_search_keeps_within_capacities_that_have_room(seed):
    rng = np.random.default_rng(seed)
    places = int(rng.integers(1, 5))
    num = int(rng.integers(places, 20))
    weights = rng.uniform(0, 1, size=(num, 2))
    # Twice the mean and the largest: there is an assignment, by the pigeonhole.
    capacities = 2 * weights.sum(0) / places + 2 * weights.max(0)
    label = assign_by_local_search(rng.normal(size=(num, places)), weights, capacities)
    assert set(label) == set(range(places))
    assert max_bin_fill(label, weights, capacities).max() <= 1 + 1e-6


@pytest.mark.parametrize(("num", "groups"), [(26, 4), (26, 8), (23, 3), (12, 12), (7, 1)])
def test_coherent_towers_are_the_planted_groups(num, groups):
    affinity, group = planted(num, groups)
    result = build_tower_map(affinity, loads_of(num), groups)
    assert purity(result, group) == 1.0
    assert max(result.learned.count) <= -(-num // groups)
    if 1 < groups < num:
        assert result.learned.within > max(result.striped.within, result.random.within)
        assert result.learned.between < min(result.striped.between, result.random.between)


def test_diverse_towers_part_the_planted_groups():
    affinity, group = planted(24, 4)
    result = build_tower_map(affinity, loads_of(24), 4, distance="diverse")
    assert result.learned.within < result.striped.within
    assert purity(result, group) <= 0.5


def test_the_same_input_gives_the_same_towers():
    affinity, _ = planted(26, 4, noise=3.0)
    maps = [build_tower_map(affinity, loads_of(26), 4, seed=s).to_json() for s in (0, 0, 1)]
    assert maps[0] == maps[1]
    firsts = [int(tower[0][1:]) for tower in TowerMap.from_json(maps[0]).partition.towers]
    assert firsts == sorted(firsts)


def test_features_of_a_table_stay_together():
    affinity, _ = planted(26, 4)
    result = build_tower_map(affinity, loads_of(26, tables=9), 4, capacity=Capacity(count=1.3))
    for table in range(9):
        members = {result.partition.tower_of(f"f{i}") for i in range(table, 26, 9)}
        assert len(members) == 1
    assert max(result.learned.count) <= 9
    assert sum(result.learned.bytes) == 900  # a table's bytes count once
    assert sum(result.learned.lookups) == 26


@pytest.mark.parametrize("seed", range(3))
def test_capacity_by_bytes_and_lookups(seed):
    affinity, _ = planted(26, 4, seed=seed)
    rng = np.random.default_rng(seed)
    loads = [
        FeatureLoad(f"f{i}", f"f{i}", float(size), float(lookups))
        for i, (size, lookups) in enumerate(
            zip(rng.uniform(1, 20, 26) ** 2, rng.integers(1, 9, 26), strict=True)
        )
    ]
    capacity = Capacity(count=1.2, bytes=1.5, lookups=1.15)
    stored = build_tower_map(affinity, loads, 4, capacity=capacity).learned
    total = sum(load.table_bytes for load in loads), sum(load.lookups for load in loads)
    assert max(stored.count) <= math.ceil(1.2 * 26 / 4)
    assert max(stored.bytes) <= 1.5 * total[0] / 4 * (1 + 1e-6)
    assert max(stored.lookups) <= 1.15 * total[1] / 4 * (1 + 1e-6)


def test_what_cannot_be_met_is_refused_with_what_could():
    affinity, _ = planted(6, 2)
    sizes = [1000.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"table 't0' alone is 1.99 .* Set bytes=2") as refused:
        build_tower_map(affinity, loads_of(6, sizes=sizes), 2, capacity=Capacity(bytes=1.5))
    assert "got 1.5 for 2 towers" in str(refused.value)
    build_tower_map(affinity, loads_of(6, sizes=sizes), 2, capacity=Capacity(bytes=2))
    # Three tables of two features on two towers: 3 each cannot be.
    with pytest.raises(ConfigError, match=r"capacity by count: got 1 .* Set count=1.34"):
        build_tower_map(affinity, loads_of(6, tables=3), 2)
    assert (
        max(
            build_tower_map(
                affinity, loads_of(6, tables=3), 2, capacity=Capacity(count=1.34)
            ).learned.count
        )
        == 4
    )
    with pytest.raises(ConfigError, match="got 7 towers for 6 features of 6 tables"):
        build_tower_map(affinity, loads_of(6), 7)
    with pytest.raises(ConfigError, match="got 4 towers for 6 features of 3 tables"):
        build_tower_map(affinity, loads_of(6, tables=3), 4)
    for ratio in (0.5, math.nan, math.inf):
        with pytest.raises(ConfigError, match="capacity by bytes"):
            Capacity(bytes=ratio)


def test_features_of_which_nothing_is_known():
    nothing = Cosines([f"f{i}" for i in range(5)])
    nothing.add_batch_vectors([np.zeros((4, 3))] * 5)
    result = build_tower_map(nothing.matrix(), loads_of(5), 2, silent=nothing.silent)
    assert sorted(map(len, result.partition.towers)) == [2, 3] and len(result.silent) == 5
    one = build_tower_map(np.ones((1, 1)), loads_of(1), 1)
    assert one.partition == Partition((("f0",),)) and one.learned.within is None
    assert TowerMap.from_json(one.to_json()) == one


def test_a_map_goes_through_json_and_is_a_partition():
    affinity, _ = planted(13, 3)
    result = replace(build_tower_map(affinity, loads_of(13), 3), made={"step": 7, "samples": 256})
    assert TowerMap.from_json(result.to_json()) == result
    assert Partition.from_json(result.to_json()) == result.partition
    for change in (
        {"places": {}}, {"distance": "near"}, {"stress": "x"}, {"striped": None}, {"made": 3},
        {"places": {name: [math.inf, 0] for name in result.places}},
        {"learned": {"within": 1, "between": 1, "count": [1], "bytes": [1], "lookups": [1]}},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be read"):
            TowerMap.from_json(json.dumps({**json.loads(result.to_json()), **change}))


def test_within_and_between():
    affinity = np.array([[1, 0.5, 0.1], [0.5, 1, 0.2], [0.1, 0.2, 1]])
    assert compute_mean_affinities(affinity, [0, 0, 1]) == pytest.approx((0.5, 0.15))
    assert math.isnan(compute_mean_affinities(affinity, [0, 1, 2])[0])
    np.testing.assert_allclose(affinity_distances(affinity, "coherent")[0], [0, 0.5, 0.9])
    np.testing.assert_allclose(affinity_distances(affinity, "diverse")[0], [0, 0.5, 0.1])
