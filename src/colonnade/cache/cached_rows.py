"""Cached rows: copies of rows that other ranks own, and sums of gradients not yet sent to the owners.

One contract with the same bits for both: `NativeCachedRows` in this process's memory, `DeviceCachedRows` in a device's.
On a device, only records from owners, sums for owners, and slots are copied between host and device, with one copy for
all tables each. There are a few operations per table and call, none per row.

Legend: T tables, N ranks, D a table's width, S slots, n rows of a call, U rows of a batch (U_t of table t).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colonnade import _native
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.lookup.row_layout import RowSums
from colonnade.ops.optimizers import Settings
from colonnade.store.contract import RowView
from colonnade.store.device_rows import enlarge_device_rows, reserve_device_rows
from colonnade.store.dram import open_dram_store, table_seed
from colonnade.store.hbm import update_device_rows
from colonnade.table import CLOCK_BYTES, Table

GradientSums: TypeAlias = RowSums | Sequence[Tensor]
"""Sums of gradients, one for each row of a batch: in this process's memory; or on a device, (N, D) by table."""
SPARE = 2**22
"""Number of slots beyond a table's capacity, for the rows of one batch."""


class CachedRows(ABC):
    """Cached rows by table and slot of the table's directory. Slots are int64 arrays (n,), each slot once in a call.

    Used by the training thread alone, in the order of the batches: a slot whose row left with batch n is filled for
    another at batch n + 1 at the earliest, when its pending gradients have been taken.

    This class stores each slot's id and number of pending batches; subclasses store records and pending sums.
    `Kernels.update` takes it as the store of its rows. `sums` are the result of `Kernels.sum_gradients_by_row` of the
    kernels for that memory: one sum for each of U rows.
    """

    pending: list[Tensor]  # by table, (slots, D) of the compute dtype, on the rows' device

    def __init__(self, tables: Sequence[Table], capacities: Sequence[int]) -> None:
        """Begin without rows. capacities: number of rows that outlast a batch, by table."""
        self.max_slots = [
            rows + SPARE if table.rows is None else min(table.rows, rows + SPARE)
            for table, rows in zip(tables, capacities, strict=True)
        ]
        # Tables of slots: a vocabulary table with as many rows as slots, so that its slots are its ids.
        self.tables = tuple(
            replace(table, rows=limit, admission=None, eviction=None)
            for table, limit in zip(tables, self.max_slots, strict=True)
        )
        self.num_pending = [
            np.zeros(0, np.int32) for _ in tables
        ]  # by slot: number of batches in `pending`
        self.ids = [
            np.zeros(0, np.int64) for _ in tables
        ]  # by slot: of the row that was stored last

    @abstractmethod
    def views(self) -> list[RowView]:
        """Return views of the cached weights, by table, valid until `grow_table`."""

    @abstractmethod
    def grow_table(self, table_index: int, num_slots: int) -> None:
        """Make slots below `num_slots` usable. Raises BudgetExceeded where a device has no memory for them."""

    def store_received_rows(
        self,
        received_row_counts: np.ndarray,
        row_slots: np.ndarray,
        row_ids: np.ndarray,
        message: Tensor,
        sent_record_bytes: np.ndarray,
    ) -> np.ndarray:
        """Store rows received in messages, and return which of them have pending gradients, (n,) bool.

        received_row_counts (N, T), row_slots and row_ids (n,); message: the first `sent_record_bytes` (T,) bytes of
        their records, one after another (uint8, on the CPU). Missing bytes of a record are 0.
        """
        self._store_records(received_row_counts, row_slots, message, sent_record_bytes)
        has_pending = _native.name_slots(
            self.ids, self.num_pending, received_row_counts.ravel(), row_slots, row_ids
        )
        return np.asarray(has_pending).view(bool)

    @abstractmethod
    def _store_records(
        self,
        received_row_counts: np.ndarray,
        row_slots: np.ndarray,
        message: Tensor,
        sent_record_bytes: np.ndarray,
    ) -> None:
        """Store the records of `store_received_rows`."""

    @abstractmethod
    def read_records(self, table_index: int, slots: np.ndarray) -> Tensor:
        """Read records, (n, record_bytes) uint8 on the CPU."""

    @abstractmethod
    def write_records(self, table_index: int, slots: np.ndarray, records: Tensor) -> None:
        """Write records, (n, record_bytes) uint8 on the CPU."""

    @abstractmethod
    def add_pending_gradients(
        self,
        table_row_counts: np.ndarray,
        row_slots: np.ndarray,
        gradient_sums: GradientSums,
        is_leaving: np.ndarray,
    ) -> None:
        """Add one batch's gradients to the pending sums: table_row_counts (T,), row_slots (U,), gradient_sums of these.

        Rows of `is_leaving` (U,) bool are left out: take them with `take_pending_gradients`.
        """

    @abstractmethod
    def take_pending_gradients(
        self,
        rank_row_counts: np.ndarray,
        row_slots: np.ndarray,
        batch_indices: np.ndarray,
        batch_sums: GradientSums,
        sums_out: Tensor,
    ) -> None:
        """Write pending sums of rows to `sums_out`, and clear them: rank_row_counts (N, T), slots (n,) in the order of
        messages.

        origin (n,): index of the row in the batch, to add the batch's sum, too; -1: not in the batch. sums_out:
        elements on the CPU, row after row.
        """

    @abstractmethod
    def gather_pending_sums(
        self, table_row_counts: np.ndarray, row_slots: np.ndarray
    ) -> GradientSums:
        """Return the pending sums of rows (n,) listed table by table: table_row_counts (T,)."""

    def table_pending_sums(self, table_index: int, slots: np.ndarray) -> Tensor:
        """Return the pending sums of one table's rows, (n, D) on the CPU."""
        table_slots = torch.from_numpy(slots).to(self.pending[table_index].device)
        return self.pending[table_index][table_slots].cpu()

    def clear_pending(self, table_index: int, slots: np.ndarray) -> None:
        """Discard pending gradients at these slots."""
        self.num_pending[table_index][slots] = 0

    def dirty_slots(self, table_index: int) -> np.ndarray:
        """Return the slots of rows with pending gradients, ascending by id."""
        slots = np.flatnonzero(self.num_pending[table_index])
        return slots[np.argsort(self.ids[table_index][slots])]

    def export_rows(self, table_index: int, row_slots: np.ndarray) -> dict[str, Tensor]:
        """Return the contents of these slots, on the CPU, for `load_rows` in memory or on a device."""
        num_pending = torch.from_numpy(self.num_pending[table_index][row_slots])
        pending = self.table_pending_sums(table_index, row_slots)
        pending[num_pending == 0] = 0  # never written; zeros make checkpoints of equal runs equal
        return {
            "ids": torch.from_numpy(self.ids[table_index][row_slots]),
            "records": self.read_records(table_index, row_slots),
            "pending": pending,
            "ticks": num_pending,
        }

    def load_rows(
        self, table_index: int, row_slots: np.ndarray, exported_rows: dict[str, Tensor]
    ) -> None:
        """Load the result of `export_rows` into these slots."""
        if not len(row_slots):
            return
        self.grow_table(table_index, int(row_slots.max()) + 1)
        self.ids[table_index][row_slots] = exported_rows["ids"].numpy()
        self.write_records(table_index, row_slots, exported_rows["records"])
        pending = self.pending[table_index]
        pending[torch.from_numpy(row_slots).to(pending.device)] = exported_rows["pending"].to(
            pending.device
        )
        self.num_pending[table_index][row_slots] = exported_rows["ticks"].numpy()

    def _extend_slot_arrays(self, table_index: int, num_slots: int) -> None:
        """Extend `ids` and `num_pending` to `num_slots` slots. New slots have no pending gradients."""
        count = num_slots - len(self.ids[table_index])
        self.num_pending[table_index] = np.concatenate(
            [self.num_pending[table_index], np.zeros(count, np.int32)]
        )
        self.ids[table_index] = np.concatenate([self.ids[table_index], np.zeros(count, np.int64)])


def count_sent_record_bytes(table: Table, is_updated: bool) -> int:
    """Return the number of bytes of a record that an owner sends: with optimizer state if the copy is updated
    (`is_updated`), with the clock if its optimizers count steps."""
    if not is_updated:
        return table.width * table.itemsize
    counts = any(part.optimizer.counts_steps for part in table.parts)
    return table.record_bytes - (0 if counts else CLOCK_BYTES)


class NativeCachedRows(CachedRows):
    """Cached rows in this process's memory; sums: `RowSums`. Unused slots take address space and no memory."""

    def __init__(self, tables: Sequence[Table], capacities: Sequence[int]) -> None:
        """Begin without rows. capacities: number of rows that outlast a batch, by table."""
        super().__init__(tables, capacities)
        self.store = open_dram_store(self.tables, self.max_slots, seed=0)
        dtype = getattr(torch, tables[0].compute_dtype)
        self.pending = [torch.empty(0, table.width, dtype=dtype) for table in tables]

    @property
    def native(self) -> _native.Dram:
        """Native store of the rows, as `_native.update` takes it."""
        return self.store.native

    def views(self) -> list[RowView]:
        return self.store.views()

    def grow_table(self, table_index: int, num_slots: int) -> None:
        num_allocated = len(self.ids[table_index])
        if num_slots <= num_allocated:
            return
        wanted = max(
            num_slots, min(self.max_slots[table_index], num_allocated + num_allocated // 2)
        )
        count = wanted - num_allocated
        new_ids = torch.arange(num_allocated, num_allocated + count)
        offsets = torch.tensor([0] * (table_index + 1) + [count] * (len(self.tables) - table_index))
        slots, _ = self.store.acquire(new_ids, offsets)
        assert torch.equal(slots.long(), new_ids), "slots of a whole vocabulary are its ids"
        new_sums = torch.empty(
            count, self.tables[table_index].width, dtype=self.pending[table_index].dtype
        )
        self.pending[table_index] = torch.cat([self.pending[table_index], new_sums])
        self._extend_slot_arrays(table_index, num_allocated + count)

    def _store_records(
        self,
        received_row_counts: np.ndarray,
        row_slots: np.ndarray,
        message: Tensor,
        sent_record_bytes: np.ndarray,
    ) -> None:
        self.native.unpack_blocks(
            _int32(row_slots), received_row_counts.ravel(), sent_record_bytes, message
        )

    def read_records(self, table_index: int, slots: np.ndarray) -> Tensor:
        records = torch.empty(len(slots), self.tables[table_index].record_bytes, dtype=torch.uint8)
        self.native.pack(table_index, _int32(slots), records)
        return records

    def write_records(self, table_index: int, slots: np.ndarray, records: Tensor) -> None:
        self.native.unpack(table_index, _int32(slots), records)

    def add_pending_gradients(
        self,
        table_row_counts: np.ndarray,
        row_slots: np.ndarray,
        gradient_sums: GradientSums,
        is_leaving: np.ndarray,
    ) -> None:
        assert isinstance(gradient_sums, RowSums)
        _native.add_pending(
            self._pending_arrays(),
            self.num_pending,
            table_row_counts,
            row_slots,
            gradient_sums.index,
            gradient_sums.values,
            is_leaving.view(np.uint8),
        )

    def take_pending_gradients(
        self,
        rank_row_counts: np.ndarray,
        row_slots: np.ndarray,
        batch_indices: np.ndarray,
        batch_sums: GradientSums,
        sums_out: Tensor,
    ) -> None:
        assert isinstance(batch_sums, RowSums)
        _native.take_pending(
            self._pending_arrays(),
            self.num_pending,
            rank_row_counts.ravel(),
            row_slots,
            batch_indices,
            batch_sums.index,
            batch_sums.values,
            sums_out,
        )

    def gather_pending_sums(self, table_row_counts: np.ndarray, row_slots: np.ndarray) -> RowSums:
        by_table = np.split(row_slots, table_row_counts.cumsum()[:-1])
        values = torch.cat(
            [
                sums[torch.from_numpy(table_slots)].flatten()
                for sums, table_slots in zip(self.pending, by_table, strict=True)
            ]
        )
        widths = np.repeat([table.width for table in self.tables], table_row_counts)
        firsts = (widths.cumsum() - widths).astype(np.uint32).view(np.int32)
        return RowSums(values, torch.from_numpy(firsts))

    def _pending_arrays(self) -> list[np.ndarray]:
        """Return the pending sums by table."""
        return [table_sums.numpy() for table_sums in self.pending]


def _int32(slots: np.ndarray) -> Tensor:
    return torch.from_numpy(slots.astype(np.int32))


class DeviceCachedRows(CachedRows):
    """Cached rows in a device's memory; sums: by table, (U_t, D) of the compute dtype on the device.

    Memory for `capacities` rows is allocated at once; memory for more rows of a batch when a batch needs it.
    """

    def __init__(
        self, tables: Sequence[Table], capacities: Sequence[int], device: torch.device
    ) -> None:
        """Begin without rows. capacities: number of rows that outlast a batch, by table. Raises ConfigError where the
        device has no memory for them."""
        super().__init__(tables, capacities)
        self.device = device
        self.capacities = [min(pair) for pair in zip(capacities, self.max_slots, strict=True)]
        dtype = getattr(torch, tables[0].compute_dtype)
        # Stochastic rounding depends on slots, as in memory.
        self.rows = [
            reserve_device_rows(table, 0, device, table_seed(0, table.origin[0]))
            for table in self.tables
        ]
        self.pending = [
            torch.empty(0, table.width, dtype=dtype, device=device) for table in self.tables
        ]
        for table_index, count in enumerate(self.capacities):
            name = tables[table_index].name
            try:
                self._allocate_slots(table_index, count)
            except RuntimeError as error:
                raise ConfigError(
                    f"plan.cache: got {count:,} copies of rows of table {name!r} for {device}, which has no "
                    f"room for them beside the tables before it: {str(error).splitlines()[0]}. Lower plan.cache.size, "
                    "or leave plan.cache.tier out"
                ) from None

    def views(self) -> list[RowView]:
        return [rows.view for rows in self.rows]

    def grow_table(self, table_index: int, num_slots: int) -> None:
        num_allocated = len(self.ids[table_index])
        table = self.tables[table_index]
        if num_slots <= num_allocated:
            return
        # Batches have about the same size; allocate for one that is 50 % larger.
        reserve = (num_slots - self.capacities[table_index]) // 2
        wanted = max(num_slots, min(self.max_slots[table_index], num_slots + reserve))
        try:
            self._allocate_slots(table_index, wanted)
        except RuntimeError as error:
            raise BudgetExceeded(
                f"table {table.name!r}: got {wanted:,} copies of rows to keep in the memory of {self.device}, those of "
                f"a batch among them; it has room for {num_allocated:,}: {str(error).splitlines()[0]}. Lower "
                "plan.cache.size or the batch size, or leave plan.cache.tier out"
            ) from None

    def _allocate_slots(self, table_index: int, num_slots: int) -> None:
        """Enlarge one table, which temporarily needs memory for both sizes. Raises torch's error if there is not
        enough."""
        num_new = num_slots - len(self.ids[table_index])
        rows = enlarge_device_rows(self.rows[table_index], num_slots)
        pending = self.pending[table_index]
        self.pending[table_index] = torch.cat(
            [pending, pending.new_empty(num_new, pending.shape[1])]
        )
        self.rows[table_index] = rows
        self._extend_slot_arrays(table_index, num_slots)

    def _store_records(
        self,
        received_row_counts: np.ndarray,
        row_slots: np.ndarray,
        message: Tensor,
        sent_record_bytes: np.ndarray,
    ) -> None:
        sizes = (received_row_counts * sent_record_bytes[None, :]).ravel().tolist()
        blocks = torch.split(message.to(self.device), sizes)
        listed = self._copy_to_device(_group_rows_by_table(received_row_counts, row_slots))
        for table_index, (rows, table_slots) in enumerate(zip(self.rows, listed, strict=True)):
            if len(table_slots):
                records = torch.cat(blocks[table_index :: len(sent_record_bytes)]).view(
                    len(table_slots), -1
                )
                absent = rows.table.record_bytes - records.shape[1]
                rows.write_records(table_slots, functional.pad(records, (0, absent)))

    def read_records(self, table_index: int, slots: np.ndarray) -> Tensor:
        return self.rows[table_index].records(self._on_device(slots)).cpu()

    def write_records(self, table_index: int, slots: np.ndarray, records: Tensor) -> None:
        self.rows[table_index].write_records(self._on_device(slots), records.to(self.device))

    def add_pending_gradients(
        self,
        table_row_counts: np.ndarray,
        row_slots: np.ndarray,
        gradient_sums: GradientSums,
        is_leaving: np.ndarray,
    ) -> None:
        assert not isinstance(gradient_sums, RowSums)
        is_staying = np.split(~is_leaving, table_row_counts.cumsum()[:-1])
        indices = []
        for table_index, table_slots in enumerate(
            np.split(row_slots, table_row_counts.cumsum()[:-1])
        ):
            batch_rows = np.flatnonzero(is_staying[table_index])
            table_slots = table_slots[batch_rows]
            indices.append(
                np.stack([table_slots, batch_rows, self.num_pending[table_index][table_slots] > 0])
            )
            self.num_pending[table_index][table_slots] += 1
        for pending, own, (table_slots, batch_rows, was_pending) in zip(
            self.pending, gradient_sums, self._copy_to_device(indices), strict=True
        ):
            if len(table_slots):
                added = own[batch_rows]
                # Not by an addition to 0, which would change -0.0 to 0.0.
                pending[table_slots] = torch.where(
                    was_pending.bool()[:, None], pending[table_slots] + added, added
                )

    def take_pending_gradients(
        self,
        rank_row_counts: np.ndarray,
        row_slots: np.ndarray,
        batch_indices: np.ndarray,
        batch_sums: GradientSums,
        sums_out: Tensor,
    ) -> None:
        assert not isinstance(batch_sums, RowSums)
        indices = []
        first = 0
        pairs = zip(
            _group_rows_by_table(rank_row_counts, row_slots),
            _group_rows_by_table(rank_row_counts, batch_indices),
            strict=True,
        )
        for table_index, (table_slots, batch_rows) in enumerate(pairs):
            was_pending = self.num_pending[table_index][table_slots] > 0
            indices.append(
                np.stack([table_slots, batch_rows - first, batch_rows >= 0, was_pending])
            )
            self.num_pending[table_index][table_slots] = 0
            first += len(batch_sums[table_index])
        totals = []
        for pending, own, (table_slots, batch_rows, is_used, was_pending) in zip(
            self.pending, batch_sums, self._copy_to_device(indices), strict=True
        ):
            total = pending[table_slots]
            if len(own) and len(table_slots):
                added = own[batch_rows * is_used]
                with_batch = torch.where(was_pending.bool()[:, None], added + total, added)
                total = torch.where(is_used.bool()[:, None], with_batch, total)
            totals.append(total)
        blocks = [
            torch.split(total, n)
            for total, n in zip(totals, rank_row_counts.T.tolist(), strict=True)
        ]
        by_rank = [
            table_blocks[rank].flatten()
            for rank in range(len(rank_row_counts))
            for table_blocks in blocks
        ]
        sums_out.copy_(torch.cat(by_rank))

    def gather_pending_sums(
        self, table_row_counts: np.ndarray, row_slots: np.ndarray
    ) -> list[Tensor]:
        table_slots = self._copy_to_device(np.split(row_slots, table_row_counts.cumsum()[:-1]))
        return [sums[where] for sums, where in zip(self.pending, table_slots, strict=True)]

    def update(
        self,
        slots: Tensor,
        offsets: Tensor,
        sums: Sequence[Tensor],
        kinds: Sequence[int],
        settings: Sequence[Settings],
    ) -> None:
        """Update rows (n,) listed table by table by their summed gradients; kinds and settings by part."""
        table_slots = torch.split(slots.long().to(self.device), offsets.diff().tolist())
        update_device_rows(self.rows, table_slots, table_slots, sums, kinds, settings)

    def _copy_to_device(self, parts: Sequence[np.ndarray]) -> list[Tensor]:
        """Return `parts` by table, (.., n), as int64 on the device, with one copy for all of them."""
        whole = torch.from_numpy(np.concatenate(parts, axis=-1).astype(np.int64)).to(self.device)
        return list(torch.split(whole, [part.shape[-1] for part in parts], dim=-1))

    def _on_device(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)


def _group_rows_by_table(rank_row_counts: np.ndarray, row_values: np.ndarray) -> list[np.ndarray]:
    """Group values (n,) of rows in the order of messages, rank_row_counts (N, T), by table; within a table rank by
    rank."""
    blocks = np.split(row_values, rank_row_counts.ravel().cumsum()[:-1])
    return [
        np.concatenate(blocks[table_index :: rank_row_counts.shape[1]])
        for table_index in range(rank_row_counts.shape[1])
    ]
