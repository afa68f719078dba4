"""Heartbeats: each rank writes a status line once a second, to a file on one host, to the store on several hosts.

A FileStore would grow with every line, so ranks of one host overwrite their own part of a file instead.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

PART_BYTES = 1 << 18  # of an anonymous file in memory: unwritten pages need no memory
HEADER = struct.Struct("=II")  # length and CRC-32 of the line


class Heartbeats(Protocol):
    """Status lines of all ranks."""

    failure_reason: str
    """Text for messages if this rank cannot read or write lines."""

    def write_line(self, rank: int, line: str) -> None:
        """Replace this rank's line. Raises RuntimeError if the store is gone."""

    def read_lines(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the newest lines of these ranks; a rank that has not written a line is omitted."""


class FileHeartbeats:
    """Heartbeats in a file that all ranks of one host have open; each rank overwrites its own part."""

    failure_reason = (
        "this rank's own heartbeat does not run, so no rank can be named: the machine is overloaded, or this process "
        "was stopped"
    )

    def __init__(self, path: str) -> None:
        """Open the file; it remains open until the process ends."""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write_line(self, rank: int, line: str) -> None:
        text = line.encode()
        assert len(text) <= PART_BYTES - HEADER.size
        os.pwrite(self._file, HEADER.pack(len(text), zlib.crc32(text)) + text, rank * PART_BYTES)

    def read_lines(self, ranks: Sequence[int]) -> dict[int, str]:
        lines = {}
        for rank in ranks:
            header = os.pread(self._file, HEADER.size, rank * PART_BYTES)
            if len(header) < HEADER.size:
                continue
            size, checksum = HEADER.unpack(header)
            text = os.pread(self._file, size, rank * PART_BYTES + HEADER.size)
            # A line that is being overwritten has a wrong checksum; the next read returns it.
            if text and zlib.crc32(text) == checksum:
                lines[rank] = text.decode()
        return lines


class StoreHeartbeats:
    """Heartbeats in a store that a process serves at a port; the store replaces a rank's older line."""

    def __init__(self, store: dist.Store, address: str) -> None:
        """Use `store`, from one thread only, because its calls may hang. `address`: its host and port."""
        self._store = store
        self._written: set[int] = (
            set()
        )  # ranks that have a line, so that the store is not queried again
        self.failure_reason = (
            f"the rendezvous at {address} does not answer, so no rank can be named: the process or host that serves "
            "it ended, is stopped or cut off, or this one is"
        )

    def write_line(self, rank: int, line: str) -> None:
        self._store.set(f"line/{rank}", line)

    def read_lines(self, ranks: Sequence[int]) -> dict[int, str]:
        self._written |= {
            r for r in ranks if r not in self._written and self._store.check([f"line/{r}"])
        }
        order = [r for r in ranks if r in self._written]
        lines = self._store.multi_get([f"line/{r}" for r in order]) if order else []
        return {rank: line.decode() for rank, line in zip(order, lines, strict=True)}
