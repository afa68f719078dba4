"""Rows of others that lie here: a rank's side of what is lent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from colonnade.store.dram import open_dram
from colonnade.table import Table

ROOM = 2**22
"""Rows beyond those that stay, address space alone: what a batch borrows while others go back."""


class Borrowed:
    """By their own ids, whoever owns them: what is here is lent to this rank, or a copy. Slots, and offsets (T + 1,) of
    each table's among them, are as in `store`."""

    def __init__(self, tables: Sequence[Table], rows: Sequence[int], seed: int) -> None:
        """rows: of each table, that stay. seed: the run's, which random bits of updates are drawn from."""
        open_tables = [replace(each, rows=None, admission=None, eviction=None) for each in tables]
        self.store = open_dram(open_tables, [each + ROOM for each in rows], seed=seed)
        # By table and slot: whether a row was updated here since its owner was last told of all (`news`).
        self._changed = [np.zeros(each + ROOM, bool) for each in rows]

    def change(self, slots: Tensor, offsets: Tensor) -> None:
        """Rows were updated."""
        for changed, mine in zip(self._changed, _parts(slots, offsets), strict=True):
            changed[mine.numpy()] = True

    def forget(self, slots: Tensor, offsets: Tensor) -> None:
        """Their owners know them as they are."""
        for changed, mine in zip(self._changed, _parts(slots, offsets), strict=True):
            changed[mine.numpy()] = False

    def news(self) -> list[tuple[Tensor, Tensor]]:
        """By table: (ids, slots), ascending by id, of rows that changed since their owners last knew them."""
        found = []
        for t, changed in enumerate(self._changed):
            ids, slots = self.rows(t)
            is_news = torch.from_numpy(changed[slots.numpy()])
            found.append((ids[is_news], slots[is_news]))
        return found

    def rows(self, t: int) -> tuple[Tensor, Tensor]:
        """(ids, slots) of table t, ascending by id."""
        ids, slots = (torch.as_tensor(each) for each in self.store.native.resident(t))
        order = torch.argsort(ids)
        return ids[order].contiguous(), slots[order].contiguous()

    def clear(self) -> None:
        """Nothing is lent to this rank."""
        for t in range(len(self._changed)):
            self.store.delete(t, self.rows(t)[0])


def _parts(slots: Tensor, offsets: Tensor) -> list[Tensor]:
    """By table."""
    return list(slots.split(offsets.diff().tolist()))
