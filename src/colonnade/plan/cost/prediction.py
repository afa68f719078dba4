"""Predicted speed of a plan, from what it reads and what reading costs; and of a model of so many parameters,
simulated.

Nobody has run what this says. It takes the processor's time of one sample as measured on this machine, the bytes of a
row as stores lay them out, and links and machines as they are given; it leaves out what only large worlds have:
stragglers, switches that are shared, messages too small to be fast. Pure functions of numbers.

A step takes what the slowest of them takes: the processor, which computes and moves rows between tiers; the disk,
which reads pages and writes chunks; the write budget. They work side by side as long as batches are looked ahead.
Seconds are of one step of one rank; ranks work side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from colonnade.plan.cost.comm_volume import step_seconds
from colonnade.plan.cost.memory import Demand, Placed
from colonnade.plan.measure.device import PAGE, Device
from colonnade.table import Table

HEADER_BYTES = 18.2  # of a row in memory beside its record: id, pins, index, worth (DESIGN.md)
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


FRAME_BYTES = 16
"""Of a record's frame at rest, beside the record (store/format.md)."""
AMPLIFICATION = 1.5
"""Bytes written for a byte of rows: what garbage collection rewrites at 65-70 % of live rows."""
DEEPEST = 64
SHALLOWEST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Measured by a few steps of the model itself (run/planning.py), or given."""

    step_seconds: float
    """With every row in memory, none of them new."""
    born_seconds: float = 0.0
    """More for each row that is used for the first time."""
    moved_seconds: float = 0.0
    """More for each row that is read from files or evicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCosts:
    """Of the exchange of rows and gradients with other ranks (plan/search), and the sum of dense gradients."""

    processor_seconds: float = 0.0
    """More than one rank alone would compute."""
    waited_seconds: float = 0.0
    """For messages, while nothing is computed."""
    behind_seconds: float = 0.0
    """Of messages while the processor computes."""
    crowding: float = 1.0
    """`World.crowding`"""
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Bytes that a rank sends for rows and gradients, the mean over ranks, by channel and link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePrediction:
    name: str
    lookups_per_sample: float
    bytes_per_sample: float
    """Read and written in memory for one sample: rows pooled, rows and their state updated."""
    rows_in_memory: int
    hit_rate: float
    """Share of a batch's different rows that are in memory already, or new."""
    reads_per_sample: float
    births_per_sample: float
    tier: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    samples_per_second: float
    """Of all ranks."""
    all_in_memory: float
    """Samples per second if no row were ever moved."""
    processor_seconds: float
    device_seconds: float
    write_seconds: float
    """By the write budget."""
    reads_per_sample: float
    births_per_sample: float
    written_per_second: float
    """Bytes, garbage collection included."""
    hit_rate: float
    limit: str
    """What takes longest, in words."""
    lookahead: int
    tables: tuple[TablePrediction, ...]
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    behind_seconds: float = 0.0
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """`LinkCosts` of the same names."""


def predict(
    tables: Sequence[Table],
    wanted: Sequence[Demand],
    placed: Sequence[Placed],
    lookups_per_sample: Sequence[float],
    costs: StepCosts,
    device: Device | None,
    *,
    batch_size: int,
    num_batches: int,
    num_ranks: int = 1,
    lookahead: int = SHALLOWEST,
    write_budget: int | None = None,
    links: LinkCosts | None = None,
) -> Prediction:
    """Of a run of `num_batches` batches; `batch_size` counts samples over all ranks. Without a device no read takes
    time but a processor's."""
    mine = batch_size / num_ranks  # samples that one rank's rows serve
    reads = sum(each.reads for each in placed)
    born = sum(each.births for each in wanted)
    unique = sum(each.unique for each in wanted)
    pages = written = moved = 0.0
    for table, each, demand in zip(tables, placed, wanted, strict=True):
        framed = FRAME_BYTES + 8 * math.ceil(table.record_bytes / 8)
        pages += each.reads * (1 + (framed - 1) / PAGE)  # rows cross pages' borders
        # A table that starts empty evicts once its slots are taken.
        evicted = max(0.0, each.reads + demand.births - each.rows / num_batches)
        written += evicted * framed * AMPLIFICATION
        moved += each.reads + evicted
    links = links or LinkCosts()
    alone = costs.step_seconds + born * costs.born_seconds + links.processor_seconds
    processor = alone + moved * costs.moved_seconds
    disk = 0.0
    if device is not None and device.directories:
        disk = pages / sum(place.pages for place in device.directories)
        disk += written / sum(place.written for place in device.directories)
    budget = written / write_budget if write_budget else 0.0
    # Messages wait for what is computed and the other way round; ids of later batches and reads wait for neither.
    stepped = partial(
        step_seconds,
        waited=links.waited_seconds,
        behind=links.behind_seconds,
        crowding=links.crowding,
    )
    seconds = max(stepped(processor), disk, budget)
    return Prediction(
        samples_per_second=batch_size / seconds,
        all_in_memory=batch_size / stepped(alone),
        processor_seconds=processor,
        device_seconds=disk,
        write_seconds=budget,
        reads_per_sample=reads / mine,
        births_per_sample=born / mine,
        written_per_second=written / seconds,
        hit_rate=1 - reads / unique if unique else 1.0,
        limit=_limit(processor, disk, budget, moved * costs.moved_seconds, links),
        step_seconds=seconds,
        waited_seconds=links.waited_seconds,
        behind_seconds=links.behind_seconds,
        sent=links.sent,
        lookahead=lookahead,
        tables=tuple(
            TablePrediction(
                name=table.name,
                lookups_per_sample=lookups,
                bytes_per_sample=lookups * table.width * table.itemsize
                + 2 * demand.unique / mine * table.record_bytes,
                rows_in_memory=each.rows,
                hit_rate=1 - each.reads / demand.unique if demand.unique else 1.0,
                reads_per_sample=each.reads / mine,
                births_per_sample=demand.births / mine,
                tier=each.tier,
            )
            for table, each, demand, lookups in zip(
                tables, placed, wanted, lookups_per_sample, strict=True
            )
        ),
    )


def depth_for(
    placed: Sequence[Placed], costs: StepCosts, device: Device | None, most: int = DEEPEST
) -> int:
    """Batches to look ahead so that a batch's reads are done when its turn comes: as many steps as its reads take,
    one more for the chance of a slow one, and one in hand."""
    reads = sum(each.reads for each in placed)
    if not reads or device is None or not device.directories:
        return SHALLOWEST
    pages = sum(place.pages for place in device.directories)
    slowest = max(place.latency for place in device.directories)
    waits = (reads / pages + slowest) / max(costs.step_seconds, 1e-9)
    return min(max(SHALLOWEST, math.ceil(waits) + 2), most)


def _limit(processor: float, disk: float, budget: float, moving: float, links: LinkCosts) -> str:
    waited = links.waited_seconds
    if max(disk, budget) <= max(processor + waited, links.behind_seconds):
        if links.behind_seconds > processor + waited:
            return "links between ranks: ids of later batches"
        if waited > processor:
            return f"links between ranks, {waited / (processor + waited):.0%} of a step"
        if waited > 0.1 * processor:
            return f"processor; {waited / (processor + waited):.0%} of a step waits for links between ranks"
        if moving > 0.1 * processor:
            return f"processor, {moving / processor:.0%} of it moving rows between memory and files"
        return "processor: the model itself"
    return "random reads of the disk" if disk >= budget else "the write budget"
