"""Load of each table per step, predicted from a profile: lookups, distinct rows, bytes. Pure functions.

Legend: b samples of a rank's batch, N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from colonnade.plan.measure.popularity import OPEN_ROOM, expected_used_rows
from colonnade.plan.measure.profile import Profile
from colonnade.plan.plan import EXACT, Codecs
from colonnade.store.budget import slot_bytes
from colonnade.table import Feature, Table, TableSide, describe_whole_row_setting
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS


@dataclass(frozen=True, slots=True)
class ColumnLoad:
    """Lookups of one feature in one rank's batch."""

    lookups: float
    """Mean number of lookups."""
    longest: int
    """Largest number of lookups of a sample."""
    is_weighted: bool = False
    """True if each lookup has a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLoad:
    """Load of one table per step, the mean over steps. Rows are distinct rows; lookups and bags include repeats."""

    name: str
    width: int
    """Number of elements of a row's weights."""
    value_bytes: int
    """Bytes of a row's weights in a message."""
    gradient_bytes: int
    """Bytes of the gradient of a row, or of a pooled bag, in a message."""
    bag_bytes: int
    """Bytes of a pooled bag in a message, without squares."""
    row_bytes: int
    """Bytes of a row's weights in memory."""
    rows: float
    """Number of rows of the table; a prediction for an open table."""
    slot_bytes: int
    """Bytes of a row's slot in memory."""
    samples: float
    """Number of samples b of a rank's batch."""
    unique_rank: float
    """Number of distinct rows in one rank's batch."""
    unique_host: float
    """Number of distinct rows in the batches of a host's ranks together."""
    unique_world: float
    """Number of distinct rows in the batches of all ranks together."""
    lookups: float
    """Number of lookups in one rank's batch."""
    columns: tuple[ColumnLoad, ...]
    """Features that read the table."""
    is_pooled: bool
    """True if no feature reads the rows as a sequence."""
    vocabulary: int = 0
    """Declared number of rows; 0: an open table with any 64-bit ids."""
    squares_bytes: float = 0.0
    """Bytes of the sums of squares of a sample's bags in a message, for operators over ids."""
    squares_gradient_bytes: float = 0.0
    """Bytes of their gradients in a message."""
    weight_bytes: int = 4
    """Bytes of a lookup's weight, for weighted features."""
    list_ratio: float = 1.0
    """Measured size of a list of distinct ids relative to evenly spread ids."""
    raw_list_ratio: float = 1.0
    """Measured size of a list of ids with repeats, relative to evenly spread ids."""
    may_be_cut: bool = False
    """True if rows may be cut by columns, because nothing needs whole rows."""
    births: float = 0.0
    """Number of rows in all ranks' batches that were never used before."""

    @property
    def bags(self) -> float:
        """Number of bags in one rank's batch, empty ones included."""
        return self.samples * len(self.columns)

    def expected_unique_rows(self, ranks: int, world: World) -> float:
        """Return the number of distinct rows in the batches of `ranks` ranks together.

        Interpolates the counts of one rank, one host and all ranks as powers of the number of ranks."""
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
        """Bytes of memory of all rows once."""
        return self.rows * self.slot_bytes


def build_table_loads(
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
    """Predict the load of each table per step from a profile of a sample.

    batch_size: samples over all ranks. last_batch: last batch of the run, which determines the rows of open tables and
    the births per step. num_samples: size of the data set, if known. codecs: encoding of rows and gradients."""
    rank_samples = batch_size / world.num_trainers
    profiled = {feature.name: feature for feature in profile.features}
    epoch = math.inf if num_samples is None else max(num_samples / batch_size, 1.0)
    loads = []
    for t, table in enumerate(tables):
        popularity = profile.tables[t].popularity(table.rows)
        sample_lookups = profile.lookups_per_sample(t)
        used_rows = expected_used_rows(
            popularity, sample_lookups * batch_size, min(last_batch, epoch)
        )
        unique_world = profile.expected_unique_rows(t, batch_size, popularity)
        readers = [feature for feature in features if feature.table == table.name]
        columns = [profiled[feature.name] for feature in readers if feature.name in profiled]
        dims = [part.dim for part in table.parts]
        dtype = getattr(torch, table.dtype)
        compute = getattr(torch, table.compute_dtype)
        list_ratio, raw_list_ratio = profile.tables[t].interpolate_size_ratios(rank_samples)
        values = CODECS[codecs.values]
        gradients = CODECS[codecs.gradients]
        loads.append(
            TableLoad(
                name=table.name,
                width=table.width,
                value_bytes=values.row_bytes(dims, dtype),
                gradient_bytes=gradients.row_bytes(dims, compute),
                bag_bytes=values.row_bytes(dims, compute),
                row_bytes=table.width * dtype.itemsize,
                weight_bytes=compute.itemsize,
                list_ratio=list_ratio,
                raw_list_ratio=raw_list_ratio,
                rows=float(table.rows) if table.rows else max(used_rows * OPEN_ROOM, unique_world),
                slot_bytes=slot_bytes(table),
                samples=rank_samples,
                unique_rank=profile.expected_unique_rows(t, rank_samples, popularity),
                unique_host=profile.expected_unique_rows(
                    t, rank_samples * world.trainers_per_host, popularity
                ),
                unique_world=unique_world,
                lookups=sample_lookups * rank_samples,
                columns=tuple(
                    ColumnLoad(
                        column.lookups * rank_samples / profile.samples,
                        column.longest,
                        column.is_weighted,
                    )
                    for column in columns
                ),
                vocabulary=table.rows or 0,
                is_pooled=all(feature.pooling != "sequence" for feature in readers),
                may_be_cut=not isinstance(table, TableSide)
                and not describe_whole_row_setting(
                    table, [p.name for p in table.parts if p.dim > 1]
                ),
                births=used_rows / last_batch if last_batch else 0.0,
            )
        )
    return loads
