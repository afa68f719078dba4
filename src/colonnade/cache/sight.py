"""What owners see of coming batches: who uses a row, who uses it next, and so which rows stay with their only user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from colonnade import _native

NOBODY = -2
LONG = 4
"""Uses in a row are counted up to here."""
MANY = 2**16
"""Of what followed uses out of sight; beyond, what was long ago counts half."""
NAME_BYTES = 2
"""Of a row that its holder is told to give back: of its number, about."""


@dataclass(frozen=True, slots=True)
class Worth:
    """When bytes are saved by lending a row. Of `worth_of`."""

    least: int  # uses in a row that make up for its record both ways
    chance: float  # that each use must have of being followed by another, where none is in sight
    passes: bool  # whether for a copy, read once, a row is lent and given back with one use


class Decided(Protocol):
    """Of one batch: its rows (n,) as its plan lists them, and m others."""

    has: np.ndarray  # (n,) bool: it lies with its user
    keeps: np.ndarray  # (n,) bool: it does so after the batch
    # (n,) bool: it comes back with this batch, if it was not plain, and a copy stays
    copied: np.ndarray
    # (n,) int16: the rank that has a copy of it, which ends with the batch; or NOBODY
    reader: np.ndarray
    recalled: np.ndarray  # (m,) int64: rows of other batches, which come back with this one
    tables: np.ndarray  # (m,) int64: of these
    holders: np.ndarray  # (m,) int64: the ranks that they lie with
    recopied: np.ndarray  # (m,) bool: a copy stays there


class Sight:
    """Of the rows of all tables that one owner has. `see` is called of each batch in order, `decide` of each in order,
    too; in sight of a batch are those that were seen when it is decided on.

    * A row that a rank alone uses may stay there as long as no use by another is in sight: it comes back with the
      batch before which such a use came into sight, or with its last use before it. So nobody needs a row that is
      elsewhere, wherever at least one batch is in sight; where none is, `holds` is to be False.
    * It is lent where as many uses in a row by the rank alone, this one included, as make up for the state of the
      optimizer that travels both ways (`Worth.least`) are in sight; and where so many are to be expected, because of
      its table's rows that had been used as many times in a row, up to four, and then were out of sight, so large a
      share was next used by the rank alone again (`Worth.chance`).
    * Where its next use is in sight, by several ranks and it is one of them, a copy stays that it reads then: what it
      knows nobody has to send. It takes the room of a row.
    * A rank has at most `quota` rows of a table at a time. Rows with no use in sight come back for those that have one,
      those used longest ago first, and not for each other, for in turns they would drive each other out; where more
      would stay, those do that are used again soonest, of those alike the smallest ids.
    * Beyond what is in sight, a table's `quota` x ranks rows used last are remembered. Who is not comes back.

    All of it is a pure function of the order of calls, and no table's rows say anything of another's. Native: one call
    for all tables, some 60 bytes for each row that is remembered and 16 for each use in sight.
    """

    def __init__(
        self, num_ranks: int, quotas: Sequence[int], worths: Sequence[Worth], *, holds: bool
    ) -> None:
        """quotas, worths: by table. holds: whether rows stay that nobody uses in sight."""
        # Nothing else will be seen: no row of a batch stays that is not used in sight.
        self.is_over = False
        self._native = _native.Sight(
            num_ranks,
            np.array(quotas, np.int64),
            np.array([each.least for each in worths], np.int64),
            np.array([each.chance for each in worths], np.float64),
            np.array([each.passes for each in worths], bool),
            holds,
            MANY,
        )

    def see(self, counts: np.ndarray, plan: _native.Plan) -> None:
        """The next batch. counts (N, T): rows that each rank names, each once; plan: of these, of one owner."""
        self._native.see(counts, plan)

    def decide(self) -> Decided:
        """Of the oldest batch that was seen."""
        return self._native.decide(self.is_over)


def worth_of(value_bytes: int, gradient_bytes: int, moved_bytes: int) -> Worth:
    """Of a table; moved_bytes: of a record on its way to a rank and back. A row that stays for n uses moves so in place
    of n values and n gradients, and is named where it is given back out of turn; of uses each of which is followed by
    another with chance p there are 1 / (1 - p) in a row."""
    both = value_bytes + gradient_bytes
    return Worth(
        max(2, moved_bytes // both + 1),
        1 - both / (moved_bytes + NAME_BYTES),
        moved_bytes < both + value_bytes,
    )
