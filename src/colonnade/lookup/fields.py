"""Fields side by side: all of them, those of tables on one rank, those of an output; and where the columns of the one
lie in the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from colonnade.interaction import Concat
from colonnade.lookup.layout import Consumer, Declaration
from colonnade.topology.sharding import Sharding


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """Columns that lie side by side here and there."""

    here: int
    there: int
    width: int
    is_first: bool  # nobody has written them there before
    block_columns: slice = field(init=False, compare=False)
    whole_columns: slice = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: a step asks for them dozens of times.
        object.__setattr__(self, "columns_here", slice(self.here, self.here + self.width))
        object.__setattr__(self, "columns_there", slice(self.there, self.there + self.width))


ColumnKey = int | str
"""A field's index into Declaration.fields; or a consumer's name, for its partial."""


@dataclass(frozen=True)
class FieldColumns:
    """What lies side by side in a message or a tensor."""

    dims: Mapping[ColumnKey, int]
    """Widths, in order."""

    @cached_property
    def starts(self) -> dict[ColumnKey, int]:
        """The first column of each."""
        return dict(zip(self.dims, np.cumsum([0, *self.dims.values()])[:-1].tolist(), strict=True))

    @cached_property
    def width(self) -> int:
        return sum(self.dims.values())

    def of(self, key: ColumnKey) -> slice:
        return slice(self.starts[key], self.starts[key] + self.dims[key])


@dataclass(frozen=True)
class FieldLayout:
    """All fields of a declaration side by side, in the order in which outputs take them first; sequences, which are not
    pooled, beside them."""

    declaration: Declaration
    order: tuple[int, ...]  # indices into Declaration.fields

    @cached_property
    def columns(self) -> FieldColumns:
        """Of pooled ones."""
        return FieldColumns({i: self.declaration.fields[i].dim for i in self.pooled})

    @cached_property
    def pooled(self) -> tuple[int, ...]:
        return tuple(i for i in self.order if not self.is_sequence(i))

    @cached_property
    def sequences(self) -> tuple[int, ...]:
        """In declared order."""
        return tuple(sorted(i for i in self.order if self.is_sequence(i)))

    def is_sequence(self, i: int) -> bool:
        field = self.declaration.fields[i]
        return self.declaration.features[field.feature].pooling == "sequence"

    @property
    def width(self) -> int:
        return self.columns.width

    @cached_property
    def features(self) -> tuple[int, ...]:
        """(C,) indices into Declaration.features, by column of lookups: each is looked up once, for all fields."""
        return tuple(dict.fromkeys(self.declaration.fields[i].feature for i in self.order))

    def share(self, rank: int, shardings: Sequence[Sharding]) -> FieldLayout:
        """Those of tables that have rows on that rank."""
        parts, fields = self.declaration.parts, self.declaration.fields
        mine = [i for i in self.order if rank in shardings[parts[fields[i].part][0]].ranks]
        return FieldLayout(self.declaration, tuple(mine))

    def as_sum_declaration(self, but: Collection[int] = ()) -> Declaration:
        """What an owner computes: one output with the pooled fields, of sums, and one for each sequence, in the compute
        dtype. but: indices of features that it pools as they are declared."""
        declaration = self.declaration
        features = tuple(
            each if f in but or each.pooling == "sequence" else replace(each, pooling="sum")
            for f, each in ((f, declaration.features[f]) for f in self.features)
        )
        names = tuple(declaration.fields[i].name for i in self.pooled)
        consumers = {"pooled": Consumer(Concat(), names)} if names else {}
        compute: Any = declaration.tables[0].compute_dtype
        return Declaration(declaration.tables, features, consumers, compute)


def find_runs(
    blocks: Sequence[Iterable[tuple[ColumnKey, int]]], whole: FieldColumns
) -> list[list[ColumnRun]]:
    """blocks: of each, (what lies there, its first column there), ascending. Where that lies in the whole."""
    written: set[ColumnKey] = set()
    found = []
    for block in blocks:
        runs: list[ColumnRun] = []
        for key, here in block:
            run = ColumnRun(here, whole.starts[key], whole.dims[key], key not in written)
            written.add(key)
            last = runs[-1] if runs else None
            if last and (last.here + last.width, last.there + last.width, last.is_first) == (
                run.here, run.there, run.is_first,
            ):  # fmt: skip
                runs[-1] = replace(last, width=last.width + run.width)
            else:
                runs.append(run)
        found.append(runs)
    return found
