"""The native core, as Python sees it. Internal: the rooms above wrap it, users never call it.

Every array is a contiguous CPU tensor (torch or numpy), borrowed for the call unless a class says it
keeps it; results are torch tensors. Every call releases the GIL. Results have the same bits for any number
of threads and any instruction set. Import torch first: its OpenMP runtime says how many threads there are.

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
    """Threads Colonnade uses, of its own beside the caller's; 0 = as many as torch."""

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
    block_offsets: Array  # (sum of num_owners + 1,) int64: unique rows of each table and owner
    inverse: Array  # (E,) int32: the unique row of each lookup
    segment_offsets: Array  # (U + 1,) int32
    entries: (
        Array  # (E,) int32: positions of the lookups, grouped by unique row, ascending inside a row
    )

def make_plan(lookups: Lookups, table_rows: Array, num_owners: Array) -> Plan:
    """table_rows (T,) int64; 0 = open table. num_owners (T,) int64; owner of an id: `owner_of` below.

    IndexError "table <t> feature <f> position <i> id <id> rows <rows>" for an id outside a vocabulary table.
    """

def owner_of(ids: Array, rows: int, num_owners: int) -> Array:
    """(N,) int32. Open table: (mix64(id) * num_owners) >> 64. Vocabulary table: with q, m = divmod(id, num_owners),
    (m + mix64(q)) mod num_owners, so each owner's local row number is q: dense and free of id patterns.
    mix64 is the splitmix64 finaliser."""

def take(values: Array, index: Array, out: Array) -> None:
    """out[i] = values[index[i]], all int32: slots by unique row -> slots by lookup. IndexError outside values."""

def pack_ids(
    ids: Array,  # (E,) int64
    firsts: Array,  # (L,) int64: list k is ids[firsts[k] : lasts[k]]
    lasts: Array,  # (L,) int64
    rows: Array,  # (L,) int64: of its table; 0 = open
    num_owners: Array,  # (L,) int64
    places: Array,  # (L,) int64: the owner's that has the ids of the list, 0 .. num_owners - 1
    is_ascending: bool,
) -> tuple[Array, Array]:
    """Lists of ids as they travel: (bytes (uint8), where each list ends in them (L,) int64). The format is told in
    native/packing.h. is_ascending: each list strictly ascends as `Plan.unique_ids` does inside a block; otherwise ids
    come in any order, any number of times. Ids must be their owner's: others come back as some of its own."""

def unpack_ids(
    data: Array, rows: Array, num_owners: Array, places: Array, is_ascending: bool
) -> tuple[Array, Array, int]:
    """L lists from the beginning of `data` (uint8) on: (ids int64, counts (L,) int64, bytes read). Never reads beyond
    its end; takes at most 1,024 times its bytes of memory. ValueError "message of ids: got ..." for what `pack_ids`
    does not make, and for ids that the owner does not have."""

def encode_rows(
    codec: str,  # bf16, fp16, int8
    values: Array,  # (n, W) float32
    dims: Array,  # (parts,) int32, W together
    ids: Array
    | None,  # (n,) int64: rounded at random by (seed, id, step, column); None: to nearest
    seed: int,
    step: int,
    out: Array,  # (n, bytes of a row) uint8
) -> None:
    """Rows as they travel: exchange/codec.py tells the formats. The bits of exchange/codec_reference.py."""

def decode_rows(codec: str, coded: Array, dims: Array, values: Array) -> None:
    """What `encode_rows` made, or any bytes -> values (n, W) float32."""

def pack_numbers(values: Array) -> Array:
    """(n,) int64, as unsigned -> uint8: blocks of 128 at the width of their largest, told by a byte."""

def unpack_numbers(data: Array, count: int) -> tuple[Array, int]:
    """(`count` numbers from the beginning of `data` on, bytes read). ValueError as `unpack_ids`."""

def pack_bags(
    lookups: Lookups,
    table_rows: Array,  # (T,) int64
    num_owners: Array,  # (T,) int64
    places: Array,  # (N, T) int64: as which of a table's owners a rank has rows; -1: it has none
    is_weighted: Array,  # (C,) uint8: columns whose weights travel
    codes: Array | None,  # (E,) uint8
) -> tuple[Array, Array]:
    """What each rank is to pool: (messages (uint8), where each ends (N,) int64). The format is told in native/bags.h.
    IndexError, in the words of `make_plan`, for an id outside its vocabulary table; ValueError for more than 2^24
    samples, a sequence, or an owner that is no rank."""

def join_bags(
    messages: list[Array],  # by rank, uint8
    tables: Array,  # (C,) int32: of the columns whose table has rows here
    table_rows: Array,
    num_owners: Array,
    places: Array,  # (T,) int64: this rank's
    dtype: str,  # of weights
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """All ranks' samples as one batch: ids (E,), feature_offsets (C + 1,), bag_offsets (C * G + 1,) or none where each
    bag has one lookup, bytes of weights (none: nobody has any), codes (E,) uint8 (none: nobody knows any), samples by
    rank (N,). ValueError "rank <r> sent ..." for what `pack_bags` does not make."""

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
    """Rows of T tables in this process's memory: index, slab on huge pages, pins, dirty bits, eviction by worth.

    A slot has two planes: weights (the row's D elements of `dtype`) and state (optimizer state elements of the
    compute dtype, then, with `split`, D uint16 low halves, then a uint32 clock that stops at its largest value).
    The compute dtype is float64 for float64 rows and float32 for all others.
    `split` (bfloat16 only): a row's float32 master is (high << 16) + low, low signed: high is the master
    rounded to nearest, so nothing is lost.
    Vocabulary tables whose capacity covers their share index directly, are never evicted and pay 2 bits per row;
    all others hash, and pay at most 16.1 bytes per row beyond weights, state and clock, 18.2 where rows may leave.
    While a commit is written every slot pays a bit more.
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
        num_owners: list[
            int
        ],  # by table: its rows are dealt to so many; vocabulary tables index by id // num_owners
        places: list[
            int
        ],  # by table: which of them this rank is; -1: it has no rows of it, and refuses ids
        can_evict: bool = True,  # whether rows of hashed tables may leave; else a full table refuses
        directories: list[
            str
        ] = ...,  # by table: rows lie in files mapped from there, "": in memory; []: all in memory
        first_columns: list[
            int
        ] = ...,  # by table: of the row that its rows are a slice of, for births and rounding; []: all 0
    ) -> None: ...
    def acquire(
        self,
        ids: Array,
        offsets: Array,
        slots: Array,
        birth: bool,
        next_use: Array | None = None,  # (U,) uint8: `Batch.next_use` by row
    ) -> Acquired:
        """Pin every row, giving slots (U,) int32 (out); ids are unique inside a table's part. Rows not resident get
        a slot, evicting unpinned rows where the table is full. With `birth`, missing rows are born here; without,
        the caller must `unpack` or `birth` them before anyone reads.

        MemoryError("table <t> needs <n> slots of <capacity>, <p> pinned") changes no row; p: rows that cannot leave
        and are not among the n. IndexError for an id outside a vocabulary table changes nothing either."""
    def resume(self, table: int, slots: Array, heats: Array) -> None:
        """Rows just acquired that had been here before, and their heat then, (N,) uint8: their counts go on."""
    def recall(self, table: int, slots: Array, steps: int) -> None:
        """Rows just acquired and unpacked that only processes before this one used, in `steps` steps: so often as their
        clocks say."""
    def release(self, slots: Array, offsets: Array, dirty: bool) -> None:
        """ValueError if a slot is not pinned, once the others are released; of a table that indexes directly none
        are."""
    def birth(self, ids: Array, slots: Array, table: int) -> None: ...
    def pack(self, table: int, slots: Array, records: Array) -> None:
        """records (N, record_bytes) uint8 = weights | state | low halves if split | clock (uint64)."""
    def unpack(self, table: int, slots: Array, records: Array) -> None: ...
    def pack_blocks(self, slots: Array, counts: Array, widths: Array, message: Array) -> None:
        """The first widths[t] bytes (T,) int64 of records, one after another in message (uint8), of rows that are
        listed block by block: counts[b] (N * T,) int64 rows of table b % T. ValueError where these do not fit."""
    def unpack_blocks(self, slots: Array, counts: Array, widths: Array, message: Array) -> None:
        """Likewise; what was not sent of a record becomes zeros."""
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
    def num_looked(self, table: int) -> int:
        """Slots looked at to choose who leaves, ever."""
    def pinned_share(self, table: int) -> float:
        """Of the slots of a table whose rows may leave; 0.0 for others."""
    def weights_address(self, table: int) -> int: ...
    def stride_bytes(self, table: int) -> int: ...
    def num_rows(self, table: int) -> int: ...
    def resident_bytes(self) -> int:
        """Bytes of rows, state and index in use."""

class Acquired:
    """What an acquire did beyond pinning."""

    missing: Array  # (M,) int32: positions in ids, ascending, of the rows that were not there
    evicted_ids: list[
        Array
    ]  # by table, (V,) int64: rows that lost their slot and are newer than below
    evicted_heats: list[Array]  # by table, (V,) uint8
    evicted_records: list[Array]  # by table, (V, record_bytes) uint8
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
    order: Array | None = None,  # (E,) int32: all lookups, as `by_page` lists entries
) -> None:
    """Output row b of a pooled feature = sum, mean (sum / n) or sqrtn (sum / sqrt(n)) of (weight *) its rows in lookup
    order, n its number of lookups; empty bag = zeros. Output row i of a sequence feature = (weight *) row of its
    lookup i. Computed in the compute dtype, rounded once, to nearest.

    Outputs of 1 MiB and more are written around the cache where every row is whole cache lines
    (address, stride and width multiples of 64 bytes): lay them out so.

    order: a feature of one lookup an output, whose lookups stand there in their own places, is read in that order.
    Outputs are the same."""

class Retention:
    """Which rows of a table stay. `by`: "recency", "frequency" or "norm"; 0 rows, age or halving: without limit, never.
    num_shares: the ranks among which ids are dealt by hash. Of rows alike, the one with the smaller mix64 of its id
    leaves first. Another thread may call `save_some`; all else is one thread at a time."""

    bytes: int
    work: int  # rows touched, ever
    def __init__(
        self, by: str, max_rows: int, max_age: int, halve_steps: int, num_shares: int
    ) -> None: ...
    def hear(self, ids: Array, norms: Array | None, step: int) -> Array:
        """ids (N,) unique were updated in `step`, which never descends; norms (N,) float64, squared, by norm only.
        Returns the ids (M,) that leave."""
    def remove(self, ids: Array) -> None: ...
    def state(self) -> tuple[Array, Array, Array]:
        """ids (R,) int64, steps (R,) int32, values (R,) int32 (uint32 bits), first who leaves first."""
    def restore(self, ids: Array, steps: Array, values: Array) -> None:
        """Instead of what is there, in any order. ValueError for an id twice."""
    def begin_snapshot(self) -> None:
        """`save_some` gives the rows as they are now; a snapshot before this one is over."""
    def save_some(self, most: int) -> tuple[Array, Array, Array]:
        """As `state`, of about `most` rows and those that changed meanwhile, in no order; none: it is over."""
    def __len__(self) -> int: ...

class DirectoryStep:
    """What `Directory.step` decided: `colonnade.cache.directory.Decision` as numpy arrays, and what `undo` needs."""

    number: int
    slots: Array  # (U,) int32
    asked: Array  # (U,) uint8
    ages: Array  # (U,) int32
    ticks: Array  # (U,) int32
    pushed: Array  # (U,) bool
    leaving: Array  # (U,) bool
    evicted_ids: Array  # (E,) int64
    evicted_slots: Array  # (E,) int32
    evicted_ticks: Array  # (E,) int32

class Directory:
    """See `colonnade.cache.directory.Directory`. One thread at a time."""

    number: int
    time: int  # of lfu: half-lives, in 2^-30
    num_slots: int
    capacity: int
    bytes: int
    def __init__(self, capacity: int, read_bound: int, write_bound: int, policy: str) -> None: ...
    def step(
        self, ids: Array, next_uses: Array | None, coming: Array | None, window: int
    ) -> DirectoryStep:
        """ids (U,) int64 ascending, each once; next_uses (U,) int32; coming (N,) int64 ascending."""
    def undo(self, ids: Array, done: DirectoryStep) -> None:
        """ids: that step's. ValueError unless it is the newest."""
    def flush(self, above: int) -> tuple[Array, Array, Array, Array, Array]:
        """As `rows`, of those with more than so many batches pending; then nothing is."""
    def set_bounds(self, read_bound: int, write_bound: int) -> None: ...
    def rows(self) -> tuple[Array, Array, Array, Array, Array]:
        """ids (R,) int64 ascending; slots, copied, ticks, worths (R,) int32 (worths: uint32 bits)."""
    def load(
        self,
        ids: Array,
        slots: Array,
        copied: Array,
        ticks: Array,
        worths: Array,
        number: int,
        time: int,
    ) -> None:
        """What `rows` gave, into a directory without copies. ValueError for an id or a slot twice."""
    def __len__(self) -> int: ...

class CountMinSketch:
    """How often ids were seen: see `colonnade.retention.CountMinAdmission`. Another thread may call `saved`; all else
    is one thread at a time."""

    counters: Array  # ((end - first) * depth * width,) uint8, a view
    step: int  # up to which counts have been halved
    work: int  # counters touched, ever
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
    def hear(self, ids: Array, step: int) -> Array:
        """ids (N,) unique were seen in `step`, which never descends: (N,) uint8, 1 for those seen `threshold` times.
        ValueError for an id of another block."""
    def begin_snapshot(self) -> None:
        """`saved` gives the counters as they are now; a snapshot before this one is over."""
    def saved(self) -> Array:
        """As `counters`, when the snapshot began; it is over. Takes its time, a block at a time."""

def squared_norms(address: int, stride_bytes: int, dim: int, dtype: str, slots: Array) -> Array:
    """(N,) float64: the sum of squares of each row's weights at address + slot * stride_bytes."""

def name_slots(
    names: list[Array],  # T tables: (slots,) int64
    ticks: list[Array],  # (slots,) int32
    counts: Array,  # (N * T,) int64: block b is rows of table b % T
    slots: Array,  # (n,) int64
    ids: Array,  # (n,) int64
) -> Array:
    """Slots get other rows. (n,) uint8: 1 where something is pending. ValueError."""

def add_pending(
    sums: list[Array],  # T tables: (slots, W_t) of the batch's dtype
    ticks: list[Array],  # (slots,) int32
    counts: Array,  # (T,) int64: rows of the batch, table by table, each once
    slots: Array,  # (U,) int64
    index: Array,  # (U,) int32: first element of each row's sum in `batch`
    batch: Array,  # float32 or float64
    leaves: Array,  # (U,) uint8
) -> None:
    """One tick of each row that does not leave: its sum is added to what is pending of it. ValueError."""

def take_pending(
    sums: list[Array],
    ticks: list[Array],
    counts: Array,  # (N * T,) int64: block b is rows of table b % T
    slots: Array,  # (n,) int64
    origin: Array,  # (n,) int64: which of the batch's rows each is; -1: none of them
    index: Array,  # (U,) int32
    batch: Array,
    out: Array,  # elements, row after row as listed
) -> None:
    """What is pending of rows, and is not from here on, and this batch's sum of those that are its rows: that is not in
    what is pending. ValueError."""

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

def by_page(
    slots: Array,  # (U,) int32
    offsets: Array,  # (T + 1,) int64
    segment_offsets: Array,  # (U + 1,) int32
    entries: Array,  # (E,) int32
) -> tuple[Array, Array, Array] | None:
    """(slots, segment_offsets, entries) of the same rows, table by table in the order in which they lie in memory: what
    `update` and `release` walk fastest, to the same bits. A row keeps its entries and their order. None: they are in
    order already, or no rows with segments."""

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
    #                   11 weight_bound, 12 gradient_scale; 9 to 11 are inf where unused
) -> None:
    """Per unique row, in one pass: per part sum its entries' gradients in entry order, times gradient_scale, clamped
    to +-clip_value; apply the part's optimizer; shrink it to max_norm; clamp weights to +-weight_bound; then advance
    the row's clock by 1.

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
def crc32c(data: Array, before: int = 0) -> int:
    """CRC-32C of a contiguous array's bytes (any type, also `bytes`) that follow bytes of checksum `before`."""

def map_file(fd: int, offset: int, length: int, room: int) -> tuple[int, int]:
    """(address, 0): bytes [offset, offset + length) of a file, read-only, and `room` writable bytes from the next page
    on; or (0, errno). offset: a multiple of the page size. A load that fails damages the mapping: all of the file's
    bytes read as zeros from then on."""

def unmap_file(address: int) -> None: ...
def is_damaged(address: int) -> bool: ...
def num_damaged() -> int:
    """How many mappings of this process were damaged so far."""

def handle_faults() -> None:
    """Put this process's handler of SIGBUS before one that was installed after the last mapping was made."""

def unchecked_blocks(
    slots: Array,  # (E,) int32, as uint32
    num_rows: int,
    begin: int,
    stride: int,
    block_bytes: int,
    checked: Array,  # (blocks of the file,) uint8
) -> list[int]:
    """Blocks, each once and at most 256, that rows `slots` < num_rows at begin + slot * stride of a file touch and that
    are not checked."""

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
    records: Array,  # (N, record_bytes) uint8
    record_bytes: int,
    first_place: int,  # segment number << 32 | record number of the first
    frames: Array,  # out (N, 4 + record_bytes rounded up to 4) uint8
) -> None:
    """Records as they lie in a segment file; the bytes are defined in store/format.md."""

def check_records(
    ids: Array,  # (N,) int64
    frames: Array,  # (N, stride) uint8
    record_bytes: int,
    first_place: int,
) -> int:
    """The first frame whose checksum is wrong for its id and place; -1 if none."""

class PageReader:
    """Reads rows of any number of logs, page by page; one per rank. Thread-safe; finishes what was asked for when it
    goes.

    kind: "ring" (io_uring), "threads" (pread), or "auto": the first that this system has. depth: reads in flight at
    most, 1 to 1024. ValueError for others, RuntimeError for "ring" where there is none."""

    kind: str  # "ring" or "threads"
    def __init__(self, kind: str = "auto", depth: int = 64) -> None: ...
    def counts(self) -> dict[str, int | float]:
        """Since the beginning: reads, pages (of 4 KiB), bytes, rows, busy_seconds (with something to read)."""

class LogRead:
    """Reads under way; keeps their output alive, and waits for them when dropped."""

    def wait(self) -> tuple[Array, tuple[str, int, int] | None]:
        """(found (N,) bool, fault): rows not found are untouched in `out`. fault None: done. Otherwise (kind, place,
        errno) of the lowest place that failed, and every row that could be read is in `out`; kinds: "system",
        "truncated", "checksum" (other bytes, another id's or of another place)."""
    def is_done(self) -> bool: ...

class Chunk:
    """Some bytes of a segment file, in the order of the file, on their way to the disk."""

    segment: int
    offset: int  # in the file; a multiple of 4096
    data: memoryview  # address and length: multiples of 4096; at offset 0 the first 64 bytes are the caller's to fill
    is_last: bool  # of its segment; then zeros follow the last record up to a multiple of 4096

class RowLog:
    """One table's rows at rest: an append-only log of segments, and the index of what is live in it.

    A place is segment << 32 | record, -1 nowhere. A new row is in a write buffer, read as fast as memory, until its
    chunk is `written`. Thread-safe; nothing here waits for a disk but `LogRead.wait` and `detach`.
    ids (N,) int64: IndexError for one outside a vocabulary, ValueError for another rank's; then nothing has changed."""

    pending_bytes: int  # of full chunks that are not written yet
    num_rows: int
    index_bytes: int
    def __init__(
        self,
        record_bytes: int,
        rows: int,  # 0: open table
        num_owners: int,  # rows are dealt to so many, of whom this is `place`
        place: int,
        segment_bytes: int,  # a segment ends before it is longer, but holds one record
        chunk_bytes: int,  # a multiple of 4096, at least a frame
        num_streams: int,  # which write buffers there are: rows of one stream share segments
        first_segment: int,
    ) -> None: ...
    def write(
        self, ids: Array, records: Array, heats: Array | None, stream: int, for_commit: bool = False
    ) -> None:
        """records (N, record_bytes) uint8, heats (N,) uint8; None: a row keeps its heat, a new one has 0. Of equal ids
        the last wins. Memory only.

        for_commit: the row becomes part of the frozen content too, in the place of what that has of it. A row of the
        frozen content that has changed since `freeze` must be written so before it is written otherwise or deleted."""
    def delete(self, ids: Array) -> int:
        """How many were there. The frozen content keeps them."""
    def places(self, ids: Array, out: Array) -> None:
        """out (N,) int64."""
    def heats(self, ids: Array, out: Array) -> None:
        """out (N,) uint8; 0 nowhere."""
    def touch(self, ids: Array, heats: Array) -> None:
        """heats (N,) uint8; ids that are nowhere are passed over."""
    def read(self, reader: PageReader, ids: Array, out: Array, demand: bool) -> LogRead:
        """out (N, record_bytes) uint8. The content is that of the call; rows in write buffers and mapped files are
        copied in the call, others are read. A frame is checked (checksum, place, id) before a byte of it reaches `out`.
        ValueError: a row's segment is written but not attached."""
    def next_chunk(self) -> Chunk | None:
        """The oldest full chunk that nobody took."""
    def written(self, chunk: Chunk) -> None:
        """It is in its file: its rows are read there from now on, and its memory is given back. ValueError unless the
        segment is attached."""
    def attach(self, segment: int, fd: int, address: int = 0) -> None:
        """fd stays open until `detach`, and may be open with O_DIRECT. address: where all of the file is mapped, to
        read it there."""
    def detach(self, segment: int) -> None:
        """Returns when no read uses fd or mapping any more; its rows cannot be read until it is attached again."""
    def seal(self) -> list[int]:
        """End the segments that take rows, and say which: their last chunks become available."""
    def sealed(self, segment: int) -> tuple[int, int, int]:
        """(num_records, num_bytes, checksum): bytes without the padding, sum of the records' crcs. ValueError unless
        sealed; the checksum of a loaded segment is 0."""
    def keys(self, segment: int) -> Array:
        """ids (n,) int64 in the order of the records; ValueError if loaded or forgotten."""
    def forget_keys(self, segment: int) -> None: ...
    def segments(self) -> tuple[Array, Array, Array, Array]:
        """number, num_records, num_live (S,) int64, is_sealed (S,) uint8; ascending number."""
    def live(self, segment: int) -> Array:
        """(ceil(n / 8),) uint8: bit r % 8 of byte r // 8 says whether record r is live."""
    def freeze(self) -> None:
        """Keep the content as it is now beside the current one, for a commit. ValueError if it is frozen."""
    def frozen_live(self, segment: int) -> Array:
        """As `live`. ValueError unless frozen."""
    def frozen_segments(self) -> list[int]:
        """Ascending numbers of segments with rows of the frozen content."""
    def thaw(self) -> None:
        """The frozen content is needed no more."""
    def load(self, segment: int, ids: Array, live: Array, fd: int) -> None:
        """A sealed segment of a commit: ids of all its records, live as `live` gives it, fd -1: attach later.
        ValueError, nothing changed, naming a record whose id is live elsewhere. Later segments get later numbers."""
    def rewrite(
        self,
        segment: int,
        ids: Array,
        frames: Array,
        first_record: int,
        stream: int,
        hot_stream: int,
    ) -> int:
        """ids (n,) and frames (n, stride) uint8 of a sealed segment, as read from its files: appends those of rows that
        still lie there, hottest first, to `hot_stream` those hotter than seven in eight of the rows moved lately, and
        says how many. The frozen content moves with them. ValueError "record <r>: ..." where
        a checksum is wrong: nothing changed."""
    def forget(self, segment: int) -> None:
        """ValueError unless all of it is written and nothing in it is live, in the frozen content neither."""
    def counts(self) -> dict[str, int]:
        """Since the beginning: rows_written, rows_rewritten, rows_deleted, bytes_framed, rows_copied (read from
        memory), rows_planned (read from files), rows_absent."""

class AcquireJob:
    """Rows of one `TieredRows.acquire` that may still be on their way."""

    is_done: bool
    def counts(self) -> dict[str, int]:
        """Rows: resident, read (from files), copied (from the logs' memory), born, evicted_clean, evicted_dirty; bytes
        of records: bytes_read, bytes_evicted."""

class TieredRows:
    """Rows of all tables: those in use in a Dram, the others in a log each. Thread-safe. Keeps its parts alive.

    A fault is (table, kind, place, errno) as in `LogRead.wait`; after one every wait says it again.
    """

    def __init__(
        self,
        dram: Dram,
        logs: list[RowLog] | list[RowLog | None],
        reader: PageReader,
        steps: int = 0,
    ) -> None:
        """logs: by table; None where no row is here.

        steps: that the rows at rest were trained for before; their clocks count how often they were used in
        these."""
    def acquire(
        self, ids: Array, offsets: Array, slots: Array, next_use: Array | None = None
    ) -> AcquireJob:
        """As `Dram.acquire`. Rows that leave go to their logs; those missing are read from there, or born. Anything
        raised leaves nothing pinned."""
    def wait(self, job: AcquireJob) -> tuple[int, str, int, int] | None:
        """Until the rows of this acquire and of all before it are there."""
    def settle(self) -> tuple[int, str, int, int] | None:
        """Until no row is on its way."""
    def fault(self) -> tuple[int, str, int, int] | None: ...
    def read(self, table: int, ids: Array, out: Array) -> tuple[int, str, int, int] | None:
        """Weights (N, D) of rows wherever they are; without a trace, ahead of reads for acquires."""
    def erase(self, table: int, ids: Array) -> None:
        """Forget rows, in memory and in the log. Rows in use are born again in place."""
    def write_dirty(self, table: int, rows: int) -> int:
        """About `rows` rows that are newer than in their log go there and stay; how many did. 0: there are none."""
    def begin_snapshot(self) -> None:
        """All rows newer than in their logs are to be saved as they are now. ValueError while one is being taken."""
    def before_update(self, slots: Array, offsets: Array) -> None:
        """Save those of these rows that a snapshot still needs."""
    def save_some(self, rows: int) -> int:
        """Save about `rows` rows that a snapshot still needs; how many were. 0: there are none."""
    def end_snapshot(self) -> None:
        """What was not saved is newer than in its log again."""
