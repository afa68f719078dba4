"""What this machine's tiers do, measured: rows of memory, random reads and runs of a directory's disk.

`measure` takes a few seconds and leaves nothing behind: its scratch file has no name (or loses it before the first
byte), so that not even a kill keeps it. The result is a frozen value that prints and round-trips through JSON.
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
from colonnade.formats import read_stamped, stamp
from colonnade.optimizers import RowWiseAdagrad
from colonnade.processors import usable_processors
from colonnade.store.disk import storage_error
from colonnade.store.dram import open_dram
from colonnade.table import Table

PAGE = 4096
RUN = 1 << 20
"""Bytes of one sequential write or read."""
SIZES = (PAGE, 4 * PAGE, 16 * PAGE)
DEPTHS = (1, 8, 32)
WIDTHS = (16, 64, 128)
"""Floats of a row whose rates are measured."""
ROW_STRIDE, ROWS_OF_A_JOB, JOBS, READ_DEPTH = 256, 256, 6, 32
LOG_BYTES = 96 << 20
TABLE_BYTES = 64 << 20
LOOKUPS = 1 << 16


@dataclass(frozen=True, slots=True)
class RowRate:
    """Rows per second of one thread-pool, named at random in a table beyond the processor's caches; and lookups of such
    a batch, whose rates depend on no width. 0: nobody looked."""

    width: int
    """Floats of a row."""
    gathered: float
    updated: float
    planned: float = 0.0
    """Lookups per second grouped by row."""
    packed: float = 0.0
    """Lookups per second packed for the rank that pools them, and joined to a batch there."""


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Random reads of `bytes` each, `depth` at a time."""

    bytes: int
    depth: int
    per_second: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class DirectoryRate:
    path: str
    is_direct: bool
    """Whether the file system lets reads and writes pass its cache by; where not, rates are those of the cache."""
    written: float
    """Bytes per second, in runs of 1 MiB."""
    read: float
    """Bytes per second, in runs of 1 MiB."""
    reads: tuple[ReadRate, ...]
    reader: str
    """How the store reads here: "ring" (io_uring) or "threads"."""
    rows: float
    """Rows per second, each on a page of its own, by the store's own reader."""
    processor_seconds: float
    """Of one such row."""

    @property
    def pages(self) -> float:
        """Most random reads of 4 KiB per second, by whichever way was faster: others use this machine too."""
        return max(self.rows, *(rate.per_second for rate in self.reads if rate.bytes == PAGE))

    @property
    def latency(self) -> float:
        """99th percentile of a lone read of 4 KiB, seconds."""
        return min(rate.p99_seconds for rate in self.reads if rate.bytes == PAGE)


@dataclass(frozen=True, slots=True)
class Device:
    processors: int
    memory: tuple[RowRate, ...]
    directories: tuple[DirectoryRate, ...]

    def to_json(self) -> str:
        return json.dumps({**stamp("colonnade device"), **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Device:
        values = read_stamped("device.json", text, "colonnade device")
        directories = tuple(
            DirectoryRate(**{**each, "reads": tuple(ReadRate(**rate) for rate in each["reads"])})
            for each in values["directories"]
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
        for place in self.directories:
            how = "" if place.is_direct else " (through the page cache)"
            lines.append(
                f"{place.path}{how}: writes {place.written / 1e6:,.0f} MB/s, reads {place.read / 1e6:,.0f} MB/s in "
                f"runs, {place.pages / 1e3:,.1f} k random pages/s, {place.latency * 1e6:,.0f} us for one; rows by "
                f"{place.reader}, {place.processor_seconds * 1e6:.1f} us of a processor each"
            )
        return "\n".join(lines)


def measure(
    directories: Sequence[Path | str],
    *,
    scratch_bytes: int = 192 << 20,
    seconds: float = 0.15,
    widths: Sequence[int] = WIDTHS,
) -> Device:
    """About `seconds` for each of a dozen rates of each directory. Raises StorageError naming a directory that cannot
    be written or has no room for a few megabytes."""
    return Device(
        usable_processors(),
        tuple(measure_rows(width, seconds) for width in widths),
        tuple(measure_directory(place, scratch_bytes, seconds) for place in directories),
    )


def measure_rows(width: int, seconds: float = 0.15) -> RowRate:
    """Through the native core as training does it: one lookup per bag, row-wise Adagrad."""
    table = Table("rate", width, rows=TABLE_BYTES // (4 * width), optimizer=RowWiseAdagrad(lr=0.01))
    assert table.rows is not None
    store = open_dram([table], [table.rows], seed=0)
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
    view, out = store.views()[0], torch.zeros(LOOKUPS, width)
    reads = _native.Reads(one, one, torch.tensor([width], dtype=torch.int32))
    bases, strides = torch.tensor([out.data_ptr()]), torch.tensor([4 * width])
    parts = _native.Parts(one, one, torch.tensor([width], dtype=torch.int32), one)
    source = _native.OutputGradients(lookups, reads, bases, strides, "float32")
    settings = torch.zeros(1, 16, dtype=torch.float64)
    settings[0, [0, 2, 9, 10, 11]] = torch.tensor(
        [0.01, 1e-8, np.inf, np.inf, 1.0], dtype=torch.float64
    )
    kind = torch.tensor([RowWiseAdagrad.kind], dtype=torch.int32)
    gathered = _rate(seconds, lambda: _native.pool(
        lookups, index, torch.tensor([view.address]), torch.tensor([view.stride_bytes]), reads, bases, strides,
        "float32", "float32",
    ))  # fmt: skip
    updated = _rate(seconds, lambda: _native.update(
        store.native, slots, offsets, plan.segment_offsets, plan.entries, source, parts, kind, settings
    ))  # fmt: skip
    rows = torch.tensor([table.rows])
    planned = _rate(seconds, lambda: _native.make_plan(lookups, rows, torch.tensor([1])))
    packed = _rate(seconds, lambda: _packed_and_joined(lookups, rows))
    return RowRate(
        width, gathered * LOOKUPS, updated * len(unique), planned * LOOKUPS, packed * LOOKUPS
    )


def _packed_and_joined(lookups: _native.Lookups, rows: torch.Tensor) -> None:
    """One column, all of whose rows lie on one rank."""
    one, zero = torch.tensor([1]), torch.zeros(1, 1, dtype=torch.int64)
    unweighted, table = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    message, _ = _native.pack_bags(lookups, rows, one, zero, unweighted, None)
    _native.join_bags([np.asarray(message)], table, rows, one, zero[0], "float32")


def measure_directory(
    path: Path | str, scratch_bytes: int = 192 << 20, seconds: float = 0.15
) -> DirectoryRate:
    """Of the disk under a directory, made if absent and removed again. Raises StorageError."""
    place = Path(path)
    made = missing_folders(place)
    try:
        place.mkdir(parents=True, exist_ok=True)
        fd, is_direct = _scratch(place)
        try:
            size, written = _write(fd, scratch_bytes, max(seconds * 4, 0.2))
            read = _read_runs(fd, size, seconds)
            rates = [
                read_at_random(fd, size, count, depth, seconds)
                for count in SIZES
                for depth in DEPTHS
            ]
            os.ftruncate(fd, 0)
            reader, rows, processor = _read_rows(fd, min(size - 2 * RUN, LOG_BYTES), seconds * 2)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, "measure", place) from error
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
    return DirectoryRate(
        str(place), is_direct, written, read, tuple(rates), reader, rows, processor
    )


def read_at_random(fd: int, size: int, count: int, depth: int, seconds: float) -> ReadRate:
    """Of reads of `count` bytes by `depth` threads of Python's, which are slower than the store's reader."""
    ends = time.perf_counter() + seconds
    latencies: list[list[float]] = [[] for _ in range(depth)]
    failed: list[OSError] = []

    def work(number: int) -> None:
        buffer, found = mmap.mmap(-1, count), latencies[number]
        places = np.random.default_rng(number).integers(0, max(1, size // count), 1 << 14) * count
        try:
            for place in places.tolist():
                began = time.perf_counter()
                os.preadv(fd, [buffer], place)
                now = time.perf_counter()
                found.append(now - began)
                if now > ends:
                    return
        except OSError as error:
            failed.append(error)
        finally:
            buffer.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(depth)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if failed:
        raise failed[0]
    every = np.concatenate([np.array(each) for each in latencies])
    return ReadRate(count, depth, len(every) / took, float(np.quantile(every, 0.99)))


def _read_rows(fd: int, size: int, seconds: float) -> tuple[str, float, float]:
    """(kind of reader, rows per second, processor seconds of one): a log of small rows in an empty file, of which
    rows far apart are read, several jobs in flight as in training."""
    count = max(size // ROW_STRIDE, 1)
    log = _native.RowLog(ROW_STRIDE - 16, count, 1, 0, size + 2 * RUN, RUN, 1, 1)
    records = torch.zeros(4096, ROW_STRIDE - 16, dtype=torch.uint8)
    is_attached = False

    def write() -> None:
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
        write()
    log.seal()
    write()
    reader = _native.PageReader("auto", READ_DEPTH)
    random = np.random.default_rng(0)
    jobs: list[tuple] = []  # (job, its output), oldest first
    done, used, began = 0, time.process_time(), time.perf_counter()

    def finish() -> None:
        nonlocal done
        _, fault = jobs.pop(0)[0].wait()
        if fault is not None:
            raise OSError(fault[2] or errno.EIO, f"reading rows failed: {fault[0]}")
        done += ROWS_OF_A_JOB

    try:
        while time.perf_counter() - began < seconds or not done:
            if len(jobs) == JOBS:
                finish()
            ids = torch.from_numpy(random.integers(0, count, ROWS_OF_A_JOB))
            out = torch.empty(len(ids), ROW_STRIDE - 16, dtype=torch.uint8)
            jobs.append((log.read(reader, ids, out, True), out))
        while jobs:
            finish()
    finally:
        for job, _ in jobs:  # whatever happened: the file must stay open until nobody reads it
            job.wait()
    rows, took = done, time.perf_counter() - began
    return reader.kind, rows / took, (time.process_time() - used) / rows


def _rate(seconds: float, action) -> float:
    """Calls per second; the fastest of three, for others use this machine too."""
    action()
    best = 0.0
    for _ in range(3):
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds / 3:
            action()
            count += 1
        best = max(best, count / took)
    return best


def missing_folders(place: Path) -> list[Path]:
    """Folders that `place` would make, innermost first."""
    found = []
    while not place.exists() and place != place.parent:
        found.append(place)
        place = place.parent
    return found


def _scratch(place: Path) -> tuple[int, bool]:
    """An open file without a name, and whether it passes the page cache by."""
    for flags in (os.O_DIRECT, 0) if hasattr(os, "O_DIRECT") else (0,):
        try:
            if hasattr(os, "O_TMPFILE"):
                return os.open(place, os.O_TMPFILE | os.O_RDWR | flags, 0o600), bool(flags)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
        try:
            path = tempfile.mktemp(prefix=".colonnade-", dir=place)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
            os.unlink(path)
            return fd, bool(flags)
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:
                raise
    raise AssertionError("unreachable")


def _write(fd: int, most: int, seconds: float) -> tuple[int, float]:
    """(bytes written, bytes per second). A disk that is nearly full is written as far as it goes."""
    buffer = mmap.mmap(-1, RUN)
    buffer.write(np.random.default_rng(0).bytes(RUN))  # nothing that a disk could compress
    room = os.fstatvfs(fd)
    most = min(most, room.f_bavail * room.f_frsize // 4)
    if most < 4 * RUN:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    done, began = 0, time.perf_counter()
    while done + RUN <= most and (time.perf_counter() - began < seconds or done < 4 * RUN):
        try:
            done += os.pwrite(fd, buffer, done)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or done < 4 * RUN:
                raise
            break
    os.fsync(fd)
    took = time.perf_counter() - began
    buffer.close()
    return done // RUN * RUN, done / took


def _read_runs(fd: int, size: int, seconds: float) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
    buffer, done, began = mmap.mmap(-1, RUN), 0, time.perf_counter()
    while done < RUN or time.perf_counter() - began < seconds:
        done += os.preadv(fd, [buffer], done % size)
    rate = done / (time.perf_counter() - began)
    buffer.close()
    return rate
