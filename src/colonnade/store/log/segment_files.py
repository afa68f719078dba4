"""Segment files of one log: created, appended, finished, synced, opened and removed.

Format of the bytes: store/format.md.

The writer's thread alone calls `write_next_chunk`; any thread may call the other methods; a lock guards the lists.
"""

from __future__ import annotations

import resource
import secrets
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colonnade import _native
from colonnade.errors import CorruptionError
from colonnade.files.disk import Disk, DiskFile
from colonnade.files.durable import TEMPORARY_SUFFIX
from colonnade.store.contract import SegmentEntry
from colonnade.store.log import key_list as key_lists
from colonnade.store.log import segment as segments
from colonnade.store.log.key_list import Keys
from colonnade.store.log.live import LiveRecords
from colonnade.store.log.segment import SegmentShape
from colonnade.store.log.stripes import Stripes, build_no_space_error

MAX_FILES = 1 << 16


@dataclass(slots=True)
class SegmentFile:
    """File of one segment, and its progress. Number of records and checksum are valid once it is complete."""

    number: int
    stripe: int
    file: DiskFile
    header_crc: int
    num_bytes: int = 0  # on the disk
    reserved_bytes: int = 0  # of its stripe's space, its key list's included
    growth_bytes: int = 0  # that it may still take
    num_records: int = 0
    checksum: int = 0
    keys_bytes: int = 0
    is_complete: bool = False  # sealed, all of it on the disk, its key list too
    is_synced: bool = False
    is_suspect: bool = False  # a sync failed: the system may have dropped unwritten pages
    keys: DiskFile | None = None  # key list, once it is complete

    def read_keys(self) -> Keys:
        """Read the ids of a complete segment. Raises CorruptionError, StorageError."""
        assert self.keys is not None
        return key_lists.read_key_list(self.keys, self.number, self.num_records, self.checksum)


def allow_many_files() -> None:
    """Raise this process's limit on open files: a store keeps every segment open, and the default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LogFiles:
    """Files of one log (see the module). `bytes_written` counts bytes of segments and key lists since construction."""

    def __init__(
        self,
        log: _native.RowLog,
        disk: Disk,
        stripes: Stripes,
        shape: SegmentShape,
        segment_bytes: int,
    ) -> None:
        """segment_bytes: largest size of a segment."""
        self.log = log
        self.disk = disk
        self.stripes = stripes
        self.shape = shape
        self.parts: dict[int, SegmentFile] = {}  # the log's, those in progress included
        self.bytes_written = 0
        self.longest_bytes = -(-segment_bytes // segments.PAGE) * segments.PAGE
        self.full_records = max(1, (segment_bytes - segments.HEADER.size) // shape.stride)
        self._removable: dict[
            int, tuple[int, int]
        ] = {}  # segments the log forgot: stripe and bytes
        self._chunk: _native.Chunk | None = None  # taken from the log, not yet written
        self._unfinished: set[int] = set()  # segments with all records written, but no key list
        self._lock = threading.Lock()

    # ---- the writer's thread

    def write_next_chunk(self) -> int:
        """Write one chunk, or the end of a segment. Returns the bytes written, 0: nothing to do.

        Raises StorageError: nothing is lost, and the next call tries again.
        """
        if self._chunk is None:
            self._chunk = self.log.next_chunk()
        if self._chunk is None:
            return (
                self._finish_segment(self.parts[min(self._unfinished)]) if self._unfinished else 0
            )
        chunk = self._chunk
        part = self.parts.get(chunk.segment)
        if part is None:
            part = self._create_segment(chunk.segment, len(chunk.data))
        data = chunk.data
        self._reserve_space(part, chunk.offset + len(data))
        if chunk.offset == 0:
            data[: segments.HEADER.size] = self._header
        self.disk.append(part.file, chunk.offset, data)
        part.num_bytes = chunk.offset + len(data)
        self.log.written(chunk)
        self._chunk = None
        self.bytes_written += len(data)
        if chunk.is_last:
            self._finish_segment(part)
        return len(data)

    @property
    def has_work(self) -> bool:
        """True if `write_next_chunk` would do something now."""
        return bool(self._unfinished) or self.log.pending_bytes > 0

    def _create_segment(self, segment_number: int, initial_bytes: int) -> SegmentFile:
        with self._lock:
            stripe_bytes: dict[int, int] = {}
            for other in self.parts.values():
                stripe_bytes[other.stripe] = stripe_bytes.get(other.stripe, 0) + other.num_bytes
            stripe = self.stripes.choose_stripe_number(
                stripe_bytes, initial_bytes, self.longest_bytes
            )
        self._header = segments.encode_header(segment_number, self.shape, secrets.randbits(32))
        path = self.stripes.directories[stripe] / segments.segment_file_name(segment_number)
        file = self.disk.create(path, direct=True)
        part = SegmentFile(segment_number, stripe, file, segments.header_crc(self._header))
        self.log.attach(segment_number, file.fd)
        with self._lock:
            self.parts[segment_number] = part
        self._set_growth(part, self.longest_bytes)
        return part

    def _reserve_space(self, segment_file: SegmentFile, total_bytes: int) -> None:
        """Reserve space before the file grows, or after it shrank. Raises StorageError if its directory is full."""
        space = self.stripes.spaces.get(segment_file.stripe)
        if space is None:
            return
        more = total_bytes - segment_file.reserved_bytes
        if more < 0:
            space.adjust_used(more)
        elif not space.reserve_bytes(more):
            raise build_no_space_error(
                [self.stripes.spaces[n] for n in sorted(self.stripes.spaces)], more
            )
        segment_file.reserved_bytes = total_bytes
        if segment_file.growth_bytes:
            self._set_growth(segment_file, max(0, self.longest_bytes - total_bytes))

    def _set_growth(self, part: SegmentFile, num_bytes: int) -> None:
        if space := self.stripes.spaces.get(part.stripe):
            space.adjust_growth(num_bytes - part.growth_bytes)
            part.growth_bytes = num_bytes

    def _adjust_used(self, stripe: int, num_bytes: int) -> None:
        if space := self.stripes.spaces.get(stripe):
            space.adjust_used(num_bytes)

    def _finish_segment(self, part: SegmentFile) -> int:
        self._unfinished.add(part.number)  # until its key list is written
        records, num_bytes, checksum = self.log.sealed(part.number)
        checksum = (checksum + part.header_crc) % (1 << 64)
        self.disk.truncate(part.file, num_bytes)
        ids = np.asarray(self.log.keys(part.number))
        keys = key_lists.encode_key_list(part.number, ids, checksum)
        self._set_growth(part, 0)
        self._reserve_space(part, num_bytes + len(keys))
        path = part.file.path.with_name(key_lists.key_list_file_name(part.number))
        self.disk.unlink(path)  # of a failed attempt
        part.keys = self.disk.create(path)
        self.disk.append(part.keys, 0, keys)
        self.bytes_written += len(keys)
        with self._lock:
            part.num_records = records
            part.num_bytes = num_bytes
            part.checksum = checksum
            part.keys_bytes = len(keys)
            part.is_complete = True
        self._unfinished.discard(part.number)
        self.log.forget_keys(part.number)
        return len(keys)

    # ---- any thread

    @property
    def pending_bytes(self) -> int:
        """Bytes of full chunks that are not written yet."""
        return self.log.pending_bytes

    def list_sealed_unfinished(self) -> set[int]:
        """Return the segments that are sealed and not yet complete, for which a commit waits."""
        numbers, _, _, sealed = (np.asarray(column) for column in self.log.segments())
        with self._lock:
            finished = {n for n, part in self.parts.items() if part.is_complete}
            # Segments that are being forgotten were complete.
            return set(numbers[sealed.astype(bool)].tolist()) - finished - self._removable.keys()

    def complete_segments(self) -> dict[int, SegmentFile]:
        with self._lock:
            return {n: part for n, part in self.parts.items() if part.is_complete}

    def find_segment(self, segment_number: int) -> tuple[SegmentFile | None, int]:
        """Return a segment's file and its number of whole records, perhaps with padding before it is complete."""
        with self._lock:
            part = self.parts.get(segment_number)
            if part is None:
                return None, 0
            return part, max(0, part.num_bytes - segments.HEADER.size) // self.shape.stride

    def path_of(self, number: int) -> Path:
        with self._lock:
            part = self.parts.get(number)
        return part.file.path if part else self.stripes.home / segments.segment_file_name(number)

    def sync_segment(self, segment_file: SegmentFile) -> None:
        """Make a complete segment and its key list durable; their names only after `sync_directories`."""
        segment_file.is_suspect = True
        self.disk.sync(segment_file.file)
        assert segment_file.keys is not None
        self.disk.sync(segment_file.keys)
        segment_file.is_suspect = False
        segment_file.is_synced = True

    def sync_directories(self, stripes: Collection[int]) -> None:
        for number in sorted(set(stripes)):
            self.disk.sync_dir(self.stripes.directories[number])

    def load_segment(self, entry: SegmentEntry, live: LiveRecords) -> None:
        """Load a segment of a commit into the log. Raises CorruptionError, CheckpointError, StorageError."""
        name = segments.segment_file_name(entry.number)
        path = self.stripes.find_stripe_file(name, entry.stripe)
        file = segments.open_sealed_segment(path, self.shape, entry.num_bytes, entry.header_crc)
        if entry.num_bytes != self.shape.num_bytes(entry.num_records):
            raise CorruptionError(
                f"{path}: its manifest says {entry.num_bytes} bytes and {entry.num_records} records, which do not "
                "agree. Go back to an older commit"
            )
        keys = self.stripes.find_stripe_file(
            key_lists.key_list_file_name(entry.number), entry.stripe
        )
        part = SegmentFile(entry.number, entry.stripe, file, entry.header_crc)
        part.keys = key_lists.open_key_list(keys)
        if path.parent == self.stripes.home:
            part.stripe = 0
        part.num_bytes = entry.num_bytes
        part.num_records = entry.num_records
        part.checksum = entry.checksum
        part.keys_bytes = entry.keys_bytes
        part.reserved_bytes = _total_bytes(entry)
        ids = part.read_keys().ids()
        part.is_complete = part.is_synced = True
        try:
            self.log.load(entry.number, ids, live.bitmap, -1)
        except (ValueError, IndexError) as error:
            raise CorruptionError(
                f"{keys}: {error}: it does not fit the other segments of this commit. Go back to an older commit"
            ) from None
        self.log.attach(entry.number, file.fd)
        self.parts[entry.number] = part
        self._adjust_used(part.stripe, part.reserved_bytes)

    def mark_segment_removable(self, segment_number: int) -> None:
        """Forget a segment that the log does not need.

        Its file stays until `remove_forgotten_files`, and until reads of it end."""
        with self._lock:
            part = self.parts.pop(segment_number)
            self._removable[segment_number] = part.stripe, part.reserved_bytes
        self.log.detach(segment_number)
        self.log.forget(segment_number)

    def remove_forgotten_files(self, referenced_segments: Collection[int]) -> None:
        """Remove the files of forgotten segments that no manifest lists. Raises StorageError (call again)."""
        with self._lock:
            gone = {
                n: entry for n, entry in self._removable.items() if n not in referenced_segments
            }
        for number, (stripe, num_bytes) in sorted(gone.items()):
            for name in (segments.segment_file_name(number), key_lists.key_list_file_name(number)):
                if stripe in self.stripes.directories:
                    self.disk.unlink(self.stripes.find_stripe_file(name, stripe))
            with self._lock:
                self._removable.pop(number, None)
            self._adjust_used(stripe, -num_bytes)

    def track_removable(self, entry: SegmentEntry) -> None:
        """Remember a segment that older commits list and this one does not, for `remove_forgotten_files`."""
        if entry.number in self.parts or entry.number in self._removable:
            return
        stripe = self.stripes.find_stripe(segments.segment_file_name(entry.number), entry.stripe)
        num_bytes = 0 if stripe is None else _total_bytes(entry)
        stripe = entry.stripe if stripe is None else stripe
        self._removable[entry.number] = stripe, num_bytes
        self._adjust_used(stripe, num_bytes)

    def remove_leftover_files(self, referenced: Collection[int]) -> None:
        """Remove files that no retained commit lists, from every directory of the store, when it opens."""
        for number, path in list_segment_files(self.stripes):
            if number not in referenced:
                self.disk.unlink(path)

    def close(self) -> None:
        """Detach the files; each closes when its last read ends."""
        with self._lock:
            numbers = list(self.parts)
            self.parts = {}
        for number in numbers:
            self.log.detach(number)


def list_segment_files(stripes: Stripes) -> Iterator[tuple[int, Path]]:
    """Yield the files of segments in every directory of a store, each with its segment's number."""
    for directory in stripes.directories.values():
        for path in sorted(directory.iterdir()):
            match = segments.FILE_NAME.fullmatch(path.name.removesuffix(TEMPORARY_SUFFIX))
            if match:
                yield int(match[1]), path


def _total_bytes(entry: SegmentEntry) -> int:
    """Return the bytes of a segment and its key list."""
    return entry.num_bytes + entry.keys_bytes
