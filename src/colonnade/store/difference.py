"""What changed between two commits of one store: found from their bitmaps, without a word from training.

Segments never change, so a record is of one commit alone exactly where the two bitmaps differ. Work is as much as
changed, and a bit for each record. Legend: N rows that changed, G rows that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colonnade import _native
from colonnade.errors import StorageError
from colonnade.store import manifest as manifests
from colonnade.store.contract import SegmentEntry
from colonnade.store.disk import storage_error
from colonnade.store.key_list import file_name as keys_name
from colonnade.store.key_list import open_key_list, read_key_list
from colonnade.store.live import live_flags
from colonnade.store.segment import CRC, HEADER, bad_record, file_name, missing
from colonnade.store.stripes import Stripes


@dataclass(frozen=True, slots=True)
class Difference:
    """ids (N,) int64 ascending with their records (N, record_bytes) uint8 of the later commit; gone (G,) int64
    ascending: rows of the earlier one that are not there any more."""

    ids: np.ndarray
    records: np.ndarray
    gone: np.ndarray


class Incomparable(StorageError):
    """The two commits are of different stores, so nothing says what changed."""


def difference(directory: Path, earlier: int, later: int) -> Difference:
    """Of the commits of two steps of the store in `directory`. Rows that collection moved, and that are as they were,
    are left out.

    Raises Incomparable; CorruptionError naming the file and record whose checksum is wrong, StorageError.
    """
    old, new = _Commit(directory, earlier), _Commit(directory, later)
    if old.meaning != new.meaning:
        raise Incomparable(f"{directory}: steps {earlier} and {later} are not commits of one store")
    dead, fresh = old.without(new), new.without(old)
    ids, records = _gather(fresh, new, is_checked=True)
    # Unchecked: what is wrong here can only make a row count as changed that is not.
    old_ids, old_records = _gather(dead, old, is_checked=False)
    there = np.searchsorted(old_ids, ids)
    there[there == len(old_ids)] = 0
    is_same = np.zeros(len(ids), bool)
    if len(old_ids):
        was_there = old_ids[there] == ids
        is_same[was_there] = (records[was_there] == old_records[there[was_there]]).all(axis=1)
    gone = np.setdiff1d(old_ids, ids, assume_unique=True)
    return Difference(ids[~is_same], records[~is_same], gone)


@dataclass(frozen=True, slots=True)
class _Part:
    """One segment of a commit, and the numbers of those of its records that are looked at."""

    entry: SegmentEntry
    chosen: np.ndarray


class _Commit:
    """A step's manifest and bitmaps."""

    def __init__(self, directory: Path, step: int) -> None:
        said: dict[str, Any] = manifests.describe(directory, step)
        self.manifest, store, stripes = manifests.read_manifest(
            directory, step,
            table=said["table"], identity=said["identity"], record_bytes=said["record_bytes"],
        )  # fmt: skip
        self.meaning = (store, said["table"], said["identity"], self.manifest.record_bytes)
        self.stripes = Stripes(directory)
        self.stripes.directories |= {number: Path(place) for number, place in stripes.items()}
        parts = manifests.read_live(directory, self.manifest)
        # A number may be another file's by now; its header's checksum tells.
        self.bitmaps = {
            (entry.number, entry.header_crc): part.bitmap
            for entry, part in zip(self.manifest.segments, parts, strict=True)
        }

    def without(self, other: _Commit) -> list[_Part]:
        """The records that are rows of this commit and not of the other."""
        found = []
        for entry in self.manifest.segments:
            mine = self.bitmaps[entry.number, entry.header_crc]
            theirs = other.bitmaps.get((entry.number, entry.header_crc), mine[:0])
            only = mine.copy()
            shared = min(len(mine), len(theirs))
            only[:shared] &= ~theirs[:shared]
            if only.any():
                chosen = np.flatnonzero(live_flags(only, entry.num_records))
                found.append(_Part(entry, chosen))
        return found


def _gather(
    parts: list[_Part], commit: _Commit, *, is_checked: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(ids ascending, records) of the chosen records of all parts."""
    width = commit.manifest.record_bytes
    ids, records = [np.empty(0, np.int64)], [np.empty((0, width), np.uint8)]
    for part in parts:
        of = _ids(part.entry, commit)[part.chosen]
        frames = _frames(part, commit)
        if is_checked:
            _check(part, of, frames, width, commit)
        ids.append(of)
        records.append(frames[:, CRC.size : CRC.size + width])
    every = np.concatenate(ids)
    order = every.argsort(kind="stable")
    return every[order], np.concatenate(records)[order]


def _ids(entry: SegmentEntry, commit: _Commit) -> np.ndarray:
    """(records,) int64."""
    path = commit.stripes.find(keys_name(entry.number), entry.stripe)
    file = open_key_list(path)
    try:
        return read_key_list(file, entry.number, entry.num_records, entry.checksum).ids()
    finally:
        file.close()


def _frames(part: _Part, commit: _Commit) -> np.ndarray:
    """(chosen, stride) uint8, copied."""
    path = commit.stripes.find(file_name(part.entry.number), part.entry.stripe)
    stride = CRC.size + -(-commit.manifest.record_bytes // 4) * 4
    try:
        if path.stat().st_size != part.entry.num_bytes:
            raise bad_record(path, part.entry.num_records - 1, "the file is cut short or altered")
        shape = (part.entry.num_records, stride)
        return np.memmap(path, np.uint8, "r", HEADER.size, shape)[part.chosen]
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, "read", path) from error


def _check(part: _Part, ids: np.ndarray, frames: np.ndarray, width: int, commit: _Commit) -> None:
    """A record's checksum covers its place, so records are checked by runs of neighbours."""
    ends = np.flatnonzero(np.diff(part.chosen) != 1) + 1
    for first, last in zip([0, *ends.tolist()], [*ends.tolist(), len(ids)], strict=True):
        place = part.entry.number << 32 | int(part.chosen[first])
        rows = np.ascontiguousarray(frames[first:last])
        bad = _native.check_records(np.ascontiguousarray(ids[first:last]), rows, width, place)
        if bad >= 0:
            path = commit.stripes.find(file_name(part.entry.number), part.entry.stripe)
            raise bad_record(path, int(part.chosen[first + bad]), "its checksum does not match")
