"""Stripes: several directories that share a store's segments, each with a lock and a mark, and one account of bytes
for all stores there.

Stripe 0 is the store's own directory. Which stripe takes a new segment is a pure function of the bytes
that each holds and of the capacities: the least full of those that have room.
"""

from __future__ import annotations

import errno
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import CheckpointError, StorageError
from colonnade.formats import check_stamp, parse_object, stamp
from colonnade.store.disk import Disk, DiskFile
from colonnade.store.durable import read_verified, write_durably


class Space:
    """Bytes of segments and key lists; manifests and live bitmaps lie elsewhere and are not counted. None: no limit.

    `used`: of files that are there; `promised`: what segments under way may still grow by, which is a wish and no
    claim. Shared by the stores of one opening. Threads: any.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """`path`: as people gave it."""
        self.path, self.limit_bytes = path, limit_bytes
        self.used = self.promised = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Before so many are written; False: there is no room, and nothing is taken."""
        with self._lock:
            if self.limit_bytes is not None and self.used + num_bytes > self.limit_bytes:
                return False
            self.used += num_bytes
            return True

    def count(self, num_bytes: int) -> None:
        """Files found when a store opens, also beyond the limit: that may have been lowered. Negative: given back."""
        with self._lock:
            self.used += num_bytes

    def promise(self, num_bytes: int) -> None:
        """Negative: no longer."""
        with self._lock:
            self.promised += num_bytes

    def room(self, *, promised: bool) -> float:
        """Bytes that are free; with `promised`, what nobody wishes for either."""
        if self.limit_bytes is None:
            return float("inf")
        with self._lock:
            return self.limit_bytes - self.used - (self.promised if promised else 0)


def no_room(spaces: Sequence[Space], num_bytes: int) -> StorageError:
    """What to say when none of them takes so many bytes more: as a full disk would."""
    said = ", ".join(f"{s.path} holds {s.used:,} of {s.limit_bytes:,} bytes" for s in spaces)
    return StorageError(
        errno.ENOSPC,
        f"plan.memory.ssd: got {num_bytes:,} bytes more to write, wanted no more than its sizes allow: {said}. Raise "
        "the size or add a directory (plan.memory.ssd in the run's config, or --set), then run the same command with "
        "the same --run; steps committed, if there are any, are intact",
    )


LOCK_NAME = "LOCK"
MARK_NAME = "stripe.json"
FORMAT = "colonnade stripe"


@dataclass(frozen=True, slots=True)
class Stripe:
    """A directory of its own for some of one store's segments; `capacity_bytes` is relative to the others'.

    `space`: shared with other stores' stripes of the same limit; None: as much as the file system takes.
    """

    directory: Path
    capacity_bytes: int
    space: Space | None = None


class Stripes:
    """The directories of one store. `numbers` of those that take new segments, with their capacities."""

    def __init__(self, home: Path, home_lock: DiskFile | None = None) -> None:
        self.home = home
        self.store_id = ""  # "" until the store has stripes
        self.directories: dict[int, Path] = {0: home}
        self.capacities: dict[int, int] = {0: 1}
        self.spaces: dict[int, Space] = {}  # of those that have one
        self.known: dict[int, str] = {}  # where a manifest says that they were
        self.locks = [home_lock] if home_lock is not None else []

    def choose(self, held_bytes: Mapping[int, int], first: int, whole: int) -> int:
        """Where a new segment goes that begins with `first` bytes and may grow to `whole`.

        Raises StorageError where there is no room for its beginning."""
        of_all = {n: space.used + space.promised for n, space in self.spaces.items()}
        held = dict(held_bytes) | of_all
        fitting = {n: c for n, c in self.capacities.items() if self._room(n, True) >= whole}
        if fitting:
            return least_full(fitting, held)
        beginning = [n for n in self.capacities if self._room(n, False) >= first]
        if not beginning:
            raise no_room([self.spaces[n] for n in self.capacities], first)
        return max(beginning, key=lambda n: (self._room(n, True), -n))

    def _room(self, number: int, promised: bool) -> float:
        space = self.spaces.get(number)
        return float("inf") if space is None else space.room(promised=promised)

    def lies_in(self, name: str, number: int) -> int | None:
        """The stripe that a file which a manifest puts in stripe `number` is in; None: it cannot be reached."""
        if number == 0 or (self.home / name).exists():
            return 0
        return number if number in self.directories else None

    def find(self, name: str, number: int) -> Path:
        """Where a file that a manifest puts in stripe `number` is: there, or where a copy was put: at home."""
        at_home = self.home / name
        if number == 0 or at_home.exists():
            return at_home
        if number not in self.directories:
            raise CheckpointError(
                f"{self.home}: its stripe {number} was not given, and {name} lies there: last in "
                f"{self.known.get(number, 'an unknown directory')}, which is not there now. Mount it there again; "
                "or, if it was moved, go on training with its new place among plan.memory.ssd in the run's config "
                "(or --set plan.memory.ssd=DIRECTORY), where DIRECTORY holds the folder colonnade-..."
            )
        return self.directories[number] / name

    def outside(self) -> dict[int, str]:
        """What a manifest says of the stripes that are not home."""
        return {n: str(path.absolute()) for n, path in self.directories.items() if n}

    def release(self) -> None:
        for lock in self.locks:
            lock.close()
        self.locks = []


def least_full(capacities: Mapping[int, int], held_bytes: Mapping[int, int]) -> int:
    """The stripe with the smallest share of its capacity taken; of equals the lowest number."""
    return min(capacities, key=lambda n: (held_bytes.get(n, 0) / capacities[n], n))


def open_stripes(
    home: Path,
    wanted: Sequence[Stripe],
    *,
    disk: Disk | None,
    home_lock: DiskFile | None,
    known: Mapping[int, str],
    store_id: str,
) -> Stripes:
    """The directories of the store at `home`; for writing with `disk` and the lock of home, else None.

    `known`, `store_id`: what the manifest says. Raises StoreLocked where another run writes to one of them,
    CheckpointError where one belongs to another store.
    """
    stripes = Stripes(home, home_lock)
    stripes.store_id = store_id
    stripes.known = dict(known)
    try:
        for number, path in sorted(known.items()):
            if _mark(Path(path)) == (store_id, number):
                stripes.directories[number] = Path(path)
                if disk is not None:
                    stripes.locks.append(disk.lock(Path(path) / LOCK_NAME))
        if wanted:
            stripes.capacities = {}
        for stripe in wanted:
            entered = _enter(stripes, stripe, disk, known)
            if entered is not None:
                stripes.capacities[entered] = max(stripe.capacity_bytes, 1)
                if stripe.space is not None:
                    stripes.spaces[entered] = stripe.space
    except BaseException:
        stripes.release()
        raise
    return stripes


def _enter(
    stripes: Stripes, stripe: Stripe, disk: Disk | None, known: Mapping[int, str]
) -> int | None:
    """The number of a directory, taken into the store if it is new; None: new, and open for reading only."""
    directory = Path(stripe.directory)
    for number, path in stripes.directories.items():
        if path.absolute() == directory.absolute():
            return number
    if disk is not None:
        disk.make_dir(directory)
        stripes.locks.append(disk.lock(directory / LOCK_NAME))
    mark = _mark(directory)
    if mark is None:
        if disk is None:
            return None
        stripes.store_id = stripes.store_id or secrets.token_hex(16)
        number = 1 + max([*stripes.directories, *known])
        said = {**stamp(FORMAT), "store": stripes.store_id, "number": number}
        said["home"] = str(stripes.home.absolute())  # for people
        write_durably(disk, directory / MARK_NAME, json.dumps(said, indent=1).encode())
    else:
        if not stripes.store_id and _is_of(directory, stripes.home):
            stripes.store_id = mark[0]  # of an opening that never committed, or was given up
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


def _mark(directory: Path) -> tuple[str, int] | None:
    """(store id, number) that a directory says of itself."""
    path = directory / MARK_NAME
    if not path.exists():
        return None
    said = parse_object(path, read_verified(path))
    check_stamp(path, said, FORMAT)
    return said["store"], said["number"]


def _is_of(directory: Path, home: Path) -> bool:
    said = parse_object(directory / MARK_NAME, read_verified(directory / MARK_NAME))
    return said["home"] == str(home.absolute())
