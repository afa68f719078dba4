"""What each table asks of a world per step, from a profile: pure functions of numbers.

Legend: b samples of a rank's batch, N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from colonnade.plan.measure.popularity import OPEN_ROOM, seen
from colonnade.plan.measure.profile import Profile
from colonnade.store.budget import slot_bytes
from colonnade.table import Feature, Table, TableSide, needs_whole_rows
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS, EXACT, Codecs


@dataclass(frozen=True, slots=True)
class ColumnLoad:
    """Of one feature."""

    lookups: float
    """Of one rank's batch."""
    longest: int
    """Most lookups of a sample."""
    is_weighted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLoad:
    """Of one table, the mean over steps. Rows are different ones; lookups and bags are counted as they come."""

    name: str
    width: int
    """Elements of a row's weights."""
    value_bytes: int
    """Of a row's weights as they travel."""
    gradient_bytes: int
    """Of a row's gradient as it travels, and of a pooled bag's."""
    bag_bytes: int
    """Of a pooled bag as it travels."""
    row_bytes: int
    """Of a row's weights as they lie."""
    rows: float
    """Of the whole table; of an open one, as many as are foretold."""
    slot_bytes: int
    samples: float
    """b"""
    unique_rank: float
    """Rows of one rank's batch."""
    unique_host: float
    """Rows of the batches of a host's ranks together."""
    unique_world: float
    """Rows of the batches of all ranks together."""
    lookups: float
    """Of one rank's batch."""
    columns: tuple[ColumnLoad, ...]
    """Features that read it."""
    is_pooled: bool
    """No feature reads its rows as a sequence."""
    vocabulary: int = 0
    """Rows as declared; 0: an open table, whose ids are taken to be any 64 bits."""
    weight_bytes: int = 4
    """Of a lookup's weight, where its feature has them."""
    list_ratio: float = 1.0
    """What a list of different ids takes, by what one of evenly spread ids would: measured."""
    listed_ratio: float = 1.0
    """The same of ids as they come."""
    may_be_cut: bool = False
    """Rows may lie in slices of columns: nothing of the table needs whole ones."""
    births: float = 0.0
    """Rows of all ranks' batches that were never used before."""

    @property
    def bags(self) -> float:
        """Of one rank's batch, empty ones too."""
        return self.samples * len(self.columns)

    def unique_of(self, ranks: int, world: World) -> float:
        """Rows of the batches of so many ranks together: between what is known of one, of a host and of all, as a power
        of their number."""
        known = {
            1: self.unique_rank,
            world.trainers_per_host: self.unique_host,
            world.num_trainers: self.unique_world,
        }
        counts = sorted(known)
        if not all(known.values()):
            return known[counts[-1]]
        logs = np.interp(
            math.log(ranks), [math.log(n) for n in counts], [math.log(known[n]) for n in counts]
        )
        return math.exp(float(logs))

    @property
    def total_bytes(self) -> float:
        """Memory that all its rows take once."""
        return self.rows * self.slot_bytes


def table_loads(
    tables: Sequence[Table],
    features: Sequence[Feature],
    profile: Profile,
    world: World,
    *,
    batch_size: float,
    last_batch: float = 0.0,
    num_samples: int | None = None,
    codecs: Codecs = EXACT,
) -> list[TableLoad]:
    """`batch_size` counts samples over all ranks; `last_batch` of the run says how many rows of open tables, and births
    per step, there will be; `num_samples`: of the data set, where that is known; `codecs`: what rows and
    gradients look like while they travel."""
    mine = batch_size / world.num_trainers
    counted = {feature.name: feature for feature in profile.features}
    epoch = math.inf if num_samples is None else max(num_samples / batch_size, 1.0)
    found = []
    for t, table in enumerate(tables):
        of = profile.tables[t].popularity(table.rows)
        each = profile.lookups_per_sample(t)
        ever = seen(of, each * batch_size, min(last_batch, epoch))
        whole = profile.unique_rows(t, batch_size, of)
        readers = [feature for feature in features if feature.table == table.name]
        columns = [counted[feature.name] for feature in readers if feature.name in counted]
        dims = [part.dim for part in table.parts]
        rows_of, compute = getattr(torch, table.dtype), getattr(torch, table.compute_dtype)
        list_ratio, listed_ratio = profile.tables[t].list_ratios(mine)
        values, gradients = CODECS[codecs.values], CODECS[codecs.gradients]
        found.append(
            TableLoad(
                name=table.name,
                width=table.width,
                value_bytes=values.row_bytes(dims, rows_of),
                gradient_bytes=gradients.row_bytes(dims, compute),
                bag_bytes=values.row_bytes(dims, compute),
                row_bytes=table.width * rows_of.itemsize,
                weight_bytes=compute.itemsize,
                list_ratio=list_ratio,
                listed_ratio=listed_ratio,
                rows=float(table.rows) if table.rows else max(ever * OPEN_ROOM, whole),
                slot_bytes=slot_bytes(table),
                samples=mine,
                unique_rank=profile.unique_rows(t, mine, of),
                unique_host=profile.unique_rows(t, mine * world.trainers_per_host, of),
                unique_world=whole,
                lookups=each * mine,
                columns=tuple(
                    ColumnLoad(
                        column.lookups * mine / profile.samples, column.longest, column.is_weighted
                    )
                    for column in columns
                ),
                vocabulary=table.rows or 0,
                is_pooled=all(feature.pooling != "sequence" for feature in readers),
                may_be_cut=not isinstance(table, TableSide)
                and not needs_whole_rows(table, [p.name for p in table.parts if p.dim > 1]),
                births=ever / last_batch if last_batch else 0.0,
            )
        )
    return found
