"""What a rank's copies hold: records, and the sums of gradients that owners have yet to hear of.

Legend: T tables, D a table's width, n rows of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.store.dram import open_dram
from colonnade.table import CLOCK_BYTES, Table

SPARE = 2**22
"""Slots beyond a table's capacity: room for the rows of one batch. Address space; what is not used is no memory."""


class Copies:
    """By table and slot of its directory. Slots are given as int64 arrays (n,), each once in a call.

    Used by the training thread alone, in the order of the batches: a slot whose row left with batch n is filled for
    another at batch n + 1 at the earliest, when what was pending there has been taken.
    """

    def __init__(self, tables: Sequence[Table], capacities: Sequence[int]) -> None:
        """capacities: rows that stay, by table."""
        rooms = [
            rows + SPARE if table.rows is None else min(table.rows, rows + SPARE)
            for table, rows in zip(tables, capacities, strict=True)
        ]
        # Rows by number of their slot: the slots of a vocabulary that has room for all of it are its ids.
        slabs = [
            replace(table, rows=room, admission=None, eviction=None)
            for table, room in zip(tables, rooms, strict=True)
        ]
        self.tables, self.rooms = tuple(tables), rooms
        self.record_bytes = [table.record_bytes for table in tables]
        self.store = open_dram(slabs, rooms, seed=0)
        dtype = getattr(torch, tables[0].compute_dtype)
        self.pending = [torch.empty(0, table.width, dtype=dtype) for table in tables]
        self.ticks = [np.zeros(0, np.int32) for _ in tables]  # by slot: batches in `pending`
        self.ids = [np.zeros(0, np.int64) for _ in tables]  # by slot: of the row that was put there

    def grow(self, t: int, num_slots: int) -> None:
        """Slots below `num_slots` may be used."""
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
        self.ticks[t] = np.concatenate([self.ticks[t], np.zeros(count, np.int32)])
        self.ids[t] = np.concatenate([self.ids[t], np.zeros(count, np.int64)])

    def receive(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        ids: np.ndarray,
        message: Tensor,
        widths: np.ndarray,
    ) -> np.ndarray:
        """Rows as messages list them: counts (N, T), slots and ids (n,); their records' first `widths` (T,) bytes, one
        after another (uint8). What else a record has is not used there. (n,) bool: something is pending."""
        counts = counts.ravel()
        self.store.native.unpack_blocks(_int32(slots), counts, widths, message)
        return np.asarray(_native.name_slots(self.ids, self.ticks, counts, slots, ids)).view(bool)

    def records(self, t: int, slots: np.ndarray) -> Tensor:
        """(n, record_bytes) uint8."""
        found = torch.empty(len(slots), self.record_bytes[t], dtype=torch.uint8)
        self.store.native.pack(t, _int32(slots), found)
        return found

    def add(
        self, counts: np.ndarray, slots: np.ndarray, sums: Tensor, index: Tensor, leaves: np.ndarray
    ) -> None:
        """One batch's gradients, one tick of each of its rows: counts (T,), slots (U,), index (U,) int32, the first
        element of each row's in `sums`. Of rows of `leaves` (U,) bool nothing is added: `take` them."""
        pending = [each.numpy() for each in self.pending]
        _native.add_pending(pending, self.ticks, counts, slots, index, sums, leaves.view(np.uint8))

    def take(
        self,
        counts: np.ndarray,
        slots: np.ndarray,
        origin: np.ndarray,
        sums: Tensor,
        index: Tensor,
        out: Tensor,
    ) -> None:
        """What is pending of rows as messages list them, and is not from here on: counts (N, T), slots (n,). origin
        (n,): which row of the batch each is, whose sum comes to it; -1: none. out: elements, row after row."""
        pending = [each.numpy() for each in self.pending]
        _native.take_pending(pending, self.ticks, counts.ravel(), slots, origin, index, sums, out)

    def clear(self, t: int, slots: np.ndarray) -> None:
        """Nothing is pending there from here on."""
        self.ticks[t][slots] = 0

    def dirty(self, t: int) -> np.ndarray:
        """Slots of rows with something pending, ascending by id."""
        slots = np.flatnonzero(self.ticks[t])
        return slots[np.argsort(self.ids[t][slots])]

    def state(self, t: int, slots: np.ndarray) -> dict[str, Tensor]:
        """Of rows with a copy, all that is here: `load` takes it."""
        return {
            "ids": torch.from_numpy(self.ids[t][slots]),
            "records": self.records(t, slots),
            "pending": self.pending[t][torch.from_numpy(slots)],
            "ticks": torch.from_numpy(self.ticks[t][slots]),
        }

    def load(self, t: int, slots: np.ndarray, state: dict[str, Tensor]) -> None:
        if not len(slots):
            return
        self.grow(t, int(slots.max()) + 1)
        self.ids[t][slots] = state["ids"].numpy()
        self.store.native.unpack(t, _int32(slots), state["records"])
        self.pending[t][torch.from_numpy(slots)] = state["pending"]
        self.ticks[t][slots] = state["ticks"].numpy()


def travelling_bytes(table: Table, is_changed: bool) -> int:
    """Of a record on its way to a copy: with the optimizer's state where the copy is trained on (`is_changed`), with
    the clock where its optimizers count steps."""
    if not is_changed:
        return table.width * table.itemsize
    counts = any(part.optimizer.counts_steps for part in table.parts)
    return table.record_bytes - (0 if counts else CLOCK_BYTES)


def _int32(slots: np.ndarray) -> Tensor:
    return torch.from_numpy(slots.astype(np.int32))
