"""How fast the links of a running world are: all-to-alls of several sizes, timed per link class with all ranks at once.

What is timed is what training does: the same call, the same group of processes, buffers that are new each time. The
links of a planned world are what a person says of them.
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
from colonnade.comm.process_groups import host_mesh
from colonnade.errors import ConfigError
from colonnade.processors import usable_processors
from colonnade.sizes import parse_rate
from colonnade.topology.world import World

SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes that each rank sends, ascending; the first is next to nothing."""
REPEATS = 5
LONGEST = 0.2
"""Seconds of one all-to-all beyond which no larger one is tried."""
PURPOSE = "control"


class Timed(NamedTuple):
    """One all-to-all, of several."""

    bytes: float
    """That this rank sent, and got as many."""
    seconds: float
    """Until the last rank was done."""
    processor: float
    """Seconds of this rank's processor."""


def measure_links(mesh: Mesh) -> World:
    """Collective: every rank calls it, while nothing else travels. The same numbers on every rank; of a class that this
    world does not have, those of `mesh.world`. Takes a second or two."""
    world = mesh.world
    found: dict[str, float] = {}
    if world.num_ranks > 1:
        found["crowding"] = crowding(mesh)
    if world.ranks_per_host > 1:
        with host_mesh(mesh) as mine:
            times = time_exchanges(mine, range(world.ranks_per_host))
        # Hosts are taken to be alike: a plan is as slow as the slowest of them.
        heard = torch.stack(mesh.all_gather(PURPOSE, _padded(times)))
        sizes, seconds, processor = _agreed(heard)
        fixed, rate = fit(sizes, seconds)
        found["message_seconds"] = fixed / (world.ranks_per_host - 1)
        found["local_bytes_per_second"] = rate
        found |= _processor(sizes, processor, world.ranks_per_host - 1)
    if world.num_hosts > 1:
        home = world.host(mesh.rank)
        others = [rank for rank in range(world.num_ranks) if world.host(rank) != home]
        heard = torch.stack(mesh.all_gather(PURPOSE, _padded(time_exchanges(mesh, others))))
        sizes, seconds, processor = _agreed(heard)
        fixed, rate = fit(sizes, seconds)
        found |= _processor(sizes, processor, len(others))
        local = (world.ranks_per_host - 1) * found.get("message_seconds", 0.0)
        found["remote_message_seconds"] = max(fixed - local, fixed / 10) / len(others)
        found["remote_bytes_per_second"] = rate * world.ranks_per_host
    return replace(world, origin="measured", **found) if found else world  # type: ignore[arg-type]


def crowding(mesh: Mesh) -> float:
    """Collective: `World.crowding` of the fullest host, as torch's threads are set now."""
    threads = mesh.world.ranks_per_host * torch.get_num_threads()
    mine = torch.tensor(max(1.0, threads / usable_processors()), dtype=torch.float64)
    return max(float(each) for each in mesh.all_gather(PURPOSE, mine))


def time_exchanges(mesh: Mesh, peers: Sequence[int]) -> list[Timed]:
    """Collective: of growing all-to-alls to `peers`."""
    to = [rank for rank in peers if rank != mesh.rank]
    found = []
    for size in SIZES:
        each = max(1, size // len(to))
        rows = [each if rank in to else 0 for rank in range(mesh.num_ranks)]
        send = mesh.room(sum(rows), torch.uint8).zero_()
        taken, computed = [], []
        for _ in range(REPEATS + 1):
            mesh.barrier(PURPOSE)
            began, busy = time.perf_counter(), time.process_time()
            mesh.all_to_all(PURPOSE, send, rows, rows)
            computed.append(time.process_time() - busy)
            mine = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            taken.append(max(float(each) for each in mesh.all_gather(PURPOSE, mine)))
        # The first finds cold buffers and connections.
        # Of a message that carries nothing, the least: what other threads add to it is no part of it.
        typical = min if size == SIZES[0] else median
        found.append(Timed(float(each * len(to)), typical(taken[1:]), median(computed[1:])))
        if found[-1].seconds > LONGEST:
            break
    return found


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(fixed seconds, bytes per second) of times that grow with sizes, both ascending. The fixed part is that of the
    smallest; the rate is that of what comes on top, of the larger sizes more than of the smaller."""
    fixed = seconds[0]
    more = [
        (size - sizes[0], max(took - fixed, 1e-9))
        for size, took in zip(sizes, seconds, strict=True)
    ]
    # Least squares of took = size / rate through the smallest: large sizes count by their square.
    moved = sum(size * size for size, _ in more)
    rate = moved / max(sum(size * took for size, took in more), 1e-12) if moved else 1e12
    return fixed, rate


def _processor(
    sizes: Sequence[float], seconds: Sequence[float], num_peers: int
) -> dict[str, float]:
    fixed, rate = fit(sizes, seconds)
    return {
        "message_processor_seconds": fixed / num_peers,
        "byte_processor_seconds": 0.5 / rate,  # every byte is sent, and got by somebody
    }


def _padded(times: Sequence[Timed]) -> torch.Tensor:
    """(len(SIZES), 3): hosts may stop at different sizes."""
    out = torch.full((len(SIZES), 3), float("nan"), dtype=torch.float64)
    out[: len(times)] = torch.tensor(times, dtype=torch.float64)
    return out


def _agreed(heard: torch.Tensor) -> tuple[list[float], list[float], list[float]]:
    """heard (N, len(SIZES), 3) -> sizes that every rank tried, the slowest's seconds, and what ranks computed on the
    mean."""
    tried = ~heard.isnan().any(2).any(0)
    sizes, seconds, processor = (
        heard[0, tried, 0],
        heard[:, tried, 1].amax(0),
        heard[:, tried, 2].mean(0),
    )
    return sizes.tolist(), seconds.tolist(), processor.tolist()


def planned_world(
    shape: str, *, uplink: str | None = None, local: str | None = None, latency: float | None = None
) -> World:
    """A world that does not run here. `shape`: "HOSTSxRANKS" or a number of ranks of one host; rates as "1Gbit" or
    "5GB/s"; `latency`: seconds of a message. Raises ConfigError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", shape)
    if not match or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise ConfigError(
            f"got world {shape!r}, wanted HOSTSxRANKS such as 2x4 (2 hosts with 4 ranks each)"
        )
    said: dict[str, float] = {}
    for name, field, rate in (
        ("uplink", "remote_bytes_per_second", uplink),
        ("local", "local_bytes_per_second", local),
    ):
        if rate is not None:
            try:
                said[field] = parse_rate(rate)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
    if latency is not None:
        said |= {"message_seconds": latency, "remote_message_seconds": latency}
    return World(
        num_hosts=int(match[1] or 1),
        ranks_per_host=int(match[2]),
        origin="planned" if said else "assumed",
        **said,  # type: ignore[arg-type]
    )
