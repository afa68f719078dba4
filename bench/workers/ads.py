"""Clicks on ads, made to order: 200 ids a sample whose popular ones come and go, and a known best reachable AUC.

Twenty fields have ten ids a sample each. A field has 10,000 places, the k-th drawn with weight ~ k**-1.1, and two ids
in each, as likely and of opposite effect, so that clicks are as frequent at all times. They live for 2**20 samples,
from a birthday of the place's own, and are then followed by new ones, which nobody has seen: all of the time some
popular ids are young. Sample i is a pure function of (seed, i); it is clicked with

    p = sigmoid(bias + sum over ids of effect(id) + sum over pairs of fields of <factor(field), factor(field')>)

where a field's factor is the sum of its ids', and effects and factors are normal numbers found by hashing, less for ids
that are rare. Each batch carries p in `Batch.key`.

Legend: B samples, F fields, J ids of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch, Ids
from colonnade.data.contract import START, Column, Position, Schema, iterate_rank_blocks
from colonnade.data.counter import random_permutation, random_words, stream_key

FIELDS, EACH = 20, 10
PLACES = 10_000
EXPONENT = 1.1
LIFE_BITS = 20
HALF_EFFECT_RANK = 100
NUM_FACTORS = 2
SHARES = {"effects": 0.7, "pairs": 0.3}
"""Part of the logit's variance."""
SIGNAL = 1.36
POSITIVE_RATE = 0.25
CHUNK = 1024
"""Samples made at a time: the scratch arrays then stay in a core's own cache."""
CALIBRATION_START = 1 << 40
CALIBRATION_SAMPLES = 1 << 15
TABLE = 1 << 16

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    key: int
    place_of: NDArray[
        np.int64
    ]  # (2**16,): by the 16 bits that are drawn, the last of which is one of two ids
    damp_of: Floats  # (2**16,): what that id counts, in proportion to the place's normal numbers
    births: NDArray[np.int64]  # (F, places): in 0 .. 2**20 - 1
    hashes: tuple[int, ...]  # (F,), odd
    normals: Floats  # (2**16,): effects
    factors: Floats  # (R, 2**16)
    scales: tuple[float, float] = (1.0, 1.0)
    bias: float = 0.0


def open_ads(num_samples: int, *, seed: int = 0, start: int = 0) -> Ads:
    """Samples start .. start + num_samples - 1 of the world `seed`."""
    key = stream_key(seed, 7)
    weight = np.arange(1, PLACES + 1) ** -EXPONENT
    share = np.cumsum(weight) / weight.sum()
    place = np.searchsorted(share, (np.arange(TABLE) // 2 + 0.5) / (TABLE // 2))
    sign = 1 - 2 * (np.arange(TABLE) % 2)
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / TABLE) for i in range(TABLE)], np.float32)
    shuffled = [quantiles[random_permutation(TABLE, stream_key(key, 2, r))] for r in range(3)]
    births = random_words(stream_key(key, 1), 0, FIELDS * PLACES) >> np.uint64(64 - LIFE_BITS)
    law = Law(
        key=stream_key(key, 0),
        place_of=place.astype(np.int64),
        damp_of=(sign / (1 + place / HALF_EFFECT_RANK)).astype(np.float32),
        births=births.astype(np.int64).reshape(FIELDS, PLACES),
        hashes=tuple(stream_key(key, 3, f) | 1 for f in range(FIELDS)),
        normals=shuffled[0],
        factors=np.stack(shuffled[1:]),
    )
    return Ads(_calibrated(law), start, start + num_samples)


@dataclass(frozen=True, slots=True, eq=False)
class Ads:
    """A source (`data.contract.Source`). `Batch.key`: p, (B,) float64."""

    law: Law
    start: int
    stop: int

    @property
    def schema(self) -> Schema:
        columns = tuple(Column(f"A{f + 1}", kind="bag") for f in range(FIELDS))
        return Schema(dense=(), categorical=columns)

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        blocks = iterate_rank_blocks(
            self.num_samples, batch_size, rank=rank, num_ranks=num_ranks, start=start
        )
        return (self.read(begin, end) for begin, end in blocks)

    def read(self, begin: int, end: int) -> Batch:
        """Samples begin .. end-1 of this source."""
        size, law = end - begin, self.law
        ids = np.empty((FIELDS, size, EACH), dtype=np.int64)
        chance = np.empty(size, dtype=np.float64)
        for at in range(0, size, CHUNK):
            part = slice(at, min(at + CHUNK, size))
            effects, pairs = draw(law, self.start + begin + at, ids[:, part])
            logit = law.bias + law.scales[0] * effects + law.scales[1] * pairs
            chance[part] = 1 / (1 + np.exp(-logit.astype(np.float64)))
        first = self.start + begin
        drawn = random_words(stream_key(law.key, 1), first, first + size) >> np.uint64(11)
        label = drawn.astype(np.float64) * 2.0**-53 < chance
        offsets = torch.arange(0, size * EACH + 1, EACH)
        return Batch(
            size,
            torch.zeros(size, 0),
            {
                f"A{f + 1}": Ids(torch.from_numpy(ids[f].reshape(-1)), offsets)
                for f in range(FIELDS)
            },
            label=torch.from_numpy(label.astype(np.float32)[:, None]),
            key=torch.from_numpy(chance),
        )


def draw(law: Law, first: int, ids: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Ids of samples first, first + 1, ... into `ids` (F, B, J); returns their effects and pairs (B,), not scaled."""
    size = ids.shape[1]
    item = FIELDS * EACH // 4  # words of a sample: four ids of 16 bits
    drawn = random_words(law.key, first * item, (first + size) * item).astype("<u8", copy=False)
    bits = drawn.view("<u2").reshape(size, FIELDS, EACH)
    now = np.arange(first, first + size)[:, None]
    effects = np.zeros(size, dtype=np.float32)
    sums = np.zeros((NUM_FACTORS, size), dtype=np.float32)
    squares = np.zeros(size, dtype=np.float32)
    for f in range(FIELDS):
        word = bits[:, f].astype(np.int64)
        place, damp = law.place_of.take(word), law.damp_of.take(word)
        own = law.births[f].take(place)
        own += now
        own >>= LIFE_BITS  # which of the place's pairs of ids
        own *= PLACES
        own += place
        np.multiply(own, 2, out=ids[f])
        word &= 1
        ids[f] += word
        hashed = own.view(np.uint64) * np.uint64(law.hashes[f])
        hashed >>= np.uint64(48)
        entry = hashed.view(np.int64)
        effects += _summed(law.normals, entry, damp)
        for r in range(NUM_FACTORS):
            factor = _summed(law.factors[r], entry, damp)
            sums[r] += factor
            squares += factor * factor
    return effects, ((sums * sums).sum(0) - squares) / 2


def _summed(numbers: Floats, entry: NDArray[np.int64], damp: Floats) -> Floats:
    """Return the sum, (B,)."""
    return np.einsum("bj,bj->b", numbers.take(entry), damp)


def _calibrated(law: Law) -> Law:
    """Scales and bias, on samples that are neither trained nor tested on; rounded, so that the order in which a machine
    adds up a mean cannot change them."""
    ids = np.empty((FIELDS, CALIBRATION_SAMPLES, EACH), dtype=np.int64)
    results = [part.astype(np.float64) for part in draw(law, CALIBRATION_START, ids)]
    effects, pairs = (
        round(SIGNAL * float(np.sqrt(share) / part.std()), 6)
        for share, part in zip(SHARES.values(), results, strict=True)
    )
    x = effects * results[0] + pairs * results[1]
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = np.mean(1 / (1 + np.exp(-x - middle))) < POSITIVE_RATE
        low, high = (middle, high) if is_low else (low, middle)
    return replace(law, scales=(effects, pairs), bias=round(low, 6))
