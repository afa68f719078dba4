"""Where rows rest: two contracts, and the values that cross them.

`Resident` is memory that compute reads in place. `Backing` is where rows rest; batches only.
All tables of a rank go through one call: ids (U,) int64 are grouped by table, `offsets` (T + 1,)
int64 delimits the groups, ids are unique within a group. Slots are 32-bit row numbers inside a
table's slab, int32 tensors whose bits are an unsigned number.

A *record* is a row at rest: weights | optimizer state | clock (uint64), `Table.record_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowView:
    """Where a table's rows lie, for operations that work on them in place."""

    address: int  # of row 0's weights
    stride_bytes: int
    dim: int
    dtype: str
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class RowBatch:
    """A run of rows at rest, in no particular order."""

    ids: Tensor  # (N,) int64
    records: Tensor  # (N, record_bytes) uint8


class Pending(Protocol):
    """An operation under way. Its buffers belong to it until `wait` returns."""

    def wait(self) -> Tensor:
        """Read: (N,) bool, which ids were found. Write: (N,) all true. Raises StorageError, CorruptionError."""
        ...


@dataclass(frozen=True, slots=True)
class Manifest:
    """The immutable content of one commit of one table's shard."""

    step: int
    table: str
    record_bytes: int
    num_rows: int
    segments: tuple[tuple[str, int, int], ...]  # (file name, bytes, checksum of its content)


class Resident(Protocol):
    """Thread rule: `acquire`, `release`, `read` may be called from different threads; the implementation locks."""

    def acquire(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Unique ids (U,) -> slots (U,) int32, pinned until released.

        Rows not resident are read from the backing; rows found nowhere are born. Raises
        BudgetExceeded (nothing pinned, nothing moved) when they do not fit; never drops.
        """
        ...

    def release(self, slots: Tensor, offsets: Tensor, *, dirty: bool) -> None:
        """Undo one `acquire`. `dirty`: the rows may have been trained since, which their clocks tell."""
        ...

    def read(self, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        """Weights by table, [(U_t, D_t)], copied; absent rows read as their first value. Leaves no trace."""
        ...

    def views(self) -> list[RowView]:
        """By table. Addresses never change while the store is open."""
        ...


class Backing(Protocol):
    """One table's rows at rest. Missing is not an error."""

    record_bytes: int

    def __len__(self) -> int:
        """Live rows."""
        ...

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        """ids (N,) unique, out (N, record_bytes) uint8 caller-owned; rows not found are left untouched."""
        ...

    def write(self, ids: Tensor, records: Tensor) -> Pending:
        """Latest write wins. Visible to `read` at once; durable only after `commit`."""
        ...

    def delete(self, ids: Tensor) -> None: ...

    def scan(self) -> Iterator[RowBatch]:
        """Every live row once."""
        ...

    def commit(self, step: int) -> Manifest:
        """Durable and immutable from here on."""
        ...
