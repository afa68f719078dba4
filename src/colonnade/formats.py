"""Names and versions of the file formats that Colonnade writes, and what to say of a file that has another one.

`store/format.md` has a table of all of them. The binary files of a store state their versions in their headers.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
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
    "colonnade device": 1,
    "colonnade profile": 1,
    "colonnade towers": 1,
    "colonnade summary": 1,
    "colonnade machine": 1,
    "colonnade metrics": 1,
    "colonnade export": 2,
    "colonnade publication": 2,
}
"""Version of each format, as the files state it under `format` and `version`."""

REMEDY = "read it with the Colonnade that wrote it, or write it again with this one"


def stamp(name: str) -> dict[str, Any]:
    """Return the two fields that state a file's format."""
    return {"format": name, "version": VERSIONS[name]}


def check_stamp(
    where: Path | str, fields: Mapping[str, Any], name: str, *, is_needed: bool = True
) -> None:
    """Raise CheckpointError, which gives both versions, unless `fields` state format `name` in the version known.

    is_needed: False for files that people write by hand, which may state none.
    """
    got, wanted = (fields.get("format"), fields.get("version")), (name, VERSIONS[name])
    if got == (None, None) and not is_needed:
        return
    if got != wanted:
        raise _another_version(where, f"format {got[0]!r} version {got[1]!r}", name)


def check_version(where: Path | str, name: str, version: int) -> None:
    """Check the version in a binary file's header as `check_stamp` does."""
    if version != VERSIONS[name]:
        raise _another_version(where, f"{name!r} version {version}", name)


def _another_version(where: Path | str, got: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: got {got}, this Colonnade reads {name!r} version {VERSIONS[name]}; {REMEDY}"
    )


def read_stamped(where: Path | str, text: str | bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object of format `name`, without its stamp. Raises CorruptionError, CheckpointError."""
    fields = parse_object(where, text)
    check_stamp(where, fields, name)
    return {key: value for key, value in fields.items() if key not in ("format", "version")}


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a whole text file. Raises OSError, also for what is no regular file, on which `open` may wait for ever;
    UnicodeDecodeError."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"got {file_kind(mode)}, wanted a regular file", str(path))
        with os.fdopen(number, encoding="utf-8", errors=errors, closefd=False) as file:
            return file.read()
    finally:
        os.close(number)


def file_kind(mode: int) -> str:
    """Name what a file's mode says it is, where it is no regular file."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe (FIFO)"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((words for is_kind, words in kinds if is_kind(mode)), "a device")


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Parse YAML. Raises ValueError, which says why in one line, for text that is none or is nested too deeply."""
    try:
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def parse_object(where: Path | str, content: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises CorruptionError for anything else."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CorruptionError(
            f"{where}: got text that is no JSON ({why}), wanted an object; restore it from a copy"
        ) from None
    if not isinstance(fields, dict):
        raise CorruptionError(
            f"{where}: got a JSON {type(fields).__name__}, wanted an object; restore it from a copy"
        )
    return fields
