"""Rows of one log moving between its segments: garbage collection piece by piece, and away from files that failed."""

from __future__ import annotations

import threading

import numpy as np

from colonnade import _native
from colonnade.errors import CorruptionError
from colonnade.store.collection import SegmentUse, choose_victims
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
