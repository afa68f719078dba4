"""Reads of rows under way, and writes that are done: what `SsdBacking` hands out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import StorageError
from colonnade.store.contract import Pending
from colonnade.store.segment import TOMBSTONE, Segment, bad_record


def is_row(places: np.ndarray) -> np.ndarray:
    """Which places hold a row: not nowhere, not a tombstone."""
    return (places >= 0) & (places < TOMBSTONE)


class OpenFiles:
    """The segments a read may touch, as the native reader wants them; keeps them open."""

    def __init__(self, parts: Iterable[Segment]) -> None:
        self.files = {part.number: part.file for part in parts}
        self.numbers = np.array(sorted(self.files), np.int64)
        self.fds = np.array([self.files[n].fd for n in self.numbers.tolist()], np.int32)

    def path(self, place: int) -> Path:
        return self.files[place >> 32].path


class PendingRead(Pending):
    """A read under way. Dropping it waits for it."""

    def __init__(self, job: _native.SegmentRead, places: Tensor, files: OpenFiles) -> None:
        self._job = job
        self._places = places
        self._files = files

    def wait(self) -> Tensor:
        fault = self._job.wait()
        if fault is not None:
            kind, place, error = fault
            path, record = self._files.path(place), place & 0xFFFFFFFF
            if kind == "system":
                raise StorageError(
                    error,
                    f"{path}: record {record}: could not read: {os.strerror(error)}. Check this disk (`dmesg`)",
                )
            raise bad_record(path, record, _FAULTS[kind])
        return torch.from_numpy(is_row(self._places.numpy()))


class Written(Pending):
    """A write that is done."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def wait(self) -> Tensor:
        return torch.ones(self._num_rows, dtype=torch.bool)


_FAULTS = {
    "truncated": "the file ends inside it",
    "checksum": "its checksum does not match",
    "other_id": "it belongs to another id",
}
