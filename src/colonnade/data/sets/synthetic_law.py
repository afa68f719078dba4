"""What makes samples of numbers: popularity, effects and interactions of ids, and the words they are drawn with.

Legend: B samples, F fields, R hidden factors of an id, L longest list, E ids of a list column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.data.counter import GAMMA, MASK, mix64, stream_key

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
