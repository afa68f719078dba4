"""Samples of a file as numpy columns, ready for batches: cut, picked and joined without a loop over samples.

Legend: S samples, n dense columns, t labels, E ids of a bag or sequence column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from colonnade.batch import Batch, Ids

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """Sample i owns `values[offsets[i]:offsets[i + 1]]`; offsets start at 0."""

    values: Longs  # (E,)
    offsets: Longs  # (S + 1,)
    weights: Floats | None = None  # (E,)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`ids` in the order of the schema's categorical columns. Arrays are never written to once they are here."""

    dense: Floats  # (S, n)
    ids: tuple[Longs | Bags, ...]
    label: Floats | None = None  # (S, t)
    weight: Floats | None = None  # (S,)
    group: Longs | None = None  # (S,)
    key: NDArray | None = None  # (S,): integers, or texts as objects
    part: Longs | None = None  # (S,): ids by which samples are dealt to splits

    @property
    def size(self) -> int:
        return len(self.dense)

    def cut(self, begin: int, end: int) -> Chunk:
        """Samples begin .. end-1, as views."""
        if begin == 0 and end == self.size:
            return self
        return Chunk(
            self.dense[begin:end],
            tuple(_cut_ids(ids, begin, end) for ids in self.ids),
            *(None if a is None else a[begin:end] for a in self._single()),
        )

    def take(self, rows: Longs) -> Chunk:
        """The samples numbered `rows`, in that order, copied."""
        return Chunk(
            self.dense.take(rows, axis=0),
            tuple(_take_ids(ids, rows) for ids in self.ids),
            *(None if a is None else a.take(rows, axis=0) for a in self._single()),
        )

    def to_batch(self, names: Sequence[str]) -> Batch:
        """`names` of the categorical columns. Shares memory."""
        import torch  # not before a batch is made: `colonnade inspect` needs none

        from colonnade.batch import Batch

        label, weight, group, key, _ = self._single()
        return Batch(
            size=self.size,
            dense=torch.from_numpy(self.dense),
            ids={name: _tensors(ids) for name, ids in zip(names, self.ids, strict=True)},
            label=None if label is None else torch.from_numpy(label),
            sample_weight=None if weight is None else torch.from_numpy(weight),
            group=None if group is None else torch.from_numpy(group),
            key=key if key is None or key.dtype == object else torch.from_numpy(key),
        )

    def _single(self) -> tuple[NDArray | None, ...]:
        return self.label, self.weight, self.group, self.key, self.part


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one declaration, at least one, end to end."""
    if len(chunks) == 1:
        return chunks[0]
    first = chunks[0]
    singles = zip(*(chunk._single() for chunk in chunks), strict=True)
    return Chunk(
        np.concatenate([chunk.dense for chunk in chunks]),
        tuple(_join_ids([chunk.ids[i] for chunk in chunks]) for i in range(len(first.ids))),
        *(None if arrays[0] is None else np.concatenate(arrays) for arrays in singles),
    )


def _cut_ids(ids: Longs | Bags, begin: int, end: int) -> Longs | Bags:
    if not isinstance(ids, Bags):
        return ids[begin:end]
    offsets = ids.offsets[begin : end + 1]
    first, last = offsets[0], offsets[-1]
    weights = None if ids.weights is None else ids.weights[first:last]
    return Bags(ids.values[first:last], offsets - first, weights)


def _take_ids(ids: Longs | Bags, rows: Longs) -> Longs | Bags:
    if not isinstance(ids, Bags):
        return ids.take(rows)
    begins = ids.offsets.take(rows)
    return gather(ids.values, begins, ids.offsets.take(rows + 1) - begins, ids.weights)


def gather(values: Longs, begins: Longs, lengths: Longs, weights: Floats | None = None) -> Bags:
    """Bags of `values[begins[i] : begins[i] + lengths[i]]`, copied."""
    offsets = np.zeros(len(begins) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Id j of bag b lies at begins[b] + (j - offsets[b]): repeat the shift, add j.
    places = np.repeat(begins - offsets[:-1], lengths)
    places += np.arange(len(places))
    return Bags(values.take(places), offsets, None if weights is None else weights.take(places))


def _join_ids(parts: list[Longs | Bags]) -> Longs | Bags:
    bags = [part for part in parts if isinstance(part, Bags)]
    if not bags:
        return np.concatenate(parts)  # type: ignore[arg-type]
    lengths = np.concatenate([np.diff(bag.offsets) for bag in bags])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    weights = [bag.weights for bag in bags if bag.weights is not None]
    values = np.concatenate([bag.values for bag in bags])
    return Bags(values, offsets, np.concatenate(weights) if weights else None)


def _tensors(ids: Longs | Bags) -> Ids:
    import torch

    from colonnade.batch import Ids

    if isinstance(ids, Bags):
        weights = None if ids.weights is None else torch.from_numpy(ids.weights)
        return Ids(torch.from_numpy(ids.values), torch.from_numpy(ids.offsets), weights)
    return Ids(torch.from_numpy(ids))
