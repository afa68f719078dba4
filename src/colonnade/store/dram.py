"""`dram` store: rows in memory, above a cache of evicted rows in mapped files, if wanted, and logs with all others.

    slots, job = store.acquire(ids, offsets)      # ahead of use, on any thread: does not wait for reads
    store.wait(job)                               # before the rows' values are read
    store.before_update(slots, offsets)           # before they change
    store.release(slots, offsets, dirty=True)

    store.begin_commit()                          # between two steps: fast
    store.finish_commit(100)                      # on another thread, while training continues

Legend: T tables, U unique rows of a call.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import BudgetExceeded, StorageError
from colonnade.files.disk import check_free_space
from colonnade.store.budget import row_bytes_below_dram, slot_bytes
from colonnade.store.contract import Backing, Manifest, RowSources, RowView, TierCounts
from colonnade.store.log.backing import LogBacking, count_shared_io
from colonnade.store.log.rows import raise_read_fault
from colonnade.store.traffic import TrafficSample
from colonnade.table import Table
from colonnade.topology.sharding import Shard

MAX_SLOTS = 2**32 - 2
# Bytes handed to a log, about, before the store waits for the log's writer.
WRITTEN_TOGETHER = 4 << 20
RESIZE_PARTS = 16
"""Rows evicted together when a table shrinks, in units of `WRITTEN_TOGETHER`."""


class DramStore:
    """`Resident` in main memory for all tables of a rank. Without backings it never evicts a row.

    One lock orders acquire, delete and the beginning of a commit; `release`, `wait`, `before_update` and the
    operations on pinned rows do not take it. After a row could not be read, every call raises that error.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        native: _native.Dram,
        backings: Sequence[Backing] = (),
        cache: _native.Dram | None = None,
        most_rows: Sequence[int] = (),
    ) -> None:
        """backings: one by table; logs (`AbsentRows` if this rank has no rows), or read-only ones. cache: of evicted
        rows, above the logs. most_rows: as `open_dram_store`."""
        self.tables = tuple(tables)
        self.native = native
        self.cache = cache
        self._most_rows = tuple(most_rows)
        self._lock = threading.Lock()
        self.attach_backings(backings)
        largest = max(table.record_bytes for table in self.tables)
        self._rows_together = max(1, WRITTEN_TOGETHER // largest)
        self.sources = RowSources()
        self.traffic: TrafficSample | None = None  # None: not recorded
        self._views = [
            RowView(native.weights_address(t), native.stride_bytes(t), table.width, table.dtype)
            for t, table in enumerate(self.tables)
        ]
        self.deleted: list[list[Tensor]] | None = None  # ids by table; None: not recorded
        self._released = threading.Condition()
        self.releases = 0
        """Number of calls of `release`, for `wait_for_release`."""
        self._is_committing = False

    def attach_backings(self, backings: Sequence[Backing]) -> None:
        """Store rows that do not fit in memory in these backings; () for none.

        Once the store is in use, only a store with every row in memory may change its backings, between steps:
        `commit` then writes the rows that are newer than the old backings, and all of these are in memory.
        """
        logs = {t: backing for t, backing in enumerate(backings) if isinstance(backing, LogBacking)}
        tiers = None
        if logs:
            opened = list(logs.values())
            steps = max((log.commits()[-1] for log in opened if log.commits()), default=0)
            by_table = [logs[t].log if t in logs else None for t in range(len(self.tables))]
            tiers = _native.TieredRows(self.native, by_table, opened[0].reader, steps, self.cache)
        writers = [log.writer for log in logs.values() if log.writer is not None]
        with self._lock:
            self.backings = tuple(backings)
            self.logs = logs
            self.tiers = tiers
            self._writers = tuple(dict.fromkeys(writers))  # one, where the logs share it

    def mark_all_clean(self) -> None:
        """Mark every row in memory as no newer than in the backings that `attach_backings` will set."""
        for t in range(len(self.tables)):
            self.native.clean(t, torch.as_tensor(self.native.resident(t)[1]))

    def mark_all_dirty(self) -> None:
        """Mark every row in memory as newer than in the backings that `attach_backings` will set."""
        for t in range(len(self.tables)):
            for ids in torch.split(torch.as_tensor(self.native.resident(t)[0]), 1 << 16):
                offsets = torch.tensor([0] * (t + 1) + [len(ids)] * (len(self.tables) - t))
                slots = torch.empty(len(ids), dtype=torch.int32)
                with self._lock:
                    self.native.acquire(ids.contiguous(), offsets, slots, True)
                self.release(slots, offsets, dirty=True)

    def acquire(
        self, ids: Tensor, table_offsets: Tensor, next_use_codes: Tensor | None = None
    ) -> tuple[Tensor, _native.AcquireJob | None]:
        """Pin rows as `Resident.acquire`. Waits while too many evicted rows wait to be written."""
        slots, job = self._acquire(ids, table_offsets, next_use_codes)
        if self.traffic is not None:
            self.traffic.add(ids, table_offsets)
        return slots, job

    def _acquire(
        self, ids: Tensor, table_offsets: Tensor, next_use_codes: Tensor | None = None
    ) -> tuple[Tensor, _native.AcquireJob | None]:
        """Pin rows, which are no traffic of batches if rows are loaded."""
        slots = torch.empty(len(ids), dtype=torch.int32)
        self._wait_for_room()
        with self._lock:
            if self.backings and self.tiers is None and len(ids):
                raise StorageError(
                    "these rows are open read-only: they can be read, listed and evaluated, not trained"
                )
            try:
                if self.tiers is None:
                    result = self.native.acquire(ids, table_offsets, slots, True)
                    self.sources.born += len(result.missing)
                    self.sources.mapped += result.num_mapped
                    self.sources.resident += len(ids) - len(result.missing) - result.num_mapped
                    return slots, None
                self._raise_fault(self.tiers.fault())
                try:
                    job = self.tiers.acquire(ids, table_offsets, slots, next_use_codes)
                except MemoryError as error:
                    if not self._make_room(error, table_offsets):
                        raise
                    job = self.tiers.acquire(ids, table_offsets, slots, next_use_codes)
            except MemoryError as error:
                raise self._build_budget_error(error) from None
            for name, count in job.counts().items():
                setattr(self.sources, name, getattr(self.sources, name) + count)
        return slots, job

    def wait(self, job: object, *, is_stall: bool = True) -> None:
        """Wait until the rows of this acquire, and of all before it, are in memory. is_stall: training waits."""
        if job is None or self.tiers is None:
            return
        assert isinstance(job, _native.AcquireJob)
        start = time.perf_counter()
        fault = self.tiers.wait(job)
        if is_stall:
            self.sources.stall_seconds += time.perf_counter() - start
        self._raise_fault(fault)

    def release(self, slots: Tensor, table_offsets: Tensor, *, dirty: bool) -> None:
        self.native.release(slots, table_offsets, dirty)
        with self._released:
            self.releases += 1
            self._released.notify_all()

    def wait_for_release(self, releases: int, seconds: float) -> bool:
        """Wait until `release` was called more than `releases` times; False after `seconds`."""
        with self._released:
            return self._released.wait_for(lambda: self.releases > releases, seconds)

    def read(self, ids: Tensor, table_offsets: Tensor) -> list[Tensor]:
        weights = []
        for t, table in enumerate(self.tables):
            table_ids = ids[table_offsets[t] : table_offsets[t + 1]]
            out = torch.empty(len(table_ids), table.width, dtype=getattr(torch, table.dtype))
            if self.tiers is not None:
                if len(table_ids):
                    self._raise_fault(self.tiers.read(t, table_ids, out))
            elif not self.backings:
                absent = np.asarray(self.native.read(t, table_ids, out))
                born = torch.empty(len(absent), table.width, dtype=out.dtype)
                self.native.initial_values(t, torch.from_numpy(table_ids.numpy()[absent]), born)
                _view_bytes(out)[absent] = _view_bytes(born)
            else:
                out = self._read_rows_from_backing(t, table_ids)
            weights.append(out)
        return weights

    def views(self) -> list[RowView]:
        return self._views

    def write_rows(self, table_index: int, ids: Tensor, records: Tensor) -> None:
        """Overwrite rows with these records (N, record_bytes) uint8; ids (N,) unique. They are then dirty.

        Raises BudgetExceeded if they do not fit in memory at once.
        """
        offsets = torch.tensor(
            [0] * (table_index + 1) + [len(ids)] * (len(self.tables) - table_index)
        )
        slots, job = self._acquire(ids, offsets)
        try:
            self.wait(job)
            self.before_update(slots, offsets)
            self.native.unpack(table_index, slots, records)
        finally:
            self.release(slots, offsets, dirty=True)

    def write_back(self, table_index: int, ids: Tensor, records: Tensor) -> None:
        """Overwrite rows with records from the tier above, without needing free slots.

        A row in memory changes in place, an evicted one is written to the cache or its log. The caller orders acquires,
        writes and deletes. If it raises, rows may have changed.
        """
        if not len(ids):
            return
        if self.tiers is not None:
            self._raise_fault(self.tiers.fault())
            out = torch.empty(
                len(ids),
                self.tables[table_index].width,
                dtype=getattr(torch, self.tables[table_index].dtype),
            )
            absent = torch.as_tensor(self.native.read(table_index, ids, out)).long()
            if len(absent):
                self._wait_for_room()
                self.tiers.write(table_index, ids[absent], records[absent])
            is_resident = torch.ones(len(ids), dtype=torch.bool)
            is_resident[absent] = False
            ids = ids[is_resident].contiguous()
            records = records[is_resident].contiguous()
        offsets = torch.tensor(
            [0] * (table_index + 1) + [len(ids)] * (len(self.tables) - table_index)
        )
        slots = torch.empty(len(ids), dtype=torch.int32)
        with self._lock:
            try:
                self.native.acquire(ids, offsets, slots, True)
            except MemoryError as error:
                raise self._build_budget_error(error) from None
        try:
            self.before_update(slots, offsets)
            self.native.unpack(table_index, slots, records)
        finally:
            self.release(slots, offsets, dirty=True)

    def check(self) -> None:
        """Raise the error of a read that failed, at every call from then on."""
        if self.tiers is not None:
            self._raise_fault(self.tiers.fault())

    def clocks(self, table_index: int, slots: Tensor) -> Tensor:
        """Return the numbers of updates (N,) int64 of rows in slots (N,) int32."""
        return torch.as_tensor(self.native.clocks(table_index, slots))

    def num_rows(self, table_index: int) -> int:
        """Return the number of the table's rows in memory."""
        return int(self.native.num_rows(table_index))

    def resident_bytes(self) -> int:
        """Return the bytes of main memory in use by rows, state and index; without the cache's index."""
        return int(self.native.resident_bytes())

    def pinned_share(self) -> float:
        """Return the largest share of pinned slots of any table; 0 if the store never evicts."""
        if self.tiers is None:
            return 0.0
        return max(self.native.pinned_share(t) for t in range(len(self.tables)))

    def delete(self, table_index: int, ids: Tensor) -> None:
        """Delete rows, ids (N,) unique, in memory and in the backing. Rows in use are initialised again in place."""
        if not len(ids):
            return
        with self._lock:
            if self.deleted is not None:
                self.deleted[table_index].append(ids.clone())
            if self.tiers is None:
                self.native.erase(table_index, ids)
            else:
                self._raise_fault(self.tiers.fault())
                self.tiers.erase(table_index, ids)

    def capacities(self) -> dict[int, int]:
        """Return the slots of each table that can be resized, by table index: those whose `most_rows` is not 0."""
        native = self.native
        if self.tiers is None:
            return {}
        return {
            t: native.capacity_rows(t)
            for t, limit in enumerate(self._most_rows)
            if limit and native.can_resize(t)
        }

    def resize(self, capacity_rows: Mapping[int, int]) -> None:
        """Change the slots of tables, by table index: those of `capacities`. Between two steps, not during a commit.

        Tables that lose slots are first: they evict rows, dirty ones to their logs, and their memory is free for the
        others. A table keeps the rows that batches in flight use, so it may keep more slots than wanted; tables that
        gain then get less.
        """
        if self.tiers is None:
            return
        self._raise_fault(self.tiers.fault())
        before = self.capacities()
        sizes = {t: slot_bytes(self.tables[t]) for t in capacity_rows}
        total = sum(rows * sizes[t] for t, rows in capacity_rows.items())
        for t, wanted in sorted(capacity_rows.items(), key=lambda item: item[1] - before[item[0]]):
            # Read anew: meanwhile a batch of the lookahead may take memory of other tables.
            rows = self.native.capacity_rows(t)
            target = wanted
            if wanted > rows:
                in_use = sum(self.native.capacity_rows(u) * size for u, size in sizes.items())
                target = min(wanted, rows + max(0, total - in_use) // sizes[t])
            while rows != target:
                # Evicted rows fill the buffers of the logs' writer, so they leave a part at a time.
                part = max(target, rows - RESIZE_PARTS * self._rows_together)
                self._wait_for_room()
                with self._lock:
                    rows = self.tiers.resize(t, part)
                if rows != part:
                    break
        self._raise_fault(self.tiers.fault())

    def scan(self, table_index: int, rows_per_item: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (ids (N,), records (N, record_bytes)) of the trained rows, each once, about `rows_per_item` at a time.

        Rows newer than their log are written to it first, as `flush` does.
        """
        if self.backings:
            self._flush_table(table_index)
            for batch in self.backings[table_index].scan():
                for start in range(0, len(batch.ids), rows_per_item):
                    yield (
                        batch.ids[start : start + rows_per_item],
                        batch.records[start : start + rows_per_item],
                    )
            return
        resident, slots = (torch.as_tensor(part) for part in self.native.resident(table_index))
        for start in range(0, len(resident), rows_per_item):
            part = slots[start : start + rows_per_item].contiguous()
            records = torch.empty(
                len(part), self.tables[table_index].record_bytes, dtype=torch.uint8
            )
            self.native.pack(table_index, part, records)
            trained = torch.as_tensor(self.native.clocks(table_index, part)) > 0
            yield resident[start : start + rows_per_item][trained], records[trained]

    def flush(self) -> int:
        """Write every row newer than its log; returns their number. They stay resident."""
        return sum(self._flush_table(t) for t in self.logs)

    def count_tiers(self) -> dict[str, TierCounts]:
        sources = self.sources
        mapped = TierCounts()
        mapped_bytes = self.native.mapped_bytes()
        if self.cache is not None and self.tiers is not None:
            mapped = _count_cache_tier(self.tables, self.cache, self.tiers.cache_counts())
        # Rows of tables that are wholly in mapped memory are used there, so that they are no misses of main memory.
        needed = sources.resident + mapped.hits + sources.read + sources.copied + sources.born
        resident = self.native.resident_bytes()
        tiers = {
            "dram": TierCounts(
                hits=sources.resident,
                misses=needed - sources.resident,
                rows_written=needed - sources.resident,
                held_bytes=resident,
                live_bytes=resident,
            )
        }
        if self.cache is not None or mapped_bytes:
            tiers["mapped"] = replace(
                mapped,
                hits=sources.mapped,
                held_bytes=mapped.held_bytes + mapped_bytes,
                live_bytes=mapped.live_bytes + mapped_bytes,
            )
        below = [backing for backing in self.backings if isinstance(backing, LogBacking)]
        for backing in below:
            tiers["ssd"] = tiers.get("ssd", TierCounts()) + backing.count_tier()
        if below:
            tiers["ssd"] += count_shared_io(below)
            tiers["ssd"] += TierCounts(stall_seconds=sources.stall_seconds)
        return tiers

    # ---- commits

    def begin_commit(self) -> None:
        """Fix the content that `finish_commit` makes durable: the rows as of now, between two steps. Copies nothing.

        Raises StorageError if a log cannot begin; then no commit has begun.
        """
        if self.tiers is None:
            return
        self._raise_fault(self.tiers.fault())
        if self._is_committing:
            raise StorageError(
                "got a second begin_commit; finish or abandon the commit under way first"
            )
        with self._lock:
            # Rows evicted from here on carry a flag that they belong to the commit; then the logs may freeze.
            self.tiers.begin_snapshot()
            self._is_committing = True
        try:
            for log in self.logs.values():
                log.freeze()
        except BaseException:
            self.abandon_commit()
            raise

    def before_update(self, slots: Tensor, offsets: Tensor) -> None:
        """Save rows in slots (U,) that the commit in progress still needs before they change. Training thread."""
        if self._is_committing and self.tiers is not None:
            self.tiers.before_update(slots, offsets)

    def finish_commit(self, step: int) -> list[Manifest]:
        """Save the other rows of the commit and make it durable. Any thread; training may continue.

        Raises StorageError: nothing is lost; call again, or `abandon_commit`.
        """
        if self.tiers is None:
            return []
        while self.tiers.save_some(self._rows_together):
            for writer in self._writers:
                writer.wait_for_spare_room()
        self._raise_fault(self.tiers.fault())
        manifests = [log.commit(step) for log in self.logs.values()]
        self.tiers.end_snapshot()
        self._is_committing = False
        return manifests

    def abandon_commit(self) -> None:
        """Give up the commit in progress, if any: its rows become part of the next one."""
        if self.tiers is None or not self._is_committing:
            return
        for log in self.logs.values():
            log.thaw()
        self.tiers.end_snapshot()
        self._is_committing = False

    # ---- inside

    def _flush_table(self, table_index: int) -> int:
        if self.tiers is None or table_index not in self.logs:
            return 0
        self._raise_fault(self.tiers.settle())
        while self._is_committing and self.tiers.save_some(self._rows_together):
            self._wait_for_room()
        written = 0
        while rows := self.tiers.write_dirty(table_index, self._rows_together):
            written += rows
            self._wait_for_room()
        return written

    def _wait_for_room(self) -> None:
        """Wait until the logs have written enough of their buffers. Raises StorageError if a disk refuses a write."""
        for writer in self._writers:
            before = writer.stall_seconds
            writer.wait_for_room()
            self.sources.room_seconds += writer.stall_seconds - before

    def _raise_fault(self, fault: tuple[int, str, int, int] | None) -> None:
        """Raise the error of a failed read, naming the file."""
        if fault is not None:
            table_index, kind, place, error = fault
            raise_read_fault((kind, place, error), self.logs[table_index].path_of)

    def _make_room(self, memory_error: MemoryError, table_offsets: Tensor) -> bool:
        """Take slots from other tables for a batch that does not fit in its table even alone. Returns whether it fits.

        Memory is divided by earlier batches, and a later one may use more rows of a table than any before. Nothing
        changes where the others cannot spare enough: rows in use may leave before the next try.
        """
        if self.traffic is None or self.tiers is None:
            return False
        room = _read_room_error(memory_error)
        capacities = self.capacities()
        if room is None or room.table_index not in capacities:
            return False
        t = room.table_index
        wanted = room.needed + room.pinned
        if room.needed <= room.capacity or wanted > self._most_rows[t]:
            return False
        sizes = [slot_bytes(table) for table in self.tables]
        owed = (wanted - room.capacity) * sizes[t]
        in_use = {
            u: math.ceil(rows * self.native.pinned_share(u)) for u, rows in capacities.items()
        }
        needs = map(max, table_offsets.diff().tolist(), self.traffic.peaks)
        least = {u: max(rows, in_use.get(u, 0)) for u, rows in enumerate(needs)}
        spare = {u: max(0, rows - least[u]) for u, rows in capacities.items() if u != t}
        if sum(rows * sizes[u] for u, rows in spare.items()) < owed:
            return False
        for other in sorted(spare, key=lambda other: -spare[other] * sizes[other]):
            taken = min(spare[other], -(-max(owed, 0) // sizes[other]))
            rows = capacities[other]
            owed -= (rows - self.tiers.resize(other, rows - taken)) * sizes[other]
        # Only a failed read keeps others from shrinking; then t gets what there is.
        return self.tiers.resize(t, wanted - -(-max(owed, 0) // sizes[t])) >= wanted

    def _read_rows_from_backing(self, table_index: int, ids: Tensor) -> Tensor:
        """Read weights (N, D) of rows of a read-only store: from the backing, else their first value."""
        table = self.tables[table_index]
        out = torch.empty(len(ids), table.width, dtype=getattr(torch, table.dtype))
        records = torch.empty(len(ids), table.record_bytes, dtype=torch.uint8)
        exists = self.backings[table_index].read(ids, records).wait().numpy()
        # Absent rows are overwritten below.
        _view_bytes(out)[:] = records.numpy()[:, : table.width * table.itemsize]
        absent = np.flatnonzero(~exists)
        if len(absent):
            born = torch.empty(len(absent), table.width, dtype=out.dtype)
            self.native.initial_values(table_index, torch.from_numpy(ids.numpy()[absent]), born)
            _view_bytes(out)[absent] = _view_bytes(born)
        return out

    def _build_budget_error(self, error: MemoryError) -> BudgetExceeded:
        room = _read_room_error(error)
        if room is None:
            raise error
        _, needed, capacity, pinned = room
        table = self.tables[room.table_index]
        wanted = (needed + pinned) * slot_bytes(table)
        in_use = f" and {pinned} of these are in use by batches in flight" if pinned else ""
        lower = "the batch size, the lookahead or the staleness" if pinned else "the batch size"
        return BudgetExceeded(
            f"table {table.name!r}: a batch needs {needed} rows in memory at once, the budget holds {capacity} "
            f"({capacity * slot_bytes(table):,} bytes){in_use}. This table needs {wanted:,} bytes on each rank "
            f"(plan.memory.tables={{{table.name}: {wanted}}}): raise plan.memory.dram by that much less what it has, "
            f"or lower {lower}"
        )


def _count_cache_tier(
    tables: Sequence[Table], dram_cache: _native.Dram, cache_counts: Mapping[str, int]
) -> TierCounts:
    """Return the counts of the cache of evicted rows. Each row is a request of its own."""
    num_bytes = sum(dram_cache.num_rows(t) * table.record_bytes for t, table in enumerate(tables))
    return TierCounts(
        hits=cache_counts["hits"],
        misses=cache_counts["misses"],
        reads=cache_counts["hits"],
        read_bytes=cache_counts["bytes_read"],
        row_bytes=cache_counts["bytes_read"],
        rows_written=cache_counts["rows_inserted"],
        payload_bytes=cache_counts["bytes_inserted"],
        written_bytes=cache_counts["bytes_inserted"],
        held_bytes=num_bytes,
        live_bytes=num_bytes,
    )


class _NoRoom(NamedTuple):
    """Slots of a table that has no room for a batch. pinned: by other batches."""

    table_index: int
    needed: int
    capacity: int
    pinned: int


_NO_ROOM = re.compile(r"table (\d+) needs (\d+) slots of (\d+), (\d+) pinned")


def _read_room_error(error: MemoryError) -> _NoRoom | None:
    """Read the numbers from an error of an acquire; None if it is another one, such as of address space."""
    match = _NO_ROOM.fullmatch(str(error))
    return _NoRoom(*map(int, match.groups())) if match else None


@dataclass(frozen=True, slots=True)
class MappedTier:
    """Directory of scratch files that hold rows instead of this process's memory.

    It is byte-addressable memory mounted as files (DAX, CXL, persistent memory), else the page cache. The files have no
    names and are reserved whole.
    """

    directory: Path
    whole_tables: Collection[int] = ()
    """Tables with all rows here. Compute works on them in place."""
    cache_rows: Sequence[int] = ()
    """Number of evicted rows, by table, above the backings; their index is in this process's memory."""

    def count_file_bytes(self, tables: Sequence[Table], rows: Sequence[int]) -> int:
        """Count the bytes of the files. rows: rows of each table that this rank may have at once."""
        num_bytes = 0
        for t, table in enumerate(tables):
            num_rows = rows[t] if t in self.whole_tables else 0
            num_rows += self.cache_rows[t] if self.cache_rows else 0
            num_bytes += num_rows * row_bytes_below_dram(table)
        return num_bytes


def open_dram_store(
    tables: Sequence[Table],
    capacity_rows: Sequence[int],
    *,
    seed: int,
    shards: Sequence[Shard] = (),
    backings: Sequence[Backing] = (),
    mapped: MappedTier | None = None,
    most_rows: Sequence[int] = (),
) -> DramStore:
    """Reserve address space for `capacity_rows` of each table; memory is used as rows appear.

    most_rows: by table, largest capacity that `DramStore.resize` may set; 0, or (): as at first, always.
    shards: by table, this rank's shard; (): all rows of all tables.

    mapped: rows that are in mapped memory instead. Raises StorageError if its files cannot be reserved.
    """
    shards = shards or [Shard()] * len(tables)
    directories: list[Path | None] = [None] * len(tables)
    cache = None
    try:
        if mapped is not None:
            mapped.directory.mkdir(parents=True, exist_ok=True)
            num_rows = list(map(_limit_to_shard, tables, capacity_rows, shards))
            check_free_space(mapped.directory, mapped.count_file_bytes(tables, num_rows))
            for t in mapped.whole_tables:
                directories[t] = None if shards[t].owner_index is None else mapped.directory
        native = _reserve_address_space(
            tables, capacity_rows, seed, shards, directories, bool(backings), most_rows
        )
        if mapped is not None and backings and any(mapped.cache_rows):
            cached = [replace(table, rows=None, hashes=None) for table in tables]
            directories = [mapped.directory] * len(tables)
            cache = _reserve_address_space(
                cached, mapped.cache_rows, seed, shards, directories, True, ()
            )
    except (OSError, MemoryError) as error:
        if mapped is None:
            raise
        raise StorageError(
            f"could not store rows in mapped files: {error}. Free space on its disk, set another directory, or lower "
            "the budget of mapped memory"
        ) from None
    return DramStore(tables, native, backings, cache, most_rows)


def _limit_to_shard(table: Table, capacity: int, shard: Shard) -> int:
    if shard.owner_index is None:
        return 0
    return capacity if table.rows is None else min(capacity, -(-table.rows // shard.num_owners))


def _reserve_address_space(
    tables: Sequence[Table],
    capacity_rows: Sequence[int],
    seed: int,
    rank_shards: Sequence[Shard],
    directories: Sequence[Path | None],
    is_backed: bool,
    max_rows: Sequence[int],
) -> _native.Dram:
    """Reserve the address space of `open_dram_store`. Raises OSError, MemoryError."""
    settings = [
        _native.TableSettings(
            parts=[
                _native.PartInitialValues(
                    part.dim,
                    part.state,
                    part.init_scale,
                    *part.optimizer.initial_state(part.dim),
                )
                for part in table.parts
            ],
            state_elements=table.state_floats,
            rows=table.rows or 0,
            capacity_rows=min(capacity_rows[t], MAX_SLOTS),
            seed=table_seed(seed, table.origin[0]),
            can_evict=is_backed,
            directory="" if directories[t] is None else str(directories[t]),
            num_owners=rank_shards[t].num_owners,
            place=-1 if (index := rank_shards[t].owner_index) is None else index,
            first_column=table.origin[1],
            most_rows=min(max_rows[t], MAX_SLOTS) if max_rows else 0,
        )
        for t, table in enumerate(tables)
    ]
    return _native.Dram(settings, tables[0].dtype, tables[0].master)


def _view_bytes(rows: Tensor) -> np.ndarray:
    """View rows as (N, bytes of a row): numpy has no bfloat16."""
    return rows.view(torch.uint8).numpy()


def table_seed(seed: int, name: str) -> int:
    """Derive 64 bits from (run seed, `Table.origin`'s name); the same on every machine and in every version."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
