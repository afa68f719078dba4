"""Rows at rest in plain append-only files: one directory per (table, rank). Format: format.md.

    store = open_ssd(directory, table_name="item", record_bytes=72, identity="run/rank0", step=None)
    store.write(ids, records).wait()
    store.commit(100)                  # durable
    store.prune([100])                 # older commits may go

The index (id -> place) lives in memory and is rebuilt from the files by one sequential scan.
Threads: any thread may call anything; a lock covers the index and the active segment, reads of rows
run outside it. A read sees the store as of its call.

Legend: N ids of a call.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.store import manifest as manifests
from colonnade.store import segment as segments
from colonnade.store.compaction import SegmentUse, choose_victims
from colonnade.store.contract import Manifest, RowBatch
from colonnade.store.disk import Disk, DiskFile
from colonnade.store.durable import TEMPORARY_SUFFIX
from colonnade.store.row_reads import OpenFiles, PendingRead, Written, is_row
from colonnade.store.segment import TOMBSTONE, Segment

LOCK_NAME = "LOCK"
DEFAULT_SEGMENT_BYTES = 256 << 20
DEFAULT_READ_THREADS = (
    4  # of a store that shares none; an SSD is busy with about six reads in flight
)


class SsdBacking:
    """A `Backing` on files; built by `open_ssd`. Use as a context manager, or call `close`."""

    def __init__(
        self,
        directory: Path,
        *,
        table_name: str,
        record_bytes: int,
        identity: str,
        disk: Disk,
        reader: _native.SegmentReader,
        segment_bytes: int,
        lock_file: DiskFile | None,
    ) -> None:
        self.directory = directory
        self.table_name = table_name
        self.record_bytes = record_bytes
        self.identity = identity
        self._disk = disk
        self._reader = reader
        self._segment_bytes = segment_bytes
        self._lock_file = lock_file  # None: read-only
        self._lock = threading.RLock()
        self._index = _native.RowIndex()  # id -> place; of deleted rows, the tombstone's place
        self._segments: dict[int, Segment] = {}  # the current content, ascending number
        self._active: Segment | None = None  # takes appends; no manifest knows it
        self._open_files = OpenFiles(())
        self._next_number = 1
        self._manifests: dict[int, Manifest] = {}  # by step: the commits kept
        self._num_appended = 0  # records since the last commit
        self._version = 0  # counts changes, for scans to notice
        self._closed = False

    def __enter__(self) -> SsdBacking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Live rows."""
        with self._lock:
            return sum(part.num_live for part in self._segments.values())

    def end_writing(self) -> None:
        """Let go of the lock and stay open for reading. What was not committed is read here, and nowhere later."""
        with self._lock:
            if self._lock_file is not None:
                self._lock_file.close()
                self._lock_file = None

    def close(self) -> None:
        """Let go of the lock. What was not committed is gone with the next opening for writing."""
        with self._lock:
            self._closed = True
            if self._lock_file is not None:
                self._lock_file.close()

    # ---- rows

    def read(self, ids: Tensor, out: Tensor) -> PendingRead:
        """`Backing.read`. After an error in `wait`, `out` holds whole rows or nothing new, never wrong ones."""
        self._check_batch(ids, out)
        with self._lock:
            self._check_open()
            places = torch.empty_like(ids)
            self._index.get(ids, places)
            files = self._open_files
            # Under the lock: once the segments are named, compaction may forget but not close them.
            job = self._reader.read(ids, places, out, files.numbers, files.fds)
        return PendingRead(job, places, files)

    def write(self, ids: Tensor, records: Tensor) -> Written:
        """`Backing.write`: done when this returns, all or nothing; of equal ids the last wins.

        Raises StorageError (nothing changed; the store stays usable).
        """
        self._check_batch(ids, records)
        with self._lock:
            self._check_writable()
            self._append(ids.numpy(), records.numpy())
        return Written(len(ids))

    def delete(self, ids: Tensor) -> None:
        """`Backing.delete`: ids (N,) int64, absent ones ignored. Raises StorageError (nothing changed)."""
        self._check_ids(ids)
        with self._lock:
            self._check_writable()
            unique = np.unique(ids.numpy())
            places = self._places(unique)
            self._append(unique[is_row(places)], None)

    def scan(self) -> Iterator[RowBatch]:
        """`Backing.scan`, in the order of the disk. StorageError if the store changes under way."""
        with self._lock:
            self._check_open()
            version, parts = self._version, list(self._segments.values())
        for part in parts:
            for places, frames in part.frames():
                with self._lock:
                    self._check_open()
                    if self._version != version:
                        raise StorageError(
                            f"{self.directory}: got a change during a scan, wanted none. Write, delete and "
                            "commit before or after the scan, or scan a read-only opening of a commit"
                        )
                    live = self._places(frames["id"]) == places
                if live.any():
                    rows = frames[live]
                    yield RowBatch(
                        torch.from_numpy(rows["id"].copy()),
                        torch.from_numpy(rows["payload"][:, : self.record_bytes].copy()),
                    )

    # ---- commits

    def commits(self) -> list[int]:
        """The steps committed and kept, ascending."""
        with self._lock:
            return sorted(self._manifests)

    def commit(self, step: int) -> Manifest:
        """`Backing.commit`. Steps ascend; the newest again, if nothing has changed, is that commit.

        Files of older commits stay until `prune`. Raises StorageError: the rows and the older commits are
        as before; commit again when the cause is gone.
        """
        with self._lock:
            self._check_writable()
            newest = max(self._manifests, default=-1)
            if step == newest and self._num_appended == 0:
                return self._manifests[
                    step
                ]  # a rank tries again because another table's store failed
            if step <= newest:
                raise CheckpointError(
                    f"{self.directory}: got a commit of step {step}, wanted one after step {newest}. "
                    "Open the store at an older step to go back"
                )
            self._compact()
            self._seal()
            parts = list(self._segments.values())
            manifest = Manifest(
                step=step,
                table=self.table_name,
                record_bytes=self.record_bytes,
                num_rows=len(self),
                segments=tuple((p.file.path.name, p.num_bytes, p.checksum) for p in parts),
            )
            manifests.write_manifest(self._disk, self.directory, manifest, parts, self.identity)
            self._manifests[step] = manifest
            self._num_appended = 0
            return manifest

    def prune(self, keep_steps: Collection[int]) -> None:
        """Forget the commits not in `keep_steps`, and remove the files that nothing needs any more.

        Raises CheckpointError for a step never committed, StorageError (call again: it goes on).
        """
        with self._lock:
            self._check_writable()
            unknown = sorted(set(keep_steps) - set(self._manifests))
            if unknown:
                raise CheckpointError(
                    f"{self.directory}: got keep_steps with {unknown}, wanted some of {self.commits()}. "
                    "Keep only steps that `commits()` lists"
                )
            self._manifests = {step: self._manifests[step] for step in sorted(keep_steps)}
            self._remove_orphans()

    # ---- inside; the lock is held

    def _places(self, ids: np.ndarray) -> np.ndarray:
        places = np.empty(len(ids), np.int64)
        self._index.get(np.ascontiguousarray(ids), places)
        return places

    def _append(self, ids: np.ndarray, records: np.ndarray | None) -> None:
        """Records, or tombstones if None, to the active segment and then the index: all or nothing."""
        if len(ids) == 0:
            return
        if self._active is not None and self._active.num_bytes >= self._segment_bytes:
            self._active = None  # full; a batch is never split over two
        if self._active is None:
            self._start_segment()
        assert self._active is not None
        places = self._active.append(self._disk, ids, records)
        self._point(ids, places if records is not None else places | TOMBSTONE)
        self._num_appended += len(ids)
        self._version += 1

    def _point(self, ids: np.ndarray, places: np.ndarray) -> None:
        """Index ids (duplicates: the last place wins) and keep the segments' counts."""
        old = self._places(ids)
        self._index.put(ids, places)
        wins = self._places(ids) == places  # exactly one entry of each id
        self._count(places[wins], 1)
        self._count(old[wins], -1)

    def _count(self, places: np.ndarray, sign: int) -> None:
        numbers, counts = np.unique(places[places >= 0] >> 32, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            is_tombstone, number = divmod(number, TOMBSTONE >> 32)
            if is_tombstone:
                self._segments[number].num_tombstones += sign * count
            else:
                self._segments[number].num_live += sign * count

    def _start_segment(self) -> None:
        number = self._next_number
        self._next_number += (
            1  # first: a number whose file could not be removed again is not reused
        )
        part = segments.create_segment(
            self._disk,
            self.directory,
            number,
            record_bytes=self.record_bytes,
            digest=segments.identity_digest(self.table_name, self.identity),
        )
        self._segments[part.number] = self._active = part
        self._open_files = OpenFiles(self._segments.values())

    def _forget_segment(self, number: int) -> None:
        """The file stays until `prune`; reads under way keep it open."""
        del self._segments[number]
        self._open_files = OpenFiles(self._segments.values())

    def _compact(self) -> None:
        """Rewrite sparse segments into the active one. Only what was appended pays for it."""
        if self._active is not None and self._active.is_suspect:
            self._active = None
        stride = segments.frame_dtype(self.record_bytes).itemsize
        full_records = self._segment_bytes // stride
        uses = [
            SegmentUse(p.number, p.num_records, p.num_live, p.num_tombstones, p.is_suspect)
            for p in self._segments.values()
            if p is not self._active
        ]
        if self._num_appended == 0 and not any(use.is_suspect for use in uses):
            return
        budget = max(2 * self._num_appended, full_records)
        for number in choose_victims(uses, budget_records=budget, full_records=full_records):
            self._rewrite(self._segments[number])
            self._forget_segment(number)

    def _rewrite(self, victim: Segment) -> None:
        is_oldest = victim.number == min(self._segments)
        for places, frames in victim.frames():
            ids = np.ascontiguousarray(frames["id"])
            now = self._places(ids)
            rows = frames[now == places]
            payload = np.ascontiguousarray(rows["payload"][:, : self.record_bytes])
            self._append(ids[now == places], payload)
            graves = ids[now == places | TOMBSTONE]
            if is_oldest:
                # No older record is left that these could be hiding.
                self._index.erase(graves)
                victim.num_tombstones -= len(graves)
            else:
                self._append(graves, None)

    def _seal(self) -> None:
        """All segments' content and names are durable; later appends go to a new one."""
        unsynced = [part for part in self._segments.values() if not part.is_synced]
        for part in unsynced:
            part.sync(self._disk)
        if unsynced:
            self._disk.sync_dir(self.directory)
        self._active = None

    def _remove_orphans(self) -> None:
        """Remove the manifests not kept, then what neither they nor the current content refer to."""
        kept = {manifests.file_name(step) for step in self._manifests}
        self._remove(manifests.FILE_NAME, kept)
        # A manifest must be gone for good before a segment of it goes.
        self._disk.sync_dir(self.directory)
        used = {part.file.path.name for part in self._segments.values()}
        used.update(name for m in self._manifests.values() for name, _, _ in m.segments)
        self._remove(segments.FILE_NAME, used)

    def _remove(self, pattern: re.Pattern[str], kept: Collection[str]) -> None:
        for path in sorted(self.directory.iterdir()):
            is_ours = pattern.fullmatch(path.name.removesuffix(TEMPORARY_SUFFIX))
            if is_ours and path.name not in kept:
                self._disk.unlink(path)

    def _load(self, step: int) -> None:
        """Become the content of a commit: check every byte, build the index."""
        manifest = self._read_manifest(step)
        digest = segments.identity_digest(self.table_name, self.identity)
        for name, num_bytes, checksum in manifest.segments:
            part = segments.open_segment(
                self.directory / name,
                record_bytes=self.record_bytes,
                digest=digest,
                num_bytes=num_bytes,
            )
            self._segments[part.number] = part
            for places, frames in part.frames():
                part.checksum = segments.add_checksum(part.checksum, frames)
                is_tombstone = frames["flags"] == 1
                ids = np.ascontiguousarray(frames["id"])
                self._point(ids, np.where(is_tombstone, places | TOMBSTONE, places))
            if part.checksum != checksum:
                raise CorruptionError(
                    f"{part.file.path}: got checksum {part.checksum:x}, wanted {checksum:x} as "
                    f"{manifests.file_name(step)} says: these are rows of another commit. Restore the file "
                    "from a copy, or go back to an older commit"
                )
        if len(self) != manifest.num_rows:
            raise CorruptionError(
                f"{self.directory / manifests.file_name(step)}: got {len(self)} live rows in its segments, "
                f"wanted {manifest.num_rows}. Go back to an older commit"
            )
        self._open_files = OpenFiles(self._segments.values())
        self._manifests[step] = manifest

    def _discard_newer(self, step: int | None) -> None:
        """Opened for writing at `step`: newer commits never happened, older ones are kept."""
        for other in manifests.committed_steps(self.directory):
            if step is not None and other < step:
                self._manifests[other] = self._read_manifest(other)
        self._remove_orphans()
        names = [name for m in self._manifests.values() for name, _, _ in m.segments]
        self._next_number = 1 + max((int(name[8:16]) for name in names), default=0)

    def _read_manifest(self, step: int) -> Manifest:
        return manifests.read_manifest(
            self.directory,
            step,
            table=self.table_name,
            identity=self.identity,
            record_bytes=self.record_bytes,
        )

    # ---- what callers may get wrong

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype != torch.int64 or ids.dim() != 1 or not _is_plain(ids):
            raise ValueError(
                f"ids: got {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}, wanted a contiguous "
                "(N,) torch.int64 on the CPU"
            )

    def _check_batch(self, ids: Tensor, records: Tensor) -> None:
        self._check_ids(ids)
        shape = (len(ids), self.record_bytes)
        if records.dtype != torch.uint8 or tuple(records.shape) != shape or not _is_plain(records):
            raise ValueError(
                f"records: got {records.dtype} of shape {tuple(records.shape)} on {records.device}, wanted a "
                f"contiguous {shape} torch.uint8 on the CPU"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self.directory}: this store is closed. Open it again")

    def _check_writable(self) -> None:
        self._check_open()
        if self._lock_file is None:
            raise StorageError(
                f"{self.directory}: got a change, but the store is open read-only. Open it with read_only=False"
            )


def _is_plain(array: Tensor) -> bool:
    return array.is_contiguous() and array.device.type == "cpu"


def open_ssd(
    directory: Path | str,
    *,
    table_name: str,
    record_bytes: int,
    identity: str,
    step: int | None,
    read_only: bool = False,
    disk: Disk | None = None,
    reader: _native.SegmentReader | None = None,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
) -> SsdBacking:
    """One table's rows of one rank, as committed at `step`; None: an empty store, created if absent.

    `identity` names run, rank and world: opening with another raises CheckpointError, as do another
    table, record width or format version, and a step never committed. Altered, torn or missing files
    raise CorruptionError; then nothing on the disk has changed.

    For writing: commits newer than `step` (with None: all) are discarded, because the run that decides
    which step is complete has decided; so are files no kept commit refers to. Raises StoreLocked if the
    store is open for writing elsewhere. `read_only` changes nothing and needs no lock.

    `reader`: the threads that read rows; share one among the stores of a rank. `segment_bytes`: where a
    new segment starts (a batch is never split).
    """
    directory = Path(directory)
    disk = disk or Disk()
    if record_bytes < 1:
        raise ValueError(f"got record_bytes={record_bytes}, wanted at least 1")
    lock_file = None
    if not read_only:
        if step is None:
            disk.make_dir(directory)
        elif not directory.is_dir():
            raise CheckpointError(
                f"{directory}: no such directory, wanted the commit of step {step}"
            )
        lock_file = disk.lock(directory / LOCK_NAME)
    store = SsdBacking(
        directory,
        table_name=table_name,
        record_bytes=record_bytes,
        identity=identity,
        disk=disk,
        reader=reader or _native.SegmentReader(DEFAULT_READ_THREADS),
        segment_bytes=segment_bytes,
        lock_file=lock_file,
    )
    try:
        if step is not None:
            store._load(step)
        if not read_only:
            store._discard_newer(step)
    except BaseException:
        store.close()
        raise
    return store
