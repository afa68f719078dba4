"""Fields side by side: all of them, those of tables on one rank, those of an output; and where the columns of the one
lie in the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from colonnade.exchange.contract import Consumer
from colonnade.exchange.layout import Declaration
from colonnade.interaction import Concat
from colonnade.topology.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Run:
    """Columns that lie side by side here and there."""

    here: int
    there: int
    width: int
    is_first: bool  # nobody has written them there before

    @property
    def columns_here(self) -> slice:
        return slice(self.here, self.here + self.width)

    @property
    def columns_there(self) -> slice:
        return slice(self.there, self.there + self.width)


@dataclass(frozen=True)
class Fields:
    """All fields of a declaration side by side, in the order in which outputs take them first."""

    declaration: Declaration
    order: tuple[int, ...]  # indices into Declaration.fields

    @cached_property
    def starts(self) -> dict[int, int]:
        """By field: its first column."""
        dims = [self.declaration.fields[i].dim for i in self.order]
        return dict(zip(self.order, np.cumsum([0, *dims])[:-1].tolist(), strict=True))

    @cached_property
    def width(self) -> int:
        return sum(self.declaration.fields[i].dim for i in self.order)

    @cached_property
    def features(self) -> tuple[int, ...]:
        """(C,) indices into Declaration.features, by column of lookups: each is looked up once, for all fields."""
        return tuple(dict.fromkeys(self.declaration.fields[i].feature for i in self.order))

    def share(self, rank: int, shardings: Sequence[Sharding]) -> Fields:
        """Those of tables that have rows on that rank."""
        parts, fields = self.declaration.parts, self.declaration.fields
        mine = [i for i in self.order if rank in shardings[parts[fields[i].part][0]].ranks]
        return Fields(self.declaration, tuple(mine))

    def as_sums(self) -> Declaration:
        """What an owner computes: one output with these fields, of sums, in the compute dtype."""
        declaration = self.declaration
        features = tuple(replace(declaration.features[f], pooling="sum") for f in self.features)
        names = tuple(declaration.fields[i].name for i in self.order)
        consumers = {"pooled": Consumer(Concat(), names)} if names else {}
        compute: Any = declaration.tables[0].compute_dtype
        return Declaration(declaration.tables, features, consumers, compute)


def runs_of(blocks: Sequence[Sequence[tuple[int, int]]], fields: Fields) -> list[list[Run]]:
    """blocks: of each, (field, its first column there), ascending. Where their columns lie among all fields'."""
    written: set[int] = set()
    found = []
    for block in blocks:
        runs: list[Run] = []
        for i, here in block:
            run = Run(here, fields.starts[i], fields.declaration.fields[i].dim, i not in written)
            written.add(i)
            last = runs[-1] if runs else None
            if last and (last.here + last.width, last.there + last.width, last.is_first) == (
                run.here, run.there, run.is_first,
            ):  # fmt: skip
                runs[-1] = replace(last, width=last.width + run.width)
            else:
                runs.append(run)
        found.append(runs)
    return found
