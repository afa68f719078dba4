"""Measured speed of this machine: rows in memory, random and sequential access to a directory's disk.

`measure_device` takes a few seconds and leaves no files: its scratch file has no name (or loses it before the first
byte), so that it is gone even after a kill. The result is a frozen value that can be printed and converted to and from
JSON.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from colonnade import _native
from colonnade.formats import make_format_stamp, parse_stamped_json
from colonnade.optimizers import RowWiseAdagrad
from colonnade.processors import count_usable_processors
from colonnade.store.disk import storage_error
from colonnade.store.dram import open_dram_store
from colonnade.table import Table

PAGE = 4096
RUN = 1 << 20
"""Number of bytes of one sequential write or read."""
SIZES = (PAGE, 4 * PAGE, 16 * PAGE)
DEPTHS = (1, 8, 32)
WIDTHS = (16, 64, 128)
"""Widths, in floats, of the rows to measure."""
ROW_STRIDE = 256
ROWS_OF_A_JOB = 256
JOBS = 6
READ_DEPTH = 32
LOG_BYTES = 96 << 20
TABLE_BYTES = 64 << 20
LOOKUPS = 1 << 16


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
class ReadRate:
    """Speed of random reads of `bytes` each, with `depth` reads at a time."""

    bytes: int
    depth: int
    per_second: float
    p99_seconds: float
    """Latency of a read, 99th percentile, in seconds."""


@dataclass(frozen=True, slots=True)
class DirectoryRate:
    """Speed of the disk under one directory."""

    path: str
    is_direct: bool
    """True if reads and writes bypass the file system's cache; otherwise the rates are those of the cache."""
    written: float
    """Bytes written per second, in runs of 1 MiB."""
    read: float
    """Bytes read per second, in runs of 1 MiB."""
    reads: tuple[ReadRate, ...]
    reader: str
    """Method of the store's reader for this directory: "ring" (io_uring) or "threads"."""
    rows: float
    """Number of rows that the store's reader reads per second, each on a page of its own."""
    processor_seconds: float
    """Processor time of one such row."""

    @property
    def pages(self) -> float:
        """Largest measured number of random reads of 4 KiB per second; other programs may slow some measurements."""
        return max(self.rows, *(rate.per_second for rate in self.reads if rate.bytes == PAGE))

    @property
    def latency(self) -> float:
        """Latency of a single read of 4 KiB, 99th percentile, in seconds."""
        return min(rate.p99_seconds for rate in self.reads if rate.bytes == PAGE)


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
        directories = tuple(
            DirectoryRate(
                **{**fields, "reads": tuple(ReadRate(**rate) for rate in fields["reads"])}
            )
            for fields in values["directories"]
        )
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
                f"{directory.read / 1e6:,.0f} MB/s in runs, {directory.pages / 1e3:,.1f} k random pages/s, "
                f"{directory.latency * 1e6:,.0f} us for one; rows by {directory.reader}, "
                f"{directory.processor_seconds * 1e6:.1f} us of a processor each"
            )
        return "\n".join(lines)


def measure_device(
    directories: Sequence[Path | str],
    *,
    scratch_bytes: int = 192 << 20,
    seconds: float = 0.15,
    widths: Sequence[int] = WIDTHS,
) -> Device:
    """Measure the speed of this machine's memory and of these directories.

    Takes about `seconds` for each of a dozen rates of each directory. Raises StorageError with the directory that
    cannot be written or has no room for a few megabytes."""
    return Device(
        count_usable_processors(),
        tuple(measure_rows(width, seconds) for width in widths),
        tuple(measure_directory_speed(path, scratch_bytes, seconds) for path in directories),
    )


def measure_rows(width: int, seconds: float = 0.15) -> RowRate:
    """Measure row operations of the native core as in training: one lookup per bag, row-wise Adagrad."""
    table = Table("rate", width, rows=TABLE_BYTES // (4 * width), optimizer=RowWiseAdagrad(lr=0.01))
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
    kind = torch.tensor([RowWiseAdagrad.kind], dtype=torch.int32)
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
            read = _measure_sequential_reads(fd, size, seconds)
            rates = [
                measure_random_reads(fd, size, count, depth, seconds)
                for count in SIZES
                for depth in DEPTHS
            ]
            os.ftruncate(fd, 0)
            log_bytes = min(size - 2 * RUN, LOG_BYTES)
            reader, rows, processor = _measure_row_reads(fd, log_bytes, seconds * 2)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, "measure", folder) from error
    finally:
        for new_folder in new_folders:
            with suppress(OSError):
                new_folder.rmdir()
    return DirectoryRate(
        str(folder), is_direct, written, read, tuple(rates), reader, rows, processor
    )


def measure_random_reads(fd: int, size: int, count: int, depth: int, seconds: float) -> ReadRate:
    """Measure random reads of `count` bytes by `depth` Python threads, which are slower than the store's reader."""
    end = time.perf_counter() + seconds
    latencies: list[list[float]] = [[] for _ in range(depth)]
    errors: list[OSError] = []

    def read_until_end(thread_index: int) -> None:
        buffer = mmap.mmap(-1, count)
        own_latencies = latencies[thread_index]
        random = np.random.default_rng(thread_index)
        offsets = random.integers(0, max(1, size // count), 1 << 14) * count
        try:
            for offset in offsets.tolist():
                start = time.perf_counter()
                os.preadv(fd, [buffer], offset)
                now = time.perf_counter()
                own_latencies.append(now - start)
                if now > end:
                    return
        except OSError as error:
            errors.append(error)
        finally:
            buffer.close()

    threads = [threading.Thread(target=read_until_end, args=(i,)) for i in range(depth)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    if errors:
        raise errors[0]
    all_latencies = np.concatenate([np.array(by_thread) for by_thread in latencies])
    p99 = float(np.quantile(all_latencies, 0.99))
    return ReadRate(count, depth, len(all_latencies) / elapsed, p99)


def _measure_row_reads(fd: int, size: int, seconds: float) -> tuple[str, float, float]:
    """Measure reads of rows from a log of small rows in an empty file, with several jobs in flight as in training.

    The rows of a job are far apart. Returns the kind of reader, rows per second, and processor seconds of a row."""
    count = max(size // ROW_STRIDE, 1)
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
    reader = _native.PageReader("auto", READ_DEPTH)
    random = np.random.default_rng(0)
    jobs: list[tuple] = []  # (job, its output), oldest first
    num_rows = 0
    processor_start = time.process_time()
    start_time = time.perf_counter()

    def finish_job() -> None:
        nonlocal num_rows
        _, fault = jobs.pop(0)[0].wait()
        if fault is not None:
            raise OSError(fault[2] or errno.EIO, f"reading rows failed: {fault[0]}")
        num_rows += ROWS_OF_A_JOB

    try:
        while time.perf_counter() - start_time < seconds or not num_rows:
            if len(jobs) == JOBS:
                finish_job()
            ids = torch.from_numpy(random.integers(0, count, ROWS_OF_A_JOB))
            out = torch.empty(len(ids), ROW_STRIDE - 16, dtype=torch.uint8)
            jobs.append((log.read(reader, ids, out, True), out))
        while jobs:
            finish_job()
    finally:
        for (
            job,
            _,
        ) in jobs:  # After an error, too, the file must stay open until all reads have ended.
            job.wait()
    elapsed = time.perf_counter() - start_time
    return reader.kind, num_rows / elapsed, (time.process_time() - processor_start) / num_rows


def _measure_calls_per_second(seconds: float, action) -> float:
    """Measure the calls of `action` per second: the fastest of three runs, because other programs may interfere."""
    action()
    best = 0.0
    for _ in range(3):
        count = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds / 3:
            action()
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


def _measure_sequential_reads(fd: int, size: int, seconds: float) -> float:
    """Measure the bytes read per second in runs."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
    buffer = mmap.mmap(-1, RUN)
    num_bytes = 0
    start = time.perf_counter()
    while num_bytes < RUN or time.perf_counter() - start < seconds:
        num_bytes += os.preadv(fd, [buffer], num_bytes % size)
    rate = num_bytes / (time.perf_counter() - start)
    buffer.close()
    return rate
