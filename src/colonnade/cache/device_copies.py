"""Copies in a device's memory, where plain PyTorch computes on them: the bits of those in memory, to the same rules.

Records that come from owners and sums that go to them cross to the host, one copy for all tables each, and so do slots
on their way here; what is kept, pooled, summed up and trained stays. A few operations per table and call; none per row.

Legend: T tables, N ranks, D a table's width, S slots, n rows of a call, U_t rows of table t in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colonnade.cache.copies import Copies
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.ops.optimizers import Settings
from colonnade.store.contract import RowView
from colonnade.store.device_rows import device_rows, enlarged, update
from colonnade.store.dram import table_seed
from colonnade.table import Table


class DeviceCopies(Copies):
    """sums: by table, (U_t, D) of the compute dtype on the device.

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
        """Of one table; all of it lies there twice for a moment. What torch raises where it does not fit."""
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
        stays, said = np.split(~leaves, counts.cumsum()[:-1]), []
        for t, mine in enumerate(np.split(slots, counts.cumsum()[:-1])):
            which = np.flatnonzero(stays[t])
            places = mine[which]
            said.append(np.stack([places, which, self.ticks[t][places] > 0]))
            self.ticks[t][places] += 1
        for pending, own, (places, which, had) in zip(
            self.pending, sums, self._moved(said), strict=True
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
        said, first = [], 0
        pairs = zip(_by_table(counts, slots), _by_table(counts, origin), strict=True)
        for t, (mine, of_batch) in enumerate(pairs):
            said.append(np.stack([mine, of_batch - first, of_batch >= 0, self.ticks[t][mine] > 0]))
            self.ticks[t][mine] = 0
            first += len(sums[t])
        found = []
        for pending, own, (places, which, is_used, had) in zip(
            self.pending, sums, self._moved(said), strict=True
        ):
            taken = pending[places]
            if len(own) and len(places):
                added = own[which * is_used]
                both = torch.where(had.bool()[:, None], added + taken, added)
                taken = torch.where(is_used.bool()[:, None], both, taken)
            found.append(taken)
        blocks = [each.split(n) for each, n in zip(found, counts.T.tolist(), strict=True)]
        by_rank = [of_table[rank].flatten() for rank in range(len(counts)) for of_table in blocks]
        out.copy_(torch.cat(by_rank))

    def waiting(self, counts: np.ndarray, slots: np.ndarray) -> list[Tensor]:
        places = self._moved(np.split(slots, counts.cumsum()[:-1]))
        return [sums[mine] for sums, mine in zip(self.pending, places, strict=True)]

    def update(
        self,
        slots: Tensor,
        offsets: Tensor,
        sums: Sequence[Tensor],
        kinds: Sequence[int],
        settings: Sequence[Settings],
    ) -> None:
        """Rows (n,) listed table by table, by their summed gradients; kinds and settings by part."""
        places = slots.long().to(self.device).split(offsets.diff().tolist())
        update(self.rows, places, places, sums, kinds, settings)

    def _moved(self, parts: Sequence[np.ndarray]) -> list[Tensor]:
        """By table, int64 on the device, (.., n) each: one copy for all of them."""
        whole = torch.from_numpy(np.concatenate(parts, axis=-1).astype(np.int64)).to(self.device)
        return list(whole.split([part.shape[-1] for part in parts], dim=-1))

    def _on_device(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)


def _by_table(counts: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Values (n,) of rows as messages list them, counts (N, T): by table, those of each rank one after another."""
    blocks = np.split(values, counts.ravel().cumsum()[:-1])
    return [np.concatenate(blocks[t :: counts.shape[1]]) for t in range(counts.shape[1])]
