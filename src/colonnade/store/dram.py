"""`dram`: rows in this process's memory, over logs that hold the rows memory has no room for.

    slots, job = store.acquire(ids, offsets)      # ahead of use, on any thread: nothing is waited for
    store.wait(job)                               # before the rows' values are read
    store.before_update(slots, offsets)           # before they change
    store.release(slots, offsets, dirty=True)

    store.begin_commit()                          # between two steps: fast
    store.finish_commit(100)                      # on another thread, while training goes on

Legend: T tables, U unique rows of a call.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import BudgetExceeded, StorageError
from colonnade.store.budget import slot_bytes
from colonnade.store.contract import Backing, Manifest, RowView
from colonnade.store.log import LogBacking
from colonnade.store.log_rows import raise_fault
from colonnade.table import Table
from colonnade.topology.sharding import Shard

MAX_SLOTS = 2**32 - 2
WRITTEN_TOGETHER = (
    4 << 20
)  # about so many bytes are handed to a log before the writer is asked for room


@dataclass(slots=True)
class RowSources:
    """Where the rows of `acquire` came from, and where evicted ones went. Rows, since the store opened."""

    resident: int = 0
    read: int = 0  # from files
    copied: int = 0  # from what the logs still hold in memory
    born: int = 0
    evicted_clean: int = 0
    evicted_dirty: int = 0
    bytes_read: int = 0  # of records, out of files
    bytes_evicted: int = 0  # of records
    stall_seconds: float = 0.0  # that `wait` waited for reads
    room_seconds: float = 0.0  # that `acquire` waited for the writer


class DramStore:
    """A `Resident` for all tables of a rank. Without backings nothing is ever evicted.

    One lock orders acquire, delete and the beginning of a commit; `release`, `wait`, `before_update` and the
    operations on pinned rows take none of it. Once a row could not be read, every call says so.
    """

    def __init__(
        self, tables: Sequence[Table], native: _native.Dram, backings: Sequence[Backing] = ()
    ) -> None:
        """backings: one by table; logs (`AbsentRows` where this rank has no rows), or what can only be read."""
        self.tables = tuple(tables)
        self.native = native
        self._lock = threading.Lock()
        self.attach(backings)
        largest = max(table.record_bytes for table in self.tables)
        self._rows_together = max(1, WRITTEN_TOGETHER // largest)
        self.sources = RowSources()
        self._views = [
            RowView(
                native.weights_address(t), native.stride_bytes(t), table.width, table.dtype
            )
            for t, table in enumerate(self.tables)
        ]  # fmt: skip
        self.deleted: list[list[Tensor]] | None = None  # ids by table; None: nobody asks for them
        self._released = threading.Condition()
        self.releases = 0
        """Times that `release` was called, for `wait_for_release`."""
        self._is_committing = False

    def attach(self, backings: Sequence[Backing]) -> None:
        """Let rows rest in these; () for nowhere.

        Once the store is in use, only one that holds every row in memory may change this, between steps: `commit`
        then writes the rows that are newer than the ones before, and all of these are in memory, too.
        """
        logs = {t: each for t, each in enumerate(backings) if isinstance(each, LogBacking)}
        tiers = None
        if logs:
            each = list(logs.values())
            steps = max((log.commits()[-1] for log in each if log.commits()), default=0)
            by_table = [logs[t].log if t in logs else None for t in range(len(self.tables))]
            tiers = _native.TieredRows(self.native, by_table, each[0].reader, steps)
        writers = [log.writer for log in logs.values() if log.writer is not None]
        with self._lock:
            self.backings, self.logs, self.tiers = tuple(backings), logs, tiers
            self._writers = tuple(dict.fromkeys(writers))  # one, where the logs share it

    def mark_clean(self) -> None:
        """No row in memory is newer than the rows that `attach` will name."""
        for t in range(len(self.tables)):
            self.native.clean(t, torch.as_tensor(self.native.resident(t)[1]))

    def mark_dirty(self) -> None:
        """Every row in memory is newer than the rows that `attach` will name."""
        for t in range(len(self.tables)):
            for ids in torch.as_tensor(self.native.resident(t)[0]).split(1 << 16):
                offsets = torch.tensor([0] * (t + 1) + [len(ids)] * (len(self.tables) - t))
                slots = torch.empty(len(ids), dtype=torch.int32)
                with self._lock:
                    self.native.acquire(ids.contiguous(), offsets, slots, True)
                self.release(slots, offsets, dirty=True)

    def acquire(
        self, ids: Tensor, offsets: Tensor, next_use: Tensor | None = None
    ) -> tuple[Tensor, _native.AcquireJob | None]:
        """`Resident.acquire`. Waits where too many evicted rows wait to be written."""
        slots = torch.empty(len(ids), dtype=torch.int32)
        self._wait_for_room()
        with self._lock:
            if self.backings and self.tiers is None and len(ids):
                raise StorageError(
                    "these rows are open read-only: they can be read, listed and evaluated, not trained"
                )
            try:
                if self.tiers is None:
                    left = self.native.acquire(ids, offsets, slots, True)
                    self.sources.born += len(left.missing)
                    self.sources.resident += len(ids) - len(left.missing)
                    return slots, None
                self._check(self.tiers.fault())
                job = self.tiers.acquire(ids, offsets, slots, next_use)
            except MemoryError as error:
                raise self._explain(error) from None
            for name, count in job.counts().items():
                setattr(self.sources, name, getattr(self.sources, name) + count)
        return slots, job

    def wait(self, job: _native.AcquireJob | None, *, is_stall: bool = True) -> None:
        """Until the rows of this acquire, and of all before it, are there. is_stall: training waits for them."""
        if job is None or self.tiers is None:
            return
        start = time.perf_counter()
        fault = self.tiers.wait(job)
        if is_stall:
            self.sources.stall_seconds += time.perf_counter() - start
        self._check(fault)

    def release(self, slots: Tensor, offsets: Tensor, *, dirty: bool) -> None:
        self.native.release(slots, offsets, dirty)
        with self._released:
            self.releases += 1
            self._released.notify_all()

    def wait_for_release(self, seen: int, seconds: float) -> bool:
        """Wait until `release` was called more than `seen` times; False after `seconds`."""
        with self._released:
            return self._released.wait_for(lambda: self.releases > seen, seconds)

    def read(self, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        found = []
        for t, table in enumerate(self.tables):
            mine = ids[offsets[t] : offsets[t + 1]]
            out = torch.empty(len(mine), table.width, dtype=getattr(torch, table.dtype))
            if self.tiers is not None:
                if len(mine):
                    self._check(self.tiers.read(t, mine, out))
            elif not self.backings:
                absent = np.asarray(self.native.read(t, mine, out))
                born = torch.empty(len(absent), table.width, dtype=out.dtype)
                self.native.birth_values(t, torch.from_numpy(mine.numpy()[absent]), born)
                _bytes(out)[absent] = _bytes(born)
            else:
                out = self._read_below(t, mine)
            found.append(out)
        return found

    def views(self) -> list[RowView]:
        return self._views

    def put(self, t: int, ids: Tensor, records: Tensor) -> None:
        """Rows of table t, ids (N,) unique, become these records (N, record_bytes) uint8; they are as new as rows just
        trained. Raises BudgetExceeded where they do not fit at once."""
        offsets = torch.tensor([0] * (t + 1) + [len(ids)] * (len(self.tables) - t))
        slots, job = self.acquire(ids, offsets)
        try:
            self.wait(job)
            self.before_update(slots, offsets)
            self.native.unpack(t, slots, records)
        finally:
            self.release(slots, offsets, dirty=True)

    def write_down(self, t: int, ids: Tensor, records: Tensor) -> None:
        """Rows of table t that come from a level above, as `put`. They take no room: a row in memory changes in place,
        one that has left it goes to its log. Whoever acquires, writes and deletes rows takes turns. Where it raises,
        some rows may have changed."""
        if not len(ids):
            return
        if self.tiers is not None:
            self._check(self.tiers.fault())
            out = torch.empty(
                len(ids), self.tables[t].width, dtype=getattr(torch, self.tables[t].dtype)
            )
            absent = torch.as_tensor(self.native.read(t, ids, out)).long()
            self.backings[t].write(ids[absent].contiguous(), records[absent].contiguous())
            is_here = torch.ones(len(ids), dtype=torch.bool)
            is_here[absent] = False
            ids, records = ids[is_here].contiguous(), records[is_here].contiguous()
        offsets = torch.tensor([0] * (t + 1) + [len(ids)] * (len(self.tables) - t))
        slots = torch.empty(len(ids), dtype=torch.int32)
        with self._lock:
            try:
                self.native.acquire(ids, offsets, slots, True)
            except MemoryError as error:
                raise self._explain(error) from None
        try:
            self.before_update(slots, offsets)
            self.native.unpack(t, slots, records)
        finally:
            self.release(slots, offsets, dirty=True)

    def check(self) -> None:
        """Raises what a read that failed said, at every call from then on."""
        if self.tiers is not None:
            self._check(self.tiers.fault())

    def clocks(self, t: int, slots: Tensor) -> Tensor:
        """(N,) int64 of rows in slots (N,) int32."""
        return torch.as_tensor(self.native.clocks(t, slots))

    def num_rows(self, t: int) -> int:
        """Of table t, in memory."""
        return int(self.native.num_rows(t))

    def resident_bytes(self) -> int:
        """Of rows, state and index in use."""
        return int(self.native.resident_bytes())

    def pinned_share(self) -> float:
        """Of the slots of the table that is fullest of pinned rows; 0 where no row ever leaves."""
        if self.tiers is None:
            return 0.0
        return max(self.native.pinned_share(t) for t in range(len(self.tables)))

    def delete(self, t: int, ids: Tensor) -> None:
        """Forget rows of table t, ids (N,) unique: in memory and below it. Rows in use are born again in place."""
        if not len(ids):
            return
        with self._lock:
            if self.deleted is not None:
                self.deleted[t].append(ids.clone())
            if self.tiers is None:
                self.native.erase(t, ids)
            else:
                self._check(self.tiers.fault())
                self.tiers.erase(t, ids)

    def scan(self, t: int, run: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids (N,), records (N, record_bytes)) of table t's trained rows, each once, at most about `run` at a time.

        Rows newer than their log are written to it first, as `flush` does.
        """
        if self.backings:
            self._flush(t)
            for batch in self.backings[t].scan():
                for start in range(0, len(batch.ids), run):
                    yield batch.ids[start : start + run], batch.records[start : start + run]
            return
        resident, slots = (torch.as_tensor(part) for part in self.native.resident(t))
        for start in range(0, len(resident), run):
            part = slots[start : start + run].contiguous()
            records = torch.empty(len(part), self.tables[t].record_bytes, dtype=torch.uint8)
            self.native.pack(t, part, records)
            trained = torch.as_tensor(self.native.clocks(t, part)) > 0
            yield resident[start : start + run][trained], records[trained]

    def flush(self) -> int:
        """Write every row newer than its log; returns how many. They stay resident."""
        return sum(self._flush(t) for t in self.logs)

    # ---- commits

    def begin_commit(self) -> None:
        """Between two steps: the rows as they are now are what `finish_commit` makes durable. Nothing is copied yet.

        Raises StorageError where a log cannot take it; then nothing has begun.
        """
        if self.tiers is None:
            return
        self._check(self.tiers.fault())
        if self._is_committing:
            raise StorageError(
                "got a second begin_commit; finish or abandon the commit under way first"
            )
        with self._lock:
            # Rows that leave from here on say that they belong to the commit; then the logs may freeze.
            self.tiers.begin_snapshot()
            self._is_committing = True
        try:
            for log in self.logs.values():
                log.freeze()
        except BaseException:
            self.abandon_commit()
            raise

    def before_update(self, slots: Tensor, offsets: Tensor) -> None:
        """Training thread: of rows about to change, slots (U,), save those that the commit under way still needs."""
        if self._is_committing and self.tiers is not None:
            self.tiers.before_update(slots, offsets)

    def finish_commit(self, step: int) -> list[Manifest]:
        """Save the other rows of the commit and make it durable; any thread, training may go on.

        Raises StorageError: nothing is lost; call again, or `abandon_commit`.
        """
        if self.tiers is None:
            return []
        while self.tiers.save_some(self._rows_together):
            for writer in self._writers:
                writer.wait_behind()
        self._check(self.tiers.fault())
        manifests = [log.commit(step) for log in self.logs.values()]
        self.tiers.end_snapshot()
        self._is_committing = False
        return manifests

    def abandon_commit(self) -> None:
        """Give the commit under way up: its rows are part of the next one. Nothing happens where there is none."""
        if self.tiers is None or not self._is_committing:
            return
        for log in self.logs.values():
            log.thaw()
        self.tiers.end_snapshot()
        self._is_committing = False

    def commit(self, step: int) -> list[Manifest]:
        """Both halves at once. A failed commit loses nothing: rows stay newer in memory or below."""
        self.begin_commit()
        try:
            return self.finish_commit(step)
        except BaseException:
            self.abandon_commit()
            raise

    # ---- inside

    def _flush(self, t: int) -> int:
        if self.tiers is None or t not in self.logs:
            return 0
        self._check(self.tiers.settle())
        while self._is_committing and self.tiers.save_some(self._rows_together):
            self._wait_for_room()
        written = 0
        while rows := self.tiers.write_dirty(t, self._rows_together):
            written += rows
            self._wait_for_room()
        return written

    def _wait_for_room(self) -> None:
        """Until the logs have written enough of what waits in memory. Raises StorageError where a disk refuses it."""
        for writer in self._writers:
            before = writer.stall_seconds
            writer.wait_for_room()
            self.sources.room_seconds += writer.stall_seconds - before

    def _check(self, fault: tuple[int, str, int, int] | None) -> None:
        """Raises what a read that failed says, naming the file."""
        if fault is not None:
            table, kind, place, error = fault
            raise_fault((kind, place, error), self.logs[table].path_of)

    def _read_below(self, t: int, ids: Tensor) -> Tensor:
        """Weights (N, D) of rows that can only be read: from the backing, else their first value."""
        table = self.tables[t]
        out = torch.empty(len(ids), table.width, dtype=getattr(torch, table.dtype))
        records = torch.empty(len(ids), table.record_bytes, dtype=torch.uint8)
        found = self.backings[t].read(ids, records).wait().numpy()
        # What was not found is overwritten below.
        _bytes(out)[:] = records.numpy()[:, : table.width * table.itemsize]
        absent = np.flatnonzero(~found)
        if len(absent):
            born = torch.empty(len(absent), table.width, dtype=out.dtype)
            self.native.birth_values(t, torch.from_numpy(ids.numpy()[absent]), born)
            _bytes(out)[absent] = _bytes(born)
        return out

    def _explain(self, error: MemoryError) -> BudgetExceeded:
        words = (
            str(error).replace(",", "").split()
        )  # table <t> needs <n> slots of <capacity> <p> pinned
        number, needed, capacity, pinned = (int(words[i]) for i in (1, 3, 6, 7))
        table = self.tables[number]
        wanted = (needed + pinned) * slot_bytes(table)
        in_use = f" and {pinned} of these are in use by batches in flight" if pinned else ""
        lower = "the batch size, the lookahead or the staleness" if pinned else "the batch size"
        return BudgetExceeded(
            f"table {table.name!r}: a batch needs {needed} rows in memory at once, the budget holds {capacity} "
            f"({capacity * slot_bytes(table):,} bytes){in_use}. This table needs {wanted:,} bytes on each rank "
            f"(plan.memory.tables={{{table.name}: {wanted}}}): raise plan.memory.dram by that much less what it has, "
            f"or lower {lower}"
        )


def open_dram(
    tables: Sequence[Table],
    capacity_rows: Sequence[int],
    *,
    seed: int,
    shards: Sequence[Shard] = (),
    backings: Sequence[Backing] = (),
    directories: Sequence[Path | None] = (),
) -> DramStore:
    """Reserve address space for `capacity_rows` of each table; memory is used as rows appear.

    shards: by table, what this rank has of it; none given: all rows of all tables.

    directories: by table, where its rows lie instead of in this process's memory: byte-addressable memory mounted as
    files (DAX, CXL, persistent memory), else the page cache. Compute works on them in place. They are scratch files
    without names, taken whole at once; raises StorageError where they cannot be.
    """
    shards = shards or [Shard()] * len(tables)
    directories = [
        None if shard.place is None else place
        for shard, place in zip(shards, directories or [None] * len(tables), strict=True)
    ]
    try:
        for place in directories:
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
        native = _reserve(tables, capacity_rows, seed, shards, directories, bool(backings))
    except (OSError, MemoryError) as error:
        if not any(directories):
            raise
        raise StorageError(
            f"rows cannot lie in mapped files: {error}. Free space there, name another directory, or lower the "
            "budget of mapped memory"
        ) from None
    return DramStore(tables, native, backings)


def _reserve(
    tables: Sequence[Table],
    capacity_rows: Sequence[int],
    seed: int,
    shards: Sequence[Shard],
    directories: Sequence[Path | None],
    is_backed: bool,
) -> _native.Dram:
    """Reserve the address space of `open_dram`. Raises OSError, MemoryError."""
    parts = [(t, part) for t, table in enumerate(tables) for part in table.parts]
    numbers = [(t, part.column, part.dim, part.state) for t, part in parts]
    starts = [part.optimizer.initial_state(part.dim) for _, part in parts]
    return _native.Dram(
        _native.Parts(*torch.tensor(numbers, dtype=torch.int32).T.contiguous()),
        [table.state_floats for table in tables],
        [table.rows or 0 for table in tables],
        [min(rows, MAX_SLOTS) for rows in capacity_rows],
        [table_seed(seed, table.origin[0]) for table in tables],
        [part.init_scale for _, part in parts],
        [value for value, _ in starts],
        [count for _, count in starts],
        tables[0].dtype,
        tables[0].master,
        [shard.num_owners for shard in shards],
        [-1 if shard.place is None else shard.place for shard in shards],
        is_backed,
        ["" if place is None else str(place) for place in directories],
        [table.origin[1] for table in tables],
    )


def _bytes(rows: Tensor) -> np.ndarray:
    """(N, bytes of a row): numpy has no bfloat16."""
    return rows.view(torch.uint8).numpy()


def table_seed(seed: int, name: str) -> int:
    """64 bits from (run seed, `Table.origin`'s name); the same on every machine and in every version."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
