"""`hbm`: rows in the memory of a device, above rows in this process's memory, above logs.

Compute works on the rows where they are (`RowView.rows`), so a step whose rows are all there moves no value. A row
that is not there comes from the store below, which reads it or gives it birth; one that leaves goes back to it if it
was trained. The store below never holds anything newer than what is here, and its copy may leave it.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import BudgetExceeded, ConfigError, CorruptionError, StorageError
from colonnade.ops.optimizers import Settings
from colonnade.store.contract import Manifest, RowView
from colonnade.store.device_rows import DeviceRows, device_rows, update
from colonnade.store.dram import WRITTEN_TOGETHER, DramStore, RowSources, table_seed
from colonnade.store.slot_directory import DIRTY, HERE, SlotDirectory
from colonnade.table import CLOCK_BYTES


@dataclass(slots=True)
class Arrival:
    """Rows that were asked of the store below and are not on the device yet."""

    number: int
    slots: list[np.ndarray]  # by table, on the device
    offsets: Tensor  # (T + 1,): of the rows below
    below: Tensor  # (M,) int32: slots below, pinned until they were copied
    job: Any


@dataclass(slots=True)
class Wanted:
    """One table's rows of an acquire, before anything has moved."""

    ids: np.ndarray
    codes: np.ndarray | None
    slots: np.ndarray  # -1 where absent
    is_here: np.ndarray
    missing: np.ndarray  # positions
    here: np.ndarray  # slots
    victims: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def codes_of(self, positions: np.ndarray) -> np.ndarray | None:
        return None if self.codes is None else self.codes[positions]


class HbmStore:
    """A `Resident` for all tables of a rank.

    Three locks, always taken in this order: `_moving` by whatever decides which rows are here (acquire, delete, reads,
    the beginning of a commit); `_arriving` while rows that were asked for are put into their slots; `_marks` for a
    moment, around what the directories say. `release` takes the last one alone.
    """

    def __init__(self, below: DramStore, rows: Sequence[DeviceRows]) -> None:
        """rows: by table, memory on one device."""
        self.below = below
        self.tables = below.tables
        self.rows = tuple(rows)
        self.device = rows[0].device
        self.directories = tuple(SlotDirectory(len(each.clocks), each.table.rows) for each in rows)
        self.sources = RowSources()  # `resident`: here or in main memory
        self.num_found = 0  # rows that acquires found here
        self._views = [each.view for each in rows]
        self._moving, self._arriving, self._marks = (threading.RLock() for _ in range(3))
        self._arrivals: deque[Arrival] = deque()
        self._number = 0  # of arrivals, ever
        self._released = threading.Condition()
        self.releases = 0

    # ---- Resident

    def acquire(
        self, ids: Tensor, offsets: Tensor, next_use: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """`Resident.acquire`. Writes rows that leave down, which may wait for the writer of the logs."""
        with self._moving:
            self.below.check()
            self._install_ready()
            wanted = self._look_up(ids, offsets, next_use)
            try:
                written = self._write_down([each.victims for each in wanted])
                arrival = self._ask_below(wanted)
            except BaseException:
                self._unpin(wanted)
                raise
            for table, each, count in zip(self.tables, wanted, written, strict=True):
                self.sources.evicted_dirty += count
                self.sources.evicted_clean += len(each.victims) - count
                self.sources.bytes_evicted += count * table.record_bytes
            slots = self._admit(wanted, arrival)
            self._install_ready()
            return slots, self._number

    def wait(self, job: int) -> None:
        """Until the rows of this acquire, and of all before it, are on the device."""
        began = time.perf_counter()
        with self._arriving:
            while self._arrivals and self._arrivals[0].number <= job:
                self._install(self._arrivals[0])
        self.sources.stall_seconds += time.perf_counter() - began

    def before_update(self, slots: Tensor, offsets: Tensor) -> None:
        """Nothing: a commit takes its rows from the store below, where they were written down when it began."""

    def release(self, slots: Tensor, offsets: Tensor, *, dirty: bool) -> None:
        with self._marks:
            for directory, mine in zip(self.directories, _by_table(slots, offsets), strict=True):
                directory.unpin(mine, dirty=dirty)
        with self._released:
            self.releases += 1
            self._released.notify_all()

    def wait_for_release(self, seen: int, seconds: float) -> bool:
        """Wait until `release` was called more than `seen` times; False after `seconds`."""
        with self._released:
            return self._released.wait_for(lambda: self.releases > seen, seconds)

    def read(self, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        """`Resident.read`, on the CPU."""
        with self._moving:
            places, others = [], []
            for directory, mine in zip(self.directories, _by_table(ids, offsets), strict=True):
                with self._marks:
                    slots = directory.find(mine)
                    is_here = (slots >= 0) & (directory.marks[slots] & HERE != 0)
                places.append((is_here, slots[is_here]))
                others.append(mine[~is_here])
            found = self.below.read(*_grouped(others))
            for t, (is_here, slots) in enumerate(places):
                if not len(slots):
                    continue
                out = torch.empty(len(is_here), self.tables[t].width, dtype=found[t].dtype)
                mask = torch.from_numpy(is_here)
                out[~mask] = found[t]
                out[mask] = self.rows[t].weights[self._on_device(slots)].cpu()
                found[t] = out
            return found

    def views(self) -> list[RowView]:
        return self._views

    # ---- rows

    def put(self, t: int, ids: Tensor, records: Tensor) -> None:
        """`DramStore.put`. Rows that are here change here, the others below."""
        with self._moving:
            self._settle()
            directory, numbers = self.directories[t], ids.numpy()
            slots = directory.find(numbers)
            is_here = slots >= 0
            mask = torch.from_numpy(is_here)
            self.below.put(t, ids[~mask].contiguous(), records[~mask].contiguous())
            self.rows[t].put(self._on_device(slots[is_here]), records[mask].to(self.device))
            with self._marks:
                directory.marks[slots[is_here]] |= DIRTY

    def delete(self, t: int, ids: Tensor) -> None:
        """Forget rows of table t, ids (N,) unique: here and below. Rows in use are born again in place."""
        if not len(ids):
            return
        with self._moving, self._arriving:
            # Those on their way are in use below, and born again there.
            self.below.delete(t, ids)
            directory = self.directories[t]
            with self._marks:
                slots = directory.find(ids.numpy())
                slots = slots[slots >= 0]
                is_used = directory.is_pinned(slots)
                directory.drop(slots[~is_used])
                here = slots[is_used & (directory.marks[slots] & HERE != 0)]
            if len(here):  # with clock 0: whatever its mark says, it is not written down
                wanted = self._none()
                wanted[t] = directory.ids[here]
                records = self._load(wanted)[t]
                self.rows[t].put(self._on_device(here), records.to(self.device))

    def scan(self, t: int, run: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """`DramStore.scan`: rows newer here are written down first."""
        with self._moving:
            self._write_dirty([t])
        yield from self.below.scan(t, run)

    def flush(self) -> int:
        """Write every row newer than its log; returns how many rows the logs took. They stay where they are."""
        with self._moving:
            self._write_dirty(range(len(self.tables)))
        return self.below.flush()

    def clocks(self, t: int, slots: Tensor) -> Tensor:
        """(N,) int64 of rows in slots (N,) int32."""
        return self.rows[t].clocks[self._on_device(slots.numpy())].cpu()

    def update(
        self,
        slots: Tensor,
        offsets: Tensor,
        sums: Sequence[Tensor],
        kinds: Sequence[int],
        settings: Sequence[Settings],
    ) -> None:
        """Pinned rows (U,) are updated by their summed gradients, by table (N, D) on the device; kinds and settings by
        part."""
        numbers = _by_table(slots, offsets)
        places = self._moved(numbers)
        ids: Sequence[Tensor | None] = [None] * len(numbers)
        if any(rows.rounds_at_random for rows in self.rows):
            ids = self._moved(
                [each.ids[n] for each, n in zip(self.directories, numbers, strict=True)]
            )
        update(self.rows, places, ids, sums, kinds, settings)

    # ---- commits

    def begin_commit(self) -> None:
        """`DramStore.begin_commit`, of what is here too: rows newer here are written down, and stay."""
        with self._moving:
            self._write_dirty(range(len(self.tables)))
            self.below.begin_commit()

    def finish_commit(self, step: int) -> list[Manifest]:
        return self.below.finish_commit(step)

    def abandon_commit(self) -> None:
        self.below.abandon_commit()

    def commit(self, step: int) -> list[Manifest]:
        """Both halves at once. A failed commit loses nothing."""
        self.begin_commit()
        try:
            return self.finish_commit(step)
        except BaseException:
            self.abandon_commit()
            raise

    # ---- what there is

    @property
    def backings(self):
        """By table: where rows rest below memory."""
        return self.below.backings

    def pinned_share(self) -> float:
        """Of the slots of the table that is fullest of pinned rows, on the device or below."""
        shares = [
            each.pinned_share() for each in self.directories if each.num_rows == each.num_slots
        ]
        return max([self.below.pinned_share(), *shares])

    def num_rows(self, t: int) -> int:
        """In main memory, copies of rows that are on the device included."""
        return self.below.num_rows(t)

    def resident_bytes(self) -> int:
        """Of main memory."""
        return self.below.resident_bytes()

    def device_bytes(self) -> int:
        """Of rows on the device."""
        return sum(
            directory.num_rows * each.table.record_bytes
            for directory, each in zip(self.directories, self.rows, strict=True)
        )

    # ---- inside: acquire

    def _look_up(self, ids: Tensor, offsets: Tensor, next_use: Tensor | None) -> list[Wanted]:
        """Pins the rows that are here. Raises BudgetExceeded, nothing pinned, where the others have no room."""
        numbers = _by_table(ids, offsets)
        codes = [None] * len(numbers) if next_use is None else _by_table(next_use, offsets)
        wanted: list[Wanted] = []
        with self._marks:
            for directory, mine, said in zip(self.directories, numbers, codes, strict=True):
                slots = directory.find(mine)
                is_here = slots >= 0
                missing = np.flatnonzero(~is_here)
                here = slots[is_here] if len(missing) else slots.copy()
                wanted.append(Wanted(mine, said, slots, is_here, missing, here))
            for t, (directory, each) in enumerate(zip(self.directories, wanted, strict=True)):
                # Those of its rows that are pinned already are in use by others, too.
                others = directory.num_others(each.here, len(each.ids))
                if others + len(each.ids) > directory.num_slots:
                    raise self._too_many(t, len(each.ids), others)
            for directory, each in zip(self.directories, wanted, strict=True):
                directory.tick(len(each.ids), next_use is not None)
                directory.pin(each.here, each.codes_of(each.is_here))
                each.victims = directory.choose(len(each.missing))
        return wanted

    def _unpin(self, wanted: Sequence[Wanted]) -> None:
        with self._marks:
            for directory, each in zip(self.directories, wanted, strict=True):
                directory.unpin(each.here, dirty=False)

    def _ask_below(self, wanted: Sequence[Wanted]) -> Arrival | list[Tensor] | None:
        """The missing rows: on their way, or, where the store below has no room for all of them at once, their
        records, by table. None: there are none."""
        missing = [each.ids[each.missing] for each in wanted]
        ids, offsets = _grouped(missing)
        if not len(ids):
            return None
        before = _counted(self.below.sources)
        try:
            below, job = self.below.acquire(ids, offsets)
            return Arrival(self._number + 1, [], offsets, below, job)
        except BudgetExceeded:
            return self._load(missing)
        finally:
            for name, count in before.items():
                gained = getattr(self.below.sources, name) - count
                setattr(self.sources, name, getattr(self.sources, name) + gained)

    def _admit(self, wanted: Sequence[Wanted], arrival: Arrival | list[Tensor] | None) -> Tensor:
        """From here on nothing fails: (U,) int32 slots."""
        found, admitted = [], []
        with self._marks:
            for directory, each in zip(self.directories, wanted, strict=True):
                self.num_found += len(each.ids) - len(each.missing)
                self.sources.resident += len(each.ids) - len(each.missing)
                mine = directory.admit(
                    each.ids[each.missing], each.victims, each.codes_of(each.missing)
                )
                each.slots[each.missing] = mine
                admitted.append(mine)
                found.append(each.slots)
        if isinstance(arrival, Arrival):
            arrival.slots = admitted
            self._number = arrival.number
            self._arrivals.append(arrival)
        elif arrival is not None:
            self._fill(admitted, arrival)
        return torch.from_numpy(np.concatenate(found).astype(np.int32))

    def _too_many(self, t: int, needed: int, others: int) -> BudgetExceeded:
        table, held = self.tables[t], self.directories[t].num_slots
        in_use = f" and {others} of these are in use by batches in flight" if others else ""
        lower = "the batch size, the lookahead or the staleness" if others else "the batch size"
        return BudgetExceeded(
            f"table {table.name!r}: a batch needs {needed} rows on the device at once, the budget holds {held} "
            f"({held * table.record_bytes:,} bytes){in_use}. This table needs "
            f"{(needed + others) * table.record_bytes:,} bytes on each rank: raise plan.memory.hbm, or lower {lower}"
        )

    # ---- inside: rows on their way

    def _install_ready(self) -> None:
        """Put rows into their slots that have come already: off the training thread. What failed, `wait` says. Nothing
        where another thread is at it, which may wait for reads."""
        if not self._arriving.acquire(blocking=False):
            return
        try:
            with suppress(StorageError, CorruptionError):
                while self._arrivals and _is_done(self._arrivals[0].job):
                    self._install(self._arrivals[0])
        finally:
            self._arriving.release()

    def _settle(self) -> None:
        """Until no row is on its way."""
        with self._arriving:
            while self._arrivals:
                self._install(self._arrivals[0])

    def _install(self, arrival: Arrival) -> None:
        """The oldest. Raises as `DramStore.wait`; then it stays where it is, and so does every later call."""
        self.below.wait(arrival.job)
        self._fill(arrival.slots, self._copied(arrival.below, arrival.offsets))
        self.below.release(arrival.below, arrival.offsets, dirty=False)
        self._arrivals.popleft()

    def _fill(self, slots: Sequence[np.ndarray], records: Sequence[Tensor]) -> None:
        for rows, places, each in zip(self.rows, self._moved(slots), records, strict=True):
            if len(places):
                rows.put(places, each)
        with self._marks:
            for directory, mine in zip(self.directories, slots, strict=True):
                directory.marks[mine] |= HERE

    def _copied(self, below: Tensor, offsets: Tensor) -> list[Tensor]:
        """Records by table on the device, of rows that are there below: one copy for all tables."""
        counts = offsets.diff().tolist()
        sizes = [n * each.record_bytes for n, each in zip(counts, self.tables, strict=True)]
        # Bytes that a copy to a GPU may start from at once.
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for t, part in enumerate(block.split(sizes)):
            if counts[t]:
                slots = below[offsets[t] : offsets[t + 1]].contiguous()
                self.below.native.pack(t, slots, part.view(counts[t], -1))
        moved = block.to(self.device, non_blocking=True)
        return [
            part.view(n, each.record_bytes)
            for part, n, each in zip(moved.split(sizes), counts, self.tables, strict=True)
        ]

    def _load(self, missing: list[np.ndarray]) -> list[Tensor]:
        """Records by table on the device, waited for; as many rows at a time as the store below has room for."""
        ids, offsets = _grouped(missing)
        try:
            below, job = self.below.acquire(ids, offsets)
        except BudgetExceeded:
            if self._arrivals:
                self._settle()  # gives back what rows on their way hold below
                return self._load(missing)
            if len(ids) <= 1:
                raise
            halves = [np.array_split(mine, 2) for mine in missing]
            if max(map(len, missing)) == 1:  # a row of several tables each
                t = next(t for t, mine in enumerate(missing) if len(mine))
                none = ids.numpy()[:0]
                halves = [
                    [mine, none] if i == t else [none, mine] for i, mine in enumerate(missing)
                ]
            first, second = (self._load([pair[i] for pair in halves]) for i in (0, 1))
            return [torch.cat(pair) for pair in zip(first, second, strict=True)]
        try:
            self.below.wait(job)
            return self._copied(below, offsets)
        finally:
            self.below.release(below, offsets, dirty=False)

    # ---- inside: rows on their way down

    def _write_dirty(self, numbers: Sequence[int] | range) -> None:
        """Of these tables, rows newer than below; they stay and are clean."""
        slots = [each[:0] for each in self._none()]
        for t in numbers:
            slots[t] = self.directories[t].dirty()
        self._write_down(slots)

    def _write_down(self, slots: Sequence[np.ndarray]) -> list[int]:
        """Of these rows, by table, those that are newer than below go there; how many. Whatever fails, none is lost: a
        row stays dirty until it is below."""
        written = [0] * len(self.tables)
        for t, (directory, mine) in enumerate(zip(self.directories, slots, strict=True)):
            with self._marks:
                dirty = mine[directory.marks[mine] & DIRTY != 0]
            for start in range(0, len(dirty), WRITTEN_TOGETHER):
                part = dirty[start : start + WRITTEN_TOGETHER]
                with self._marks:  # before the copy: what is trained from here on is newer again
                    directory.marks[part] &= ~DIRTY
                try:
                    records = self.rows[t].records(self._on_device(part)).cpu()
                    # Copied even where one row is contiguous already: its clock may lie at any byte.
                    clocks = records[:, -CLOCK_BYTES:].clone(memory_format=torch.contiguous_format)
                    trained = clocks.view(torch.int64)[:, 0] > 0
                    ids = torch.from_numpy(directory.ids[part])[trained]
                    self.below.write_down(t, ids, records[trained])
                except BaseException:
                    with self._marks:
                        directory.marks[part] |= DIRTY
                    raise
                written[t] += len(ids)
        return written

    # ---- inside: tensors

    def _on_device(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def _moved(self, numbers: Sequence[np.ndarray]) -> list[Tensor]:
        """By table, int64 on the device: one copy for all of them."""
        whole = self._on_device(np.concatenate(numbers))
        return list(whole.split([len(each) for each in numbers]))

    def _none(self) -> list[np.ndarray]:
        return [np.empty(0, np.int64) for _ in self.tables]


def open_hbm(
    below: DramStore, capacity_rows: Sequence[int], device: torch.device | str, *, seed: int
) -> HbmStore:
    """Memory for `capacity_rows` of each table on `device`, taken at once. Raises ConfigError where it has not enough.

    seed: the run's.
    """
    place, rows = torch.device(device), []
    try:
        for table, count in zip(below.tables, capacity_rows, strict=True):
            rows.append(device_rows(table, count, place, table_seed(seed, table.origin[0])))
    except RuntimeError as error:
        wanted = sum(
            n * table.record_bytes for n, table in zip(capacity_rows, below.tables, strict=True)
        )
        raise ConfigError(
            f"plan.memory.hbm: got {wanted:,} bytes of rows for {place}, which it has not: "
            f"{str(error).splitlines()[0]}. Give hbm less"
        ) from None
    return HbmStore(below, rows)


def _by_table(values: Tensor, offsets: Tensor) -> list[np.ndarray]:
    bounds = offsets.tolist()
    whole = values.numpy()
    return [whole[i:j] for i, j in pairwise(bounds)]


def _grouped(parts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """ids (N,) int64 grouped by table, and offsets (T + 1,)."""
    sizes = np.array([0, *map(len, parts)], np.int64)
    return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(sizes.cumsum())


def _counted(sources: RowSources) -> dict[str, int]:
    names = ("resident", "read", "copied", "born", "bytes_read")
    return {name: getattr(sources, name) for name in names}


def _is_done(job: object) -> bool:
    return job is None or bool(getattr(job, "is_done", False))
