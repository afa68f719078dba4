"""Rows of one table as tensors on a device: what their slots hold, and how they become records and come from them.

Legend: S slots, N rows of a call, D weights of a row, F scalars of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.ops import optimizers, reference
from colonnade.store.contract import RowView
from colonnade.table import Table

LAST_CLOCK = 2**32 - 1  # where clocks stop


@dataclass(frozen=True, eq=False, slots=True)
class DeviceRows:
    """Slots (N,) are int64 tensors on the same device, each slot once."""

    table: Table
    weights: Tensor  # (S, D) of the table's dtype
    state: Tensor  # (S, F) of its compute dtype
    lows: Tensor | None  # (S, D) int16: lower halves of bfloat16 masters
    clocks: Tensor  # (S,) int64
    seed: int  # of the table: rounds 16-bit weights

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def rounds_at_random(self) -> bool:
        return self.weights.dtype.itemsize == 2 and self.lows is None

    @property
    def view(self) -> RowView:
        table = self.table
        return RowView(
            self.weights.data_ptr(),
            table.width * table.itemsize,
            table.width,
            table.dtype,
            str(self.device),
            self.weights,
        )

    def records(self, slots: Tensor) -> Tensor:
        """(N, record_bytes) uint8 on the device, copied."""
        lows = None if self.lows is None else self.lows[slots]
        return reference.pack(self.weights[slots], self.state[slots], self.clocks[slots], lows)

    def put(self, slots: Tensor, records: Tensor) -> None:
        """records (N, record_bytes) uint8 on the device."""
        table = self.table
        weights, state, clocks, lows = reference.unpack(
            records, table.width, table.state_floats, self.weights.dtype, is_split=table.master
        )
        self.weights[slots] = weights
        self.state[slots] = state
        self.clocks[slots] = clocks
        if self.lows is not None and lows is not None:
            self.lows[slots] = lows

    def update(
        self,
        slots: Tensor,
        ids: Tensor | None,
        sums: Tensor,
        kinds: Sequence[int],
        settings: Sequence[optimizers.Settings],
    ) -> None:
        """One update of rows by their summed gradients (N, D) of the compute dtype; kinds and settings by part. What
        `_native.update` does. ids (N,): needed where rows are rounded at random."""
        weights, state, clocks = self.weights[slots], self.state[slots], self.clocks[slots]
        if self.lows is not None:
            values = reference.join(weights, self.lows[slots])
        else:
            values = weights.to(self.state.dtype)
        for part, kind, numbers in zip(self.table.parts, kinds, settings, strict=True):
            columns = slice(part.column, part.column + part.dim)
            states = slice(part.state, part.state + optimizers.state_elements(kind, part.dim))
            optimizers.update(
                kind, values[:, columns], state[:, states], clocks, sums[:, columns], numbers
            )
        if self.lows is not None:
            weights, self.lows[slots] = reference.split(values)
        elif self.rounds_at_random:
            assert ids is not None
            weights = optimizers.round_at_random(
                values, ids, clocks, self.seed, weights.dtype, column=self.table.origin[1]
            )
        else:
            weights = values
        self.weights[slots], self.state[slots] = weights, state
        self.clocks[slots] = (clocks + 1).clamp(max=LAST_CLOCK)


def update(
    rows: Sequence[DeviceRows],
    slots: Sequence[Tensor],
    ids: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    kinds: Sequence[int],
    settings: Sequence[optimizers.Settings],
) -> None:
    """`DeviceRows.update` of several tables: all by table, kinds and settings by part of all tables."""
    first = 0
    for each, mine, names, gradients in zip(rows, slots, ids, sums, strict=True):
        end = first + len(each.table.parts)
        if len(mine):
            each.update(mine, names, gradients, kinds[first:end], settings[first:end])
        first = end


def enlarged(rows: DeviceRows, num_slots: int) -> DeviceRows:
    """The same rows in memory for `num_slots`; what the other slots hold is not said. What torch raises where it does
    not fit."""
    found = device_rows(rows.table, num_slots, rows.device, rows.seed)
    here = slice(len(rows.clocks))
    found.weights[here], found.state[here] = rows.weights, rows.state
    found.clocks[here] = rows.clocks
    if found.lows is not None and rows.lows is not None:
        found.lows[here] = rows.lows
    return found


def device_rows(table: Table, num_slots: int, device: torch.device, seed: int) -> DeviceRows:
    """Memory for `num_slots` rows, `table.record_bytes` each. What torch raises where it does not fit."""
    compute = getattr(torch, table.compute_dtype)
    shape = (num_slots, table.width)
    return DeviceRows(
        table,
        torch.empty(shape, dtype=getattr(torch, table.dtype), device=device),
        torch.empty(num_slots, table.state_floats, dtype=compute, device=device),
        torch.empty(shape, dtype=torch.int16, device=device) if table.master else None,
        torch.empty(num_slots, dtype=torch.int64, device=device),
        seed,
    )
