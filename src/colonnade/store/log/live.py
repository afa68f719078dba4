"""Live bitmaps: `live-<step>.bits` marks the records of each segment that are a commit's rows. Format: store/format.md.

A bitmap is (ceil(N / 8),) uint8 of a segment's N records, least significant bit first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colonnade.errors import CorruptionError
from colonnade.formats import VERSIONS, check_version

MAGIC = b"CLNDLIVE"
FORMAT = "colonnade live bitmaps"
VERSION = VERSIONS[FORMAT]
HEADER = struct.Struct("<8sIIQ")  # magic, version, number of segments, step
ENTRY = struct.Struct("<IIII")  # segment, records, live records, zero
FILE_NAME = re.compile(r"live-(0|[1-9]\d*)\.bits")


@dataclass(frozen=True, slots=True)
class LiveRecords:
    """Bitmap of the records of one segment that are rows."""

    segment: int
    num_records: int
    bitmap: np.ndarray

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(np.unpackbits(self.bitmap).view(bool)))


def live_file_name(step: int) -> str:
    return f"live-{step}.bits"


def encode_live_bitmaps(step: int, parts: Sequence[LiveRecords]) -> bytes:
    """Build the content of a (durable) file. A segment with live records only has no bitmap in it."""
    pieces = [HEADER.pack(MAGIC, VERSION, len(parts), step)]
    for part in parts:
        num_live = part.num_live
        pieces.append(ENTRY.pack(part.segment, part.num_records, num_live, 0))
        if num_live < part.num_records:
            pieces.append(_pad_to_words(part.bitmap.tobytes()))
    return b"".join(pieces)


def parse_live_bitmaps(path: Path, content: bytes, step: int) -> list[LiveRecords]:
    """Parse a file's content. Raises CorruptionError if it is not of `step`, CheckpointError for another version."""
    try:
        magic, version, count, file_step = HEADER.unpack_from(content)
        if (magic, file_step) != (MAGIC, step):
            raise ValueError(f"magic {magic!r}, step {file_step}")
        check_version(path, FORMAT, version)
        offset = HEADER.size
        parts = []
        for _ in range(count):
            segment, num_records, num_live, _ = ENTRY.unpack_from(content, offset)
            offset += ENTRY.size
            if num_live == num_records:
                bitmap = np.packbits(np.ones(num_records, bool), bitorder="little")
            else:
                bitmap = np.frombuffer(content, np.uint8, -(-num_records // 8), offset)
                offset += len(_pad_to_words(bytes(len(bitmap))))
            parts.append(LiveRecords(segment, num_records, bitmap))
            if parts[-1].num_live != num_live:
                raise ValueError(
                    f"{parts[-1].num_live} live records of segment {segment}, not {num_live}"
                )
        if offset != len(content):
            raise ValueError(f"{len(content)} bytes, not {offset}")
    except (struct.error, ValueError) as error:
        raise CorruptionError(
            f"{path}: got {error}, wanted the live bitmaps of step {step}. Restore it from a copy, or go back "
            "to an older commit"
        ) from None
    return parts


def unpack_flags(bitmap: np.ndarray, num_records: int) -> np.ndarray:
    """Unpack a bitmap to flags (N,) bool."""
    return np.unpackbits(np.asarray(bitmap), count=num_records, bitorder="little").astype(bool)


def _pad_to_words(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // 8) * 8, b"\0")
