"""Names and versions of the file formats that Colonnade writes, and errors for files with other versions.

`store/format.md` has a table of all formats. The binary files of a store have their versions in their headers.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from colonnade.errors import CheckpointError, CorruptionError

VERSIONS = {
    "colonnade checkpoint": 3,
    "colonnade state": 1,
    "colonnade store manifest": 2,
    "colonnade stripe": 1,
    "colonnade segment": 2,
    "colonnade key list": 2,
    "colonnade live bitmaps": 2,
    "colonnade config": 1,
    "colonnade plan": 1,
    "colonnade device": 2,
    "colonnade profile": 2,
    "colonnade towers": 1,
    "colonnade summary": 1,
    "colonnade machine": 1,
    "colonnade metrics": 1,
    "colonnade export": 2,
    "colonnade publication": 2,
}
"""Version of each format; files contain both as the fields `format` and `version`."""

YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YamlDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's parser and writer, which are ten times as fast as PyYAML's own, where PyYAML was built with it."""
MAX_REPEATED_VALUES = 10_000
"""Limit on the values of a YAML file with those that its aliases repeat, or its length if that is more."""
REMEDY = "read it with the Colonnade that wrote it, or write it again with this one"


def make_format_stamp(name: str) -> dict[str, Any]:
    """Return the two fields that identify a file's format and version."""
    return {"format": name, "version": VERSIONS[name]}


def check_format_version(
    path: Path | str, fields: Mapping[str, Any], name: str, *, is_needed: bool = True
) -> None:
    """Check that `fields` contain format `name` and its current version. Raises CheckpointError, with both versions.

    is_needed: False for files that people write by hand, which may omit both fields.
    """
    got = (fields.get("format"), fields.get("version"))
    wanted = (name, VERSIONS[name])
    if got == (None, None) and not is_needed:
        return
    if got != wanted:
        raise _another_version(path, f"format {got[0]!r} version {got[1]!r}", name)


def check_version(path: Path | str, name: str, version: int) -> None:
    """Check the version in a binary file's header as `check_format_version` does."""
    if version != VERSIONS[name]:
        raise _another_version(path, f"{name!r} version {version}", name)


def _another_version(path: Path | str, got: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: got {got}, this Colonnade reads {name!r} version {VERSIONS[name]}; {REMEDY}"
    )


def parse_stamped_json(path: Path | str, text: str | bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object of format `name`; return it without its stamp. Raises CorruptionError, CheckpointError."""
    fields = parse_json_object(path, text)
    check_format_version(path, fields, name)
    return {key: value for key, value in fields.items() if key not in ("format", "version")}


def read_text_file(path: Path, errors: str = "strict") -> str:
    """Read a whole text file. Raises UnicodeDecodeError and OSError, the latter also for anything other than a regular
    file, because `open` may block on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(
                errno.EINVAL, f"got {describe_file_kind(mode)}, wanted a regular file", str(path)
            )
        with os.fdopen(descriptor, encoding="utf-8", errors=errors, closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def describe_file_kind(mode: int) -> str:
    """Name the kind of a file that is not a regular file, from its mode."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe (FIFO)"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def parse_yaml(text: str, loader: Any = YamlLoader) -> Any:
    """Parse YAML. Raises ValueError, with the reason in one line, for invalid or too deeply nested text, and for
    aliases that repeat values more often than a file of its length could write them."""
    try:
        opened = loader(text)
        try:
            node = opened.get_single_node()
            limit = max(MAX_REPEATED_VALUES, len(text))
            if "*" in text and node is not None and _count_values(node, {}) > limit:
                raise ValueError(
                    f"its aliases (*) repeat more than {limit:,} values; write them out"
                )
            return None if node is None else opened.construct_document(node)
        finally:
            opened.dispose()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count a value and those inside it, each as often as aliases repeat it. Raises ValueError if one contains itself.

    counts: of the nodes visited before; 0 while those inside a node are counted.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if counts.get(id(node)) == 0:
        raise ValueError("a value contains itself by an alias (*); write it out")
    if id(node) not in counts:
        counts[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        inside = chain.from_iterable(node.value) if pairs else node.value
        counts[id(node)] = 1 + sum(_count_values(value, counts) for value in inside)
    return counts[id(node)]


def parse_json_object(path: Path | str, content: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises CorruptionError for anything else."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CorruptionError(
            f"{path}: got text that is no JSON ({why}), wanted an object; restore it from a copy"
        ) from None
    if not isinstance(fields, dict):
        raise CorruptionError(
            f"{path}: got a JSON {type(fields).__name__}, wanted an object; restore it from a copy"
        )
    return fields


def flatten_to_dotted_names(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names: {"train": {"lr": 0.1}} -> {"train.lr": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= (
            flatten_to_dotted_names(value, f"{path}.")
            if isinstance(value, Mapping)
            else {path: value}
        )
    return flat
