"""Copies in this process's memory, where the native core computes on them.

Legend: T tables, n rows of a call, U rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.cache.copies import Copies
from colonnade.store.contract import RowView
from colonnade.store.dram import open_dram
from colonnade.table import Table


@dataclass(frozen=True, slots=True)
class Elements:
    """Sums of gradients, one for each row."""

    values: Tensor  # of the compute dtype
    index: Tensor  # (U,) int32: the first element of each row's


class NativeCopies(Copies):
    """sums: `Elements`. Slots beyond those in use are address space, and no memory."""

    def __init__(self, tables: Sequence[Table], capacities: Sequence[int]) -> None:
        """capacities: rows that stay, by table."""
        super().__init__(tables, capacities)
        self.store = open_dram(self.tables, self.rooms, seed=0)
        dtype = getattr(torch, tables[0].compute_dtype)
        self.pending = [torch.empty(0, table.width, dtype=dtype) for table in tables]

    @property
    def native(self) -> Any:
        """Of the rows: what `_native.update` takes."""
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
        found = torch.empty(len(slots), self.tables[t].record_bytes, dtype=torch.uint8)
        self.native.pack(t, _int32(slots), found)
        return found

    def put(self, t: int, slots: np.ndarray, records: Tensor) -> None:
        self.native.unpack(t, _int32(slots), records)

    def add(
        self, counts: np.ndarray, slots: np.ndarray, sums: Elements, leaves: np.ndarray
    ) -> None:
        _native.add_pending(
            self._sums(), self.ticks, counts, slots, sums.index, sums.values, leaves.view(np.uint8)
        )

    def take(
        self, counts: np.ndarray, slots: np.ndarray, origin: np.ndarray, sums: Elements, out: Tensor
    ) -> None:
        _native.take_pending(
            self._sums(), self.ticks, counts.ravel(), slots, origin, sums.index, sums.values, out
        )

    def waiting(self, counts: np.ndarray, slots: np.ndarray) -> Elements:
        pairs = zip(self.pending, np.split(slots, counts.cumsum()[:-1]), strict=True)
        values = torch.cat([sums[torch.from_numpy(mine)].flatten() for sums, mine in pairs])
        widths = np.repeat([table.width for table in self.tables], counts)
        firsts = (widths.cumsum() - widths).astype(np.uint32).view(np.int32)
        return Elements(values, torch.from_numpy(firsts))

    def _sums(self) -> list[np.ndarray]:
        """By table, what is pending."""
        return [each.numpy() for each in self.pending]


def _int32(slots: np.ndarray) -> Tensor:
    return torch.from_numpy(slots.astype(np.int32))
