"""Declared schema of files: the fields, and the versions of the hash and of the rules that turn values into ids.

    hash_version: 1
    encoding_version: 3
    fields:
      click: {type: label}
      price: {type: number, missing: 0.0, transform: log1p}
      user: {type: category}
      genres: {type: bag, separator: '|', rows: 100}

A schema read from the output of `to_dict` or `to_yaml` equals the one that was written.

encoding_version  in a schema that
1                 states a hash_version alone, as all did that were written before encoding_version existed:
                  * fields of one table may encode a value differently, with a warning
                  * times without a unit are Unix seconds
                  * NULL and \\N are texts like others, -2^63 is a missing value, missing elements of lists have a row
2                 states it; a number without mean and std is not standardised, split_by may name a column of times
3                 states it, or states no version, as schemas that people write
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from colonnade.data.contract import Column, Schema
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Categorical,
    Category,
    Cross,
    DeclaredField,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Time,
    Weight,
    field_from_dict,
    field_to_dict,
    suggest_name,
)
from colonnade.data.tabular.hashing import HASH_VERSION
from colonnade.errors import ConfigError
from colonnade.formats import YamlDumper, YamlLoader, parse_yaml, read_text_file

ENCODING_VERSION = 3
"""Version of the rules by which new schemas are read."""
ENCODING = (
    "declared_dtype",
    "rows",
    "cardinality",
    "vocabulary",
    "unknown_rows",
    "null_values",
    "boundaries",
)
"""Settings that decide the row of a value; fields that share a table have equal ones."""


@dataclass(frozen=True, slots=True)
class FileSchema:
    """Fields of a file, in the order in which the model reads them. Raises ConfigError if they are inconsistent."""

    fields: tuple[DeclaredField, ...]
    hash_version: int = HASH_VERSION
    encoding_version: int = ENCODING_VERSION

    def __post_init__(self) -> None:
        fields = tuple(self.fields)
        if self.encoding_version in (1, 2):  # the numbers of these versions have mean 0 and std 1
            fields = tuple(_fill_unit_scale(f) if isinstance(f, Number) else f for f in fields)
        object.__setattr__(self, "fields", fields)
        if self.hash_version != HASH_VERSION or isinstance(self.hash_version, bool):
            raise ConfigError(
                f"got hash_version={self.hash_version!r}, wanted {HASH_VERSION}: this version of Colonnade hashes "
                "texts no other way. Use the version that wrote the schema"
            )
        if self.encoding_version not in range(1, ENCODING_VERSION + 1):
            raise ConfigError(
                f"got encoding_version={self.encoding_version!r}, wanted 1 to {ENCODING_VERSION}. Use the version of "
                "Colonnade that wrote the schema"
            )
        by_name: dict[str, DeclaredField] = {}
        for field in self.fields:
            if not isinstance(field, DeclaredField):
                raise ConfigError(f"got {field!r} as a field, wanted Number('price') or the like")
            if field.name in by_name:
                raise ConfigError(f"got two fields named {field.name!r}, wanted each name once")
            by_name[field.name] = field
        for kind in (Weight, Group, Key):
            names = [field.name for field in self.fields if isinstance(field, kind)]
            if len(names) > 1:
                raise ConfigError(
                    f"got {len(names)} fields of type {kind.__name__.lower()} ({', '.join(names)}), "
                    "wanted one at most"
                )
        if not self.numbers and not self.categorical:
            raise ConfigError(
                "the schema declares nothing that a model can read; add a number or a category"
            )
        for field in self.categorical:
            if isinstance(field, Cross):
                _check_cross(field, by_name)
        first: dict[str, Categorical] = {}
        for field in self.categorical:
            other = first.setdefault(field.table, field)
            if other.num_rows != field.num_rows:
                raise ConfigError(
                    f"fields {other.name!r} and {field.name!r} share the table {field.table!r}: got "
                    f"{_describe_rows(other)} and {_describe_rows(field)}, wanted the same. Declare their ids alike, "
                    "or give them tables of their own"
                )
        if self.encoding_version > 1 and (difference := self.find_encoding_difference()):
            raise ConfigError(difference)

    def find_encoding_difference(self) -> str:
        """Describe two fields of one table in which a value has different rows; empty if there are none."""
        first: dict[tuple[str, ...], Categorical] = {}
        for field in self.categorical:
            if getattr(field, "namespace", False):  # shares no id with other fields
                continue
            names = [name for name in ENCODING if hasattr(field, name)]
            other = first.setdefault((field.table, *names), field)
            for name in names:
                values = getattr(other, name), getattr(field, name)
                # The file decides a dtype of None.
                if values[0] != values[1] and not (name == "declared_dtype" and None in values):
                    setting = name.removeprefix("declared_")
                    return (
                        f"fields {other.name!r} and {field.name!r} share the table {field.table!r}: got "
                        f"{setting}={str(values[0])[:60]} and {setting}={str(values[1])[:60]}, wanted the same, so "
                        "that a value has one row. Declare their ids alike, or give them tables of their own"
                    )
        return ""

    @property
    def numbers(self) -> tuple[Number, ...]:
        return tuple(field for field in self.fields if isinstance(field, Number))

    @property
    def categorical(self) -> tuple[Categorical, ...]:
        return tuple(field for field in self.fields if isinstance(field, Categorical))

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(field for field in self.fields if isinstance(field, Label))

    def find_field(self, kind: type[DeclaredField]) -> Any:
        """Return the field of a type that occurs at most once (Weight, Group, Key), or None."""
        return next((field for field in self.fields if isinstance(field, kind)), None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the file's columns that the fields read, without repetition."""
        return tuple(dict.fromkeys(c for field in self.fields for c in field.columns))

    @property
    def schema(self) -> Schema:
        """Schema of every batch."""
        kinds = {Bag: "bag", Sequence: "sequence"}
        columns = tuple(
            Column(f.name, f.num_rows, kinds.get(type(f), "one"), f.table)  # type: ignore[arg-type]
            for f in self.categorical
        )
        return Schema(
            dense=tuple(f.name for f in self.numbers),
            categorical=columns,
            labels=tuple(f.name for f in self.labels),
        )

    def inputs(self) -> FileSchema:
        """Return the schema without labels and weight, for files to be scored, which may not have these columns."""
        return replace(
            self, fields=tuple(f for f in self.fields if not isinstance(f, Label | Weight))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML, JSON and the run folder's config."""
        fields = {field.name: field_to_dict(field) for field in self.fields}
        if self.encoding_version < 3:  # as these versions wrote them
            for settings in fields.values():
                for name, default in (("mean", 0.0), ("std", 1.0)):
                    if settings.get(name) == default:
                        del settings[name]
        version = {"encoding_version": self.encoding_version} if self.encoding_version > 1 else {}
        return {"hash_version": self.hash_version, **version, "fields": fields}

    @staticmethod
    def from_dict(values: object, default_version: int = ENCODING_VERSION) -> FileSchema:
        """Build a schema from plain values. Raises ConfigError naming field and setting, and the nearest known name.

        default_version: encoding version of values that state no version.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"got {type(values).__name__} {str(values)[:60]!r} as a schema, wanted a mapping with `fields:`"
            )
        for key in values:
            if key not in (names := ("fields", "hash_version", "encoding_version")):
                raise ConfigError(
                    f"a schema has no setting {key!r}; {suggest_name(str(key), names)}"
                )
        fields = values.get("fields")
        if not isinstance(fields, Mapping) or not fields:
            raise ConfigError(
                f"got fields: {str(fields)[:60]!r}, wanted one line per field, such as `price: {{type: number}}`"
            )
        schema = FileSchema(
            tuple(field_from_dict(name, settings) for name, settings in fields.items()),
            values.get("hash_version", HASH_VERSION),
            values.get("encoding_version", 1 if "hash_version" in values else default_version),
        )
        if difference := schema.find_encoding_difference():
            warnings.warn(
                f"{difference}. This schema was written before such fields were refused; it is read as it stands. "
                "Train a new run without hash_version in its schema",
                RuntimeWarning,
                stacklevel=2,
            )
        return schema

    def to_yaml(self) -> str:
        """Return YAML with one line per field, which `from_yaml` and `load_file_schema` read."""
        values = self.to_dict()
        values["fields"] = {name: _Line(line) for name, line in values["fields"].items()}
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=1 << 30, allow_unicode=True)
        if any(
            line_break in text for line_break in "\x85\u2028\u2029"
        ):  # YAML reads them as spaces
            return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=1 << 30)
        return text

    @staticmethod
    def from_yaml(text: str, default_version: int = ENCODING_VERSION) -> FileSchema:
        """Build a schema from YAML, as from_dict. Raises ConfigError, also for a repeated key."""
        try:
            values = parse_yaml(text, _Loader)
        except ValueError as error:
            raise ConfigError(f"not YAML: {error}") from None
        return FileSchema.from_dict(values, default_version)


def fill_scales(declared: FileSchema, recorded: FileSchema) -> FileSchema:
    """Return the declared schema with the recorded mean and std of numbers that declare neither."""
    by_name = {field.name: field for field in recorded.numbers}
    fields = (
        replace(f, mean=by_name[f.name].mean, std=by_name[f.name].std)
        if isinstance(f, Number) and f.is_standardised and f.name in by_name
        else f
        for f in declared.fields
    )
    return replace(declared, fields=tuple(fields))


def load_file_schema(
    schema: FileSchema | Mapping[str, Any] | Iterable[DeclaredField] | str | Path,
    default_version: int = ENCODING_VERSION,
) -> FileSchema:
    """Return the file schema from any form a user may pass: itself, its fields, plain values, or a YAML file's path.

    default_version: as in from_dict. Raises ConfigError.
    """
    if isinstance(schema, FileSchema):
        return schema
    if isinstance(schema, Mapping):
        return FileSchema.from_dict(schema, default_version)
    if not isinstance(schema, str | Path):
        try:
            return FileSchema(tuple(schema))
        except TypeError:
            raise ConfigError(
                f"got schema={schema!r}, wanted fields, or the path of a YAML file that declares them"
            ) from None
    path = Path(schema).expanduser()
    try:
        return FileSchema.from_yaml(read_text_file(path), default_version)
    except OSError as error:
        raise ConfigError(
            f"schema {path}: {error.strerror}; give an existing YAML file, or leave schema out to infer one"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"schema {path}: not YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"schema {path}: {error}") from None


class _Line(dict):
    """Mapping that YAML writes in one line."""


class _Dumper(YamlDumper):  # type: ignore[misc, valid-type]
    """YAML writer with one line per `_Line`."""


_Dumper.add_representer(
    _Line,
    lambda dumper, line: dumper.represent_mapping(
        "tag:yaml.org,2002:map", line.items(), flow_style=True
    ),
)


class _Loader(YamlLoader):  # type: ignore[misc, valid-type]
    """YAML loader that refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"got the key {key!r} twice, wanted it once", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


def _check_cross(field: Cross, fields_by_name: Mapping[str, DeclaredField]) -> None:
    crossable = [
        name for name, f in fields_by_name.items() if isinstance(f, Category | Bucket | Time)
    ]
    for part in field.of:
        if part not in fields_by_name:
            raise ConfigError(
                f"field {field.name!r}, of: no field {part!r}; {suggest_name(part, crossable)}"
            )
        if part not in crossable:
            kind = type(fields_by_name[part]).__name__.lower()
            raise ConfigError(
                f"field {field.name!r}, of: got {part!r}, a {kind}, wanted categories, buckets and times"
            )


def _fill_unit_scale(field: Number) -> Number:
    return replace(field, mean=field.mean or 0.0, std=field.std or 1.0)


def _describe_rows(field: Categorical) -> str:
    return "an open table" if field.num_rows is None else f"{field.num_rows} rows"
