"""Synthetic clicks with the shape and skew of Criteo, for which the best possible AUC is known.

Sample i is a pure function of (seed, i), so any rank can generate any range at any time. Its
click is drawn with probability

    p = sigmoid(bias + sum of linear dense terms + sum over fields of effect(field, id)
                + sum over pairs of fields of one group of <factor(field, id), factor(field', id')>
                + sum over bags of the mean effect of their ids)

where effects and factors are normal numbers looked up by the hash of the id. Each batch has p in `Batch.key`:
no model can rank better than p, and `train.metrics.best_possible_metrics` computes the AUC of p.

Legend: B samples, F fields, R hidden factors of an id, L longest bag, E ids of a column of bags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import gcd
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema, Splits
from colonnade.data.counter import (
    GAMMA,
    MASK,
    mix_words,
    random_permutation,
    random_words,
    stream_key,
)
from colonnade.data.tabular.fields import suggest_name
from colonnade.errors import ConfigError

NUM_DENSE = 13
NUM_FACTORS = 2
HALF_EFFECT_RANK = 200
"""Popularity rank at which an id has half the effect of its normal number.

Rarer ids have still less, so that a model can learn from few samples most of what determines the labels.
"""
WORDS_PER_SAMPLE = 32  # label 0, dense 1..4, ids 5.. (two fields a word)
LABEL_WORD = 0
DENSE_WORD = 1
ID_WORD = 5
MAX_FIELDS = 2 * (WORDS_PER_SAMPLE - ID_WORD)
MAX_LENGTH = 8
"""Maximal number of ids of a bag; all lengths from 0 on are equally likely."""
# in the separate stream of words of a column of bags
LENGTH_WORD = 0
BAG_WORD = 1
KNOT_BITS = 10
LOW_BITS = 32 - KNOT_BITS
NORMAL_BITS = 16

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticField:
    """Popularity and effects of the ids of a field.

    A 32-bit word u selects a popularity rank through the inverse distribution, stored at 2**10 knots and linear
    between them; rank k is id (k * spread + shift) % rows, so that popular ids are spread over the table.
    """

    name: str
    rows: int
    knots: NDArray[np.float64]  # (1024,): inverse distribution at the knots, minus 1
    slopes: NDArray[np.float64]  # (1024,): rise per unit of the low bits of u
    spread: int  # coprime to rows
    shift: int
    hash_factor: int  # odd: the top bits of id * factor select the id's normal numbers
    group: int | None = None  # the field interacts with the other fields of its group


@dataclass(frozen=True, slots=True, eq=False)
class BagColumn:
    """Column of 0 .. L ids per sample. The effect of a bag is the mean over its ids."""

    field: SyntheticField
    key: int  # of the column's separate stream of words


@dataclass(frozen=True, slots=True, eq=False)
class ClickDistribution:
    """Distribution of synthetic samples: fields, bags, tables of normal numbers, and the logit: bias + sum of scale *
    term."""

    key: int
    fields: tuple[SyntheticField, ...]
    bags: tuple[BagColumn, ...]
    normals: Floats  # (2**16,): standard normal numbers in random order: effects
    factors: Floats  # (R, 2**16): likewise
    quantiles: Floats  # (2**16,): the standard normal distribution's, in order: dense values
    dense_weights: Floats  # (13,)
    scales: dict[str, float]  # by term
    bias: float


class BagSamples(NamedTuple):
    """Ids of one column of bags for B samples, in L slots; a sample uses the first `lengths` slots."""

    ids: NDArray[np.int64]  # (L, B)
    ranks: Floats  # (L, B)
    lengths: NDArray[np.int64]  # (B,)

    def values(self) -> NDArray[np.int64]:
        """Return the ids of all samples, one sample after another, (E,)."""
        is_used = np.arange(MAX_LENGTH)[None, :] < self.lengths[:, None]
        return self.ids.T[is_used]


class SyntheticSamples(NamedTuple):
    """Features of B samples, without labels."""

    dense: Floats  # (B, 13)
    ids: NDArray[np.int64]  # (F, B)
    ranks: Floats  # (F, B): popularity, from 0
    bags: tuple[BagSamples, ...]


def sample_states(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return the state (B,) of each sample's word 0 in the splitmix64 sequence that starts at `key`."""
    index = np.arange(first, first + count, dtype=np.uint64)
    return np.uint64(key) + index * np.uint64(GAMMA * WORDS_PER_SAMPLE & MASK)


def draw_word(states: NDArray[np.uint64], index: int) -> NDArray[np.uint64]:
    """Return word `index` of each sample, (B,)."""
    return mix_words(states + np.uint64(GAMMA * index & MASK))


def draw_samples(
    distribution: ClickDistribution, first_sample: int, num_samples: int
) -> SyntheticSamples:
    """Generate the features of samples first .. first + count - 1."""
    states = sample_states(distribution.key, first_sample, num_samples)
    ids = np.empty((len(distribution.fields), num_samples), dtype=np.int64)
    ranks = np.empty(ids.shape, dtype=np.float32)
    bits = _build_half_word_reader(states, ID_WORD)
    for f, field in enumerate(distribution.fields):
        ranks[f] = _draw_ids(field, bits(f), ids_out=ids[f])
    return SyntheticSamples(
        _draw_dense(distribution, states),
        ids,
        ranks,
        tuple(_draw_bags(column, first_sample, num_samples) for column in distribution.bags),
    )


def draw_label_thresholds(
    distribution: ClickDistribution, first_sample: int, num_samples: int
) -> NDArray[np.float64]:
    """Draw a number in [0, 1) for each sample (B,), of 53 bits. The label is 1 if it is below the probability."""
    drawn = draw_word(sample_states(distribution.key, first_sample, num_samples), LABEL_WORD)
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw_dense(distribution: ClickDistribution, states: NDArray[np.uint64]) -> Floats:
    """Draw dense values (B, 13): 16 bits select a quantile of the standard normal distribution."""
    bits = np.stack([draw_word(states, DENSE_WORD + i) for i in range(-(-NUM_DENSE // 4))], axis=1)
    return distribution.quantiles[bits.astype("<u8", copy=False).view("<u2")[:, :NUM_DENSE]]


def _draw_bags(column: BagColumn, first_sample: int, num_samples: int) -> BagSamples:
    states = sample_states(column.key, first_sample, num_samples)
    lengths = (draw_word(states, LENGTH_WORD) % np.uint64(MAX_LENGTH + 1)).astype(np.int64)
    ids = np.empty((MAX_LENGTH, num_samples), dtype=np.int64)
    ranks = np.empty(ids.shape, dtype=np.float32)
    bits = _build_half_word_reader(states, BAG_WORD)
    for slot in range(MAX_LENGTH):
        ranks[slot] = _draw_ids(column.field, bits(slot), ids_out=ids[slot])
    return BagSamples(ids, ranks, lengths)


def _build_half_word_reader(random_states: NDArray[np.uint64], first_word: int):
    """Return a function i -> 32 bits per sample, to be called with i = 0, 1, ... in order.

    The bits are the halves of words first, first + 1, ..., high before low.
    """
    current = random_states

    def bits(i: int) -> NDArray[np.uint64]:
        nonlocal current
        if i % 2:
            return current & np.uint64(0xFFFFFFFF)
        current = draw_word(random_states, first_word + i // 2)
        return current >> np.uint64(32)

    return bits


def _draw_ids(
    field: SyntheticField, random_bits: NDArray[np.uint64], *, ids_out: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Draw ids into `ids_out` (B,) and return their popularity ranks (B,)."""
    knot = (random_bits >> np.uint64(LOW_BITS)).view(np.int64)
    x = (random_bits & np.uint64((1 << LOW_BITS) - 1)).astype(np.float64)
    x *= field.slopes.take(knot)
    x += field.knots.take(knot)
    rank = x.astype(np.int64)
    np.multiply(rank, field.spread, out=ids_out)
    ids_out += field.shift
    # Computed by division: numpy divides by one number fast, but its remainder is slow.
    ids_out -= ids_out // field.rows * field.rows
    return rank


def _normal_indices(field: SyntheticField, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the ids' normal numbers, in [0, 2**16)."""
    hashed = ids.view(np.uint64) * np.uint64(field.hash_factor)
    hashed >>= np.uint64(64 - NORMAL_BITS)
    return hashed.view(np.int64)


def _id_effects(
    distribution: ClickDistribution, indices: NDArray[np.int64], ranks: Floats
) -> Floats:
    return distribution.normals.take(indices) / (1 + ranks * np.float32(1 / HALF_EFFECT_RANK))


def compute_logit_terms(
    distribution: ClickDistribution, samples: SyntheticSamples
) -> dict[str, Floats]:
    """Compute the terms of the logit before scaling, (B,) each.

    Sums run column by column, so a sample's terms have the same bits in any batch.
    """
    dense = samples.dense
    weights = distribution.dense_weights
    linear = np.zeros(len(dense), dtype=np.float32)
    for i in range(NUM_DENSE):
        linear += dense[:, i] * weights[i]
    effects = np.zeros_like(linear)
    num_groups = 1 + max((f.group for f in distribution.fields if f.group is not None), default=-1)
    sums = np.zeros((num_groups, NUM_FACTORS, len(dense)), dtype=np.float32)
    squares = np.zeros((num_groups, len(dense)), dtype=np.float32)
    for f, field in enumerate(distribution.fields):
        indices = _normal_indices(field, samples.ids[f])
        effects += _id_effects(distribution, indices, samples.ranks[f])
        if field.group is not None:
            for r in range(NUM_FACTORS):
                factor = distribution.factors[r].take(indices)
                sums[field.group, r] += factor
                factor *= factor
                squares[field.group] += factor
    # Over all pairs of a group's fields, <v, v'> adds up to (|sum v|**2 - sum |v|**2) / 2.
    interaction = np.zeros_like(linear)
    for group in range(num_groups):
        within = -squares[group]
        for r in range(NUM_FACTORS):
            within += sums[group, r] * sums[group, r]
        interaction += within
    terms = {"dense": linear, "effects": effects, "interaction": interaction}
    if distribution.bags:
        effects_of_bags = (
            _compute_bag_effects(distribution, column, bags)
            for column, bags in zip(distribution.bags, samples.bags, strict=True)
        )
        terms["bag"] = reduce(np.add, effects_of_bags)
    return terms


def _compute_bag_effects(
    distribution: ClickDistribution, column: BagColumn, bags: BagSamples
) -> Floats:
    """Compute the mean effect of each sample's ids, (B,); 0 for an empty bag."""
    total = np.zeros(len(bags.lengths), dtype=np.float32)
    weight = np.float32(1) / np.maximum(bags.lengths, 1).astype(np.float32)
    for slot in range(MAX_LENGTH):
        indices = _normal_indices(column.field, bags.ids[slot])
        effects = weight * _id_effects(distribution, indices, bags.ranks[slot])
        total += np.where(slot < bags.lengths, effects, np.float32(0))
    return total


def compute_logit(distribution: ClickDistribution, terms: dict[str, Floats]) -> Floats:
    """Compute the logit (B,) from its terms."""
    total = np.full_like(terms["dense"], distribution.bias)
    for name, term in terms.items():
        total += np.float32(distribution.scales[name]) * term
    return total


# The 26 fields of the full Criteo Kaggle set, C1 .. C26.
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
INTERACTING = range(8, 129)
"""Row counts of the fields that interact by default: few enough that each pair of ids occurs often."""
LABEL_MODELS = {
    "interaction": {"dense": 0.35, "effects": 0.57, "interaction": 0.08, "bag": 0.2},
    "linear": {"dense": 0.38, "effects": 0.62, "bag": 0.2},
    "pairs": {"dense": 0.2, "effects": 0.3, "interaction": 0.5, "bag": 0.2},
}
"""Share of each term in the logit's variance, by label model; divided by the sum over the terms that a stream has."""
TEST_START = 1 << 40
CALIBRATION_START = 1 << 41
CALIBRATION_SAMPLES = 1 << 16
CHUNK = 4096
"""Number of samples generated at a time: the scratch arrays then fit in a core's private cache."""
MAX_ROWS = 1 << 26


PRESET = {
    "model": {"name": "dlrm", "dim": 16, "keep_fields": True},
    "embedding": {"lr": 0.1, "initial_accumulator": 1e-6, "init_scale": 0.01},
    "dense": {"lr": 2e-3},
    "train": {"batch_size": 4096, "epochs": 1},
}


def open_synthetic(
    *,
    num_train: int = 1_500_000,
    num_test: int = 200_000,
    cardinalities: Sequence[int] = CRITEO_CARDINALITIES,
    max_cardinality: int | None = 20_000,
    exponent: float = 1.1,
    signal: float = 1.36,
    positive_rate: float = 0.25,
    label_model: str = "interaction",
    groups: Sequence[Sequence[str]] | None = None,
    bags: Sequence[int] = (),
    seed: int = 0,
) -> Splits:
    """Open synthetic clicks: samples 0 .. num_train-1 train; a range that no num_train reaches tests.

    cardinalities    rows of each field; `max_cardinality` caps them, unless None
    exponent         exponent of the power law of popularity: the k-th most popular id has weight ~ k**-exponent
    signal           standard deviation of the logit: 0 is noise, 1.36 gives a ceiling AUC near 0.80
    positive_rate    share of clicks
    label_model      terms of the logit: interaction (dense values and single ids, few pairs), linear
                     (no pairs: logistic regression can learn it), pairs (half of the variance is pairs)
    groups           names of fields, C1 .., that interact with each other and with no others, such as
                     [[C1, C2, C5], [C3, C4]]; default: all fields of 8 to 128 rows, as one group
    bags             rows of further columns B1 .., each with 0 to 8 ids per sample
    seed             determines everything: ids, effects and labels

    Raises ConfigError. The first call takes about 0.1 s, to set bias and scales on samples of a third range.
    """
    rows = [c if max_cardinality is None else min(c, max_cardinality) for c in cardinalities]
    if num_train < 1 or num_test < 0 or max(num_train, num_test) > TEST_START:
        raise ConfigError(
            f"got num_train={num_train}, num_test={num_test}, wanted 1 .. {TEST_START} and 0 .. {TEST_START}"
        )
    if not 1 <= len(rows) <= MAX_FIELDS or not all(1 <= n <= MAX_ROWS for n in rows):
        raise ConfigError(
            f"got cardinalities={tuple(rows)}, wanted 1 .. {MAX_FIELDS} fields of 1 .. {MAX_ROWS} rows"
        )
    if not 0 <= exponent <= 8 or not signal >= 0 or not 0 < positive_rate < 1:
        raise ConfigError(
            f"got exponent={exponent}, signal={signal}, positive_rate={positive_rate}, wanted "
            "0 <= exponent <= 8, signal >= 0, 0 < positive_rate < 1"
        )
    if not all(1 <= n <= MAX_ROWS for n in bags):
        raise ConfigError(f"got bags={tuple(bags)}, wanted columns of 1 .. {MAX_ROWS} rows")
    if label_model not in LABEL_MODELS:
        hint = suggest_name(str(label_model), LABEL_MODELS)
        raise ConfigError(f"got label_model={label_model!r}; {hint}")
    shares = LABEL_MODELS[label_model]
    if groups is not None and "interaction" not in shares:
        raise ConfigError(
            f"got groups for label_model={label_model!r}, in which no fields interact; leave them out"
        )
    group_of = _map_fields_to_groups(rows, groups) if "interaction" in shares else {}
    uncalibrated = _build_distribution(
        tuple(rows),
        tuple(group_of.items()),
        exponent=exponent,
        bags=tuple(bags),
        seed=seed,
    )
    distribution = _calibrate(uncalibrated, label_model, signal=signal, positive_rate=positive_rate)
    return Splits(
        train=SyntheticSource(distribution, 0, num_train),
        test=SyntheticSource(distribution, TEST_START, TEST_START + num_test) if num_test else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticSource(BlockSource):
    """Source of samples start .. stop-1 of a distribution, in that order in every epoch.

    `Batch.key`: p, (B,) float64.
    """

    distribution: ClickDistribution
    start: int
    stop: int

    @property
    def schema(self) -> Schema:
        columns = [Column(field.name, field.rows) for field in self.distribution.fields]
        bags = [column.field for column in self.distribution.bags]
        columns += [Column(field.name, field.rows, "bag") for field in bags]
        return Schema(
            dense=tuple(f"I{i}" for i in range(1, NUM_DENSE + 1)),
            categorical=tuple(columns),
        )

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        return (self.read(begin, end) for begin, end in blocks)

    def read(self, first_sample: int, end_sample: int) -> Batch:
        """Generate samples begin .. end-1 of this source."""
        size = end_sample - first_sample
        distribution = self.distribution
        dense = np.empty((size, NUM_DENSE), dtype=np.float32)
        ids = np.empty((len(distribution.fields), size), dtype=np.int64)
        label = np.empty((size, 1), dtype=np.float32)
        probability = np.empty(size, dtype=np.float64)
        lengths = np.zeros((len(distribution.bags), size + 1), dtype=np.int64)
        values: list[list] = [[np.empty(0, dtype=np.int64)] for _ in distribution.bags]
        for start in range(0, size, CHUNK):
            part = slice(start, min(start + CHUNK, size))
            first = self.start + first_sample + start
            count = part.stop - start
            samples = draw_samples(distribution, first, count)
            dense[part] = samples.dense
            ids[:, part] = samples.ids
            logit = compute_logit(distribution, compute_logit_terms(distribution, samples))
            np.reciprocal(1 + np.exp(-logit.astype(np.float64)), out=probability[part])
            drawn = draw_label_thresholds(distribution, first, count)
            label[part, 0] = drawn < probability[part]
            for i, bags in enumerate(samples.bags):
                lengths[i, start + 1 : part.stop + 1] = bags.lengths
                values[i].append(bags.values())
        fields = distribution.fields
        columns = {field.name: Ids(torch.from_numpy(ids[i])) for i, field in enumerate(fields)}
        for i, column in enumerate(distribution.bags):
            offsets = torch.from_numpy(lengths[i].cumsum())
            columns[column.field.name] = Ids(torch.from_numpy(np.concatenate(values[i])), offsets)
        return Batch(
            size=size,
            dense=torch.from_numpy(dense),
            ids=columns,
            label=torch.from_numpy(label),
            key=torch.from_numpy(probability),
        )


def _map_fields_to_groups(
    rows: Sequence[int], groups: Sequence[Sequence[str]] | None
) -> dict[str, int]:
    """Map the name of each field that interacts to the index of its group. Raises ConfigError."""
    names = [f"C{f + 1}" for f in range(len(rows))]
    if groups is None:
        return {name: 0 for name, n in zip(names, rows, strict=True) if n in INTERACTING}
    group_of: dict[str, int] = {}
    for i, group in enumerate(groups):
        members = [group] if isinstance(group, str) else list(group)
        if len(members) < 2:
            raise ConfigError(
                f"got a group {members}, wanted two or more fields: they interact with each other"
            )
        for name in members:
            if name not in names:
                raise ConfigError(
                    f"got {name!r} in a group, wanted fields from {names[0]} to {names[-1]}"
                )
            if name in group_of:
                raise ConfigError(f"got {name} in two groups, wanted each field in one at most")
            group_of[name] = i
    return group_of


def _build_id_field(
    name: str, rows: int, exponent: float, key: int, *, group: int | None = None
) -> SyntheticField:
    """Build a field; popularity x >= 1 has density ~ x**-exponent on [1, rows + 1), and rank = floor(x) - 1."""
    u = np.arange(1 << KNOT_BITS) / (1 << KNOT_BITS)
    log_end = np.log(rows + 1.0)
    power = 1 - exponent
    # ((1 - u) + u * end**power) ** (1 / power), in a form that stays exact where power is near 0.
    log_x = np.log1p(u * np.expm1(power * log_end)) / power if power else u * log_end
    x = np.append(np.exp(log_x), rows + 1.0)
    # The last bit of powers differs between machines; ids must not.
    x = np.round(x * 2**16) / 2**16 - 1
    # The curve is convex, so its last piece rises by rows / 2**10 or more. Its last value, lower than `rows` by 2**-22
    # of this rise, is therefore never rounded up to `rows`.
    # Steps of the golden section keep popular ids apart for any number of rows.
    spread = max(1, round(rows * 0.6180339887))
    while gcd(spread, rows) != 1:
        spread += 1
    return SyntheticField(
        name=name,
        rows=rows,
        knots=x[:-1].copy(),
        slopes=np.diff(x) / (1 << LOW_BITS),
        spread=spread,
        shift=stream_key(key, 0) % rows,
        hash_factor=stream_key(key, 1) | 1,
        group=group,
    )


@lru_cache(maxsize=4)
def _build_distribution(
    rows: tuple[int, ...],
    field_groups: tuple[tuple[str, int], ...],
    *,
    exponent: float,
    bags: tuple[int, ...],
    seed: int,
) -> ClickDistribution:
    """Build a distribution that is not calibrated: it has no scales, and biases are zero.

    field_groups: fields that interact, with the number of their group. Built once for equal arguments; it is immutable.
    """
    group_of = dict(field_groups)
    key = stream_key(seed)
    normal = NormalDist()
    table = 1 << NORMAL_BITS
    quantiles = np.array([normal.inv_cdf((i + 0.5) / table) for i in range(table)], np.float32)
    shuffled = [
        quantiles[random_permutation(table, stream_key(key, 2, r))] for r in range(NUM_FACTORS + 1)
    ]

    def build_field(name: str, n: int, *key_parts: int) -> SyntheticField:
        return _build_id_field(
            name, n, exponent, stream_key(key, *key_parts), group=group_of.get(name)
        )

    columns = [
        BagColumn(build_field(f"B{i + 1}", n, 4, i), stream_key(key, 4, i, 0))
        for i, n in enumerate(bags)
    ]
    return ClickDistribution(
        key=stream_key(key, 0),
        fields=tuple(build_field(f"C{f + 1}", n, 1, f) for f, n in enumerate(rows)),
        bags=tuple(columns),
        normals=shuffled[0],
        factors=np.stack(shuffled[1:]),
        quantiles=quantiles,
        dense_weights=quantiles[
            random_words(stream_key(key, 3), 0, NUM_DENSE) >> np.uint64(64 - NORMAL_BITS)
        ],
        scales={},
        bias=0.0,
    )


@lru_cache(maxsize=4)
def _calibrate(
    distribution: ClickDistribution,
    label_model: str,
    *,
    signal: float,
    positive_rate: float,
) -> ClickDistribution:
    """Set scales and bias from samples that are used neither for training nor for testing, once for equal arguments.

    They are rounded, so that they do not depend on the order in which a machine sums a mean.
    """
    samples = draw_samples(distribution, CALIBRATION_START, CALIBRATION_SAMPLES)
    terms = {
        name: term.astype(np.float64)
        for name, term in compute_logit_terms(distribution, samples).items()
    }
    shares = LABEL_MODELS[label_model]
    deviations = {
        name: np.std(term) for name, term in terms.items() if np.std(term) > 0 and name in shares
    }
    total_share = sum(shares[name] for name in deviations)
    scales = {
        name: round(signal * float(np.sqrt(shares[name] / total_share) / deviations[name]), 6)
        if name in deviations
        else 0.0
        for name in terms
    }
    x = np.sum([scales[name] * term for name, term in terms.items()], axis=0)
    low = -50.0
    high = 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(1 / (1 + np.exp(-x - middle))) < positive_rate:
            low = middle
        else:
            high = middle
    return replace(distribution, scales=scales, bias=round(low, 6))
