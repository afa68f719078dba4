"""Garbage collection: which sealed segments are rewritten, and the thread that does it a piece at a time.

Rows that still count are appended to streams of their own, the hottest apart, so that what dies together lies together;
then the segment is forgotten.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from colonnade.errors import StorageError

DEFAULT_UTILISATION = 0.7
FAN_IN = 8
BUSY_SHARE = 0.25
"""Of one thread's time, while space is no worry."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """Counts of one sealed segment, in records."""

    number: int
    num_records: int
    num_live: int


def choose_victims(
    uses: Sequence[SegmentUse],
    *,
    ready: Collection[int],
    full_records: int,
    utilisation: float = DEFAULT_UTILISATION,
) -> list[int]:
    """The segments to rewrite before the question is asked again; []: there is nothing to gain.

    uses: the log's segments, those that fill included; ready: the numbers of those that may be rewritten; full_records:
    what fits into one.

      1. Segments without a live record go at once: they cost nothing.
      2. Records beyond live records / utilisation are too many: the best to go is the one with the most
         (1 - u) * sqrt(age) / (1 + u), u its live share, age how many segments are newer: cost-benefit (Rosenblum
         1991), where the age itself weighs too much as soon as some rows are hot.
      3. Segments of at most an eighth of a full one merge when eight are of one power-of-eight class, so that
         small commits leave few files, and each row is merged only so often.
    """
    live = sum(use.num_live for use in uses)
    records = sum(use.num_records for use in uses)
    newest = max((use.number for use in uses), default=0)
    uses = [use for use in uses if use.number in ready]
    dead = [use.number for use in uses if use.num_live == 0]
    if dead:
        return dead
    sparse = [use for use in uses if use.num_live < use.num_records]
    if records * utilisation > live and sparse:
        return [max(sparse, key=lambda use: (benefit(use, newest), -use.number)).number]
    classes: dict[int, list[int]] = {}
    for use in uses:
        if use.num_records * FAN_IN <= full_records:
            size_class = max(use.num_live.bit_length() - 1, 0) // 3
            classes.setdefault(size_class, []).append(use.number)
    return next((numbers for numbers in classes.values() if len(numbers) >= FAN_IN), [])


def benefit(use: SegmentUse, newest: int) -> float:
    """Space gained times how long it stays gained, by what reading and writing cost."""
    share = use.num_live / use.num_records
    return (1 - share) * math.sqrt(newest - use.number + 1) / (1 + share)


class CollectSource(Protocol):
    """What the collector works on: `LogBacking`."""

    def collect_piece(self) -> int:
        """Rewrite one piece of one segment; bytes read, 0: nothing to do now. Raises StorageError."""
        ...

    @property
    def is_space_short(self) -> bool: ...


class Collector:
    """One thread for all logs of a rank, running while there are any. It leaves most of the disk to demand."""

    def __init__(self) -> None:
        self._sources: list[CollectSource] = []
        self._condition = threading.Condition()
        self._due: set[CollectSource] = set()
        self._busy: CollectSource | None = None
        self._thread: threading.Thread | None = None

    def add(self, source: CollectSource) -> None:
        with self._condition:
            self._sources.append(source)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
                self._thread.start()
                # A thread in native code when the interpreter goes would take the process down.
                atexit.register(self._stop)

    def remove(self, source: CollectSource) -> None:
        """Returns when the thread has let go of it."""
        with self._condition:
            if source not in self._sources:
                return
            self._sources.remove(source)
            self._due.discard(source)
            self._condition.wait_for(lambda: self._busy is not source)
            thread = None if self._sources else self._let_go()
        if thread is not None:
            thread.join()

    def _let_go(self) -> threading.Thread | None:
        """Tell the thread to end; the lock is held."""
        thread, self._thread = self._thread, None
        self._condition.notify_all()
        atexit.unregister(self._stop)
        return thread

    def _stop(self) -> None:
        with self._condition:
            thread = self._let_go()
        if thread is not None:
            thread.join()

    def wake(self, source: CollectSource) -> None:
        """A commit of it is over: its segments may be rewritten again."""
        with self._condition:
            self._due.add(source)
            self._condition.notify_all()

    def _run(self) -> None:
        me = threading.current_thread()
        busy: set[CollectSource] = set()
        looked = 0.0  # at all of them
        while True:
            with self._condition:
                if not busy and not self._due:
                    self._condition.wait(RETRY_SECONDS)
                if self._thread is not me:
                    return
                busy, self._due = busy | self._due, set()
                sources = list(self._sources)
            if time.monotonic() - looked >= RETRY_SECONDS:
                busy, looked = set(sources), time.monotonic()
            # Asking a log costs more than waiting for the next look at all of them.
            busy = {each for each in sources if each in busy and self._collect_in_turn(each, me)}

    def _collect_in_turn(self, source: CollectSource, me: threading.Thread) -> bool:
        """Whether it may have more."""
        if self._thread is not me:
            return False
        start = time.monotonic()
        if not self._collect_from(source):
            return False
        if not source.is_space_short:
            rest = (time.monotonic() - start) * (1 / BUSY_SHARE - 1)
            with self._condition:
                self._condition.wait_for(lambda: self._thread is not me, rest)
        return True

    def _collect_from(self, source: CollectSource) -> int:
        with self._condition:
            if source not in self._sources:
                return 0
            self._busy = source
        try:
            return source.collect_piece()
        except StorageError:
            return 0  # the source keeps what its commits must say; the rest is tried again
        finally:
            with self._condition:
                self._busy = None
                self._condition.notify_all()
