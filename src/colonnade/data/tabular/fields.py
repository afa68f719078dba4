"""Field types of a file schema: frozen values, declared in Python or YAML.

A field reads the file's column `column` (default: the field's name), so two fields may read one column.
An empty text, a null, an empty CSV field and a NaN are all *missing*. So are, in numbers, the texts NULL, \\N, NA, None
and nan, and, in text ids, those of `null_values`.

ids of a column            declared by            the table's rows
any 64-bit id              nothing                open: rows appear when first trained
hashed into N rows         rows=N                 N; mix64(id) mod N; a missing value is hashed as `MISSING_ID`
0 .. N-1, not hashed       cardinality=N          N, then one for missing values
a known list of values     vocabulary=[...]       one per value, then `unknown_rows`, then one for missing values

Integers are used as ids directly, from 2^63 on as the negative number of the same 64 bits; -2^63 (2^63), which stands
for missing values, is refused. A text's id is its 64-bit hash (hashing.py). The row for missing values
exists unless `missing: error`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import AllowInfNan, BeforeValidator, Strict
from pydantic import Field as Limits

from colonnade.config.validation import validate_dataclass_fields
from colonnade.data.tabular.arrow_types import Dtype
from colonnade.data.tabular.times import NUMBER, Unit, parse_time
from colonnade.errors import ConfigError

Count = Annotated[int, Strict(), Limits(ge=1, lt=2**62)]
Amount = Annotated[int, Strict(), Limits(ge=0, lt=2**62)]
Real = Annotated[float, Strict(), AllowInfNan(False)]
Value = Annotated[str, Strict()] | Annotated[int, Strict(), Limits(ge=-(2**63), lt=2**64)]
Name = Annotated[str, Strict()]
Missing = Literal["row", "error"]
KeptEnd = Literal["first", "last"]
Moment = Annotated[
    str, Strict(), BeforeValidator(lambda v: v.isoformat() if isinstance(v, date) else v)
]
"""ISO time; YAML reads one without quotes as a date."""
NEWEST = "newest"
NULL_VALUES = ("NULL", r"\N")
"""Default texts that are missing values in text ids. NA, None and nan are also countries, names and words."""


@dataclass(frozen=True, slots=True)
class DeclaredField:
    """Base of all fields. Raises ConfigError for invalid settings, from Python and from YAML."""

    name: str
    column: Name = dataclasses.field(default="", kw_only=True)
    """Name of the file's column; default: `name`."""

    def __post_init__(self) -> None:
        # Values from YAML are lists where the fields have tuples.
        validate_dataclass_fields(self, f"field {self.name!r}", strict=None)
        if not self.name or "." in self.name:
            raise ConfigError(
                f"field {self.name!r}: got this name, wanted one without a dot; "
                "give the file's column with column="
            )
        for attribute in ("column", "table"):
            if getattr(self, attribute, None) == "":
                object.__setattr__(self, attribute, self.name)
        self._check_settings()

    def _check_settings(self) -> None:
        """Check conditions that the types of the settings do not express."""

    def _build_setting_error(self, setting: str, wanted: str) -> ConfigError:
        wanted = wanted[0].lower() + wanted[1:]
        return ConfigError(
            f"field {self.name!r}: got {setting}={getattr(self, setting)!r}; {wanted}"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the file's columns that the field reads."""
        return (self.column,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _IdField(DeclaredField):
    dtype: Dtype | None = None
    """Type of the values. Default: the type in the file; in CSV text, unless other settings need integers."""
    rows: Count | None = None
    """Number of rows into which ids are hashed."""
    cardinality: Count | None = None
    """Number of ids: integers 0 .. cardinality-1, anything else is an error."""
    vocabulary: tuple[Value, ...] | None = None
    """Values that have separate rows."""
    unknown_rows: Amount = 1
    """Number of rows that values outside the vocabulary share, by hash; 0: such a value is an error."""
    missing: Missing = "row"
    """Treatment of missing values: a separate row, or an error."""
    null_values: tuple[Name, ...] | None = None
    """Texts that are missing values, instead of NULL and \\N. For text ids."""
    table: Name = ""
    """Name of the table; fields of one table share rows. Default: a separate table."""
    namespace: Annotated[bool, Strict()] = False
    """Hash ids with the field's name, the missing one too, so that fields of one table share no id."""

    def _check_settings(self) -> None:
        if self.namespace and (self.cardinality is not None or self.vocabulary is not None):
            raise self._build_setting_error(
                "namespace",
                "It hashes ids, which a cardinality or a vocabulary numbers; give the field a table of its own, or "
                "leave these out",
            )
        options = ("rows", "cardinality", "vocabulary")
        set_options = [option for option in options if getattr(self, option) is not None]
        if len(set_options) > 1:
            raise ConfigError(
                f"field {self.name!r}: got both {set_options[0]} and {set_options[1]}, wanted one of rows (hashed), "
                "cardinality (integers as they are), vocabulary, or none of them for an open table"
            )
        if self.null_values is not None and self.declared_dtype == "integer":
            raise self._build_setting_error(
                "null_values", "In integers NULL, \\N, NA, None and nan are missing; leave it out"
            )
        if self.cardinality is not None and self.dtype == "text":
            raise self._build_setting_error(
                "dtype", "Cardinality says that ids are integers; leave dtype out"
            )
        if self.vocabulary is not None:
            kinds = {type(value) for value in self.vocabulary}
            if len(kinds) != 1 or len(set(self.vocabulary)) != len(self.vocabulary):
                raise ConfigError(
                    f"field {self.name!r}: got a vocabulary with {self._find_vocabulary_problem()}; wanted texts only "
                    "or integers only, each once (in YAML quote what should be text)"
                )
            wanted: Dtype = "text" if kinds == {str} else "integer"
            if self.dtype not in (None, wanted):
                raise self._build_setting_error("dtype", f"The vocabulary holds {wanted} values")
            if "" in self.vocabulary:
                raise ConfigError(
                    f"field {self.name!r}: got '' in the vocabulary; an empty text is a missing value, say what "
                    "it is with missing="
                )
        elif self.unknown_rows != 1:
            raise self._build_setting_error(
                "unknown_rows", "It is for a vocabulary, which this field does not have"
            )

    def _find_vocabulary_problem(self) -> str:
        assert self.vocabulary is not None
        if not self.vocabulary:
            return "no value"
        if len({type(value) for value in self.vocabulary}) > 1:
            return "both texts and integers"
        values: set[Value] = set()
        repeated = next(v for v in self.vocabulary if v in values or values.add(v))  # type: ignore[func-returns-value]
        return f"{repeated!r} twice"

    @property
    def declared_dtype(self) -> Dtype | None:
        """Dtype of the settings: `dtype`, or what cardinality or vocabulary imply; None: the file's type decides."""
        if self.dtype is not None or self.cardinality is not None:
            return self.dtype or "integer"
        first_value = (*(self.vocabulary or ()), getattr(self, "padding", None))[0]
        return (
            None if first_value is None else "text" if isinstance(first_value, str) else "integer"
        )

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the table; None: open."""
        if self.rows is not None:
            return self.rows
        has_missing = self.missing == "row"
        if self.cardinality is not None:
            return self.cardinality + has_missing
        if self.vocabulary is not None:
            return len(self.vocabulary) + self.unknown_rows + has_missing
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(DeclaredField):
    """Dense value: clipped, transformed, then (x - mean) / std, as float32."""

    missing: Real | None = None
    """Input of the model for a missing value, 0.0 the mean; default: a missing value is an error."""
    clip: tuple[Real, Real] | None = None
    """Lowest and highest value; values beyond are clipped to them."""
    transform: Literal["log1p", "is_missing"] | None = None
    """Function of the value; log1p: log(1 + max(x, 0)); is_missing: 1 where the value is missing, else 0."""
    mean: Real | None = None
    """Number subtracted after the transform. Default: the mean of the first training samples, when the files are
    opened; 0 if `std` is declared."""
    std: Annotated[Real, Limits(gt=0)] | None = None
    """Divisor after the subtraction. Default: the standard deviation of the first training samples; 1 if `mean` is
    declared."""
    days_before: Moment | None = None
    """ISO time (UTC) to which the column's times are converted as days before it. `newest`: the newest time of the
    training samples, which replaces this setting when the files are opened."""
    unit: Unit | None = None
    """Unit of the numbers of a column of times, with days_before. Default: as that of a time."""

    def _check_settings(self) -> None:
        if self.unit is not None and self.days_before is None:
            raise self._build_setting_error("unit", "It is for times: give days_before too")
        if self.days_before not in (None, NEWEST):
            try:
                parse_time(self.days_before)
            except ValueError:
                raise self._build_setting_error(
                    "days_before", f"Wanted {NEWEST!r} or a time such as '2024-05-31T12:00:00'"
                ) from None
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise self._build_setting_error("clip", "Wanted the lower bound first")
        if self.transform == "is_missing" and (self.missing, self.clip) != (None, None):
            raise self._build_setting_error(
                "transform", "It reads no value: leave missing and clip out"
            )

    @property
    def is_standardised(self) -> bool:
        """True if mean and std are those of training samples, once the files are opened."""
        return self.mean is None and self.std is None and self.transform != "is_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Category(_IdField):
    """Categorical value: one id per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListField(_IdField):
    separator: Name = "|"
    """Separator of the values of a text; a list column needs none. A missing text has no value."""
    max_length: Count | None = None
    """Maximal number of values of a sample."""
    keep: KeptEnd = "first"
    """Values that are used of a sample with more than max_length."""
    padding: Value | None = None
    """Value that only fills lists up to a length: it is no item."""

    def _check_settings(self) -> None:
        # slots=True creates a new class, which super() without arguments does not know.
        _IdField._check_settings(self)
        is_integer = self.declared_dtype == "integer"
        if self.padding is not None and isinstance(self.padding, int) != is_integer:
            raise self._build_setting_error(
                "padding", f"Wanted a value of dtype {self.declared_dtype}"
            )
        if not self.separator:
            raise self._build_setting_error("separator", "Wanted at least one character")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bag(_ListField):
    """List of ids per sample, in no order: a list column, or text with a separator."""

    weights: Name = ""
    """Name of a column with one number per id, by which its row is multiplied before pooling."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.weights) if self.weights else (self.column,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(_ListField):
    """List of ids per sample, oldest first: a list column, or text with a separator."""

    keep: KeptEnd = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(DeclaredField):
    """Number encoded by n boundaries as an id 0 .. n: the count of boundaries <= the number."""

    boundaries: tuple[Real, ...]
    missing: Missing = "row"
    """Treatment of missing values: a separate row (id n + 1), or an error."""
    table: Name = ""

    def _check_settings(self) -> None:
        is_rising = all(a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False))
        if not self.boundaries or not is_rising:
            raise self._build_setting_error(
                "boundaries", "Wanted at least one number, in rising order"
            )

    @property
    def num_rows(self) -> int:
        return len(self.boundaries) + 1 + (self.missing == "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Time(DeclaredField):
    """Hour (0 .. 23) or weekday (0: Monday .. 6) of a time, in UTC, as an id.

    The column holds timestamps, dates, ISO texts or numbers of `unit`. A time without a zone is UTC.
    """

    part: Literal["hour", "weekday"]
    unit: Unit | None = None
    """Unit of the column's numbers. Default: the unit of the first ones, when the files are opened for training."""
    missing: Missing = "row"
    """Treatment of missing values: a separate row (the last id), or an error."""
    table: Name = ""

    @property
    def num_values(self) -> int:
        return 24 if self.part == "hour" else 7

    @property
    def num_rows(self) -> int:
        return self.num_values + (self.missing == "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross(DeclaredField):
    """Combination of the ids of other fields (categories, buckets, times) of a sample, as one id."""

    of: tuple[Name, ...]
    """Names of fields, two or more."""
    rows: Count | None = None
    """Number of rows into which ids are hashed; default: an open table."""
    table: Name = ""

    def _check_settings(self) -> None:
        if len(self.of) < 2 or len(set(self.of)) != len(self.of):
            raise self._build_setting_error(
                "of", "Wanted the names of two or more different fields"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @property
    def num_rows(self) -> int | None:
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(DeclaredField):
    """Training target; several fields of this type are several tasks."""

    at_least: Real | None = None
    """Threshold: the label is 1 where the number is at least this, else 0."""
    positive: Value | None = None
    """Value for which the label is 1 (a text such as yes, or an integer); else it is 0."""
    kind: Literal["binary", "number"] = "binary"
    """Kind of label. binary: 0 or 1. number: any number, for gplvmf or a loss of your own."""
    missing: Literal["error", "unknown"] = "error"
    """Treatment of missing values. unknown: NaN, an unknown label."""
    between: tuple[Real, Real] | None = None
    """Lowest and highest number of a label of kind number, such as the scale of ratings; others are errors."""

    def _check_settings(self) -> None:
        if self.between is not None and (
            self.kind != "number" or not self.between[0] < self.between[1]
        ):
            raise self._build_setting_error(
                "between", "Wanted the lower bound first, with kind: number"
            )
        if self.at_least is not None and self.positive is not None:
            raise self._build_setting_error("positive", "Wanted one of at_least and positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(DeclaredField):
    """Weight of a sample in the loss: 0 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(DeclaredField):
    """Value by which metrics group samples, such as the user: an integer, or a text's hash."""

    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(DeclaredField):
    """Value on which predictions are joined, unchanged: an integer or a text. The model does not read it."""

    dtype: Dtype | None = None


FIELDS: dict[str, type[DeclaredField]] = {
    kind.__name__.lower(): kind
    for kind in (Number, Category, Bag, Sequence, Bucket, Time, Cross, Label, Weight, Group, Key)
}
"""Field types by the `type` in YAML."""

Categorical = Category | Bag | Sequence | Bucket | Time | Cross
"""Fields encoded as ids of a table."""


def reads_times(field: DeclaredField) -> TypeGuard[Time | Number]:
    return isinstance(field, Time) or (isinstance(field, Number) and field.days_before is not None)


def field_from_dict(name: object, values: object) -> DeclaredField:
    """Build a field from its name and settings: "price", {"type": "number"} -> Number("price"). Raises ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(
            f"got a field named {name!r} ({type(name).__name__}), wanted text; put it in quotes"
        )
    if isinstance(values, str):
        values = {"type": values}
    if not isinstance(values, Mapping) or "type" not in values:
        raise ConfigError(
            f"field {name!r}: got {values!r}, wanted settings with a type, such as "
            f"{{type: number}}; types are {', '.join(FIELDS)}"
        )
    type_name = values["type"]
    if not isinstance(type_name, str) or type_name not in FIELDS:
        raise ConfigError(
            f"field {name!r}: got type {type_name!r}; {suggest_name(str(type_name), FIELDS)}"
        )
    kind = FIELDS[type_name]
    setting_names = {f.name for f in dataclasses.fields(kind)} - {"name"}
    for key in values:
        if key not in setting_names | {"type"}:
            raise ConfigError(
                f"field {name!r}: a {type_name} has no setting {key!r}; {suggest_name(str(key), setting_names)}"
            )
    for f in dataclasses.fields(kind):
        is_needed = f.default is dataclasses.MISSING and f.name != "name"
        if is_needed and f.name not in values:
            raise ConfigError(f"field {name!r}: a {type_name} needs {f.name}, which is not given")
    return kind(name, **{key: value for key, value in values.items() if key != "type"})


def field_to_dict(field: DeclaredField) -> dict[str, Any]:
    """Return the field's settings as plain values, without defaults: the inverse of `field_from_dict`."""
    values: dict[str, Any] = {"type": type(field).__name__.lower()}
    for f in dataclasses.fields(field):
        value = getattr(field, f.name)
        own_name = f.name in ("column", "table") and value == field.name
        if f.name != "name" and value != f.default and not own_name:
            values[f.name] = list(value) if isinstance(value, tuple) else value
    return values


def suggest_name(
    word: str, known_names: Mapping[str, Any] | set[str] | list[str] | tuple[str, ...]
) -> str:
    """Return the hint of an error message about an unknown `word`: the nearest known name, or all of them."""
    matches = get_close_matches(word, known_names, n=1, cutoff=0.5)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"choose from {list_names(sorted(known_names))}"


def list_names(names: list[str]) -> str:
    """List the first names for an error message, with a hint if they look like the first line of data."""
    listed = ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")
    return listed + (
        ". The first line looks like data: if the file has no header, add one, or name its "
        "columns with names (--names label,user,item in train and inspect)"
        if any(re.match(NUMBER, name) for name in names)
        else ""
    )
