"""`dram`: rows in this process's memory, over backings that hold the rows memory has no room for.

Legend: T tables, U unique rows of a call.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import BudgetExceeded
from colonnade.store.contract import Backing, Manifest, RowView
from colonnade.table import Table

MAX_SLOTS = 2**32 - 2


@dataclass(slots=True)
class RowSources:
    """Where the rows of `acquire` came from, and where evicted ones went. Rows, since the store opened."""

    resident: int = 0
    read: int = 0
    born: int = 0
    evicted_clean: int = 0
    evicted_dirty: int = 0


class DramStore:
    """A `Resident` for all tables of a rank. Without backings nothing is ever evicted.

    One lock orders acquire, read and commit; `release` and the operations on pinned rows take none of it.
    """

    def __init__(
        self, tables: Sequence[Table], native: _native.Dram, backings: Sequence[Backing] = ()
    ) -> None:
        self.tables = tuple(tables)
        self.native = native
        self.backings = tuple(backings)
        self.sources = RowSources()
        self._views = [
            RowView(
                native.weights_address(t), native.stride_bytes(t), table.width, table.dtype
            )
            for t, table in enumerate(self.tables)
        ]  # fmt: skip
        self._lock = threading.Lock()
        self._released = threading.Condition()
        self._releases = 0

    def acquire(self, ids: Tensor, offsets: Tensor) -> Tensor:
        slots = torch.empty(len(ids), dtype=torch.int32)
        with self._lock:
            try:
                left = self.native.acquire(ids, offsets, slots, not self.backings)
            except MemoryError as error:
                raise self._explain(error) from None
            missing = torch.as_tensor(left.missing)
            self.sources.resident += len(ids) - len(missing)
            if self.backings:
                self._write_evicted(left)
                self._fill(ids, offsets, slots, missing.long())
            else:
                self.sources.born += len(missing)
        return slots

    def release(self, slots: Tensor, offsets: Tensor, *, dirty: bool) -> None:
        self.native.release(slots, offsets, dirty)
        with self._released:
            self._releases += 1
            self._released.notify_all()

    @property
    def releases(self) -> int:
        """How often `release` was called: hand it to `wait_for_release`."""
        return self._releases

    def wait_for_release(self, seen: int, seconds: float) -> bool:
        """Wait until `release` was called more than `seen` times; False after `seconds`."""
        with self._released:
            return self._released.wait_for(lambda: self._releases > seen, seconds)

    def read(self, ids: Tensor, offsets: Tensor) -> list[Tensor]:
        found = []
        with self._lock:
            for t, table in enumerate(self.tables):
                mine = ids[offsets[t] : offsets[t + 1]]
                out = torch.empty(len(mine), table.width, dtype=getattr(torch, table.dtype))
                absent = np.asarray(self.native.read(t, mine, out))
                if len(absent) == len(mine):
                    out = self._read_below(t, mine)
                elif len(absent):
                    # numpy: its scatter starts no threads, which costs more than these few rows
                    below = self._read_below(t, torch.from_numpy(mine.numpy()[absent]))
                    _bytes(out)[absent] = _bytes(below)
                found.append(out)
        return found

    def views(self) -> list[RowView]:
        return self._views

    def delete(self, t: int, ids: Tensor) -> None:
        """Forget rows of table t, ids (N,) unique: in memory and below it. Rows in use are born again in place."""
        if not len(ids):
            return
        with self._lock:
            self.native.erase(t, ids)
            if self.backings:
                self.backings[t].delete(ids)

    def scan(self, t: int, run: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids (N,), records (N, record_bytes)) of table t's trained rows, each once, at most `run` at a time."""
        with self._lock:
            resident, slots = (torch.as_tensor(part) for part in self.native.resident(t))
        for start in range(0, len(resident), run):
            part = slots[start : start + run].contiguous()
            records = torch.empty(len(part), self.tables[t].record_bytes, dtype=torch.uint8)
            self.native.pack(t, part, records)
            trained = torch.as_tensor(self.native.clocks(t, part)) > 0
            yield resident[start : start + run][trained], records[trained]
        known = resident.numpy()
        for batch in self.backings[t].scan() if self.backings else ():
            # `resident` ascends: those found there have been listed, perhaps newer.
            places = np.searchsorted(known, batch.ids.numpy())
            places[places == len(known)] = 0
            below = batch.ids.numpy() != known[places] if len(known) else slice(None)
            yield batch.ids[below], batch.records[below]

    def flush(self) -> int:
        """Write every row newer than its backing; returns how many. They stay resident."""
        with self._lock:
            return sum(self._flush(t) for t in range(len(self.backings)))

    def commit(self, step: int) -> list[Manifest]:
        """Flush, then commit every backing. A failed commit loses nothing: rows stay newer in memory or below."""
        manifests = []
        with self._lock:
            for t, backing in enumerate(self.backings):
                self._flush(t)
                manifests.append(backing.commit(step))
        return manifests

    def _flush(self, t: int) -> int:
        ids, slots = (torch.as_tensor(part) for part in self.native.dirty(t))
        for start in range(0, len(ids), 65536):
            part = slots[start : start + 65536].contiguous()
            records = torch.empty(len(part), self.tables[t].record_bytes, dtype=torch.uint8)
            self.native.pack(t, part, records)
            self.backings[t].write(ids[start : start + 65536].contiguous(), records).wait()
            self.native.clean(t, part)
        return len(ids)

    def _write_evicted(self, left: _native.Acquired) -> None:
        offsets = torch.as_tensor(left.evicted_offsets).tolist()
        evicted = torch.as_tensor(left.evicted_ids)
        self.sources.evicted_dirty += len(evicted)
        self.sources.evicted_clean += left.num_evicted - len(evicted)
        for t, backing in enumerate(self.backings):
            if offsets[t] < offsets[t + 1]:
                backing.write(
                    evicted[offsets[t] : offsets[t + 1]].contiguous(),
                    torch.as_tensor(left.evicted_records[t]),
                ).wait()

    def _fill(self, ids: Tensor, offsets: Tensor, slots: Tensor, missing: Tensor) -> None:
        """Give the rows at positions `missing` their content: from the backing, else their first value."""
        bounds = torch.searchsorted(missing, offsets).tolist()
        reads = []
        for t, backing in enumerate(self.backings):
            if bounds[t] < bounds[t + 1]:
                where = missing[bounds[t] : bounds[t + 1]]
                records = torch.empty(len(where), self.tables[t].record_bytes, dtype=torch.uint8)
                reads.append((t, where, records, backing.read(ids[where], records)))
        for t, where, records, pending in reads:
            found = pending.wait()
            self.sources.read += int(found.sum())
            self.sources.born += int(len(where) - found.sum())
            there, new = where[found], where[~found]
            if len(there):
                self.native.unpack(t, slots[there], records[found])
            if len(new):
                self.native.birth(ids[new], slots[new], t)

    def _read_below(self, t: int, ids: Tensor) -> Tensor:
        """Weights (N, D) of rows that are not resident: from the backing, else their first value."""
        table = self.tables[t]
        out = torch.empty(len(ids), table.width, dtype=getattr(torch, table.dtype))
        if not self.backings or not len(self.backings[t]):
            self.native.birth_values(t, ids, out)
            return out
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
        table, needed, capacity, pinned = words[1], words[3], words[6], words[7]
        return BudgetExceeded(
            f"table {self.tables[int(table)].name!r}: a batch needs {needed} rows in memory that are not "
            f"there, the budget holds {capacity} and {pinned} of these are in use by batches in flight. "
            "Raise plan.dram, or lower the batch size, the lookahead or the staleness"
        )


def open_dram(
    tables: Sequence[Table],
    capacity_rows: Sequence[int],
    *,
    seed: int,
    num_ranks: int,
    rank: int = 0,
    backings: Sequence[Backing] = (),
) -> DramStore:
    """Reserve address space for `capacity_rows` of each table; memory is used as rows appear."""
    parts = [(t, part) for t, table in enumerate(tables) for part in table.parts]
    numbers = [(t, part.column, part.dim, part.state) for t, part in parts]
    starts = [part.optimizer.initial_state(part.dim) for _, part in parts]
    native = _native.Dram(
        _native.Parts(*torch.tensor(numbers, dtype=torch.int32).T.contiguous()),
        [table.state_floats for table in tables],
        [table.rows or 0 for table in tables],
        [min(rows, MAX_SLOTS) for rows in capacity_rows],
        [table_seed(seed, table.name) for table in tables],
        [part.init_scale for _, part in parts],
        [value for value, _ in starts],
        [count for _, count in starts],
        tables[0].dtype,
        tables[0].master,
        num_ranks,
        rank,
    )
    return DramStore(tables, native, backings)


def _bytes(rows: Tensor) -> np.ndarray:
    """(N, bytes of a row): numpy has no bfloat16."""
    return rows.view(torch.uint8).numpy()


def table_seed(seed: int, name: str) -> int:
    """64 bits from (run seed, table name); the same on every machine and in every version."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
