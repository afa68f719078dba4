"""Contracts of the row stores, `Resident` (rows in memory) and `Backing` (rows in files), and the values they exchange.

Compute reads and updates the rows of a `Resident` in place. A `Backing` is read and written in batches only.
One call serves all tables of a rank: ids (U,) int64 are grouped by table, `offsets` (T + 1,) int64 delimits the groups,
ids are unique within a group. Slots are 32-bit row numbers inside a table's slab, as int32 tensors of unsigned bits.

A *record* is a row as stored: weights | optimizer state | clock (uint64; bit 62: `ops.optimizers.IS_LOADED`),
`Table.record_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from colonnade.table import Table


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
class DeferredResult:
    """Pending operation whose result a function computes, at most once."""

    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.finish()


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


@dataclass(slots=True)
class RowSources:
    """Sources of the rows of `acquire`, and evicted rows. Numbers of rows since the store opened."""

    resident: int = 0
    mapped: int = 0  # from byte-addressable memory
    read: int = 0  # from files
    copied: int = 0  # from write buffers of the logs
    born: int = 0  # initialised
    evicted_clean: int = 0
    evicted_dirty: int = 0
    bytes_read: int = 0  # of records, from files
    bytes_mapped: int = 0  # of records, from byte-addressable memory
    bytes_evicted: int = 0  # of records
    stall_seconds: float = 0.0  # that `wait` waited for reads
    room_seconds: float = 0.0  # that `acquire` waited for the writer


LEVELS = ("held_bytes", "live_bytes")
"""Counts of the present state; the others only grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """Counts of one tier of one rank, since its store opened.

    A row that a batch needs is looked up from the top: a hit of the tier that has it, a miss of the tiers above. A row
    that no tier has is a miss of all of them, and is initialised.
    """

    hits: int = 0
    misses: int = 0
    reads: int = 0
    """Requests to the device."""
    read_bytes: int = 0
    """Bytes read from the device, in whole pages."""
    row_bytes: int = 0
    """Bytes of the records that these reads were for."""
    rows_written: int = 0
    """Rows written by the tier above."""
    rows_moved: int = 0
    """Rows rewritten by garbage collection."""
    payload_bytes: int = 0
    """Bytes of `rows_written`, as records."""
    written_bytes: int = 0
    """Bytes written to the device: frames, moved rows, files of commits."""
    lifetime_bytes: int = 0
    """Bytes written to the device since the store was made, in all openings."""
    held_bytes: int = 0
    """Bytes in use now."""
    live_bytes: int = 0
    """Bytes of live rows among these."""
    stall_seconds: float = 0.0
    """Seconds that threads waited for this tier: for reads, or for room to write."""

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that hit; None without lookups."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def write_amplification(self) -> float | None:
        """Bytes written for each byte of a row from the tier above."""
        return _ratio(self.written_bytes, self.payload_bytes)

    @property
    def space_amplification(self) -> float | None:
        """Bytes in use for each byte of a live row."""
        return _ratio(self.held_bytes, self.live_bytes)

    def subtract_earlier(self, before: TierCounts) -> TierCounts:
        """Subtract earlier counts; those of the present state (`LEVELS`) stay as they are."""
        return TierCounts(
            **{
                field.name: getattr(self, field.name)
                - (0 if field.name in LEVELS else getattr(before, field.name))
                for field in fields(self)
            }
        )

    def __add__(self, other: TierCounts) -> TierCounts:
        return TierCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    @classmethod
    def of(cls, values: Mapping[str, int]) -> TierCounts:
        """Build counts from a record's plain values; missing ones are 0, unknown ones are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Resident(Protocol):
    """Store of rows in memory. Any thread may call any method; the implementation locks.

    Jobs are waited for in the order of their acquires, at least by the thread that reads or changes the rows.
    """

    @property
    def tables(self) -> tuple[Table, ...]: ...

    @property
    def backings(self) -> tuple[Backing, ...]:
        """Stores of the rows that are not in memory, by table; () for none."""
        ...

    @property
    def sources(self) -> RowSources: ...

    @property
    def releases(self) -> int:
        """Number of calls of `release`, for `wait_for_release`."""
        ...

    def acquire(
        self, ids: Tensor, table_offsets: Tensor, next_use_codes: Tensor | None = None
    ) -> tuple[Tensor, object]:
        """Pin the rows of unique ids (U,). Returns slots (U,) int32, pinned until released, and a job.

        Rows that are not resident are read from the backing; rows that do not exist are initialised. Their values are
        in memory once `wait(job)` has returned. Raises BudgetExceeded (nothing pinned, nothing moved) if they do not
        fit; never drops a row of the call. next_use_codes (U,) uint8: codes as in `Batch.next_use`, for choosing
        victims.
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

    def release(self, slots: Tensor, table_offsets: Tensor, *, dirty: bool) -> None:
        """Undo one `acquire`, after its `wait`. `dirty`: the rows may have been trained; their clocks tell which."""
        ...

    def wait_for_release(self, releases: int, seconds: float) -> bool:
        """Wait until `release` was called more than `releases` times; False after `seconds`."""
        ...

    def read(self, ids: Tensor, table_offsets: Tensor) -> list[Tensor]:
        """Copy weights by table, [(U_t, D_t)]; absent rows read as their first value. Changes nothing in the store.

        table_offsets (T + 1,): bounds of each table's ids.
        """
        ...

    def views(self) -> list[RowView]:
        """Return a view of each table. Addresses never change while the store is open."""
        ...

    def write_rows(self, table_index: int, ids: Tensor, records: Tensor) -> None:
        """Overwrite rows with these records (N, record_bytes) uint8; ids (N,) unique. They are then dirty.

        Raises BudgetExceeded if they do not fit in memory at once.
        """
        ...

    def delete(self, table_index: int, ids: Tensor) -> None:
        """Delete rows, ids (N,) unique, here and in every store below. Rows in use are initialised again in place."""
        ...

    def scan(self, table_index: int, rows_per_item: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (ids (N,), records (N, record_bytes)) of the trained rows, each once, about `rows_per_item` at a time.

        Rows newer than their backing are written to it first, as `flush` does.
        """
        ...

    def flush(self) -> int:
        """Write every row newer than its backing; returns the number of rows written. They stay resident."""
        ...

    def clocks(self, table_index: int, slots: Tensor) -> Tensor:
        """Return the numbers of updates (N,) int64 of rows in slots (N,) int32."""
        ...

    def num_rows(self, table_index: int) -> int:
        """Return the number of the table's rows in main memory."""
        ...

    def resident_bytes(self) -> int:
        """Return the bytes of main memory in use by rows, state and index."""
        ...

    def pinned_share(self) -> float:
        """Return the largest share of pinned slots of any table; 0 if the store never evicts."""
        ...

    def count_tiers(self) -> dict[str, TierCounts]:
        """Return the counts of each tier, from the top: "hbm" if rows are on a device, "dram", "mapped" if it has whole
        tables or evicted rows, "ssd" if there are logs. Costs microseconds a table.
        """
        ...

    def begin_commit(self) -> None:
        """Fix the content that `finish_commit` makes durable: the rows as of now, between two steps.

        Raises StorageError if a backing cannot begin; then no commit has begun.
        """
        ...

    def finish_commit(self, step: int) -> list[Manifest]:
        """Make the rows of the commit durable. Any thread; training may continue.

        Raises StorageError: nothing is lost; call again, or `abandon_commit`.
        """
        ...

    def abandon_commit(self) -> None:
        """Give up the commit in progress, if any: its rows become part of the next one."""
        ...


class Backing(Protocol):
    """Stored rows of one table. A missing row is not an error. Any thread may call any method."""

    record_bytes: int

    def __len__(self) -> int:
        """Return the number of live rows."""
        ...

    def read(self, ids: Tensor, records_out: Tensor) -> Pending:
        """Start reading ids (N,) into records_out (N, record_bytes) uint8, which the caller owns; absent rows stay
        untouched.

        Reads the rows as of the call, whatever is written before `wait`.
        """
        ...

    def write(
        self,
        ids: Tensor,
        records: Tensor,
        access_frequencies: Tensor | None = None,
        is_for_commit: bool = False,
    ) -> Pending:
        """Write records of rows. The latest write wins; of equal ids in one call, the last.

        Visible to `read` at once; durable only after `commit`. access_frequencies (N,) uint8: access frequency of the
        rows, stored with them. `is_for_commit`: the records belong to the frozen content (`freeze`).
        """
        ...

    def delete(self, ids: Tensor) -> None: ...

    def scan(self) -> Iterator[RowBatch]:
        """Yield every live row once, as of the call."""
        ...

    def freeze(self) -> None:
        """Fix the content of the next `commit`: the rows of now, and later writes with `is_for_commit`. Fast."""
        ...

    def commit(self, step: int) -> Manifest:
        """Make the frozen content, or else the present one, durable and immutable. Ends the freeze."""
        ...

    def thaw(self) -> None:
        """Give up the frozen content, after a commit that failed."""
        ...

    def prune(self, retained_steps: Collection[int]) -> None:
        """Delete the commits that are not in `retained_steps`."""
        ...

    def close(self) -> None: ...
