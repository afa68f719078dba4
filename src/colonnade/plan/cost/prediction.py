"""Predicted speed of a plan from measured costs. Pure functions.

A step takes as long as the slowest of: the processor, which computes and moves rows between tiers; the disk, which
reads pages and writes chunks; the write budget. These overlap as long as batches are prefetched. Seconds are those of
one step of one rank; ranks work in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from colonnade.plan.cost.memory import MemoryDemand, TableMemory
from colonnade.plan.cost.step_time import step_seconds
from colonnade.plan.measure.device import PAGE, Device
from colonnade.table import Table

FRAME_BYTES = 12
"""Largest number of bytes of a row in files in addition to its record: a checksum and an id (store/format.md). Up
to 3 more if the record is not of whole words of 4 bytes."""
AMPLIFICATION = 1.8
"""Rows written per row that leaves memory, because compaction moves live rows: 1.78 measured (bench/tiers.py)."""
MAX_LOOKAHEAD = 64
MIN_LOOKAHEAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Costs of a step, measured by a few steps of the model itself (planning/timing.py) or assumed."""

    step_seconds: float
    """Seconds of a step with every row in memory and none of them new."""
    first_use_seconds: float = 0.0
    """Additional seconds for each row that is used for the first time."""
    moved_seconds: float = 0.0
    """Additional seconds for each row that is read from files or evicted."""
    sample_seconds: float = 0.0
    """Additional seconds of a step for each further sample; 0 if steps of one size were timed."""

    def add_samples(self, num_samples: float) -> StepCosts:
        """Return the costs of steps with `num_samples` more samples, or fewer if it is negative."""
        seconds = self.step_seconds + num_samples * self.sample_seconds
        return replace(self, step_seconds=seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCosts:
    """Costs per step of exchanging rows and gradients (plan/search) and of summing dense gradients."""

    processor_seconds: float = 0.0
    """Processor time in addition to that of one rank alone."""
    waited_seconds: float = 0.0
    """Seconds of waiting for messages while the processor is idle."""
    behind_seconds: float = 0.0
    """Seconds of messages that the processor hides by computing."""
    crowding: float = 1.0
    """Slowdown by threads that share processors (`World.crowding`)."""
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Bytes that a rank sends for rows and gradients, the mean over ranks, by channel and link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePrediction:
    """Predicted memory, reads and bytes of one table."""

    name: str
    lookups_per_sample: float
    bytes_per_sample: float
    """Bytes read and written in memory for one sample: rows pooled, rows and their state updated."""
    rows_in_memory: int
    hit_rate: float
    """Fraction of a batch's distinct rows that are in memory already, or new."""
    reads_per_sample: float
    """Number of rows read from files per sample."""
    births_per_sample: float
    """Number of rows used for the first time per sample."""
    tier: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted speed of a run, and the costs that limit it. Seconds are per step."""

    samples_per_second: float
    """Number of samples per second over all ranks."""
    all_in_memory: float
    """Number of samples per second if no row were ever read or evicted."""
    processor_seconds: float
    device_seconds: float
    """Seconds of the disks."""
    write_seconds: float
    """Seconds that the write budget demands."""
    reads_per_sample: float
    """Number of rows read from files per sample."""
    births_per_sample: float
    """Number of rows used for the first time per sample."""
    written_per_second: float
    """Bytes written per second, compaction included."""
    hit_rate: float
    """Fraction of a batch's distinct rows that are in memory already, or new."""
    limit: str
    """Description of the bottleneck."""
    lookahead: int
    tables: tuple[TablePrediction, ...]
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Copy of `LinkCosts.waited_seconds`."""
    behind_seconds: float = 0.0
    """Copy of `LinkCosts.behind_seconds`."""
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Copy of `LinkCosts.sent`."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measured costs that a prediction is made from."""

    step: StepCosts
    device: Device | None = None
    """Speed of the disks; None: reads only cost processor time."""
    links: LinkCosts = field(default_factory=LinkCosts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRun:
    """Run that a prediction is of."""

    batch_size: int
    """Number of samples of a step over all ranks."""
    num_batches: int
    num_ranks: int = 1
    lookahead: int = MIN_LOOKAHEAD
    write_budget: int | None = None


def predict_speed(
    tables: Sequence[Table],
    table_demands: Sequence[MemoryDemand],
    placed: Sequence[TableMemory],
    lookups_per_sample: Sequence[float],
    measured: MeasuredCosts,
    run: PredictedRun,
) -> Prediction:
    """Predict the speed of a run."""
    costs = measured.step
    device = measured.device
    links = measured.links
    rank_samples = run.batch_size / run.num_ranks
    reads = sum(memory.reads for memory in placed)
    births = sum(demand.births for demand in table_demands)
    unique = sum(demand.unique for demand in table_demands)
    pages = written = moved = 0.0
    for table, memory, demand in zip(tables, placed, table_demands, strict=True):
        framed = table.record_bytes + FRAME_BYTES
        pages += memory.reads * (1 + (framed - 1) / PAGE)  # Rows may cross page borders.
        # A table that starts empty evicts no row until its slots are full.
        evicted = max(0.0, memory.reads + demand.births - memory.rows / run.num_batches)
        written += evicted * framed * AMPLIFICATION
        moved += memory.reads + evicted
    in_memory = costs.step_seconds + births * costs.first_use_seconds + links.processor_seconds
    processor = in_memory + moved * costs.moved_seconds
    disk = 0.0
    if device is not None and device.directories:
        disk = pages / sum(directory.pages for directory in device.directories)
        disk += written / sum(directory.written for directory in device.directories)
    budget = written / run.write_budget if run.write_budget else 0.0
    # Messages and computing wait for each other. Ids of later batches and reads run in the background of both.
    combine_seconds = partial(
        step_seconds,
        waited=links.waited_seconds,
        behind=links.behind_seconds,
        crowding=links.crowding,
    )
    seconds = max(combine_seconds(processor), disk, budget)
    return Prediction(
        samples_per_second=run.batch_size / seconds,
        all_in_memory=run.batch_size / combine_seconds(in_memory),
        processor_seconds=processor,
        device_seconds=disk,
        write_seconds=budget,
        reads_per_sample=reads / rank_samples,
        births_per_sample=births / rank_samples,
        written_per_second=written / seconds,
        hit_rate=1 - reads / unique if unique else 1.0,
        limit=_describe_bottleneck(processor, disk, budget, moved * costs.moved_seconds, links),
        step_seconds=seconds,
        waited_seconds=links.waited_seconds,
        behind_seconds=links.behind_seconds,
        sent=links.sent,
        lookahead=run.lookahead,
        tables=tuple(
            TablePrediction(
                name=table.name,
                lookups_per_sample=lookups,
                bytes_per_sample=lookups * table.width * table.itemsize
                + 2 * demand.unique / rank_samples * table.record_bytes,
                rows_in_memory=memory.rows,
                hit_rate=1 - memory.reads / demand.unique if demand.unique else 1.0,
                reads_per_sample=memory.reads / rank_samples,
                births_per_sample=demand.births / rank_samples,
                tier=memory.tier,
            )
            for table, memory, demand, lookups in zip(
                tables, placed, table_demands, lookups_per_sample, strict=True
            )
        ),
    )


def choose_lookahead_depth(
    placed_memory: Sequence[TableMemory],
    step_costs: StepCosts,
    device: Device | None,
    max_batches: int = MAX_LOOKAHEAD,
) -> int:
    """Return the number of batches to prefetch so that a batch's reads are done before its step.

    Counts the steps that its reads take, one step in case of a slow read, and one in reserve; at most `max_batches`."""
    reads = sum(memory.reads for memory in placed_memory)
    if not reads or device is None or not device.directories:
        return MIN_LOOKAHEAD
    pages = sum(directory.pages for directory in device.directories)
    slowest = max(directory.latency for directory in device.directories)
    read_steps = (reads / pages + slowest) / max(step_costs.step_seconds, 1e-9)
    return min(max(MIN_LOOKAHEAD, math.ceil(read_steps) + 2), max_batches)


def _describe_bottleneck(
    processor_seconds: float,
    disk_seconds: float,
    write_budget_seconds: float,
    row_move_seconds: float,
    link_costs: LinkCosts,
) -> str:
    """Describe the bottleneck of a step. row_move_seconds: processor time for rows read and evicted."""
    waited = link_costs.waited_seconds
    if max(disk_seconds, write_budget_seconds) <= max(
        processor_seconds + waited, link_costs.behind_seconds
    ):
        if link_costs.behind_seconds > processor_seconds + waited:
            return "links between ranks: ids of later batches"
        if waited > processor_seconds:
            return f"links between ranks, {waited / (processor_seconds + waited):.0%} of a step"
        if waited > 0.1 * processor_seconds:
            return f"processor; {waited / (processor_seconds + waited):.0%} of a step waits for links between ranks"
        if row_move_seconds > 0.1 * processor_seconds:
            return f"processor, {row_move_seconds / processor_seconds:.0%} of it moving rows between memory and files"
        return "processor: the model itself"
    return (
        "random reads of the disk" if disk_seconds >= write_budget_seconds else "the write budget"
    )
