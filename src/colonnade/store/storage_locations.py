"""Whether a directory can hold what a plan wants to keep there, said before anything is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from colonnade.errors import ConfigError
from colonnade.sizes import Place
from colonnade.store.log import DEFAULT_CHUNK_BYTES


def check_tiers(ssd: Sequence[Place], mapped: Place | None) -> None:
    """`check_places` of both tiers, and that no two of their names, symlinks and mounts followed, are one directory.

    Raises ConfigError. Changes nothing."""
    check_places("ssd", ssd)
    check_places("mapped", () if mapped is None else (mapped,))
    for place in ssd:
        # What a store writes at once; a directory below that could not take a row.
        if place.bytes is not None and place.bytes < DEFAULT_CHUNK_BYTES:
            raise ConfigError(
                f"plan.memory.ssd: {place.path}: got {place.bytes:,} bytes, wanted at least {DEFAULT_CHUNK_BYTES:,}, "
                "which are written at once; raise the size, or leave it out to use what there is"
            )
    named = [("ssd", place) for place in ssd]
    named += [] if mapped is None else [("mapped", mapped)]
    for (tier, one), (other_tier, other) in combinations(named, 2):
        if _identity(one) == _identity(other):
            raise ConfigError(
                f"plan.memory.{other_tier}: {other.path} is the same directory as {one.path} of plan.memory.{tier} "
                f"({os.path.realpath(one.path)}), wanted directories that differ; name it once"
            )


def _identity(place: Place) -> tuple[int, int, Path]:
    """Equal for two names of one directory, also where it is still to be made."""
    path = Path(os.path.realpath(place.path))
    there = _existing(path)
    found = there.stat()
    return found.st_dev, found.st_ino, path.relative_to(there)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_places(name: str, places: Sequence[Place]) -> None:
    """Raises ConfigError where `plan.memory.<name>` names no directory that could be written, or sizes beyond its
    file system's. Changes nothing."""
    for place in places:
        path = Path(place.path)
        there = _existing(path)
        if not there.is_dir():
            raise ConfigError(
                f"plan.memory.{name}: {path}: {there} is a file, wanted a directory; give another, or move the file"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"plan.memory.{name}: {path}: {there} is not writable, wanted a directory that is; make it so for "
                "this user, or choose another"
            )
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            raise ConfigError(
                f"plan.memory.{name}: {path}: the file system is read-only; choose a directory on another"
            )
        size = shutil.disk_usage(there).total
        if size == 0:
            raise ConfigError(
                f"plan.memory.{name}: {path}: its file system has no room at all (0 bytes), so it cannot hold rows; "
                "choose a directory on another"
            )
        if place.bytes is not None and place.bytes > size:
            raise ConfigError(
                f"plan.memory.{name}: {path}: got {place.bytes:,} bytes, the file system has {size:,}; lower the "
                "size, or leave it out to use what there is"
            )
