"""Samples of a file as numpy columns: sliced, gathered and concatenated into batches without a loop over samples.

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
    """Ids of S samples: sample i has `values[offsets[i]:offsets[i + 1]]`; offsets start at 0."""

    values: Longs  # (E,)
    offsets: Longs  # (S + 1,)
    weights: Floats | None = None  # (E,)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Encoded columns of S samples, never written to. `ids` are in the order of the schema's categorical columns."""

    dense: Floats  # (S, n)
    ids: tuple[Longs | Bags, ...]
    label: Floats | None = None  # (S, t)
    weight: Floats | None = None  # (S,)
    group: Longs | None = None  # (S,)
    key: NDArray | None = None  # (S,): integers, or texts as objects
    split_key: NDArray[np.float64] | None = None  # (S,): assigns samples to splits

    @property
    def size(self) -> int:
        return len(self.dense)

    def slice_rows(self, first_row: int, end_row: int) -> Chunk:
        """Return rows first_row .. end_row-1, as views."""
        if first_row == 0 and end_row == self.size:
            return self
        return Chunk(
            self.dense[first_row:end_row],
            tuple(_slice_id_column(ids, first_row, end_row) for ids in self.ids),
            *(None if a is None else a[first_row:end_row] for a in self._optional_columns()),
        )

    def gather_rows(self, row_indices: Longs) -> Chunk:
        """Copy the samples at `row_indices`, in that order."""
        return Chunk(
            self.dense.take(row_indices, axis=0),
            tuple(_gather_ids(ids, row_indices) for ids in self.ids),
            *(None if a is None else a.take(row_indices, axis=0) for a in self._optional_columns()),
        )

    def to_batch(self, categorical_names: Sequence[str]) -> Batch:
        """Return a batch that shares this chunk's memory. `categorical_names`: of the categorical columns."""
        import torch  # imported late, because `colonnade inspect` makes no batch and needs no torch

        from colonnade.batch import Batch

        label, weight, group, key, _ = self._optional_columns()
        return Batch(
            size=self.size,
            dense=torch.from_numpy(self.dense),
            ids={
                name: _convert_ids_to_tensors(ids)
                for name, ids in zip(categorical_names, self.ids, strict=True)
            },
            label=None if label is None else torch.from_numpy(label),
            sample_weight=None if weight is None else torch.from_numpy(weight),
            group=None if group is None else torch.from_numpy(group),
            key=key if key is None or key.dtype == object else torch.from_numpy(key),
        )

    def _optional_columns(self) -> tuple[NDArray | None, ...]:
        return self.label, self.weight, self.group, self.key, self.split_key


def concat_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Concatenate one or more chunks of the same schema."""
    if len(chunks) == 1:
        return chunks[0]
    first = chunks[0]
    optional = zip(*(chunk._optional_columns() for chunk in chunks), strict=True)
    return Chunk(
        np.concatenate([chunk.dense for chunk in chunks]),
        tuple(
            _concat_id_columns([chunk.ids[i] for chunk in chunks]) for i in range(len(first.ids))
        ),
        *(None if arrays[0] is None else np.concatenate(arrays) for arrays in optional),
    )


def _slice_id_column(ids: Longs | Bags, begin: int, end: int) -> Longs | Bags:
    if not isinstance(ids, Bags):
        return ids[begin:end]
    offsets = ids.offsets[begin : end + 1]
    first = offsets[0]
    last = offsets[-1]
    weights = None if ids.weights is None else ids.weights[first:last]
    return Bags(ids.values[first:last], offsets - first, weights)


def _gather_ids(ids: Longs | Bags, rows: Longs) -> Longs | Bags:
    if not isinstance(ids, Bags):
        return ids.take(rows)
    begins = ids.offsets.take(rows)
    return gather_bags(ids.values, begins, ids.offsets.take(rows + 1) - begins, ids.weights)


def gather_bags(
    values: Longs, bag_begins: Longs, bag_lengths: Longs, weights: Floats | None = None
) -> Bags:
    """Copy the bags `values[bag_begins[i] : bag_begins[i] + bag_lengths[i]]`."""
    offsets = np.zeros(len(bag_begins) + 1, dtype=np.int64)
    np.cumsum(bag_lengths, out=offsets[1:])
    # Id j of bag b is at begins[b] + (j - offsets[b]): repeat the shift, add j.
    indices = np.repeat(bag_begins - offsets[:-1], bag_lengths)
    indices += np.arange(len(indices))
    return Bags(values.take(indices), offsets, None if weights is None else weights.take(indices))


def _concat_id_columns(columns: list[Longs | Bags]) -> Longs | Bags:
    bags = [column for column in columns if isinstance(column, Bags)]
    if not bags:
        return np.concatenate(columns)  # type: ignore[arg-type]
    lengths = np.concatenate([np.diff(bag.offsets) for bag in bags])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    weights = [bag.weights for bag in bags if bag.weights is not None]
    values = np.concatenate([bag.values for bag in bags])
    return Bags(values, offsets, np.concatenate(weights) if weights else None)


def _convert_ids_to_tensors(ids: Longs | Bags) -> Ids:
    import torch

    from colonnade.batch import Ids

    if isinstance(ids, Bags):
        weights = None if ids.weights is None else torch.from_numpy(ids.weights)
        return Ids(torch.from_numpy(ids.values), torch.from_numpy(ids.offsets), weights)
    return Ids(torch.from_numpy(ids))
