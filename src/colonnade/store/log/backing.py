"""Append-only log of files that stores rows: one per (table, rank). Format: store/format.md.

    table = LogTable(name="item", record_bytes=72, identity="run/rank0")
    store = open_log(directory, table, step=None)
    store.write(ids, records).wait()
    store.commit(100)                  # durable
    store.prune([100])                 # delete older commits

Writes go to memory; a writer thread appends them to files, a garbage collector thread rewrites segments with mostly
outdated rows. The native log (`_native.RowLog`) knows where each row is stored. It is rebuilt from key lists and live
bitmaps when a commit is opened: no row is read.
Any thread may call any method. A read sees the store as of its call.

Legend: N ids of a call.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.files.disk import Disk, DiskFile
from colonnade.files.durable import TEMPORARY_SUFFIX, write_durably
from colonnade.store.contract import (
    DeferredResult,
    Manifest,
    Pending,
    RowBatch,
    SegmentEntry,
    TierCounts,
)
from colonnade.store.log import live as lives
from colonnade.store.log import manifest as manifests
from colonnade.store.log.compaction import SegmentRewriter
from colonnade.store.log.live import LiveRecords
from colonnade.store.log.manifest import LogTable
from colonnade.store.log.rows import (
    PendingRead,
    check_id_array,
    check_record_arrays,
    scan_live_rows,
)
from colonnade.store.log.segment import (
    DEFAULT_CHUNK_BYTES,
    HEADER,
    crc32c,
    verify_records,
)
from colonnade.store.log.segment_files import (
    LogFiles,
    SegmentFile,
    allow_many_files,
    list_segment_files,
)
from colonnade.store.log.stripes import LOCK_NAME, Stripe, Stripes, open_stripes
from colonnade.store.log.writer import LogWorkers, LogWriter

DEFAULT_SEGMENT_BYTES = 256 << 20
# Streams: new rows; rows moved by garbage collection, the most used ones apart.
NUM_STREAMS = 3
FRESH, MOVED, MOVED_HOT = range(NUM_STREAMS)


@dataclass(frozen=True, slots=True)
class LogLayout:
    """Directories and sizes of the segments that a log writes."""

    stripes: Sequence[Stripe] = ()
    """Directories of this log's own that take its segments; every one it ever had must be among them. (): its home."""
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    """Size at which a new segment starts."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Size of one write, a multiple of 4096."""


class LogBacking:
    """`Backing` in files; built by `open_log`. Use as a context manager, or call `close`."""

    def __init__(
        self,
        directory: Path,
        table: LogTable,
        files: LogFiles,
        workers: LogWorkers,
        *,
        is_read_only: bool,
    ) -> None:
        self.directory = directory
        self.table_name = table.name
        self.identity = table.identity
        self.record_bytes = table.record_bytes
        self.files = files
        self.log = files.log
        self.reader = workers.reader
        self.writer = None if is_read_only else workers.writer
        """Writer of the log; None if open read-only."""
        self._disk = files.disk
        self._stripes = files.stripes
        self._collector = None if is_read_only else workers.collector
        self._rewriter = SegmentRewriter(files, MOVED, MOVED_HOT)
        self._manifests: dict[int, Manifest] = {}  # of the retained commits, by step
        self._damaged: frozenset[int] = frozenset()  # retained commits with an unreadable manifest
        # Of failed commits with a manifest that may be on the disk: their files may not be removed before it.
        self._doubtful: list[Manifest] = []
        self._committing = threading.RLock()  # one commit, prune or removal at a time
        self._is_spoiled = False  # a sync of the frozen content failed
        self._finished_step = -1  # the newest commit, if the caller froze its content
        self._committed_changes = 0  # `_changes` as of the newest commit
        self._other_bytes = 0  # of manifests and bitmaps, and of earlier openings
        self._closed = False

    def __enter__(self) -> LogBacking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of live rows."""
        return self.log.num_rows

    def path_of(self, segment: int) -> Path:
        """Return the path of a segment's file, for messages."""
        return self.files.path_of(segment)

    def stop_writing(self) -> None:
        """Release the locks and stay open for reading. Uncommitted rows can be read here, and nowhere later."""
        self._stop_threads()
        self._stripes.release()

    def close(self) -> None:
        """Release the locks and close the files. The next opening for writing discards uncommitted rows."""
        self._closed = True
        self.stop_writing()
        self.files.close()

    # ---- rows

    def read(self, ids: Tensor, records_out: Tensor, demand: bool = True) -> PendingRead:
        """Start a read as `Backing.read`. After an error in `wait`, `records_out` has whole new rows or none."""
        check_record_arrays(ids, records_out, self.record_bytes)
        self._check_open()
        return PendingRead(
            self.log.read(self.reader, ids, records_out, demand), records_out, self.files.path_of
        )

    def write(
        self,
        ids: Tensor,
        records: Tensor,
        access_frequencies: Tensor | None = None,
        is_for_commit: bool = False,
    ) -> Pending:
        """Write as `Backing.write`: in memory when this returns, all or nothing.

        Waits while unwritten bytes exceed the writer's limit; raises StorageError if the disk refuses a write (nothing
        changed; the store stays usable).
        """
        check_record_arrays(ids, records, self.record_bytes)
        writer = self._check_writable()
        writer.wait_for_room()
        self.log.write(ids, records, access_frequencies, FRESH, is_for_commit)
        writer.wake()
        return DeferredResult(lambda: torch.ones(len(ids), dtype=torch.bool))

    def delete(self, ids: Tensor) -> None:
        """Delete rows as `Backing.delete`: ids (N,) int64, absent ones ignored."""
        check_id_array(ids)
        self._check_writable()
        self.log.delete(ids)

    def scan(self) -> Iterator[RowBatch]:
        """Yield rows as `Backing.scan`, in disk order. Raises CorruptionError naming file and record."""
        self._check_open()
        with self._rewriter.moving:
            return scan_live_rows(self.log, self.files, self.reader)

    def verify_records(self) -> None:
        """Read every record on the disk. Raises CorruptionError naming file and record."""
        self._check_open()
        for part in self.files.complete_segments().values():
            verify_records(
                part.file,
                part.number,
                self.files.shape,
                part.read_keys(),
                part.header_crc,
                part.checksum,
            )

    def count_rows_and_bytes(self) -> dict[str, int]:
        """Count rows and bytes since this opening; `lifetime_bytes` since the store was made.

        bytes_held: of complete segments and key lists; bytes_live: the share of these that live rows take.
        """
        written = self.files.bytes_written
        lifetime = self._other_bytes + written
        parts = self.files.complete_segments().values()
        stored_bytes = sum(part.num_bytes + part.keys_bytes for part in parts)
        records = sum(part.num_records for part in parts)
        live_bytes = (
            len(self) * stored_bytes // records if records else len(self) * self.files.shape.stride
        )
        totals = {"bytes_written": written, "lifetime_bytes": lifetime}
        return (
            dict(self.log.counts())
            | totals
            | {"bytes_held": stored_bytes, "bytes_live": live_bytes}
        )

    def count_tier(self) -> TierCounts:
        """Return the counts of the tier of files, lookups of evaluations included."""
        counts = self.count_rows_and_bytes()
        return TierCounts(
            hits=counts["rows_copied"] + counts["rows_planned"],
            misses=counts["rows_absent"],
            row_bytes=counts["rows_planned"] * self.record_bytes,
            rows_written=counts["rows_written"],
            rows_moved=counts["rows_rewritten"],
            payload_bytes=counts["rows_written"] * self.record_bytes,
            written_bytes=counts["bytes_written"],
            lifetime_bytes=counts["lifetime_bytes"],
            held_bytes=counts["bytes_held"],
            live_bytes=counts["bytes_live"],
        )

    # ---- commits

    def commits(self) -> list[int]:
        """List the retained commits' steps, ascending."""
        return sorted(self._manifests)

    def lost_commits(self) -> dict[int, str]:
        """Map each retained commit that cannot be opened now to what is missing or damaged."""
        lost = manifests.find_lost_commits(self._manifests.values(), self._stripes)
        missing = {step: f"{path}, which has rows of it, is missing" for step, path in lost.items()}
        return missing | {
            step: f"{self.directory / manifests.manifest_file_name(step)} is damaged"
            for step in self._damaged
        }

    def freeze(self) -> None:
        """Fix the content of the next commit as `Backing.freeze`. Garbage collection pauses until `commit` or `thaw`.

        Raises StorageError after a failed sync of rows that cannot be written elsewhere yet.
        """
        self._check_writable()
        if self._rewriter.is_frozen:
            raise StorageError(
                f"{self.directory}: got a second freeze. Commit or thaw before the next one"
            )
        self._rewriter.freeze_log()
        self._is_spoiled = False

    def thaw(self) -> None:
        """Give up the frozen content, if any, as `Backing.thaw`."""
        self._rewriter.thaw()
        if self._collector is not None:
            self._collector.wake(self)

    def commit(self, step: int) -> Manifest:
        """Commit as `Backing.commit`. Steps ascend.

        Repeating the newest step returns that commit, if nothing has changed or its content was frozen by the caller.
        Other threads may read and write meanwhile. Files of older commits stay until `prune`. Raises StorageError:
        the rows and the older commits are unchanged. Content frozen by the caller stays frozen: commit again when the
        cause is removed, or thaw.
        """
        with self._committing:
            self._check_writable()
            newest = max(self._manifests, default=-1)
            was_frozen = self._rewriter.is_frozen
            is_unchanged = self._changes == self._committed_changes
            is_unchanged |= not was_frozen and self._finished_step == step
            if step == newest and is_unchanged:
                self.thaw()
                return self._manifests[step]  # repeated because another table's store failed
            if step <= newest:
                raise CheckpointError(
                    f"{self.directory}: got a commit of step {step}, wanted one after step {newest}. "
                    "Open the store at an older step to go back"
                )
            if self._rewriter.corruption is not None:
                raise self._rewriter.corruption
            if not was_frozen:
                self.freeze()
            try:
                manifest = self._commit_frozen(step)
            except BaseException:
                if not was_frozen:
                    self.thaw()
                raise
            self._manifests[step] = manifest
            self._committed_changes = self._changes
            self._finished_step = step if was_frozen else -1
            self.thaw()
            return manifest

    def prune(self, retained_steps: Collection[int]) -> None:
        """Delete the commits that are not in `retained_steps`, and the files that no commit needs any more.

        Raises CheckpointError for a step that was never committed, StorageError (call again to continue).
        """
        with self._committing:
            self._check_writable()
            unknown = sorted(set(retained_steps) - set(self._manifests) - self._damaged)
            if unknown:
                raise CheckpointError(
                    f"{self.directory}: got retained_steps with {unknown}, wanted some of {self.commits()}. "
                    "Keep only steps that `commits()` lists"
                )
            self._damaged &= set(retained_steps)
            self._manifests = {
                step: self._manifests[step] for step in sorted(set(retained_steps) - self._damaged)
            }
            self._remove_manifests()
            self.files.remove_forgotten_files(self._referenced_segments())

    # ---- garbage collection

    def collect_garbage(self) -> int:
        """Collect garbage until there is nothing to gain, segments being written included; returns bytes read."""
        writer = self._check_writable()
        total = 0
        num_bytes = 1
        while num_bytes:
            writer.flush(self.files)
            num_bytes = self.collect_garbage_piece()
            total += num_bytes
        writer.flush(self.files)
        with self._committing:  # segments that the collector's thread has just forgotten, too
            self.files.remove_forgotten_files(self._referenced_segments())
        return total

    def collect_garbage_piece(self) -> int:
        """Rewrite one piece of one segment; returns bytes read, 0: nothing to do now.

        Raises StorageError; CorruptionError if a record is corrupt: then the segment stays, and commits raise it, too.
        """
        writer = self._check_writable()
        if not self._rewriter.has_victims():
            return 0
        writer.wait_for_spare_room()
        num_bytes, is_forgotten = self._rewriter.rewrite_next_piece()
        if num_bytes:
            writer.wake()
        if is_forgotten:
            with self._committing:
                self.files.remove_forgotten_files(self._referenced_segments())
        return num_bytes

    @property
    def is_space_short(self) -> bool:
        """True if garbage collection falls behind: the disk has far more bytes than live rows justify."""
        return self._rewriter.is_space_short

    # ---- inside

    @property
    def _changes(self) -> int:
        """Number of rows written or deleted; moving a row does not count."""
        counts = self.log.counts()
        return counts["rows_written"] + counts["rows_deleted"]

    def _commit_frozen(self, step: int) -> Manifest:
        if self._is_spoiled:
            raise StorageError(
                f"{self.directory}: a sync failed under the frozen content. Thaw, freeze and commit again; the "
                "last commit is intact"
            )
        assert self.writer is not None
        self.log.seal()
        self.writer.flush(self.files)
        complete = self.files.complete_segments()
        entries = []
        bitmaps = []
        for number in np.asarray(self.log.frozen_segments()).tolist():
            part = complete[number]
            bitmap = np.asarray(self.log.frozen_live(number))
            live_records = LiveRecords(number, part.num_records, bitmap)
            bitmaps.append(live_records)
            entries.append(
                SegmentEntry(
                    number=number,
                    stripe=part.stripe,
                    num_bytes=part.num_bytes,
                    keys_bytes=part.keys_bytes,
                    header_crc=part.header_crc,
                    checksum=part.checksum,
                    num_records=part.num_records,
                    num_live=live_records.num_live,
                )
            )
        self._sync_segments([complete[entry.number] for entry in entries])
        content = lives.encode_live_bitmaps(step, bitmaps)
        manifest = Manifest(
            step=step,
            table=self.table_name,
            record_bytes=self.record_bytes,
            num_rows=sum(entry.num_live for entry in entries),
            lifetime_bytes=self._other_bytes + self.files.bytes_written + len(content),
            live_bytes=len(content),
            live_crc=crc32c(content),
            identity=self.identity,
            store_id=self._stripes.store_id,
            stripe_paths=self._stripes.paths_outside_home(),
            segments=tuple(entries),
        )
        if self._doubtful:
            self._remove_manifests()
        write_durably(self._disk, self.directory / lives.live_file_name(step), content)
        self._doubtful.append(manifest)
        manifests.write_manifest(self._disk, self.directory, manifest)
        self._doubtful.clear()
        self._other_bytes += len(content)
        return manifest

    def _sync_segments(self, parts: Sequence[SegmentFile]) -> None:
        unsynced = [part for part in parts if not part.is_synced]
        for part in unsynced:
            try:
                self.files.sync_segment(part)
            except BaseException:
                self._is_spoiled = True
                raise
        self.files.sync_directories([part.stripe for part in unsynced])

    def _referenced_segments(self) -> set[int]:
        commits = [*self._manifests.values(), *self._doubtful]
        return {entry.number for m in commits for entry in m.segments}

    def _remove_manifests(self) -> None:
        """Delete manifests of commits that are not retained; then their bitmaps."""
        steps = {*self._manifests, *self._damaged}
        self._remove_files(
            manifests.FILE_NAME, {manifests.manifest_file_name(step) for step in steps}
        )
        # A manifest must be gone for good before a file that only it lists is removed.
        self._disk.sync_dir(self.directory)
        self._doubtful.clear()
        self._remove_files(lives.FILE_NAME, {lives.live_file_name(step) for step in steps})

    def _remove_files(self, pattern: re.Pattern[str], retained: Collection[str]) -> None:
        for name in sorted(os.listdir(self.directory)):
            is_ours = pattern.fullmatch(name.removesuffix(TEMPORARY_SUFFIX))
            if is_ours and name not in retained:
                self._disk.unlink(self.directory / name)

    def _load_commit(self, manifest: Manifest) -> None:
        """Load the content of a commit into the empty log."""
        bitmaps = manifests.read_live_bitmaps(self.directory, manifest)
        for entry, bitmap in zip(manifest.segments, bitmaps, strict=True):
            self.files.load_segment(entry, bitmap)
        if len(self) != manifest.num_rows:
            raise CorruptionError(
                f"{self.directory / manifests.manifest_file_name(manifest.step)}: got {len(self)} live rows in its "
                f"segments, wanted {manifest.num_rows}. Go back to an older commit"
            )
        self._other_bytes = manifest.lifetime_bytes
        self._manifests[manifest.step] = manifest

    def _start(
        self,
        step: int | None,
        manifests_by_step: dict[int, Manifest],
        damaged_steps: Collection[int],
    ) -> None:
        """Load the commit of `step`, if any, and start writing unless the store is only read."""
        if step is not None:
            self._load_commit(manifests_by_step[step])
        if self.writer is not None:
            self._start_writing(manifests_by_step, damaged_steps)

    def _start_writing(
        self, retained_manifests: dict[int, Manifest], damaged_steps: Collection[int]
    ) -> None:
        """Start writing: remove every commit that is not in `retained_manifests`, and files that no commit lists.

        damaged_steps: steps of older commits with unreadable manifests. What they list is unknown, so all files stay
        until such a commit is pruned: its manifest may be restored from a copy.
        """
        self._manifests = dict(retained_manifests)
        self._damaged = frozenset(damaged_steps)
        self._remove_manifests()
        if not damaged_steps:
            self.files.remove_leftover_files(self._referenced_segments())
        for manifest in retained_manifests.values():
            for entry in manifest.segments:
                self.files.track_removable(entry)
        assert self.writer is not None and self._collector is not None
        self.writer.add_source(self.files)
        self._collector.add_source(self)

    def _stop_threads(self) -> None:
        """Detach the log from the writer and the garbage collector."""
        if self._collector is not None:
            self._collector.remove_source(self)
        if self.writer is not None:
            self.writer.remove_source(self.files)

    # ---- what callers may get wrong

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self.directory}: this store is closed. Open it again")

    def _check_writable(self) -> LogWriter:
        self._check_open()
        if not self._stripes.locks or self.writer is None:
            raise StorageError(
                f"{self.directory}: got a change, but the store is open read-only. Open it with read_only=False"
            )
        return self.writer


def count_shared_io(backings: Sequence[LogBacking]) -> TierCounts:
    """Return the counts of the reader and the writer that a rank's logs share."""
    readers = {id(backing.reader): backing.reader for backing in backings}.values()
    writers = {id(b.writer): b.writer for b in backings if b.writer is not None}.values()
    counts = [reader.counts() for reader in readers]
    return TierCounts(
        reads=int(sum(count["reads"] for count in counts)),
        read_bytes=int(sum(count["bytes"] for count in counts)),
        stall_seconds=sum(writer.stall_seconds for writer in writers),
    )


def open_log(
    directory: Path | str,
    table: LogTable,
    *,
    step: int | None,
    read_only: bool = False,
    workers: LogWorkers | None = None,
    layout: LogLayout | None = None,
) -> LogBacking:
    """Open one table's rows of one rank, as committed at `step`; None: an empty store, created if absent.

    Opening with another table, width, identity or format version raises CheckpointError, as does a step that was never
    committed. Altered, torn or missing files raise CorruptionError; then nothing on the disk has changed. Records
    themselves are checked when they are read.

    For writing: commits newer than `step` (None: all) are deleted, and files that no retained commit lists. Raises
    StoreLocked if the store is open for writing elsewhere. `read_only` changes nothing and needs no lock.
    """
    if table.record_bytes < 1:
        raise ValueError(f"got record_bytes={table.record_bytes}, wanted at least 1")
    directory = Path(directory)
    workers = workers or LogWorkers()
    layout = layout or LogLayout()
    disk = workers.disk
    home_lock = None if read_only else _lock_store_directory(directory, disk, step)
    store = opened = None
    try:
        allow_many_files()
        by_step, damaged = _read_manifests(directory, table, step, read_only)
        opened = open_stripes(
            directory,
            layout.stripes,
            None if step is None else by_step[step],
            disk=None if read_only else disk,
            home_lock=home_lock,
        )
        shape = table.shape
        segment_bytes = max(layout.segment_bytes, HEADER.size + shape.stride)
        log = _native.RowLog(
            table.record_bytes,
            table.rows or 0,
            table.num_owners,
            table.owner_index,
            segment_bytes,
            shape.chunk_bytes(layout.chunk_bytes),
            NUM_STREAMS,
            1 + _find_last_segment_number(by_step, damaged, opened),
        )
        files = LogFiles(log, disk, opened, shape, segment_bytes)
        store = LogBacking(directory, table, files, workers, is_read_only=read_only)
        store._start(step, by_step, damaged)
    except BaseException:
        _close_partially_opened(store, opened, home_lock)
        raise
    return store


def _find_last_segment_number(
    manifests_by_step: Mapping[int, Manifest], damaged_steps: Sequence[int], stripes: Stripes
) -> int:
    """Return the largest number of a segment; those of damaged commits are known by their files only."""
    numbers = [
        entry.number for manifest in manifests_by_step.values() for entry in manifest.segments
    ]
    if damaged_steps:
        numbers += [number for number, _ in list_segment_files(stripes)]
    return max(numbers, default=0)


def _read_manifests(
    directory: Path, table: LogTable, step: int | None, read_only: bool
) -> tuple[dict[int, Manifest], list[int]]:
    """Read the manifest of `step` and, for writing, the earlier ones; all empty for a new store.

    Returns them by step, and the steps of earlier ones that cannot be read.
    """
    if step is None:
        return {}, []
    manifest = manifests.read_manifest(directory, step, table)
    by_step = {}
    damaged = []
    older = () if read_only else manifests.committed_steps(directory)
    for other in (other for other in older if other < step):
        try:
            by_step[other] = manifests.read_manifest(directory, other, table)
        except StorageError:
            damaged.append(other)
    return {**by_step, step: manifest}, damaged


def _lock_store_directory(directory: Path, disk: Disk, step: int | None) -> DiskFile:
    """Lock a store's directory, which is created for a new store. Raises CheckpointError, StoreLocked."""
    if step is None:
        disk.make_dir(directory)
    elif not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory, wanted the commit of step {step}")
    return disk.lock(directory / LOCK_NAME)


def _close_partially_opened(
    store: LogBacking | None, stripes: Stripes | None, home_lock: DiskFile | None
) -> None:
    """Close the last object that was opened; it closes the ones it was opened with."""
    if store is not None:
        store.close()
    elif stripes is not None:
        stripes.release()
    elif home_lock is not None:
        home_lock.close()
