"""Checks of values from files before they are used: names that become paths, JSON that becomes values."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from colonnade.errors import CorruptionError, StorageError
from colonnade.files.disk import DiskFile, storage_error
from colonnade.formats import describe_file_kind, parse_stamped_json

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,254}")
WANTED = "one file name of letters, digits and _ . = - that does not begin with a dot"


class StrictRecord:
    """Base class of dataclasses that are read from files: no other fields, no other types."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


def check_file_name(name: str, path: Path | str) -> str:
    """Return `name`, read from the file at `path`, if it can be joined to a folder without leaving it.

    Raises CorruptionError.
    """
    if NAME.fullmatch(name) is None:
        raise CorruptionError(
            f"{path}: got the file name {name[:300]!r} in it, wanted {WANTED}. The file was altered: restore it from "
            "a copy, or have it written again"
        )
    return name


def _validate_name(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ValueError(f"wanted {WANTED}")
    return name


FileName = Annotated[str, AfterValidator(_validate_name)]
"""Type of fields that hold a file name."""


def parse_json(value_type: type[T], content: bytes, path: Path, remedy: str) -> T:
    """Read a value of this type from JSON. Raises CorruptionError naming path and field for other types, unknown or
    missing fields, or invalid JSON."""
    try:
        value: T = _adapter(cast(Hashable, value_type)).validate_json(content)
        return value
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise CorruptionError(
            f"{path}: got {f'{field!r}: ' if field else ''}{first['msg']}; {remedy}"
        ) from None


def parse_stamped(
    value_type: type[T], content: bytes, path: Path, format_name: str, remedy: str
) -> T:
    """Read a value from a JSON object that states format `format_name` in addition to the value's fields.

    Raises CheckpointError for another format or version, before any other error; CorruptionError as `parse_json`.
    """
    fields = parse_stamped_json(path, content, format_name)
    return parse_json(value_type, json.dumps(fields).encode(), path, remedy)


@lru_cache(maxsize=32)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def open_regular_file(path: Path, *, follow_links: bool = True, flags: int = 0) -> DiskFile:
    """Open a file for reading. Raises StorageError if it cannot be read or is no regular file, which could block `open`
    or `read` forever. flags: of `open`, in addition to those for reading."""
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = DiskFile(path, os.open(path, flags if follow_links else flags | os.O_NOFOLLOW))
        mode = os.fstat(file.fd).st_mode
        os.set_blocking(file.fd, True)  # else io_uring fails instead of waiting for the disk
    except OSError as error:
        if not follow_links and path.is_symlink():
            raise _link_error(path) from None
        raise storage_error(error, "read", path) from error
    if not stat.S_ISREG(mode):
        file.close()
        raise StorageError(
            f"{path}: got {describe_file_kind(mode)}, wanted a regular file. Remove it, and have the file written again"
        )
    return file


def open_inside(folder: Path, name: str) -> DiskFile:
    """Open a file by a name that was read from a file. Raises CorruptionError for a name or a link that leads out of
    `folder`; StorageError as `open_regular_file`."""
    return open_regular_file(folder / check_file_name(name, folder), follow_links=False)


def folder_inside(folder: Path, name: str) -> Path:
    """Return the path of a folder by a name that was read from a file. Raises CorruptionError as `open_inside`."""
    path = folder / check_file_name(name, folder)
    if path.is_symlink():
        raise _link_error(path)
    return path


def read_regular(path: Path) -> bytes:
    """Read a whole file. Raises StorageError as `open_regular_file`."""
    file = open_regular_file(path)
    try:
        with os.fdopen(os.dup(file.fd), "rb") as stream:
            return stream.read()
    except OSError as error:
        raise storage_error(error, "read", path) from error
    finally:
        file.close()


def _link_error(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path}: got a symbolic link, wanted a file or folder inside {path.parent} itself. Put a copy there"
    )
