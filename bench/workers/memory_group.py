"""A memory cgroup for one process: its memory and page cache together stay below a limit, or it is killed.

Below this process's own group, so that limits set on us hold for it too. Version 1 or 2, whichever is mounted.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}


class NoMemoryGroup(RuntimeError):
    """No memory cgroup on this machine; the message says why."""


class MemoryGroup:
    """`open_group` makes one; close it when the process has ended."""

    def __init__(self, folder: Path, version: int, limit_bytes: int) -> None:
        self.folder, self.version, self.limit_bytes = folder, version, limit_bytes

    def add(self, pid: int) -> None:
        """Count what the process allocates from now on."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def tighten(self, limit_bytes: int) -> None:
        """A new limit; page cache above it is given up at once."""
        self.limit_bytes = limit_bytes
        (self.folder / LIMITS[self.version]).write_text(str(limit_bytes))

    @property
    def anonymous_bytes(self) -> int:
        """Return the bytes of its processes now, without the page cache."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        text = dict(line.split() for line in lines)
        return int(text["total_rss" if self.version == 1 else "anon"])

    def close(self) -> None:
        for _ in range(50):  # a killed process leaves its group a moment later
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


def open_group(name: str, limit_bytes: int) -> MemoryGroup:
    """Open a memory cgroup. Raises NoMemoryGroup."""
    version, parent = find_parent()
    folder = parent / f"colonnade-{os.getpid()}-{name}"
    try:
        folder.mkdir()
        (folder / LIMITS[version]).write_text(str(limit_bytes))
        if version == 1:
            with suppress(OSError):  # swap is accounted on some machines only
                (folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
        else:
            with suppress(OSError):
                (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        raise NoMemoryGroup(f"no memory cgroup below {parent}: {error.strerror}") from None
    return MemoryGroup(folder, version, limit_bytes)


def find_parent() -> tuple[int, Path]:
    """Return (version, folder) of this process's own memory cgroup. Raises NoMemoryGroup."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        raise NoMemoryGroup("no /proc: memory cgroups are a thing of Linux") from None
    for _, path, kind, options, *_ in mounts:
        for _, controllers, group in own:
            if kind == "cgroup" and "memory" in options.split(",") and controllers == "memory":
                return 1, _existing(Path(path), group)
            if kind == "cgroup2" and controllers == "":
                folder = _existing(Path(path), group)
                with suppress(OSError):
                    if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                        return 2, folder
    raise NoMemoryGroup("no memory cgroup is mounted, or none that may have children of its own")


def _existing(mount: Path, group: str) -> Path:
    """Return the existing folder of the group. In a container the mount may begin at our group already."""
    folder = mount / group.lstrip("/")
    return folder if folder.is_dir() else mount
