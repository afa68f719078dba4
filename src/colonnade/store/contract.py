"""Where rows rest: two contracts, and the values that cross them.

`Resident` is memory that compute reads in place. `Backing` is where rows rest; batches only.
All tables of a rank go through one call: ids (U,) int64 are grouped by table, `offsets` (T + 1,)
int64 delimits the groups, ids are unique within a group. Slots are 32-bit row numbers inside a
table's slab, int32 tensors whose bits are an unsigned number.

A *record* is a row at rest: weights | optimizer state | clock (uint64), `Table.record_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Some trained rows of a table."""

    ids: Tensor  # (N,) int64
    weights: Tensor  # (N, width of this rank's slice) of the table's dtype
    clocks: Tensor  # (N,) int64: updates applied


@dataclass(frozen=True, slots=True)
class RowView:
    """Where a table's rows lie, for operations that work on them in place."""

    address: int  # of row 0's weights
    stride_bytes: int
    dim: int
    dtype: str
    device: str = "cpu"
    rows: Tensor | None = None  # (slots, dim) on `device`: operations take it, not the address


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
class SegmentEntry:
    """One immutable segment of a commit."""

    number: int
    stripe: int  # of the directory it lies in
    num_bytes: int
    keys_bytes: int  # of its key list
    header_crc: int
    checksum: int  # of the header and all records
    num_records: int
    num_live: int  # rows of this commit


@dataclass(frozen=True, slots=True)
class Manifest:
    """The immutable content of one commit of one table's shard."""

    step: int
    table: str
    record_bytes: int
    num_rows: int
    lifetime_bytes: int  # written by this store since it began
    live_bytes: int  # of the live bitmaps' file
    live_crc: int
    segments: tuple[SegmentEntry, ...]  # ascending numbers; each holds rows of this commit


class Resident(Protocol):
    """Thread rule: any method may be called from any thread; the implementation locks. Jobs are waited for in the order
    of their acquires, at least by whoever reads or changes the rows."""

    def acquire(
        self, ids: Tensor, offsets: Tensor, next_use: Tensor | None = None
    ) -> tuple[Tensor, object]:
        """Unique ids (U,) -> slots (U,) int32, pinned until released, and a job.

        Rows not resident are read from the backing; rows found nowhere are born. Their values are there once `wait`
        has returned for the job. Raises BudgetExceeded (nothing pinned, nothing moved) when they do not fit; never
        drops. next_use (U,) uint8: codes as in `Batch.next_use`, for choosing who leaves.
        """
        ...

    def wait(self, job: object) -> None:
        """Raises StorageError, CorruptionError naming the file that could not be read; so does every later call."""
        ...

    def before_update(self, slots: Tensor, offsets: Tensor) -> None:
        """Before rows change: a commit under way may still need them as they are."""
        ...

    def release(self, slots: Tensor, offsets: Tensor, *, dirty: bool) -> None:
        """Undo one `acquire`, after its `wait`. `dirty`: the rows may have been trained, which their clocks tell."""
        ...

    def read(self, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        """Weights by table, [(U_t, D_t)], copied; absent rows read as their first value. Leaves no trace."""
        ...

    def views(self) -> list[RowView]:
        """By table. Addresses never change while the store is open."""
        ...


class Backing(Protocol):
    """One table's rows at rest. Missing is not an error. Any thread may call anything."""

    record_bytes: int

    def __len__(self) -> int:
        """Live rows."""
        ...

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        """ids (N,), out (N, record_bytes) uint8 caller-owned; rows not found are left untouched.

        Sees the rows as of the call, whatever is written before `wait`.
        """
        ...

    def write(
        self, ids: Tensor, records: Tensor, heat: Tensor | None = None, for_commit: bool = False
    ) -> Pending:
        """Latest write wins, of equal ids the last. Visible to `read` at once; durable only after `commit`.

        heat (N,) uint8: how often the rows are used, kept with them. `for_commit`: the rows are what the
        frozen content (`freeze`) is to hold of these ids.
        """
        ...

    def delete(self, ids: Tensor) -> None: ...

    def scan(self) -> Iterator[RowBatch]:
        """Every live row once, as of the call."""
        ...

    def freeze(self) -> None:
        """What is there now, and later writes `for_commit`, are what the next `commit` commits. Fast."""
        ...

    def commit(self, step: int) -> Manifest:
        """Durable and immutable from here on: what was frozen, or what is there now. Ends the freeze."""
        ...

    def thaw(self) -> None:
        """Give up what was frozen: after a commit that failed."""
        ...

    def prune(self, keep_steps: Collection[int]) -> None:
        """Forget the commits not in `keep_steps`."""
        ...

    def close(self) -> None: ...
