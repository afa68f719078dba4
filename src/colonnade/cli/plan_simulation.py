"""What `colonnade plan --simulate` shows: the hosts and seconds that so many parameters would take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from colonnade.errors import ConfigError
from colonnade.plan.capacity import PERSIA, Machine, Simulated, Work, simulate
from colonnade.report.words import bytes_words
from colonnade.sizes import positive_bytes
from colonnade.table import Table
from colonnade.terminal import Terminal
from colonnade.topology.world import World
from colonnade.train.planning import Planned


def room_of(host: str, parameters: float) -> tuple[int, int]:
    """Bytes of memory and of disks of a host, said as MEMORY or MEMORY:SSD. Raises ConfigError for what is none, or
    where `parameters` are no number of any."""
    if not math.isfinite(parameters):
        raise ConfigError(
            f"--simulate: got {parameters}, wanted a number of parameters, e.g. 100e12"
        )
    memory, _, disk = host.partition(":")
    try:
        return positive_bytes(memory), positive_bytes(disk) if disk else 0
    except ValueError as error:
        raise ConfigError(f"--host: {error}; give MEMORY or MEMORY:SSD, e.g. 480GiB:8TiB") from None


def simulated(
    found: Planned,
    tables: Sequence[Table],
    batch_size: int,
    parameters: float,
    room: tuple[int, int],
    world: World,
) -> tuple[Work, list[Simulated]]:
    """`found`: a plan of one rank, whose sample and rates are taken. `room`: of each host of `world`. Raises
    ConfigError where it has disks and none was measured."""
    work = work_of(found, tables, batch_size)
    pages = sum(place.pages for place in found.device.directories)
    if room[1] and not pages:
        raise ConfigError(
            "--host: got a size of disks, but no disk was measured; give --dram less than the rows take, so that some "
            "rest on this one"
        )
    machine = Machine(
        memory_bytes=room[0],
        ssd_bytes=room[1],
        ranks=world.ranks_per_host,
        uplink=world.remote_bytes_per_second,
        pages=pages,
    )
    return work, simulate(parameters, work, machine, batch_size)


def show_simulation(
    parameters: float, batch_size: int, work: Work, cases: Sequence[Simulated]
) -> None:
    """A line of what was measured, one for each place of rows, one of what was published."""
    console = Terminal(soft_wrap=True)
    console.print(
        f"SIMULATION of {parameters:,.0f} parameters, run by nobody: rates of one rank of this machine "
        f"({1 / work.seconds:,.0f} samples/s, {work.rows:.1f} rows of {work.row_floats:.0f} floats a sample, "
        f"{work.record_bytes:.0f} bytes each with state), links and hosts as given."
    )
    for each in cases:
        console.print(
            f"rows in {each.where}: {each.rows:,.0f} rows, {bytes_words(each.total_bytes)}: {each.hosts:,} hosts, "
            f"{each.ranks:,} ranks. A step of {batch_size:,} samples: processors {1e3 * each.compute_seconds:.3f} ms, "
            f"uplinks {1e3 * each.link_seconds:.3f} ms each way, disks {1e3 * each.disk_seconds:.3f} ms; "
            f"{each.samples_per_second:,.0f} samples/s reading ahead, {each.synchronous:,.0f} synchronously"
        )
    console.print(PERSIA)


def as_values(parameters: float, work: Work, cases: Sequence[Simulated]) -> dict[str, Any]:
    """Plain values of the same, under a name that says that nobody ran it. Pure."""
    return {
        "simulation": {
            "parameters": parameters,
            "measured": asdict(work),
            "cases": [asdict(each) for each in cases],
        }
    }


def work_of(found: Planned, tables: Sequence[Table], batch_size: int) -> Work:
    """Of one sample, by the sample that was profiled and the steps that were rehearsed. Pure."""
    rows = []
    for t, profile in enumerate(found.profile.tables):
        sizes, counted = profile.unique
        most = counted[-1] / sizes[-1] if sizes else found.profile.lookups_per_sample(t)
        rows.append(max(most, 1e-9))
    total = sum(rows)
    return Work(
        seconds=found.costs.step_seconds / batch_size,
        moved_seconds=found.costs.moved_seconds,
        rows=total,
        row_floats=sum(n * each.width for n, each in zip(rows, tables, strict=True)) / total,
        record_bytes=sum(n * each.record_bytes for n, each in zip(rows, tables, strict=True))
        / total,
    )
