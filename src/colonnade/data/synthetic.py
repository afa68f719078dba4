"""Clicks made to order: the shape and skew of Criteo, and a best reachable AUC known by construction.

Sample i is a pure function of (seed, i), so any range can be made at any time on any rank. Its
click is drawn with probability

    p = sigmoid(bias + sum of linear dense terms + sum over fields of effect(field, id)
                + sum over pairs of interacting fields of <factor(field, id), factor(field', id')>)

where effects and factors are normal numbers found by hashing the id. Each batch carries p in `Batch.key`:
no model can rank better than p does, and `train.metrics.ceiling` says how well that is.

Legend: B samples, F fields, R hidden factors of an id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch, Ids
from colonnade.data.contract import START, Column, Position, Schema, Splits, spans
from colonnade.data.counter import GAMMA, MASK, mix64, permutation, stream_key, words
from colonnade.errors import ConfigError

# The 26 fields of the full Criteo Kaggle set, C1 .. C26.
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUM_DENSE = 13
NUM_FACTORS = 2
INTERACTING = range(8, 129)
"""Fields of this many rows interact: few enough that a model sees each pair of ids often."""
HALF_EFFECT_RANK = 200
"""Rare ids matter less: the id of this popularity rank has half the effect of its normal number, later ones
less still, so that what can be known is also what can be learned from a few samples."""
SHARES = {"dense": 0.35, "effects": 0.57, "interaction": 0.08}
"""Parts of the logit's variance."""
TEST_START = 1 << 40
CALIBRATION_START = 1 << 41
CALIBRATION_SAMPLES = 1 << 16
CHUNK = 4096
"""Samples made at a time: the scratch arrays then stay in a core's own cache."""
WORDS_PER_SAMPLE = 32  # label 0, dense 1..4, ids 5.. (two fields a word)
LABEL_WORD, DENSE_WORD, ID_WORD = 0, 1, 5
MAX_FIELDS = 2 * (WORDS_PER_SAMPLE - ID_WORD)
KNOT_BITS = 10
LOW_BITS = 32 - KNOT_BITS
NORMAL_BITS = 16

Floats = NDArray[np.float32]


def open_synthetic(
    *,
    num_train: int = 1_500_000,
    num_test: int = 200_000,
    cardinalities: Sequence[int] = CRITEO_CARDINALITIES,
    max_cardinality: int | None = 20_000,
    exponent: float = 1.1,
    signal: float = 1.36,
    positive_rate: float = 0.25,
    seed: int = 0,
) -> Splits:
    """Train on samples 0 .. num_train-1; test on a range that never meets them, whatever num_train.

    cardinalities    rows of each field; `max_cardinality` caps them, None does not
    exponent         of the power law that popularity follows: the k-th most popular id has weight ~ k**-exponent
    signal           standard deviation of the logit: 0 is noise, 1.36 gives a ceiling AUC near 0.80
    positive_rate    share of clicks
    seed             names the whole world: ids, effects and labels

    Raises ConfigError. Takes about 0.1 s, to set bias and scales on samples of a third range.
    """
    rows = [c if max_cardinality is None else min(c, max_cardinality) for c in cardinalities]
    if num_train < 1 or num_test < 0 or max(num_train, num_test) > TEST_START:
        raise ConfigError(
            f"got num_train={num_train}, num_test={num_test}, wanted 1 .. {TEST_START} and 0 .. {TEST_START}"
        )
    if not 1 <= len(rows) <= MAX_FIELDS or not all(1 <= n <= 1 << 26 for n in rows):
        raise ConfigError(
            f"got cardinalities={tuple(rows)}, wanted 1 .. {MAX_FIELDS} fields of 1 .. {1 << 26} rows"
        )
    if not 0 <= exponent <= 8 or not signal >= 0 or not 0 < positive_rate < 1:
        raise ConfigError(
            f"got exponent={exponent}, signal={signal}, positive_rate={positive_rate}, wanted "
            "0 <= exponent <= 8, signal >= 0, 0 < positive_rate < 1"
        )
    law = _build_law(rows, exponent=exponent, signal=signal, positive_rate=positive_rate, seed=seed)
    return Splits(
        train=SyntheticSource(law, 0, num_train),
        test=SyntheticSource(law, TEST_START, TEST_START + num_test) if num_test else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One field's popularity and effects.

    A 32-bit word u picks a popularity rank through the inverse distribution, kept at 2**10 knots and
    straight between them; rank k is id (k * spread + shift) % rows, so that popular ids lie anywhere.
    """

    name: str
    rows: int
    knots: NDArray[np.float64]  # (1024,): inverse distribution at the knots, minus 1
    slopes: NDArray[np.float64]  # (1024,): rise per unit of the low bits of u
    spread: int  # coprime to rows
    shift: int
    hash_factor: int  # odd: the top bits of id * hash_factor pick the id's normal numbers
    interacts: bool


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """Everything that makes samples of numbers."""

    key: int
    fields: tuple[Field, ...]
    normals: Floats  # (2**16,): standard normal numbers in random order: effects
    factors: Floats  # (R, 2**16): likewise
    quantiles: Floats  # (2**16,): the standard normal distribution's, in order: dense values
    dense_weights: Floats  # (13,)
    scales: dict[str, float]  # by part of SHARES
    bias: float


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticSource:
    """Samples start .. stop-1 of a law, in that order in every epoch. `Batch.key`: p, (B,) float64."""

    law: Law
    start: int
    stop: int

    @property
    def schema(self) -> Schema:
        columns = tuple(Column(field.name, field.rows) for field in self.law.fields)
        return Schema(dense=tuple(f"I{i}" for i in range(1, NUM_DENSE + 1)), categorical=columns)

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = START,
    ) -> Iterator[Batch]:
        blocks = spans(self.num_samples, batch_size, rank=rank, num_ranks=num_ranks, start=start)
        return (self.read(begin, end) for begin, end in blocks)

    def read(self, begin: int, end: int) -> Batch:
        """Samples begin .. end-1 of this source."""
        size = end - begin
        dense = np.empty((size, NUM_DENSE), dtype=np.float32)
        ids = np.empty((len(self.law.fields), size), dtype=np.int64)
        label = np.empty((size, 1), dtype=np.float32)
        probability = np.empty(size, dtype=np.float64)
        for at in range(0, size, CHUNK):
            part = slice(at, min(at + CHUNK, size))
            first = self.start + begin + at
            base = _bases(self.law.key, first, part.stop - at)
            dense[part] = _draw_dense(self.law, base)
            ranks = _draw_ids(self.law, base, out=ids[:, part])
            logit = _logit(self.law, _parts(self.law, dense[part], ids[:, part], ranks))
            np.reciprocal(1 + np.exp(-logit.astype(np.float64)), out=probability[part])
            # 53 bits of the label's word are a uniform number in [0, 1).
            uniform = (_word(base, LABEL_WORD) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            label[part, 0] = uniform < probability[part]
        return Batch(
            size=size,
            dense=torch.from_numpy(dense),
            ids={f.name: Ids(torch.from_numpy(ids[i])) for i, f in enumerate(self.law.fields)},
            label=torch.from_numpy(label),
            key=torch.from_numpy(probability),
        )


def _bases(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """(B,): the state of each sample's word 0 in the splitmix64 sequence that starts at `key`."""
    index = np.arange(first, first + count, dtype=np.uint64)
    return np.uint64(key) + index * np.uint64(GAMMA * WORDS_PER_SAMPLE & MASK)


def _word(base: NDArray[np.uint64], word: int) -> NDArray[np.uint64]:
    return mix64(base + np.uint64(GAMMA * word & MASK))


def _draw_dense(law: Law, base: NDArray[np.uint64]) -> Floats:
    """(B, 13): 16 bits pick a quantile of the standard normal distribution."""
    bits = np.stack([_word(base, DENSE_WORD + i) for i in range(-(-NUM_DENSE // 4))], axis=1)
    return law.quantiles[bits.astype("<u8", copy=False).view("<u2")[:, :NUM_DENSE]]


def _draw_ids(law: Law, base: NDArray[np.uint64], *, out: NDArray[np.int64]) -> Floats:
    """Ids into `out` (F, B); returns their popularity ranks (F, B), from 0."""
    ranks = np.empty(out.shape, dtype=np.float32)
    word = base
    for f, field in enumerate(law.fields):
        if f % 2 == 0:
            word = _word(base, ID_WORD + f // 2)
            bits = word >> np.uint64(32)
        else:
            bits = word & np.uint64(0xFFFFFFFF)
        knot = (bits >> np.uint64(LOW_BITS)).view(np.int64)
        x = (bits & np.uint64((1 << LOW_BITS) - 1)).astype(np.float64)
        x *= field.slopes.take(knot)
        x += field.knots.take(knot)
        number = x.astype(np.int64)
        ranks[f] = number
        number *= field.spread
        number += field.shift
        # By hand: division by one number is fast in numpy, its remainder is not.
        number -= number // field.rows * field.rows
        out[f] = number
    return ranks


def _parts(law: Law, dense: Floats, ids: NDArray[np.int64], ranks: Floats) -> dict[str, Floats]:
    """The logit's three terms before scaling, (B,) each.

    Sums run column by column, so a sample's terms have the same bits in any batch.
    """
    linear = np.zeros(len(dense), dtype=np.float32)
    for i in range(NUM_DENSE):
        linear += dense[:, i] * law.dense_weights[i]
    effects = np.zeros_like(linear)
    sums = np.zeros((NUM_FACTORS, len(dense)), dtype=np.float32)
    squares = np.zeros_like(linear)
    for f, field in enumerate(law.fields):
        hashed = ids[f].view(np.uint64) * np.uint64(field.hash_factor)
        hashed >>= np.uint64(64 - NORMAL_BITS)
        entry = hashed.view(np.int64)
        effects += law.normals.take(entry) / (1 + ranks[f] * np.float32(1 / HALF_EFFECT_RANK))
        if field.interacts:
            for r in range(NUM_FACTORS):
                factor = law.factors[r].take(entry)
                sums[r] += factor
                factor *= factor
                squares += factor
    # Over all pairs of fields, <v, v'> adds up to (|sum v|**2 - sum |v|**2) / 2.
    interaction = -squares
    for r in range(NUM_FACTORS):
        interaction += sums[r] * sums[r]
    return {"dense": linear, "effects": effects, "interaction": interaction}


def _logit(law: Law, parts: dict[str, Floats]) -> Floats:
    """(B,)."""
    logit = np.full_like(parts["dense"], law.bias)
    for name, part in parts.items():
        logit += np.float32(law.scales[name]) * part
    return logit


def _build_field(name: str, rows: int, exponent: float, key: int) -> Field:
    """Popularity x >= 1 has density ~ x**-exponent on [1, rows + 1); rank = floor(x) - 1."""
    u = np.arange(1 << KNOT_BITS) / (1 << KNOT_BITS)
    log_end, power = np.log(rows + 1.0), 1 - exponent
    # ((1 - u) + u * end**power) ** (1 / power), in a form that stays exact where power is near 0.
    log_x = np.log1p(u * np.expm1(power * log_end)) / power if power else u * log_end
    x = np.append(np.exp(log_x), rows + 1.0)
    # Powers differ by a last bit between machines; ids must not.
    x = np.round(x * 2**16) / 2**16 - 1
    # The curve is convex, so its last piece rises by rows / 2**10 or more: its last value, one part in
    # 2**22 of that below `rows`, is never rounded up to it.
    # Steps of the golden section keep popular ids apart whatever the number of rows.
    spread = max(1, round(rows * 0.6180339887))
    while gcd(spread, rows) != 1:
        spread += 1
    return Field(
        name=name,
        rows=rows,
        knots=x[:-1].copy(),
        slopes=np.diff(x) / (1 << LOW_BITS),
        spread=spread,
        shift=stream_key(key, 0) % rows,
        hash_factor=stream_key(key, 1) | 1,
        interacts=rows in INTERACTING,
    )


def _build_law(
    rows: Sequence[int], *, exponent: float, signal: float, positive_rate: float, seed: int
) -> Law:
    key = stream_key(seed)
    normal = NormalDist()
    table = 1 << NORMAL_BITS
    quantiles = np.array([normal.inv_cdf((i + 0.5) / table) for i in range(table)], np.float32)
    shuffled = [
        quantiles[permutation(table, stream_key(key, 2, r))] for r in range(NUM_FACTORS + 1)
    ]
    law = Law(
        key=stream_key(key, 0),
        fields=tuple(
            _build_field(f"C{f + 1}", n, exponent, stream_key(key, 1, f))
            for f, n in enumerate(rows)
        ),
        normals=shuffled[0],
        factors=np.stack(shuffled[1:]),
        quantiles=quantiles,
        dense_weights=quantiles[words(stream_key(key, 3), 0, NUM_DENSE) >> np.uint64(48)],
        scales=dict.fromkeys(SHARES, 0.0),
        bias=0.0,
    )
    return _calibrated(law, signal=signal, positive_rate=positive_rate)


def _calibrated(law: Law, *, signal: float, positive_rate: float) -> Law:
    """Set scales and bias on samples that are neither trained nor tested on.

    They are rounded, so that the order in which a machine adds up a mean cannot change them.
    """
    base = _bases(law.key, CALIBRATION_START, CALIBRATION_SAMPLES)
    ids = np.empty((len(law.fields), CALIBRATION_SAMPLES), dtype=np.int64)
    ranks = _draw_ids(law, base, out=ids)
    raw = _parts(law, _draw_dense(law, base), ids, ranks)
    parts = {name: part.astype(np.float64) for name, part in raw.items()}
    present = {name: np.std(part) for name, part in parts.items() if np.std(part) > 0}
    total = sum(SHARES[name] for name in present)
    scales = {
        name: round(signal * float(np.sqrt(SHARES[name] / total) / present[name]), 6)
        if name in present
        else 0.0
        for name in SHARES
    }
    logit = np.sum([scales[name] * part for name, part in parts.items()], axis=0)
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(1 / (1 + np.exp(-logit - middle))) < positive_rate:
            low = middle
        else:
            high = middle
    return replace(law, scales=scales, bias=round(low, 6))
