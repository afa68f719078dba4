"""Key lists: `segment-<number>.keys` has the ids of a segment's records, which no other file has.

Format: store/format.md.

Legend: N records of a segment.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colonnade.errors import CorruptionError
from colonnade.files.disk import DiskFile, storage_error
from colonnade.files.durable import append_checksum, checksum_line, verify_content
from colonnade.formats import VERSIONS, check_version
from colonnade.store.log.segment import open_listed_file

MAGIC = b"CLNDKEYS"
FORMAT = "colonnade key list"
VERSION = VERSIONS[FORMAT]
# magic, version, number, N, checksum of the segment, base, width, zero
HEADER = struct.Struct("<8sIIQQqII")
assert HEADER.size == 48
ID_BYTES = 8
MAX_BYTES = HEADER.size + len(checksum_line(b""))
"""Size of a key list beyond `ID_BYTES` a record."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Ids of N records, packed in `width` bytes each as differences to `base`, the smallest id."""

    num_records: int
    base: int
    width: int
    packed: memoryview | bytes
    """`width` * N bytes, little-endian, and at least `ID_BYTES` more, of any value."""
    start: int = 0
    """Offset of the first id in `packed`."""

    @classmethod
    def pack_ids(cls, ids: np.ndarray) -> Keys:
        """Pack ids (N,) int64."""
        base = int(ids.min()) if len(ids) else 0
        beyond = ids.astype("<u8") - np.uint64(base % (1 << 64))
        width = (int(beyond.max(initial=0)).bit_length() + 7) // 8
        columns = beyond.view(np.uint8).reshape(len(ids), ID_BYTES)[:, :width]
        # Arrays are copied without the interpreter's lock, bytes with it: training would wait for it.
        packed = np.zeros(len(ids) * width + ID_BYTES, np.uint8)
        packed[: len(ids) * width].reshape(len(ids), width)[:] = columns
        return cls(len(ids), base, width, packed.data)

    def ids(self, first_record: int = 0, last_record: int | None = None) -> np.ndarray:
        """Unpack the ids (n,) int64 of records `first_record` .. `last_record` (to the end)."""
        count = (self.num_records if last_record is None else last_record) - first_record
        if self.width == 0:
            return np.full(count, self.base, np.int64)
        # Each id is read with the bytes behind it, which are then masked off.
        at = self.start + first_record * self.width
        wide = np.ndarray((count,), "<u8", self.packed, at, (self.width,))
        beyond = wide & np.uint64((1 << 8 * self.width) - 1)
        beyond += np.uint64(self.base % (1 << 64))
        return np.asarray(beyond).view(np.int64)


def key_list_file_name(number: int) -> str:
    return f"segment-{number:08d}.keys"


def encode_key_list(number: int, ids: np.ndarray, checksum: int) -> memoryview:
    """Build a key list from the ids (N,) int64 of a sealed segment in record order."""
    keys = Keys.pack_ids(ids)
    head = (MAGIC, VERSION, number, keys.num_records, checksum, keys.base, keys.width, 0)
    packed = np.frombuffer(keys.packed, np.uint8, keys.width * keys.num_records)
    return append_checksum(np.concatenate((np.frombuffer(HEADER.pack(*head), np.uint8), packed)))


def open_key_list(path: Path) -> DiskFile:
    """Open a key list. Raises CorruptionError if a file that a manifest lists is missing, StorageError."""
    return open_listed_file(path)


def read_key_list(file: DiskFile, segment_number: int, num_records: int, checksum: int) -> Keys:
    """Read a key list. Raises CorruptionError (torn, altered, of another segment), CheckpointError (version),
    StorageError."""
    data = _read_key_list_file(file)
    content = verify_content(file.path, data)
    fields = HEADER.unpack_from(content.ljust(HEADER.size, b"\0"))
    base, width = fields[5:7]
    if fields[0] == MAGIC:
        check_version(file.path, FORMAT, fields[1])
    wanted = (MAGIC, VERSION, segment_number, num_records, checksum, base, width, 0)
    length = HEADER.size + width * num_records
    if fields != wanted or width > ID_BYTES or len(content) != length:
        raise CorruptionError(
            f"{file.path}: got {len(content)} bytes that begin with {content[: HEADER.size].hex()}, wanted the keys "
            f"of {num_records} records, {HEADER.pack(*wanted[:5], 0, 0, 0)[:32].hex()}: they are of another commit. "
            "Restore the file from a copy, or go back to an older commit"
        )
    return Keys(num_records, base, width, data, HEADER.size)  # the checksum line follows the ids


def _read_key_list_file(file: DiskFile) -> bytes:
    try:
        size = os.fstat(file.fd).st_size
        pieces: list[bytes] = []
        done = 0
        while done < size and (piece := os.pread(file.fd, size - done, done)):
            pieces.append(piece)
            done += len(piece)
    except OSError as error:
        raise storage_error(error, "read", file.path) from error
    return b"".join(pieces)
