"""Rows of a log on their way in and out: what a call may hand over, reads under way, writes that are done, scans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import StorageError
from colonnade.store.contract import Pending, RowBatch
from colonnade.store.key_list import Keys
from colonnade.store.live import live_flags
from colonnade.store.log_files import LogFiles, SegmentFile
from colonnade.store.segment import bad_record, read_frames

SNAPSHOT_TRIES = 100


class PendingRead(Pending):
    """A read under way. Dropping it waits for it."""

    def __init__(self, job: _native.LogRead, out: Tensor, path_of: Callable[[int], Path]) -> None:
        self._job = job
        self._out = out  # the job writes to it
        self._path_of = path_of

    def wait(self) -> Tensor:
        found, fault = self._job.wait()
        raise_fault(fault, self._path_of)
        return torch.as_tensor(np.asarray(found).astype(bool))


class Written(Pending):
    """A write that is done."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def wait(self) -> Tensor:
        return torch.ones(self._num_rows, dtype=torch.bool)


def check_ids(ids: Tensor) -> None:
    """Raises ValueError unless ids are (N,) int64 as native code takes them."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not _is_plain(ids):
        raise ValueError(
            f"ids: got {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}, wanted a contiguous "
            "(N,) torch.int64 on the CPU"
        )


def check_batch(ids: Tensor, records: Tensor, record_bytes: int) -> None:
    """Raises ValueError unless ids are (N,) int64 and records (N, record_bytes) uint8."""
    check_ids(ids)
    shape = (len(ids), record_bytes)
    if records.dtype != torch.uint8 or tuple(records.shape) != shape or not _is_plain(records):
        raise ValueError(
            f"records: got {records.dtype} of shape {tuple(records.shape)} on {records.device}, wanted a "
            f"contiguous {shape} torch.uint8 on the CPU"
        )


def _is_plain(array: Tensor) -> bool:
    return array.is_contiguous() and array.device.type == "cpu"


def raise_fault(fault: tuple[str, int, int] | None, path_of: Callable[[int], Path]) -> None:
    """What a native read says is wrong (kind, place, errno), as StorageError or CorruptionError."""
    if fault is None:
        return
    kind, place, error = fault
    path, record = path_of(place >> 32), place & 0xFFFFFFFF
    if kind == "system":
        raise StorageError(
            error,
            f"{path}: record {record}: could not read: {os.strerror(error)}. Check this disk (`dmesg`)",
        )
    raise bad_record(path, record, _FAULTS[kind])


_FAULTS = {
    "truncated": "the file ends inside it",
    "checksum": "its checksum does not match",
}


@dataclass(frozen=True, slots=True)
class PartOnDisk:
    """The records of a segment that are whole in its file."""

    file: SegmentFile
    live: np.ndarray
    """(N,) bool: rows."""
    keys: Keys | None
    """None: in the segment's key list."""


class KeysGone(Exception):
    """A segment became complete while it was looked at."""


def scan_rows(
    log: _native.RowLog, files: LogFiles, reader: _native.PageReader
) -> Iterator[RowBatch]:
    """Every live row as of the call, each once. The caller keeps rows from moving during the call, not after.

    What is in files is read as the iteration goes, what is in memory is copied at once.
    """
    for _ in range(SNAPSHOT_TRIES):
        before = _changes(log)
        try:
            on_disk, in_memory = _snapshot(log, files, reader)
        except KeysGone:
            continue
        if _changes(log) == before:
            return _batches(on_disk, in_memory, files)
    raise StorageError(
        f"{files.stripes.home}: got changes all along while a scan was to begin, wanted a moment without. "
        "Scan between two steps"
    )


def _changes(log: _native.RowLog) -> tuple[int, int]:
    counts = log.counts()
    return counts["rows_written"], counts["rows_deleted"]


def _snapshot(
    log: _native.RowLog, files: LogFiles, reader: _native.PageReader
) -> tuple[list[PartOnDisk], list[RowBatch]]:
    """Segments whose records are on the disk, and the live rows that are not there yet.

    Raises KeysGone: look again.
    """
    on_disk, in_memory = [], []
    numbers, records, live, _ = (np.asarray(column) for column in log.segments())
    for number, num_records, num_live in zip(
        numbers.tolist(), records.tolist(), live.tolist(), strict=True
    ):
        if not num_live:
            continue
        flags = live_flags(np.asarray(log.live(number)), num_records)
        part, there = files.look_up(number)
        there = min(there, num_records)
        if part is not None and part.is_complete:
            on_disk.append(PartOnDisk(part, flags, None))
            continue
        try:
            keys = np.asarray(log.keys(number))
        except ValueError:
            raise KeysGone from None
        if part is not None and flags[:there].any():
            on_disk.append(PartOnDisk(part, flags[:there], Keys.of(keys[:there])))
        if not flags[there:].any():
            continue
        ids = torch.from_numpy(keys[there:num_records][flags[there:]].copy())
        rows = torch.empty(len(ids), files.shape.record_bytes, dtype=torch.uint8)
        found, fault = log.read(reader, ids, rows, True).wait()
        raise_fault(fault, files.path_of)
        is_found = torch.as_tensor(np.asarray(found).astype(bool))
        in_memory.append(RowBatch(ids[is_found], rows[is_found]))
    return on_disk, in_memory


def _batches(
    on_disk: list[PartOnDisk], in_memory: list[RowBatch], files: LogFiles
) -> Iterator[RowBatch]:
    width = files.shape.record_bytes
    for part in on_disk:
        of = part.file
        keys = part.keys or of.read_keys()
        for first, ids, frames in read_frames(of.file, of.number, files.shape, keys):
            chosen = part.live[first : first + len(frames)]
            if chosen.any():
                rows = np.ascontiguousarray(frames["payload"][chosen, :width])
                yield RowBatch(torch.from_numpy(ids[chosen]), torch.from_numpy(rows))
    yield from in_memory
