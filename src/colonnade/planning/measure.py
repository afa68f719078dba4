"""Measured speed of a machine: rows in memory, a directory's disk, and the links of a running world.

`measure_device` takes a few seconds and leaves no files: its scratch file has no name (or loses it before the first
byte), so that it is gone even after a kill. `measure_links` does what training does: the same call, the same process
group, new buffers each time. For a planned world, the user states the speed of the links.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from colonnade import _native
from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import open_host_mesh
from colonnade.errors import ConfigError
from colonnade.files.disk import storage_error
from colonnade.optimizers import RowWiseAdagrad
from colonnade.plan.measure.device import Device, DirectoryRate, RowRate
from colonnade.processors import count_usable_processors
from colonnade.sizes import parse_byte_rate
from colonnade.store.dram import open_dram_store
from colonnade.table import Table
from colonnade.topology.world import World

RUN = 1 << 20
"""Number of bytes of one sequential write."""
WIDTHS = (16, 64, 128)
"""Widths, in floats, of the rows to measure."""
ROW_STRIDE = 256
ROWS_OF_A_JOB = 256
JOBS = 6
READ_DEPTH = 32
LOG_BYTES = 96 << 20
TABLE_BYTES = 64 << 20
LOOKUPS = 1 << 16
MESSAGE_SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes that each rank sends, ascending; the first is nearly an empty message."""
REPEATS = 5
MAX_SECONDS = 0.2
"""Seconds of one all-to-all after which no larger one is measured."""
CHANNEL = "control"


def measure_device(
    directories: Sequence[Path | str],
    *,
    scratch_bytes: int = 192 << 20,
    seconds: float = 0.15,
    widths: Sequence[int] = WIDTHS,
) -> Device:
    """Measure the speed of this machine's memory and of these directories.

    Takes some multiples of `seconds` for each width and directory. Raises StorageError with the directory that
    cannot be written or has no room for a few megabytes."""
    return Device(
        count_usable_processors(),
        tuple(measure_rows(width, seconds) for width in widths),
        tuple(measure_directory_speed(path, scratch_bytes, seconds) for path in directories),
    )


def measure_rows(width: int, seconds: float = 0.15) -> RowRate:
    """Measure row operations of the native core as in training: one lookup per bag, row-wise Adagrad."""
    optimizer = RowWiseAdagrad(lr=0.01)
    table = Table("rate", width, rows=TABLE_BYTES // (4 * width), optimizer=optimizer)
    assert table.rows is not None
    store = open_dram_store([table], [table.rows], seed=0)
    random = np.random.default_rng(0)
    for start in range(0, table.rows, LOOKUPS):
        ids = torch.arange(start, min(start + LOOKUPS, table.rows))
        ends = torch.tensor([0, len(ids)])
        store.native.acquire(ids, ends, torch.empty(len(ids), dtype=torch.int32), True)
    ids = torch.from_numpy(random.integers(0, table.rows, LOOKUPS))
    ends = torch.tensor([0, LOOKUPS])
    one = torch.zeros(1, dtype=torch.int32)
    lookups = _native.Lookups(
        ids, ends, one, torch.zeros(1, dtype=torch.uint8), LOOKUPS, None, None
    )
    plan = _native.make_plan(lookups, torch.tensor([table.rows]), torch.tensor([1]))
    unique = torch.as_tensor(plan.unique_ids)
    slots = torch.empty(len(unique), dtype=torch.int32)
    offsets = torch.as_tensor(plan.block_offsets)
    store.native.acquire(unique, offsets, slots, True)
    index = torch.empty(LOOKUPS, dtype=torch.int32)
    _native.take(slots, plan.inverse, index)
    view = store.views()[0]
    out = torch.zeros(LOOKUPS, width)
    reads = _native.Reads(one, one, torch.tensor([width], dtype=torch.int32))
    bases = torch.tensor([out.data_ptr()])
    strides = torch.tensor([4 * width])
    parts = _native.Parts(one, one, torch.tensor([width], dtype=torch.int32), one)
    source = _native.OutputGradients(lookups, reads, bases, strides, "float32")
    settings = torch.zeros(1, 16, dtype=torch.float64)
    settings[0, [0, 2, 9, 10, 11]] = torch.tensor(
        [0.01, 1e-8, np.inf, np.inf, 1.0], dtype=torch.float64
    )
    kind = torch.tensor([optimizer.kind], dtype=torch.int32)
    gathered = _measure_calls_per_second(
        seconds,
        lambda: _native.pool(
            lookups,
            index,
            torch.tensor([view.address]),
            torch.tensor([view.stride_bytes]),
            reads,
            bases,
            strides,
            "float32",
            "float32",
        ),
    )
    updated = _measure_calls_per_second(
        seconds,
        lambda: _native.update(
            store.native,
            slots,
            offsets,
            plan.segment_offsets,
            plan.entries,
            source,
            parts,
            kind,
            settings,
        ),
    )
    rows = torch.tensor([table.rows])
    planned = _measure_calls_per_second(
        seconds, lambda: _native.make_plan(lookups, rows, torch.tensor([1]))
    )
    packed = _measure_calls_per_second(seconds, lambda: _pack_and_join(lookups, rows))
    return RowRate(
        width, gathered * LOOKUPS, updated * len(unique), planned * LOOKUPS, packed * LOOKUPS
    )


def _pack_and_join(lookups: _native.Lookups, rows: torch.Tensor) -> None:
    """Pack and join the lookups of one column, with one owner of all rows."""
    one = torch.tensor([1])
    zero = torch.zeros(1, 1, dtype=torch.int64)
    unweighted = torch.zeros(1, dtype=torch.uint8)
    table = torch.zeros(1, dtype=torch.int32)
    message, _ = _native.pack_bags(lookups, rows, one, zero, unweighted, None)
    _native.join_bags([np.asarray(message)], table, rows, one, zero[0], "float32")


def measure_directory_speed(
    path: Path | str, scratch_bytes: int = 192 << 20, seconds: float = 0.15
) -> DirectoryRate:
    """Measure the disk under a directory. A missing directory is created and removed again. Raises StorageError."""
    folder = Path(path)
    new_folders = list_missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, is_direct = _open_scratch_file(folder)
        try:
            size, written = _measure_writes(fd, scratch_bytes, max(seconds * 4, 0.2))
            os.ftruncate(fd, 0)
            row_reads = _measure_row_reads(fd, min(size - 2 * RUN, LOG_BYTES), seconds * 2)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, "measure", folder) from error
    finally:
        for new_folder in new_folders:
            with suppress(OSError):
                new_folder.rmdir()
    return DirectoryRate(str(folder), is_direct, written, *row_reads)


def _measure_row_reads(fd: int, size: int, seconds: float) -> tuple[str, float, float, float]:
    """Measure reads of rows from a log of small rows in an empty file, far apart so that each is on a page of its own.

    With several jobs in flight as in training, and one row at a time; each the best of three runs, because other
    programs may interfere. Returns the kind of reader, rows per second, seconds of a single row, and processor seconds
    of a row."""
    count = max(size // ROW_STRIDE, 1)
    log = _write_log(fd, size, count)
    reader = _native.PageReader("auto", READ_DEPTH)
    jobs = [_time_reads(log, reader, count, ROWS_OF_A_JOB, JOBS, seconds / 3) for _ in range(3)]
    single_rows = [_time_reads(log, reader, count, 1, 1, seconds / 3) for _ in range(3)]
    return (
        reader.kind,
        max(speed.rows_per_second for speed in jobs),
        min(speed.job_seconds for speed in single_rows),
        min(speed.processor_seconds for speed in jobs),
    )


class _ReadSpeed(NamedTuple):
    rows_per_second: float
    job_seconds: float
    """99th percentile, from the start of a job to its end."""
    processor_seconds: float
    """Processor time of a row."""


def _time_reads(
    log: _native.RowLog,
    reader: _native.PageReader,
    num_log_rows: int,
    rows_per_job: int,
    num_jobs: int,
    seconds: float,
) -> _ReadSpeed:
    """Time jobs that read random rows of a log, `num_jobs` in flight. Raises OSError for a read that fails."""
    random = np.random.default_rng(0)
    jobs: list[tuple] = []  # (job, its start, its output), oldest first
    job_seconds: list[float] = []

    def finish_job() -> None:
        job, job_start, _ = jobs.pop(0)
        _, fault = job.wait()
        if fault is not None:
            raise OSError(fault[2] or errno.EIO, f"reading rows failed: {fault[0]}")
        job_seconds.append(time.perf_counter() - job_start)

    processor_start = time.process_time()
    start = time.perf_counter()
    try:
        while time.perf_counter() - start < seconds or not job_seconds:
            ids = torch.from_numpy(random.integers(0, num_log_rows, rows_per_job))
            out = torch.empty(rows_per_job, ROW_STRIDE - 16, dtype=torch.uint8)
            job_start = time.perf_counter()
            jobs.append((log.read(reader, ids, out, True), job_start, out))
            if len(jobs) == num_jobs:
                finish_job()
        while jobs:
            finish_job()
    finally:
        for job, *_ in jobs:  # After an error, too, the file must stay open until all reads ended.
            job.wait()
    elapsed = time.perf_counter() - start
    num_rows = len(job_seconds) * rows_per_job
    return _ReadSpeed(
        num_rows / elapsed,
        float(np.quantile(job_seconds, 0.99)),
        (time.process_time() - processor_start) / num_rows,
    )


def _write_log(fd: int, size: int, count: int) -> _native.RowLog:
    """Write a log of `count` rows to an empty file."""
    log = _native.RowLog(ROW_STRIDE - 16, count, 1, 0, size + 2 * RUN, RUN, 1, 1)
    records = torch.zeros(4096, ROW_STRIDE - 16, dtype=torch.uint8)
    is_attached = False

    def write_chunks() -> None:
        nonlocal is_attached
        while (chunk := log.next_chunk()) is not None:
            if not is_attached:
                log.attach(chunk.segment, fd)
                is_attached = True
            os.pwrite(fd, chunk.data, chunk.offset)
            log.written(chunk)

    for start in range(0, count, len(records)):
        ids = torch.arange(start, min(start + len(records), count))
        log.write(ids, records[: len(ids)], None, 0)
        write_chunks()
    log.seal()
    write_chunks()
    return log


def _measure_calls_per_second(seconds: float, timed_action) -> float:
    """Measure the calls of `timed_action` per second: the fastest of three runs, because other programs may
    interfere."""
    timed_action()
    best = 0.0
    for _ in range(3):
        count = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds / 3:
            timed_action()
            count += 1
        best = max(best, count / elapsed)
    return best


def list_missing_folders(path: Path) -> list[Path]:
    """Return the folders that creating `path` would create, innermost first."""
    folders = []
    while not path.exists() and path != path.parent:
        folders.append(path)
        path = path.parent
    return folders


def _open_scratch_file(folder: Path) -> tuple[int, bool]:
    """Open a file without a name. Returns its descriptor, and whether it bypasses the page cache."""
    for flags in (os.O_DIRECT, 0) if hasattr(os, "O_DIRECT") else (0,):
        try:
            if hasattr(os, "O_TMPFILE"):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600), bool(flags)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
        try:
            path = tempfile.mktemp(prefix=".colonnade-", dir=folder)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
            os.unlink(path)
            return fd, bool(flags)
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:
                raise
    raise AssertionError("unreachable")


def _measure_writes(fd: int, max_bytes: int, seconds: float) -> tuple[int, float]:
    """Write up to `max_bytes` sequentially, less on a nearly full disk. Returns bytes written and bytes per second."""
    buffer = mmap.mmap(-1, RUN)
    buffer.write(np.random.default_rng(0).bytes(RUN))  # Random bytes: disks cannot compress them.
    room = os.fstatvfs(fd)
    max_bytes = min(max_bytes, room.f_bavail * room.f_frsize // 4)
    if max_bytes < 4 * RUN:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    num_bytes = 0
    start = time.perf_counter()
    while num_bytes + RUN <= max_bytes and (
        time.perf_counter() - start < seconds or num_bytes < 4 * RUN
    ):
        try:
            num_bytes += os.pwrite(fd, buffer, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or num_bytes < 4 * RUN:
                raise
            break
    os.fsync(fd)
    elapsed = time.perf_counter() - start
    buffer.close()
    return num_bytes // RUN * RUN, num_bytes / elapsed


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
    for size in MESSAGE_SIZES:
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
        typical = min if size == MESSAGE_SIZES[0] else median
        sent_bytes = float(message_bytes * len(receivers))
        times.append(AllToAllTime(sent_bytes, typical(seconds[1:]), median(processor[1:])))
        if times[-1].seconds > MAX_SECONDS:
            break
    return times


def fit_message_cost(
    message_bytes: Sequence[float], message_seconds: Sequence[float]
) -> tuple[float, float]:
    """Fit a fixed cost in seconds and a rate in bytes per second to measured times; both sequences ascend.

    The fixed cost is the time of the smallest size. The rate fits the additional time, with more weight on large
    sizes."""
    fixed = message_seconds[0]
    increments = [
        (size - message_bytes[0], max(total - fixed, 1e-9))
        for size, total in zip(message_bytes, message_seconds, strict=True)
    ]
    # Least squares of seconds = size / rate through the smallest size: sizes are weighted by their square.
    squares = sum(size * size for size, _ in increments)
    products = sum(size * more for size, more in increments)
    rate = squares / max(products, 1e-12) if squares else 1e12
    return fixed, rate


def _fit_processor_cost(
    message_bytes: Sequence[float], processor_seconds: Sequence[float], num_peers: int
) -> dict[str, float]:
    fixed, rate = fit_message_cost(message_bytes, processor_seconds)
    return {
        "message_processor_seconds": fixed / num_peers,
        "byte_processor_seconds": 0.5 / rate,  # Every byte is sent once and received once.
    }


def _pad_times(times: Sequence[AllToAllTime]) -> torch.Tensor:
    """Return the times as a tensor, (len(MESSAGE_SIZES), 3), with NaN for sizes that were not measured."""
    out = torch.full((len(MESSAGE_SIZES), 3), float("nan"), dtype=torch.float64)
    out[: len(times)] = torch.tensor(times, dtype=torch.float64)
    return out


def _combine_rank_times(rank_times: torch.Tensor) -> tuple[list[float], list[float], list[float]]:
    """Combine the times of all ranks, (N, len(MESSAGE_SIZES), 3), for the sizes that every rank measured.

    Returns the sizes, the seconds of the slowest rank, and the mean processor time."""
    is_measured = ~rank_times.isnan().any(2).any(0)
    sizes = rank_times[0, is_measured, 0]
    seconds = rank_times[:, is_measured, 1].amax(0)
    processor = rank_times[:, is_measured, 2].mean(0)
    return sizes.tolist(), seconds.tolist(), processor.tolist()


def build_planned_world(
    world_shape: str, *, uplink_rate: str | None = None, local_rate: str | None = None
) -> World:
    """Build a world that does not run here from its description.

    world_shape: "HOSTSxRANKS", or a number of ranks on one host. uplink_rate, local_rate: rates such as "1Gbit" or
    "5GB/s". Raises ConfigError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", world_shape)
    if not match or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise ConfigError(
            f"got world {world_shape!r}, wanted HOSTSxRANKS such as 2x4 (2 hosts with 4 ranks each)"
        )
    speeds: dict[str, float] = {}
    for name, field, rate in (
        ("uplink", "remote_bytes_per_second", uplink_rate),
        ("local", "local_bytes_per_second", local_rate),
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
