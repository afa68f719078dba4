"""Format of segment files, as bytes. Defined in store/format.md; the asserts repeat its MUSTs.

Legend: N records of a segment. A *location* is `segment number << 32 | record number`.
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
from colonnade.files.disk import DiskFile, storage_error
from colonnade.files.untrusted import open_regular_file
from colonnade.formats import VERSIONS, check_version

MAGIC = b"CLNDROWS"
FORMAT = "colonnade segment"
VERSION = VERSIONS[FORMAT]
HEADER = struct.Struct("<8sIIQ32sII")  # magic, version, number, record_bytes, owner, birth, crc
CRC = struct.Struct("<I")  # before each record's payload
assert HEADER.size == 64
FILE_NAME = re.compile(r"segment-(\d{8})\.(rows|keys)")
PAGE = 4096
DEFAULT_CHUNK_BYTES = 1 << 20  # of one write
PIECE_BYTES = 4 << 20  # of one sequential read


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """Properties that all segments of a store share."""

    record_bytes: int
    owner: bytes  # `owner_digest`

    @property
    def dtype(self) -> np.dtype:
        """Type of a frame: crc32c, payload padded to 4 bytes."""
        padded = self.stride - CRC.size
        return np.dtype([("crc", "<u4"), ("payload", "u1", (padded,))])

    @property
    def stride(self) -> int:
        return CRC.size + -(-self.record_bytes // 4) * 4

    def num_bytes(self, num_records: int) -> int:
        return HEADER.size + num_records * self.stride

    def chunk_bytes(self, wanted: int) -> int:
        """Return `wanted`, or the smallest number of whole pages that fits a frame."""
        return max(wanted, -(-self.num_bytes(1) // PAGE) * PAGE)


def owner_digest(table: str, identity: str) -> bytes:
    """Return the digest in a segment's header that identifies its rows' table and store."""
    return hashlib.sha256(f"{table}\0{identity}".encode()).digest()


def segment_file_name(number: int) -> str:
    return f"segment-{number:08d}.rows"


def encode_header(number: int, shape: SegmentShape, birth: int) -> bytes:
    """Build a segment's header. birth: 32 random bits that distinguish this file from another of its number."""
    head = HEADER.pack(MAGIC, VERSION, number, shape.record_bytes, shape.owner, birth, 0)[:-4]
    return head + struct.pack("<I", crc32c(head))


def header_crc(head: bytes) -> int:
    return int.from_bytes(head[60:64], "little")


def crc32c(data: bytes) -> int:
    return _native.crc32c(np.frombuffer(data, np.uint8))


def open_sealed_segment(path: Path, shape: SegmentShape, num_bytes: int, crc: int) -> DiskFile:
    """Open a sealed segment of `num_bytes` and header checksum `crc`; its records are not read yet.

    Raises CorruptionError (missing, torn or altered), CheckpointError (another table, run or version), StorageError
    (unreadable).
    """
    file = open_listed_file(path, getattr(os, "O_DIRECT", 0))  # bypass the page cache if possible
    size = os.fstat(file.fd).st_size
    head = bytes(read_available_bytes(file, 0, HEADER.size)) if size >= HEADER.size else b""
    check_segment_header(path, head, shape)
    if size != num_bytes:
        record = (min(size, num_bytes) - HEADER.size) // shape.stride
        raise corrupt_record_error(
            path, record, f"the file has {size} bytes, its manifest says {num_bytes}"
        )
    if header_crc(head) != crc:
        raise CorruptionError(
            f"{path}: got header checksum {header_crc(head):08x}, wanted {crc:08x}: these are rows of another "
            "commit. Restore the file from a copy, or go back to an older commit"
        )
    return file


def open_listed_file(path: Path, flags: int = 0) -> DiskFile:
    """Open a file that a manifest lists, with these flags if the file system knows them. Raises CorruptionError if it
    is missing, StorageError as `open_regular_file`."""
    try:
        return open_regular_file(path, flags=flags)
    except StorageError as error:
        if error.errno == errno.EINVAL and flags:
            return open_listed_file(path)
        if error.errno == errno.ENOENT:
            raise missing_file_error(path) from error
        raise


def check_segment_header(path: Path, head: bytes, shape: SegmentShape) -> None:
    if len(head) < HEADER.size:
        raise CorruptionError(
            f"{path}: got fewer than {HEADER.size} bytes, wanted a segment's header. Restore it from a copy, or "
            "go back to an older commit"
        )
    magic, version, number, width, owner, _, crc = HEADER.unpack(head)
    wanted_crc = crc32c(head[:-4])
    if magic != MAGIC or crc != wanted_crc or path.name != segment_file_name(number):
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
    """Source of the ids of records: `key_list.Keys`."""

    @property
    def num_records(self) -> int: ...

    def ids(self, first_record: int = 0, last_record: int | None = None) -> np.ndarray: ...


def read_frames(
    file: DiskFile,
    segment_number: int,
    segment_shape: SegmentShape,
    keys: KeySource,
    first_record: int = 0,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Read and check records from `first_record` on, in order.

    Yields the number of the first record, ids (n,) int64, frames (n,) of `segment_shape.dtype`.

    Raises CorruptionError naming file and record, StorageError.
    """
    stride = segment_shape.stride
    num_records = keys.num_records
    piece = max(1, PIECE_BYTES // stride)
    while first_record < num_records:
        count = min(piece, num_records - first_record)
        data = read_available_bytes(file, segment_shape.num_bytes(first_record), count * stride)
        if len(data) < count * stride:
            raise corrupt_record_error(
                file.path, first_record + len(data) // stride, "the file ends inside it"
            )
        frames = np.frombuffer(data, segment_shape.dtype)
        rows = frames.view(np.uint8).reshape(count, stride)
        ids = keys.ids(first_record, first_record + count)
        bad = _native.check_records(
            ids, rows, segment_shape.record_bytes, segment_number << 32 | first_record
        )
        if bad >= 0:
            raise corrupt_record_error(file.path, first_record + bad, "its checksum does not match")
        yield first_record, ids, frames
        first_record += count


def verify_records(
    file: DiskFile,
    segment_number: int,
    segment_shape: SegmentShape,
    keys: KeySource,
    header_crc: int,
    checksum: int,
) -> None:
    """Read and check all records of a segment. Raises CorruptionError if one of them, or their sum, is wrong."""
    total = header_crc
    for _, _, frames in read_frames(file, segment_number, segment_shape, keys):
        total += int(frames["crc"].sum(dtype=np.uint64))
    if total % (1 << 64) != checksum:
        raise CorruptionError(
            f"{file.path}: got checksum {total % (1 << 64):016x}, wanted {checksum:016x}: these are rows of another "
            "commit. Restore the file from a copy, or go back to an older commit"
        )


def read_available_bytes(file: DiskFile, byte_offset: int, max_bytes: int) -> memoryview:
    """Read the file's bytes from `byte_offset`, fewer if it ends. Reads whole pages, as direct input requires."""
    start = byte_offset // PAGE * PAGE
    end = -(-(byte_offset + max_bytes) // PAGE) * PAGE
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
    return buffer[
        byte_offset - start : max(byte_offset - start, min(byte_offset + max_bytes - start, done))
    ]


def corrupt_record_error(path: Path, record: int, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: record {record}: {why}. Restore the file from a copy, or go back to an older commit "
        "(--at STEP)"
    )


def missing_file_error(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path}: missing, but its manifest lists it. Restore it from a copy, or go back to an older commit"
    )
