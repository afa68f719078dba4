"""The bytes of store/format.md, written down a second time from that page."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

OWNER = hashlib.sha256(b"item\0run-7/rank-0").digest()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def durable(content: bytes) -> bytes:
    return content + b"\ncrc32c %08x\n" % crc32c(content)


def segment(
    number: int, record_bytes: int, rows: list[tuple[int, bytes]], birth: int = 77
) -> tuple[bytes, int, int]:
    """A segment's bytes, its header's crc and its checksum."""
    head = struct.pack("<8sIIQ32sI", b"CLNDROWS", 2, number, record_bytes, OWNER, birth)
    crc = crc32c(head)
    data, checksum = head + struct.pack("<I", crc), crc
    for r, (row_id, payload) in enumerate(rows):
        body = payload.ljust(-(-record_bytes // 4) * 4, b"\0")
        of_record = crc32c(struct.pack("<Qq", number << 32 | r, row_id) + body)
        data += struct.pack("<I", of_record) + body
        checksum += of_record
    return data, crc, checksum % 2**64


def key_list(number: int, ids: list[int], checksum: int) -> bytes:
    base = min(ids)
    width = next(w for w in range(9) if max(ids) - base < 256**w)
    head = struct.pack("<8sIIQQqII", b"CLNDKEYS", 2, number, len(ids), checksum, base, width, 0)
    return durable(head + b"".join((i - base).to_bytes(width, "little") for i in ids))


def live_content(step: int, parts: list[tuple[int, list[bool]]]) -> bytes:
    """Content of (segment, is record live) pairs; without the last line."""
    content = struct.pack("<8sIIQ", b"CLNDLIVE", 2, len(parts), step)
    for number, flags in parts:
        content += struct.pack("<IIII", number, len(flags), sum(flags), 0)
        if not all(flags):
            bits = np.packbits(flags, bitorder="little").tobytes()
            content += bits.ljust(-(-len(bits) // 8) * 8, b"\0")
    return content
