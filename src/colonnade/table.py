"""Tables and features: frozen values that describe embedding tables; they allocate no memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator
from pydantic import Field as Limits

from colonnade.config.validation import Expected, NonNegative, validate_dataclass_fields
from colonnade.errors import ConfigError
from colonnade.optimizers import RowWiseAdagrad, SparseOptimizer
from colonnade.retention import Admission, Eviction, MaxRowsEviction

HotOrCold = Literal["hot", "cold"]
RowDtype = Literal["bfloat16", "float16", "float32", "float64"]
Pooling = Literal["sum", "mean", "sequence", "sqrtn"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # the native core numbers poolings by this order
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
CLOCK_BYTES = 8
MAX_RECORD_BYTES = 1 << 31
"""Upper bound, exclusive, of a row's size with optimizer state: the native core counts bytes of a row in 32 bits."""
MAX_HASHES = 16

T = TypeVar("T")
Width = Annotated[int, Limits(ge=1)]
ByPart = Annotated[
    Mapping[Annotated[str, Limits(pattern=r"^[^.]+$")], T],
    Limits(min_length=1),
    # Strict validation accepts no mapping other than a dict.
    BeforeValidator(lambda value: dict(value) if isinstance(value, Mapping) else value),
]
"""Mapping from the name of each part to its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Uniform initializer: draws each weight of a new row from `[-scale, scale)` by (seed, table, id, position)."""

    scale: NonNegative

    def __post_init__(self) -> None:
        validate_dataclass_fields(self)


@dataclass(frozen=True, slots=True)
class Part:
    """Range of columns of a table's rows that has its own optimizer."""

    name: str  # "" if the table has only one part
    column: int  # first element in the row
    dim: int
    state: int  # first scalar in the row's optimizer state
    optimizer: SparseOptimizer
    init_scale: float


@dataclass(frozen=True, slots=True)
class Table:
    """Embedding table: a named set of rows of one width.

    With `rows`: a *vocabulary table* with ids 0 .. rows-1; any other id is an error. Without `rows`: an *open
    table* that accepts any 64-bit id and creates a row when the id is first trained. A row's initial value depends
    only on (seed, table name, id), so an untrained row needs no storage. With `rows` and `hashes`: a *hash-stacked
    table* that maps any 64-bit id to its N rows (`lookup/stacking.py`).

    A table may have parts: with `Table("item", {"deep": 64, "wide": 1})` a model looks an id up once and gets both
    vectors. `optimizer` and `initializer` are then one for all parts, or one for each part by name.

    `dtype` is the dtype of weights. Sums and optimizer state are float64 for float64 tables, else float32.
    Updated 16-bit weights are rounded stochastically, which preserves small updates on average. `master` (bfloat16)
    instead stores the lower 16 bits of every weight with the optimizer state: lookups read the upper half, and
    updates have the exact bits of float32 training.
    """

    name: Annotated[
        str, Limits(min_length=1), Expected("text. Write Table('item', dim=16, rows=1000)")
    ]
    dim: Annotated[
        Width | ByPart[Width],
        Expected("at least 1, or at least one part with such a width and a name without a dot"),
    ]
    _: KW_ONLY
    rows: Annotated[
        int | None,
        Limits(ge=1, lt=2**62),
        Expected("1 or more, below 2**62; leave rows out for an open table of any 64-bit ids"),
    ] = None
    optimizer: Annotated[
        SparseOptimizer | ByPart[SparseOptimizer],
        Expected("SGD(lr=...), Adagrad(lr=...), ..., or one for each part by name"),
    ] = field(default=RowWiseAdagrad(lr=0.02))
    initializer: Annotated[
        Uniform | ByPart[Uniform | None] | None,
        Expected("Uniform(scale=...), or one for each part by name"),
    ] = None
    """Initial weights. None: uniform in +-1/sqrt(dim)."""
    dtype: Annotated[
        RowDtype,
        # torch.bfloat16 is accepted for "bfloat16".
        BeforeValidator(lambda value: str(value).removeprefix("torch.")),
    ] = "float32"
    master: bool = False
    max_norm: Annotated[float | None, Limits(gt=0)] = None
    """Largest 2-norm of an updated row (of each part); a longer row is scaled down to it, as in nn.Embedding."""
    weight_bound: Annotated[float | None, Limits(gt=0)] = None
    """Bound that weights of an updated row are clamped to (+-), before rounding to 16 bits (PERSIA's weight_bound)."""
    admission: Annotated[
        Admission | None, Expected("CountMinAdmission(...) or RandomAdmission(...)")
    ] = None
    """Admission policy of an open table (`CountMinAdmission`, `RandomAdmission`). None: rows stay from their first
    update."""
    eviction: Annotated[Eviction | None, Expected("AgeEviction(...) or MaxRowsEviction(...)")] = (
        None
    )
    """Eviction policy of an open table (`AgeEviction`, `MaxRowsEviction`). None: no row is evicted."""
    hashes: Annotated[
        int | None, Limits(ge=1, le=MAX_HASHES), Expected("a whole number, 1 .. 16, such as 2")
    ] = None
    """Number of hash functions of a hash-stacked table, which needs `rows`; an id's vector is the sum of one row per
    function. None: ids are row numbers."""

    def __post_init__(self) -> None:
        validate_dataclass_fields(self, f"table {self.name!r}")
        if self.master and self.dtype != "bfloat16":
            raise ConfigError(
                f"table {self.name!r}: got master=True with dtype={self.dtype!r}; only a bfloat16 weight is the "
                "upper half of a float32"
            )
        dims = self.dim if isinstance(self.dim, Mapping) else {"": self.dim}
        for setting in ("optimizer", "initializer"):
            value = getattr(self, setting)
            if isinstance(value, Mapping) and set(value) != set(dims):
                raise ConfigError(
                    f"table {self.name!r}: got {setting}s for {sorted(value)}, wanted one for each of the parts "
                    f"{sorted(dims)}, or one for all"
                )
        for setting in ("admission", "eviction"):
            if getattr(self, setting) is not None and self.rows is not None:
                raise ConfigError(
                    f"table {self.name!r}: got {setting} with rows={self.rows}; a vocabulary table has room for every "
                    f"id: leave rows out for an open table, or {setting} for one whose rows all stay"
                )
        if self.hashes is not None and self.rows is None:
            raise ConfigError(
                f"table {self.name!r}: got hashes={self.hashes} without rows; say how many rows all ids share, or "
                "leave hashes out for an open table, whose ids have a row each"
            )
        if self.record_bytes >= MAX_RECORD_BYTES:
            raise ConfigError(
                f"table {self.name!r}: got rows of {self.record_bytes:,} bytes with their optimizer state, wanted less "
                f"than {MAX_RECORD_BYTES:,}; lower dim"
            )

    @property
    def origin(self) -> tuple[str, int]:
        """Seed of the rows' random bits: a table name, and the column of that table that these rows begin with."""
        return self.name, 0

    @property
    def suffix(self) -> str:
        """Suffix of the names of features that read this table."""
        return ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts in declared order; their columns, and their state, are adjacent in a row."""
        dims = self.dim if isinstance(self.dim, Mapping) else {"": self.dim}
        parts: list[Part] = []
        column = state = 0
        for name, dim in dims.items():
            optimizer = _value_of_part(self.optimizer, name)
            initializer = _value_of_part(self.initializer, name)
            scale = initializer.scale if initializer else dim**-0.5
            parts.append(Part(name, column, dim, state, optimizer, scale))
            column += dim
            state += optimizer.state_floats(dim)
        return tuple(parts)

    @property
    def width(self) -> int:
        """Number of elements of a row: the sum of its parts' dims."""
        return sum(part.dim for part in self.parts)

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return ITEM_BYTES[self.dtype]

    @property
    def compute_dtype(self) -> Literal["float32", "float64"]:
        """Dtype of sums, lookup weights and optimizer state."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def state_floats(self) -> int:
        """Number of scalars of optimizer state that are stored with a row."""
        return sum(part.optimizer.state_floats(part.dim) for part in self.parts)

    @property
    def record_bytes(self) -> int:
        """Bytes of one stored row: weights, optimizer state, low halves if `master`, and a 64-bit clock."""
        state = self.state_floats * ITEM_BYTES[self.compute_dtype]
        return self.width * self.itemsize + state + 2 * self.width * self.master + CLOCK_BYTES


@dataclass(frozen=True, slots=True)
class TableSlice(Table):
    """Column slice of a table, treated as a table of its own by stores and exchanges. `slice_of` makes one."""

    whole: Table = field(kw_only=True)
    first: int = field(kw_only=True)
    """First column of the slice in the whole row."""

    @property
    def origin(self) -> tuple[str, int]:
        return self.whole.name, self.first

    @property
    def suffix(self) -> str:
        return f"[{self.first}:{self.first + self.width}]"


@dataclass(frozen=True, slots=True)
class TableSide(Table):
    """Hot rows of a table, or its cold rows, treated as a table of their own by stores and exchanges.
    `select_table_side` makes one."""

    whole: Table = field(kw_only=True)
    side: HotOrCold = field(kw_only=True)

    @property
    def origin(self) -> tuple[str, int]:
        return self.whole.name, 0


def select_table_side(table: Table, side: HotOrCold) -> TableSide:
    """Return the hot or cold side of `table`; its rows have the initial values, updates and records of the table."""
    excluded = {"name", "hashes"}  # a side is looked up by row, after hashing
    settings = {
        setting.name: getattr(table, setting.name)
        for setting in fields(Table)
        if setting.name not in excluded
    }
    return TableSide(f"{table.name}[{side}]", **settings, whole=table, side=side)


def slice_table_columns(table: Table, first_column: int, end_column: int) -> TableSlice:
    """Return columns first .. last - 1 of `table` as a table. Initial values and updates equal those of whole rows, for
    tables that pass `check_column_slices`."""
    overlaps = [
        (part, min(end_column, part.column + part.dim) - max(first_column, part.column))
        for part in table.parts
    ]
    overlaps = [(part, dim) for part, dim in overlaps if dim > 0]
    columns = {part.name: dim for part, dim in overlaps}
    scales = {part.name: Uniform(scale=part.init_scale) for part, _ in overlaps}
    has_parts = isinstance(table.dim, Mapping)
    return TableSlice(
        f"{table.name}[{first_column}:{end_column}]",
        columns if has_parts else end_column - first_column,
        rows=table.rows,
        optimizer={part.name: part.optimizer for part, _ in overlaps}
        if has_parts
        else table.optimizer,
        initializer=scales if has_parts else scales[""],
        dtype=table.dtype,
        master=table.master,
        max_norm=table.max_norm,
        weight_bound=table.weight_bound,
        admission=table.admission,
        eviction=table.eviction,
        whole=table,
        first=first_column,
    )


def check_column_slices(table: Table, column_slices: Sequence[Table]) -> None:
    """Raise ConfigError if a table that is sharded into column slices has a setting that needs whole rows."""
    dims = {part.name: part.dim for part in table.parts}
    cut_parts = {
        part.name for piece in column_slices for part in piece.parts if part.dim < dims[part.name]
    }
    if len(column_slices) > 1 and (problem := describe_whole_row_setting(table, cut_parts)):
        raise ConfigError(
            f"table {table.name!r}: got column_wise or grid, which cut rows by columns, for what needs whole rows: "
            f"{problem}, or choose row_wise, host_wise or table_wise"
        )


def check_hot_rows(table: Table, ids: Sequence[int]) -> None:
    """Raise ConfigError if a table does not have these hot rows, or cannot replicate them. ids: ascending."""
    if table.admission is not None or table.eviction is not None:
        raise ConfigError(
            f"table {table.name!r}: got hot rows of a table with admission or eviction, which decide for the rows that "
            "one rank owns, and copies on every rank would be left out of it; leave hot rows out, or both of these"
        )
    if table.rows is not None and not (ids[0] >= 0 and ids[-1] < table.rows):
        raise ConfigError(
            f"table {table.name!r}: got hot rows {ids[0]} .. {ids[-1]}, wanted ids in 0 .. {table.rows - 1}"
        )
    if ids[0] < -(2**63) or ids[-1] >= 2**63:
        raise ConfigError(
            f"table {table.name!r}: got hot rows {ids[0]} .. {ids[-1]}, wanted 64-bit ids"
        )


def describe_whole_row_setting(table: Table, cut_parts: Collection[str]) -> str:
    """Describe the setting of `table` that needs whole rows, with a remedy; "" if none does. cut_parts: names of the
    parts that would be cut into column slices."""
    for part in table.parts:
        if part.name in cut_parts and part.optimizer.is_of_rows:
            of = f" of part {part.name!r}" if part.name else ""
            return f"optimizer {part.optimizer.name}{of}; give it sgd, adagrad, adam, adamw or ftrl"
    if cut_parts and table.max_norm is not None:
        return f"max_norm={table.max_norm}; leave it out"
    if isinstance(table.eviction, MaxRowsEviction) and table.eviction.by == "norm":
        return "eviction by norm; evict by recency or frequency"
    return ""


@dataclass(frozen=True, slots=True)
class Feature:
    """Feature: an input column of ids that are looked up in a table; several features may share a table.

    `pooling`: "sum", "mean" (sum / n) and "sqrtn" (sum / sqrt(n)) produce one vector per sample with n ids (zeros for
    an empty bag); "sequence" produces one vector per lookup. For a table with parts, a feature produces one tensor
    per part, named "feature.part".
    """

    name: str
    table: str
    pooling: Pooling = field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        validate_dataclass_fields(self, f"feature {self.name!r}")


def _value_of_part(value: T | Mapping[str, T], part: str) -> T:
    result: Any = value[part] if isinstance(value, Mapping) else value
    return result
