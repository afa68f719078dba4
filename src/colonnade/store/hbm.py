"""`hbm` store: rows in the memory of a device, above rows in this process's memory, above logs.

Compute works on the rows in place (`RowView.rows`), so a step with all its rows on the device moves no value. A missing
row comes from the store below, which reads or initialises it; an evicted row is written back if it was trained. The
store below never has newer values than the device, and its copy of a row may be evicted.

Works on any torch device. Legend: T tables, U unique rows of a call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import BudgetExceeded, ConfigError, CorruptionError, StorageError
from colonnade.ops.optimizers import Settings, count_updates
from colonnade.store.contract import Backing, Manifest, RowSources, RowView, TierCounts
from colonnade.store.device_rows import (
    DIRTY,
    VALID,
    DeviceRows,
    SlotDirectory,
    reserve_device_rows,
)
from colonnade.store.dram import WRITTEN_TOGETHER, DramStore, table_seed
from colonnade.table import CLOCK_BYTES


@dataclass(slots=True)
class PendingLoad:
    """Rows requested from the store below that are not on the device yet."""

    number: int
    slots: list[np.ndarray]  # by table, on the device
    offsets: Tensor  # (T + 1,): of the rows below
    below: Tensor  # (M,) int32: slots below, pinned until they are copied
    job: _native.AcquireJob | None


@dataclass(slots=True)
class TableRequest:
    """Rows of one table in an acquire, before anything has moved."""

    ids: np.ndarray
    codes: np.ndarray | None
    slots: np.ndarray  # -1 where absent
    is_resident: np.ndarray
    missing: np.ndarray  # positions
    resident_slots: np.ndarray
    victims: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def codes_of(self, positions: np.ndarray) -> np.ndarray | None:
        return None if self.codes is None else self.codes[positions]


class HbmStore:
    """`Resident` on a device for all tables of a rank.

    Three locks, always taken in this order: `_moving` by operations that decide which rows are on the device (acquire,
    delete, reads, the beginning of a commit); `_loading` while requested rows are put into their slots; `_flags` for a
    moment, around each use of the directories. `release` takes the last one alone.
    """

    def __init__(self, below: DramStore, rows: Sequence[DeviceRows]) -> None:
        """rows: by table, memory on one device."""
        self.below = below
        self.tables = below.tables
        self.rows = tuple(rows)
        self.device = rows[0].device
        self.directories = tuple(
            SlotDirectory(len(table_rows.clocks), table_rows.table.rows) for table_rows in rows
        )
        self.sources = RowSources()  # `resident`: on the device or in main memory
        self.num_hits = 0  # rows of acquires that were on the device
        self._views = [table_rows.view for table_rows in rows]
        self._moving, self._loading, self._flags = (threading.RLock() for _ in range(3))
        self._loads: deque[PendingLoad] = deque()
        self._number = 0  # of loads, ever
        self._released = threading.Condition()
        self.releases = 0

    # ---- Resident

    def acquire(
        self, ids: Tensor, table_offsets: Tensor, next_use_codes: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Pin rows as `Resident.acquire`. Writes back dirty victims, which may wait for the writer of the logs."""
        with self._moving:
            self.below.check()
            self._install_ready_loads()
            requests = self._find_and_pin_rows(ids, table_offsets, next_use_codes)
            try:
                written = self._write_back_dirty_rows([request.victims for request in requests])
                load = self._request_missing_rows(requests)
            except BaseException:
                self._unpin(requests)
                raise
            for table, request, count in zip(self.tables, requests, written, strict=True):
                self.sources.evicted_dirty += count
                self.sources.evicted_clean += len(request.victims) - count
                self.sources.bytes_evicted += count * table.record_bytes
            slots = self._admit_missing_rows(requests, load)
            self._install_ready_loads()
            return slots, self._number

    def wait(self, job: object) -> None:
        """Wait until the rows of this acquire, and of all before it, are on the device."""
        assert isinstance(job, int)
        began = time.perf_counter()
        with self._loading:
            while self._loads and self._loads[0].number <= job:
                self._install(self._loads[0])
        self.sources.stall_seconds += time.perf_counter() - began

    def before_update(self, slots: Tensor, offsets: Tensor) -> None:
        """Do nothing: a commit takes its rows from the store below, which got them when the commit began."""

    def release(self, slots: Tensor, table_offsets: Tensor, *, dirty: bool) -> None:
        with self._flags:
            for directory, table_slots in zip(
                self.directories, _split_by_table(slots, table_offsets), strict=True
            ):
                directory.unpin_slots(table_slots, dirty=dirty)
        with self._released:
            self.releases += 1
            self._released.notify_all()

    def wait_for_release(self, releases: int, seconds: float) -> bool:
        """Wait until `release` was called more than `releases` times; False after `seconds`."""
        with self._released:
            return self._released.wait_for(lambda: self.releases > releases, seconds)

    def read(self, ids: Tensor, table_offsets: Tensor) -> list[Tensor]:
        """Copy weights to the CPU, as `Resident.read`."""
        with self._moving:
            resident = []
            others = []
            for directory, table_ids in zip(
                self.directories, _split_by_table(ids, table_offsets), strict=True
            ):
                with self._flags:
                    slots = directory.find_slots(table_ids)
                    is_resident = (slots >= 0) & (directory.flags[slots] & VALID != 0)
                resident.append((is_resident, slots[is_resident]))
                others.append(table_ids[~is_resident])
            weights = self.below.read(*_group_ids(others))
            for t, (is_resident, slots) in enumerate(resident):
                if not len(slots):
                    continue
                out = torch.empty(len(is_resident), self.tables[t].width, dtype=weights[t].dtype)
                mask = torch.from_numpy(is_resident)
                out[~mask] = weights[t]
                out[mask] = self.rows[t].weights[self._slots_to_device(slots)].cpu()
                weights[t] = out
            return weights

    def views(self) -> list[RowView]:
        return self._views

    # ---- rows

    def write_rows(self, table_index: int, ids: Tensor, records: Tensor) -> None:
        """Overwrite rows as `DramStore.write_rows`: rows on the device there, the others below."""
        with self._moving:
            self._install_all()
            directory = self.directories[table_index]
            row_ids = ids.numpy()
            slots = directory.find_slots(row_ids)
            is_resident = slots >= 0
            mask = torch.from_numpy(is_resident)
            self.below.write_rows(table_index, ids[~mask].contiguous(), records[~mask].contiguous())
            self.rows[table_index].write_records(
                self._slots_to_device(slots[is_resident]), records[mask].to(self.device)
            )
            with self._flags:
                directory.flags[slots[is_resident]] |= DIRTY

    def delete(self, table_index: int, ids: Tensor) -> None:
        """Delete rows, ids (N,) unique, on the device and below. Rows in use are initialised again in place."""
        if not len(ids):
            return
        with self._moving, self._loading:
            # Rows being loaded are in use below, and initialised again there.
            self.below.delete(table_index, ids)
            directory = self.directories[table_index]
            with self._flags:
                slots = directory.find_slots(ids.numpy())
                slots = slots[slots >= 0]
                is_used = directory.is_pinned(slots)
                directory.free_slots(slots[~is_used])
                used = slots[is_used & (directory.flags[slots] & VALID != 0)]
            if len(used):  # with clock 0: even if marked dirty, they are not written back
                missing = self._empty_arrays()
                missing[table_index] = directory.ids[used]
                records = self._load_missing_records(missing)[table_index]
                self.rows[table_index].write_records(
                    self._slots_to_device(used), records.to(self.device)
                )

    def scan(self, table_index: int, rows_per_item: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield trained rows as `DramStore.scan`; newer rows on the device are written back first."""
        with self._moving:
            self._write_back_dirty([table_index])
        yield from self.below.scan(table_index, rows_per_item)

    def flush(self) -> int:
        """Write every row newer than its log; returns the number of rows the logs got. They stay on the device."""
        with self._moving:
            self._write_back_dirty(range(len(self.tables)))
        return self.below.flush()

    def clocks(self, table_index: int, slots: Tensor) -> Tensor:
        """Return the numbers of updates (N,) int64 of rows in slots (N,) int32."""
        slots = self._slots_to_device(slots.numpy())
        return count_updates(self.rows[table_index].clocks[slots]).cpu()

    def update(
        self,
        row_slots: Tensor,
        table_offsets: Tensor,
        gradient_sums: Sequence[Tensor],
        optimizer_kinds: Sequence[int],
        settings: Sequence[Settings],
    ) -> None:
        """Update pinned rows (U,) by their summed gradients, by table (N, D) on the device.

        optimizer_kinds and settings: by part of all tables.
        """
        table_slots = _split_by_table(row_slots, table_offsets)
        device_slots = self._arrays_to_device(table_slots)
        ids: Sequence[Tensor | None] = [None] * len(table_slots)
        if any(rows.rounds_at_random for rows in self.rows):
            ids = self._arrays_to_device(
                [
                    directory.ids[own]
                    for directory, own in zip(self.directories, table_slots, strict=True)
                ]
            )
        update_device_rows(self.rows, device_slots, ids, gradient_sums, optimizer_kinds, settings)

    # ---- commits

    def begin_commit(self) -> None:
        """Fix the content of a commit as `DramStore.begin_commit`; newer rows are written back first, and stay."""
        with self._moving:
            self._write_back_dirty(range(len(self.tables)))
            self.below.begin_commit()

    def finish_commit(self, step: int) -> list[Manifest]:
        return self.below.finish_commit(step)

    def abandon_commit(self) -> None:
        self.below.abandon_commit()

    # ---- what there is

    @property
    def backings(self) -> tuple[Backing, ...]:
        """Backings of the store below, by table."""
        return self.below.backings

    def pinned_share(self) -> float:
        """Return the largest share of pinned slots of any table, on the device or below."""
        shares = [
            directory.pinned_share()
            for directory in self.directories
            if directory.num_rows == directory.num_slots
        ]
        return max([self.below.pinned_share(), *shares])

    def num_rows(self, table_index: int) -> int:
        """Return the number of the table's rows in main memory, copies of rows on the device included."""
        return self.below.num_rows(table_index)

    def resident_bytes(self) -> int:
        """Return the bytes of main memory in use."""
        return self.below.resident_bytes()

    def device_bytes(self) -> int:
        """Return the bytes of rows on the device."""
        return sum(
            directory.num_rows * rows.table.record_bytes
            for directory, rows in zip(self.directories, self.rows, strict=True)
        )

    def count_tiers(self) -> dict[str, TierCounts]:
        others = self.below.count_tiers()
        missed = others["dram"].hits + others["dram"].misses
        num_bytes = self.device_bytes()
        tier = TierCounts(
            hits=self.num_hits,
            misses=missed,
            rows_written=missed,
            held_bytes=num_bytes,
            live_bytes=num_bytes,
        )
        return {"hbm": tier, **others}

    # ---- inside: acquire

    def _find_and_pin_rows(
        self, ids: Tensor, table_offsets: Tensor, next_use_codes: Tensor | None
    ) -> list[TableRequest]:
        """Pin the rows on the device and choose victims for the others.

        Raises BudgetExceeded, nothing pinned, if there is no room for the others.
        """
        grouped = _split_by_table(ids, table_offsets)
        codes = (
            [None] * len(grouped)
            if next_use_codes is None
            else _split_by_table(next_use_codes, table_offsets)
        )
        requests: list[TableRequest] = []
        with self._flags:
            for directory, table_ids, table_codes in zip(
                self.directories, grouped, codes, strict=True
            ):
                slots = directory.find_slots(table_ids)
                is_resident = slots >= 0
                missing = np.flatnonzero(~is_resident)
                resident_slots = slots[is_resident] if len(missing) else slots.copy()
                requests.append(
                    TableRequest(
                        table_ids, table_codes, slots, is_resident, missing, resident_slots
                    )
                )
            for t, (directory, request) in enumerate(zip(self.directories, requests, strict=True)):
                # Its rows that are pinned already are in use by other batches, too.
                others = directory.count_pinned_others(request.resident_slots, len(request.ids))
                if others + len(request.ids) > directory.num_slots:
                    raise self._build_budget_error(t, len(request.ids), others)
            for directory, request in zip(self.directories, requests, strict=True):
                directory.advance_clock(len(request.ids), next_use_codes is not None)
                directory.pin_slots(request.resident_slots, request.codes_of(request.is_resident))
                request.victims = directory.choose_victim_slots(len(request.missing))
        return requests

    def _unpin(self, requests: Sequence[TableRequest]) -> None:
        with self._flags:
            for directory, request in zip(self.directories, requests, strict=True):
                directory.unpin_slots(request.resident_slots, dirty=False)

    def _request_missing_rows(
        self, requests: Sequence[TableRequest]
    ) -> PendingLoad | list[Tensor] | None:
        """Request missing rows from the store below. Returns a load, or None if no row is missing.

        If the store below has no room for all of them at once, waits and returns their records by table.
        """
        missing = [request.ids[request.missing] for request in requests]
        ids, offsets = _group_ids(missing)
        if not len(ids):
            return None
        before = _count_sources(self.below.sources)
        try:
            below, job = self.below.acquire(ids, offsets)
            return PendingLoad(self._number + 1, [], offsets, below, job)
        except BudgetExceeded:
            return self._load_missing_records(missing)
        finally:
            for name, count in before.items():
                gained = getattr(self.below.sources, name) - count
                setattr(self.sources, name, getattr(self.sources, name) + gained)

    def _admit_missing_rows(
        self, requests: Sequence[TableRequest], load: PendingLoad | list[Tensor] | None
    ) -> Tensor:
        """Give slots to the missing rows. Cannot fail. Returns (U,) int32 slots of all rows."""
        slots = []
        admitted = []
        with self._flags:
            for directory, request in zip(self.directories, requests, strict=True):
                self.num_hits += len(request.ids) - len(request.missing)
                self.sources.resident += len(request.ids) - len(request.missing)
                new_slots = directory.admit_ids(
                    request.ids[request.missing],
                    request.victims,
                    request.codes_of(request.missing),
                )
                request.slots[request.missing] = new_slots
                admitted.append(new_slots)
                slots.append(request.slots)
        if isinstance(load, PendingLoad):
            load.slots = admitted
            self._number = load.number
            self._loads.append(load)
        elif load is not None:
            self._write_slot_records(admitted, load)
        return torch.from_numpy(np.concatenate(slots).astype(np.int32))

    def _build_budget_error(
        self, table_index: int, needed_rows: int, other_pinned_rows: int
    ) -> BudgetExceeded:
        table = self.tables[table_index]
        num_slots = self.directories[table_index].num_slots
        in_use = (
            f" and {other_pinned_rows} of these are in use by batches in flight"
            if other_pinned_rows
            else ""
        )
        lower = (
            "the batch size, the lookahead or the staleness"
            if other_pinned_rows
            else "the batch size"
        )
        return BudgetExceeded(
            f"table {table.name!r}: a batch needs {needed_rows} rows on the device at once, the budget holds "
            f"{num_slots} "
            f"({num_slots * table.record_bytes:,} bytes){in_use}. This table needs "
            f"{(needed_rows + other_pinned_rows) * table.record_bytes:,} bytes on each rank: raise "
            f"plan.memory.hbm, or lower {lower}"
        )

    # ---- inside: loads from below

    def _install_ready_loads(self) -> None:
        """Install loads whose rows are in memory below, off the training thread. `wait` reports failed reads.

        Does nothing while another thread installs loads, which may wait for reads.
        """
        if not self._loading.acquire(blocking=False):
            return
        try:
            with suppress(StorageError, CorruptionError):
                while self._loads and _is_done(self._loads[0].job):
                    self._install(self._loads[0])
        finally:
            self._loading.release()

    def _install_all(self) -> None:
        """Install every load in progress."""
        with self._loading:
            while self._loads:
                self._install(self._loads[0])

    def _install(self, load: PendingLoad) -> None:
        """Copy the oldest load to the device. Raises as `DramStore.wait`, also in later calls; the load then stays."""
        self.below.wait(load.job)
        self._write_slot_records(load.slots, self._copy_records_to_device(load.below, load.offsets))
        self.below.release(load.below, load.offsets, dirty=False)
        self._loads.popleft()

    def _write_slot_records(
        self, slots_by_table: Sequence[np.ndarray], records_by_table: Sequence[Tensor]
    ) -> None:
        for rows, device_slots, table_records in zip(
            self.rows, self._arrays_to_device(slots_by_table), records_by_table, strict=True
        ):
            if len(device_slots):
                rows.write_records(device_slots, table_records)
        with self._flags:
            for directory, table_slots in zip(self.directories, slots_by_table, strict=True):
                directory.flags[table_slots] |= VALID

    def _copy_records_to_device(self, lower_slots: Tensor, table_offsets: Tensor) -> list[Tensor]:
        """Copy records of rows in slots below to the device, by table, in one transfer."""
        counts = table_offsets.diff().tolist()
        sizes = [n * table.record_bytes for n, table in zip(counts, self.tables, strict=True)]
        # Pinned memory: a copy to a GPU starts without staging.
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for t, part in enumerate(torch.split(block, sizes)):
            if counts[t]:
                slots = lower_slots[table_offsets[t] : table_offsets[t + 1]].contiguous()
                self.below.native.pack(t, slots, part.view(counts[t], -1))
        moved = block.to(self.device, non_blocking=True)
        return [
            part.view(n, table.record_bytes)
            for part, n, table in zip(torch.split(moved, sizes), counts, self.tables, strict=True)
        ]

    def _load_missing_records(self, ids_by_table: list[np.ndarray]) -> list[Tensor]:
        """Load records by table to the device and wait; in pieces if the store below has no room for all at once."""
        ids, offsets = _group_ids(ids_by_table)
        try:
            below, job = self.below.acquire(ids, offsets)
        except BudgetExceeded:
            if self._loads:
                self._install_all()  # frees the slots that loads have pinned below
                return self._load_missing_records(ids_by_table)
            if len(ids) <= 1:
                raise
            halves = [np.array_split(table_ids, 2) for table_ids in ids_by_table]
            if max(map(len, ids_by_table)) == 1:  # a row of several tables each
                t = next(t for t, table_ids in enumerate(ids_by_table) if len(table_ids))
                none = ids.numpy()[:0]
                halves = [
                    [table_ids, none] if i == t else [none, table_ids]
                    for i, table_ids in enumerate(ids_by_table)
                ]
            first, second = (
                self._load_missing_records([pair[i] for pair in halves]) for i in (0, 1)
            )
            return [torch.cat(pair) for pair in zip(first, second, strict=True)]
        try:
            self.below.wait(job)
            return self._copy_records_to_device(below, offsets)
        finally:
            self.below.release(below, offsets, dirty=False)

    # ---- inside: write-back

    def _write_back_dirty(self, tables: Sequence[int] | range) -> None:
        """Write back the dirty rows of these tables; they stay and are clean."""
        slots = [empty[:0] for empty in self._empty_arrays()]
        for t in tables:
            slots[t] = self.directories[t].dirty_slots()
        self._write_back_dirty_rows(slots)

    def _write_back_dirty_rows(self, slots_by_table: Sequence[np.ndarray]) -> list[int]:
        """Write the dirty ones of these rows, by table, to the store below; returns their numbers.

        Whatever fails, no row is lost: it stays dirty until it is below.
        """
        written = [0] * len(self.tables)
        for t, (directory, table_slots) in enumerate(
            zip(self.directories, slots_by_table, strict=True)
        ):
            with self._flags:
                dirty = table_slots[directory.flags[table_slots] & DIRTY != 0]
            for start in range(0, len(dirty), WRITTEN_TOGETHER):
                part = dirty[start : start + WRITTEN_TOGETHER]
                with self._flags:  # before the copy: rows trained from here on are dirty again
                    directory.flags[part] &= ~DIRTY
                try:
                    records = self.rows[t].records(self._slots_to_device(part)).cpu()
                    # Copied even if one row is contiguous already: its clock may begin at any byte.
                    clocks = records[:, -CLOCK_BYTES:].clone(memory_format=torch.contiguous_format)
                    trained = clocks.view(torch.int64)[:, 0] > 0
                    ids = torch.from_numpy(directory.ids[part])[trained]
                    self.below.write_back(t, ids, records[trained])
                except BaseException:
                    with self._flags:
                        directory.flags[part] |= DIRTY
                    raise
                written[t] += len(ids)
        return written

    # ---- inside: tensors

    def _slots_to_device(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def _arrays_to_device(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy arrays, by table, to the device as int64, in one transfer."""
        joined = self._slots_to_device(np.concatenate(arrays))
        return list(torch.split(joined, [len(array) for array in arrays]))

    def _empty_arrays(self) -> list[np.ndarray]:
        return [np.empty(0, np.int64) for _ in self.tables]


def open_hbm_store(
    lower_store: DramStore, capacity_rows: Sequence[int], device: torch.device | str, *, seed: int
) -> HbmStore:
    """Reserve memory for `capacity_rows` of each table on `device`. Raises ConfigError if it does not have enough.

    seed: the run's.
    """
    target = torch.device(device)
    rows = []
    try:
        for table, count in zip(lower_store.tables, capacity_rows, strict=True):
            rows.append(
                reserve_device_rows(table, count, target, table_seed(seed, table.origin[0]))
            )
    except RuntimeError as error:
        wanted = sum(
            n * table.record_bytes
            for n, table in zip(capacity_rows, lower_store.tables, strict=True)
        )
        raise ConfigError(
            f"plan.memory.hbm: got {wanted:,} bytes of rows for {target}, which does not have them: "
            f"{str(error).splitlines()[0]}. Give hbm less"
        ) from None
    return HbmStore(lower_store, rows)


def update_device_rows(
    rows: Sequence[DeviceRows],
    row_slots: Sequence[Tensor],
    ids: Sequence[Tensor | None],
    gradient_sums: Sequence[Tensor],
    optimizer_kinds: Sequence[int],
    settings_by_part: Sequence[Settings],
) -> None:
    """Update rows of several tables (`DeviceRows.update`): all by table, kinds and settings by part of all tables."""
    first = 0
    for table_rows, table_slots, table_ids, gradients in zip(
        rows, row_slots, ids, gradient_sums, strict=True
    ):
        end = first + len(table_rows.table.parts)
        if len(table_slots):
            table_rows.update(
                table_slots,
                table_ids,
                gradients,
                optimizer_kinds[first:end],
                settings_by_part[first:end],
            )
        first = end


def _split_by_table(values: Tensor, offsets: Tensor) -> list[np.ndarray]:
    bounds = offsets.tolist()
    array = values.numpy()
    return [array[i:j] for i, j in pairwise(bounds)]


def _group_ids(parts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Concatenate ids by table: (N,) int64, and offsets (T + 1,)."""
    sizes = np.array([0, *map(len, parts)], np.int64)
    return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(sizes.cumsum())


def _count_sources(sources: RowSources) -> dict[str, int]:
    names = ("resident", "mapped", "read", "copied", "born", "bytes_read", "bytes_mapped")
    return {name: getattr(sources, name) for name in names}


def _is_done(job: object) -> bool:
    return job is None or bool(getattr(job, "is_done", False))
