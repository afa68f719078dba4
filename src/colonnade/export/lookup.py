"""`colonnade::lookup`: the lookups of a model as one operator of torch, a pure function of tensors.

    lookup(str layout, Tensor[] weights, Tensor[] keys, Tensor[] ids, Tensor[] lengths, SymInt size) -> Tensor[]

    layout   text that describes tables and features, one per line (`format_layout`)
    weights  by table, (N_t, width) rows
    keys     by table, (N_t,) int64 ascending: the id of each row; (0,) if row i is that of id i
    ids      by feature, (E_f,) int64
    lengths  by feature, (B,) int64: ids of each sample; (0,) for a feature with one id per sample
    size     B

Returns one tensor per field: pooled (B, dim), or one row per id (E_f, dim) for a sequence. An id without a row reads
its first value, as in training. Importing this module registers the operator. `cpp/lookup.cpp` is the same in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.errors import CorruptionError, DataError
from colonnade.lookup.kernels import NativeKernels
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    LookupColumns,
    Lookups,
    Output,
    build_lookup_columns,
    collect_lookups,
    id_range_error,
    list_lookup_outputs,
)
from colonnade.lookup.stacking import hash_ids, hashed_tables_by_feature, sum_hashed_rows
from colonnade.ops import reference
from colonnade.optimizers import SGD
from colonnade.store.dram import table_seed
from colonnade.table import POOLINGS, Feature, Table, Uniform

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class LookupLayout:
    """Parsed layout: what to look up, and how many rows each table has in an export."""

    declaration: EmbeddingDeclaration
    counts: tuple[int, ...]  # by table, N_t
    seeds: tuple[int, ...]  # by table, of first values
    has_lengths: tuple[bool, ...]  # by feature


def format_layout(
    declaration: EmbeddingDeclaration,
    table_row_counts: Sequence[int],
    seed: int,
    has_lengths: Sequence[bool],
) -> str:
    """Return the layout of these tables and features as text. table_row_counts: rows by table; seed: the collection's.

    version 1 DTYPE MASTER OUTPUT_DTYPE
    table NAME ROWS HASHES COUNT SEED PARTS (PART DIM SCALE) ...    ROWS 0: an open table; HASHES 0: ids are rows
    feature NAME TABLE POOLING HAS_LENGTHS                          TABLE: its number; POOLING: 0 sum, 1 mean, ...

    Names are quoted as in URLs; "-" is the empty name.
    """
    first = declaration.tables[0]
    lines = [f"version {LAYOUT_VERSION} {first.dtype} {int(first.master)} {declaration.output}"]
    for table, count in zip(declaration.tables, table_row_counts, strict=True):
        parts = " ".join(
            f"{_quote(part.name)} {part.dim} {part.init_scale!r}" for part in table.parts
        )
        numbers = f"{table.rows or 0} {table.hashes or 0} {count} {table_seed(seed, table.name)}"
        lines.append(f"table {_quote(table.name)} {numbers} {len(table.parts)} {parts}")
    for feature, is_bag in zip(declaration.features, has_lengths, strict=True):
        t = declaration.table_index_of(feature)
        pooling = POOLINGS.index(feature.pooling)
        lines.append(f"feature {_quote(feature.name)} {t} {pooling} {int(is_bag)}")
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def parse_layout(text: str) -> LookupLayout:
    """Parse the text of `format_layout`. Raises CorruptionError for any other text."""
    try:
        return _parse_lines([line.split() for line in text.splitlines()])
    except (ValueError, IndexError, KeyError) as error:
        raise CorruptionError(
            f"colonnade::lookup: got a layout that is damaged or another version's ({error}), wanted version "
            f"{LAYOUT_VERSION}. Export the model again"
        ) from None


def _parse_lines(lines: Sequence[list[str]]) -> LookupLayout:
    word, version, dtype, master, output = lines[0]
    if (word, version) != ("version", str(LAYOUT_VERSION)):
        raise ValueError(f"{word} {version}")
    tables: list[Table] = []
    features = []
    counts = []
    seeds = []
    has_lengths = []
    for kind, name, *numbers in lines[1:]:
        if kind == "feature":
            t, pooling, is_bag = map(int, numbers)
            features.append(Feature(unquote(name), tables[t].name, pooling=POOLINGS[pooling]))
            has_lengths.append(bool(is_bag))
            continue
        if kind != "table":
            raise ValueError(kind)
        rows, hashes, count, seed, num_parts = map(int, numbers[:5])
        parts = [tuple(numbers[i : i + 3]) for i in range(5, 5 + 3 * num_parts, 3)]
        dims = {_unquote(part): int(dim) for part, dim, _ in parts}
        scales = {_unquote(part): Uniform(scale=float(scale)) for part, _, scale in parts}
        is_whole = list(dims) == [""]
        tables.append(
            Table(
                unquote(name),
                dims[""] if is_whole else dims,
                rows=rows or None,
                hashes=hashes or None,
                optimizer=SGD(lr=1.0),  # unused
                initializer=scales[""] if is_whole else scales,
                dtype=dtype,  # type: ignore[arg-type]
                master=bool(int(master)),
            )
        )
        counts.append(count)
        seeds.append(seed)
    declaration = EmbeddingDeclaration(tuple(tables), tuple(features), {}, output)  # type: ignore[arg-type]
    return LookupLayout(declaration, tuple(counts), tuple(seeds), tuple(has_lengths))


def _quote(name: str) -> str:
    return quote(name, safe="") or "-"


def _unquote(name: str) -> str:
    return "" if name == "-" else unquote(name)


@dataclass(frozen=True, eq=False)
class LayoutReader:
    """Reader of the lookups of one layout, from tensors."""

    layout: LookupLayout
    kernels: NativeKernels
    lookup_columns: LookupColumns
    outputs: Sequence[Output]

    def read(
        self, table_weights: Sequence[Tensor], table_keys: Sequence[Tensor], batch: Batch
    ) -> list[Tensor]:
        """Return one tensor per field. Raises DataError, IdRangeError, CorruptionError."""
        declaration = self.layout.declaration
        self._check_rows(table_weights, table_keys)
        lookups = collect_lookups(hash_ids(batch, declaration), declaration, self.lookup_columns)
        index = np.empty(len(lookups.ids), np.int32)
        rows = [w.contiguous() for w in table_weights]
        columns_of: dict[int, list[int]] = {}
        for c, t in enumerate(self.lookup_columns.tables.tolist()):
            columns_of.setdefault(t, []).append(c)
        bounds = lookups.feature_offsets.tolist()
        for t, columns in columns_of.items():
            places = np.concatenate([np.arange(bounds[c], bounds[c + 1]) for c in columns])
            self._check_range(t, columns, lookups, bounds)
            ids = lookups.ids[torch.from_numpy(places)]
            slots, is_absent = _find_rows(table_keys[t], ids, len(rows[t]))
            if bool(is_absent.any()):
                rows[t] = self._gather_with_first_values(t, rows[t], ids, slots, is_absent)
                slots = torch.arange(len(ids))
            index[places] = slots.to(torch.int32).numpy()
        bases = np.array([table.data_ptr() for table in rows], dtype=np.int64)
        strides = np.array(
            [table.shape[1] * table.element_size() for table in rows], dtype=np.int64
        )
        pooled = self.kernels.pool(lookups, (bases, strides, torch.from_numpy(index), None))
        names = [output.names[0] for output in self.outputs]
        outputs = dict(zip(names, pooled, strict=True))
        outputs = sum_hashed_rows(outputs, self._hashes_of_sequences())
        return [outputs[field.name] for field in declaration.fields]

    def _check_rows(self, weights: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        for t, table in enumerate(self.layout.declaration.tables):
            count = self.layout.counts[t]
            wanted = (count, table.width)
            if tuple(weights[t].shape) != wanted or len(keys[t]) not in (0, count):
                raise CorruptionError(
                    f"table {table.name!r}: got rows of shape {tuple(weights[t].shape)}, wanted {wanted}. A program "
                    "that was exported without its rows is loaded by colonnade.export.load_program(folder)"
                )

    def _check_range(
        self,
        table_index: int,
        lookup_columns: Sequence[int],
        lookups: Lookups,
        column_bounds: Sequence[int],
    ) -> None:
        table = self.layout.declaration.tables[table_index]
        if table.rows is None:
            return
        for c in lookup_columns:
            ids = lookups.ids[column_bounds[c] : column_bounds[c + 1]]
            wrong = ((ids < 0) | (ids >= table.rows)).nonzero()
            if len(wrong):
                first = int(wrong[0])
                feature = self.layout.declaration.features[self.lookup_columns.features[c]]
                raise id_range_error(feature.name, first, int(ids[first]), table.rows, table.name)

    def _gather_with_first_values(
        self,
        table_index: int,
        table_rows: Tensor,
        looked_up_ids: Tensor,
        row_slots: Tensor,
        is_absent: Tensor,
    ) -> Tensor:
        """Return the row of each id (E, width): its own, or its first value."""
        table = self.layout.declaration.tables[table_index]
        seed = self.layout.seeds[table_index]
        gathered = table_rows.new_empty(len(looked_up_ids), table.width)
        gathered[~is_absent] = table_rows[row_slots[~is_absent]]
        missing = looked_up_ids[is_absent]
        dtype = torch.float32 if table.master else getattr(torch, table.dtype)
        first_values = torch.cat(
            [
                reference.initial_values(
                    missing, part.dim, seed, part.init_scale, dtype, first_column=part.column
                )
                for part in table.parts
            ],
            dim=1,
        )
        gathered[is_absent] = (
            reference.split_masters(first_values)[0] if table.master else first_values
        )
        return gathered

    def _hashes_of_sequences(self) -> dict[str, int]:
        declaration = self.layout.declaration
        tables = hashed_tables_by_feature(declaration)
        return {
            field.name: int(tables[feature.name].hashes or 1)
            for field in declaration.fields
            for feature in [declaration.features[field.feature]]
            if feature.pooling == "sequence" and feature.name in tables
        }


@lru_cache(maxsize=64)
def open_layout(text: str) -> LayoutReader:
    """Return the reader of a layout, built once. Raises CorruptionError as `parse_layout`."""
    layout = parse_layout(text)
    outputs = list_lookup_outputs(layout.declaration)
    columns = build_lookup_columns(layout.declaration)
    return LayoutReader(
        layout, NativeKernels(layout.declaration, columns, outputs, 1), columns, outputs
    )


def _find_rows(keys: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the row of each id (E,) int64, and which ids have none (E,) bool."""
    if not len(keys):
        return ids, (ids < 0) | (ids >= count)
    slots = torch.searchsorted(keys, ids).clamp_(max=count - 1)
    return slots, keys[slots] != ids


@torch.library.custom_op("colonnade::lookup", mutates_args=(), device_types="cpu")
def lookup(
    layout: str,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    ids: Sequence[Tensor],
    lengths: Sequence[Tensor],
    size: int,
) -> list[Tensor]:
    """Look up all features of a batch: see the module's text. Raises DataError, IdRangeError, CorruptionError."""
    reader = open_layout(layout)
    by_name = {}
    for feature, values, counts, has_lengths in zip(
        reader.layout.declaration.features, ids, lengths, reader.layout.has_lengths, strict=True
    ):
        offsets = _build_offsets(feature.name, counts, len(values), size) if has_lengths else None
        by_name[feature.name] = Ids(values.contiguous(), offsets)
    return reader.read(weights, keys, Batch(size, torch.empty(size, 0), by_name))


def _build_offsets(feature_name: str, bag_lengths: Tensor, num_ids: int, batch_size: int) -> Tensor:
    if (
        bag_lengths.shape != (batch_size,)
        or bag_lengths.dtype != torch.int64
        or bool((bag_lengths < 0).any())
    ):
        raise DataError(
            f"feature {feature_name!r}: got lengths of {bag_lengths.dtype} and shape "
            f"{tuple(bag_lengths.shape)}, wanted {batch_size} "
            "numbers of ids, int64, 0 or more"
        )
    offsets = torch.cat([bag_lengths.new_zeros(1), bag_lengths.cumsum(0)])
    if int(offsets[-1]) != num_ids:
        raise DataError(
            f"feature {feature_name!r}: got lengths of {int(offsets[-1])} ids in all, wanted {num_ids}, as it has"
        )
    return offsets


@lookup.register_fake
def _(layout, weights, keys, ids, lengths, size):
    parsed = parse_layout(layout)
    declaration = parsed.declaration
    outputs = []
    for field in declaration.fields:
        feature = declaration.features[field.feature]
        num_rows = ids[field.feature].shape[0] if feature.pooling == "sequence" else size
        outputs.append(weights[0].new_empty(num_rows, field.dim, dtype=declaration.output_dtype))
    return outputs
