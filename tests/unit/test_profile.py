"""Profiles of a sample: curves against plain simulations, extrapolations against the law that made the sample."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade import Feature, Table
from colonnade.batch import Batch, Ids
from colonnade.errors import ConfigError, CorruptionError
from colonnade.plan.measure.popularity import (
    Popularity,
    estimate_from_spectrum,
    expected_used_rows,
    predict_counting_cache_reads,
)
from colonnade.plan.measure.profile import (
    FeatureProfile,
    Profile,
    count_unique_by_size,
    profile_batches,
    profile_ids,
)


def zipf(rows: int, exponent: float, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (count,) and probabilities (rows,)."""
    chance = np.arange(1, rows + 1) ** -float(exponent)
    chance /= chance.sum()
    drawn = np.random.default_rng(seed).random(count)
    return np.searchsorted(np.cumsum(chance), drawn).clip(0, rows - 1), chance


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("rows", "exponent"), [(100_000, 1.1), (100_000, 0.8), (200, 1.0)])
def test_popularity_foretells_what_the_law_says_four_samples_on(rows, exponent, known):
    count, lookups = 60_000, 2048
    ids, chance = zipf(rows, exponent, count)
    values, counts = np.unique(np.unique(ids, return_counts=True)[1], return_counts=True)
    result = estimate_from_spectrum(
        values.astype(float), counts.astype(float), rows if known else None
    )
    true = Popularity(np.ones(rows), chance)
    assert result.rows @ result.chance == pytest.approx(1)
    batches = 4 * count / lookups
    close = 0.05 if known else 0.3
    assert result.unique(lookups) == pytest.approx(true.unique(lookups), rel=0.02)
    assert expected_used_rows(result, lookups, batches) == pytest.approx(
        expected_used_rows(true, lookups, batches), rel=close
    )
    own, law = (predict_counting_cache_reads(of, lookups, batches) for of in (result, true))
    for share in (1 / 16, 1 / 8):
        miss = np.interp(rows * share, *own), np.interp(rows * share, *law)
        assert miss[0] == pytest.approx(miss[1], rel=close, abs=2)


def test_a_counting_cache_does_what_its_curve_says():
    """Against a simulation: keep the rows with most uses so far, count reads of rows used before and not kept."""
    rows, lookups, batches = 3000, 200, 150
    _, chance = zipf(rows, 0.9, 1)
    random, uses, reads = np.random.default_rng(1), np.zeros(rows), []
    for number in range(batches + 40):
        batch = np.unique(random.choice(rows, lookups, p=chance))
        retained = np.argsort(-uses - random.random(rows) * 0.5)[:600]
        if number >= batches:
            reads.append(int(((uses[batch] > 0) & ~np.isin(batch, retained)).sum()))
        uses[batch] += 1
    curve = predict_counting_cache_reads(Popularity(np.ones(rows), chance), lookups, batches + 20)
    assert np.interp(600, *curve) == pytest.approx(np.mean(reads), rel=0.08)


@pytest.mark.parametrize("kept_rows", [100, 600, 1500])
def test_a_later_epoch_reads_what_the_first_left(kept_rows):
    """The same samples in another order: nothing is born, and a row used once is read once. A little more is read than
    the curve says, which does not follow counts inside an epoch: what has just had its use pushes out what has not."""
    rows, lookups, epoch = 3000, 200, 60
    _, chance = zipf(rows, 0.9, 1)
    random, uses, reads = np.random.default_rng(2), np.zeros(rows), []
    data = random.choice(rows, lookups * epoch, p=chance)
    for number in range(3 * epoch):
        if number % epoch == 0:
            random.shuffle(data)
        batch = np.unique(data[number % epoch * lookups :][:lookups])
        retained = np.argsort(-uses - random.random(rows) * 0.5)[:kept_rows]
        if number >= epoch:
            assert (uses[batch] > 0).all()
            reads.append(int((~np.isin(batch, retained)).sum()))
        uses[batch] += 1
    curve = predict_counting_cache_reads(
        Popularity(np.ones(rows), chance), lookups, 2 * epoch, epoch
    )
    assert np.interp(kept_rows, *curve) == pytest.approx(np.mean(reads), rel=0.25, abs=0.5)


def test_curves_fall():
    for exponent in (0.0, 1.0, 2.0):
        of = Popularity(np.ones(500), zipf(500, exponent, 1)[1])
        for epoch in (9.5, math.inf):
            curve = predict_counting_cache_reads(of, 50, 20, epoch)
            assert (np.diff(curve[0]) >= 0).all() and (np.diff(curve[1]) <= 1e-9).all()
            assert curve[1][-1] == pytest.approx(0, abs=1e-6)


def test_a_profile_of_batches_counts_what_is_looked_up():
    tables = [
        Table("item", {"deep": 4, "wide": 1}, rows=100, dtype="bfloat16"),
        Table("user", 8),
        Table("unused", 2, rows=5),
    ]
    features = [Feature("a", "item"), Feature("b", "item"), Feature("c", "user")]
    bag = Ids(torch.tensor([7, 7, 8]), torch.tensor([0, 1, 1, 3]))
    batch = Batch(
        3,
        torch.zeros(3, 0),
        {"a": Ids(torch.tensor([1, 2, 1])), "b": bag, "c": Ids(torch.tensor([5, -(2**63), 5]))},
    )
    result = profile_batches(tables, features, [batch, batch])
    assert (result.samples, result.batches) == (6, 2)
    item, user, unused = result.tables
    assert item.lookups == 12 and result.lookups_per_sample(0) == 2
    assert item.unique_per_batch == 4 and item.rows == 4
    assert item.spectrum == ((2, 4), (2, 2))  # 2 and 8 twice; 1 and 7 four times
    assert user.rows == 2 and unused.lookups == 0 and unused.rows == 0
    assert Profile.from_json(result.to_json()) == result
    with pytest.raises(ConfigError, match="no samples"):
        profile_batches(tables, features, [])


@pytest.mark.parametrize(
    "harm",
    [
        {"spectrum": [[1, 2], [3]]},
        {"spectrum": [[2, 1], [3, 4]]},
        {"spectrum": None},
        {"spectrum": []},
        {"unique": [[1.0], ["many"]]},
        {"listing": [[1.0], [1.0]]},
        {"lookups": -1},
        {"unique_per_batch": math.nan},
    ],
)
def test_damaged_profiles_are_refused(harm):
    profile = Profile(10, 1, (profile_ids("t", np.arange(10), 10.0),), 10)
    fields = json.loads(profile.to_json())
    fields["tables"][0] |= harm
    with pytest.raises(CorruptionError, match=r"profile: got values that no profile has .* wanted"):
        Profile.from_json(json.dumps(fields))


def test_nothing_and_one_lookup_have_a_profile():
    for ids in (np.zeros(0, np.int64), np.array([-5])):
        result = profile_ids("t", ids, float(len(ids)))
        of = result.popularity(10)
        assert of.rows @ of.chance == pytest.approx(1)
        assert (predict_counting_cache_reads(of, 4, 3)[1] >= 0).all()


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=30),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_unique_rows_of_pieces_are_those_of_sets(bags, first, second):
    ids = np.array([item for bag in bags for item in bag], dtype=np.int64)
    offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags])])
    owner = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
    sizes = sorted({first, second})
    result = count_unique_by_size(ids, owner, sizes, len(bags))
    for size, count in zip(sizes, result.tolist(), strict=True):
        runs = [bags[k * size : (k + 1) * size] for k in range(len(bags) // size)]
        assert count == sum(len({item for bag in run for item in bag}) for run in runs)
    batch = Batch(len(bags), torch.zeros(len(bags), 0), {"f": Ids(torch.from_numpy(ids), offsets)})
    result = profile_batches([Table("t", 4)], [Feature("f", "t")], [batch])
    of = result.tables[0]
    assert of.unique[1][-1] == len(set(ids.tolist())) and of.unique[0][-1] == len(bags)
    assert result.features == (FeatureProfile("f", len(ids), max(map(len, bags)), False),)
    assert Profile.from_json(result.to_json()) == result


def test_unique_rows_of_a_rank_are_foretold_within_a_percent():
    """Prediction is from other batches, at sizes that were counted and between them; of a large table, a small one, an
    open one."""
    tables = [Table("big", 4, rows=5000), Table("small", 4, rows=40), Table("open", 4)]
    features = [Feature(table.name, table.name) for table in tables]

    def batch(seed):
        laws = ((5000, 0.8), (40, 0.5), (100_000, 1.05))
        drawn = [
            torch.from_numpy(zipf(*law, 600, seed=9 * seed + k)[0]) for k, law in enumerate(laws)
        ]
        ids = {table.name: Ids(other) for table, other in zip(tables, drawn, strict=True)}
        return Batch(600, torch.zeros(600, 0), ids)

    result = profile_batches(tables, features, [batch(seed) for seed in range(40)])
    others = [batch(seed) for seed in range(40, 100)]
    for t, table in enumerate(tables):
        of = result.tables[t].popularity(table.rows)
        for size in (600, 300, 200, 50):
            counted = np.mean([
                len(other.ids[table.name].values[start : start + size].unique())
                for other in others for start in range(0, 600, size)
            ])  # fmt: skip
            assert result.expected_unique_rows(t, size, of) == pytest.approx(counted, rel=0.01)
