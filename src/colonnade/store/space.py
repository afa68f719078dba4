"""How many bytes one rank may keep in a directory: one account for all its stores there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

from colonnade.errors import StorageError


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
