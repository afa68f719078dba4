"""Checks, before anything is written, that the directories of a plan can store its rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from colonnade.errors import ConfigError
from colonnade.sizes import StorageLocation
from colonnade.store.log import DEFAULT_CHUNK_BYTES


def check_tier_directories(ssd: Sequence[StorageLocation], mapped: StorageLocation | None) -> None:
    """Check the directories of both tiers (`check_storage_locations`), and that no two names lead to one directory.

    Symlinks and mounts are followed. Raises ConfigError. Changes nothing.
    """
    check_storage_locations("ssd", ssd)
    check_storage_locations("mapped", () if mapped is None else (mapped,))
    for place in ssd:
        # Size of one write of a store; a smaller directory could not take a row.
        if place.bytes is not None and place.bytes < DEFAULT_CHUNK_BYTES:
            raise ConfigError(
                f"plan.memory.ssd: {place.path}: got {place.bytes:,} bytes, wanted at least {DEFAULT_CHUNK_BYTES:,}, "
                "which are written at once; raise the size, or leave it out to use what there is"
            )
    locations = [("ssd", place) for place in ssd]
    locations += [] if mapped is None else [("mapped", mapped)]
    for (tier, location), (other_tier, other) in combinations(locations, 2):
        if _identity(location) == _identity(other):
            raise ConfigError(
                f"plan.memory.{other_tier}: {other.path} is the same directory as {location.path} of "
                f"plan.memory.{tier} ({os.path.realpath(location.path)}), wanted directories that differ; name it once"
            )


def _identity(place: StorageLocation) -> tuple[int, int, Path]:
    """Return a value that is equal for two names of one directory, even before it is created."""
    path = Path(os.path.realpath(place.path))
    ancestor = _existing_ancestor(path)
    status = ancestor.stat()
    return status.st_dev, status.st_ino, path.relative_to(ancestor)


def _existing_ancestor(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_storage_locations(setting: str, places: Sequence[StorageLocation]) -> None:
    """Check that the directories of `plan.memory.<name>` can be written and that their file systems are large enough.

    Raises ConfigError. Changes nothing.
    """
    for place in places:
        path = Path(place.path)
        ancestor = _existing_ancestor(path)
        if not ancestor.is_dir():
            raise ConfigError(
                f"plan.memory.{setting}: {path}: {ancestor} is a file, wanted a directory; give another, or move "
                "the file"
            )
        if not os.access(ancestor, os.W_OK | os.X_OK):
            raise ConfigError(
                f"plan.memory.{setting}: {path}: {ancestor} is not writable, wanted a directory that is; make it "
                "so for "
                "this user, or choose another"
            )
        if os.statvfs(ancestor).f_flag & os.ST_RDONLY:
            raise ConfigError(
                f"plan.memory.{setting}: {path}: the file system is read-only; choose a directory on another"
            )
        size = shutil.disk_usage(ancestor).total
        if size == 0:
            raise ConfigError(
                f"plan.memory.{setting}: {path}: its file system has no room at all (0 bytes), so it cannot hold rows; "
                "choose a directory on another"
            )
        if place.bytes is not None and place.bytes > size:
            raise ConfigError(
                f"plan.memory.{setting}: {path}: got {place.bytes:,} bytes, the file system has {size:,}; lower the "
                "size, or leave it out to use what there is"
            )
