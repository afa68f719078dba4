"""Load of a table in one step: lookups, distinct rows and bytes, as the mean over steps.

Legend: b samples of a rank's batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from colonnade.topology.world import World


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
class CacheLoad:
    """Rows of one rank's row cache in the messages of a step, the mean over steps."""

    listed: float
    """Number of rows whose ids are sent: without a copy, with one that is too old, or with a sum of gradients."""
    renewed: float
    """Number of requested rows with a copy, which is sent again only if the row has changed."""
    fetched: float
    """Number of rows that owners send."""
    pushed: float
    """Number of rows whose sum of gradients is sent."""
    record_bytes: int
    """Bytes of a row that an owner sends."""


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
    cache: CacheLoad | None = None
    """Messages under exchange "cached"; None: each rank has no cache of the table."""
    births: float = 0.0
    """Number of rows in all ranks' batches that were never used before."""

    @property
    def bags(self) -> float:
        """Number of bags in one rank's batch, empty ones included."""
        return self.samples * len(self.columns)

    def expected_unique_rows(self, num_ranks: int, world: World) -> float:
        """Return the number of distinct rows in the batches of `num_ranks` ranks together.

        Interpolates the counts of one rank, one host and all ranks as powers of the number of ranks."""
        values_by_count = {
            1: self.unique_rank,
            world.trainers_per_host: self.unique_host,
            world.num_trainers: self.unique_world,
        }
        counts = sorted(values_by_count)
        if not all(values_by_count.values()):
            return values_by_count[counts[-1]]
        logs = np.interp(
            math.log(num_ranks),
            [math.log(n) for n in counts],
            [math.log(values_by_count[n]) for n in counts],
        )
        return math.exp(float(logs))

    @property
    def total_bytes(self) -> float:
        """Bytes of memory of all rows once."""
        return self.rows * self.slot_bytes
