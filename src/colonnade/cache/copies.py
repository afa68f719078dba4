"""Copies of rows: their records, and the sums of gradients that owners have yet to receive, in memory or on a device.

One contract with the same bits for both: `NativeCopies` in this process's memory, `DeviceCopies` in a device's. On a
device, records that come from owners, sums that go to them, and slots cross to the host, one copy for all tables each;
records, pooled values, sums and updates stay there. A few operations per table and call; none per row.

Legend: T tables, N ranks, D a table's width, S slots, n rows of a call, U rows of a batch (U_t of table t).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colonnade import _native
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.lookup.row_layout import RowSums
from colonnade.ops.optimizers import Settings
from colonnade.store.contract import RowView
from colonnade.store.device_rows import device_rows, enlarged, update
from colonnade.store.dram import open_dram, table_seed
from colonnade.table import CLOCK_BYTES, Table

SPARE = 2**22
"""Slots beyond a table's capacity: room for the rows of one batch."""


class Copies(ABC):
    """Copies of rows, by table and slot of its directory. Slots are int64 arrays (n,), each slot once in a call.

    Used by the training thread alone, in the order of the batches: a slot whose row left with batch n is filled for
    another at batch n + 1 at the earliest, when what was pending there has been taken.

    Which row a slot has and how many batches wait there is known here; records and sums lie where a subclass has them.
    `Kernels.update` takes it as the store of its rows. `sums` are a subclass's own, what the kernels that work there
    make (`sum_gradients_by_row`): one sum for each of U rows.
    """

    pending: list[Tensor]  # by table, (slots, D) of the compute dtype, where the copies lie

    def __init__(self, tables: Sequence[Table], capacities: Sequence[int]) -> None:
        """capacities: rows that stay, by table."""
        self.rooms = [
            rows + SPARE if table.rows is None else min(table.rows, rows + SPARE)
            for table, rows in zip(tables, capacities, strict=True)
        ]
        # Rows by number of their slot: the slots of a vocabulary that has room for all of it are its ids.
        self.tables = tuple(
            replace(table, rows=room, admission=None, eviction=None)
            for table, room in zip(tables, self.rooms, strict=True)
        )
        self.ticks = [np.zeros(0, np.int32) for _ in tables]  # by slot: batches in `pending`
        self.ids = [np.zeros(0, np.int64) for _ in tables]  # by slot: of the row that was put there

    @abstractmethod
    def views(self) -> list[RowView]:
        """Return where the copies' weights are stored, by table, until `grow`."""

    @abstractmethod
    def grow(self, t: int, num_slots: int) -> None:
        """Make slots below `num_slots` usable. Raises BudgetExceeded where a device has no room for them."""

    def receive(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        ids: np.ndarray,
        message: Tensor,
        widths: np.ndarray,
    ) -> np.ndarray:
        """Store rows as messages list them, and return (n,) bool: whether something is pending.

        counts (N, T), slots and ids (n,); message: the first `widths` (T,) bytes of their records, one after another
        (uint8, on the CPU). The rest of a record is 0.
        """
        self._unpack(counts, slots, message, widths)
        named = _native.name_slots(self.ids, self.ticks, counts.ravel(), slots, ids)
        return np.asarray(named).view(bool)

    @abstractmethod
    def _unpack(
        self, counts: np.ndarray, slots: np.ndarray, message: Tensor, widths: np.ndarray
    ) -> None:
        """Store the records of `receive`."""

    @abstractmethod
    def records(self, t: int, slots: np.ndarray) -> Tensor:
        """Return records (n, record_bytes) uint8 on the CPU."""

    @abstractmethod
    def put(self, t: int, slots: np.ndarray, records: Tensor) -> None:
        """Store records (n, record_bytes) uint8 on the CPU."""

    @abstractmethod
    def add(self, counts: np.ndarray, slots: np.ndarray, sums: Any, leaves: np.ndarray) -> None:
        """Add one batch's gradients, one tick of each of its rows: counts (T,), slots (U,), their sums.

        Rows of `leaves` (U,) bool are left out: `take` them.
        """

    @abstractmethod
    def take(
        self, counts: np.ndarray, slots: np.ndarray, origin: np.ndarray, sums: Any, out: Tensor
    ) -> None:
        """Write what is pending of rows to `out`, and forget it: counts (N, T), slots (n,) as messages list them.

        origin (n,): which row of the batch each is, whose sum is added; -1: none. out: elements on the CPU, row after
        row.
        """

    @abstractmethod
    def waiting(self, counts: np.ndarray, slots: np.ndarray) -> Any:
        """Return the pending sums of rows (n,) listed table by table: counts (T,)."""

    def waiting_of(self, t: int, slots: np.ndarray) -> Tensor:
        """Return the pending sums of one table's rows, (n, D) on the CPU."""
        places = torch.from_numpy(slots).to(self.pending[t].device)
        return self.pending[t][places].cpu()

    def clear(self, t: int, slots: np.ndarray) -> None:
        """Forget what is pending at these slots."""
        self.ticks[t][slots] = 0

    def dirty(self, t: int) -> np.ndarray:
        """Return the slots of rows with something pending, ascending by id."""
        slots = np.flatnonzero(self.ticks[t])
        return slots[np.argsort(self.ids[t][slots])]

    def state(self, t: int, slots: np.ndarray) -> dict[str, Tensor]:
        """Return all that these slots hold, on the CPU. `load` takes it, in memory or on a device."""
        ticks = torch.from_numpy(self.ticks[t][slots])
        pending = self.waiting_of(t, slots)
        pending[ticks == 0] = (
            0  # it was never written: checkpoints of one training have the same bytes
        )
        return {
            "ids": torch.from_numpy(self.ids[t][slots]),
            "records": self.records(t, slots),
            "pending": pending,
            "ticks": ticks,
        }

    def load(self, t: int, slots: np.ndarray, state: dict[str, Tensor]) -> None:
        """Put what `state` returned into these slots."""
        if not len(slots):
            return
        self.grow(t, int(slots.max()) + 1)
        self.ids[t][slots] = state["ids"].numpy()
        self.put(t, slots, state["records"])
        pending = self.pending[t]
        pending[torch.from_numpy(slots).to(pending.device)] = state["pending"].to(pending.device)
        self.ticks[t][slots] = state["ticks"].numpy()

    def _name_more(self, t: int, num_slots: int) -> None:
        """Make room for the ids and ticks of `num_slots` slots: new ones have no id and nothing pending."""
        count = num_slots - len(self.ids[t])
        self.ticks[t] = np.concatenate([self.ticks[t], np.zeros(count, np.int32)])
        self.ids[t] = np.concatenate([self.ids[t], np.zeros(count, np.int64)])


def travelling_bytes(table: Table, is_changed: bool) -> int:
    """Return how many bytes of a record are sent to a copy: with the optimizer's state where the copy is trained on
    (`is_changed`), with the clock where its optimizers count steps."""
    if not is_changed:
        return table.width * table.itemsize
    counts = any(part.optimizer.counts_steps for part in table.parts)
    return table.record_bytes - (0 if counts else CLOCK_BYTES)


class NativeCopies(Copies):
    """Copies in this process's memory; sums: `RowSums`. Unused slots take address space and no memory."""

    def __init__(self, tables: Sequence[Table], capacities: Sequence[int]) -> None:
        """capacities: rows that stay, by table."""
        super().__init__(tables, capacities)
        self.store = open_dram(self.tables, self.rooms, seed=0)
        dtype = getattr(torch, tables[0].compute_dtype)
        self.pending = [torch.empty(0, table.width, dtype=dtype) for table in tables]

    @property
    def native(self) -> Any:
        """Native store of the rows, as `_native.update` takes it."""
        return self.store.native

    def views(self) -> list[RowView]:
        return self.store.views()

    def grow(self, t: int, num_slots: int) -> None:
        have = len(self.ids[t])
        if num_slots <= have:
            return
        count = max(num_slots, min(self.rooms[t], have + have // 2)) - have
        new = torch.arange(have, have + count)
        offsets = torch.tensor([0] * (t + 1) + [count] * (len(self.tables) - t))
        slots, _ = self.store.acquire(new, offsets)
        assert torch.equal(slots.long(), new), "slots of a whole vocabulary are its ids"
        more = torch.empty(count, self.tables[t].width, dtype=self.pending[t].dtype)
        self.pending[t] = torch.cat([self.pending[t], more])
        self._name_more(t, have + count)

    def _unpack(
        self, counts: np.ndarray, slots: np.ndarray, message: Tensor, widths: np.ndarray
    ) -> None:
        self.native.unpack_blocks(_int32(slots), counts.ravel(), widths, message)

    def records(self, t: int, slots: np.ndarray) -> Tensor:
        records = torch.empty(len(slots), self.tables[t].record_bytes, dtype=torch.uint8)
        self.native.pack(t, _int32(slots), records)
        return records

    def put(self, t: int, slots: np.ndarray, records: Tensor) -> None:
        self.native.unpack(t, _int32(slots), records)

    def add(self, counts: np.ndarray, slots: np.ndarray, sums: RowSums, leaves: np.ndarray) -> None:
        _native.add_pending(
            self._sums(), self.ticks, counts, slots, sums.index, sums.values, leaves.view(np.uint8)
        )

    def take(
        self, counts: np.ndarray, slots: np.ndarray, origin: np.ndarray, sums: RowSums, out: Tensor
    ) -> None:
        _native.take_pending(
            self._sums(), self.ticks, counts.ravel(), slots, origin, sums.index, sums.values, out
        )

    def waiting(self, counts: np.ndarray, slots: np.ndarray) -> RowSums:
        by_table = np.split(slots, counts.cumsum()[:-1])
        values = torch.cat(
            [
                sums[torch.from_numpy(table_slots)].flatten()
                for sums, table_slots in zip(self.pending, by_table, strict=True)
            ]
        )
        widths = np.repeat([table.width for table in self.tables], counts)
        firsts = (widths.cumsum() - widths).astype(np.uint32).view(np.int32)
        return RowSums(values, torch.from_numpy(firsts))

    def _sums(self) -> list[np.ndarray]:
        """Return the pending sums by table."""
        return [each.numpy() for each in self.pending]


def _int32(slots: np.ndarray) -> Tensor:
    return torch.from_numpy(slots.astype(np.int32))


class DeviceCopies(Copies):
    """Copies in a device's memory; sums: by table, (U_t, D) of the compute dtype on the device.

    Memory for the rows that stay is taken at once; for those of a batch that do not, as batches come.
    """

    def __init__(
        self, tables: Sequence[Table], capacities: Sequence[int], device: torch.device
    ) -> None:
        """capacities: rows that stay, by table. Raises ConfigError where the device has no room for them."""
        super().__init__(tables, capacities)
        self.device = device
        self.stay = [min(pair) for pair in zip(capacities, self.rooms, strict=True)]
        dtype = getattr(torch, tables[0].compute_dtype)
        # Rounded at random by their slots, as those in memory are.
        self.rows = [
            device_rows(table, 0, device, table_seed(0, table.origin[0])) for table in self.tables
        ]
        self.pending = [torch.empty(0, t.width, dtype=dtype, device=device) for t in self.tables]
        for t, count in enumerate(self.stay):
            try:
                self._have(t, count)
            except RuntimeError as error:
                raise ConfigError(
                    f"plan.cache: got {count:,} copies of rows of table {tables[t].name!r} for {device}, which has no "
                    f"room for them beside the tables before it: {str(error).splitlines()[0]}. Lower plan.cache.size, "
                    "or leave plan.cache.tier out"
                ) from None

    def views(self) -> list[RowView]:
        return [each.view for each in self.rows]

    def grow(self, t: int, num_slots: int) -> None:
        have, table = len(self.ids[t]), self.tables[t]
        if num_slots <= have:
            return
        # Batches are of about one size: room for one that is half as large again.
        more = (num_slots - self.stay[t]) // 2
        wanted = max(num_slots, min(self.rooms[t], num_slots + more))
        try:
            self._have(t, wanted)
        except RuntimeError as error:
            raise BudgetExceeded(
                f"table {table.name!r}: got {wanted:,} copies of rows to keep in the memory of {self.device}, those of "
                f"a batch among them; it has room for {have:,}: {str(error).splitlines()[0]}. Lower plan.cache.size or "
                "the batch size, or leave plan.cache.tier out"
            ) from None

    def _have(self, t: int, num_slots: int) -> None:
        """Enlarge one table, which is stored twice for a moment. Raises what torch raises where it does not fit."""
        more = num_slots - len(self.ids[t])
        rows, pending = enlarged(self.rows[t], num_slots), self.pending[t]
        self.pending[t] = torch.cat([pending, pending.new_empty(more, pending.shape[1])])
        self.rows[t] = rows
        self._name_more(t, num_slots)

    def _unpack(
        self, counts: np.ndarray, slots: np.ndarray, message: Tensor, widths: np.ndarray
    ) -> None:
        sizes = (counts * widths[None, :]).ravel().tolist()
        blocks = message.to(self.device).split(sizes)
        listed = self._moved(_by_table(counts, slots))
        for t, (rows, places) in enumerate(zip(self.rows, listed, strict=True)):
            if len(places):
                records = torch.cat(blocks[t :: len(widths)]).view(len(places), -1)
                absent = rows.table.record_bytes - records.shape[1]
                rows.put(places, functional.pad(records, (0, absent)))

    def records(self, t: int, slots: np.ndarray) -> Tensor:
        return self.rows[t].records(self._on_device(slots)).cpu()

    def put(self, t: int, slots: np.ndarray, records: Tensor) -> None:
        self.rows[t].put(self._on_device(slots), records.to(self.device))

    def add(
        self, counts: np.ndarray, slots: np.ndarray, sums: Sequence[Tensor], leaves: np.ndarray
    ) -> None:
        stays, indices = np.split(~leaves, counts.cumsum()[:-1]), []
        for t, table_slots in enumerate(np.split(slots, counts.cumsum()[:-1])):
            which = np.flatnonzero(stays[t])
            places = table_slots[which]
            indices.append(np.stack([places, which, self.ticks[t][places] > 0]))
            self.ticks[t][places] += 1
        for pending, own, (places, which, had) in zip(
            self.pending, sums, self._moved(indices), strict=True
        ):
            if len(places):
                added = own[which]
                # Not even to 0: it would make another zero of -0.
                pending[places] = torch.where(had.bool()[:, None], pending[places] + added, added)

    def take(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        origin: np.ndarray,
        sums: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        indices, first = [], 0
        pairs = zip(_by_table(counts, slots), _by_table(counts, origin), strict=True)
        for t, (places, of_batch) in enumerate(pairs):
            had = self.ticks[t][places] > 0
            indices.append(np.stack([places, of_batch - first, of_batch >= 0, had]))
            self.ticks[t][places] = 0
            first += len(sums[t])
        totals = []
        for pending, own, (places, which, is_used, had) in zip(
            self.pending, sums, self._moved(indices), strict=True
        ):
            total = pending[places]
            if len(own) and len(places):
                added = own[which * is_used]
                with_batch = torch.where(had.bool()[:, None], added + total, added)
                total = torch.where(is_used.bool()[:, None], with_batch, total)
            totals.append(total)
        blocks = [total.split(n) for total, n in zip(totals, counts.T.tolist(), strict=True)]
        by_rank = [of_table[rank].flatten() for rank in range(len(counts)) for of_table in blocks]
        out.copy_(torch.cat(by_rank))

    def waiting(self, counts: np.ndarray, slots: np.ndarray) -> list[Tensor]:
        places = self._moved(np.split(slots, counts.cumsum()[:-1]))
        return [sums[where] for sums, where in zip(self.pending, places, strict=True)]

    def update(
        self,
        slots: Tensor,
        offsets: Tensor,
        sums: Sequence[Tensor],
        kinds: Sequence[int],
        settings: Sequence[Settings],
    ) -> None:
        """Update rows (n,) listed table by table by their summed gradients; kinds and settings by part."""
        places = slots.long().to(self.device).split(offsets.diff().tolist())
        update(self.rows, places, places, sums, kinds, settings)

    def _moved(self, parts: Sequence[np.ndarray]) -> list[Tensor]:
        """Return `parts` as int64 on the device, (.., n) each, by table: one copy for all of them."""
        whole = torch.from_numpy(np.concatenate(parts, axis=-1).astype(np.int64)).to(self.device)
        return list(whole.split([part.shape[-1] for part in parts], dim=-1))

    def _on_device(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)


def _by_table(counts: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Sort values (n,) of rows as messages list them, counts (N, T), by table: each rank's after another."""
    blocks = np.split(values, counts.ravel().cumsum()[:-1])
    return [np.concatenate(blocks[t :: counts.shape[1]]) for t in range(counts.shape[1])]
