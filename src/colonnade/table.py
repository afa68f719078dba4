"""Tables and features: plain frozen values, no memory behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator
from pydantic import Field as Limits

from colonnade.config.validation import Expected, NonNegative, validate_fields
from colonnade.errors import ConfigError
from colonnade.optimizers import RowWiseAdagrad, SparseOptimizer
from colonnade.retention import Admission, Eviction, MaxRowsEviction

Pooling = Literal["mean", "sequence", "sqrtn", "sum"]
POOLINGS = ("sum", "mean", "sequence", "sqrtn")  # a pooling's place is its number in the core
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
CLOCK_BYTES = 8
MAX_RECORD_BYTES = 1 << 31
"""Size that a row with its optimizer state stays below: the native core counts bytes of a row in 32 bits."""
MOST_HASHES = 16

T = TypeVar("T")
Width = Annotated[int, Limits(ge=1)]
ByPart = Annotated[
    Mapping[Annotated[str, Limits(pattern=r"^[^.]+$")], T],
    Limits(min_length=1),
    # Strict validation takes no mapping but a dict.
    BeforeValidator(lambda value: dict(value) if isinstance(value, Mapping) else value),
]
"""One for each part, by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Each weight of a new row is drawn from `[-scale, scale)` by (seed, table, id, position)."""

    scale: NonNegative

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(frozen=True, slots=True)
class Part:
    """Some columns of a table's rows, with an optimizer of their own."""

    name: str  # "" where the table has only one
    column: int  # first element in the row
    dim: int
    state: int  # first scalar in the row's optimizer state
    optimizer: SparseOptimizer
    init_scale: float


@dataclass(frozen=True, slots=True)
class Table:
    """A named set of rows of one width.

    With `rows` a *vocabulary table*: ids 0 .. rows-1, anything else is an error. Without, an *open
    table*: any 64-bit id, rows appear when first trained. A row's first value depends only on
    (seed, table name, id), so a row never trained costs no storage. With `rows` and `hashes` a *hash-stacked table*:
    any 64-bit id, in N rows (`lookup/stacking.py`).

    A table may have parts, `Table("item", {"deep": 64, "wide": 1})`, so that a model routes an id once and
    gets both; `optimizer` and `initializer` then are one for all or one by part.

    `dtype` is that of the weights; sums and optimizer state are float64 for float64 and float32 otherwise.
    16-bit weights are rounded at random when they are updated, which keeps small updates alive on average;
    `master` (bfloat16) keeps the lost half of every weight with the state instead: lookups read the upper
    half, updates are those of float32, to the bit.
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
    """None: uniform in +-1/sqrt(dim)."""
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "float64"],
        # torch.bfloat16 says the same as "bfloat16".
        BeforeValidator(lambda value: str(value).removeprefix("torch.")),
    ] = "float32"
    master: bool = False
    max_norm: Annotated[float | None, Limits(gt=0)] = None
    """An updated row (of each part) that is longer than this is shrunk to it, as in nn.Embedding."""
    weight_bound: Annotated[float | None, Limits(gt=0)] = None
    """Weights of an updated row are clamped to +-this, before they are rounded to 16 bits (PERSIA's weight_bound)."""
    admission: Annotated[
        Admission | None, Expected("CountMinAdmission(...) or RandomAdmission(...)")
    ] = None
    """Of an open table: from which update on a row stays (`CountMinAdmission`, `RandomAdmission`). None: the first."""
    eviction: Annotated[Eviction | None, Expected("AgeEviction(...) or MaxRowsEviction(...)")] = (
        None
    )
    """Of an open table: which rows leave (`AgeEviction`, `MaxRowsEviction`). None: none."""
    hashes: Annotated[
        int | None, Limits(ge=1, le=MOST_HASHES), Expected("a whole number, 1 .. 16, such as 2")
    ] = None
    """With `rows`: any 64-bit id is taken, and its vector is the sum of so many rows, chosen by hashes. None: ids are
    rows."""

    def __post_init__(self) -> None:
        validate_fields(self, f"table {self.name!r}")
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
        """What random bits of its rows are drawn by: a name, and the column that they begin with."""
        return self.name, 0

    @property
    def suffix(self) -> str:
        """Of what is named by features that read it."""
        return ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """In declared order; their columns and their state lie side by side in a row."""
        dims = self.dim if isinstance(self.dim, Mapping) else {"": self.dim}
        found: list[Part] = []
        column = state = 0
        for name, dim in dims.items():
            optimizer = _of(self.optimizer, name)
            initializer = _of(self.initializer, name)
            scale = initializer.scale if initializer else dim**-0.5
            found.append(Part(name, column, dim, state, optimizer, scale))
            column += dim
            state += optimizer.state_floats(dim)
        return tuple(found)

    @property
    def width(self) -> int:
        """Elements of a row: the dims of its parts."""
        return sum(part.dim for part in self.parts)

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return ITEM_BYTES[self.dtype]

    @property
    def compute_dtype(self) -> Literal["float32", "float64"]:
        """Of sums, lookup weights and optimizer state."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def state_floats(self) -> int:
        """Scalars of optimizer state that lie with a row."""
        return sum(part.optimizer.state_floats(part.dim) for part in self.parts)

    @property
    def record_bytes(self) -> int:
        """Bytes of one row at rest: weights, optimizer state, low halves if `master`, and a 64-bit clock."""
        state = self.state_floats * ITEM_BYTES[self.compute_dtype]
        return self.width * self.itemsize + state + 2 * self.width * self.master + CLOCK_BYTES


@dataclass(frozen=True, slots=True)
class TableSlice(Table):
    """Some columns of a table, a table by itself wherever rows lie and travel: `slice_of` makes one."""

    whole: Table = field(kw_only=True)
    first: int = field(kw_only=True)
    """Column of the whole row."""

    @property
    def origin(self) -> tuple[str, int]:
        return self.whole.name, self.first

    @property
    def suffix(self) -> str:
        return f"[{self.first}:{self.first + self.width}]"


@dataclass(frozen=True, slots=True)
class TableSide(Table):
    """Hot rows of a table, or its cold ones, a table by itself wherever rows lie and travel: `side_of` makes one."""

    whole: Table = field(kw_only=True)
    side: Literal["hot", "cold"] = field(kw_only=True)

    @property
    def origin(self) -> tuple[str, int]:
        return self.whole.name, 0


def side_of(table: Table, side: Literal["hot", "cold"]) -> TableSide:
    """Its rows have the first values, updates and records of the whole table's."""
    rest = {"name", "hashes"}  # lookups of a side are of rows
    said = {each.name: getattr(table, each.name) for each in fields(Table) if each.name not in rest}
    return TableSide(f"{table.name}[{side}]", **said, whole=table, side=side)


def slice_of(table: Table, first: int, last: int) -> TableSlice:
    """Columns first .. last - 1 of `table`: what whole rows would have there, first values and updates alike, where
    `check_slices` has nothing against it."""
    taken = [
        (part, min(last, part.column + part.dim) - max(first, part.column)) for part in table.parts
    ]
    taken = [(part, dim) for part, dim in taken if dim > 0]
    columns = {part.name: dim for part, dim in taken}
    scales = {part.name: Uniform(scale=part.init_scale) for part, _ in taken}
    has_parts = isinstance(table.dim, Mapping)
    return TableSlice(
        f"{table.name}[{first}:{last}]",
        columns if has_parts else last - first,
        rows=table.rows,
        optimizer={part.name: part.optimizer for part, _ in taken}
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
        first=first,
    )


def check_slices(table: Table, slices: Sequence[Table]) -> None:
    """Raises ConfigError where a table asks for what only whole rows can give."""
    dims = {part.name: part.dim for part in table.parts}
    cut = {part.name for each in slices for part in each.parts if part.dim < dims[part.name]}
    if len(slices) > 1 and (said := needs_whole_rows(table, cut)):
        raise ConfigError(
            f"table {table.name!r}: got column_wise or grid, which cut rows by columns, for what needs whole rows: "
            f"{said}, or choose row_wise, host_wise or table_wise"
        )


def check_hot(table: Table, ids: Sequence[int]) -> None:
    """ids ascending. Raises ConfigError where a table has no such rows, or may not have them on every rank."""
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


def needs_whole_rows(table: Table, cut: Collection[str]) -> str:
    """What of a table only whole rows can give, if its rows were cut, and these parts of them; "": nothing."""
    for part in table.parts:
        if part.name in cut and part.optimizer.is_of_rows:
            of = f" of part {part.name!r}" if part.name else ""
            return f"optimizer {part.optimizer.name}{of}; give it sgd, adagrad, adam, adamw or ftrl"
    if cut and table.max_norm is not None:
        return f"max_norm={table.max_norm}; leave it out"
    if isinstance(table.eviction, MaxRowsEviction) and table.eviction.by == "norm":
        return "eviction by norm; evict by recency or frequency"
    return ""


@dataclass(frozen=True, slots=True)
class Feature:
    """A column of the input that looks ids up in a table; several features may share a table.

    `pooling`: "sum", "mean" (sum / n) and "sqrtn" (sum / sqrt(n)) give one vector per sample, n being its number
    of ids (an empty bag gives zeros); "sequence" gives one vector per lookup. Of a table with parts a feature
    gives one tensor per part, named "feature.part".
    """

    name: str
    table: str
    pooling: Pooling = field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        validate_fields(self, f"feature {self.name!r}")


def _of(value: T | Mapping[str, T], part: str) -> T:
    chosen: Any = value[part] if isinstance(value, Mapping) else value
    return chosen
