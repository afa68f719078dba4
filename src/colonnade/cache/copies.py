"""What a rank's copies hold: records, and the sums of gradients that owners have yet to hear of.

One contract, wherever they lie: in this process's memory (`native_copies`) or in a device's (`device_copies`), with the
same bits.

Legend: T tables, N ranks, D a table's width, n rows of a call, U rows of a batch, table by table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.store.contract import RowView
from colonnade.table import CLOCK_BYTES, Table

SPARE = 2**22
"""Slots beyond a table's capacity: room for the rows of one batch."""


class Copies(ABC):
    """By table and slot of its directory. Slots are given as int64 arrays (n,), each once in a call.

    Used by the training thread alone, in the order of the batches: a slot whose row left with batch n is filled for
    another at batch n + 1 at the earliest, when what was pending there has been taken.

    Which row a slot has and how many batches wait there is known here; records and sums lie where a subclass has them.
    `Kernels.update` takes it as the store of its rows. `sums` are a subclass's own, what the kernels that work there
    make (`row_sums`): one sum for each of U rows.
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
        """By table, where the copies' weights lie, until `grow`."""

    @abstractmethod
    def grow(self, t: int, num_slots: int) -> None:
        """Slots below `num_slots` may be used. Raises BudgetExceeded where a device has no room for them."""

    def receive(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        ids: np.ndarray,
        message: Tensor,
        widths: np.ndarray,
    ) -> np.ndarray:
        """Rows as messages list them: counts (N, T), slots and ids (n,); their records' first `widths` (T,) bytes, one
        after another (uint8, on the CPU). What else a record has is 0. (n,) bool: something is pending."""
        self._unpack(counts, slots, message, widths)
        named = _native.name_slots(self.ids, self.ticks, counts.ravel(), slots, ids)
        return np.asarray(named).view(bool)

    @abstractmethod
    def _unpack(
        self, counts: np.ndarray, slots: np.ndarray, message: Tensor, widths: np.ndarray
    ) -> None:
        """The records of `receive`."""

    @abstractmethod
    def records(self, t: int, slots: np.ndarray) -> Tensor:
        """(n, record_bytes) uint8 on the CPU."""

    @abstractmethod
    def put(self, t: int, slots: np.ndarray, records: Tensor) -> None:
        """records (n, record_bytes) uint8 on the CPU."""

    @abstractmethod
    def add(self, counts: np.ndarray, slots: np.ndarray, sums: Any, leaves: np.ndarray) -> None:
        """One batch's gradients, one tick of each of its rows: counts (T,), slots (U,), their sums. Of rows of `leaves`
        (U,) bool nothing is added: `take` them."""

    @abstractmethod
    def take(
        self, counts: np.ndarray, slots: np.ndarray, origin: np.ndarray, sums: Any, out: Tensor
    ) -> None:
        """What is pending of rows as messages list them, and is not from here on: counts (N, T), slots (n,). origin
        (n,): which row of the batch each is, whose sum comes to it; -1: none. out: elements on the CPU, row after
        row."""

    @abstractmethod
    def waiting(self, counts: np.ndarray, slots: np.ndarray) -> Any:
        """The sums that are pending of rows (n,) listed table by table: counts (T,)."""

    def waiting_of(self, t: int, slots: np.ndarray) -> Tensor:
        """(n, D) on the CPU: those of one table."""
        places = torch.from_numpy(slots).to(self.pending[t].device)
        return self.pending[t][places].cpu()

    def clear(self, t: int, slots: np.ndarray) -> None:
        """Nothing is pending there from here on."""
        self.ticks[t][slots] = 0

    def dirty(self, t: int) -> np.ndarray:
        """Slots of rows with something pending, ascending by id."""
        slots = np.flatnonzero(self.ticks[t])
        return slots[np.argsort(self.ids[t][slots])]

    def state(self, t: int, slots: np.ndarray) -> dict[str, Tensor]:
        """Of rows with a copy, all that is here, on the CPU: `load` takes it, wherever copies lie then."""
        ticks = torch.from_numpy(self.ticks[t][slots])
        pending = self.waiting_of(t, slots)
        pending[ticks == 0] = 0  # it was never written: commits of one training have the same bytes
        return {
            "ids": torch.from_numpy(self.ids[t][slots]),
            "records": self.records(t, slots),
            "pending": pending,
            "ticks": ticks,
        }

    def load(self, t: int, slots: np.ndarray, state: dict[str, Tensor]) -> None:
        if not len(slots):
            return
        self.grow(t, int(slots.max()) + 1)
        self.ids[t][slots] = state["ids"].numpy()
        self.put(t, slots, state["records"])
        pending = self.pending[t]
        pending[torch.from_numpy(slots).to(pending.device)] = state["pending"].to(pending.device)
        self.ticks[t][slots] = state["ticks"].numpy()

    def _name_more(self, t: int, num_slots: int) -> None:
        """Room for so many names and ticks: none is named, nothing is pending."""
        count = num_slots - len(self.ids[t])
        self.ticks[t] = np.concatenate([self.ticks[t], np.zeros(count, np.int32)])
        self.ids[t] = np.concatenate([self.ids[t], np.zeros(count, np.int64)])


def travelling_bytes(table: Table, is_changed: bool) -> int:
    """Of a record on its way to a copy: with the optimizer's state where the copy is trained on (`is_changed`), with
    the clock where its optimizers count steps."""
    if not is_changed:
        return table.width * table.itemsize
    counts = any(part.optimizer.counts_steps for part in table.parts)
    return table.record_bytes - (0 if counts else CLOCK_BYTES)
