"""Difference of two commits of one store, computed from their bitmaps alone.

Segments never change, so a record belongs to one of the commits alone exactly where the two bitmaps differ. Work is in
proportion to the changes, and a bit for each record. Legend: N rows that changed, G rows that were deleted.
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
from colonnade.store.live import unpack_flags
from colonnade.store.segment import CRC, HEADER, corrupt_record_error, file_name, missing_file_error
from colonnade.store.stripes import Stripes


@dataclass(frozen=True, slots=True)
class CommitDifference:
    """Rows that differ between two commits.

    ids (N,) int64 ascending with their records (N, record_bytes) uint8 of the later commit; gone (G,) int64 ascending:
    rows of the earlier commit that were deleted.
    """

    ids: np.ndarray
    records: np.ndarray
    gone: np.ndarray


class IncomparableCommits(StorageError):
    """Error: the two commits are of different stores, so their difference is undefined."""


def diff_commits(directory: Path, earlier: int, later: int) -> CommitDifference:
    """Compute the difference of the commits of two steps of the store in `directory`.

    Rows that garbage collection moved without a change are left out. Raises Incomparable; CorruptionError naming the
    file and record with a wrong checksum, StorageError.
    """
    old = _Commit(directory, earlier)
    new = _Commit(directory, later)
    if old.identity != new.identity:
        raise IncomparableCommits(
            f"{directory}: steps {earlier} and {later} are not commits of one store"
        )
    old_parts = old.select_missing_from(new)
    new_parts = new.select_missing_from(old)
    ids, records = _read_selected_records(new_parts, new, is_checked=True)
    # Unchecked: an error in these can only mark an unchanged row as changed.
    old_ids, old_records = _read_selected_records(old_parts, old, is_checked=False)
    positions = np.searchsorted(old_ids, ids)
    positions[positions == len(old_ids)] = 0
    is_same = np.zeros(len(ids), bool)
    if len(old_ids):
        existed = old_ids[positions] == ids
        is_same[existed] = (records[existed] == old_records[positions[existed]]).all(axis=1)
    gone = np.setdiff1d(old_ids, ids, assume_unique=True)
    return CommitDifference(ids[~is_same], records[~is_same], gone)


@dataclass(frozen=True, slots=True)
class _Part:
    """Selected records of one segment of a commit, by their numbers."""

    entry: SegmentEntry
    selected: np.ndarray


class _Commit:
    """Manifest and bitmaps of a step."""

    def __init__(self, directory: Path, step: int) -> None:
        fields: dict[str, Any] = manifests.read_manifest_fields(directory, step)
        self.manifest, store, stripes = manifests.read_manifest(
            directory,
            step,
            table=fields["table"],
            identity=fields["identity"],
            record_bytes=fields["record_bytes"],
        )
        self.identity = (store, fields["table"], fields["identity"], self.manifest.record_bytes)
        self.stripes = Stripes(directory)
        self.stripes.directories |= {number: Path(path) for number, path in stripes.items()}
        parts = manifests.read_live_bitmaps(directory, self.manifest)
        # A segment number may be reused for another file; the header's checksum distinguishes them.
        self.bitmaps = {
            (entry.number, entry.header_crc): part.bitmap
            for entry, part in zip(self.manifest.segments, parts, strict=True)
        }

    def select_missing_from(self, other: _Commit) -> list[_Part]:
        """Select the records that are rows of this commit and not of the other."""
        parts = []
        for entry in self.manifest.segments:
            bitmap = self.bitmaps[entry.number, entry.header_crc]
            other_bitmap = other.bitmaps.get((entry.number, entry.header_crc), bitmap[:0])
            only = bitmap.copy()
            shared = min(len(bitmap), len(other_bitmap))
            only[:shared] &= ~other_bitmap[:shared]
            if only.any():
                selected = np.flatnonzero(unpack_flags(only, entry.num_records))
                parts.append(_Part(entry, selected))
        return parts


def _read_selected_records(
    parts: list[_Part], commit: _Commit, *, is_checked: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Read the selected records of all parts: (ids ascending, records)."""
    width = commit.manifest.record_bytes
    ids = [np.empty(0, np.int64)]
    records = [np.empty((0, width), np.uint8)]
    for part in parts:
        part_ids = _read_segment_ids(part.entry, commit)[part.selected]
        frames = _copy_selected_frames(part, commit)
        if is_checked:
            _check_record_checksums(part, part_ids, frames, width, commit)
        ids.append(part_ids)
        records.append(frames[:, CRC.size : CRC.size + width])
    joined = np.concatenate(ids)
    order = joined.argsort(kind="stable")
    return joined[order], np.concatenate(records)[order]


def _read_segment_ids(entry: SegmentEntry, commit: _Commit) -> np.ndarray:
    """Read the ids of a segment's records, (records,) int64."""
    path = commit.stripes.find_stripe_file(keys_name(entry.number), entry.stripe)
    file = open_key_list(path)
    try:
        return read_key_list(file, entry.number, entry.num_records, entry.checksum).ids()
    finally:
        file.close()


def _copy_selected_frames(part: _Part, commit: _Commit) -> np.ndarray:
    """Copy the frames of the selected records, (selected, stride) uint8."""
    path = commit.stripes.find_stripe_file(file_name(part.entry.number), part.entry.stripe)
    stride = CRC.size + -(-commit.manifest.record_bytes // 4) * 4
    try:
        if path.stat().st_size != part.entry.num_bytes:
            raise corrupt_record_error(
                path, part.entry.num_records - 1, "the file is cut short or altered"
            )
        shape = (part.entry.num_records, stride)
        return np.memmap(path, np.uint8, "r", HEADER.size, shape)[part.selected]
    except FileNotFoundError as error:
        raise missing_file_error(path) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, "read", path) from error


def _check_record_checksums(
    part: _Part, ids: np.ndarray, frames: np.ndarray, width: int, commit: _Commit
) -> None:
    """Check records in runs of neighbours, because a record's checksum covers its position. Raises CorruptionError."""
    ends = np.flatnonzero(np.diff(part.selected) != 1) + 1
    for first, last in zip([0, *ends.tolist()], [*ends.tolist(), len(ids)], strict=True):
        position = part.entry.number << 32 | int(part.selected[first])
        rows = np.ascontiguousarray(frames[first:last])
        bad = _native.check_records(np.ascontiguousarray(ids[first:last]), rows, width, position)
        if bad >= 0:
            path = commit.stripes.find_stripe_file(file_name(part.entry.number), part.entry.stripe)
            raise corrupt_record_error(
                path, int(part.selected[first + bad]), "its checksum does not match"
            )
