"""The declared schema of files: all fields, and the version of the hash that makes ids of texts.

    hash_version: 1
    fields:
      click: {type: label}
      price: {type: number, missing: 0.0, transform: log1p}
      user: {type: category}
      genres: {type: bag, separator: '|', rows: 100}

A declaration read back from `to_dict` or `to_yaml` is equal to the one that was written.
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
    Field,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Time,
    Weight,
    field_from_dict,
    field_to_dict,
    nearest,
)
from colonnade.data.tabular.hashing import HASH_VERSION
from colonnade.errors import ConfigError
from colonnade.formats import parse_yaml, read_text


@dataclass(frozen=True, slots=True)
class Declaration:
    """Fields in the order in which the model sees them. Raises ConfigError where they do not fit together."""

    fields: tuple[Field, ...]
    hash_version: int = HASH_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        if self.hash_version != HASH_VERSION or isinstance(self.hash_version, bool):
            raise ConfigError(
                f"got hash_version={self.hash_version!r}, wanted {HASH_VERSION}: this version of Colonnade hashes "
                "texts no other way. Use the version that wrote the schema"
            )
        by_name: dict[str, Field] = {}
        for field in self.fields:
            if not isinstance(field, Field):
                raise ConfigError(f"got {field!r} as a field, wanted Number('price') or the like")
            if field.name in by_name:
                raise ConfigError(f"got two fields named {field.name!r}, wanted each name once")
            by_name[field.name] = field
        for kind in (Weight, Group, Key):
            named = [field.name for field in self.fields if isinstance(field, kind)]
            if len(named) > 1:
                raise ConfigError(
                    f"got {len(named)} fields of type {kind.__name__.lower()} ({', '.join(named)}), "
                    "wanted one at most"
                )
        if not self.numbers and not self.categorical:
            raise ConfigError(
                "the schema declares nothing that a model can read; add a number or a category"
            )
        for field in self.categorical:
            if isinstance(field, Cross):
                _check_parts(field, by_name)
        first: dict[str, Categorical] = {}
        for field in self.categorical:
            other = first.setdefault(field.table, field)
            if other.num_rows != field.num_rows:
                raise ConfigError(
                    f"fields {other.name!r} and {field.name!r} share the table {field.table!r}: got {_rows(other)} "
                    f"and {_rows(field)}, wanted the same. Declare their ids alike, or give them tables of their own"
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

    def one(self, kind: type[Field]) -> Any:
        """The field of a type that is there once at most, or None."""
        return next((field for field in self.fields if isinstance(field, kind)), None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the file, each once."""
        return tuple(dict.fromkeys(c for field in self.fields for c in field.columns))

    @property
    def schema(self) -> Schema:
        """What every batch holds."""
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

    def inputs(self) -> Declaration:
        """Without labels and weight: for files that are to be scored and do not have them."""
        return replace(
            self, fields=tuple(f for f in self.fields if not isinstance(f, Label | Weight))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML, JSON and the run folder's config."""
        fields = {field.name: field_to_dict(field) for field in self.fields}
        return {"hash_version": self.hash_version, "fields": fields}

    @staticmethod
    def from_dict(values: object) -> Declaration:
        """Raises ConfigError naming field and setting, unknown keys with the nearest known one."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"got {type(values).__name__} {str(values)[:60]!r} as a schema, wanted a mapping with `fields:`"
            )
        for key in values:
            if key not in ("fields", "hash_version"):
                raise ConfigError(
                    f"a schema has no setting {key!r}; {nearest(str(key), ['fields', 'hash_version'])}"
                )
        fields = values.get("fields")
        if not isinstance(fields, Mapping) or not fields:
            raise ConfigError(
                f"got fields: {str(fields)[:60]!r}, wanted one line per field, such as `price: {{type: number}}`"
            )
        return Declaration(
            tuple(field_from_dict(name, settings) for name, settings in fields.items()),
            values.get("hash_version", HASH_VERSION),
        )

    def to_yaml(self) -> str:
        """One line per field; `from_yaml` and `load_declaration` read it."""
        values = self.to_dict()
        values["fields"] = {name: _Line(line) for name, line in values["fields"].items()}
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=1 << 30, allow_unicode=True)
        if any(
            line_break in text for line_break in "\x85\u2028\u2029"
        ):  # YAML reads them as spaces
            return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=1 << 30)
        return text

    @staticmethod
    def from_yaml(text: str) -> Declaration:
        """Raises ConfigError, also for a key that is there twice."""
        try:
            values = parse_yaml(text, _Loader)
        except ValueError as error:
            raise ConfigError(f"not YAML: {error}") from None
        return Declaration.from_dict(values)


def load_declaration(
    schema: Declaration | Mapping[str, Any] | Iterable[Field] | str | Path,
) -> Declaration:
    """A declaration as a user may give it: itself, its fields, plain values, or a YAML file. Raises ConfigError."""
    if isinstance(schema, Declaration):
        return schema
    if isinstance(schema, Mapping):
        return Declaration.from_dict(schema)
    if not isinstance(schema, str | Path):
        try:
            return Declaration(tuple(schema))
        except TypeError:
            raise ConfigError(
                f"got schema={schema!r}, wanted fields, or the path of a YAML file that declares them"
            ) from None
    path = Path(schema).expanduser()
    try:
        return Declaration.from_yaml(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"schema {path}: {error.strerror}; give an existing YAML file, or leave schema out to infer one"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"schema {path}: not YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"schema {path}: {error}") from None


class _Line(dict):
    """A mapping that YAML writes in one line."""


class _Dumper(yaml.SafeDumper):
    """YAML with one line per `_Line`."""


_Dumper.add_representer(
    _Line,
    lambda dumper, line: dumper.represent_mapping(
        "tag:yaml.org,2002:map", line.items(), flow_style=True
    ),
)


class _Loader(yaml.SafeLoader):
    """YAML without silent duplicates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"got the key {key!r} twice, wanted it once", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _check_parts(field: Cross, by_name: Mapping[str, Field]) -> None:
    crossable = [name for name, f in by_name.items() if isinstance(f, Category | Bucket | Time)]
    for part in field.of:
        if part not in by_name:
            raise ConfigError(
                f"field {field.name!r}, of: no field {part!r}; {nearest(part, crossable)}"
            )
        if part not in crossable:
            kind = type(by_name[part]).__name__.lower()
            raise ConfigError(
                f"field {field.name!r}, of: got {part!r}, a {kind}, wanted categories, buckets and times"
            )


def _rows(field: Categorical) -> str:
    return "an open table" if field.num_rows is None else f"{field.num_rows} rows"
