"""Append-only log of files that stores rows: one per (table, rank). Format: store/format.md.

    store = open_log(directory, table_name="item", record_bytes=72, identity="run/rank0", step=None)
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.files.disk import Disk, DiskFile
from colonnade.files.durable import TEMPORARY_SUFFIX, write_durably
from colonnade.store.contract import Manifest, RowBatch, SegmentEntry
from colonnade.store.log import live as lives
from colonnade.store.log import manifest as manifests
from colonnade.store.log.compaction import Collector, SegmentRewriter
from colonnade.store.log.live import LiveRecords
from colonnade.store.log.rows import (
    PendingRead,
    Written,
    check_id_array,
    check_record_arrays,
    scan_live_rows,
)
from colonnade.store.log.segment import (
    DEFAULT_CHUNK_BYTES,
    HEADER,
    SegmentShape,
    crc32c,
    owner_digest,
    verify_records,
)
from colonnade.store.log.segment_files import (
    LogFiles,
    SegmentFile,
    allow_many_files,
    list_segment_files,
)
from colonnade.store.log.stripes import LOCK_NAME, Stripe, Stripes, open_stripes
from colonnade.store.log.writer import LogWriter

DEFAULT_SEGMENT_BYTES = 256 << 20
READ_DEPTH = 32  # of a store with a reader of its own
# Streams: new rows; rows moved by garbage collection, the most used ones apart.
FRESH, MOVED, MOVED_HOT = range(3)
Access = Literal["direct", "mapped"]


class LogBacking:
    """`Backing` in files; built by `open_log`. Use as a context manager, or call `close`."""

    def __init__(
        self,
        directory: Path,
        *,
        table_name: str,
        identity: str,
        shape: SegmentShape,
        disk: Disk,
        log: _native.RowLog,
        files: LogFiles,
        stripes: Stripes,
        reader: _native.PageReader,
        writer: LogWriter | None,
        collector: Collector | None,
        segment_bytes: int,
    ) -> None:
        """writer, collector: None if read-only."""
        self.directory = directory
        self.table_name = table_name
        self.identity = identity
        self.shape = shape
        self.record_bytes = shape.record_bytes
        self.log = log
        self.files = files
        self._disk = disk
        self._stripes = stripes
        self._reader = reader
        self._writer = writer
        self._collector = collector
        full_records = max(1, (segment_bytes - HEADER.size) // shape.stride)
        self._rewriter = SegmentRewriter(log, files, full_records, MOVED, MOVED_HOT)
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

    @property
    def reader(self) -> _native.PageReader:
        return self._reader

    @property
    def writer(self) -> LogWriter | None:
        """Writer of the log; None if open read-only."""
        return self._writer

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

    def read(self, ids: Tensor, out: Tensor, demand: bool = True) -> PendingRead:
        """Start a read as `Backing.read`. After an error in `wait`, `out` has whole new rows or none."""
        check_record_arrays(ids, out, self.record_bytes)
        self._check_open()
        return PendingRead(self.log.read(self._reader, ids, out, demand), out, self.files.path_of)

    def write(
        self,
        ids: Tensor,
        records: Tensor,
        frequencies: Tensor | None = None,
        for_commit: bool = False,
    ) -> Written:
        """Write as `Backing.write`: in memory when this returns, all or nothing.

        Waits while unwritten bytes exceed the writer's limit; raises StorageError if the disk refuses a write (nothing
        changed; the store stays usable).
        """
        check_record_arrays(ids, records, self.record_bytes)
        writer = self._check_writable()
        writer.wait_for_room()
        self.log.write(ids, records, frequencies, FRESH, for_commit)
        writer.wake()
        return Written(len(ids))

    def delete(self, ids: Tensor) -> None:
        """Delete rows as `Backing.delete`: ids (N,) int64, absent ones ignored."""
        check_id_array(ids)
        self._check_writable()
        self.log.delete(ids)

    def scan(self) -> Iterator[RowBatch]:
        """Yield rows as `Backing.scan`, in disk order. Raises CorruptionError naming file and record."""
        self._check_open()
        with self._rewriter.moving:
            return scan_live_rows(self.log, self.files, self._reader)

    def verify_records(self) -> None:
        """Read every record on the disk. Raises CorruptionError naming file and record."""
        self._check_open()
        for part in self.files.complete_segments().values():
            verify_records(
                part.file, part.number, self.shape, part.read_keys(), part.header_crc, part.checksum
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
            len(self) * stored_bytes // records if records else len(self) * self.shape.stride
        )
        totals = {"bytes_written": written, "lifetime_bytes": lifetime}
        return (
            dict(self.log.counts())
            | totals
            | {"bytes_held": stored_bytes, "bytes_live": live_bytes}
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
            step: f"{self.directory / manifests.file_name(step)} is damaged"
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

    def prune(self, keep_steps: Collection[int]) -> None:
        """Delete the commits that are not in `keep_steps`, and the files that no commit needs any more.

        Raises CheckpointError for a step that was never committed, StorageError (call again to continue).
        """
        with self._committing:
            self._check_writable()
            unknown = sorted(set(keep_steps) - set(self._manifests) - self._damaged)
            if unknown:
                raise CheckpointError(
                    f"{self.directory}: got keep_steps with {unknown}, wanted some of {self.commits()}. "
                    "Keep only steps that `commits()` lists"
                )
            self._damaged &= set(keep_steps)
            self._manifests = {
                step: self._manifests[step] for step in sorted(set(keep_steps) - self._damaged)
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
        assert self._writer is not None
        self.log.seal()
        self._writer.flush(self.files)
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
            segments=tuple(entries),
        )
        if self._doubtful:
            self._remove_manifests()
        write_durably(self._disk, self.directory / lives.file_name(step), content)
        self._doubtful.append(manifest)
        manifests.write_manifest(self._disk, self.directory, manifest, self._stripes, self.identity)
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
        self._remove_files(manifests.FILE_NAME, {manifests.file_name(step) for step in steps})
        # A manifest must be gone for good before a file that only it lists is removed.
        self._disk.sync_dir(self.directory)
        self._doubtful.clear()
        self._remove_files(lives.FILE_NAME, {lives.file_name(step) for step in steps})

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
                f"{self.directory / manifests.file_name(manifest.step)}: got {len(self)} live rows in its "
                f"segments, wanted {manifest.num_rows}. Go back to an older commit"
            )
        self._other_bytes = manifest.lifetime_bytes
        self._manifests[manifest.step] = manifest

    def _start(
        self,
        step: int | None,
        by_step: dict[int, Manifest],
        damaged: Collection[int],
        read_only: bool,
    ) -> None:
        """Load the commit of `step`, if any, and start writing unless the store is only read."""
        if step is not None:
            self._load_commit(by_step[step])
        if not read_only:
            self._start_writing(by_step, damaged)

    def _start_writing(self, retained: dict[int, Manifest], damaged: Collection[int]) -> None:
        """Start writing: remove every commit that is not in `retained`, and files that no commit lists.

        damaged: steps of older commits with unreadable manifests. What they list is unknown, so all files stay until
        such a commit is pruned: its manifest may be restored from a copy.
        """
        self._manifests = dict(retained)
        self._damaged = frozenset(damaged)
        self._remove_manifests()
        if not damaged:
            self.files.remove_leftover_files(self._referenced_segments())
        for manifest in retained.values():
            for entry in manifest.segments:
                self.files.track_removable(entry)
        assert self._writer is not None and self._collector is not None
        self._writer.add_source(self.files)
        self._collector.add_source(self)

    def _stop_threads(self) -> None:
        """Detach the log from the writer and the garbage collector."""
        if self._collector is not None:
            self._collector.remove_source(self)
        if self._writer is not None:
            self._writer.remove_source(self.files)

    # ---- what callers may get wrong

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self.directory}: this store is closed. Open it again")

    def _check_writable(self) -> LogWriter:
        self._check_open()
        if not self._stripes.locks or self._writer is None:
            raise StorageError(
                f"{self.directory}: got a change, but the store is open read-only. Open it with read_only=False"
            )
        return self._writer


def open_log(
    directory: Path | str,
    *,
    table_name: str,
    record_bytes: int,
    identity: str,
    step: int | None,
    rows: int | None = None,
    num_owners: int = 1,
    owner_index: int = 0,
    read_only: bool = False,
    disk: Disk | None = None,
    reader: _native.PageReader | None = None,
    writer: LogWriter | None = None,
    collector: Collector | None = None,
    stripes: Sequence[Stripe] = (),
    access: Access = "direct",
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> LogBacking:
    """Open one table's rows of one rank, as committed at `step`; None: an empty store, created if absent.

    `identity` names run, rank and world: opening with another raises CheckpointError, as do another table, width or
    format version, and a step that was never committed. Altered, torn or missing files raise CorruptionError; then
    nothing on the disk has changed. Records themselves are checked when they are read.

    For writing: commits newer than `step` (None: all) are deleted, and files that no retained commit lists. Raises
    StoreLocked if the store is open for writing elsewhere. `read_only` changes nothing and needs no lock.

    rows, num_owners, owner_index: of a vocabulary table, with ids of owner `owner_index` only; None: any id.
    reader, writer, collector: share one of each among the stores of a rank. stripes: directories of this store's own
    that take its segments instead of `directory`; every one it ever had must be among them. access "mapped": files
    are read by loads, for memory that is mounted as files. `segment_bytes`: size at which a new segment starts;
    `chunk_bytes`: size of one write, a multiple of 4096.
    """
    directory = Path(directory)
    disk = disk or Disk()
    home_lock = None if read_only else _lock_store_directory(directory, disk, step)
    store = opened = None
    try:
        by_step, damaged, store_id, known = _read_commits(
            directory, table_name, identity, record_bytes, step, read_only
        )
        opened = open_stripes(
            directory,
            stripes,
            disk=None if read_only else disk,
            home_lock=home_lock,
            known=known,
            store_id=store_id,
        )
        shape = SegmentShape(record_bytes, owner_digest(table_name, identity))
        longest = max(segment_bytes, HEADER.size + shape.stride)
        first_number = 1 + _find_last_segment_number(by_step, damaged, opened)
        keys = (record_bytes, rows or 0, num_owners, owner_index)
        log = _native.RowLog(*keys, longest, shape.chunk_bytes(chunk_bytes), 3, first_number)
        pages = -(-longest // 4096) * 4096
        is_mapped = access == "mapped"
        store = LogBacking(
            directory,
            table_name=table_name,
            identity=identity,
            shape=shape,
            disk=disk,
            log=log,
            files=LogFiles(log, disk, opened, shape, longest_bytes=pages, is_mapped=is_mapped),
            stripes=opened,
            reader=reader or _native.PageReader("auto", READ_DEPTH),
            writer=None if read_only else writer or LogWriter(),
            collector=None if read_only else collector or Collector(),
            segment_bytes=longest,
        )
        store._start(step, by_step, damaged, read_only)
    except BaseException:
        _close_partially_opened(store, opened, home_lock)
        raise
    return store


def _find_last_segment_number(
    by_step: Mapping[int, Manifest], damaged: Sequence[int], opened: Stripes
) -> int:
    """Return the largest number of a segment; those of damaged commits are known by their files only."""
    numbers = [entry.number for manifest in by_step.values() for entry in manifest.segments]
    if damaged:
        numbers += [number for number, _ in list_segment_files(opened)]
    return max(numbers, default=0)


def _read_commits(
    directory: Path,
    table_name: str,
    identity: str,
    record_bytes: int,
    step: int | None,
    read_only: bool,
) -> tuple[dict[int, Manifest], list[int], str, dict[int, str]]:
    """Read the manifest of `step` and, for writing, the earlier ones, as `_read_manifests` does."""
    if record_bytes < 1:
        raise ValueError(f"got record_bytes={record_bytes}, wanted at least 1")
    allow_many_files()
    read = partial(
        manifests.read_manifest,
        directory,
        table=table_name,
        identity=identity,
        record_bytes=record_bytes,
    )
    older = () if read_only else manifests.committed_steps(directory)
    return _read_manifests(read, step, older)


def _read_manifests(
    read: Callable[[int], tuple[Manifest, str, dict[int, str]]],
    step: int | None,
    steps: Iterable[int],
) -> tuple[dict[int, Manifest], list[int], str, dict[int, str]]:
    """Read the manifest of `step` and, of `steps`, the earlier ones.

    Returns them by step, the steps of earlier ones that cannot be read, and the store's id and directories from the
    manifest of `step`; all empty for a new store.
    """
    if step is None:
        return {}, [], "", {}
    manifest, store_id, known = read(step)
    by_step = {}
    damaged = []
    for other in (other for other in steps if other < step):
        try:
            by_step[other] = read(other)[0]
        except StorageError:
            damaged.append(other)
    return {**by_step, step: manifest}, damaged, store_id, known


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
