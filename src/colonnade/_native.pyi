"""The native core, as Python sees it. Internal: the rooms above wrap it, users never call it.

Every array is a contiguous CPU tensor (torch or numpy), borrowed for the call unless a class says it
keeps it; results are torch tensors. Every call releases the GIL. Results have the same bits for any number
of threads and any instruction set. Import torch first: its OpenMP runtime is the one used here.

Each operation's definition is its twin in `ops/reference.py`. A wrong type, shape or offset raises
ValueError before anything is changed; addresses (`int`) cannot be checked.

Legend: T tables, F features, B samples, E lookups, U unique rows, N ranks, D a table's dim.
    tables     offsets (T + 1,) int64: which part of ids / slots belongs to which table
    slots      (U,) int32, bits of a uint32: row number inside a table's slab; -1 = absent
    element    one scalar of the tables' dtype (float32 or float64; all tables of a store agree)
Feature-major order: all lookups of feature 0, then of feature 1, ...
"""

from typing import Any

Array = Any  # a contiguous CPU tensor of the dtype and shape the docstring says

def isa() -> str:
    """The instruction set chosen at import: "avx512", "avx2" or "portable"."""

def available_isas() -> list[str]: ...
def set_isa(name: str) -> None:
    """Force a path (tests). ValueError if this processor lacks it. All paths give the same bits."""

def set_num_threads(n: int) -> None:
    """Threads Colonnade uses (torch's OpenMP pool); 0 = as many as torch."""

def limit_threads_here(n: int) -> None:
    """At most n threads for calls from the calling thread; 0: no limit."""

def num_threads() -> int: ...
def empty_bytes(n: int) -> Array:
    """(n,) uint8, content undefined, in a kept block (64-byte aligned, huge pages where large) that serves again once
    nobody holds the tensor or a view of it."""

class Lookups:
    """One batch's lookups of all features, feature-major. Keeps the arrays alive.

    ValueError naming feature and position if offsets decrease, overrun or disagree in length.
    """

    def __init__(
        self,
        ids: Array,  # (E,) int64
        feature_offsets: Array,  # (F + 1,) int64: lookups of feature f
        feature_tables: Array,  # (F,) int32
        poolings: Array,  # (F,) uint8: 0 sum, 1 mean, 2 sequence, 3 sqrtn
        batch_size: int,  # B; ignored where every feature is a sequence
        bag_offsets: Array
        | None,  # (F * B + 1,) int64 into ids, feature-major; None: every feature is one-hot
        weights: Array | None,  # (E,) float32, or float64 with float64 tables
    ) -> None: ...
    @property
    def num_lookups(self) -> int: ...

class Plan:
    """The lookups of one batch grouped by row: one stable radix sort per table.

    Unique ids are table-major, then by owner rank, then in an order that depends only on the ids.
    The arrays are views that keep the plan alive.
    """

    num_unique: int
    unique_ids: Array  # (U,) int64
    block_offsets: Array  # (T * N + 1,) int64: block t * N + r = rows of table t that rank r owns
    inverse: Array  # (E,) int32: the unique row of each lookup
    segment_offsets: Array  # (U + 1,) int32
    entries: (
        Array  # (E,) int32: positions of the lookups, grouped by unique row, ascending inside a row
    )

def make_plan(lookups: Lookups, table_rows: Array, num_ranks: int) -> Plan:
    """table_rows (T,) int64; 0 = open table. Owner of an id: `owner_of` below.

    IndexError "table <t> feature <f> position <i> id <id> rows <rows>" for an id outside a vocabulary table.
    """

def owner_of(ids: Array, rows: int, num_ranks: int) -> Array:
    """(N,) int32. Open table: (mix64(id) * num_ranks) >> 64. Vocabulary table: with q, m = divmod(id, num_ranks),
    (m + mix64(q)) mod num_ranks, so each rank's local row number is q: dense and free of id patterns.
    mix64 is the splitmix64 finaliser."""

def take(values: Array, index: Array, out: Array) -> None:
    """out[i] = values[index[i]], all int32: slots by unique row -> slots by lookup. IndexError outside values."""

class Parts:
    """What the rows of T tables consist of: P parts, each some columns with an optimizer of their own.

    ValueError unless tables ascend and a table's parts lie side by side from column 0.
    """

    def __init__(
        self,
        tables: Array,  # (P,) int32
        columns: Array,  # (P,) int32: first element in the row
        dims: Array,  # (P,) int32
        states: Array,  # (P,) int32: first state element in the row's state
    ) -> None: ...

class Dram:
    """Rows of T tables in this process's memory: index, slab on huge pages, pins, dirty bits, second-chance eviction.

    A slot has two planes: weights (the row's D elements of `dtype`) and state (optimizer state elements of the
    compute dtype, then, with `split`, D uint16 low halves, then a uint32 clock that stops at its largest value).
    The compute dtype is float64 for float64 rows and float32 for all others.
    `split` (bfloat16 only): a row's float32 master is (high << 16) + low, low signed: high is the master
    rounded to nearest, so nothing is lost.
    Vocabulary tables whose capacity covers their share index directly, are never evicted and pay 2 bits per row;
    all others hash, and pay at most 16 bytes per row beyond weights, state and clock.
    Thread-safe: a lock inside; `pool` and `update` take no lock, pinned slots do not move.
    """

    def __init__(
        self,
        parts: Parts,
        state_elements: list[int],  # by table: all of its parts' state
        rows: list[int],  # 0 = open
        capacity_rows: list[
            int
        ],  # slots; slab address space is reserved, memory is used as rows appear
        seeds: list[int],  # uint64 per table, mixed from (run seed, table name)
        init_scales: list[float],  # by part: births are uniform in [-scale, scale)
        initial_states: list[
            float
        ],  # by part: first value of its first `initial_counts` state elements;
        initial_counts: list[int],  # the others start at 0
        dtype: str,  # "float32" | "float64" | "bfloat16" | "float16"
        split: bool,
        num_ranks: int,  # vocabulary tables index by id // num_ranks
        rank: int,
    ) -> None: ...
    def acquire(self, ids: Array, offsets: Array, slots: Array, birth: bool) -> Acquired:
        """Pin every row, giving slots (U,) int32 (out); ids are unique inside a table's part. Rows not resident get
        a slot, evicting unpinned rows where the table is full. With `birth`, missing rows are born here; without,
        the caller must `unpack` or `birth` them before anyone reads.

        MemoryError("table <t> needs <n> slots of <capacity>, <p> pinned") changes no row; p: rows pinned that are
        not among the n. IndexError for an id outside a vocabulary table changes nothing either."""
    def release(self, slots: Array, offsets: Array, dirty: bool) -> None:
        """ValueError, nothing changed, if a slot is not pinned."""
    def birth(self, ids: Array, slots: Array, table: int) -> None: ...
    def pack(self, table: int, slots: Array, records: Array) -> None:
        """records (N, record_bytes) uint8 = weights | state | low halves if split | clock (uint64)."""
    def unpack(self, table: int, slots: Array, records: Array) -> None: ...
    def read(self, table: int, ids: Array, out: Array) -> Array:
        """Copy weights of resident rows to out (N, D); returns the positions (M,) int32 of the others. No trace."""
    def birth_values(self, table: int, ids: Array, out: Array) -> None:
        """The first weights of ids, (N, D); no trace."""
    def dirty(self, table: int) -> tuple[Array, Array]:
        """(ids (N,) int64, slots (N,) int32) of rows newer than the backing, ascending id."""
    def clean(self, table: int, slots: Array) -> None:
        """Clear dirty bits (the rows were written below)."""
    def resident(self, table: int) -> tuple[Array, Array]:
        """(ids, slots) of every resident row, ascending id."""
    def clocks(self, table: int, slots: Array) -> Array:
        """(N,) int64."""
    def erase(self, table: int, ids: Array) -> None:
        """Forget rows: their next read is their first value. A row in use by a batch is born again in place, with
        clock 0; the others give their slot back. Ids that are absent are passed over."""
    def weights_address(self, table: int) -> int: ...
    def stride_bytes(self, table: int) -> int: ...
    def num_rows(self, table: int) -> int: ...
    def resident_bytes(self) -> int:
        """Bytes of rows, state and index in use."""

class Acquired:
    """What an acquire did beyond pinning. Empty arrays when nothing."""

    missing: Array  # (M,) int32 positions in ids, ascending: slot assigned, content undefined unless born
    evicted_offsets: Array  # (T + 1,) int64 into the next two
    evicted_ids: Array  # (V,) int64: dirty rows that lost their slot
    evicted_records: list[
        Array
    ]  # by table, (V_t, record_bytes) uint8, packed before the slot was reused
    num_evicted: int  # clean ones included

class Reads:
    """What is read of the rows a feature looks up: R reads, each some columns of its rows, each an output."""

    def __init__(
        self,
        features: Array,  # (R,) int32
        columns: Array,  # (R,) int32: first element in the row
        dims: Array,  # (R,) int32
    ) -> None: ...

def pool(
    lookups: Lookups,
    index: Array,  # (E,) int32 (uint32 bits): row of each lookup
    bases: Array,  # (T,) int64 addresses: where row 0 of each table lies
    strides: Array,  # (T,) int64 bytes between rows
    reads: Reads,
    out_bases: Array,  # (R,) int64 addresses: output row 0 of each read
    out_strides: Array,  # (R,) int64 bytes between output rows
    dtype: str,  # of rows
    out_dtype: str,  # of outputs: float64 with float64 rows, else float32, bfloat16 or float16
) -> None:
    """Output row b of a pooled feature = sum, mean (sum / n) or sqrtn (sum / sqrt(n)) of (weight *) its rows in lookup
    order, n its number of lookups; empty bag = zeros. Output row i of a sequence feature = (weight *) row of its
    lookup i. Computed in the compute dtype, rounded once, to nearest.

    Outputs of 1 MiB and more are written around the cache where every row is whole cache lines
    (address, stride and width multiples of 64 bytes): lay them out so."""

class OutputGradients:
    """Gradients as `pool` laid its outputs out; one entry per lookup. Keeps `lookups`; borrows the gradient memory."""

    def __init__(
        self,
        lookups: Lookups,
        reads: Reads,  # at most one of each (feature, column)
        bases: Array,  # (R,) int64
        strides: Array,  # (R,) int64
        dtype: str,
    ) -> None: ...

class RowGradients:
    """Gradients already summed per row by each source: entry e is the row at base + index[e] elements, all parts."""

    def __init__(
        self, base: int, index: Array, dtype: str
    ) -> None: ...  # index (E,) int32 (uint32 bits); compute dtype

def sum_rows(
    segment_offsets: Array,  # (U + 1,) int32
    entries: Array,  # (E,) int32
    source: OutputGradients | RowGradients,
    offsets: Array,  # (T + 1,) int64: which unique rows belong to which table
    parts: Parts,
    out_base: int,
    out_index: Array,  # (U,) int32 (uint32 bits): element offset of each row's sum
    dtype: str,  # float32 | float64
) -> None:
    """Per unique row and part, the sum of its entries' gradients in entry order; entries whose feature does not read
    the part add nothing. Terms are widened to `dtype` first."""

def squared_norm(base: int, num_elements: int, dtype: str) -> float:
    """Sum of squares in float64, in an order that depends only on num_elements. float32 or float64."""

def update(
    dram: Dram,
    slots: Array,  # (U,) int32
    offsets: Array,  # (T + 1,) int64
    segment_offsets: Array,
    entries: Array,
    source: OutputGradients | RowGradients,
    parts: Parts,
    optimizers: Array,  # (P,) int32, see ops/reference.py: 0 SGD, 1 row-wise Adagrad, 2 momentum SGD,
    #                     3 Adagrad, 4 Adam, 5 row-wise Adam, 6 AdamW, 7 FTRL, 8 LAMB
    settings: Array,  # (P, 16) float64: 0 lr, 1 weight_decay, 2 eps, 3 beta1 (2: momentum), 4 beta2,
    #                   5 nesterov (0 or 1), 6 l1, 7 l2, 8 beta (FTRL), 9 max_norm, 10 clip_value,
    #                   11 gradient_scale; max_norm and clip_value are inf where unused
) -> None:
    """Per unique row, in one pass: per part sum its entries' gradients in entry order, times gradient_scale, clamped
    to +-clip_value; apply the part's optimizer; shrink it to max_norm; then advance the row's clock by 1.

    16-bit rows without `split` are rounded at random, up with the probability that keeps the mean: the bits depend
    only on (seed, table, id, clock, column)."""

def pairwise_dot(vectors: list[Array], kept: list[int], out: Array) -> None:
    """vectors: (B, k, D) each, all float32 or all float64, any strides but the last, which is 1; together V of them.
    out (B, len(kept) * D + V (V - 1) / 2): the kept vectors, then <v_i, v_j> by i, then j < i; a dot is summed from
    its first element to its last."""

def pairwise_dot_gradient(
    vectors: list[Array], kept: list[int], gradient: Array, out: list[Array | None]
) -> None:
    """gradient: as `out` of pairwise_dot; out: as `vectors`, None where not wanted."""

def fm(vectors: list[Array], out: Array) -> None:
    """out (B, 1): half of |sum of vectors|^2 - sum of |vector|^2."""

def fm_gradient(vectors: list[Array], gradient: Array, out: list[Array | None]) -> None: ...
def cross(first: Array, factor: Array, input: Array, out: Array) -> None:
    """out = first * factor + input, all (B, D)."""

def cross_gradient(
    first: Array, factor: Array, gradient: Array, of_first: Array, of_factor: Array
) -> None:
    """of_first = gradient * factor, of_factor = gradient * first."""

def all_finite(base: int, num_elements: int, dtype: str) -> bool: ...
def crc32c(data: Array) -> int:
    """CRC-32C of a contiguous array's bytes (any type, also `bytes`)."""

class RowIndex:
    """Open-addressing hash map from any int64 to a uint64; batch at a time; not thread-safe."""

    def __init__(self) -> None: ...
    def put(self, ids: Array, values: Array) -> None:
        """values (N,) int64, anything but -1; a later value of an id replaces the earlier one."""
    def get(self, ids: Array, out: Array) -> None:
        """out (N,) int64; -1 where absent."""
    def erase(self, ids: Array) -> None: ...
    def items(self) -> tuple[Array, Array]:
        """(ids, values) ascending id."""
    def __len__(self) -> int: ...

def frame_records(
    ids: Array,  # (N,) int64
    records: Array | None,  # (N, record_bytes) uint8; None: tombstones
    record_bytes: int,
    first_place: int,  # segment number << 32 | record number of the first
    frames: Array,  # out (N, 16 + record_bytes rounded up to 8) uint8
) -> None:
    """Records as they lie in a segment file; the bytes are defined in store/format.md."""

def check_records(frames: Array, record_bytes: int, first_place: int) -> int:
    """The first frame whose checksum or flags are wrong; -1 if none."""

class SegmentRead:
    """Reads under way; keeps their arrays alive, and waits for them when dropped."""

    def wait(self) -> tuple[str, int, int] | None:
        """None: done. Otherwise (kind, place, errno) of the lowest place that failed; kinds: "system",
        "truncated", "checksum", "other_id"."""

class SegmentReader:
    """A few threads that do nothing but pread. Thread-safe."""

    def __init__(self, num_threads: int) -> None: ...
    def read(
        self,
        ids: Array,  # (N,) int64
        places: Array,  # (N,) int64; -1 or a tombstone's place: not read, out untouched
        out: Array,  # (N, record_bytes) uint8
        segments: Array,  # (K,) int64 ascending numbers
        fds: Array,  # (K,) int32, open until the read is done
    ) -> SegmentRead:
        """Returns at once. A frame is checked (checksum, place, id) before a byte of it reaches `out`."""
