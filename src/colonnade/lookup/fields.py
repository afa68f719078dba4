"""Column layouts of blocks of pooled fields, and the runs of columns to copy from one layout to another."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from colonnade.interaction import Concat
from colonnade.lookup.layout import Consumer, EmbeddingDeclaration, list_lookup_outputs
from colonnade.topology.sharding import Sharding


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """Run of columns that are contiguous in a block and in the whole."""

    block_start: int
    whole_start: int
    width: int
    is_first: bool  # no earlier block has these columns
    block_columns: slice = field(init=False, compare=False)
    whole_columns: slice = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Made once, because a step uses them dozens of times.
        object.__setattr__(
            self, "block_columns", slice(self.block_start, self.block_start + self.width)
        )
        object.__setattr__(
            self, "whole_columns", slice(self.whole_start, self.whole_start + self.width)
        )


ColumnKey = int | str
"""Key of columns: a field's index into Declaration.fields, or a consumer's name for its partial."""


@dataclass(frozen=True)
class FieldColumns:
    """Columns of a message or a tensor, side by side, by key."""

    dims: Mapping[ColumnKey, int]
    """Widths, in order."""

    @cached_property
    def starts(self) -> dict[ColumnKey, int]:
        """First column of each key."""
        return dict(zip(self.dims, np.cumsum([0, *self.dims.values()])[:-1].tolist(), strict=True))

    @cached_property
    def width(self) -> int:
        return sum(self.dims.values())

    def slice_of(self, key: ColumnKey) -> slice:
        return slice(self.starts[key], self.starts[key] + self.dims[key])


@dataclass(frozen=True)
class FieldLayout:
    """Fields of a declaration, in the order of their first use by outputs: pooled ones, which are side by side, and
    sequences."""

    declaration: EmbeddingDeclaration
    order: tuple[int, ...]  # indices into Declaration.fields
    groups: Mapping[int, Hashable] = field(default_factory=dict)
    """Group of each field that is needed only as the sum of its group."""

    @cached_property
    def columns(self) -> FieldColumns:
        """Columns of the pooled fields; those of a group have the key of its first field."""
        return FieldColumns({i: self.declaration.fields[i].dim for i in self.column_keys})

    @cached_property
    def column_keys(self) -> tuple[int, ...]:
        """Key of the columns of each pooled field."""
        firsts: dict[Hashable, int] = {}
        return tuple(firsts.setdefault(self.groups.get(i, i), i) for i in self.pooled)

    @cached_property
    def pooled(self) -> tuple[int, ...]:
        return tuple(i for i in self.order if not self.is_sequence(i))

    @cached_property
    def sequences(self) -> tuple[int, ...]:
        """Fields of sequences, in declared order."""
        return tuple(sorted(i for i in self.order if self.is_sequence(i)))

    def is_sequence(self, i: int) -> bool:
        field = self.declaration.fields[i]
        return self.declaration.features[field.feature].pooling == "sequence"

    @property
    def width(self) -> int:
        return self.columns.width

    @cached_property
    def features(self) -> tuple[int, ...]:
        """Indices into Declaration.features by column of lookups, (C,). A feature is looked up once for all its
        fields."""
        return tuple(dict.fromkeys(self.declaration.fields[i].feature for i in self.order))

    def select_rank(
        self, rank: int, shardings: Sequence[Sharding], groups: Mapping[int, Hashable]
    ) -> FieldLayout:
        """Return the fields of tables that have rows on that rank, in these groups."""
        parts = self.declaration.parts
        fields = self.declaration.fields
        own_fields = [i for i in self.order if rank in shardings[parts[fields[i].part][0]].ranks]
        return FieldLayout(self.declaration, tuple(own_fields), groups)

    def as_sum_declaration(self, declared_pooling: Collection[int] = ()) -> EmbeddingDeclaration:
        """Return the declaration that an owner pools: one output with the sums of the pooled fields, and one for each
        sequence, in the compute dtype. declared_pooling: indices of features that it pools as they are declared."""
        declaration = self.declaration
        features = tuple(
            feature
            if f in declared_pooling or feature.pooling == "sequence"
            else replace(feature, pooling="sum")
            for f, feature in ((f, declaration.features[f]) for f in self.features)
        )
        names = tuple(declaration.fields[i].name for i in self.pooled)
        consumers = {"pooled": Consumer(Concat(), names)} if names else {}
        compute: Any = declaration.tables[0].compute_dtype
        sums = EmbeddingDeclaration(declaration.tables, features, consumers, compute)
        if len(self.columns.dims) == len(self.pooled):
            return sums
        pooled, *sequences = list_lookup_outputs(sums)
        starts = tuple(self.columns.starts[i] for i in self.column_keys)
        return replace(
            sums,
            shared=(replace(pooled, columns=starts, width=self.columns.width), *sequences),
        )


def find_runs(
    block_columns: Sequence[Iterable[tuple[ColumnKey, int]]], whole_columns: FieldColumns
) -> list[list[ColumnRun]]:
    """Find the runs of columns of each block in the whole. block_columns: (key, first column in the block),
    ascending."""
    written: set[ColumnKey] = set()
    all_runs = []
    for block in block_columns:
        runs: list[ColumnRun] = []
        for key, block_start in block:
            run = ColumnRun(
                block_start, whole_columns.starts[key], whole_columns.dims[key], key not in written
            )
            written.add(key)
            last = runs[-1] if runs else None
            if last and (
                last.block_start + last.width,
                last.whole_start + last.width,
                last.is_first,
            ) == (
                run.block_start,
                run.whole_start,
                run.is_first,
            ):
                runs[-1] = replace(last, width=last.width + run.width)
            else:
                runs.append(run)
        all_runs.append(runs)
    return all_runs
