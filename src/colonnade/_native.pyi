"""Python interface of the native core. Internal: other modules wrap it, users do not call it.

Arrays are contiguous CPU tensors (torch or numpy). A call borrows them and does not retain them, unless the class says
so; results are torch tensors. Every call releases the GIL. Results have the same bits for any number of threads and any
instruction set. Import torch first: its OpenMP runtime determines the number of threads.

`ops/reference.py` defines each operation by a reference implementation. A wrong type, shape or offset raises
ValueError before anything changes; addresses (`int`) cannot be checked.

Legend: T tables, F features, B samples, E lookups, U unique rows, N ranks, D a table's dim.
    tables     offsets (T + 1,) int64: range of ids / slots of each table
    slots      (U,) int32, bits of a uint32: row number in a table's slab; -1 = absent
    element    one scalar of the tables' dtype (float32 or float64, the same for all tables of a store)
Feature-major order: all lookups of feature 0, then of feature 1, ...
"""

from typing import Any

Array = Any  # a contiguous CPU tensor of the dtype and shape the docstring says

def isa() -> str:
    """Return the instruction set in use, chosen at import: "avx512", "avx2" or "portable"."""

def available_isas() -> list[str]:
    """Return the instruction sets that this processor supports."""

def set_isa(name: str) -> None:
    """Select an instruction set (for tests). All give the same bits. ValueError if this processor lacks it."""

def set_num_threads(n: int) -> None:
    """Set the number of Colonnade's own threads, in addition to the caller's; 0 = as many as torch has."""

def limit_threads_here(n: int) -> None:
    """Limit calls from the calling thread to n threads; 0: no limit."""

def num_threads() -> int:
    """Return the number of threads that a call uses."""

def empty_bytes(n: int) -> Array:
    """Allocate (n,) uint8 with undefined content: 64-byte aligned, on huge pages if large. The block is reused once no
    tensor or view refers to it."""

class Lookups:
    """Lookups of a batch for all features, feature-major. Keeps the arrays alive.

    ValueError, with feature and position, if offsets decrease, overrun or have the wrong length.
    """

    def __init__(
        self,
        ids: Array,  # (E,) int64
        feature_offsets: Array,  # (F + 1,) int64: lookups of feature f
        feature_tables: Array,  # (F,) int32
        poolings: Array,  # (F,) uint8: 0 sum, 1 mean, 2 sequence, 3 sqrtn
        batch_size: int,  # B; ignored if every feature is a sequence
        bag_offsets: Array
        | None,  # (F * B + 1,) int64 into ids, feature-major; None: every feature is one-hot
        weights: Array | None,  # (E,) float32, or float64 with float64 tables
    ) -> None: ...
    @property
    def num_lookups(self) -> int: ...

class Plan:
    """Lookups of a batch grouped by unique row, by one stable radix sort per table.

    Unique ids are ordered by table, then by owner rank, then in an order that depends only on the ids.
    The arrays are views that keep the plan alive.
    """

    num_unique: int
    unique_ids: Array  # (U,) int64
    block_offsets: (
        Array  # (sum of num_owners + 1,) int64: ranges of unique rows of each table and owner
    )
    inverse: Array  # (E,) int32: the unique row of each lookup
    segment_offsets: Array  # (U + 1,) int32
    entries: (
        Array  # (E,) int32: positions of the lookups, grouped by unique row, ascending inside a row
    )

def make_plan(lookups: Lookups, table_rows: Array, num_owners: Array) -> Plan:
    """Sort and deduplicate a batch's ids by table and owner (`owner_of`).

    table_rows (T,) int64; 0 = open table. num_owners (T,) int64.
    IndexError "table <t> feature <f> position <i> id <id> rows <rows>" for an id outside a vocabulary table.
    """

def owner_of(ids: Array, rows: int, num_owners: int) -> Array:
    """Return the owner of each id, (N,) int32, by a mixed hash.

    Open table: (mix64(id) * num_owners) >> 64. Vocabulary table: (m + mix64(q)) mod num_owners, where
    q, m = divmod(id, num_owners); an owner's local row numbers q are then dense and free of id patterns. mix64 is the
    splitmix64 finaliser."""

def take(values: Array, index: Array, out: Array) -> None:
    """Gather out[i] = values[index[i]], all int32: from slots by unique row to slots by lookup. IndexError outside
    values."""

def pack_ids(
    ids: Array,  # (E,) int64
    firsts: Array,  # (L,) int64: list k is ids[firsts[k] : lasts[k]]
    lasts: Array,  # (L,) int64
    rows: Array,  # (L,) int64: of its table; 0 = open
    num_owners: Array,  # (L,) int64
    places: Array,  # (L,) int64: index of the owner of the list's ids, 0 .. num_owners - 1
    is_ascending: bool,
) -> tuple[Array, Array]:
    """Compress lists of ids for a message; return (bytes uint8, end of each list in them (L,) int64).

    native/packing.h defines the format. is_ascending: each list ascends strictly, in the order of `Plan.unique_ids`
    inside a block; otherwise ids are in any order and may repeat. Ids must belong to their list's owner: others decode
    as wrong ids."""

def unpack_ids(
    data: Array, rows: Array, num_owners: Array, places: Array, is_ascending: bool
) -> tuple[Array, Array, int]:
    """Decode L lists at the beginning of `data` (uint8); return (ids int64, counts (L,) int64, bytes read).

    Never reads beyond the end; needs memory of at most 1,024 times the message. ValueError "message of ids: got ..."
    for bytes that `pack_ids` does not produce, and for ids of another owner."""

def encode_rows(
    codec: str,  # bf16, fp16, int8
    values: Array,  # (n, W) float32
    dims: Array,  # (parts,) int32, W together
    ids: Array
    | None,  # (n,) int64: stochastic rounding by (seed, id, step, column); None: to nearest
    seed: int,
    step: int,
    out: Array,  # (n, bytes of a row) uint8
) -> None:
    """Encode rows for a message. exchange/codec.py defines the formats, exchange/codec_reference.py the exact bits."""

def decode_rows(codec: str, coded: Array, dims: Array, values: Array) -> None:
    """Decode bytes of `encode_rows`, or any bytes, to values (n, W) float32."""

def encode_thresholded(
    values: Array,  # (n,) float32
    residual: Array,  # (n,) float32: what earlier messages left out
    scale: float,  # of the residual in units of the values
    starts: Array,  # (blocks + 1,) int64: blocks of 1 to 65,536 elements, side by side
    slots: Array,  # (blocks,) int64: slots of each in the message
    thresholds: Array,  # (blocks,) float32
    step: int,
    new_residual: Array,  # (n,) float32, written
    num_passed: Array,  # (blocks,) int64, written: elements at or above the threshold
    message: Array,  # (sum of slots,) int32, written
) -> None:
    """Encode the elements of values + residual * scale at or above their block's threshold, as many as there are slots.
    A NaN or inf makes a message of one NaN. tests/references/threshold_reference.py has the exact bits."""

def decode_thresholded(message: Array, starts: Array, slots: Array, values: Array) -> None:
    """Decode a message of `encode_thresholded` to values (n,) float32. ValueError for an offset outside its block."""

def pack_numbers(values: Array) -> Array:
    """Pack (n,) int64, taken as unsigned, to uint8: blocks of 128, with the bit width of the largest in a leading
    byte."""

def unpack_numbers(data: Array, count: int) -> tuple[Array, int]:
    """Unpack `count` numbers at the beginning of `data`; return (numbers, bytes read). ValueError as in
    `unpack_ids`."""

def pack_bags(
    lookups: Lookups,
    table_rows: Array,  # (T,) int64
    num_owners: Array,  # (T,) int64
    places: Array,  # (N, T) int64: index of a rank among a table's owners; -1: not an owner
    is_weighted: Array,  # (C,) uint8: columns that send weights
    codes: Array | None,  # (E,) uint8
) -> tuple[Array, Array]:
    """Pack the bags that each rank has to pool; return (messages uint8, end of each (N,) int64).

    native/bags.h defines the format. IndexError, as in `make_plan`, for an id outside its vocabulary table; ValueError
    for more than 2^24 samples, a sequence, or an owner that is not a rank."""

def join_bags(
    messages: list[Array],  # by rank, uint8
    tables: Array,  # (C,) int32: table of each column that has rows on this rank
    table_rows: Array,
    num_owners: Array,
    places: Array,  # (T,) int64: index of this rank among each table's owners
    dtype: str,  # of weights
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Join the bags received from all ranks to one batch.

    Returns ids (E,), feature_offsets (C + 1,), bag_offsets (C * G + 1,) or none if each bag has one lookup, bytes of
    weights (none: no rank sent any), codes (E,) uint8 (none: no rank sent any), number of samples by rank (N,).
    ValueError "rank <r> sent ..." for bytes that `pack_bags` does not produce."""

class Parts:
    """Parts of the rows of T tables: P ranges of columns, each with its own optimizer.

    ValueError unless tables ascend and a table's parts are adjacent, starting at column 0.
    """

    def __init__(
        self,
        tables: Array,  # (P,) int32
        columns: Array,  # (P,) int32: first element in the row
        dims: Array,  # (P,) int32
        states: Array,  # (P,) int32: first state element in the row's state
    ) -> None: ...

class PartInitialValues:
    """Initial values and optimizer state of one part of a row."""

    def __init__(
        self,
        dim: int,  # columns, after those of earlier parts
        state: int,  # first state element
        init_scale: float,  # weights are uniform in [-init_scale, init_scale)
        initial_state: float,  # value of the first `initial_count` state elements; the others start at 0
        initial_count: int,
    ) -> None: ...

class TableSettings:
    """Settings of one table of a `Dram`."""

    def __init__(
        self,
        *,
        parts: list[PartInitialValues],  # adjacent
        state_elements: int,  # of all parts
        rows: int,  # 0: open
        capacity_rows: int,  # slots; reserves address space, memory is used as rows appear
        seed: int,  # uint64, mixed from (run seed, table name)
        can_evict: bool = True,  # whether a hashed table may evict rows; else a full one refuses new rows
        directory: str = "",  # folder of mapped files for rows; "": in memory
        num_owners: int = 1,  # vocabulary tables index by id // num_owners
        place: int = 0,  # index of this rank among the owners; -1: no owner, ids are refused
        first_column: int = 0,  # in the whole row, for initial values and rounding
        most_rows: int = 0,  # largest capacity of `TieredRows.resize`; 0: as at first
    ) -> None: ...

class Dram:
    """Rows of T tables in this process's memory: index, slab on huge pages, pins, dirty bits, eviction by score.

    A slot has two planes: weights (the row's D elements of `dtype`) and state (optimizer state elements of the
    compute dtype, then, with `split`, D uint16 low halves, then a uint32 clock: 31 bits count updates and stop at their
    largest value, the last says that the weights were loaded).
    The compute dtype is float64 for float64 rows and float32 for all others.
    `split` (bfloat16 only): a row's float32 master is (high << 16) + low with signed low; high is the master
    rounded to nearest, so no bit is lost.
    Vocabulary tables with capacity for all their rows index directly, never evict, and need 2 bits per row.
    All others use a hash index, and need at most 16.1 bytes per row in addition to weights, state and clock, or 18.2
    if rows can be evicted. While a checkpoint is written every slot needs one more bit.
    Thread-safe by an internal lock; `pool` and `update` take no lock, because pinned slots do not move.
    """

    def __init__(
        self,
        tables: list[TableSettings],
        dtype: str,  # "float32" | "float64" | "bfloat16" | "float16"
        is_split: bool,  # bfloat16 rows are the high halves of float32 masters
    ) -> None: ...
    def acquire(
        self,
        ids: Array,
        offsets: Array,
        slots: Array,
        initialise: bool,
        next_use: Array | None = None,  # (U,) uint8: `Batch.next_use` by row
    ) -> Acquired:
        """Pin rows and write their slots (U,) int32 to `slots`. Ids are unique within a table.

        A row that is not resident gets a slot; a full table evicts unpinned rows. With `initialise` missing rows are
        initialised; otherwise the caller must `unpack` or `initialise` them before any read.

        MemoryError("table <t> needs <n> slots of <capacity>, <p> pinned") changes no row; p: rows other than the n
        that cannot be evicted. IndexError for an id outside a vocabulary table changes nothing either."""
    def resume(self, table: int, slots: Array, frequencies: Array) -> None:
        """Restore the access frequency, (N,) uint8, of rows that were just acquired and had been resident before."""
    def recall(self, table: int, slots: Array, steps: int) -> None:
        """Estimate from their clocks the access frequency of rows, just acquired and unpacked, that only earlier
        processes used, in `steps` steps."""
    def release(self, slots: Array, offsets: Array, dirty: bool) -> None:
        """Unpin rows; `dirty` marks them as changed. ValueError if a slot is not pinned, after the others are released;
        directly indexed tables have no pins to check."""
    def initialise(self, ids: Array, slots: Array, table: int) -> None:
        """Initialise rows in their slots."""
    def pack(self, table: int, slots: Array, records: Array) -> None:
        """Copy rows to records (N, record_bytes) uint8 = weights | state | low halves if split | clock (uint64;
        bit 62: loaded)."""
    def unpack(self, table: int, slots: Array, records: Array) -> None:
        """Copy records to rows, as `pack` lays them out."""
    def pack_blocks(self, slots: Array, counts: Array, widths: Array, message: Array) -> None:
        """Copy the first widths[t] bytes (T,) int64 of each row's record to message (uint8), one after another.

        Rows are listed in blocks: block b has counts[b] (N * T,) int64 rows of table b % T. ValueError if the sizes do
        not fit."""
    def unpack_blocks(self, slots: Array, counts: Array, widths: Array, message: Array) -> None:
        """Copy a message of `pack_blocks` to rows; bytes of a record that were not sent become zeros."""
    def read(self, table: int, ids: Array, out: Array) -> Array:
        """Copy weights of resident rows to out (N, D); return the positions (M,) int32 of the others. Changes
        nothing."""
    def initial_values(self, table: int, ids: Array, out: Array) -> None:
        """Write the initial weights of ids to out (N, D). Changes nothing else."""
    def dirty(self, table: int) -> tuple[Array, Array]:
        """Return (ids (N,) int64, slots (N,) int32) of rows that are newer than the backing, by ascending id."""
    def clean(self, table: int, slots: Array) -> None:
        """Clear the dirty bits of rows that were written to the backing."""
    def resident(self, table: int) -> tuple[Array, Array]:
        """Return (ids, slots) of all resident rows, by ascending id."""
    def clocks(self, table: int, slots: Array) -> Array:
        """Return the numbers of updates of rows, (N,) int64."""
    def erase(self, table: int, ids: Array) -> None:
        """Delete rows: their next read returns the initial value. A row that a batch uses is reinitialised in place,
        with clock 0; the slots of other rows become free. Absent ids are ignored."""
    def num_slots_examined(self, table: int) -> int:
        """Return the number of slots examined so far to choose rows to evict."""
    def pinned_share(self, table: int) -> float:
        """Return the pinned share of a table's slots, 0.0 for tables that never evict."""
    def weights_address(self, table: int) -> int:
        """Return the address of the weights of slot 0."""
    def stride_bytes(self, table: int) -> int:
        """Return the distance between the weights of two slots, in bytes."""
    def capacity_rows(self, table: int) -> int:
        """Return the number of slots of a table."""
    def can_resize(self, table: int) -> bool:
        """Return whether the table's rows can be evicted, and are in this process's memory."""
    def num_rows(self, table: int) -> int:
        """Return the number of resident rows."""
    def resident_bytes(self) -> int:
        """Return the bytes of rows, state and index in use, without rows in mapped files."""
    def mapped_bytes(self) -> int:
        """Return the bytes in use by rows and state of tables whose rows are in mapped files."""

class Acquired:
    """Result of `Dram.acquire`: missing and evicted rows."""

    missing: Array  # (M,) int32: positions in ids, ascending, of rows that were not resident
    evicted_ids: list[Array]  # by table, (V,) int64: evicted rows that are newer than the backing
    evicted_frequencies: list[Array]  # by table, (V,) uint8
    evicted_records: list[Array]  # by table, (V, record_bytes) uint8
    num_evicted: int  # clean ones included
    num_mapped: int  # resident rows of tables whose rows are in mapped files

class Reads:
    """Column ranges that features read: R reads, each of one feature, with one output each."""

    def __init__(
        self,
        features: Array,  # (R,) int32
        columns: Array,  # (R,) int32: first element in the row
        dims: Array,  # (R,) int32
    ) -> None: ...

def pool(
    lookups: Lookups,
    index: Array,  # (E,) int32 (uint32 bits): row of each lookup
    bases: Array,  # (T,) int64 addresses: address of row 0 of each table
    strides: Array,  # (T,) int64 bytes between rows
    reads: Reads,
    out_bases: Array,  # (R,) int64 addresses: output row 0 of each read
    out_strides: Array,  # (R,) int64 bytes between output rows
    dtype: str,  # of rows
    out_dtype: str,  # of outputs: float64 with float64 rows, else float32, bfloat16 or float16
    order: Array | None = None,  # (E,) int32: all lookups, ordered as the entries of `by_page`
) -> None:
    """Pool the rows of each read into its output.

    Output row b of a pooled feature is the sum, mean (sum / n) or sqrtn (sum / sqrt(n)) of its n rows (times weights),
    added in lookup order; zeros for an empty bag. Output row i of a sequence feature is the row of its lookup i (times
    weight). Computed in the compute dtype and rounded once, to nearest.

    Outputs of 1 MiB and more bypass the cache if every row is whole cache lines (address, stride and width multiples of
    64 bytes): allocate them accordingly.

    order: features with one lookup per output are read in this order, which must list their lookups at their own
    positions. Outputs are the same."""

class Retention:
    """Eviction state of a table. `by`: "recency", "frequency" or "norm"; 0 for rows, age or halving turns that limit
    off.

    num_shares: number of ranks that ids are hashed to. Among equal rows, the one with the smallest mix64 of its id is
    evicted first. Another thread may call `save_some`; all other calls are from one thread at a time."""

    bytes: int
    work: int  # rows touched so far
    def __init__(
        self, by: str, max_rows: int, max_age: int, halve_steps: int, num_shares: int
    ) -> None: ...
    def record_updates(self, ids: Array, norms: Array | None, step: int) -> Array:
        """Record updates of unique ids (N,) in `step`, and return the ids (M,) to evict. Steps never decrease; norms
        (N,) float64 are squared, by norm only."""
    def remove(self, ids: Array) -> None:
        """Remove rows that were deleted otherwise."""
    def state(self) -> tuple[Array, Array, Array]:
        """Return ids (R,) int64, steps (R,) int32, values (R,) int32 (uint32 bits), in the order of eviction."""
    def restore(self, ids: Array, steps: Array, values: Array) -> None:
        """Replace the state, in any order. ValueError for a repeated id."""
    def begin_snapshot(self) -> None:
        """Begin a snapshot of the current rows for `save_some`, and end an earlier one."""
    def save_some(self, most: int) -> tuple[Array, Array, Array]:
        """Return the next rows of the snapshot, as `state`: about `most`, and those that changed meanwhile, in no
        order; none once it is complete."""
    def __len__(self) -> int: ...

class DirectoryStep:
    """Result of `Directory.step`: `colonnade.cache.directory.Decision` as numpy arrays, and data for `undo`."""

    number: int
    slots: Array  # (U,) int32
    outcomes: Array  # (U,) uint8
    ages: Array  # (U,) int32
    ticks: Array  # (U,) int32
    pushed: Array  # (U,) bool
    leaving: Array  # (U,) bool
    evicted_ids: Array  # (E,) int64
    evicted_slots: Array  # (E,) int32
    evicted_ticks: Array  # (E,) int32

class DirectoryClock:
    """Bounds and write rule of a directory, as `colonnade.staleness.RowClock`; step_bound 0: no limit. ValueError for
    others."""

    def __init__(
        self, read_bound: int, write_bound: int, write_share: float, step_bound: int
    ) -> None: ...

class Directory:
    """Directory of cached rows, as `colonnade.cache.directory.Directory`. One thread at a time."""

    number: int
    time: int  # of lfu: half-lives, in 2^-30
    num_slots: int
    capacity: int
    bytes: int
    def __init__(self, capacity: int, clock: DirectoryClock, policy: str) -> None: ...
    def step(
        self, ids: Array, next_uses: Array | None, entering: Array | None, window: int
    ) -> DirectoryStep:
        """Decide the next batch: ids (U,) int64 ascending, unique; next_uses (U,) int32; entering (N,) int64
        ascending."""
    def undo(self, ids: Array, done: DirectoryStep) -> None:
        """Undo the newest step. ids: those of that step. ValueError unless it is the newest."""
    def flush(self, above: int) -> tuple[Array, ...]:
        """Return, as `rows`, the rows with more than `above` pending batches, and clear their pending counts."""
    def set_clock(self, clock: DirectoryClock) -> None:
        """Set bounds and write rule from the next step on."""
    def rows(self) -> tuple[Array, ...]:
        """Return ids (R,) int64 ascending; slots, copied, ticks, uses, stamps, scores (R,) int32. uses: encoded in a
        byte; scores: uint32 bits."""
    def load(
        self,
        ids: Array,
        slots: Array,
        copied: Array,
        ticks: Array,
        uses: Array,
        stamps: Array,
        scores: Array,
        number: int,
        time: int,
    ) -> None:
        """Load the result of `rows` into an empty directory. ValueError for a repeated id or slot."""
    def __len__(self) -> int: ...

class CountMinSketch:
    """Count-min sketch of updates per id, for `colonnade.retention.CountMinAdmission`. Another thread may call `saved`;
    all other calls are from one thread at a time."""

    counters: Array  # ((end - first) * depth * width,) uint8, a view
    step: int  # up to which counts have been halved
    work: int  # counters touched so far
    def __init__(
        self,
        threshold: int,
        depth: int,
        width: int,
        num_blocks: int,
        first_block: int,
        end_block: int,
        halve_steps: int,
    ) -> None: ...
    def record_updates(self, ids: Array, step: int) -> Array:
        """Count one update of unique ids (N,) in `step`; return (N,) uint8, 1 for those updated `threshold` times.
        Steps never decrease. ValueError for an id of another block."""
    def begin_snapshot(self) -> None:
        """Begin a snapshot of the current counters for `saved`, and end an earlier one."""
    def saved(self) -> Array:
        """Return the counters at the beginning of the snapshot, and end it. Slow: copies one block at a time."""

def squared_norms(address: int, stride_bytes: int, dim: int, dtype: str, slots: Array) -> Array:
    """Return the sum of squares of each row's weights at address + slot * stride_bytes, (N,) float64."""

def name_slots(
    names: list[Array],  # T tables: (slots,) int64
    ticks: list[Array],  # (slots,) int32
    counts: Array,  # (N * T,) int64: block b is rows of table b % T
    slots: Array,  # (n,) int64
    ids: Array,  # (n,) int64
) -> Array:
    """Assign slots to other rows; return (n,) uint8, 1 for slots with pending gradients. ValueError."""

def add_pending(
    sums: list[Array],  # T tables: (slots, W_t) of the batch's dtype
    ticks: list[Array],  # (slots,) int32
    counts: Array,  # (T,) int64: rows of the batch, table by table, each once
    slots: Array,  # (U,) int64
    index: Array,  # (U,) int32: first element of each row's sum in `batch`
    batch: Array,  # float32 or float64
    leaves: Array,  # (U,) uint8
) -> None:
    """Add each row's gradient sum to its pending gradients and advance its count by 1, except for rows that leave the
    cache. ValueError."""

def take_pending(
    sums: list[Array],
    ticks: list[Array],
    counts: Array,  # (N * T,) int64: block b is rows of table b % T
    slots: Array,  # (n,) int64
    origin: Array,  # (n,) int64: index among the batch's rows; -1: not one of them
    index: Array,  # (U,) int32
    batch: Array,
    out: Array,  # elements, row after row as listed
) -> None:
    """Move the pending gradients of rows to `out`, and add this batch's sum for its rows, which is not pending yet.
    ValueError."""

class OutputGradients:
    """Gradients of the outputs of `pool`, in the same layout; one entry per lookup. Keeps `lookups` alive; borrows the
    gradient memory."""

    def __init__(
        self,
        lookups: Lookups,
        reads: Reads,  # at most one of each (feature, column)
        bases: Array,  # (R,) int64
        strides: Array,  # (R,) int64
        dtype: str,
    ) -> None: ...

class RowGradients:
    """Gradients that each source has summed per row: entry e is the row at base + index[e] elements, with all parts."""

    def __init__(
        self, base: int, index: Array, dtype: str
    ) -> None: ...  # index (E,) int32 (uint32 bits); compute dtype

def sum_rows(
    segment_offsets: Array,  # (U + 1,) int32
    entries: Array,  # (E,) int32
    source: OutputGradients | RowGradients,
    offsets: Array,  # (T + 1,) int64: range of unique rows of each table
    parts: Parts,
    out_base: int,
    out_index: Array,  # (U,) int32 (uint32 bits): element offset of each row's sum
    dtype: str,  # float32 | float64
) -> None:
    """Sum the gradients of each unique row and part in the order of its entries. Entries of a feature that does not
    read the part add nothing. Terms are converted to `dtype` first."""

def squared_norm(base: int, num_elements: int, dtype: str) -> float:
    """Return the sum of squares in float64, added in an order that depends only on num_elements. dtype: float32 or
    float64."""

OPTIMIZERS: tuple[str, ...]
"""Names of the optimizers' kernels; the kind of each is its position. `ops/optimizers.py` defines what they do."""

def optimizer_state_elements(kind: int, dim: int) -> int:
    """Return the number of state scalars of a row's part. ValueError for an unknown kind."""

def by_page(
    slots: Array,  # (U,) int32
    offsets: Array,  # (T + 1,) int64
    segment_offsets: Array,  # (U + 1,) int32
    entries: Array,  # (E,) int32
) -> tuple[Array, Array, Array] | None:
    """Sort rows by their position in memory, table by table; return (slots, segment_offsets, entries) in that order.

    `update` and `release` are fastest in this order and give the same bits. The entries of a row keep their order.
    None: rows are in order already, or there are no rows with segments."""

def update(
    dram: Dram,
    slots: Array,  # (U,) int32
    offsets: Array,  # (T + 1,) int64
    segment_offsets: Array,
    entries: Array,
    source: OutputGradients | RowGradients,
    parts: Parts,
    optimizers: Array,  # (P,) int32: positions in OPTIMIZERS
    settings: Array,  # (P, 16) float64: 0 lr, 1 weight_decay, 2 eps, 3 beta1 (2: momentum), 4 beta2,
    #                   5 nesterov (0 or 1), 6 l1, 7 l2, 8 beta (FTRL), 9 max_norm, 10 clip_value,
    #                   11 weight_bound, 12 gradient_scale; 9 to 11 are inf where unused
) -> None:
    """Sum the gradients of each unique row and update it, in one pass.

    For each part: sum its entries' gradients in entry order, times gradient_scale, clamped to +-clip_value; apply the
    part's optimizer; scale the part down to max_norm; clamp weights to +-weight_bound. Then advance the row's clock by
    1.

    16-bit rows without `split` are rounded stochastically, with the mean preserved; the bits depend only on
    (seed, table, id, clock, column)."""

def pairwise_dot(vectors: list[Array], copied: list[int], out: Array) -> None:
    """Compute the dot products of all pairs of vectors of a sample.

    vectors: (B, k, D) each, V vectors in all, all float32 or all float64, last stride 1.
    out (B, len(copied) * D + V (V - 1) / 2): the `copied` vectors, then <v_i, v_j> by i, then j < i; each dot product
    is summed from its first element to its last."""

def pairwise_dot_gradient(
    vectors: list[Array], copied: list[int], gradient: Array, out: list[Array | None]
) -> None:
    """Compute the gradients of `pairwise_dot`. gradient: as its `out`; out: as `vectors`, None for those not needed."""

def fm(vectors: list[Array], out: Array, terms: list[int] = ...) -> None:
    """Compute the factorization machine's pairwise term: out (B, 1) = (|sum of vectors|^2 - sum of |vector|^2) / 2.

    terms: for each vector 0: in both sums; 1: in the first; 2: a sum of squares, in the second. []: all 0."""

def fm_gradient(
    vectors: list[Array], gradient: Array, out: list[Array | None], terms: list[int] = ...
) -> None:
    """Compute the gradients of `fm`."""

def cross(first: Array, factor: Array, input: Array, out: Array) -> None:
    """Compute out = first * factor + input, all (B, D): a layer of DCN's cross network."""

def cross_gradient(
    first: Array, factor: Array, gradient: Array, of_first: Array, of_factor: Array
) -> None:
    """Compute the gradients of `cross`: of_first = gradient * factor, of_factor = gradient * first."""

def pool_squares(
    lookups: Lookups,
    index: Array,
    bases: Array,
    strides: Array,
    reads: Reads,
    places: Array,
    dtype: str,
) -> None:
    """Pool rows and their squares, and copy them, in one pass over the rows, in order of the reads.

    places: (R, 7) int64 by read: address and stride in bytes of the outputs of sums, and 1 to add to what they have;
    the same of the outputs of squares, sum over a bag's lookups of (x v)^2; address of copies (E_f, dim). Address 0:
    not wanted. x: the lookup's weight (1 without weights), times 1 / n (mean) or 1 / sqrt(n) (sqrtn). All are of the
    type of computation. Other arguments as in `pool`."""

def square_gradients(
    rows: Array,
    offsets: Array | None,
    pooling: int,
    weights: Array | None,
    gradient: Array | None,
    of_squares: Array | None,
    out: Array,
) -> None:
    """Compute gradients of lookups: out (E, D) = x g + 2 v (x h) x.

    gradient: g (B, D) of the pooled vectors, of_squares: h (B, D) of the pooled squares, with last stride 1; None adds
    nothing. Others: as `pool_squares`."""

def all_finite(base: int, num_elements: int, dtype: str) -> bool:
    """Return whether no element is NaN or inf."""

def crc32c(data: Array, before: int = 0) -> int:
    """Return the CRC-32C of a contiguous array's bytes (any type, also `bytes`), continued from checksum `before`."""

def map_file(
    fd: int, offset: int, length: int, room: int, is_random: bool = False
) -> tuple[int, int]:
    """Map bytes [offset, offset + length) of a file read-only, and `room` writable bytes from the next page on.

    Returns (address, 0) or (0, errno). offset: a multiple of the page size. A failing load marks the mapping as
    damaged: all of the file's bytes then read as zeros. is_random: pages beside a missing one are not read with it."""

def unmap_file(address: int) -> None:
    """Unmap a mapping of `map_file`."""

def is_damaged(address: int) -> bool:
    """Return whether a load from the mapping has failed."""

def num_damaged() -> int:
    """Return the number of mappings of this process that were damaged so far."""

def handle_faults() -> None:
    """Install the SIGBUS handler again, in front of a handler that was installed after the last `map_file`."""

def unchecked_blocks(
    slots: Array,  # (E,) int32, as uint32
    num_rows: int,
    begin: int,
    stride: int,
    block_bytes: int,
    checked: Array,  # (blocks of the file,) uint8
) -> list[int]:
    """Return the unchecked blocks, at most 256 and each once, that contain rows at begin + slot * stride of a file.
    Only slots < num_rows count."""

class MappedTable:
    """Rows of one table in mapped memory, and the index from id to slot. Holds the arrays that it gets."""

    def __init__(
        self,
        num_ids: int,  # size of the vocabulary; 0: any id
        num_rows: int,  # of the file
        slots_by_id: Array | None,  # (num_ids,) int32, -1: absent
        hashed: RowIndex
        | None,  # alternative, id -> slot; neither: the file has all ids of the vocabulary
        stride: int,  # bytes of a row
        begin: int,  # byte of the file where row 0 is
        block_bytes: int,  # of the file's blocks: a power of two
        checked: Array,  # (blocks of the file,) uint8, 1: was compared with its checksum; changes are seen
    ) -> None: ...
    def set_base(self, address: int) -> None:
        """Set the address of slot 0; 0: the rows are not mapped, and reads return None."""
    def set_newer(self, index: RowIndex | None) -> None:
        """Set the index id -> slot of rows that differ from the file; 1 << 40: the row has its first value again."""

class RowCache:
    """Cache of rows in memory, for files of rows that are larger than it. Reads the rows that it lacks."""

    def __init__(
        self,
        files: list[tuple[int, int, int, int]],  # descriptor, byte of row 0, bytes of a row, rows
        bytes: int,  # of rows and their index
        has_ring: bool = True,  # read with io_uring, if this system has it
    ) -> None:
        """Open the files again. ValueError: too little memory; RuntimeError: no memory or descriptors."""
    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows copied from memory, rows copied from files, and reads."""

class MappedReader:
    """Reader of a declaration's features in mapped tables: pools a batch in one call. Any thread may use it."""

    def __init__(
        self,
        kind: type,  # of a feature's ids, with attributes values, offsets and weights
        names: list[str],  # (C,) feature of each column of lookups
        tables: Array,  # (C,) int32
        poolings: Array,  # (C,) uint8, as in Lookups
        reads: Array,  # (R, 5) int64: column of lookups, first element in a row, dim, output, first column there
        widths: Array,  # (O,) int64: columns of each output
        dtype: str,
        output: str,
    ) -> None: ...
    def read(
        self,
        tables: list[MappedTable],
        initial_rows: Dram,  # has the first values of absent rows
        ids: Any,  # mapping of feature names to ids
        size: int,
        is_sharing: bool,  # a feature with one sample has it for all samples
        cache: RowCache
        | None = None,  # has the files' rows, which are then not read from their mapping
    ) -> list[Array] | None:
        """Return the outputs, (rows, width) each, with the bits of `pool`. None if anything is invalid, absent or
        unusual: ids outside a vocabulary, another type of tensor, a block that was not checked yet, a file that the
        cache cannot read."""

class RowIndex:
    """Open-addressing hash map from int64 to uint64 with batched operations. Not thread-safe."""

    def __init__(self) -> None: ...
    def put(self, ids: Array, values: Array) -> None:
        """Insert values (N,) int64, anything but -1; a later value of an id replaces the earlier one."""
    def get(self, ids: Array, out: Array) -> None:
        """Look ids up and write their values to out (N,) int64; -1 for absent ids."""
    def erase(self, ids: Array) -> None:
        """Remove ids."""
    def items(self) -> tuple[Array, Array]:
        """Return (ids, values) by ascending id."""
    def __len__(self) -> int: ...

def frame_records(
    ids: Array,  # (N,) int64
    records: Array,  # (N, record_bytes) uint8
    record_bytes: int,
    first_place: int,  # segment number << 32 | record number of the first
    frames: Array,  # out (N, 4 + record_bytes rounded up to 4) uint8
) -> None:
    """Frame records with checksums for a segment file; store/format.md defines the bytes."""

def check_records(
    ids: Array,  # (N,) int64
    frames: Array,  # (N, stride) uint8
    record_bytes: int,
    first_place: int,
) -> int:
    """Return the first frame with a wrong checksum for its id and place; -1 if none."""

class PageReader:
    """Reader of rows from any number of logs, page by page; one per rank. Thread-safe; completes all requested reads
    before it is destroyed.

    kind: "ring" (io_uring), "threads" (pread), or "auto": the first that this system supports. depth: largest number of
    reads in flight, 1 to 1024. ValueError for other values, RuntimeError for "ring" on a system without it."""

    kind: str  # "ring" or "threads"
    def __init__(self, kind: str = "auto", depth: int = 64) -> None: ...
    def counts(self) -> dict[str, int | float]:
        """Return totals: reads, pages (of 4 KiB), bytes, rows, busy_seconds (with reads in flight)."""

class LogRead:
    """Pending reads of `RowLog.read`; keeps their output alive, and waits for them when destroyed."""

    def wait(self) -> tuple[Array, tuple[str, int, int] | None]:
        """Wait for the reads; return (found (N,) bool, fault). Rows that were not found are unchanged in `out`.

        fault: None, or (kind, place, errno) of the lowest place that failed; every readable row is in `out` even then.
        Kinds: "system", "truncated", "checksum" (wrong bytes, or those of another id or place)."""
    def is_done(self) -> bool:
        """Return whether all reads are complete."""

class Chunk:
    """Chunk of a segment file to be written; chunks come in the order of the file."""

    segment: int
    offset: int  # in the file; a multiple of 4096
    data: memoryview  # address and length: multiples of 4096; at offset 0 the first 64 bytes are the caller's to fill
    is_last: bool  # last of its segment; zeros follow the last record up to a multiple of 4096

class RowLog:
    """Stored rows of one table: an append-only log of segments, with an index of live records.

    A place is segment << 32 | record; -1: absent. A new row is in a write buffer, which is read like memory, until its
    chunk is `written`. Thread-safe; only `LogRead.wait` and `detach` wait for a disk. ids (N,) int64: IndexError for an
    id outside the vocabulary, ValueError for another rank's id; then nothing changes."""

    pending_bytes: int  # of full chunks that are not written yet
    num_rows: int
    index_bytes: int
    def __init__(
        self,
        record_bytes: int,
        rows: int,  # 0: open table
        num_owners: int,  # number of owners of the table's rows; this one is number `place`
        place: int,
        segment_bytes: int,  # largest segment, unless a single record is larger
        chunk_bytes: int,  # a multiple of 4096, at least a frame
        num_streams: int,  # number of write buffers; rows of one stream share segments
        first_segment: int,
    ) -> None: ...
    def write(
        self,
        ids: Array,
        records: Array,
        frequencies: Array | None,
        stream: int,
        for_commit: bool = False,
    ) -> None:
        """Append rows to a write buffer: records (N, record_bytes) uint8, frequencies (N,) uint8. Writes memory only.

        frequencies None: a row keeps its access frequency, a new row has 0. The last of equal ids wins. for_commit: the
        row also replaces its version in the frozen content. A row of the frozen content that has changed since `freeze`
        must first be written with for_commit, before any other write or delete of it."""
    def delete(self, ids: Array) -> int:
        """Delete rows, except from the frozen content; return the number that existed."""
    def places(self, ids: Array, out: Array) -> None:
        """Write the places of rows to out (N,) int64; -1 for absent rows."""
    def frequencies(self, ids: Array, out: Array) -> None:
        """Write the frequencies of rows to out (N,) uint8; 0 for absent rows."""
    def touch(self, ids: Array, frequencies: Array) -> None:
        """Set the frequencies (N,) uint8 of rows; absent ids are ignored."""
    def read(self, reader: PageReader, ids: Array, out: Array, demand: bool) -> LogRead:
        """Begin to read rows to out (N, record_bytes) uint8, with the content at the time of the call.

        Copies rows in write buffers and mapped files during the call; reads the others in the background. Checks a
        frame's checksum, place and id before it copies any byte to `out`. ValueError if a row's segment is written but
        not attached."""
    def next_chunk(self) -> Chunk | None:
        """Return the oldest full chunk that was not returned before, or None."""
    def written(self, chunk: Chunk) -> None:
        """Mark a chunk as written to its file: rows are then read from the file, and its memory is freed. ValueError
        unless the segment is attached."""
    def attach(self, segment: int, fd: int) -> None:
        """Set the file of a segment. Keep fd open until `detach`; it may use O_DIRECT."""
    def detach(self, segment: int) -> None:
        """Remove the file of a segment; return once no read uses its fd. Its rows cannot be read until it is
        attached again."""
    def seal(self) -> list[int]:
        """Seal the open segments and return their numbers; their last chunks become available."""
    def sealed(self, segment: int) -> tuple[int, int, int]:
        """Return (num_records, num_bytes without padding, checksum: sum of the records' crcs) of a sealed segment.
        ValueError unless sealed; the checksum of a loaded segment is 0."""
    def keys(self, segment: int) -> Array:
        """Return the ids (n,) int64 of a segment's records, in order. ValueError if it was loaded or its keys freed."""
    def forget_keys(self, segment: int) -> None:
        """Free the ids of a segment that `keys` returns."""
    def segments(self) -> tuple[Array, Array, Array, Array]:
        """Return number, num_records, num_live (S,) int64 and is_sealed (S,) uint8 of all segments, by ascending
        number."""
    def live(self, segment: int) -> Array:
        """Return the live bitmap (ceil(n / 8),) uint8: bit r % 8 of byte r // 8 is 1 if record r is live."""
    def freeze(self) -> None:
        """Retain the current content, next to the changing one, for a checkpoint. ValueError if already frozen."""
    def frozen_live(self, segment: int) -> Array:
        """Return the live bitmap of the frozen content, as `live`. ValueError unless frozen."""
    def frozen_segments(self) -> list[int]:
        """Return the numbers of segments with rows of the frozen content, ascending."""
    def thaw(self) -> None:
        """Drop the frozen content."""
    def load(self, segment: int, ids: Array, live: Array, fd: int) -> None:
        """Add a sealed segment of a checkpoint: ids of all its records, bitmap as `live`, fd -1: attach later.

        ValueError, with nothing changed and the record named, if a record's id is live elsewhere. New segments get
        higher numbers."""
    def rewrite(
        self,
        segment: int,
        ids: Array,
        frames: Array,
        first_record: int,
        stream: int,
        hot_stream: int,
    ) -> int:
        """Append the live records of a sealed segment to write buffers, hottest first; return their number.

        ids (n,) and frames (n, stride) uint8: as read from its files. Rows hotter than seven in eight of the rows moved
        lately go to `hot_stream`. The frozen content moves with them. ValueError "record <r>: ..." for a wrong
        checksum, with nothing changed."""
    def forget(self, segment: int) -> None:
        """Remove a segment. ValueError unless it is fully written and has no live record, in the frozen content
        either."""
    def counts(self) -> dict[str, int]:
        """Return totals: rows_written, rows_rewritten, rows_deleted, bytes_framed, rows_copied (read from memory),
        rows_planned (read from files), rows_absent."""

class AcquireJob:
    """Pending `TieredRows.acquire`, with reads that may not be complete."""

    is_done: bool
    def counts(self) -> dict[str, int]:
        """Return numbers of rows: resident, mapped (from the cache), read (from files), copied (from the logs' memory),
        born (initialised), evicted_clean, evicted_dirty; and bytes of records: bytes_read, bytes_mapped, bytes_evicted.
        """

class TieredRows:
    """Rows of all tables in tiers: rows in use in a Dram, evicted ones in a cache, the rest in logs. Thread-safe.

    Keeps its parts alive. A fault is (table, kind, place, errno) as in `LogRead.wait`; every later wait returns it too.
    """

    def __init__(
        self,
        dram: Dram,
        logs: list[RowLog] | list[RowLog | None],
        reader: PageReader,
        steps: int = 0,
        cache: Dram | None = None,
    ) -> None:
        """Create the tiers. logs: by table; None for a table without rows on this rank.

        steps: number of steps that the stored rows were trained for; a row's clock counts its uses in these.
        cache: store of evicted rows above the logs, of open tables with the same columns; a row is in one of both."""
    def acquire(
        self, ids: Array, offsets: Array, slots: Array, next_use: Array | None = None
    ) -> AcquireJob:
        """Pin rows as `Dram.acquire` does. Evicted rows go to the cache, or their logs; missing rows are read from
        there, or initialised. An exception leaves nothing pinned."""
    def wait(self, job: AcquireJob) -> tuple[int, str, int, int] | None:
        """Wait until the rows of this acquire and of all earlier ones are resident."""
    def settle(self) -> tuple[int, str, int, int] | None:
        """Wait until no read is pending."""
    def fault(self) -> tuple[int, str, int, int] | None:
        """Return the first fault so far, or None."""
    def read(self, table: int, ids: Array, out: Array) -> tuple[int, str, int, int] | None:
        """Read weights (N, D) of rows from memory or the log, ahead of reads for acquires. Changes nothing."""
    def erase(self, table: int, ids: Array) -> None:
        """Delete rows, in memory and in the log. Rows in use are reinitialised in place."""
    def write(self, table: int, ids: Array, records: Array) -> None:
        """Overwrite rows that are not in the Dram with records (N, record_bytes) uint8, in the cache or else the
        log."""
    def cache_counts(self) -> dict[str, int]:
        """Return totals of the cache: hits, misses (rows), rows_inserted, bytes_read, bytes_inserted."""
    def resize(self, table: int, capacity: int) -> int:
        """Change the slots of a table, to at least its pinned rows and at most its `most_rows`; return their number.

        Evicts rows that do not fit. A table that cannot evict rows does not change."""
    def write_dirty(self, table: int, rows: int) -> int:
        """Write about `rows` dirty rows to their log, where they remain resident; return their number, 0 if none is
        dirty."""
    def begin_snapshot(self) -> None:
        """Begin a snapshot of all dirty rows. ValueError while one is being taken."""
    def before_update(self, slots: Array, offsets: Array) -> None:
        """Save the rows among these that the snapshot still needs, before an update changes them."""
    def save_some(self, rows: int) -> int:
        """Save about `rows` rows that the snapshot still needs; return their number, 0 if none is left."""
    def end_snapshot(self) -> None:
        """End the snapshot; rows that were not saved are dirty again."""
