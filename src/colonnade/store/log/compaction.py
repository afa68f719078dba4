"""Garbage collection of logs: choice of sealed segments, their rewriting piece by piece, and the thread that does it.

Live rows are appended to streams of their own, the most used ones apart, so that rows that expire together are stored
together; then the segment is forgotten.
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

from colonnade.errors import CorruptionError, StorageError
from colonnade.store.log.background_worker import RETRY_SECONDS, BackgroundWorker
from colonnade.store.log.key_list import Keys
from colonnade.store.log.live import unpack_flags
from colonnade.store.log.segment import read_frames
from colonnade.store.log.segment_files import LogFiles, SegmentFile


class SegmentRewriter:
    """Rewriter of one log's segments. Any thread may call any method.

    Rows move only under the lock `moving`, and not while a commit is frozen.
    """

    def __init__(self, files: LogFiles, stream: int, hot: int) -> None:
        """stream, hot: the log's streams for moved rows."""
        self.log = files.log
        self.files = files
        self.moving = threading.RLock()
        self.is_frozen = False
        self.corruption: CorruptionError | None = None  # of the last corrupt record
        self._streams = (stream, hot)
        self._victims: list[int] = []  # segments to rewrite
        self._next_record = 0  # of the first victim
        self._keys: tuple[int, Keys] | None = None  # of the segment in progress
        self._corrupt_segments: set[int] = set()

    def freeze_log(self) -> None:
        """Freeze the log. Raises StorageError, CorruptionError if rows of a segment that failed to sync cannot move."""
        with self.moving:
            for part in self.files.complete_segments().values():
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
        """Return whether there is a segment to rewrite now; chooses victims if none are chosen yet."""
        with self.moving:
            if not self.is_frozen and not self._victims:
                self._victims = self._choose_victims()
                self._next_record = 0
            return not self.is_frozen and bool(self._victims)

    def rewrite_next_piece(self) -> tuple[int, bool]:
        """Rewrite one piece of one segment. Returns the bytes read (0: nothing to do now), and whether it was the last.

        Raises StorageError; CorruptionError if a record is corrupt: its segment is never chosen again.
        """
        with self.moving:
            if not self.has_victims():
                return 0, False
            part = self.files.parts[self._victims[0]]
            try:
                num_bytes, self._next_record = self._rewrite_piece(part, self._next_record)
            except CorruptionError as error:
                self.corruption = error
                self._victims = []
                self._corrupt_segments.add(part.number)
                raise
            is_done = self._next_record >= part.num_records
            if is_done:
                del self._victims[0]
                self._next_record = 0
                self.files.mark_segment_removable(part.number)
            return num_bytes, is_done

    @property
    def is_space_short(self) -> bool:
        """True if the disk has far more records than live rows justify."""
        _, records, live, _ = (np.asarray(column) for column in self.log.segments())
        return int(records.sum()) > 2 * int(live.sum()) + self.files.full_records

    def _choose_victims(self) -> list[int]:
        ready = self.files.complete_segments().keys() - self._corrupt_segments
        columns = [np.asarray(column).tolist() for column in self.log.segments()[:3]]
        uses = [SegmentUse(*use) for use in zip(*columns, strict=True)]
        return choose_victim_segments(uses, ready=ready, full_records=self.files.full_records)

    def _rewrite_piece(self, segment_file: SegmentFile, first_record: int) -> tuple[int, int]:
        """Append live rows of a piece from record `first_record` on. Returns bytes read (at least 1) and the next
        record."""
        live = unpack_flags(
            np.asarray(self.log.live(segment_file.number)), segment_file.num_records
        )[first_record:]
        if not live.any():
            return 1, segment_file.num_records
        first_record += int(live.argmax())
        shape = self.files.shape
        if self._keys is None or self._keys[0] != segment_file.number:
            self._keys = segment_file.number, segment_file.read_keys()
        pieces = read_frames(
            segment_file.file, segment_file.number, shape, self._keys[1], first_record
        )
        start, ids, frames = next(pieces)
        rows = frames.view(np.uint8).reshape(len(frames), shape.stride)
        self.log.rewrite(segment_file.number, ids, rows, start, *self._streams)
        return rows.size, start + len(frames)

    def _rewrite_suspect(self, part: SegmentFile) -> None:
        first = 0
        while first < part.num_records:
            _, first = self._rewrite_piece(part, first)
        self._victims = []
        self.files.mark_segment_removable(part.number)


MAX_RECORDS_PER_ROW = 1.5
"""Records of a log per live record, above which segments are rewritten."""
FAN_IN = 16
"""Segments that merge into one."""
SMALL_SHARE = 8
"""Segments of at most this part of a full one merge."""
BUSY_SHARE = 0.25
"""Share of the thread's time that garbage collection takes, unless space is short."""


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """Record counts of one sealed segment."""

    number: int
    num_records: int
    num_live: int


def choose_victim_segments(
    segment_uses: Sequence[SegmentUse],
    *,
    ready: Collection[int],
    full_records: int,
) -> list[int]:
    """Choose the segments to rewrite next; []: there is nothing to gain.

    segment_uses: the log's segments, those being filled included; ready: numbers of those that may be rewritten;
    full_records: capacity of a segment.

      1. Segments without a live record go at once: they cost nothing.
      2. If there are more than 1.5 records to each live one, the segment with the largest
         (1 - u) * sqrt(age) / (1 + u) goes, u its live share, age the number of newer segments: cost-benefit
         (Rosenblum 1991). The age itself would weigh too much as soon as some rows are hot, hence its root.
      3. Segments of at most an eighth of a full one merge when 16 are of one power-of-16 class, so that small
         commits leave few files, and each row is merged a bounded number of times.
    """
    live = sum(use.num_live for use in segment_uses)
    records = sum(use.num_records for use in segment_uses)
    newest = max((use.number for use in segment_uses), default=0)
    segment_uses = [use for use in segment_uses if use.number in ready]
    dead = [use.number for use in segment_uses if use.num_live == 0]
    if dead:
        return dead
    sparse = [use for use in segment_uses if use.num_live < use.num_records]
    if records > MAX_RECORDS_PER_ROW * live and sparse:
        return [max(sparse, key=lambda use: (rate_benefit(use, newest), -use.number)).number]
    classes: dict[int, list[int]] = {}
    for use in segment_uses:
        if use.num_records * SMALL_SHARE <= full_records:
            size_class = max(use.num_live.bit_length() - 1, 0) // (FAN_IN.bit_length() - 1)
            classes.setdefault(size_class, []).append(use.number)
    return next((numbers for numbers in classes.values() if len(numbers) >= FAN_IN), [])


def rate_benefit(use: SegmentUse, newest: int) -> float:
    """Rate a segment: space gained times how long it stays gained, divided by the cost of reading and writing."""
    share = use.num_live / use.num_records
    return (1 - share) * math.sqrt(newest - use.number + 1) / (1 + share)


class CollectSource(Protocol):
    """Source of segments for the garbage collector: `LogBacking`."""

    def collect_garbage_piece(self) -> int:
        """Rewrite one piece of one segment; returns bytes read, 0: nothing to do now. Raises StorageError."""
        ...

    @property
    def is_space_short(self) -> bool: ...


class Collector(BackgroundWorker[CollectSource]):
    """Garbage collector thread of a rank's logs. It leaves most of the disk's time to reads of training."""

    def __init__(self) -> None:
        super().__init__("collector")
        self._ready: set[ref[CollectSource]] = set()  # logs that may have victims
        self._last_full_round = 0.0

    def wake(self, source: CollectSource) -> None:
        """Report that a log's commit has ended: its segments may be rewritten again."""
        with self._condition:
            self._ready.add(ref(source))
            self._condition.notify_all()

    # ---- the thread

    def _has_more(self) -> bool:
        return bool(self._ready)

    def _work_one_round(self) -> None:
        with self._condition:
            ready = self._ready
            self._ready = set()
            sources = list(self._sources)
        # Asking a log costs more than waiting for the next round over all of them.
        if time.monotonic() - self._last_full_round >= RETRY_SECONDS:
            ready = set(sources)
            self._last_full_round = time.monotonic()
        unfinished = {
            source
            for source in sources
            if source in ready and self._collect_piece_and_pause(source)
        }
        with self._condition:
            self._ready |= unfinished

    def _collect_piece_and_pause(self, source: ref[CollectSource]) -> bool:
        """Collect one piece of a log, then pause in proportion. Returns whether the log may have more."""
        if self._must_stop():
            return False
        start = time.monotonic()
        num_bytes, is_space_short = self._collect_from_source(source)
        if num_bytes and not is_space_short:
            self._pause((time.monotonic() - start) * (1 / BUSY_SHARE - 1))
        return num_bytes > 0

    def _collect_from_source(self, reference: ref[CollectSource]) -> tuple[int, bool]:
        source = self._claim(reference)
        try:
            num_bytes = 0 if source is None else source.collect_garbage_piece()
            return num_bytes, source is not None and num_bytes > 0 and source.is_space_short
        except StorageError:
            return (
                0,
                False,
            )  # the source remembers errors that its commits must raise; others are tried again
        finally:
            self._release()
