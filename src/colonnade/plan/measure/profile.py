"""What a sample of the data says of each table: how much is read, how often the same row, how long after.

`profile` takes batches; all else is pure functions of numbers. A profile is a frozen value that round-trips through
JSON. Legend: n lookups, in the order of the samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch
from colonnade.batch import Ids as FeatureIds
from colonnade.data.counter import GAMMA, mix64
from colonnade.errors import ConfigError
from colonnade.formats import read_stamped, stamp
from colonnade.plan.measure.popularity import Popularity, from_spectrum
from colonnade.table import Feature, Table
from colonnade.wire.packing import (
    expected_list_bytes,
    expected_listed_bytes,
    listed_head_bytes,
    measured_bytes,
)

Ids = NDArray[np.int64]
Curve = tuple[tuple[float, ...], tuple[float, ...]]

REUSES = 2**18
"""Lookups of a table beyond which reuse distances are those of a sample of its ids."""
GROWTH_POINTS = 12
LISTED_BATCHES = 8
"""Batches whose ids are packed as if they travelled."""


@dataclass(frozen=True, slots=True)
class TableProfile:
    """Of one table; rows and lookups of the sample unless said otherwise."""

    name: str
    lookups: int
    unique_per_batch: float
    """Different rows of one batch, on average."""
    spectrum: tuple[tuple[int, ...], tuple[int, ...]]
    """(seen so many times, rows that were), ascending."""
    growth: tuple[tuple[int, ...], tuple[int, ...]]
    """(lookups, different rows among the first so many of them)."""
    recency: Curve
    """(rows a cache holds, share of lookups that miss it) of a cache of the rows used last, first touches included."""
    best: Curve
    """The same of a cache of the rows used most, as an unseen part of the data would find it."""
    most_unique: int = 0
    """Different rows of the fullest batch; 0: not known."""
    unique: Curve = ((), ())
    """(so many samples of a batch, different rows among them on average), ascending; up to a whole batch."""
    listing: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]] = ((), (), ())
    """(so many samples of a batch; bytes of their different ids as they travel, by those of as many that are evenly
    spread; the same of all ids as they come), ascending."""

    def list_ratios(self, samples: float) -> tuple[float, float]:
        """`listing` at so many samples of a batch; 1 where nothing was measured."""
        sizes, distinct, listed = self.listing
        if not sizes or samples <= 0:
            return 1.0, 1.0
        at = math.log(samples), np.log(sizes)
        return float(np.interp(*at, distinct)), float(np.interp(*at, listed))

    @property
    def rows(self) -> int:
        return sum(self.spectrum[1])

    def popularity(self, table_rows: int | None) -> Popularity:
        values, rows = (np.array(part, dtype=np.float64) for part in self.spectrum)
        return from_spectrum(values, rows, table_rows)


@dataclass(frozen=True, slots=True)
class FeatureProfile:
    name: str
    lookups: int
    longest: int
    """Most lookups of one sample."""
    is_weighted: bool


@dataclass(frozen=True, slots=True)
class Profile:
    samples: int
    batches: int
    tables: tuple[TableProfile, ...]
    largest_batch: int = 0
    """Samples; 0: not known."""
    features: tuple[FeatureProfile, ...] = ()

    @property
    def batch_size(self) -> float:
        return self.samples / self.batches

    def lookups_per_sample(self, t: int) -> float:
        return self.tables[t].lookups / self.samples

    def unique_rows(self, t: int, samples: float, of: Popularity) -> float:
        """Different rows of table t, whose popularity is `of`, among so many samples of a batch: as counted at the
        nearest sizes; in between and beyond, what the popularity says, as much off as it is there."""
        sizes, rows = self.tables[t].unique
        each = self.lookups_per_sample(t)
        if not sizes or not each or samples <= 0:
            return of.unique(each * max(samples, 0.0))
        ratios = [
            found / max(of.unique(each * size), 1e-300)
            for size, found in zip(sizes, rows, strict=True)
        ]
        ratio = float(np.interp(math.log(samples), np.log(sizes), ratios))
        return min(ratio * of.unique(each * samples), each * samples)

    def to_json(self) -> str:
        return json.dumps({**stamp("colonnade profile"), **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        values = read_stamped("profile", text, "colonnade profile")
        tables = tuple(TableProfile(**_tuples(table)) for table in values.pop("tables"))
        features = tuple(FeatureProfile(**feature) for feature in values.pop("features"))
        return cls(tables=tables, features=features, **values)


def profile(
    tables: Sequence[Table], features: Sequence[Feature], batches: Iterable[Batch]
) -> Profile:
    """Reads every batch it is given. Raises ConfigError where there is none."""
    numbers = {table.name: t for t, table in enumerate(tables)}
    parts: list[list[Ids]] = [[] for _ in tables]
    uniques, most = [0] * len(tables), [0] * len(tables)
    columns = {each.name: FeatureProfile(each.name, 0, 0, False) for each in features}
    sizes: list[int] = []
    counts = np.zeros((len(tables), 0))
    packed = np.zeros((len(tables), 4, 0))
    pieces = np.zeros(0)
    samples = count = largest = 0
    for batch in batches:
        if not batch.size:
            continue
        if not sizes:
            sizes = _halvings(batch.size)
            counts, pieces = np.zeros((len(tables), len(sizes))), np.zeros(len(sizes))
            packed = np.zeros((len(tables), 4, len(sizes)))
        samples, count, largest = samples + batch.size, count + 1, max(largest, batch.size)
        mine: list[list[Ids]] = [[] for _ in tables]
        owners: list[list[Ids]] = [[] for _ in tables]
        for feature in features:
            t = numbers[feature.table]
            ids, owner = _looked_up(batch.ids[feature.name], batch.size)
            mine[t].append(ids)
            owners[t].append(owner)
            columns[feature.name] = _seen(columns[feature.name], batch.ids[feature.name], owner)
        pieces += [batch.size // size for size in sizes]
        for t, several in enumerate(mine):
            ids = np.concatenate(several) if several else np.zeros(0, np.int64)
            owner = np.concatenate(owners[t]) if several else ids
            parts[t].append(ids)
            unique = len(np.unique(ids))
            uniques[t], most[t] = uniques[t] + unique, max(most[t], unique)
            counts[t] += unique_of_pieces(ids, owner, sizes, batch.size)
            if count <= LISTED_BATCHES:
                packed[t] += listing_of_pieces(ids, owner, sizes, tables[t].rows or 0)
    if not count:
        raise ConfigError(
            "the sample has no samples, so there is nothing to profile; give more data"
        )
    is_counted = pieces > 0
    found = [
        replace(
            profile_ids(table.name, np.concatenate(parts[t]), uniques[t] / count),
            most_unique=most[t],
            unique=(
                _floats(np.array(sizes)[is_counted]),
                _floats(counts[t][is_counted] / pieces[is_counted]),
            ),
            listing=_ratios(sizes, packed[t]),
        )
        for t, table in enumerate(tables)
    ]
    return Profile(samples, count, tuple(found), largest, tuple(columns.values()))


def _halvings(size: int) -> list[int]:
    """Whole, half, a quarter ... of a batch, ascending."""
    return sorted({-(-size >> k) for k in range(size.bit_length())} - {0} | {size})


def _looked_up(ids: FeatureIds, size: int) -> tuple[Ids, Ids]:
    """(E,) ids and the sample of each."""
    values = ids.values.numpy()
    samples = np.arange(size)
    return values, samples if ids.offsets is None else np.repeat(
        samples, ids.offsets.diff().numpy()
    )


def _seen(before: FeatureProfile, ids: FeatureIds, owner: Ids) -> FeatureProfile:
    longest = int(np.bincount(owner).max()) if len(owner) else 0
    return replace(
        before,
        lookups=before.lookups + len(owner),
        longest=max(before.longest, longest),
        is_weighted=before.is_weighted or ids.weights is not None,
    )


def unique_of_pieces(ids: Ids, owner: Ids, sizes: Sequence[int], batch_size: int) -> Ids:
    """(len(sizes),) by size: different ids of each whole run of so many samples, summed over the runs."""
    order = np.lexsort((owner, ids))
    ids, owner = ids[order], owner[order]
    is_same = ids[1:] == ids[:-1]
    found = np.zeros(len(sizes), dtype=np.int64)
    for i, size in enumerate(sizes):
        piece = owner // size
        is_new = piece < batch_size // size
        is_new[1:] &= ~(is_same & (piece[1:] == piece[:-1]))
        found[i] = is_new.sum()
    return found


def listing_of_pieces(ids: Ids, owner: Ids, sizes: Sequence[int], rows: int) -> NDArray[np.float64]:
    """(4, len(sizes)): of a batch's first samples of each size, bytes of the different ids as they travel, of as many
    that are evenly spread; of all ids as they come, of evenly spread ones. rows 0: an open table."""
    found = np.zeros((4, len(sizes)))
    for i, size in enumerate(sizes):
        some = ids[owner < size]
        if len(some):
            distinct, listed = measured_bytes(torch.from_numpy(some), rows)
            spread = expected_list_bytes(len(np.unique(some)), rows, 1)
            head = listed_head_bytes(len(some), rows)
            found[:, i] = (
                distinct, spread, max(listed - head, 0.0), expected_listed_bytes(len(some), rows, 1) - head,
            )  # fmt: skip
    return found


def _ratios(sizes: Sequence[int], packed: NDArray[np.float64]) -> tuple:
    is_seen = packed[1] > 0
    distinct, spread, listed, listed_spread = packed[:, is_seen]
    return (
        _floats(np.array(sizes, dtype=np.float64)[is_seen]),
        _floats(distinct / spread),
        _floats(listed / np.maximum(listed_spread, 1.0)),
    )


def profile_ids(name: str, ids: Ids, unique_per_batch: float) -> TableProfile:
    """Of the lookups of one table (n,) in order."""
    _, first, counts = np.unique(ids, return_index=True, return_counts=True)
    values, rows = np.unique(counts, return_counts=True)
    ends = np.unique(np.linspace(0, len(ids), GROWTH_POINTS + 1).round().astype(np.int64))[1:]
    seen = np.searchsorted(np.sort(first), ends)
    return TableProfile(
        name,
        len(ids),
        unique_per_batch,
        (_ints(values), _ints(rows)),
        (_ints(ends), _ints(seen)),
        recency_misses(ids, rate=min(1.0, REUSES / max(len(ids), 1))),
        best_misses(values, rows),
    )


def recency_misses(ids: Ids, *, rate: float = 1.0) -> Curve:
    """Miss ratios of caches of every size that keep the rows used last: exact at rate 1, else SHARDS (Waldspurger et
    al. 2015): the ids whose hash falls below `rate` stand for all, their distances scaled up."""
    if not len(ids):
        return (0.0,), (0.0,)
    kept = ids
    if rate < 1:
        hashes = mix64(ids.astype(np.uint64) + np.uint64(GAMMA))
        kept = ids[hashes < np.uint64(int(rate * 2**64))]
        if not len(kept):
            return (0.0,), (1.0,)
    distances = reuse_distances(kept)
    reuses = np.sort(distances[distances >= 0])
    expected = len(ids) * rate if rate < 1 else len(kept)
    first_bucket = expected - len(
        kept
    )  # SHARDS-adj: what the sample has too few of counts as distance 0
    capacity = np.zeros(1)
    if len(reuses):
        capacity = np.unique(np.append(0.0, np.geomspace(1, reuses[-1] + 1, 64).round()))
    hits = np.searchsorted(reuses, capacity, side="left").astype(np.float64)
    hits[capacity > 0] += first_bucket
    misses = np.clip(1 - hits / expected, 0.0, 1.0)
    return _floats(capacity / rate), _floats(misses)


def reuse_distances(ids: Ids) -> NDArray[np.int64]:
    """(n,) how many different ids stand between a lookup and the one before of the same id; -1 at the first.

    Of what lies between two lookups of an id, those are no first in between whose own last lookup lies there too: the
    distance is a length less a count of inversions, which a pass over the bits of the positions gives for all.
    """
    n = len(ids)
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    before = np.full(n, -1, dtype=np.int64)
    before[order[1:][same]] = order[:-1][same]
    again = np.flatnonzero(before >= 0)
    distances = np.full(n, -1, dtype=np.int64)
    distances[again] = again - before[again] - 1 - inversions(before[again])
    return distances


def inversions(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) by element: how many before it are larger. Values differ."""
    n = len(values)
    found = np.zeros(n, dtype=np.int64)
    if n < 2:
        return found
    # Blocks of positions of halving length, each in the order of values: of a position in a block's second half, what
    # comes later in that order and lies in the first half is larger and before it.
    order = np.argsort(values, kind="stable")
    for bit in reversed(range(int(n - 1).bit_length())):
        is_first = (order >> bit) & 1 == 0
        start = (order >> (bit + 1)) << (bit + 1)
        firsts = np.concatenate([[0], np.cumsum(is_first)])
        at = np.arange(n)
        end = np.minimum(start + (2 << bit), n)
        num_first = firsts[end] - firsts[start]
        before = firsts[at] - firsts[start]
        second = ~is_first
        found[order[second]] += num_first[second] - before[second]
        place = np.where(is_first, start + before, start + num_first + (at - start - before))
        following = np.empty_like(order)
        following[place] = order
        order = following
    return found


def best_misses(values: NDArray[np.int64], rows: NDArray[np.int64]) -> Curve:
    """Miss ratios of caches of the rows used most, from how many rows were seen how often (ascending).

    A row counts by what the rest of the sample says of it (each lookup left out once): seen r times, r - 1 of its
    lookups' peers. Counting the lookup itself would praise a cache of rows that were seen once.
    """
    if not len(values):
        return (0.0,), (0.0,)
    total = float(values @ rows)
    at_least = np.cumsum(rows[::-1])[::-1].astype(np.float64)  # rows seen at least values[i] times
    mass = np.cumsum((values * rows)[::-1])[::-1].astype(np.float64)
    # A cache of rows seen >= v times elsewhere catches lookups of rows seen >= v + 1 times in all.
    caught = np.array(
        [mass[np.searchsorted(values, v + 1)] if v + 1 <= values[-1] else 0.0 for v in values]
    )
    capacity = np.concatenate([[0.0], at_least[::-1]])
    misses = np.concatenate([[1.0], 1 - caught[::-1] / total])
    if len(capacity) > 256:
        chosen = np.unique(np.geomspace(1, len(capacity) - 1, 255).astype(np.int64))
        capacity, misses = capacity[np.r_[0, chosen]], misses[np.r_[0, chosen]]
    return _floats(capacity), _floats(misses)


def _ints(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).tolist())


def _floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float64).tolist())


def _tuples(values: dict) -> dict:
    return {
        name: tuple(map(tuple, value)) if isinstance(value, list) else value
        for name, value in values.items()
    }
