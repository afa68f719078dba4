"""Speed of a machine: rows in memory, writes and random reads of a directory's disk.

Frozen values that can be printed and converted to and from JSON; `planning.measure` measures them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from colonnade.formats import make_format_stamp, parse_stamped_json

PAGE = 4096


@dataclass(frozen=True, slots=True)
class RowRate:
    """Speed of row operations with one thread pool, for random rows of a table larger than the processor's caches.

    Rates of lookups do not depend on the width. 0: not measured."""

    width: int
    """Number of floats of a row."""
    gathered: float
    """Number of rows gathered and pooled per second."""
    updated: float
    """Number of rows updated per second."""
    planned: float = 0.0
    """Number of lookups grouped by row per second."""
    packed: float = 0.0
    """Number of lookups per second packed for the rank that pools them, and joined to a batch there."""


@dataclass(frozen=True, slots=True)
class DirectoryRate:
    """Speed of the disk under one directory."""

    path: str
    is_direct: bool
    """True if reads and writes bypass the file system's cache; otherwise the rates are those of the cache."""
    written: float
    """Bytes written per second, in runs of 1 MiB."""
    reader: str
    """Method of the store's reader for this directory: "ring" (io_uring) or "threads"."""
    pages: float
    """Number of rows that the store's reader reads per second, each on a page of its own."""
    latency: float
    """Latency of reading a single row, 99th percentile, in seconds."""
    processor_seconds: float
    """Processor time of one row."""


@dataclass(frozen=True, slots=True)
class Device:
    """Measured speed of a machine: processors, row operations in memory, directories."""

    processors: int
    """Number of usable processors."""
    memory: tuple[RowRate, ...]
    """Speed of row operations by width."""
    directories: tuple[DirectoryRate, ...]
    """Speed of each measured directory."""

    def to_json(self) -> str:
        """Return the text of `device.json`."""
        return json.dumps({**make_format_stamp("colonnade device"), **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Device:
        """Read the text of `device.json`."""
        values = parse_stamped_json("device.json", text, "colonnade device")
        directories = tuple(DirectoryRate(**fields) for fields in values["directories"])
        memory = tuple(RowRate(**rate) for rate in values["memory"])
        return cls(values["processors"], memory, directories)

    def __str__(self) -> str:
        lines = [f"{self.processors} processors"]
        for rate in self.memory:
            lines.append(
                f"memory, rows of {rate.width} floats: {rate.gathered / 1e6:.1f} M/s gathered, "
                f"{rate.updated / 1e6:.1f} M/s updated"
            )
        if self.memory and self.memory[0].packed:
            rate = self.memory[0]
            lines.append(
                f"lookups: {rate.planned / 1e6:.1f} M/s planned, {rate.packed / 1e6:.1f} M/s packed and joined"
            )
        for directory in self.directories:
            cached = "" if directory.is_direct else " (through the page cache)"
            lines.append(
                f"{directory.path}{cached}: writes {directory.written / 1e6:,.0f} MB/s, reads "
                f"{directory.pages / 1e3:,.1f} k random pages/s, "
                f"{directory.latency * 1e6:,.0f} us for one; rows by {directory.reader}, "
                f"{directory.processor_seconds * 1e6:.1f} us of a processor each"
            )
        return "\n".join(lines)
