"""Measured speed of the links of a running world: all-to-alls of several sizes, for each kind of link, on all ranks.

The measurement does what training does: the same call, the same process group, new buffers each time. For a planned
world, the user states the speed of the links.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import open_host_mesh
from colonnade.errors import ConfigError
from colonnade.processors import count_usable_processors
from colonnade.sizes import parse_byte_rate
from colonnade.topology.world import World

SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes that each rank sends, ascending; the first is nearly an empty message."""
REPEATS = 5
MAX_SECONDS = 0.2
"""Seconds of one all-to-all after which no larger one is measured."""
CHANNEL = "control"


class AllToAllTime(NamedTuple):
    """Measured time of an all-to-all of one size."""

    bytes: float
    """Bytes that this rank sent; it received as many."""
    seconds: float
    """Seconds until the last rank was done."""
    processor: float
    """Processor time of this rank, in seconds."""


def measure_links(mesh: Mesh) -> World:
    """Measure the links of the world; every rank calls it (collective) while nothing else is sent.

    Returns the same world on every rank, with measured speeds; kinds of links that the world does not have keep those
    of `mesh.world`. Takes a second or two."""
    world = mesh.world
    speeds: dict[str, float] = {}
    if world.num_ranks > 1:
        speeds["crowding"] = measure_threads_per_processor(mesh)
    if world.ranks_per_host > 1:
        with open_host_mesh(mesh) as local_mesh:
            times = time_all_to_alls(local_mesh, range(world.ranks_per_host))
        # The slowest host counts for all: a plan is as slow as it.
        gathered = torch.stack(mesh.all_gather(CHANNEL, _pad_times(times)))
        sizes, seconds, processor = _combine_rank_times(gathered)
        fixed, rate = fit_message_cost(sizes, seconds)
        speeds["message_seconds"] = fixed / (world.ranks_per_host - 1)
        speeds["local_bytes_per_second"] = rate
        speeds |= _fit_processor_cost(sizes, processor, world.ranks_per_host - 1)
    if world.num_hosts > 1:
        host = world.host(mesh.rank)
        others = [rank for rank in range(world.num_ranks) if world.host(rank) != host]
        times = time_all_to_alls(mesh, others)
        gathered = torch.stack(mesh.all_gather(CHANNEL, _pad_times(times)))
        sizes, seconds, processor = _combine_rank_times(gathered)
        fixed, rate = fit_message_cost(sizes, seconds)
        speeds |= _fit_processor_cost(sizes, processor, len(others))
        local = (world.ranks_per_host - 1) * speeds.get("message_seconds", 0.0)
        speeds["remote_message_seconds"] = max(fixed - local, fixed / 10) / len(others)
        speeds["remote_bytes_per_second"] = rate * world.ranks_per_host
    return replace(world, origin="measured", **speeds) if speeds else world  # type: ignore[arg-type]


def measure_threads_per_processor(mesh: Mesh) -> float:
    """Return `World.crowding` of the host with the most threads per processor, for torch's current number of threads.

    Collective."""
    threads = mesh.world.ranks_per_host * torch.get_num_threads()
    own_crowding = torch.tensor(max(1.0, threads / count_usable_processors()), dtype=torch.float64)
    return max(float(value) for value in mesh.all_gather(CHANNEL, own_crowding))


def time_all_to_alls(mesh: Mesh, peers: Sequence[int]) -> list[AllToAllTime]:
    """Time all-to-alls of growing sizes to `peers`. Collective."""
    receivers = [rank for rank in peers if rank != mesh.rank]
    times: list[AllToAllTime] = []
    for size in SIZES:
        message_bytes = max(1, size // len(receivers))
        rows = [message_bytes if rank in receivers else 0 for rank in range(mesh.num_ranks)]
        send = mesh.allocate_send_buffer(sum(rows), torch.uint8).zero_()
        seconds = []
        processor = []
        for _ in range(REPEATS + 1):
            mesh.barrier(CHANNEL)
            start = time.perf_counter()
            processor_start = time.process_time()
            mesh.all_to_all(CHANNEL, send, rows, rows)
            processor.append(time.process_time() - processor_start)
            own_seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            seconds.append(max(float(value) for value in mesh.all_gather(CHANNEL, own_seconds)))
        # Drop the first, with cold buffers and connections. Of the smallest messages take the least time, because
        # delays by other threads are no part of the fixed cost.
        typical = min if size == SIZES[0] else median
        sent_bytes = float(message_bytes * len(receivers))
        times.append(AllToAllTime(sent_bytes, typical(seconds[1:]), median(processor[1:])))
        if times[-1].seconds > MAX_SECONDS:
            break
    return times


def fit_message_cost(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit a fixed cost in seconds and a rate in bytes per second to measured times; both sequences ascend.

    The fixed cost is the time of the smallest size. The rate fits the additional time, with more weight on large
    sizes."""
    fixed = seconds[0]
    increments = [
        (size - sizes[0], max(total - fixed, 1e-9))
        for size, total in zip(sizes, seconds, strict=True)
    ]
    # Least squares of seconds = size / rate through the smallest size: sizes are weighted by their square.
    squares = sum(size * size for size, _ in increments)
    products = sum(size * more for size, more in increments)
    rate = squares / max(products, 1e-12) if squares else 1e12
    return fixed, rate


def _fit_processor_cost(
    sizes: Sequence[float], seconds: Sequence[float], num_peers: int
) -> dict[str, float]:
    fixed, rate = fit_message_cost(sizes, seconds)
    return {
        "message_processor_seconds": fixed / num_peers,
        "byte_processor_seconds": 0.5 / rate,  # Every byte is sent once and received once.
    }


def _pad_times(times: Sequence[AllToAllTime]) -> torch.Tensor:
    """Return the times as a tensor, (len(SIZES), 3), with NaN for sizes that were not measured."""
    out = torch.full((len(SIZES), 3), float("nan"), dtype=torch.float64)
    out[: len(times)] = torch.tensor(times, dtype=torch.float64)
    return out


def _combine_rank_times(rank_times: torch.Tensor) -> tuple[list[float], list[float], list[float]]:
    """Combine the times of all ranks, (N, len(SIZES), 3), for the sizes that every rank measured.

    Returns the sizes, the seconds of the slowest rank, and the mean processor time."""
    is_measured = ~rank_times.isnan().any(2).any(0)
    sizes = rank_times[0, is_measured, 0]
    seconds = rank_times[:, is_measured, 1].amax(0)
    processor = rank_times[:, is_measured, 2].mean(0)
    return sizes.tolist(), seconds.tolist(), processor.tolist()


def build_planned_world(
    shape: str, *, uplink: str | None = None, local: str | None = None
) -> World:
    """Build a world that does not run here from its description.

    shape: "HOSTSxRANKS", or a number of ranks on one host. uplink, local: rates such as "1Gbit" or "5GB/s". Raises
    ConfigError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", shape)
    if not match or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise ConfigError(
            f"got world {shape!r}, wanted HOSTSxRANKS such as 2x4 (2 hosts with 4 ranks each)"
        )
    speeds: dict[str, float] = {}
    for name, field, rate in (
        ("uplink", "remote_bytes_per_second", uplink),
        ("local", "local_bytes_per_second", local),
    ):
        if rate is not None:
            try:
                speeds[field] = parse_byte_rate(rate)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
    return World(
        num_hosts=int(match[1] or 1),
        ranks_per_host=int(match[2]),
        origin="planned" if speeds else "assumed",
        **speeds,  # type: ignore[arg-type]
    )
