"""Samples in memory as columns: user tensors, MovieLens, small files. The order is shuffled anew each epoch.

Legend: S samples in memory, B samples of a batch, E ids of a multi-hot column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema
from colonnade.data.counter import random_permutation, stream_key
from colonnade.errors import DataError, IdRangeError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorColumns:
    """Columns of S checked samples as tensors. The splits of a data set share them."""

    dense: Tensor  # (S, n) float32
    ids: Mapping[str, Ids]  # values (S,) or (E,) int64
    label: Tensor | None = None  # (S, tasks) float32
    sample_weight: Tensor | None = None  # (S,) float32
    group: Tensor | None = None  # (S,) int64

    @property
    def num_samples(self) -> int:
        return self.dense.shape[0]

    def gather_rows(self, rows_B: Tensor) -> Batch:
        """Gather the samples at `rows_B` (B,) int64, in that order, into a batch."""
        return Batch(
            size=len(rows_B),
            dense=self.dense.index_select(0, rows_B),
            ids={name: gather_ids(ids, rows_B) for name, ids in self.ids.items()},
            label=None if self.label is None else self.label.index_select(0, rows_B),
            sample_weight=_gather_rows(self.sample_weight, rows_B),
            group=_gather_rows(self.group, rows_B),
        )


def _gather_rows(column: Tensor | None, rows_B: Tensor) -> Tensor | None:
    return None if column is None else column.index_select(0, rows_B)


def gather_ids(ids: Ids, rows_B: Tensor) -> Ids:
    """Gather the ids of the samples `rows_B`; bags are copied whole, in order."""
    if ids.offsets is None:
        return Ids(ids.values.index_select(0, rows_B), None, _gather_rows(ids.weights, rows_B))
    begins_B = ids.offsets.index_select(0, rows_B)
    lengths_B = ids.offsets.index_select(0, rows_B + 1) - begins_B
    offsets, indices_E = locate_bag_items(begins_B, lengths_B)
    return Ids(ids.values.index_select(0, indices_E), offsets, _gather_rows(ids.weights, indices_E))


def locate_bag_items(begins_B: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offsets (B + 1,) of bags side by side, and the index of each item (E,) where bag b begins at
    `begins_B[b]`."""
    offsets = torch.zeros(len(lengths_B) + 1, dtype=torch.int64)
    torch.cumsum(lengths_B, 0, out=offsets[1:])
    # Item j of bag b is at begins[b] + (j - offsets[b]): repeat the shift, add j.
    indices_E = torch.repeat_interleave(begins_B - offsets[:-1], lengths_B)
    indices_E += torch.arange(len(indices_E))
    return offsets, indices_E


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource(BlockSource):
    """Source over `rows` of `columns`, in the order of `rows`, or with `shuffle_key` in a new order each epoch."""

    schema: Schema
    columns: TensorColumns
    rows: Tensor | None = field(default=None, kw_only=True)  # (num_samples,) int64; None: all
    shuffle_key: int | None = field(default=None, kw_only=True)

    @property
    def num_samples(self) -> int:
        return self.columns.num_samples if self.rows is None else len(self.rows)

    def epoch_order(self, epoch: int) -> Tensor:
        """Return row indices (num_samples,) int64 in the order in which `epoch` reads them."""
        rows = torch.arange(self.num_samples) if self.rows is None else self.rows
        if self.shuffle_key is None:
            return rows
        key = stream_key(self.shuffle_key, epoch)
        return rows[torch.from_numpy(random_permutation(self.num_samples, key))]

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        order = self.epoch_order(epoch)
        return (self.columns.gather_rows(order[begin:end]) for begin, end in blocks)


def open_tensors(
    ids: Mapping[str, ArrayLike | Ids],
    *,
    dense: ArrayLike | None = None,
    dense_names: Sequence[str] | None = None,
    cardinalities: Mapping[str, int] | None = None,
    label: ArrayLike | None = None,
    label_names: Sequence[str] = ("label",),
    sample_weight: ArrayLike | None = None,
    group: ArrayLike | None = None,
    shuffle_seed: int | None = None,
    name: str = "tensors",
) -> TensorSource:
    """Return a source over the caller's columns, which are checked once, and copied only if their dtype must change.

    Every column is a tensor, or what `numpy.asarray` makes an array of numbers of: an array, a list, a pandas Series.

    ids            by column: (S,) integers, or `Ids` with offsets (S + 1,) for multi-hot columns
    dense          (S, n); every value finite
    cardinalities  by column, if its ids are 0 .. cardinality-1; other columns accept any 64-bit id
    label          (S, tasks), or (S,) for one task; NaN is an unknown label
    label_names    names of the columns of `label`
    shuffle_seed   None: every epoch reads in the order of the tensors
    name           name of the data set, for messages

    Raises DataError (IdRangeError for ids) naming column and row, counted from 0.
    """
    values = {
        key: Ids(as_tensor(name, f"ids[{key!r}]", v))
        if not isinstance(v, Ids)
        else replace(v, values=as_tensor(name, f"ids[{key!r}].values", v.values))
        for key, v in ids.items()
    }
    dense, label, sample_weight, group = (
        None if column is None else as_tensor(name, argument, column)
        for argument, column in (
            ("dense", dense),
            ("label", label),
            ("sample_weight", sample_weight),
            ("group", group),
        )
    )
    cardinalities = cardinalities or {}
    for unknown in cardinalities.keys() - values.keys():
        raise DataError(
            f"{name}: cardinalities names the column {unknown!r}, which ids does not have; "
            f"the columns are {', '.join(values)}"
        )
    num_samples = _count_tensor_samples(name, values, dense, label)
    if dense is None:
        dense = torch.empty(num_samples, 0)
    if dense_names is None:
        dense_names = [f"dense{i}" for i in range(dense.shape[-1])]
    columns = TensorColumns(
        dense=_check_dense_tensor(name, dense, dense_names, num_samples),
        ids={
            k: _check_id_tensor(name, k, v, cardinalities.get(k), num_samples)
            for k, v in values.items()
        },
        label=_check_label_tensor(name, label, label_names, num_samples),
        sample_weight=_check_float_tensor(name, "sample_weight", sample_weight, num_samples),
        group=group,
    )
    if group is not None and (group.shape != (num_samples,) or group.dtype != torch.int64):
        raise _build_shape_error(name, "group", group, f"({num_samples},) int64")
    categorical = tuple(
        Column(key, cardinalities.get(key), "one" if v.offsets is None else "bag")
        for key, v in values.items()
    )
    schema = Schema(tuple(dense_names), categorical, tuple(label_names))
    return TensorSource(schema, columns, shuffle_key=shuffle_seed)


def as_tensor(data_set_name: str, argument_name: str, column_values: Any) -> Tensor:
    """Return a column as a tensor, without a copy where numpy has it as a writable array. Raises DataError."""
    if isinstance(column_values, Tensor):
        return column_values
    try:
        return torch.from_numpy(np.require(column_values, requirements=["C", "W"]))
    except (TypeError, ValueError):
        raise DataError(
            f"{data_set_name}: got {argument_name} of type {type(column_values).__name__}, wanted numbers: a "
            "tensor, or what numpy.asarray "
            "takes. Texts become ids where files are read: open_csv, open_parquet"
        ) from None


def _count_tensor_samples(
    data_set_name: str, ids: Mapping[str, Ids], dense: Tensor | None, label: Tensor | None
) -> int:
    for tensor in (dense, label):
        if tensor is not None:
            return len(tensor)
    for column in ids.values():
        return len(column.values) if column.offsets is None else len(column.offsets) - 1
    raise DataError(f"{data_set_name}: got no column at all, wanted ids, dense or a label")


def _build_shape_error(name: str, column: str, got: Tensor, wanted: str) -> DataError:
    kind = str(got.dtype).removeprefix("torch.")
    return DataError(f"{name}, column {column}: got {tuple(got.shape)} {kind}, wanted {wanted}")


def _first_true(mask: Tensor) -> int:
    return int(mask.to(torch.uint8).argmax())


def _check_dense_tensor(
    name: str, dense: Tensor, columns: Sequence[str], num_samples: int
) -> Tensor:
    if dense.dim() != 2 or dense.shape != (num_samples, len(columns)):
        raise _build_shape_error(name, "dense", dense, f"({num_samples}, {len(columns)}) floats")
    bad = ~dense.isfinite()
    if bad.any():
        row, column = divmod(_first_true(bad.flatten()), dense.shape[1])
        raise DataError(
            f"{name}, row {row}, column {columns[column]}: got {float(dense[row, column])}, "
            "wanted a finite number. Replace missing values (0 is common) before opening"
        )
    return dense.to(torch.float32)


def _check_label_tensor(
    name: str, label: Tensor | None, names: Sequence[str], num_samples: int
) -> Tensor | None:
    if label is None:
        return None
    shape = (num_samples, len(names))
    if tuple(label.shape) not in ({shape, shape[:1]} if len(names) == 1 else {shape}):
        raise _build_shape_error(
            name, "label", label, f"{shape} floats: a column for each label name"
        )
    values = label.to(torch.float32).reshape(shape)
    if values.isinf().any():
        row = _first_true(values.isinf().any(1))
        raise DataError(
            f"{name}, row {row}, column label: got inf or -inf, wanted a finite number, or NaN if unknown"
        )
    return values


def _check_float_tensor(
    name: str, column: str, values: Tensor | None, num_samples: int
) -> Tensor | None:
    if values is None:
        return None
    if tuple(values.shape) != (num_samples,):
        raise _build_shape_error(name, column, values, f"({num_samples},)")
    bad = ~values.isfinite()
    if bad.any():
        row = _first_true(bad.flatten())
        raise DataError(
            f"{name}, row {row}, column {column}: got {float(values.flatten()[row])}, "
            "wanted a finite number. Drop or repair the row before opening"
        )
    return values.to(torch.float32)


def _check_id_tensor(
    name: str, column: str, ids: Ids, cardinality: int | None, num_samples: int
) -> Ids:
    values = ids.values
    offsets = ids.offsets
    if values.dim() != 1 or values.is_floating_point() or values.is_complex():
        raise _build_shape_error(name, column, values, "one dimension of integers")
    values = values.to(torch.int64)
    if offsets is None:
        if len(values) != num_samples:
            raise _build_shape_error(name, column, values, f"({num_samples},) integers")
    else:
        if offsets.shape != (num_samples + 1,):
            raise _build_shape_error(
                name, f"{column}.offsets", offsets, f"({num_samples + 1},) int64"
            )
        offsets = offsets.to(torch.int64)
        if offsets[0] != 0 or offsets[-1] != len(values) or bool((offsets.diff() < 0).any()):
            raise DataError(
                f"{name}, column {column}: got offsets that start at {int(offsets[0])} and end at "
                f"{int(offsets[-1])}, wanted 0 .. {len(values)} (its number of ids), never decreasing"
            )
    if ids.weights is not None and ids.weights.shape != values.shape:
        raise _build_shape_error(
            name, f"{column}.weights", ids.weights, f"{tuple(values.shape)} floats"
        )
    if cardinality is not None:
        bad = (values < 0) | (values >= cardinality)
        if bad.any():
            at = _first_true(bad)
            row = at if offsets is None else int(torch.searchsorted(offsets, at, right=True)) - 1
            raise IdRangeError(
                f"{name}, row {row}, column {column}: got id {int(values[at])}, wanted "
                f"0 .. {cardinality - 1}. Raise its cardinality, or leave it out for an open table"
            )
    return Ids(values, offsets, ids.weights)
