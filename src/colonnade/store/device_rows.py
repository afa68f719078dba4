"""Rows of one table as tensors on a device: slots, their conversion to and from records, updates.

Legend: S slots, N rows of a call, D weights of a row, F scalars of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade import _native
from colonnade.ops import optimizers, reference
from colonnade.store.contract import RowView
from colonnade.table import Table


@dataclass(frozen=True, eq=False, slots=True)
class DeviceRows:
    """Memory of a table's rows on a device. Slots (N,) are int64 tensors on it, each slot once."""

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
        """Copy records (N, record_bytes) uint8 of these slots, on the device."""
        lows = None if self.lows is None else self.lows[slots]
        return reference.pack(self.weights[slots], self.state[slots], self.clocks[slots], lows)

    def write_records(self, slots: Tensor, records: Tensor) -> None:
        """Overwrite slots with records (N, record_bytes) uint8 on the device."""
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
        """Apply one update by summed gradients (N, D) of the compute dtype, as `_native.update` does.

        kinds and settings: by part. ids (N,): needed if rows are rounded at random.
        """
        weights = self.weights[slots]
        state = self.state[slots]
        clocks = self.clocks[slots]
        if self.lows is not None:
            values = reference.join(weights, self.lows[slots])
        else:
            values = weights.to(self.state.dtype)
        for part, kind, part_settings in zip(self.table.parts, kinds, settings, strict=True):
            columns = slice(part.column, part.column + part.dim)
            num_states = _native.optimizer_state_elements(kind, part.dim)
            optimizers.apply_optimizer(
                _native.OPTIMIZERS[kind],
                values[:, columns],
                state[:, part.state : part.state + num_states],
                clocks,
                sums[:, columns],
                part_settings,
            )
        if self.lows is not None:
            weights, self.lows[slots] = reference.split_masters(values)
        elif self.rounds_at_random:
            assert ids is not None
            weights = optimizers.round_stochastically(
                values, ids, clocks, self.seed, weights.dtype, column=self.table.origin[1]
            )
        else:
            weights = values
        self.weights[slots] = weights
        self.state[slots] = state
        self.clocks[slots] = optimizers.advance_clocks(clocks)


def update_device_rows(
    rows: Sequence[DeviceRows],
    slots: Sequence[Tensor],
    ids: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    kinds: Sequence[int],
    settings: Sequence[optimizers.Settings],
) -> None:
    """Update rows of several tables (`DeviceRows.update`): all by table, kinds and settings by part of all tables."""
    first = 0
    for table_rows, table_slots, table_ids, gradients in zip(rows, slots, ids, sums, strict=True):
        end = first + len(table_rows.table.parts)
        if len(table_slots):
            table_rows.update(
                table_slots, table_ids, gradients, kinds[first:end], settings[first:end]
            )
        first = end


def enlarge_device_rows(rows: DeviceRows, num_slots: int) -> DeviceRows:
    """Copy rows into memory for `num_slots`; new slots have no defined content. Raises what torch raises if it does
    not fit."""
    copy = reserve_device_rows(rows.table, num_slots, rows.device, rows.seed)
    used = slice(len(rows.clocks))
    copy.weights[used] = rows.weights
    copy.state[used] = rows.state
    copy.clocks[used] = rows.clocks
    if copy.lows is not None and rows.lows is not None:
        copy.lows[used] = rows.lows
    return copy


def reserve_device_rows(
    table: Table, num_slots: int, device: torch.device, seed: int
) -> DeviceRows:
    """Reserve memory for `num_slots` rows, `table.record_bytes` each. Raises what torch raises if it does not fit."""
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
