"""What a user declares about the columns of a file: frozen values, the same from Python and from YAML.

A field reads the file's column `column` (default: the field's own name), so two fields may read one column.
Everywhere: an empty text, a null, an empty CSV field and a NaN are all *missing*.

ids of a column            declared by            the table's rows
any 64-bit id              nothing                open: rows appear when first trained
hashed into N rows         rows=N                 N; mix64(id) mod N; a missing value is hashed as `MISSING_ID`
0 .. N-1 as they are       cardinality=N          N, then one for missing values
a known list of values     vocabulary=[...]       one each, then `unknown_rows`, then one for missing values

Integers are ids as they are; a text's id is its 64-bit hash (hashing.py). The row for missing values
is there unless `missing: error`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BeforeValidator, Strict
from pydantic import Field as Limits

from colonnade.config.validation import validate_fields
from colonnade.data.tabular.arrow import Dtype
from colonnade.data.tabular.times import parse_time
from colonnade.errors import ConfigError

Count = Annotated[int, Strict(), Limits(ge=1, lt=2**62)]
Amount = Annotated[int, Strict(), Limits(ge=0, lt=2**62)]
Real = Annotated[float, Strict(), AllowInfNan(False)]
Value = Annotated[str, Strict()] | Annotated[int, Strict(), Limits(ge=-(2**63), lt=2**63)]
Name = Annotated[str, Strict()]
Missing = Literal["row", "error"]
Moment = Annotated[
    str, Strict(), BeforeValidator(lambda v: v.isoformat() if isinstance(v, date) else v)
]
"""An ISO time; YAML reads one without quotes as a date."""
NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class Field:
    """One thing read from a file. Raises ConfigError for values that cannot work, from Python as from YAML."""

    name: str
    column: Name = dataclasses.field(default="", kw_only=True)
    """The file's column; default: `name`."""

    def __post_init__(self) -> None:
        # YAML has lists where the fields have tuples.
        validate_fields(self, f"field {self.name!r}", strict=None)
        if not self.name or "." in self.name:
            raise ConfigError(
                f"field {self.name!r}: got this name, wanted one without a dot; "
                "give the file's column with column="
            )
        object.__setattr__(self, "column", self.column or self.name)
        self._check()

    def _check(self) -> None:
        """What the types of the single values do not say."""

    def _refusal(self, setting: str, wanted: str) -> ConfigError:
        wanted = wanted[0].lower() + wanted[1:]
        return ConfigError(
            f"field {self.name!r}: got {setting}={getattr(self, setting)!r}; {wanted}"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the file."""
        return (self.column,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ids(Field):
    name: str = dataclasses.field(kw_only=False)
    dtype: Dtype | None = None
    """What the values are. Default: the type in the file; in CSV text, unless the ids' declaration needs integers."""
    rows: Count | None = None
    """Hash into so many rows."""
    cardinality: Count | None = None
    """Integers 0 .. cardinality-1, anything else is an error."""
    vocabulary: tuple[Value, ...] | None = None
    """All values that have rows of their own."""
    unknown_rows: Amount = 1
    """Rows shared, by hash, by values outside the vocabulary; 0: such a value is an error."""
    missing: Missing = "row"
    """What a missing value is: a row of its own, or an error."""
    table: Name = ""
    """Fields of one table share rows; default: a table of the field's own."""
    namespace: Annotated[bool, Strict()] = False
    """Whether its ids are hashed with its name, the missing one too, so that fields of one table share no id."""

    def _check(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)
        if self.namespace and (self.cardinality is not None or self.vocabulary is not None):
            raise self._refusal(
                "namespace",
                "It hashes ids, which a cardinality or a vocabulary numbers; give the field a table of its own, or "
                "leave these out",
            )
        given = [k for k in ("rows", "cardinality", "vocabulary") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"field {self.name!r}: got both {given[0]} and {given[1]}, wanted one of rows (hashed), "
                "cardinality (integers as they are), vocabulary, or none of them for an open table"
            )
        if self.cardinality is not None and self.dtype == "text":
            raise self._refusal("dtype", "Cardinality says that ids are integers; leave dtype out")
        if self.vocabulary is not None:
            kinds = {type(value) for value in self.vocabulary}
            if len(kinds) != 1 or len(set(self.vocabulary)) != len(self.vocabulary):
                raise ConfigError(
                    f"field {self.name!r}: got a vocabulary with {self._vocabulary_fault()}; wanted texts only "
                    "or integers only, each once (in YAML quote what should be text)"
                )
            wanted: Dtype = "text" if kinds == {str} else "integer"
            if self.dtype not in (None, wanted):
                raise self._refusal("dtype", f"The vocabulary holds {wanted} values")
            if "" in self.vocabulary:
                raise ConfigError(
                    f"field {self.name!r}: got '' in the vocabulary; an empty text is a missing value, say what "
                    "it is with missing="
                )
        elif self.unknown_rows != 1:
            raise self._refusal(
                "unknown_rows", "It is for a vocabulary, which this field does not have"
            )

    def _vocabulary_fault(self) -> str:
        assert self.vocabulary is not None
        if not self.vocabulary:
            return "no value"
        if len({type(value) for value in self.vocabulary}) > 1:
            return "both texts and integers"
        seen: set[Value] = set()
        twice = next(v for v in self.vocabulary if v in seen or seen.add(v))  # type: ignore[func-returns-value]
        return f"{twice!r} twice"

    @property
    def num_rows(self) -> int | None:
        """Of the table; None: open."""
        if self.rows is not None:
            return self.rows
        has_missing = self.missing == "row"
        if self.cardinality is not None:
            return self.cardinality + has_missing
        if self.vocabulary is not None:
            return len(self.vocabulary) + self.unknown_rows + has_missing
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Field):
    """A dense value: clipped, transformed, then (x - mean) / std, as float32."""

    name: str = dataclasses.field(kw_only=False)
    missing: Real | None = None
    """What the model sees in place of a missing value; default: a missing value is an error."""
    clip: tuple[Real, Real] | None = None
    """Lowest and highest value; what is beyond becomes them."""
    transform: Literal["log1p"] | None = None
    """log1p: log(1 + max(x, 0))."""
    mean: Real = 0.0
    """Subtracted after the transform."""
    std: Annotated[Real, Limits(gt=0)] = 1.0
    """Divides after that."""
    days_before: Moment | None = None
    """Given: the column holds times, and the number is the days from each to this ISO time (UTC). `newest`: the newest
    time of the training samples, which takes its place when the files are opened."""

    def _check(self) -> None:
        if self.days_before not in (None, NEWEST):
            try:
                parse_time(self.days_before)
            except ValueError:
                raise self._refusal(
                    "days_before", f"Wanted {NEWEST!r} or a time such as '2024-05-31T12:00:00'"
                ) from None
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise self._refusal("clip", "Wanted the lower bound first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Category(_Ids):
    """One id per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Several(_Ids):
    separator: Name = "|"
    """Between the values of a text; a list column needs none. Missing text: no value."""
    max_length: Count | None = None
    """Most values kept of a sample."""
    keep: Literal["first", "last"] = "first"
    """Which of more than max_length values."""

    def _check(self) -> None:
        # slots=True makes the class anew, so that super() without arguments would not find it.
        _Ids._check(self)
        if not self.separator:
            raise self._refusal("separator", "Wanted at least one character")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bag(_Several):
    """Any number of ids per sample, in no order: a list column, or text with a separator."""

    weights: Name = ""
    """A column of as many numbers, which multiply the rows of the ids before these are pooled."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.weights) if self.weights else (self.column,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(_Several):
    """Any number of ids per sample, oldest first: a list column, or text with a separator."""

    keep: Literal["first", "last"] = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(Field):
    """A number's place among n boundaries, as an id 0 .. n: how many of them are <= it."""

    name: str = dataclasses.field(kw_only=False)
    boundaries: tuple[Real, ...]
    missing: Missing = "row"
    """What a missing value is: a row of its own (id n + 1), or an error."""
    table: Name = ""

    def _check(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)
        rising = all(a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False))
        if not self.boundaries or not rising:
            raise self._refusal("boundaries", "Wanted at least one number, in rising order")

    @property
    def num_rows(self) -> int:
        return len(self.boundaries) + 1 + (self.missing == "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Time(Field):
    """A time's hour (0 .. 23) or weekday (0: Monday .. 6), in UTC, as an id.

    The column holds timestamps, dates, ISO texts or Unix seconds. A time without a zone is taken as UTC.
    """

    name: str = dataclasses.field(kw_only=False)
    part: Literal["hour", "weekday"]
    missing: Missing = "row"
    """What a missing value is: a row of its own (the last id), or an error."""
    table: Name = ""

    def _check(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)

    @property
    def num_values(self) -> int:
        return 24 if self.part == "hour" else 7

    @property
    def num_rows(self) -> int:
        return self.num_values + (self.missing == "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross(Field):
    """One id for each combination of the ids of other fields (categories, buckets, times) of a sample."""

    name: str = dataclasses.field(kw_only=False)
    of: tuple[Name, ...]
    """Names of fields, two or more."""
    rows: Count | None = None
    """Hash into so many rows; default: an open table."""
    table: Name = ""

    def _check(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)
        if len(self.of) < 2 or len(set(self.of)) != len(self.of):
            raise self._refusal("of", "Wanted the names of two or more different fields")

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @property
    def num_rows(self) -> int | None:
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Field):
    """What is learned; several fields of this type are several tasks."""

    name: str = dataclasses.field(kw_only=False)
    at_least: Real | None = None
    """Given: the label is 1 where the number is at least this, else 0."""
    positive: Value | None = None
    """Given: the label is 1 where the value is this one (a text such as yes, or an integer), else 0."""
    kind: Literal["binary", "number"] = "binary"
    """binary: 0 or 1. number: any, for a loss of your own."""
    missing: Literal["error", "unknown"] = "error"
    """unknown: becomes NaN, a label nobody knows."""

    def _check(self) -> None:
        if self.at_least is not None and self.positive is not None:
            raise self._refusal("positive", "Wanted one of at_least and positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(Field):
    """How much a sample counts: 0 or more."""

    name: str = dataclasses.field(kw_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Field):
    """What samples are grouped by in metrics, such as the user: an integer, or a text's hash."""

    name: str = dataclasses.field(kw_only=False)
    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Field):
    """What predictions are joined on, as it stands in the file: an integer or a text. Never enters the model."""

    name: str = dataclasses.field(kw_only=False)
    dtype: Dtype | None = None


FIELDS: dict[str, type[Field]] = {
    kind.__name__.lower(): kind
    for kind in (Number, Category, Bag, Sequence, Bucket, Time, Cross, Label, Weight, Group, Key)
}
"""By the `type` that YAML names."""

Categorical = Category | Bag | Sequence | Bucket | Time | Cross
"""Fields that become ids of a table."""


def field_from_dict(name: object, values: object) -> Field:
    """`"price", {"type": "number", "missing": 0.0}` -> Number("price", missing=0.0). Raises ConfigError."""
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
    chosen = values["type"]
    if not isinstance(chosen, str) or chosen not in FIELDS:
        raise ConfigError(f"field {name!r}: got type {chosen!r}; {nearest(str(chosen), FIELDS)}")
    kind = FIELDS[chosen]
    known = {f.name for f in dataclasses.fields(kind)} - {"name"}
    for key in values:
        if key not in known | {"type"}:
            raise ConfigError(
                f"field {name!r}: a {chosen} has no setting {key!r}; {nearest(str(key), known)}"
            )
    for f in dataclasses.fields(kind):
        is_needed = f.default is dataclasses.MISSING and f.name != "name"
        if is_needed and f.name not in values:
            raise ConfigError(f"field {name!r}: a {chosen} needs {f.name}, which is not given")
    return kind(name, **{key: value for key, value in values.items() if key != "type"})


def field_to_dict(field: Field) -> dict[str, Any]:
    """The other way round: plain values, only those that are not the default."""
    values: dict[str, Any] = {"type": type(field).__name__.lower()}
    for f in dataclasses.fields(field):
        value = getattr(field, f.name)
        own_name = f.name in ("column", "table") and value == field.name
        if f.name != "name" and value != f.default and not own_name:
            values[f.name] = list(value) if isinstance(value, tuple) else value
    return values


def nearest(word: str, known: Mapping[str, Any] | set[str] | list[str] | tuple[str, ...]) -> str:
    """How a message goes on that refuses `word`: the nearest known one, or all."""
    found = get_close_matches(word, known, n=1, cutoff=0.5)
    if found:
        return f"did you mean {found[0]!r}?"
    names = sorted(known)
    return "choose from " + ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")
