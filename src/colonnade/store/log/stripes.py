"""Stripes: directories that share a store's segments, each with a lock and a mark file, and an account of the bytes in
each directory for all stores that use it.

Stripe 0 is the store's own directory. A new segment goes to the least full of the stripes with room for it: a pure
function of their bytes and capacities.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from colonnade.errors import CheckpointError, ConfigError, StorageError
from colonnade.files.disk import Disk, DiskFile
from colonnade.files.durable import read_verified, write_durably
from colonnade.formats import check_format_version, make_format_stamp, parse_json_object
from colonnade.sizes import StorageLocation
from colonnade.store.contract import Manifest
from colonnade.store.log.segment import DEFAULT_CHUNK_BYTES


class SpaceAccount:
    """Account of the bytes of segments and key lists in one directory. A limit of None: no limit.

    Manifests and live bitmaps are stored elsewhere and not counted. `used`: bytes of existing files; `expected_growth`:
    bytes that segments in progress may still grow by, which are not reserved. Shared by the stores of one opening. Any
    thread may call any method.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """path: as in the settings, for messages."""
        self.path = path
        self.limit_bytes = limit_bytes
        self.used = self.expected_growth = 0
        self._lock = threading.Lock()

    def reserve_bytes(self, num_bytes: int) -> bool:
        """Count bytes that are about to be written. False if the limit leaves no room; then nothing is counted."""
        with self._lock:
            if self.limit_bytes is not None and self.used + num_bytes > self.limit_bytes:
                return False
            self.used += num_bytes
            return True

    def adjust_used(self, num_bytes: int) -> None:
        """Count existing files when a store opens, even beyond a lowered limit; negative: removed files."""
        with self._lock:
            self.used += num_bytes

    def adjust_growth(self, num_bytes: int) -> None:
        """Add to the expected growth of segments in progress; negative: subtract."""
        with self._lock:
            self.expected_growth += num_bytes

    def free_bytes(self, *, after_growth: bool) -> float:
        """Return the free bytes; `after_growth`: less the expected growth of segments in progress."""
        if self.limit_bytes is None:
            return float("inf")
        with self._lock:
            return self.limit_bytes - self.used - (self.expected_growth if after_growth else 0)


def build_no_space_error(stripe_spaces: Sequence[SpaceAccount], needed_bytes: int) -> StorageError:
    """Build the error of a write that no directory has room for, like that of a full disk."""
    usage = ", ".join(
        f"{s.path} holds {s.used:,} of {s.limit_bytes:,} bytes" for s in stripe_spaces
    )
    return StorageError(
        errno.ENOSPC,
        f"plan.memory.ssd: got {needed_bytes:,} bytes more to write, wanted no more than its sizes allow: "
        f"{usage}. Raise "
        "the size or add a directory (plan.memory.ssd in the run's config, or --set), then run the same command with "
        "the same --run; steps committed, if there are any, are intact",
    )


LOCK_NAME = "LOCK"
MARK_NAME = "stripe.json"
FORMAT = "colonnade stripe"


@dataclass(frozen=True, slots=True)
class Stripe:
    """Directory of one store's own for its segments; `capacity_bytes` is relative to the capacities of the others.

    `space`: shared with other stores' stripes under the same limit; None: limited by the file system alone.
    """

    directory: Path
    capacity_bytes: int
    space: SpaceAccount | None = None


class Stripes:
    """Directories of one store. `capacities` has the numbers of those that take new segments."""

    def __init__(self, home: Path, home_lock: DiskFile | None = None) -> None:
        self.home = home
        self.store_id = ""  # "" until the store has stripes
        self.directories: dict[int, Path] = {0: home}
        self.capacities: dict[int, int] = {0: 1}
        self.spaces: dict[int, SpaceAccount] = {}  # of stripes with a limit
        self.recorded_paths: dict[int, str] = {}  # their paths in the manifest
        self.locks = [home_lock] if home_lock is not None else []

    def choose_stripe_number(
        self, stripe_bytes: Mapping[int, int], initial_bytes: int, max_bytes: int
    ) -> int:
        """Choose the stripe of a new segment that begins with `initial_bytes` bytes and may grow to `max_bytes`.

        Raises StorageError if no stripe has room for its beginning.
        """
        shared = {n: space.used + space.expected_growth for n, space in self.spaces.items()}
        used = dict(stripe_bytes) | shared
        fitting = {
            n: c for n, c in self.capacities.items() if self._free_bytes(n, True) >= max_bytes
        }
        if fitting:
            return least_full(fitting, used)
        beginning = [n for n in self.capacities if self._free_bytes(n, False) >= initial_bytes]
        if not beginning:
            raise build_no_space_error([self.spaces[n] for n in self.capacities], initial_bytes)
        return max(beginning, key=lambda n: (self._free_bytes(n, True), -n))

    def _free_bytes(self, number: int, after_growth: bool) -> float:
        space = self.spaces.get(number)
        return float("inf") if space is None else space.free_bytes(after_growth=after_growth)

    def find_stripe(self, name: str, number: int) -> int | None:
        """Return the stripe of a file that a manifest puts in stripe `number`, or None if it cannot be reached."""
        if number == 0 or (self.home / name).exists():
            return 0
        return number if number in self.directories else None

    def find_stripe_file(self, name: str, stripe_number: int) -> Path:
        """Return the path of a file that a manifest puts in stripe `stripe_number`; a copy in the home directory
        wins."""
        home_path = self.home / name
        if stripe_number == 0 or home_path.exists():
            return home_path
        if stripe_number not in self.directories:
            raise CheckpointError(
                f"{self.home}: its stripe {stripe_number} was not given, and {name} is stored in it: last in "
                f"{self.recorded_paths.get(stripe_number, 'an unknown directory')}, which does not exist now. Mount it "
                "again at that "
                "path; or, if it was moved, go on training with its new path among plan.memory.ssd in the run's config "
                "(or --set plan.memory.ssd=DIRECTORY), where DIRECTORY holds the folder colonnade-..."
            )
        return self.directories[stripe_number] / name

    def paths_outside_home(self) -> dict[int, str]:
        """Return the paths of the stripes other than home, for a manifest."""
        return {n: str(path.absolute()) for n, path in self.directories.items() if n}

    def release(self) -> None:
        for lock in self.locks:
            lock.close()
        self.locks = []


def least_full(capacities: Mapping[int, int], stripe_bytes: Mapping[int, int]) -> int:
    """Return the stripe with the smallest share of its capacity in use; of equal ones the lowest number."""
    return min(capacities, key=lambda n: (stripe_bytes.get(n, 0) / capacities[n], n))


def open_stripes(
    home: Path,
    directories: Sequence[Stripe],
    manifest: Manifest | None,
    *,
    disk: Disk | None = None,
    home_lock: DiskFile | None = None,
) -> Stripes:
    """Open the directories of the store at `home`: for writing with `disk` and the lock of home, else with None.

    manifest: of the commit that is opened, if any. Raises StoreLocked if another run writes to one of them,
    CheckpointError if one belongs to another store.
    """
    stripes = Stripes(home, home_lock)
    if manifest is not None:
        stripes.store_id = manifest.store_id
        stripes.recorded_paths = dict(manifest.stripe_paths)
    try:
        for number, path in sorted(stripes.recorded_paths.items()):
            if _read_mark_file(Path(path)) == (stripes.store_id, number):
                stripes.directories[number] = Path(path)
                if disk is not None:
                    stripes.locks.append(disk.lock(Path(path) / LOCK_NAME))
        if directories:
            stripes.capacities = {}
        for stripe in directories:
            added = _add_stripe(stripes, stripe, disk)
            if added is not None:
                stripes.capacities[added] = max(stripe.capacity_bytes, 1)
                if stripe.space is not None:
                    stripes.spaces[added] = stripe.space
    except BaseException:
        stripes.release()
        raise
    return stripes


def _add_stripe(stripes: Stripes, stripe: Stripe, disk: Disk | None) -> int | None:
    """Add a directory to the store and return its number; None for a new one when open for reading only."""
    directory = Path(stripe.directory)
    for number, path in stripes.directories.items():
        if path.absolute() == directory.absolute():
            return number
    if disk is not None:
        disk.make_dir(directory)
        stripes.locks.append(disk.lock(directory / LOCK_NAME))
    mark = _read_mark_file(directory)
    if mark is None:
        if disk is None:
            return None
        stripes.store_id = stripes.store_id or secrets.token_hex(16)
        number = 1 + max([*stripes.directories, *stripes.recorded_paths])
        fields = {**make_format_stamp(FORMAT), "store": stripes.store_id, "number": number}
        fields["home"] = str(stripes.home.absolute())  # for people
        write_durably(disk, directory / MARK_NAME, json.dumps(fields, indent=1).encode())
    else:
        if not stripes.store_id and _belongs_to(directory, stripes.home):
            stripes.store_id = mark[0]  # of an opening that never committed, or was abandoned
        store_id, number = mark
        if store_id != stripes.store_id:
            raise CheckpointError(
                f"{directory}: it holds rows of another store, wanted an empty directory or one of "
                f"{stripes.home}. Give this store directories of its own"
            )
        if number in stripes.directories:
            raise CheckpointError(
                f"{directory}: got a second directory that calls itself stripe {number} of {stripes.home}. "
                "Give the one that was not copied"
            )
    stripes.directories[number] = directory
    return number


def _read_mark_file(directory: Path) -> tuple[str, int] | None:
    """Read (store id, number) from a directory's mark file; None without one."""
    path = directory / MARK_NAME
    if not path.exists():
        return None
    fields = parse_json_object(path, read_verified(path))
    check_format_version(path, fields, FORMAT)
    return fields["store"], fields["number"]


def _belongs_to(directory: Path, home: Path) -> bool:
    fields = parse_json_object(directory / MARK_NAME, read_verified(directory / MARK_NAME))
    return bool(fields["home"] == str(home.absolute()))


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
