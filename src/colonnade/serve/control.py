"""Private folder of a server, through which all worker processes learn which step to serve and which are pinned.

STATE/control.json     the newest order: served step, pinned steps; replaced atomically, checked before each answer
STATE/pins/<step>/     a publication of its own that ends at that step: hard links, or copies, of its files, which
                       therefore survive the retention of the publication
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from colonnade.errors import CheckpointError, ConfigError
from colonnade.files.disk import Disk
from colonnade.files.durable import write_durably
from colonnade.files.untrusted import folder_inside
from colonnade.formats import make_format_stamp
from colonnade.publish.delivery import find_published_step
from colonnade.publish.deltas import (
    CURRENT,
    FORMAT,
    CurrentPointer,
    delta_file_name,
    read_delta_header,
)

CONTROL = "control.json"
PINS = "pins"
LOCK = "server"
TEMPORARY = "colonnade-serve-"
"""Beginning of the names of temporary folders."""
STALE_SECONDS = 60.0
"""Age of a temporary folder from which on nobody is about to lock it."""


@dataclass(frozen=True, slots=True)
class ServeOrder:
    """Order to all workers. `serve_step` None: the newest checkpoint; `pins`: steps that stay available."""

    serve_step: int | None = None
    pins: tuple[int, ...] = ()
    is_stopped: bool = False


class ControlFolder:
    """Private folder of a server. Any thread and process may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / CONTROL
        self._order = ServeOrder()
        self._stamp = (0, 0)

    def read(self) -> ServeOrder:
        """Return the current order. Costs one look at the file's time while nothing has changed."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return self._order
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            fields = json.loads(self._path.read_text(encoding="utf-8"))
            self._order = ServeOrder(
                fields["serve_step"], tuple(fields["pins"]), fields["is_stopped"]
            )
            self._stamp = stamp
        return self._order

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let one server at a time use the folder. Raises ConfigError if another one does."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / LOCK, "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--state: got {self.folder}, which another server uses; stop that one, or give a folder of its own"
                ) from None
            yield

    def serve(self, step: int | None) -> ServeOrder:
        """Let all workers serve this pinned step; None: the newest checkpoint again. Raises CheckpointError for a step
        that is not pinned any more."""
        with self._locked() as order:
            if step is not None and step not in order.pins:
                raise CheckpointError(
                    f"got step {step}, which was unpinned meanwhile; pin it again"
                )
            return self._write(replace(order, serve_step=step))

    def stop(self) -> ServeOrder:
        """Let all workers drain and end."""
        with self._locked() as order:
            return self._write(replace(order, is_stopped=True))

    def reset_stop(self) -> None:
        """Forget the stop of an earlier server in this folder."""
        with self._locked() as order:
            if order.is_stopped:
                self._write(replace(order, is_stopped=False))

    def pin(self, publication: Path, step: int, max_pins: int) -> ServeOrder:
        """Keep a published step available. Raises CheckpointError if it is not published, ConfigError for too many."""
        with self._locked() as order:
            if step in order.pins:
                return order
            if len(order.pins) >= max_pins:
                raise ConfigError(
                    f"got pins {list(order.pins)} and step {step}, wanted at most {max_pins}; unpin one, or raise "
                    "--max-pins"
                )
            copy_published_step(publication, self.pin_folder(step), step)
            return self._write(replace(order, pins=(*order.pins, step)))

    def unpin(self, step: int) -> ServeOrder:
        """Forget a pinned step. Raises ConfigError if it is served, CheckpointError if it is not pinned."""
        with self._locked() as order:
            if step == order.serve_step:
                raise ConfigError(
                    f"got step {step}, which is served now; let the server follow, then unpin it"
                )
            if step not in order.pins:
                raise CheckpointError(f"got step {step}, wanted a pinned one: {list(order.pins)}")
            written = self._write(
                replace(order, pins=tuple(pin for pin in order.pins if pin != step))
            )
            folder = self.pin_folder(step)
            hidden = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(hidden, ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(folder, hidden)  # a worker that opens it finds all of it, or nothing
            shutil.rmtree(hidden, ignore_errors=True)
            return written

    def pin_folder(self, step: int) -> Path:
        """Return the folder of a pinned step."""
        return self.folder / PINS / str(step)

    def _write(self, order: ServeOrder) -> ServeOrder:
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(asdict(order)), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return self.read()

    @contextmanager
    def _locked(self) -> Iterator[ServeOrder]:
        """Let one process at a time change the order."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / "lock", "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self.read()


@contextmanager
def lock_server_folder(state_folder: Path | None) -> Iterator[Path]:
    """Create the private folder of a server and lock it; None: a temporary one, which is removed at the end.

    Raises ConfigError if another server uses it."""
    if state_folder is not None:
        with ControlFolder(state_folder).lock():
            yield state_folder
        return
    remove_stale_folders(Path(tempfile.gettempdir()))
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    try:
        with ControlFolder(temporary).lock():
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_stale_folders(parent: Path) -> None:
    """Remove the temporary folders of servers that were killed: no server has them locked."""
    for folder in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # it is in use, or gone already
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_own or time.time() - status.st_mtime < STALE_SECONDS:
                continue
            with open(folder / LOCK, "a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def copy_published_step(publication: Path, target: Path, step: int) -> None:
    """Build a publication in `target` that ends at a step of another one, by hard links or copies of its files.

    Raises CheckpointError that lists the published steps if this one is not among them, StorageError.
    """
    current, base, number = find_published_step(publication, step)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / base.folder).mkdir(parents=True)
    tag = base.tag
    num_bytes = 0
    try:
        for path in sorted(folder_inside(publication, base.folder).iterdir()):
            _link_or_copy(path, temporary / base.folder / path.name)
        for delta in range(base.number + 1, number + 1):
            path = publication / delta_file_name(delta)
            _link_or_copy(path, temporary / path.name)
            tag = read_delta_header(temporary, delta).tag
            num_bytes += path.stat().st_size
        pointer = CurrentPointer(current.run, number, step, tag, (base,), num_bytes)
        fields = {**make_format_stamp(FORMAT), **asdict(pointer)}
        write_durably(Disk(), temporary / CURRENT, json.dumps(fields, indent=2).encode())
    except FileNotFoundError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{publication}: {error.filename} was removed meanwhile, so step {step} is not published any more"
        ) from None
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk gets its space back
        raise
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)


def _link_or_copy(path: Path, target: Path) -> None:
    """Link a file, or copy it to another file system."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path}: got a symbolic link, wanted a file of the publication itself"
        )
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, target)
