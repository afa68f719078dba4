"""Lines in which ranks say once a second what they are doing: in a file on one host, in the store on several.

A FileStore would grow by every line, so ranks of one host overwrite their part of a file instead.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

PART_BYTES = 1 << 18  # of a file without a name, in memory: what is not written takes none
HEADER = struct.Struct("=II")  # bytes and CRC-32 of the line


class Heartbeats(Protocol):
    silence: str
    """Why this rank cannot read or write lines, in words, where it cannot."""

    def write(self, rank: int, line: str) -> None:
        """Replace this rank's line. Raises RuntimeError where the store is gone."""

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the newest lines of these ranks, of those that have written one."""


class FileHeartbeats:
    """Lines in a file that all ranks of one host have open; each rank overwrites its own part."""

    silence = (
        "this rank's own heartbeat does not run, so nobody can be named: the machine is overloaded, or this process "
        "was stopped"
    )

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # open until the process ends

    def write(self, rank: int, line: str) -> None:
        text = line.encode()
        assert len(text) <= PART_BYTES - HEADER.size
        os.pwrite(self._file, HEADER.pack(len(text), zlib.crc32(text)) + text, rank * PART_BYTES)

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        lines = {}
        for rank in ranks:
            header = os.pread(self._file, HEADER.size, rank * PART_BYTES)
            if len(header) < HEADER.size:
                continue
            size, checksum = HEADER.unpack(header)
            text = os.pread(self._file, size, rank * PART_BYTES + HEADER.size)
            # A line that is being overwritten has the wrong checksum, and is read at the next look.
            if text and zlib.crc32(text) == checksum:
                lines[rank] = text.decode()
        return lines


class StoreHeartbeats:
    """Lines in a store that a process serves on a port, which forgets a line when it is replaced."""

    def __init__(self, store: dist.Store, place: str) -> None:
        """`store` is for one thread alone: its calls may hang. `place`: host and port that it is served at."""
        self._store = store
        self._written: set[int] = set()  # ranks whose lines exist: the store is not asked again
        self.silence = (
            f"the rendezvous at {place} does not answer, so nobody can be named: the process or host that serves it "
            "ended, is stopped or cut off, or this one is"
        )

    def write(self, rank: int, line: str) -> None:
        self._store.set(f"line/{rank}", line)

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        self._written |= {
            r for r in ranks if r not in self._written and self._store.check([f"line/{r}"])
        }
        order = [r for r in ranks if r in self._written]
        lines = self._store.multi_get([f"line/{r}" for r in order]) if order else []
        return {rank: line.decode() for rank, line in zip(order, lines, strict=True)}
