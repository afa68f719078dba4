"""Compaction of logs: which sealed segments are rewritten, piece by piece, and the thread that does it.

Rows that still count are appended to streams of their own, the hottest apart, so that what dies together lies together;
then the segment is forgotten.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import numpy as np

from colonnade import _native
from colonnade.errors import CorruptionError, StorageError
from colonnade.store.background_worker import RETRY_SECONDS, Attendant
from colonnade.store.key_list import Keys
from colonnade.store.live import live_flags
from colonnade.store.log_files import LogFiles, SegmentFile
from colonnade.store.segment import read_frames


class Rewriting:
    """Any thread may call anything. Rows move only under the lock `moving`, and not while a commit is frozen."""

    def __init__(
        self, log: _native.RowLog, files: LogFiles, full_records: int, stream: int, hot: int
    ) -> None:
        """full_records: what fits into a segment; stream, hot: of the log, for rows that moved."""
        self.log, self.files = log, files
        self.moving = threading.RLock()
        self.is_frozen = False
        self.rotten: CorruptionError | None = None  # the newest bad record that was met
        self._full_records, self._streams = full_records, (stream, hot)
        self._victims: list[int] = []  # segments to rewrite, the first from this record on
        self._next_record = 0
        self._keys: tuple[int, Keys] | None = None  # of the segment under way
        self._rotten_segments: set[int] = set()

    def freeze(self) -> None:
        """Raises StorageError, CorruptionError where rows of a segment whose sync failed cannot move elsewhere."""
        with self.moving:
            for part in self.files.complete().values():
                if part.is_suspect:
                    self._rewrite_suspect(part)
            self.log.freeze()
            self.is_frozen = True

    def thaw(self) -> None:
        with self.moving:
            if self.is_frozen:
                self.log.thaw()
                self.is_frozen = False

    def has_victims(self) -> bool:
        """Whether there is something to collect now; if nothing is chosen yet, that is done here."""
        with self.moving:
            if not self.is_frozen and not self._victims:
                self._victims, self._next_record = self._choose_victims(), 0
            return not self.is_frozen and bool(self._victims)

    def next_piece(self) -> tuple[int, bool]:
        """Collect one piece of one segment: (bytes read, 0: nothing to do now; was a segment forgotten?).

        Raises StorageError; CorruptionError where a record is rotten: its segment is left alone from now on.
        """
        with self.moving:
            if not self.has_victims():
                return 0, False
            part = self.files.parts[self._victims[0]]
            try:
                num_bytes, self._next_record = self._rewrite(part, self._next_record)
            except CorruptionError as error:
                self.rotten, self._victims = error, []
                self._rotten_segments.add(part.number)
                raise
            is_done = self._next_record >= part.num_records
            if is_done:
                del self._victims[0]
                self._next_record = 0
                self.files.forget(part.number)
            return num_bytes, is_done

    @property
    def is_space_short(self) -> bool:
        """Far more is on the disk than should be."""
        _, records, live, _ = (np.asarray(column) for column in self.log.segments())
        return int(records.sum()) > 2 * int(live.sum()) + self._full_records

    def _choose_victims(self) -> list[int]:
        ready = self.files.complete().keys() - self._rotten_segments
        columns = [np.asarray(column).tolist() for column in self.log.segments()[:3]]
        uses = [SegmentUse(*use) for use in zip(*columns, strict=True)]
        return choose_victims(uses, ready=ready, full_records=self._full_records)

    def _rewrite(self, part: SegmentFile, first: int) -> tuple[int, int]:
        """Rows of a piece from record `first` on are appended; (bytes read, at least 1, the record after the piece)."""
        live = live_flags(np.asarray(self.log.live(part.number)), part.num_records)[first:]
        if not live.any():
            return 1, part.num_records
        first += int(live.argmax())
        shape = self.files.shape
        if self._keys is None or self._keys[0] != part.number:
            self._keys = part.number, part.read_keys()
        pieces = read_frames(part.file, part.number, shape, self._keys[1], first)
        start, ids, frames = next(pieces)
        rows = frames.view(np.uint8).reshape(len(frames), shape.stride)
        self.log.rewrite(part.number, ids, rows, start, *self._streams)
        return rows.size, start + len(frames)

    def _rewrite_suspect(self, part: SegmentFile) -> None:
        first = 0
        while first < part.num_records:
            _, first = self._rewrite(part, first)
        self._victims = []
        self.files.forget(part.number)


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
