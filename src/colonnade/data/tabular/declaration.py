"""Declared schema of files: the fields, and the versions of the hash and of the rules that turn values into ids.

    hash_version: 1
    encoding_version: 3
    fields:
      click: {type: label}
      price: {type: number, missing: 0.0, transform: log1p}
      user: {type: category}
      genres: {type: bag, separator: '|', rows: 100}

A schema read from the output of `to_dict` or `to_yaml` equals the one that was written.

A schema that states no version, as those that people write, has the newest ones. Others are refused.
"""

from __future__ import annotations

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
"""Version of the rules by which schemas are read."""
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
        object.__setattr__(self, "fields", tuple(self.fields))
        if self.hash_version != HASH_VERSION or isinstance(self.hash_version, bool):
            raise ConfigError(
                f"got hash_version={self.hash_version!r}, wanted {HASH_VERSION}: this version of Colonnade hashes "
                "texts no other way. Use the version that wrote the schema"
            )
        if self.encoding_version != ENCODING_VERSION:
            raise ConfigError(
                f"got encoding_version={self.encoding_version!r}, wanted {ENCODING_VERSION}. Use the version of "
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
        self._check_encodings()

    def _check_encodings(self) -> None:
        """Raise ConfigError for two fields of one table in which a value has different rows."""
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
                    raise ConfigError(
                        f"fields {other.name!r} and {field.name!r} share the table {field.table!r}: got "
                        f"{setting}={str(values[0])[:60]} and {setting}={str(values[1])[:60]}, wanted the same, so "
                        "that a value has one row. Declare their ids alike, or give them tables of their own"
                    )

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
        versions = {
            "hash_version": self.hash_version,
            "encoding_version": self.encoding_version,
        }
        return {**versions, "fields": fields}

    @staticmethod
    def from_dict(values: object) -> FileSchema:
        """Build a schema from plain values. Raises ConfigError naming field and setting, and the nearest known name."""
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
        return FileSchema(
            tuple(field_from_dict(name, settings) for name, settings in fields.items()),
            values.get("hash_version", HASH_VERSION),
            values.get("encoding_version", ENCODING_VERSION),
        )

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
    def from_yaml(text: str) -> FileSchema:
        """Build a schema from YAML, as from_dict. Raises ConfigError, also for a repeated key."""
        try:
            values = parse_yaml(text, _Loader)
        except ValueError as error:
            raise ConfigError(f"not YAML: {error}") from None
        return FileSchema.from_dict(values)


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
) -> FileSchema:
    """Return the file schema from any form a user may pass: itself, its fields, plain values, or a YAML file's path.

    Raises ConfigError.
    """
    if isinstance(schema, FileSchema):
        return schema
    if isinstance(schema, Mapping):
        return FileSchema.from_dict(schema)
    if not isinstance(schema, str | Path):
        try:
            return FileSchema(tuple(schema))
        except TypeError:
            raise ConfigError(
                f"got schema={schema!r}, wanted fields, or the path of a YAML file that declares them"
            ) from None
    path = Path(schema).expanduser()
    try:
        return FileSchema.from_yaml(read_text_file(path))
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


def _describe_rows(field: Categorical) -> str:
    return "an open table" if field.num_rows is None else f"{field.num_rows} rows"
