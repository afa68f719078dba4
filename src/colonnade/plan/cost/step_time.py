"""Processor time of one table under each exchange, and the seconds of a step. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from colonnade.hops.kinds import EXCHANGES, Flow, RowWork, Split
from colonnade.hops.links import Links
from colonnade.hops.load import TableLoad
from colonnade.plan.measure.device import RowRate

EXTRA_EXCHANGE_SECONDS = 2.5e-3
"""Processor time of a rank per step for every exchange after the first, whatever its tables: planning, packing,
pooling, pushing and updating start once more, and the rows of all tables are listed again. Measured by splitting the
tables of one exchange into two and three (26 fields, 4 ranks on 2 processors), without the time of their messages."""


@dataclass(frozen=True, slots=True)
class ProcessorSeconds:
    """Processor time per step."""

    trainer: float
    """Seconds of every trainer, for its own samples."""
    owner: float
    """Seconds of every owner, for all samples."""

    def __add__(self, other: ProcessorSeconds) -> ProcessorSeconds:
        return ProcessorSeconds(self.trainer + other.trainer, self.owner + other.owner)


def predict_processor_seconds(
    exchange_name: str, table_load: TableLoad, rank_split: Split, row_rates: Sequence[RowRate]
) -> ProcessorSeconds:
    """Predict the processor time of one table from measured rates of gathering, updating, planning and packing.

    Returns zeros without rates."""
    if not row_rates:
        return ProcessorSeconds(0.0, 0.0)
    # The width is that of one slice.
    gather, update = interpolate_row_seconds(
        row_rates, max(table_load.width // rank_split.slices, 1)
    )
    plan, pack = mean_lookup_seconds(row_rates)

    def predict_seconds(work: RowWork) -> float:
        rows = work.gathered * gather + work.updated * update
        return rows + work.planned * plan + work.packed * pack

    total = ProcessorSeconds(0.0, 0.0)
    for hop in EXCHANGES[exchange_name]:
        trainer, owner = hop.work(table_load, rank_split)
        total += ProcessorSeconds(predict_seconds(trainer), predict_seconds(owner))
    return total


def predict_transfer_seconds(
    flows: Sequence[Flow], num_owners: int, links: Links
) -> ProcessorSeconds:
    """Predict the processor time of sending and receiving one table's bytes. Bytes that stay on a rank cost nothing.

    num_owners: of all slices together."""
    trainer = owner = 0.0
    for flow in flows:
        trainer_blocks, owner_blocks = links.count_rank_blocks(flow.pattern, num_owners)
        trainer += flow.bytes * trainer_blocks
        owner += flow.bytes * owner_blocks
    per_byte = links.world.byte_processor_seconds
    return ProcessorSeconds(trainer * per_byte, owner * per_byte)


def predict_single_rank_seconds(table_load: TableLoad, row_rates: Sequence[RowRate]) -> float:
    """Return the processor time of a table on a rank that owns all its rows.

    A micro-benchmark on one process has this time in its step already."""
    if not row_rates:
        return 0.0
    gather, update = interpolate_row_seconds(row_rates, table_load.width)
    plan_seconds, _ = mean_lookup_seconds(row_rates)
    return table_load.lookups * (2 * gather + plan_seconds) + table_load.unique_rank * update


def mean_lookup_seconds(row_rates: Sequence[RowRate]) -> tuple[float, float]:
    """Return the seconds of planning one lookup, and of packing and joining one: means of the measured rates.

    Returns zeros if nothing was measured."""
    complete_rates = [rate for rate in row_rates if rate.planned and rate.packed]
    if not complete_rates:
        return 0.0, 0.0
    return fmean(1 / rate.planned for rate in complete_rates), fmean(
        1 / rate.packed for rate in complete_rates
    )


def interpolate_row_seconds(row_rates: Sequence[RowRate], row_floats: int) -> tuple[float, float]:
    """Return the seconds of gathering one row of `row_floats` floats, and of updating one.

    Interpolates between the measured widths; proportional to the width above them."""
    rates_by_width = sorted(row_rates, key=lambda rate: rate.width)
    widths = [rate.width for rate in rates_by_width]
    scale = row_floats / min(max(row_floats, widths[0]), widths[-1])
    scale = max(scale, 1.0)
    return (
        scale
        * float(np.interp(row_floats, widths, [1 / rate.gathered for rate in rates_by_width])),
        scale * float(np.interp(row_floats, widths, [1 / rate.updated for rate in rates_by_width])),
    )


def step_seconds(processor: float, waited: float, behind: float, crowding: float) -> float:
    """Return the seconds of a rank's step.

    processor: seconds of computing on a processor of its own. waited: seconds of waiting for links. behind: seconds of
    messages sent in the background of both. crowding: `World.crowding`."""
    return max(processor * crowding, processor + waited, behind)
