"""Commits read without opening their log: every byte verified, or two of them compared.

Manifests have all that is needed to know of the table. Opening a log checks in addition that no id is live twice.
Legend: N rows that changed between two commits, G rows that were deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colonnade import _native
from colonnade.errors import CorruptionError, StorageError
from colonnade.files.disk import DiskFile, storage_error
from colonnade.files.durable import VerifiedFile, verify_file
from colonnade.store.contract import SegmentEntry
from colonnade.store.log import key_list, live, segment
from colonnade.store.log import manifest as manifests
from colonnade.store.log.key_list import Keys
from colonnade.store.log.segment import SegmentShape, corrupt_record_error, owner_digest
from colonnade.store.log.stripes import Stripe, open_stripes


class StoredCommit:
    """Commit of one table's shard. It reads its files when asked to."""

    def __init__(self, directory: Path, step: int, *, places: Sequence[Path] = ()) -> None:
        """Read the manifest. Raises CorruptionError, CheckpointError, StorageError.

        places: present paths of directories of the log that are not where the manifest says.
        """
        manifest = manifests.read_manifest(directory, step)
        self.directory = directory
        self.manifest = manifest
        owner = owner_digest(manifest.table, manifest.identity)
        self.shape = SegmentShape(manifest.record_bytes, owner)
        self.stripes = open_stripes(directory, [Stripe(place, 1) for place in places], manifest)

    def read_live_bitmaps(self) -> list[live.LiveRecords]:
        """Read the bitmaps, in order of the segments. Raises CorruptionError, StorageError."""
        return manifests.read_live_bitmaps(self.directory, self.manifest)

    def read_keys(self, entry: SegmentEntry) -> Keys:
        """Read the ids of a segment. Raises CorruptionError, CheckpointError, StorageError."""
        path = self.stripes.find_stripe_file(
            key_list.key_list_file_name(entry.number), entry.stripe
        )
        file = key_list.open_key_list(path)
        return key_list.read_key_list(file, entry.number, entry.num_records, entry.checksum)

    def segment_path(self, entry: SegmentEntry) -> Path:
        """Return the path of a segment's records. Raises CheckpointError if its directory is out of reach."""
        return self.stripes.find_stripe_file(segment.segment_file_name(entry.number), entry.stripe)

    def open_segment(self, entry: SegmentEntry) -> DiskFile:
        """Open a segment's records. Raises CorruptionError, CheckpointError, StorageError."""
        path = self.segment_path(entry)
        return segment.open_sealed_segment(path, self.shape, entry.num_bytes, entry.header_crc)


def verify_store(
    directory: Path, step: int, *, places: Sequence[Path] = ()
) -> Iterator[VerifiedFile]:
    """Verify the files of a commit in the order: manifest, bitmaps, then key lists and segments, past damaged ones.

    places: as `StoredCommit`. Raises no error of a file.
    """
    opened: list[StoredCommit] = []
    yield verify_file(
        directory / manifests.manifest_file_name(step),
        lambda: opened.append(StoredCommit(directory, step, places=places)),
    )
    if not opened:
        return
    commit = opened[0]
    yield verify_file(directory / live.live_file_name(step), commit.read_live_bitmaps)
    for entry in commit.manifest.segments:
        yield from _verify_segment(entry, commit)


def _verify_segment(entry: SegmentEntry, commit: StoredCommit) -> Iterator[VerifiedFile]:
    """Verify a key list, then its segment: without ids, only the segment's header and length can be checked."""
    stripes = commit.stripes
    rows_name = segment.segment_file_name(entry.number)
    # The last known directory, in case it is out of reach.
    last = Path(stripes.recorded_paths.get(entry.stripe, stripes.home))
    stripe = stripes.find_stripe(rows_name, entry.stripe)
    directory = last if stripe is None else stripes.directories[stripe]
    path = directory / key_list.key_list_file_name(entry.number)
    keys: list[Keys] = []

    def read_rows() -> None:
        file = commit.open_segment(entry)
        if not keys:
            raise CorruptionError(
                f"{directory / rows_name}: its records cannot be told without {path.name}. Restore that file from a "
                "copy, or go back to an older commit"
            )
        segment.verify_records(
            file, entry.number, commit.shape, keys[0], entry.header_crc, entry.checksum
        )

    yield verify_file(path, lambda: keys.append(commit.read_keys(entry)))
    yield verify_file(directory / rows_name, read_rows)


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


def diff_commits(store_directory: Path, earlier_step: int, later_step: int) -> CommitDifference:
    """Compute the difference of the commits of two steps of the store in `store_directory`.

    Segments never change, so a record belongs to one of the commits alone exactly where the two bitmaps differ: work
    is in proportion to the changes, and a bit for each record. Rows that garbage collection moved without a change are
    left out. Raises IncomparableCommits; CorruptionError naming the file and record with a wrong checksum,
    StorageError.
    """
    old = StoredCommit(store_directory, earlier_step)
    new = StoredCommit(store_directory, later_step)
    if (old.manifest.store_id, old.shape) != (new.manifest.store_id, new.shape):
        raise IncomparableCommits(
            f"{store_directory}: steps {earlier_step} and {later_step} are not commits of one store"
        )
    old_bitmaps = _read_bitmaps(old)
    new_bitmaps = _read_bitmaps(new)
    ids, records = _read_difference(new, new_bitmaps, old_bitmaps, is_checked=True)
    # Unchecked: an error in these can only mark an unchanged row as changed.
    old_ids, old_records = _read_difference(old, old_bitmaps, new_bitmaps, is_checked=False)
    positions = np.searchsorted(old_ids, ids)
    positions[positions == len(old_ids)] = 0
    is_same = np.zeros(len(ids), bool)
    if len(old_ids):
        existed = old_ids[positions] == ids
        is_same[existed] = (records[existed] == old_records[positions[existed]]).all(axis=1)
    gone = np.setdiff1d(old_ids, ids, assume_unique=True)
    return CommitDifference(ids[~is_same], records[~is_same], gone)


SegmentBitmaps = dict[tuple[int, int], np.ndarray]
"""Bitmaps by number and header checksum: a number may be reused for another file, with another header."""


def _read_bitmaps(commit: StoredCommit) -> SegmentBitmaps:
    parts = commit.read_live_bitmaps()
    return {
        (entry.number, entry.header_crc): part.bitmap
        for entry, part in zip(commit.manifest.segments, parts, strict=True)
    }


def _read_difference(
    commit: StoredCommit, own: SegmentBitmaps, others: SegmentBitmaps, *, is_checked: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Read the records that are rows of this commit and not of the other: (ids ascending, records)."""
    width = commit.shape.record_bytes
    ids = [np.empty(0, np.int64)]
    records = [np.empty((0, width), np.uint8)]
    for entry in commit.manifest.segments:
        bitmap = own[entry.number, entry.header_crc]
        other_bitmap = others.get((entry.number, entry.header_crc), bitmap[:0])
        only = bitmap.copy()
        shared = min(len(bitmap), len(other_bitmap))
        only[:shared] &= ~other_bitmap[:shared]
        if not only.any():
            continue
        selected = np.flatnonzero(live.unpack_flags(only, entry.num_records))
        selected_ids = commit.read_keys(entry).ids()[selected]
        frames = _copy_frames(commit, entry, selected)
        if is_checked:
            _check_record_checksums(commit, entry, selected, selected_ids, frames)
        ids.append(selected_ids)
        records.append(frames[:, segment.CRC.size : segment.CRC.size + width])
    joined = np.concatenate(ids)
    order = joined.argsort(kind="stable")
    return joined[order], np.concatenate(records)[order]


def _copy_frames(commit: StoredCommit, entry: SegmentEntry, selected: np.ndarray) -> np.ndarray:
    """Copy the frames of the records with these numbers, (selected, stride) uint8."""
    path = commit.segment_path(entry)
    try:
        if path.stat().st_size != entry.num_bytes:
            raise corrupt_record_error(
                path, entry.num_records - 1, "the file is cut short or altered"
            )
        shape = (entry.num_records, commit.shape.stride)
        frames: np.ndarray = np.memmap(path, np.uint8, "r", segment.HEADER.size, shape)[selected]
        return frames
    except FileNotFoundError as error:
        raise segment.missing_file_error(path) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, "read", path) from error


def _check_record_checksums(
    commit: StoredCommit,
    entry: SegmentEntry,
    selected: np.ndarray,
    ids: np.ndarray,
    frames: np.ndarray,
) -> None:
    """Check records in runs of neighbours, because a record's checksum covers its position. Raises CorruptionError."""
    ends = np.flatnonzero(np.diff(selected) != 1) + 1
    for first, last in zip([0, *ends.tolist()], [*ends.tolist(), len(ids)], strict=True):
        location = entry.number << 32 | int(selected[first])
        rows = np.ascontiguousarray(frames[first:last])
        run_ids = np.ascontiguousarray(ids[first:last])
        bad = _native.check_records(run_ids, rows, commit.shape.record_bytes, location)
        if bad >= 0:
            raise corrupt_record_error(
                commit.segment_path(entry),
                int(selected[first + bad]),
                "its checksum does not match",
            )
