"""Rows read from and written to a log: argument checks, pending reads, scans."""

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
from colonnade.store.log.key_list import Keys
from colonnade.store.log.live import unpack_flags
from colonnade.store.log.segment import corrupt_record_error, read_frames
from colonnade.store.log.segment_files import LogFiles, SegmentFile

SNAPSHOT_TRIES = 100


class PendingRead(Pending):
    """Read in progress. Dropping it waits for it."""

    def __init__(self, job: _native.LogRead, out: Tensor, path_of: Callable[[int], Path]) -> None:
        self._job = job
        self._out = out  # the job writes to it
        self._path_of = path_of

    def wait(self) -> Tensor:
        exists, fault = self._job.wait()
        raise_read_fault(fault, self._path_of)
        return torch.as_tensor(np.asarray(exists).astype(bool))


def check_id_array(ids: Tensor) -> None:
    """Raise ValueError unless ids are (N,) int64 as native code takes them."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not _is_plain(ids):
        raise ValueError(
            f"ids: got {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}, wanted a contiguous "
            "(N,) torch.int64 on the CPU"
        )


def check_record_arrays(ids: Tensor, records: Tensor, record_bytes: int) -> None:
    """Raise ValueError unless ids are (N,) int64 and records (N, record_bytes) uint8."""
    check_id_array(ids)
    shape = (len(ids), record_bytes)
    if records.dtype != torch.uint8 or tuple(records.shape) != shape or not _is_plain(records):
        raise ValueError(
            f"records: got {records.dtype} of shape {tuple(records.shape)} on {records.device}, wanted a "
            f"contiguous {shape} torch.uint8 on the CPU"
        )


def _is_plain(array: Tensor) -> bool:
    return array.is_contiguous() and array.device.type == "cpu"


def raise_read_fault(
    native_fault: tuple[str, int, int] | None, find_segment_path: Callable[[int], Path]
) -> None:
    """Raise a native read's fault (kind, place, errno) as StorageError or CorruptionError; None: return."""
    if native_fault is None:
        return
    kind, place, error = native_fault
    path = find_segment_path(place >> 32)
    record = place & 0xFFFFFFFF
    if kind == "system":
        raise StorageError(
            error,
            f"{path}: record {record}: could not read: {os.strerror(error)}. Check this disk (`dmesg`)",
        )
    raise corrupt_record_error(path, record, _FAULTS[kind])


_FAULTS = {
    "truncated": "the file ends inside it",
    "checksum": "its checksum does not match",
}


@dataclass(frozen=True, slots=True)
class SegmentRecords:
    """Records of a segment that are complete in its file."""

    file: SegmentFile
    live: np.ndarray
    """Flags (N,) bool of records that are rows."""
    keys: Keys | None
    """Ids of the records; None: read them from the segment's key list."""


class SegmentCompleted(Exception):
    """Internal signal: a segment became complete during a snapshot."""


def scan_live_rows(
    row_log: _native.RowLog, log_files: LogFiles, page_reader: _native.PageReader
) -> Iterator[RowBatch]:
    """Yield every live row once, as of the call. The caller prevents moves of rows during the call, not after.

    Rows in files are read during the iteration, rows in memory are copied at once.
    """
    for _ in range(SNAPSHOT_TRIES):
        before = _count_changes(row_log)
        try:
            on_disk, in_memory = _snapshot_live_rows(row_log, log_files, page_reader)
        except SegmentCompleted:
            continue
        if _count_changes(row_log) == before:
            return _read_row_batches(on_disk, in_memory, log_files)
    raise StorageError(
        f"{log_files.stripes.home}: got changes during each of {SNAPSHOT_TRIES} attempts to start a scan, wanted none "
        "during one. Scan between two steps"
    )


def _count_changes(log: _native.RowLog) -> tuple[int, int]:
    counts = log.counts()
    return counts["rows_written"], counts["rows_deleted"]


def _snapshot_live_rows(
    log: _native.RowLog, files: LogFiles, reader: _native.PageReader
) -> tuple[list[SegmentRecords], list[RowBatch]]:
    """List the records that are in files, and copy the live rows that are not.

    Raises SegmentCompleted: take another snapshot.
    """
    on_disk = []
    in_memory = []
    numbers, records, live, _ = (np.asarray(column) for column in log.segments())
    for number, num_records, num_live in zip(
        numbers.tolist(), records.tolist(), live.tolist(), strict=True
    ):
        if not num_live:
            continue
        flags = unpack_flags(np.asarray(log.live(number)), num_records)
        part, num_written = files.find_segment(number)
        num_written = min(num_written, num_records)
        if part is not None and part.is_complete:
            on_disk.append(SegmentRecords(part, flags, None))
            continue
        try:
            keys = np.asarray(log.keys(number))
        except ValueError:
            raise SegmentCompleted from None
        if part is not None and flags[:num_written].any():
            on_disk.append(
                SegmentRecords(part, flags[:num_written], Keys.pack_ids(keys[:num_written]))
            )
        if not flags[num_written:].any():
            continue
        ids = torch.from_numpy(keys[num_written:num_records][flags[num_written:]].copy())
        rows = torch.empty(len(ids), files.shape.record_bytes, dtype=torch.uint8)
        exists, fault = log.read(reader, ids, rows, True).wait()
        raise_read_fault(fault, files.path_of)
        has_row = torch.as_tensor(np.asarray(exists).astype(bool))
        in_memory.append(RowBatch(ids[has_row], rows[has_row]))
    return on_disk, in_memory


def _read_row_batches(
    disk_segments: list[SegmentRecords], memory_batches: list[RowBatch], log_files: LogFiles
) -> Iterator[RowBatch]:
    width = log_files.shape.record_bytes
    for part in disk_segments:
        file = part.file
        keys = part.keys or file.read_keys()
        for first, ids, frames in read_frames(file.file, file.number, log_files.shape, keys):
            is_live = part.live[first : first + len(frames)]
            if is_live.any():
                rows = np.ascontiguousarray(frames["payload"][is_live, :width])
                yield RowBatch(torch.from_numpy(ids[is_live]), torch.from_numpy(rows))
    yield from memory_batches
