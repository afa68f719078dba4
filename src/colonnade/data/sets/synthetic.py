"""Clicks made to order: the shape and skew of Criteo, and a best reachable AUC known by construction.

Sample i is a pure function of (seed, i), so any range can be made at any time on any rank. Its
click is drawn with probability

    p = sigmoid(bias + sum of linear dense terms + sum over fields of effect(field, id)
                + sum over pairs of fields of one group of <factor(field, id), factor(field', id')>
                + sum over bags and sequences of the effects of their ids)

where effects and factors are normal numbers found by hashing the id. Each batch carries p in `Batch.key`:
no model can rank better than p does, and `train.metrics.ceiling` says how well that is.

Legend: B samples, F fields, R hidden factors of an id, L longest list, E ids of a list column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from math import gcd
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch, Ids
from colonnade.data.contract import START, Column, Position, Schema, Splits, rank_blocks
from colonnade.data.counter import GAMMA, MASK, mix64, permutation, stream_key, words
from colonnade.errors import ConfigError

NUM_DENSE = 13
NUM_FACTORS = 2
HALF_EFFECT_RANK = 200
"""Rare ids matter less: the id of this popularity rank has half the effect of its normal number, later ones
less still, so that what can be known is also what can be learned from a few samples."""
WORDS_PER_SAMPLE = 32  # label 0, dense 1..4, ids 5.. (two fields a word)
LABEL_WORD, DENSE_WORD, ID_WORD = 0, 1, 5
MAX_FIELDS = 2 * (WORDS_PER_SAMPLE - ID_WORD)
LONGEST = 8
"""Ids of a bag or a sequence, at most; every length from 0 on is as likely."""
LENGTH_WORD, LIST_WORD = 0, 1  # of a list column's own words
KNOT_BITS = 10
LOW_BITS = 32 - KNOT_BITS
NORMAL_BITS = 16

Floats = NDArray[np.float32]


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
    hash_factors: tuple[
        int, ...
    ]  # by task, odd: the top bits of id * factor pick the id's normal numbers
    group: int | None = None  # it interacts with the fields of the same


@dataclass(frozen=True, slots=True, eq=False)
class List:
    """A column of 0 .. L ids per sample: a bag, whose effect is the mean of its ids', or a sequence, oldest first,
    where the last id has its whole effect and each one before half of the next one's."""

    field: Field
    kind: Literal["bag", "sequence"]
    key: int  # of words of its own


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One label: bias + sum of scale * part."""

    dense_weights: Floats  # (13,)
    scales: dict[str, float]  # by part
    bias: float


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """Everything that makes samples of numbers."""

    key: int
    fields: tuple[Field, ...]
    lists: tuple[List, ...]
    normals: Floats  # (2**16,): standard normal numbers in random order: effects
    factors: Floats  # (R, 2**16): likewise
    quantiles: Floats  # (2**16,): the standard normal distribution's, in order: dense values
    tasks: tuple[Task, ...]


class Lists(NamedTuple):
    """The ids of one list column for B samples, in L slots of which each sample fills the first few."""

    ids: NDArray[np.int64]  # (L, B)
    ranks: Floats  # (L, B)
    lengths: NDArray[np.int64]  # (B,)

    def values(self) -> NDArray[np.int64]:
        """(E,): sample after sample."""
        given = np.arange(LONGEST)[None, :] < self.lengths[:, None]
        return self.ids.T[given]


class Draws(NamedTuple):
    """B samples without their labels."""

    dense: Floats  # (B, 13)
    ids: NDArray[np.int64]  # (F, B)
    ranks: Floats  # (F, B): popularity, from 0
    lists: tuple[Lists, ...]


def bases(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """(B,): the state of each sample's word 0 in the splitmix64 sequence that starts at `key`."""
    index = np.arange(first, first + count, dtype=np.uint64)
    return np.uint64(key) + index * np.uint64(GAMMA * WORDS_PER_SAMPLE & MASK)


def word(base: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    return mix64(base + np.uint64(GAMMA * number & MASK))


def draw(law: Law, first: int, count: int) -> Draws:
    """Samples first .. first + count - 1."""
    base = bases(law.key, first, count)
    ids = np.empty((len(law.fields), count), dtype=np.int64)
    ranks = np.empty(ids.shape, dtype=np.float32)
    bits = _halves(base, ID_WORD)
    for f, field in enumerate(law.fields):
        ranks[f] = _pick(field, bits(f), out=ids[f])
    return Draws(
        _draw_dense(law, base),
        ids,
        ranks,
        tuple(_draw_list(each, first, count) for each in law.lists),
    )


def uniform(law: Law, task: int, first: int, count: int) -> NDArray[np.float64]:
    """(B,): 53 bits of a word are a number in [0, 1): the label is 1 where it is below the probability."""
    drawn = word(bases(law.key, first, count), LABEL_WORD)
    if task:
        drawn = mix64(drawn ^ np.uint64(stream_key(law.key, task)))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw_dense(law: Law, base: NDArray[np.uint64]) -> Floats:
    """(B, 13): 16 bits pick a quantile of the standard normal distribution."""
    bits = np.stack([word(base, DENSE_WORD + i) for i in range(-(-NUM_DENSE // 4))], axis=1)
    return law.quantiles[bits.astype("<u8", copy=False).view("<u2")[:, :NUM_DENSE]]


def _draw_list(column: List, first: int, count: int) -> Lists:
    base = bases(column.key, first, count)
    lengths = (word(base, LENGTH_WORD) % np.uint64(LONGEST + 1)).astype(np.int64)
    ids = np.empty((LONGEST, count), dtype=np.int64)
    ranks = np.empty(ids.shape, dtype=np.float32)
    bits = _halves(base, LIST_WORD)
    for slot in range(LONGEST):
        ranks[slot] = _pick(column.field, bits(slot), out=ids[slot])
    return Lists(ids, ranks, lengths)


def _halves(base: NDArray[np.uint64], first: int):
    """i -> 32 bits per sample: words first, first + 1, ..., high half before low. To be asked for in order."""
    held = base

    def bits(i: int) -> NDArray[np.uint64]:
        nonlocal held
        if i % 2:
            return held & np.uint64(0xFFFFFFFF)
        held = word(base, first + i // 2)
        return held >> np.uint64(32)

    return bits


def _pick(field: Field, bits: NDArray[np.uint64], *, out: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids into `out` (B,); returns their popularity ranks (B,)."""
    knot = (bits >> np.uint64(LOW_BITS)).view(np.int64)
    x = (bits & np.uint64((1 << LOW_BITS) - 1)).astype(np.float64)
    x *= field.slopes.take(knot)
    x += field.knots.take(knot)
    rank = x.astype(np.int64)
    np.multiply(rank, field.spread, out=out)
    out += field.shift
    # By hand: division by one number is fast in numpy, its remainder is not.
    out -= out // field.rows * field.rows
    return rank


def _entries(field: Field, task: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where an id's normal numbers are, in [0, 2**16)."""
    hashed = ids.view(np.uint64) * np.uint64(field.hash_factors[task])
    hashed >>= np.uint64(64 - NORMAL_BITS)
    return hashed.view(np.int64)


def _effect(law: Law, entry: NDArray[np.int64], ranks: Floats) -> Floats:
    return law.normals.take(entry) / (1 + ranks * np.float32(1 / HALF_EFFECT_RANK))


def parts(law: Law, task: int, draws: Draws) -> dict[str, Floats]:
    """The terms of a task's logit before scaling, (B,) each; not those of the first task in a later one's.

    Sums run column by column, so a sample's terms have the same bits in any batch.
    """
    dense, weights = draws.dense, law.tasks[task].dense_weights
    linear = np.zeros(len(dense), dtype=np.float32)
    for i in range(NUM_DENSE):
        linear += dense[:, i] * weights[i]
    effects = np.zeros_like(linear)
    num_groups = 1 + max((f.group for f in law.fields if f.group is not None), default=-1)
    sums = np.zeros((num_groups, NUM_FACTORS, len(dense)), dtype=np.float32)
    squares = np.zeros((num_groups, len(dense)), dtype=np.float32)
    for f, field in enumerate(law.fields):
        entry = _entries(field, task, draws.ids[f])
        effects += _effect(law, entry, draws.ranks[f])
        if field.group is not None:
            for r in range(NUM_FACTORS):
                factor = law.factors[r].take(entry)
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
    found = {"dense": linear, "effects": effects, "interaction": interaction}
    for column, lists in zip(law.lists, draws.lists, strict=True):
        effect = _list_effect(law, task, column, lists)
        found[column.kind] = found[column.kind] + effect if column.kind in found else effect
    return found


def _list_effect(law: Law, task: int, column: List, lists: Lists) -> Floats:
    """(B,): 0 for an empty list."""
    total = np.zeros(len(lists.lengths), dtype=np.float32)
    for slot in range(LONGEST):
        entry = _entries(column.field, task, lists.ids[slot])
        age = lists.lengths - 1 - slot  # of a slot that is not filled: negative
        if column.kind == "bag":
            weight = np.float32(1) / np.maximum(lists.lengths, 1).astype(np.float32)
        else:
            weight = np.exp2(-np.maximum(age, 0).astype(np.float32))
        total += np.where(age >= 0, weight * _effect(law, entry, lists.ranks[slot]), np.float32(0))
    return total


def logit(task: Task, found: dict[str, Floats]) -> Floats:
    """(B,)."""
    total = np.full_like(found["dense"], task.bias)
    for name, part in found.items():
        total += np.float32(task.scales[name]) * part
    return total


def logits(law: Law, draws: Draws) -> list[Floats]:
    """(B,) by task."""
    first, *others = law.tasks
    found = [logit(first, parts(law, 0, draws))]
    for number, task in enumerate(others, 1):
        found.append(logit(task, {**parts(law, number, draws), "first": found[0]}))
    return found


# The 26 fields of the full Criteo Kaggle set, C1 .. C26.
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
INTERACTING = range(8, 129)
"""Without groups, fields of this many rows interact: few enough that a model sees each pair of ids often."""
LABEL_MODELS = {
    "interaction": {
        "dense": 0.35,
        "effects": 0.57,
        "interaction": 0.08,
        "bag": 0.2,
        "sequence": 0.2,
    },
    "linear": {"dense": 0.38, "effects": 0.62, "bag": 0.2, "sequence": 0.2},
    "pairs": {"dense": 0.2, "effects": 0.3, "interaction": 0.5, "bag": 0.2, "sequence": 0.2},
}
"""Parts of the logit's variance, relative to those that a stream has."""
FIRST_SHARE = 0.5
"""Of a later task's variance: what it has in common with the first."""
TEST_START = 1 << 40
CALIBRATION_START = 1 << 41
CALIBRATION_SAMPLES = 1 << 16
CHUNK = 4096
"""Samples made at a time: the scratch arrays then stay in a core's own cache."""
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
    tasks: int = 1,
    bags: Sequence[int] = (),
    sequences: Sequence[int] = (),
    seed: int = 0,
) -> Splits:
    """Train on samples 0 .. num_train-1; test on a range that never meets them, whatever num_train.

    cardinalities    rows of each field; `max_cardinality` caps them, None does not
    exponent         of the power law that popularity follows: the k-th most popular id has weight ~ k**-exponent
    signal           standard deviation of the logit: 0 is noise, 1.36 gives a ceiling AUC near 0.80
    positive_rate    share of clicks
    label_model      what the logit is made of: interaction (dense values and single ids, a little of pairs), linear
                     (no pairs: what logistic regression can learn), pairs (half of it is pairs)
    groups           names of fields, C1 .., that interact with each other and with no others, such as
                     [[C1, C2, C5], [C3, C4]]; default: all those of 8 to 128 rows, as one group
    tasks            labels: label, label2, ... Half of a later one's logit is the first one's. Each has a ceiling
    bags, sequences  rows of further columns B1 .., S1 .., each with 0 to 8 ids per sample
    seed             names the whole world: ids, effects and labels

    Raises ConfigError. The first time takes about 0.1 s, to set bias and scales on samples of a third range.
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
    for name, lists in (("bags", bags), ("sequences", sequences)):
        if not all(1 <= n <= MAX_ROWS for n in lists):
            raise ConfigError(f"got {name}={tuple(lists)}, wanted columns of 1 .. {MAX_ROWS} rows")
    if not 1 <= tasks <= 64:
        raise ConfigError(f"got tasks={tasks}, wanted 1 .. 64 labels")
    if label_model not in LABEL_MODELS:
        near = get_close_matches(str(label_model), LABEL_MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(LABEL_MODELS)}"
        raise ConfigError(f"got label_model={label_model!r}; {hint}")
    shares = LABEL_MODELS[label_model]
    if groups is not None and "interaction" not in shares:
        raise ConfigError(
            f"got groups for label_model={label_model!r}, in which no fields interact; leave them out"
        )
    group_of = _group_of(rows, groups) if "interaction" in shares else {}
    law = _calibrated_law(
        tuple(rows),
        tuple(group_of.items()),
        exponent=exponent,
        tasks=tasks,
        lists=(*(("bag", n) for n in bags), *(("sequence", n) for n in sequences)),
        seed=seed,
        label_model=label_model,
        signal=signal,
        positive_rate=positive_rate,
    )
    return Splits(
        train=SyntheticSource(law, 0, num_train),
        test=SyntheticSource(law, TEST_START, TEST_START + num_test) if num_test else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticSource:
    """Samples start .. stop-1 of a law, in that order in every epoch.

    `Batch.key`: p, (B,) float64; of several tasks (B, tasks).
    """

    law: Law
    start: int
    stop: int

    @property
    def schema(self) -> Schema:
        columns = [Column(field.name, field.rows) for field in self.law.fields]
        columns += [Column(each.field.name, each.field.rows, each.kind) for each in self.law.lists]
        return Schema(
            dense=tuple(f"I{i}" for i in range(1, NUM_DENSE + 1)),
            categorical=tuple(columns),
            labels=("label", *(f"label{i}" for i in range(2, len(self.law.tasks) + 1))),
        )

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
        blocks = rank_blocks(
            self.num_samples, batch_size, rank=rank, num_ranks=num_ranks, start=start
        )
        return (self.read(begin, end) for begin, end in blocks)

    def read(self, begin: int, end: int) -> Batch:
        """Samples begin .. end-1 of this source."""
        size, law = end - begin, self.law
        dense = np.empty((size, NUM_DENSE), dtype=np.float32)
        ids = np.empty((len(law.fields), size), dtype=np.int64)
        label = np.empty((size, len(law.tasks)), dtype=np.float32)
        probability = np.empty((len(law.tasks), size), dtype=np.float64)
        lengths = np.zeros((len(law.lists), size + 1), dtype=np.int64)
        values: list[list] = [[np.empty(0, dtype=np.int64)] for _ in law.lists]
        for at in range(0, size, CHUNK):
            part = slice(at, min(at + CHUNK, size))
            first, count = self.start + begin + at, part.stop - at
            draws = draw(law, first, count)
            dense[part], ids[:, part] = draws.dense, draws.ids
            for task, x in enumerate(logits(law, draws)):
                np.reciprocal(1 + np.exp(-x.astype(np.float64)), out=probability[task, part])
                label[part, task] = uniform(law, task, first, count) < probability[task, part]
            for i, lists in enumerate(draws.lists):
                lengths[i, at + 1 : part.stop + 1] = lists.lengths
                values[i].append(lists.values())
        columns = {f.name: Ids(torch.from_numpy(ids[i])) for i, f in enumerate(law.fields)}
        for i, each in enumerate(law.lists):
            offsets = torch.from_numpy(lengths[i].cumsum())
            columns[each.field.name] = Ids(torch.from_numpy(np.concatenate(values[i])), offsets)
        one = len(law.tasks) == 1
        return Batch(
            size=size,
            dense=torch.from_numpy(dense),
            ids=columns,
            label=torch.from_numpy(label),
            key=torch.from_numpy(probability[0] if one else probability.T.copy()),
        )


def _group_of(rows: Sequence[int], groups: Sequence[Sequence[str]] | None) -> dict[str, int]:
    """The group of each field that has one. Raises ConfigError."""
    names = [f"C{f + 1}" for f in range(len(rows))]
    if groups is None:
        return {name: 0 for name, n in zip(names, rows, strict=True) if n in INTERACTING}
    found: dict[str, int] = {}
    for number, group in enumerate(groups):
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
            if name in found:
                raise ConfigError(f"got {name} in two groups, wanted each field in one at most")
            found[name] = number
    return found


def _build_field(
    name: str, rows: int, exponent: float, key: int, *, tasks: int = 1, group: int | None = None
) -> Field:
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
        hash_factors=tuple(stream_key(key, 1, *task) | 1 for task in _numbers(tasks)),
        group=group,
    )


def _numbers(tasks: int) -> list[tuple[int, ...]]:
    """What goes into a key for each task: nothing for the first, so that it is the only one's."""
    return [(), *((task,) for task in range(1, tasks))]


@lru_cache(maxsize=4)
def _calibrated_law(
    rows: tuple[int, ...],
    group_of: tuple[tuple[str, int], ...],
    *,
    exponent: float,
    tasks: int,
    lists: tuple[tuple[str, int], ...],
    seed: int,
    label_model: str,
    signal: float,
    positive_rate: float,
) -> Law:
    """Build the law once for all sources that are opened of it; nothing changes one."""
    law = _build_law(rows, dict(group_of), exponent=exponent, tasks=tasks, lists=lists, seed=seed)
    return _calibrated(law, LABEL_MODELS[label_model], signal=signal, positive_rate=positive_rate)


def _build_law(
    rows: Sequence[int],
    group_of: dict[str, int],
    *,
    exponent: float,
    tasks: int,
    lists: Sequence[tuple],
    seed: int,
) -> Law:
    """Not calibrated yet: scales and biases are zero."""
    key = stream_key(seed)
    normal = NormalDist()
    table = 1 << NORMAL_BITS
    quantiles = np.array([normal.inv_cdf((i + 0.5) / table) for i in range(table)], np.float32)
    shuffled = [
        quantiles[permutation(table, stream_key(key, 2, r))] for r in range(NUM_FACTORS + 1)
    ]

    def field(name: str, n: int, *parts: int) -> Field:
        return _build_field(
            name, n, exponent, stream_key(key, *parts), tasks=tasks, group=group_of.get(name)
        )

    num_bags = sum(kind == "bag" for kind, _ in lists)
    columns = []
    for i, (kind, n) in enumerate(lists):
        name = f"B{i + 1}" if kind == "bag" else f"S{i - num_bags + 1}"
        number = i if kind == "bag" else i - num_bags
        own = (4 if kind == "bag" else 5, number)
        columns.append(List(field(name, n, *own), kind, stream_key(key, *own, 0)))
    return Law(
        key=stream_key(key, 0),
        fields=tuple(field(f"C{f + 1}", n, 1, f) for f, n in enumerate(rows)),
        lists=tuple(columns),
        normals=shuffled[0],
        factors=np.stack(shuffled[1:]),
        quantiles=quantiles,
        tasks=tuple(
            Task(_dense_weights(quantiles, stream_key(key, 3, *task)), {}, 0.0)
            for task in _numbers(tasks)
        ),
    )


def _dense_weights(quantiles: Floats, key: int) -> Floats:
    return quantiles[words(key, 0, NUM_DENSE) >> np.uint64(64 - NORMAL_BITS)]


def _calibrated(law: Law, shares: dict[str, float], *, signal: float, positive_rate: float) -> Law:
    """Set scales and biases on samples that are neither trained nor tested on.

    They are rounded, so that the order in which a machine adds up a mean cannot change them.
    """
    draws = draw(law, CALIBRATION_START, CALIBRATION_SAMPLES)
    tasks: list[Task] = []
    first: Floats | None = None
    for number, task in enumerate(law.tasks):
        found = parts(law, number, draws)
        if first is not None:
            found["first"] = first
        task = _calibrated_task(task, found, shares, signal=signal, positive_rate=positive_rate)
        first = logit(task, found) if first is None else first
        tasks.append(task)
    return replace(law, tasks=tuple(tasks))


def _calibrated_task(
    task: Task,
    raw: dict[str, Floats],
    shares: dict[str, float],
    *,
    signal: float,
    positive_rate: float,
) -> Task:
    parts = {name: part.astype(np.float64) for name, part in raw.items()}
    present = {
        name: np.std(part)
        for name, part in parts.items()
        if np.std(part) > 0 and (name in shares or name == "first")
    }
    own = sum(shares[name] for name in present if name != "first")
    share_of = {
        name: shares[name] / own * (1 - FIRST_SHARE if "first" in present else 1)
        for name in present
        if name != "first"
    }
    if "first" in present:
        share_of["first"] = FIRST_SHARE
    scales = {
        name: round(signal * float(np.sqrt(share_of[name]) / present[name]), 6)
        if name in present
        else 0.0
        for name in parts
    }
    x = np.sum([scales[name] * part for name, part in parts.items()], axis=0)
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(1 / (1 + np.exp(-x - middle))) < positive_rate:
            low = middle
        else:
            high = middle
    return replace(task, scales=scales, bias=round(low, 6))
