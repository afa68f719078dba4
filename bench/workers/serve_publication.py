"""Freshness of a server: when steps were published, when each was first answered with, and the seconds between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from colonnade.publish.deltas import CURRENT, read_current

POLL_SECONDS = 0.005


class PublicationWatch:
    """Thread that notes when each step of a publication became the current one (Unix time)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.published: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PublicationWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last = 0
        while not self._stop.wait(POLL_SECONDS):
            try:
                written = os.stat(self.folder / CURRENT).st_mtime_ns
            except FileNotFoundError:
                continue
            if written != last and (current := read_current(self.folder)) is not None:
                last = written
                self.published.setdefault(current.step, written * 1e-9)

    def wait_for_step(self, seconds: float) -> int | None:
        """Wait for the first step; None: there is none after that time."""
        deadline = time.monotonic() + seconds
        while not self.published and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return min(self.published, default=None)


def find_delays(
    published: Mapping[int, float], answered: Mapping[int, float], begin: float, end: float
) -> list[float]:
    """Return for each step published between two times the seconds until the first answer by it or a later one.

    answered: the time of the first answer of each step. A step without one is late until the last answer of all.
    """
    last = max(answered.values(), default=end)
    delays = []
    for step, moment in sorted(published.items()):
        if begin <= moment <= end:
            moments = [when for other, when in answered.items() if other >= step]
            delays.append(min(moments, default=last) - moment)
    return delays
