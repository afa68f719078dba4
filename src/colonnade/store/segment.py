"""One segment: a file of framed records. The bytes are defined in format.md; the asserts repeat its MUSTs.

Legend: N records of a batch. A *place* is `segment number << 32 | record number`; with the
TOMBSTONE bit it is where a deletion is written down. A place of -1 is nowhere.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError
from colonnade.store.disk import Disk, DiskFile, storage_error

MAGIC = b"CLNDROWS"
VERSION = 1
HEADER = struct.Struct("<8sIIQ32sII")  # magic, version, number, record_bytes, identity, zero, crc
assert HEADER.size == 64
TOMBSTONE = 1 << 62
FILE_NAME = re.compile(r"segment-(\d{8})\.rows")
CHUNK_BYTES = 4 << 20  # what is framed, or read back in order, at a time


def frame_dtype(record_bytes: int) -> np.dtype:
    """A frame: id, flags (1 = tombstone), crc32c, payload padded to 8 bytes."""
    padded = -(-record_bytes // 8) * 8
    fields = [("id", "<i8"), ("flags", "<u4"), ("crc", "<u4"), ("payload", "u1", (padded,))]
    dtype = np.dtype(fields)
    assert dtype.itemsize == 16 + padded, dtype
    return dtype


def identity_digest(table: str, identity: str) -> bytes:
    """What a segment's header says about whose rows these are."""
    return hashlib.sha256(f"{table}\0{identity}".encode()).digest()


def file_name(number: int) -> str:
    return f"segment-{number:08d}.rows"


class Segment:
    """A segment file and what the store knows about it. Not thread-safe: the store locks.

    `checksum` is the sum of the header's and every record's crc: with it a manifest names the content,
    not just the file. (A sum, not an xor: crcs are linear, and two swapped payloads cancel in an xor.)
    """

    def __init__(self, file: DiskFile, number: int, record_bytes: int, checksum: int) -> None:
        self.file = file
        self.number = number
        self.record_bytes = record_bytes
        self.dtype = frame_dtype(record_bytes)
        self.checksum = checksum
        self.num_records = 0
        self.num_live = 0
        self.num_tombstones = 0  # that are still the last word on their id
        self.is_synced = False
        self.is_torn = False  # bytes may lie beyond the last good record
        self.is_suspect = (
            False  # a sync failed: the system may have dropped what it held for the disk
        )

    @property
    def first_place(self) -> int:
        return self.number << 32

    @property
    def num_bytes(self) -> int:
        return HEADER.size + self.num_records * self.dtype.itemsize

    def append(self, disk: Disk, ids: np.ndarray, records: np.ndarray | None) -> np.ndarray:
        """Frame and write ids (N,) and records (N, record_bytes), or tombstones; places (N,) int64.

        All or nothing: on StorageError the segment holds what it held.
        """
        chunk_records = max(1, CHUNK_BYTES // self.dtype.itemsize)
        start, checksum = self.num_records, self.checksum
        if self.is_torn:
            disk.truncate(self.file, self.num_bytes)
            self.is_torn = False
        self.is_torn = True
        for first in range(0, len(ids), chunk_records):
            part = slice(first, first + chunk_records)
            frames = np.empty(len(ids[part]), self.dtype)
            _native.frame_records(
                ids[part],
                None if records is None else records[part],
                self.record_bytes,
                self.first_place + start + first,
                as_bytes(frames),
            )
            offset = HEADER.size + (start + first) * self.dtype.itemsize
            disk.append(self.file, offset, as_bytes(frames).reshape(-1).data)
            checksum = add_checksum(checksum, frames)
        self.is_torn = False
        self.is_synced = False
        self.num_records, self.checksum = start + len(ids), checksum
        return np.arange(start, self.num_records, dtype=np.int64) + self.first_place

    def sync(self, disk: Disk) -> None:
        if self.is_torn:
            disk.truncate(self.file, self.num_bytes)
            self.is_torn = False
        self.is_suspect = True
        disk.sync(self.file)
        self.is_suspect = False
        self.is_synced = True

    def frames(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every record in order, checked: (places (n,) int64 without the tombstone bit, frames (n,))."""
        stride = self.dtype.itemsize
        chunk_records = max(1, CHUNK_BYTES // stride)
        for first in range(0, self.num_records, chunk_records):
            frames = np.empty(min(chunk_records, self.num_records - first), self.dtype)
            self._read_whole(as_bytes(frames), HEADER.size + first * stride, first)
            place = self.first_place + first
            bad = _native.check_records(as_bytes(frames), self.record_bytes, place)
            if bad >= 0:
                raise bad_record(self.file.path, first + bad, "its checksum does not match")
            yield np.arange(place, place + len(frames), dtype=np.int64), frames

    def _read_whole(self, out: np.ndarray, offset: int, first: int) -> None:
        view = out.reshape(-1).data
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.file.fd, [view[done:]], offset + done)
            except OSError as error:
                raise storage_error(error, "read", self.file.path) from error
            if got == 0:
                record = first + done // self.dtype.itemsize
                raise bad_record(self.file.path, record, "the file ends inside it")
            done += got


def create_segment(
    disk: Disk, directory: Path, number: int, *, record_bytes: int, digest: bytes
) -> Segment:
    """A new empty segment; nothing is left behind on StorageError."""
    head = HEADER.pack(MAGIC, VERSION, number, record_bytes, digest, 0, 0)[:-4]
    crc = _native.crc32c(np.frombuffer(head, np.uint8))
    file = disk.create(directory / file_name(number))
    try:
        disk.append(file, 0, head + struct.pack("<I", crc))
    except BaseException:
        file.close()
        disk.unlink(file.path)
        raise
    return Segment(file, number, record_bytes, crc)


def open_segment(path: Path, *, record_bytes: int, digest: bytes, num_bytes: int) -> Segment:
    """A sealed segment of `num_bytes`, header checked; its records are not read yet.

    Raises CorruptionError (missing, torn or altered), CheckpointError (another table, run or version).
    """
    try:
        file = DiskFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path}: missing, but its manifest lists it. Restore it from a copy, or go back to an older commit"
        ) from error
    except OSError as error:
        raise storage_error(error, "open", path) from error
    size = os.fstat(file.fd).st_size
    head = os.pread(file.fd, HEADER.size, 0)
    crc = _check_header(path, head, record_bytes, digest)
    if size != num_bytes:
        record = (min(size, num_bytes) - HEADER.size) // frame_dtype(record_bytes).itemsize
        raise bad_record(path, record, f"the file has {size} bytes, its manifest says {num_bytes}")
    segment = Segment(file, int(path.stem.removeprefix("segment-")), record_bytes, crc)
    segment.num_records = (num_bytes - HEADER.size) // segment.dtype.itemsize
    segment.is_synced = True
    return segment


def _check_header(path: Path, head: bytes, record_bytes: int, digest: bytes) -> int:
    if len(head) < HEADER.size:
        raise CorruptionError(f"{path}: got {len(head)} bytes, wanted a header of {HEADER.size}")
    magic, version, number, width, owner, zero, crc = HEADER.unpack(head)
    wanted_crc = _native.crc32c(np.frombuffer(head[:-4], np.uint8))
    if magic != MAGIC or crc != wanted_crc or path.name != file_name(number):
        raise CorruptionError(
            f"{path}: its header is altered or belongs to another file (magic {magic!r}, number {number}, "
            f"crc {crc:08x}, wanted {wanted_crc:08x}). Restore it from a copy, or go back to an older commit"
        )
    if version != VERSION or zero != 0:
        raise CheckpointError(
            f"{path}: got segment format {version}, wanted {VERSION}. Open it with the Colonnade that wrote it"
        )
    if width != record_bytes or owner != digest:
        raise CheckpointError(
            f"{path}: got records of {width} bytes of owner {owner.hex()[:12]}, wanted {record_bytes} bytes of "
            f"owner {digest.hex()[:12]}. Name the run, rank and table that wrote this directory"
        )
    return crc


def bad_record(path: Path, record: int, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: record {record}: {why}. Restore the file from a copy, or go back to an older commit"
    )


def as_bytes(frames: np.ndarray) -> np.ndarray:
    """Frames (n,) as (n, stride) uint8, the same memory."""
    return frames.view(np.uint8).reshape(len(frames), frames.dtype.itemsize)


def add_checksum(checksum: int, frames: np.ndarray) -> int:
    """A segment's checksum after more records."""
    return (checksum + int(frames["crc"].sum(dtype=np.uint64))) % (1 << 64)
