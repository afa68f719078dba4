"""Contracts of the row stores, `Resident` (rows in memory) and `Backing` (rows in files), and the values they exchange.

Compute reads and updates the rows of a `Resident` in place. A `Backing` is read and written in batches only.
One call serves all tables of a rank: ids (U,) int64 are grouped by table, `offsets` (T + 1,) int64 delimits the groups,
ids are unique within a group. Slots are 32-bit row numbers inside a table's slab, as int32 tensors of unsigned bits.

A *record* is a row as stored: weights | optimizer state | clock (uint64; bit 62: `ops.optimizers.IS_LOADED`),
`Table.record_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Trained rows of one table."""

    ids: Tensor  # (N,) int64
    weights: Tensor  # (N, width of this rank's slice) of the table's dtype
    clocks: Tensor  # (N,) int64: updates applied; loading weights is one


@dataclass(frozen=True, slots=True)
class RowView:
    """Memory layout of a table's rows, for operations that work on them in place."""

    address: int  # of row 0's weights
    stride_bytes: int
    dim: int
    dtype: str
    device: str = "cpu"
    rows: Tensor | None = None  # (slots, dim) on `device`: operations use it instead of the address


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Batch of stored rows, in no particular order."""

    ids: Tensor  # (N,) int64
    records: Tensor  # (N, record_bytes) uint8


class Pending(Protocol):
    """Operation in progress. It owns its buffers until `wait` returns."""

    def wait(self) -> Tensor:
        """Wait for the result (N,) bool: which ids exist (read); all true (write).

        Raises StorageError, CorruptionError.
        """
        ...


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Description of one immutable segment of a commit."""

    number: int
    stripe: int  # of the directory that stores it
    num_bytes: int
    keys_bytes: int  # of its key list
    header_crc: int
    checksum: int  # of the header and all records
    num_records: int
    num_live: int  # rows of this commit


@dataclass(frozen=True, slots=True)
class Manifest:
    """Immutable content of one commit of one table's shard."""

    step: int
    table: str
    record_bytes: int
    num_rows: int
    lifetime_bytes: int  # written by this store since it began
    live_bytes: int  # of the live bitmaps' file
    live_crc: int
    identity: str  # of the run, rank and world that wrote it
    store_id: str  # of the log's directories; "" without stripes
    stripe_paths: Mapping[int, str]  # of the directories besides its own
    segments: tuple[SegmentEntry, ...]  # ascending numbers; each contains rows of this commit


class Resident(Protocol):
    """Store of rows in memory. Any thread may call any method; the implementation locks.

    Jobs are waited for in the order of their acquires, at least by the thread that reads or changes the rows.
    """

    def acquire(
        self, ids: Tensor, offsets: Tensor, next_use: Tensor | None = None
    ) -> tuple[Tensor, object]:
        """Pin the rows of unique ids (U,). Returns slots (U,) int32, pinned until released, and a job.

        Rows that are not resident are read from the backing; rows that do not exist are initialised. Their values are
        in memory once `wait(job)` has returned. Raises BudgetExceeded (nothing pinned, nothing moved) if they do not
        fit; never drops a row of the call. next_use (U,) uint8: codes as in `Batch.next_use`, for choosing victims.
        """
        ...

    def wait(self, job: object) -> None:
        """Wait until the job's rows are in memory.

        Raises StorageError, CorruptionError naming the file that could not be read; so does every later call.
        """
        ...

    def before_update(self, slots: Tensor, offsets: Tensor) -> None:
        """Save the current values of these rows if the commit in progress still needs them. Call before they change."""
        ...

    def release(self, slots: Tensor, offsets: Tensor, *, dirty: bool) -> None:
        """Undo one `acquire`, after its `wait`. `dirty`: the rows may have been trained; their clocks tell which."""
        ...

    def read(self, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        """Copy weights by table, [(U_t, D_t)]; absent rows read as their first value. Changes nothing in the store."""
        ...

    def views(self) -> list[RowView]:
        """Return a view of each table. Addresses never change while the store is open."""
        ...


class Backing(Protocol):
    """Stored rows of one table. A missing row is not an error. Any thread may call any method."""

    record_bytes: int

    def __len__(self) -> int:
        """Return the number of live rows."""
        ...

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        """Start reading ids (N,) into out (N, record_bytes) uint8, which the caller owns; absent rows stay untouched.

        Reads the rows as of the call, whatever is written before `wait`.
        """
        ...

    def write(
        self,
        ids: Tensor,
        records: Tensor,
        frequencies: Tensor | None = None,
        for_commit: bool = False,
    ) -> Pending:
        """Write records of rows. The latest write wins; of equal ids in one call, the last.

        Visible to `read` at once; durable only after `commit`. frequencies (N,) uint8: access frequency of the rows,
        stored with them. `for_commit`: the records belong to the frozen content (`freeze`).
        """
        ...

    def delete(self, ids: Tensor) -> None: ...

    def scan(self) -> Iterator[RowBatch]:
        """Yield every live row once, as of the call."""
        ...

    def freeze(self) -> None:
        """Fix the content of the next `commit`: the rows of now, and later writes with `for_commit`. Fast."""
        ...

    def commit(self, step: int) -> Manifest:
        """Make the frozen content, or else the present one, durable and immutable. Ends the freeze."""
        ...

    def thaw(self) -> None:
        """Give up the frozen content, after a commit that failed."""
        ...

    def prune(self, keep_steps: Collection[int]) -> None:
        """Delete the commits that are not in `keep_steps`."""
        ...

    def close(self) -> None: ...
