"""Garbage collection: which sealed segments are rewritten, and the thread that does it a piece at a time.

Rows that still count are appended to streams of their own, the hottest apart, so that what dies together lies together;
then the segment is forgotten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from colonnade.errors import StorageError
from colonnade.store.attendant import RETRY_SECONDS, Attendant

DEFAULT_UTILISATION = 0.7
FAN_IN = 8
BUSY_SHARE = 0.25
"""Of one thread's time, while space is no worry."""


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


class Collector(Attendant[CollectSource]):
    """One thread for all logs of a rank. It leaves most of the disk to demand."""

    def __init__(self) -> None:
        super().__init__("collector")
        self._due: set[ref[CollectSource]] = set()
        self._looked = 0.0  # at all of them

    def wake(self, source: CollectSource) -> None:
        """A commit of it is over: its segments may be rewritten again."""
        with self._condition:
            self._due.add(ref(source))
            self._condition.notify_all()

    # ---- the thread

    def _has_more(self) -> bool:
        return bool(self._due)

    def _work(self) -> None:
        with self._condition:
            due, self._due = self._due, set()
            sources = list(self._sources)
        # Asking a log costs more than waiting for the next look at all of them.
        if time.monotonic() - self._looked >= RETRY_SECONDS:
            due, self._looked = set(sources), time.monotonic()
        more = {each for each in sources if each in due and self._collect_in_turn(each)}
        with self._condition:
            self._due |= more

    def _collect_in_turn(self, source: ref[CollectSource]) -> bool:
        """Whether it may have more."""
        if self._is_over():
            return False
        start = time.monotonic()
        num_bytes, is_space_short = self._collect_from(source)
        if num_bytes and not is_space_short:
            self._rest((time.monotonic() - start) * (1 / BUSY_SHARE - 1))
        return num_bytes > 0

    def _collect_from(self, of: ref[CollectSource]) -> tuple[int, bool]:
        source = self._begin(of)
        try:
            num_bytes = 0 if source is None else source.collect_piece()
            return num_bytes, source is not None and num_bytes > 0 and source.is_space_short
        except StorageError:
            return 0, False  # the source keeps what its commits must say; the rest is tried again
        finally:
            self._end()
