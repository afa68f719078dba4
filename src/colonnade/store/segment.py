"""The bytes of a segment file. Defined in format.md; the asserts repeat its MUSTs.

Legend: N records of a segment. A *place* is `segment number << 32 | record number`.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.formats import VERSIONS, check_version
from colonnade.store.disk import DiskFile, storage_error
from colonnade.store.untrusted import open_regular

MAGIC = b"CLNDROWS"
FORMAT = "colonnade segment"
VERSION = VERSIONS[FORMAT]
HEADER = struct.Struct("<8sIIQ32sII")  # magic, version, number, record_bytes, owner, birth, crc
CRC = struct.Struct("<I")  # before each record's payload
assert HEADER.size == 64
FILE_NAME = re.compile(r"segment-(\d{8})\.(rows|keys)")
PAGE = 4096
PIECE_BYTES = 4 << 20  # what is read in order at a time


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What all segments of a store have in common."""

    record_bytes: int
    owner: bytes  # `owner_digest`

    @property
    def dtype(self) -> np.dtype:
        """A frame: crc32c, payload padded to 4 bytes."""
        padded = self.stride - CRC.size
        return np.dtype([("crc", "<u4"), ("payload", "u1", (padded,))])

    @property
    def stride(self) -> int:
        return CRC.size + -(-self.record_bytes // 4) * 4

    def num_bytes(self, num_records: int) -> int:
        return HEADER.size + num_records * self.stride

    def chunk_bytes(self, wanted: int) -> int:
        """`wanted`, or as many whole pages as hold a frame."""
        return max(wanted, -(-self.num_bytes(1) // PAGE) * PAGE)


def owner_digest(table: str, identity: str) -> bytes:
    """What a segment's header says about whose rows these are."""
    return hashlib.sha256(f"{table}\0{identity}".encode()).digest()


def file_name(number: int) -> str:
    return f"segment-{number:08d}.rows"


def header_bytes(number: int, shape: SegmentShape, birth: int) -> bytes:
    """`birth`: 32 random bits, which tell this file from another of its number."""
    head = HEADER.pack(MAGIC, VERSION, number, shape.record_bytes, shape.owner, birth, 0)[:-4]
    return head + struct.pack("<I", crc32c(head))


def header_crc(head: bytes) -> int:
    return int.from_bytes(head[60:64], "little")


def crc32c(data: bytes) -> int:
    return _native.crc32c(np.frombuffer(data, np.uint8))


def open_segment(path: Path, shape: SegmentShape, num_bytes: int, crc: int) -> DiskFile:
    """A sealed segment of `num_bytes` and header checksum `crc`; its records are not read yet.

    Raises CorruptionError (missing, torn or altered), CheckpointError (another table, run or version).
    """
    file = open_listed(path, getattr(os, "O_DIRECT", 0))  # past the page cache where it can
    size = os.fstat(file.fd).st_size
    head = bytes(read_span(file, 0, HEADER.size)) if size >= HEADER.size else b""
    check_header(path, head, shape)
    if size != num_bytes:
        record = (min(size, num_bytes) - HEADER.size) // shape.stride
        raise bad_record(path, record, f"the file has {size} bytes, its manifest says {num_bytes}")
    if header_crc(head) != crc:
        raise CorruptionError(
            f"{path}: got header checksum {header_crc(head):08x}, wanted {crc:08x}: these are rows of another "
            "commit. Restore the file from a copy, or go back to an older commit"
        )
    return file


def open_listed(path: Path, flags: int = 0) -> DiskFile:
    """Open a file that a manifest lists, with these flags if the file system knows them. Raises CorruptionError where
    it is missing, StorageError as `open_regular`."""
    try:
        return open_regular(path, flags=flags)
    except StorageError as error:
        if error.errno == errno.EINVAL and flags:
            return open_listed(path)
        if error.errno == errno.ENOENT:
            raise missing(path) from error
        raise


def check_header(path: Path, head: bytes, shape: SegmentShape) -> None:
    if len(head) < HEADER.size:
        raise CorruptionError(
            f"{path}: got fewer than {HEADER.size} bytes, wanted a segment's header. Restore it from a copy, or "
            "go back to an older commit"
        )
    magic, version, number, width, owner, _, crc = HEADER.unpack(head)
    wanted_crc = crc32c(head[:-4])
    if magic != MAGIC or crc != wanted_crc or path.name != file_name(number):
        raise CorruptionError(
            f"{path}: its header is altered or belongs to another file (magic {magic!r}, number {number}, "
            f"crc {crc:08x}, wanted {wanted_crc:08x}). Restore it from a copy, or go back to an older commit"
        )
    check_version(path, FORMAT, version)
    if width != shape.record_bytes or owner != shape.owner:
        raise CheckpointError(
            f"{path}: got records of {width} bytes of owner {owner.hex()[:12]}, wanted {shape.record_bytes} bytes "
            f"of owner {shape.owner.hex()[:12]}. Name the run, rank and table that wrote this directory"
        )


class KeySource(Protocol):
    """Ids of records: `key_list.Keys`."""

    @property
    def num_records(self) -> int: ...

    def ids(self, first: int = 0, last: int | None = None) -> np.ndarray: ...


def read_frames(
    file: DiskFile, number: int, shape: SegmentShape, keys: KeySource, first: int = 0
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Records from `first` on in order, checked: (number of the first, ids (n,) int64, frames (n,) of `shape.dtype`).

    Raises CorruptionError naming file and record, StorageError.
    """
    stride, num_records = shape.stride, keys.num_records
    piece = max(1, PIECE_BYTES // stride)
    while first < num_records:
        count = min(piece, num_records - first)
        data = read_span(file, shape.num_bytes(first), count * stride)
        if len(data) < count * stride:
            raise bad_record(file.path, first + len(data) // stride, "the file ends inside it")
        frames = np.frombuffer(data, shape.dtype)
        rows = frames.view(np.uint8).reshape(count, stride)
        ids = keys.ids(first, first + count)
        bad = _native.check_records(ids, rows, shape.record_bytes, number << 32 | first)
        if bad >= 0:
            raise bad_record(file.path, first + bad, "its checksum does not match")
        yield first, ids, frames
        first += count


def check_rows(
    file: DiskFile,
    number: int,
    shape: SegmentShape,
    keys: KeySource,
    header_crc: int,
    checksum: int,
) -> None:
    """Reads all records. Raises CorruptionError where one, or their sum, is not what the segment's checksum says."""
    found = header_crc
    for _, _, frames in read_frames(file, number, shape, keys):
        found += int(frames["crc"].sum(dtype=np.uint64))
    if found % (1 << 64) != checksum:
        raise CorruptionError(
            f"{file.path}: got checksum {found % (1 << 64):016x}, wanted {checksum:016x}: these are rows of another "
            "commit. Restore the file from a copy, or go back to an older commit"
        )


def read_span(file: DiskFile, offset: int, length: int) -> memoryview:
    """The file's bytes from `offset`, fewer where it ends. By whole pages, as direct input wants it."""
    start, end = offset // PAGE * PAGE, -(-(offset + length) // PAGE) * PAGE
    buffer = memoryview(mmap.mmap(-1, end - start))
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(file.fd, [buffer[done:]], start + done)
        except OSError as error:
            raise storage_error(error, "read", file.path) from error
        done += got
        if got == 0 or got % PAGE:
            break
    return buffer[offset - start : max(offset - start, min(offset + length - start, done))]


def bad_record(path: Path, record: int, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: record {record}: {why}. Restore the file from a copy, or go back to an older commit "
        "(--at STEP)"
    )


def missing(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path}: missing, but its manifest lists it. Restore it from a copy, or go back to an older commit"
    )
