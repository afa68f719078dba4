"""What a model of so many parameters would need, and how fast it might train: a simulation from rates of one rank.

Nobody has run what this says. It takes the processor's time of one sample as measured on this machine, the bytes of a
row as stores lay them out, and links and machines as they are given; it leaves out what only large worlds have:
stragglers, switches that are shared, messages too small to be fast. Pure functions of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HEADER_BYTES = 18.2  # of a row in memory beside its record: id, pins, index, worth (DESIGN.md)
FRAME_BYTES = (
    8  # of a row at rest beside its record: checksum and padding; ids by key lists, at most 8
)
SPARE = 1 / 0.7  # disk for a byte of rows, while collection keeps 70 % of the space in use
PERSIA = (
    "PERSIA's published set-up for 100 trillion parameters: 30 hosts of 12 TB of memory with rows, 100 hosts of 30 "
    "processors between, 64 A100 on 8 hosts; 1.91 M samples/s (0.73 M synchronously)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One host."""

    memory_bytes: float
    """For rows."""
    ssd_bytes: float
    ranks: int
    uplink: float
    """Bytes a second each way."""
    pages: float
    """Random reads of its disks a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Of one sample, measured."""

    seconds: float
    """Of one rank's processor, with rows in memory."""
    moved_seconds: float
    """More for each row that is read from files."""
    rows: float
    """Different ones that a sample asks for, of a batch's."""
    row_floats: float
    """Of a mean row, as it travels."""
    record_bytes: float
    """Of a mean row with its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Where rows lie, on how many hosts, and what a step then takes."""

    where: str
    rows: float
    total_bytes: float
    hosts: int
    ranks: int
    compute_seconds: float
    link_seconds: float
    disk_seconds: float
    samples_per_second: float
    """With reads ahead, which hide the shorter of processor, links and disks behind the longest."""
    synchronous: float
    """Samples per second where links and processor wait for each other."""


def simulate(parameters: float, work: Work, machine: Machine, batch_size: int) -> list[Simulated]:
    """All rows in memory, and all on disks with what memory there is as a cache that is never hit: the worst. Where
    machines have no disk, the first alone."""
    rows = parameters / work.row_floats
    found = []
    for where, row_bytes, room, misses in (
        ("memory", work.record_bytes + HEADER_BYTES, machine.memory_bytes, 0.0),
        ("disks", (work.record_bytes + FRAME_BYTES) * SPARE, machine.ssd_bytes, 1.0),
    ):
        if not room:
            continue
        total = rows * row_bytes
        hosts = max(1, math.ceil(total / room))
        ranks = hosts * machine.ranks
        mine = batch_size / ranks
        compute = mine * (work.seconds + misses * work.rows * work.moved_seconds)
        # Values come and gradients go; of both a host's ranks have 1 / hosts themselves.
        crossing = 4 * work.row_floats * work.rows * (1 - 1 / hosts)
        link = batch_size / hosts * crossing / machine.uplink
        disk = misses * batch_size / hosts * work.rows / machine.pages if misses else 0.0
        found.append(
            Simulated(
                where=where,
                rows=rows,
                total_bytes=total,
                hosts=hosts,
                ranks=ranks,
                compute_seconds=compute,
                link_seconds=link,
                disk_seconds=disk,
                samples_per_second=batch_size / max(compute, link, disk),
                synchronous=batch_size / max(compute + 2 * link, disk),
            )
        )
    return found
