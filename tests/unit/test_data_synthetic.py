"""The made stream against its definition, sample by sample in plain Python, and the laws it promises."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import open_source
from colonnade.data.counter import GAMMA, random_permutation
from colonnade.data.sets.synthetic import (
    CHUNK,
    CRITEO_CARDINALITIES,
    HALF_EFFECT_RANK,
    KNOT_BITS,
    MAX_LENGTH,
    TEST_START,
    ClickDistribution,
    SyntheticField,
    SyntheticSource,
    _build_id_field,
    compute_logit_terms,
    draw_samples,
    open_synthetic,
)
from colonnade.errors import ConfigError
from colonnade.train.metrics import auc, best_possible_metrics


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return open_synthetic(num_train=50_000, num_test=50_000).train


def test_the_default_stream_is_what_it_was():
    """Figures that were measured on it are quoted: its bits are for ever. Of the probabilities those that float32 has:
    the last bit of an exponential is another on processors with AVX-512."""
    result = hashlib.sha256()
    parts = open_synthetic()
    for source in (parts.train, parts.test):
        batch = source.read(3000, 9000)
        ids = [column.values for column in batch.ids.values()]
        for tensor in (batch.dense, batch.label, batch.key.float(), *ids):
            result.update(tensor.numpy().tobytes())
    assert result.hexdigest() == "fc8827946d344d10d96e4b364d6c692813ba2ee3224407c1329f35d1809d5540"


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def word(key: int, sample: int, number: int) -> int:
    """Word `number` of a sample: splitmix64 in whole numbers."""
    return mix((key + GAMMA * (sample * 32 + number)) % 2**64)


def pick(field: SyntheticField, bits: int) -> tuple[int, int]:
    """32 bits -> popularity rank, id."""
    knot, rest = divmod(bits, 1 << (32 - KNOT_BITS))
    rank = int(field.knots[knot] + field.slopes[knot] * rest)
    return rank, (rank * field.spread + field.shift) % field.rows


def half(key: int, sample: int, first: int, i: int) -> int:
    return word(key, sample, first + i // 2) >> (32 if i % 2 == 0 else 0) & 0xFFFFFFFF


def sample_slowly(law: ClickDistribution, sample: int):
    """Dense values, ids by column, probability and label: the module's docstring, written out."""
    dense = [
        float(law.quantiles[word(law.key, sample, 1 + i // 4) >> 16 * (i % 4) & 0xFFFF])
        for i in range(13)
    ]
    picked = [pick(f, half(law.key, sample, 5, i)) for i, f in enumerate(law.fields)]
    bags = []
    for column in law.bags:
        length = word(column.key, sample, 0) % (MAX_LENGTH + 1)
        bags.append([pick(column.field, half(column.key, sample, 1, i)) for i in range(length)])

    def entry_of(field, number):
        return number * field.hash_factor % 2**64 >> 48

    def effect(field, rank, number):
        return float(law.normals[entry_of(field, number)]) / (1 + rank / HALF_EFFECT_RANK)

    logit = law.bias + law.scales["dense"] * sum(
        x * float(w) for x, w in zip(dense, law.dense_weights, strict=True)
    )
    vectors = []
    for field, (rank, number) in zip(law.fields, picked, strict=True):
        logit += law.scales["effects"] * effect(field, rank, number)
        if field.group is not None:
            vectors.append((field.group, law.factors[:, entry_of(field, number)]))
    for i, (group, v) in enumerate(vectors):
        for other, w in vectors[:i]:
            if other == group:
                logit += 2 * law.scales["interaction"] * float(v.astype(float) @ w)
    for column, ids in zip(law.bags, bags, strict=True):
        for rank, number in ids:
            logit += law.scales["bag"] * effect(column.field, rank, number) / len(ids)
    probability = 1 / (1 + math.exp(-logit))
    label = int((word(law.key, sample, 0) >> 11) / 2**53 < probability)
    ids = [n for _, n in picked]
    return dense, ids, [[n for _, n in bag] for bag in bags], probability, label


WORLDS = {
    "default": {},
    "linear": {"label_model": "linear", "cardinalities": [50, 900]},
    "grouped": {
        "label_model": "pairs",
        "cardinalities": [20, 30, 400, 50, 60],
        "groups": [["C1", "C3"], ["C2", "C5"]],
    },
    "everything": {
        "cardinalities": [9, 70],
        "bags": [30, 500],
        "exponent": 0.9,
    },
}


@pytest.mark.parametrize("world", WORLDS)
def test_samples_are_those_of_the_definition(world):
    source = open_synthetic(**WORLDS[world]).train
    batch = source.read(20_000, 20_200)
    one = [c.name for c in source.schema.categorical if c.kind == "one"]
    several = [c.name for c in source.schema.categorical if c.kind != "one"]
    for i in range(batch.size):
        dense, ids, bags, probability, label = sample_slowly(source.distribution, 20_000 + i)
        assert batch.dense[i].tolist() == dense
        assert [int(batch.ids[name].values[i]) for name in one] == ids
        for name, wanted in zip(several, bags, strict=True):
            column = batch.ids[name]
            begin, end = column.offsets[i : i + 2].tolist()
            assert column.values[begin:end].tolist() == wanted
        assert float(batch.key[i]) == pytest.approx(probability, abs=1e-5)
        assert batch.label[i].tolist() == [label]


def test_only_fields_of_a_group_interact():
    """Changing one of them changes what another is worth only inside the group."""
    law = open_synthetic(**WORLDS["grouped"]).train.distribution
    draws = draw_samples(law, 0, 2000)
    rolled = {}
    for f in range(5):
        ids, ranks = draws.ids.copy(), draws.ranks.copy()
        ids[f], ranks[f] = np.roll(ids[f], 1), np.roll(ranks[f], 1)
        rolled[f] = draws._replace(ids=ids, ranks=ranks)

    def pair(f, g):
        ids = rolled[f].ids.copy()
        ids[g] = rolled[g].ids[g]
        return draws._replace(ids=ids)

    def value(of):
        return compute_logit_terms(law, of)["interaction"]

    for f, g in itertools.combinations(range(5), 2):
        joint = value(pair(f, g)) - value(rolled[f]) - value(rolled[g]) + value(draws)
        together = (f, g) in ((0, 2), (1, 4))
        assert (np.abs(joint).max() > 0.1) == together


@given(begin=st.integers(0, 3 * CHUNK), size=st.integers(0, CHUNK + 9))
def test_a_sample_has_the_same_bits_in_any_range(source, begin, size):
    whole, part = source.read(0, 4 * CHUNK + 9), source.read(begin, begin + size)
    rows = slice(begin, begin + size)
    assert torch.equal(part.dense, whole.dense[rows])
    assert torch.equal(part.key, whole.key[rows])
    assert torch.equal(part.label, whole.label[rows])
    assert all(torch.equal(part.ids[f].values, whole.ids[f].values[rows]) for f in whole.ids)


def test_test_samples_never_meet_training_and_do_not_depend_on_its_length(source):
    longer = open_synthetic(num_train=60_000, num_test=50_000)
    assert longer.train.stop <= TEST_START <= longer.test.start
    assert torch.equal(source.read(0, 100).key, longer.train.read(0, 100).key)
    assert torch.equal(
        open_synthetic(num_train=5, num_test=100).test.read(0, 100).key,
        longer.test.read(0, 100).key,
    )


def test_seeds_are_different_worlds(source):
    other = open_synthetic(seed=1).train
    assert not torch.equal(source.read(0, 100).dense, other.read(0, 100).dense)
    assert not np.array_equal(source.distribution.normals, other.distribution.normals)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 10, 583, 20_000, 12_517])
def test_popular_ids_lie_anywhere_but_every_id_once(rows):
    (field,) = open_synthetic(cardinalities=[rows], num_train=1).train.distribution.fields
    ids = (np.arange(rows) * field.spread + field.shift) % rows
    assert sorted(ids) == list(range(rows))
    if rows > 100:  # the ten most popular ids: no two are neighbours
        assert np.diff(np.sort(ids[:10])).min() > 1


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.1, 2.0])
def test_popularity_follows_the_power_law(exponent):
    rows, size = 1000, 200_000
    source = open_synthetic(
        cardinalities=[rows], exponent=exponent, num_train=size, signal=0.0
    ).train
    (field,) = source.distribution.fields
    of_id = np.empty(rows, dtype=np.int64)
    of_id[(np.arange(rows) * field.spread + field.shift) % rows] = np.arange(rows)
    ranks = of_id[source.read(0, size).ids["C1"].values.numpy()]

    def mass_below(x):  # of the density y**-exponent on [1, x)
        return math.log(x) if exponent == 1 else (x ** (1 - exponent) - 1) / (1 - exponent)

    for k in (1, 2, 10, 100, 500, 999):
        expected = mass_below(k + 1) / mass_below(rows + 1)
        error = math.sqrt(expected * (1 - expected) / size)
        assert np.mean(ranks < k) == pytest.approx(expected, abs=4.5 * error + 1e-4)


@given(st.integers(1, 1 << 26), st.floats(0, 8))
def test_no_word_picks_a_rank_outside_the_field(rows, exponent):
    field = _build_id_field("C1", rows, exponent, key=0)
    last = field.knots[-1] + field.slopes[-1] * (2 ** (32 - KNOT_BITS) - 1)
    assert 0 <= int(field.knots[0]) <= int(last) <= rows - 1
    assert (np.diff(field.knots) >= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_ceiling_is_about_0_80_with_a_quarter_of_clicks(seed):
    source = open_source("synthetic", num_test=100_000, seed=seed).test
    best = best_possible_metrics(source.batches(10_000))
    assert best["auc"] == pytest.approx(0.80, abs=0.006)
    assert best["positive_rate"] == pytest.approx(0.25, abs=0.006)
    assert best["num_samples"] == 100_000


def test_the_ceiling_is_a_ceiling(source):
    batch = source.read(0, 50_000)
    best = auc(batch.key, batch.label)
    noise = torch.Generator().manual_seed(0)
    for scale in (0.1, 0.5, 2.0):
        worse = torch.logit(batch.key) + scale * torch.randn(50_000, generator=noise)
        assert auc(worse, batch.label) < best


def test_labels_follow_their_probability(source):
    batch = source.read(0, 50_000)
    p, label = batch.key.numpy(), batch.label.numpy()[:, 0]
    for part in np.array_split(np.argsort(p), 20):
        error = math.sqrt(np.mean(p[part] * (1 - p[part])) / len(part))
        assert np.mean(label[part]) == pytest.approx(np.mean(p[part]), abs=4.5 * error)


def test_without_signal_there_is_nothing_to_learn():
    source = open_synthetic(num_train=20_000, signal=0.0, positive_rate=0.1).train
    assert best_possible_metrics(source.batches(20_000))["auc"] == 0.5
    assert source.read(0, 20_000).label.mean() == pytest.approx(0.1, abs=0.01)


def test_cardinalities_of_the_real_shape():
    """Nothing in the stream is as large as its tables, so the full Criteo shape costs no more memory."""
    law = open_synthetic(max_cardinality=None, num_train=1).train.distribution
    assert tuple(field.rows for field in law.fields) == CRITEO_CARDINALITIES
    assert sum(CRITEO_CARDINALITIES) == 33_762_577
    assert sum(field.knots.nbytes for field in law.fields) < 1 << 20
    ids = SyntheticSource(law, 0, 100_000).read(0, 100_000).ids["C3"].values
    assert ids.max() > 5_000_000 and len(ids.unique()) > 20_000


@given(st.integers(0, 5000), st.integers(0, 2**64 - 1))
def test_a_permutation_is_one_and_depends_on_its_key(size, key):
    order = random_permutation(size, key)
    assert np.array_equal(np.sort(order), np.arange(size))
    if size > 20:
        assert not np.array_equal(order, random_permutation(size, (key + 1) % 2**64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train": 0}, "num_train=0"),
        ({"num_test": -1}, "num_test=-1"),
        ({"cardinalities": []}, r"cardinalities=\(\)"),
        ({"cardinalities": [5, 0]}, r"cardinalities=\(5, 0\)"),
        ({"cardinalities": [5] * 55}, "1 .. 54 fields"),
        ({"exponent": -1.0}, r"exponent=-1\.0"),
        ({"signal": float("nan")}, "signal=nan"),
        ({"positive_rate": 1.0}, r"positive_rate=1\.0"),
        ({"label_model": "liner"}, "got label_model='liner'; did you mean 'linear'"),
        ({"label_model": "linear", "groups": [["C1", "C2"]]}, "no fields interact"),
        ({"groups": [["C1"]]}, "two or more fields"),
        ({"groups": [["C1", "C27"]]}, "got 'C27' in a group"),
        ({"groups": [["C1", "C2"], ["C3", "C1"]]}, "C1 in two groups"),
        ({"bags": [0]}, r"bags=\(0,\)"),
        ({"bags": [1 << 27]}, "bags="),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        open_synthetic(**options)
