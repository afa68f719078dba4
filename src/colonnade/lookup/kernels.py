"""Kernels of a step on rows and their gradients: one contract, in memory or on a device.

`NativeKernels` works on addresses in this process's memory, `DeviceKernels` on tensors of any device. `RowsExchange`
selects one by where the rows' views are. Results have the same bits on the same processor.

On a device there are a few operations per read and per table, none per row. With "cpu" as the device, results have the
bits of the native kernels. A GPU gives the same bits where each of its operations rounds as IEEE 754 requires; sums
have the same order.

Legend: B samples, T tables, E lookups, O rows that a rank owns, W elements of a row; O_t and W_t are of table t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colonnade import _native
from colonnade.lookup.contract import NO_TENSORS, PartLookup, RowGradients, RowSource
from colonnade.lookup.layout import EmbeddingDeclaration, LookupColumns, Lookups, Output
from colonnade.lookup.reads import (
    PairedReads,
    Read,
    add_gradients,
    build_native_reads,
    compute_lookup_gradients,
    find_shared_columns,
    get_column_bag,
    list_reads,
    pool_squares,
    separate_lookups,
    squared_columns,
    transpose_int32,
)
from colonnade.lookup.row_layout import RowLayout, RowSums, build_row_layout
from colonnade.ops import optimizers as rules
from colonnade.ops import reference
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.table import POOLINGS, Part


class NativeKernels:
    """Kernels on rows in this process's memory.

    Locations are (bases (T,), strides (T,), index (E,), order (E,) or None): lookup e reads the row at
    base[t] + index[e] * stride[t] bytes."""

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        lookup_columns: LookupColumns,
        outputs: Sequence[Output],
        num_ranks: int,
    ) -> None:
        self.declaration = declaration
        self.lookup_columns = lookup_columns
        self.outputs = outputs
        self.widths = declaration.widths
        self.dtype = declaration.tables[0].dtype
        self.itemsize = declaration.tables[0].itemsize
        self.compute = declaration.tables[0].compute_dtype
        self.pooled_reads, self.square_reads = list_reads(declaration, lookup_columns, outputs)
        self.reads = build_native_reads(self.pooled_reads)
        self._paired = PairedReads(self.pooled_reads, self.square_reads)
        paired = {read for read, _ in self._paired.pairs}
        self._unpaired = [n for n, read in enumerate(self.pooled_reads) if read not in paired]
        self._unpaired_reads = build_native_reads(self.pooled_reads[n] for n in self._unpaired)
        self.reads_of_key: dict[tuple[int, int], list[Read]] = {}
        """Reads of each part through each column of lookups: pooled vectors, then squares."""
        for read in (*self.pooled_reads, *self.square_reads):
            self.reads_of_key.setdefault(read.key, []).append(read)
        read_columns = [(r.output, r.start, outputs[r.output].width) for r in self.pooled_reads]
        # In numpy, because torch takes five times as long for so few numbers.
        self._read_outputs, self._read_columns, self._read_widths = (
            np.array(read_columns, dtype=np.int64).reshape(-1, 3).T.copy()
        )
        self.whole_rows = _native.Reads(
            *transpose_int32(
                (i, 0, width) for i, width in enumerate(self.widths.tolist() * num_ranks)
            )
        )

    def locate_rows(
        self,
        lookups: Lookups | None,
        row_views: Sequence[RowView],
        row_slots: Tensor,
        row_order: Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor | None]:
        return (
            np.array([view.address for view in row_views], dtype=np.int64),
            np.array([view.stride_bytes for view in row_views], dtype=np.int64),
            row_slots,
            row_order,
        )

    def pool(
        self,
        lookups: Lookups,
        row_locations: tuple[Any, Any, Tensor, Tensor | None],
        out_tensors: Mapping[int, Tensor] = NO_TENSORS,
    ) -> list[Tensor]:
        bases, strides, index, order = row_locations
        tensors = self._empty_outputs(lookups, out_tensors)
        out_bases, out_strides = self._output_addresses(tensors)
        _native.pool(
            lookups.native,
            index,
            bases,
            strides,
            self._unpaired_reads,
            out_bases[self._unpaired],
            out_strides[self._unpaired],
            self.dtype,
            self.declaration.output,
            order,
        )
        if self._paired.pairs:
            self._paired.pool(lookups, index, bases, strides, self.dtype, tensors)
        return tensors

    def zero_outputs(self, lookups: Lookups) -> list[Tensor]:
        return [output.zero_() for output in self._empty_outputs(lookups)]

    def gather_message(
        self,
        row_source: RowSource,
        row_slots: Tensor,
        message_layout: RowLayout,
        requests: _native.Lookups,
        message_out: Tensor | None = None,
    ) -> Tensor:
        bases, strides, *_ = self.locate_rows(None, row_source.views, row_slots)
        send = message_out
        if send is None:
            send = empty(message_layout.num_elements, dtype=self.declaration.dtype)
        starts = torch.from_numpy(message_layout.block_elements.ravel() * self.itemsize)
        widths = torch.from_numpy(self.widths * self.itemsize).repeat(len(message_layout.counts))
        _native.pool(
            requests,
            row_slots,
            bases,
            strides,
            self.whole_rows,
            send.data_ptr() + starts,
            widths,
            self.dtype,
            self.dtype,
        )
        return send

    def gradients_from_outputs(self, lookup: PartLookup, gradients: list[Tensor]) -> RowGradients:
        plan = lookup.plan
        source, keep = self.output_gradients(lookup, gradients)
        return RowGradients(
            lookup.slots,
            lookup.owned.offsets,
            plan.segment_offsets,
            plan.entries,
            source,
            keep,
            lookup.pinned.by_page if lookup.pinned else None,
        )

    def output_gradients(
        self, lookup: PartLookup, gradients_by_output: list[Tensor]
    ) -> tuple[_native.OutputGradients, Any]:
        """Return gradients of a lookup's outputs as the native core takes them, and the tensors that they refer to."""
        if len(self.reads_of_key) < len(self.pooled_reads) + len(self.square_reads):
            return self._merge_gradients(lookup.lookups, gradients_by_output)
        dtype = str(gradients_by_output[0].dtype).removeprefix("torch.")
        source = _native.OutputGradients(
            lookup.lookups.native, self.reads, *self._output_addresses(gradients_by_output), dtype
        )
        return source, gradients_by_output

    def _merge_gradients(
        self, lookups: Lookups, output_gradients: Sequence[Tensor]
    ) -> tuple[_native.OutputGradients, Any]:
        """Return the same where several outputs read a part, or one its squares: the sum of what they contribute. Where
        squares are read, there is one gradient for each lookup."""
        dtype = self.declaration.compute_dtype
        output_gradients = [gradient.to(dtype) for gradient in output_gradients]
        merged = []
        squared = squared_columns(self.lookup_columns)
        for reads in self.reads_of_key.values():
            gradient, of_squares = add_gradients(reads, output_gradients)
            if reads[0].column in squared:
                gradient = self._square_gradients(lookups, reads[0], gradient, of_squares)
            assert gradient is not None
            merged.append(gradient)
        source = _native.OutputGradients(
            separate_lookups(lookups, self.lookup_columns, dtype).native,
            build_native_reads(reads[0] for reads in self.reads_of_key.values()),
            *_block_addresses(merged),
            self.compute,
        )
        return source, (output_gradients, merged)

    def _square_gradients(
        self, lookups: Lookups, read: Read, gradient: Tensor | None, of_squares: Tensor | None
    ) -> Tensor:
        """Return the gradients (E, D) of the lookups of one column, from what `add_gradients` returns."""
        counts = lookups.feature_offsets.diff()
        out = empty(int(counts[read.column]), read.part.dim, dtype=self.declaration.compute_dtype)
        rows = lookups.squared_rows.get(read.key)
        if rows is None:  # squares were never pooled, so gradients of them are zeros
            rows = out.zero_()
        offsets, pooling, weights = get_column_bag(lookups, self.lookup_columns, read.column, out)
        _native.square_gradients(
            rows, offsets, POOLINGS.index(pooling), weights, gradient, of_squares, out
        )
        return out

    def sum_gradients_by_row(
        self, lookup: PartLookup, table_offsets: Tensor, gradients: list[Tensor]
    ) -> RowSums:
        plan = lookup.plan
        layout = build_row_layout(table_offsets.diff().numpy()[None, :], self.widths)
        values = empty(layout.num_elements, dtype=self.declaration.compute_dtype)
        sums = RowSums(values, layout.rank_major_index(self.widths))
        row_gradients = RowGradients(
            lookup.slots,
            table_offsets,
            plan.segment_offsets,
            plan.entries,
            *self.output_gradients(lookup, gradients),
        )
        self.sum_rows_into(row_gradients, sums.values, sums.index)
        return sums

    def gradients_from_sums(
        self, slots: np.ndarray, counts: np.ndarray, sums: RowSums, is_selected: np.ndarray
    ) -> RowGradients:
        index = sums.index
        if not is_selected.all():
            rows = np.repeat(is_selected, counts)
            slots = slots[rows]
            index = index[torch.from_numpy(rows)].contiguous()
            counts = counts * is_selected
        ramp = torch.arange(len(index) + 1, dtype=torch.int32)
        return RowGradients(
            torch.from_numpy(slots.astype(np.int32)),
            torch.from_numpy(np.concatenate([[0], counts.cumsum()])),
            ramp,
            ramp[:-1].contiguous(),
            _native.RowGradients(sums.values.data_ptr(), index, self.compute),
            (sums, index),
        )

    def sum_rows_into(self, row_gradients: RowGradients, sums: Tensor, index: Tensor) -> None:
        """Write each row's summed gradient to `sums`, elements of the compute dtype. index: (O,) int32, the first
        element of each row."""
        _native.sum_rows(
            row_gradients.segment_offsets,
            row_gradients.entries,
            row_gradients.source,
            row_gradients.offsets,
            self.declaration.native_parts,
            sums.data_ptr(),
            index,
            self.compute,
        )

    def sum_entries(self, row_gradients: RowGradients) -> tuple[RowGradients, Tensor]:
        """Add up each row's entries. Return the summed gradients, and their elements table by table, row by row."""
        counts = np.diff(row_gradients.offsets.numpy())[None, :]
        layout = build_row_layout(counts, self.widths)
        sums = empty(layout.num_elements, dtype=self.declaration.compute_dtype)
        index = layout.rank_major_index(self.widths)
        self.sum_rows_into(row_gradients, sums, index)
        ramp = torch.arange(len(index) + 1, dtype=torch.int32)
        source = _native.RowGradients(sums.data_ptr(), index, self.compute)
        return RowGradients(
            row_gradients.slots,
            row_gradients.offsets,
            ramp,
            ramp[:-1].contiguous(),
            source,
            (sums, index),
        ), sums

    def merge_batches(
        self,
        part_lookups: Sequence[PartLookup],
        row_gradients: Sequence[RowGradients],
        row_slots: Tensor,
        lookup_plan: _native.Plan,
    ) -> RowGradients:
        counts = np.stack([np.diff(batch.owned.offsets.numpy()) for batch in part_lookups])
        layout = build_row_layout(counts, self.widths)
        sums = empty(layout.num_elements, dtype=self.declaration.compute_dtype)
        index = layout.rank_major_index(self.widths)
        starts = np.concatenate([[0], np.cumsum(counts.sum(1))])
        for i, part in enumerate(row_gradients):
            self.sum_rows_into(part, sums, index[starts[i] : starts[i + 1]].contiguous())
        return RowGradients(
            row_slots,
            torch.as_tensor(lookup_plan.block_offsets),
            lookup_plan.segment_offsets,
            lookup_plan.entries,
            _native.RowGradients(sums.data_ptr(), index, self.compute),
            (sums, index, lookup_plan),
        )

    def squared_norm(self, row_gradients: RowGradients) -> tuple[RowGradients, float]:
        summed, values = self.sum_entries(row_gradients)
        return summed, _native.squared_norm(values.data_ptr(), values.numel(), self.compute)

    def update(
        self, store: Any, row_gradients: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        rows = row_gradients.by_page or row_gradients
        _native.update(
            store.native,
            rows.slots,
            row_gradients.offsets,
            rows.segment_offsets,
            rows.entries,
            row_gradients.source,
            self.declaration.native_parts,
            optimizers,
            settings,
        )

    def squared_norms(self, view: RowView, slots: Tensor) -> Tensor:
        return torch.as_tensor(
            _native.squared_norms(view.address, view.stride_bytes, view.dim, view.dtype, slots)
        )

    def _empty_outputs(
        self, lookups: Lookups, into: Mapping[int, Tensor] = NO_TENSORS
    ) -> list[Tensor]:
        dtype = self.declaration.output_dtype
        shapes = output_shapes(self.outputs, self.lookup_columns, lookups)
        return [
            into[i] if i in into else empty(*shape, dtype=dtype) for i, shape in enumerate(shapes)
        ]

    def _output_addresses(self, out_tensors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Return the address of output row 0 of each read, and the bytes between its rows, (R,) int64 each."""
        itemsize = out_tensors[0].element_size() if out_tensors else 0
        starts = np.array([tensor.data_ptr() for tensor in out_tensors], dtype=np.int64)
        return starts[
            self._read_outputs
        ] + self._read_columns * itemsize, self._read_widths * itemsize


def output_shapes(
    outputs: Sequence[Output], lookup_columns: LookupColumns, lookups: Lookups
) -> list[tuple[int, int]]:
    """Return the shape of each output of a batch."""
    shapes = []
    first = 0
    for output in outputs:
        rows = lookups.batch_size
        if output.is_sequence:
            column = lookup_columns.reads[first][0]
            rows = int(lookups.feature_offsets[column + 1] - lookups.feature_offsets[column])
        shapes.append((rows, output.width))
        first += len(output.fields)
    return shapes


def _block_addresses(row_blocks: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the address of the first row of each block, and the bytes between its rows, (R,) int64 each."""
    strides = [block.stride(0) * block.element_size() for block in row_blocks]
    return (
        np.array([block.data_ptr() for block in row_blocks], dtype=np.int64),
        np.array(strides, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class DeviceRowSums:
    """Summed gradients of owned rows: the `source` of `RowGradients` on a device."""

    by_table: list[Tensor]  # (O_t, W_t) of the compute dtype


@dataclass(frozen=True, slots=True)
class DeviceLookups:
    """Lookups of a batch on the device."""

    rows: list[Tensor]  # by table, (slots, W_t)
    index: Tensor  # (E,) int32 slots
    bags: list[tuple[Tensor | None, reference.Pooling, Tensor | None]]
    """Bag offsets, pooling and lookup weights by column of lookups, as `reference.pool` takes them."""


class DeviceKernels:
    """Kernels on rows in a device's memory. Locations are `DeviceLookups`.

    Messages between ranks go through the host: rows are gathered on the device and copied once; received gradients are
    summed by `host` and copied once.
    """

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        lookup_columns: LookupColumns,
        outputs: Sequence[Output],
        host: NativeKernels,
    ) -> None:
        self.declaration = declaration
        self.lookup_columns = lookup_columns
        self.outputs = outputs
        self.host = host
        self.reads, self.square_reads = list_reads(declaration, lookup_columns, outputs)
        self._shared_columns = find_shared_columns((*self.reads, *self.square_reads))
        self.tables = lookup_columns.tables.tolist()  # by column of lookups
        self.poolings: list[reference.Pooling] = [
            declaration.features[f].pooling for f in lookup_columns.features
        ]

    def locate_rows(
        self,
        lookups: Lookups,
        row_views: Sequence[RowView],
        row_slots: Tensor,
        row_order: Tensor | None = None,
    ) -> DeviceLookups:
        rows = [view.rows for view in row_views if view.rows is not None]
        device = rows[0].device
        return DeviceLookups(rows, row_slots.to(device), self._bags_on_device(lookups, device))

    def pool(
        self,
        lookups: Lookups,
        row_locations: DeviceLookups,
        out_tensors: Mapping[int, Tensor] = NO_TENSORS,
    ) -> list[Tensor]:
        dtype = self.declaration.output_dtype
        device = row_locations.index.device
        shapes = output_shapes(self.outputs, self.lookup_columns, lookups)
        tensors = [
            out_tensors[i] if i in out_tensors else torch.empty(shape, dtype=dtype, device=device)
            for i, shape in enumerate(shapes)
        ]
        bounds = lookups.feature_offsets.tolist()
        for (output, _), columns in self._shared_columns.items():
            tensors[output][:, columns].zero_()
        for read in (*self.reads, *self.square_reads):
            c = read.column
            part = read.part
            slots = row_locations.index[bounds[c] : bounds[c + 1]]
            part_columns = row_locations.rows[read.table][:, part.column : part.column + part.dim]
            values = part_columns.index_select(0, slots)
            if read.is_squared:
                values = values.to(self.declaration.compute_dtype)
                lookups.squared_rows[read.key] = values
                pooled = pool_squares(values, row_locations.bags[c])
            else:
                pooled = reference.pool(values, *row_locations.bags[c], dtype)
            out = tensors[read.output][:, read.columns]
            is_shared = (read.output, read.start) in self._shared_columns
            out.add_(pooled) if is_shared else out.copy_(pooled)
        return tensors

    def zero_outputs(self, lookups: Lookups) -> list[Tensor]:
        """Return zeros on the CPU: without a backward, nothing tells which device the rows were on."""
        return self.host.zero_outputs(lookups)

    def gather_message(
        self,
        row_source: RowSource,
        row_slots: Tensor,
        message_layout: RowLayout,
        requests: Any,
        message_out: Tensor | None = None,
    ) -> Tensor:
        rows = [view.rows for view in row_source.views if view.rows is not None]
        counts = message_layout.counts.ravel().tolist()  # rank by rank, table by table
        blocks = [
            rows[b % len(rows)].index_select(0, block_slots).flatten()
            for b, block_slots in enumerate(row_slots.to(rows[0].device).split(counts))
        ]
        message = torch.cat(blocks)
        return message.cpu() if message_out is None else message_out.copy_(message)

    def gradients_from_outputs(self, lookup: PartLookup, gradients: list[Tensor]) -> RowGradients:
        offsets = lookup.owned.offsets
        sums = DeviceRowSums(self.sum_gradients_by_row(lookup, offsets, gradients))
        return RowGradients(lookup.slots, offsets, None, None, sums, gradients)

    def sum_gradients_by_row(
        self, lookup: PartLookup, table_offsets: Tensor, gradients: list[Tensor]
    ) -> list[Tensor]:
        locations: DeviceLookups = lookup.reads.locations  # type: ignore[attr-defined]
        device = locations.index.device
        bags = locations.bags
        gradients = [gradient.to(device) for gradient in gradients]
        lookups = lookup.lookups
        plan = lookup.plan
        segments = torch.as_tensor(plan.segment_offsets)
        entries = torch.as_tensor(plan.entries)
        firsts = segments[table_offsets].tolist()
        parts = [lookups.feature_offsets, segments, entries]  # one copy for all of them
        moved = torch.cat(parts).to(device).split([len(part) for part in parts])
        ends, segments, entries = moved
        rows = table_offsets.tolist()
        bounds = lookups.feature_offsets.tolist()
        sums = []
        for t, table in enumerate(self.declaration.tables):
            columns = [c for c, of in enumerate(self.tables) if of == t]
            table_entries = entries[firsts[t] : firsts[t + 1]]
            row_ends = segments[rows[t] : rows[t + 1] + 1] - firsts[t]
            row_sums = torch.zeros(
                len(row_ends) - 1, table.width, dtype=self.declaration.compute_dtype, device=device
            )
            for part in table.parts:
                # Terms of the columns that read the part, one after another, and the shift from a lookup to its term.
                read = self._columns_that_read(t, part)
                terms = []
                shifts = [0] * len(self.tables)
                length = 0
                for c in columns:
                    if c not in read:
                        continue
                    num_lookups = bounds[c + 1] - bounds[c]
                    shifts[c] = length - bounds[c]
                    length += num_lookups
                    squared_rows = lookups.squared_rows.get((c, part.column))
                    terms.append(
                        compute_lookup_gradients(
                            *add_gradients(read[c], gradients), squared_rows, bags[c], num_lookups
                        )
                    )
                if not terms:
                    continue
                terms_index = table_entries
                ends_in_terms = row_ends
                if len(columns) > 1:
                    column = torch.bucketize(table_entries, ends[1:], right=True)
                    terms_index = table_entries + torch.tensor(shifts, device=device)[column]
                    if len(read) < len(columns):  # lookups in the other columns add nothing
                        is_read = torch.tensor(
                            [c in read for c in range(len(shifts))], device=device
                        )[column]
                        terms_index = terms_index[is_read]
                        ends_in_terms = functional.pad(is_read.cumsum(0), (1, 0))[row_ends.long()]
                else:
                    terms_index = table_entries + shifts[columns[0]]
                part_sums = reference.sum_rows(torch.cat(terms), ends_in_terms, terms_index)
                row_sums[:, part.column : part.column + part.dim] = part_sums
            sums.append(row_sums)
        return sums

    def _columns_that_read(self, table: int, part: Part) -> dict[int, list[Read]]:
        """Return reads of a part by column of lookups: of its vectors, then of their squares."""
        by_column: dict[int, list[Read]] = {}
        for read in (*self.reads, *self.square_reads):
            if read.table == table and read.part == part:
                by_column.setdefault(read.column, []).append(read)
        return by_column

    def gradients_from_sums(
        self, slots: np.ndarray, counts: np.ndarray, sums: list[Tensor], is_selected: np.ndarray
    ) -> RowGradients:
        by_table = [
            table_sums if is_included else table_sums[:0]
            for table_sums, is_included in zip(sums, is_selected.tolist(), strict=True)
        ]
        rows = slots[np.repeat(is_selected, counts)].astype(np.int32)
        offsets = torch.from_numpy(np.concatenate([[0], (counts * is_selected).cumsum()]))
        return RowGradients(
            torch.from_numpy(rows), offsets, None, None, DeviceRowSums(by_table), sums
        )

    def merge_batches(
        self,
        part_lookups: Sequence[PartLookup],
        row_gradients: Sequence[RowGradients],
        row_slots: Tensor,
        lookup_plan: _native.Plan,
    ) -> RowGradients:
        parts = [gradients.source.by_table for gradients in row_gradients]
        segments = torch.as_tensor(lookup_plan.segment_offsets)
        blocks = torch.as_tensor(lookup_plan.block_offsets)
        firsts = segments[blocks].tolist()
        entries = torch.as_tensor(lookup_plan.entries).long()
        counts = np.stack([np.diff(batch.owned.offsets.numpy()) for batch in part_lookups])
        # Rows are listed batch by batch, table by table; in `terms` the rows of one table are contiguous.
        starts = np.concatenate([[0], np.cumsum(counts.ravel())])[:-1].reshape(counts.shape)
        term_starts = np.cumsum(counts, axis=0) - counts
        shifts = torch.from_numpy(term_starts - starts)
        ends = torch.from_numpy(starts.ravel()[1:].copy())
        sums = []
        for t in range(len(blocks) - 1):
            terms = torch.cat([by_table[t] for by_table in parts])
            table_entries = entries[firsts[t] : firsts[t + 1]]
            blocks_of_entries = torch.bucketize(table_entries, ends, right=True)
            terms_index = table_entries + shifts.ravel()[blocks_of_entries]
            row_ends = segments[blocks[t] : blocks[t + 1] + 1] - firsts[t]
            row_sums = reference.sum_rows(
                terms, row_ends.to(terms.device), terms_index.to(terms.device)
            )
            sums.append(row_sums)
        return RowGradients(row_slots, blocks, None, None, DeviceRowSums(sums), lookup_plan)

    def squared_norm(self, row_gradients: RowGradients) -> tuple[RowGradients, float]:
        if not isinstance(row_gradients.source, DeviceRowSums):
            return self.host.squared_norm(row_gradients)
        values = torch.cat([table_sums.flatten() for table_sums in row_gradients.source.by_table])
        return row_gradients, reference.squared_norm(values)

    def update(
        self, store: Any, row_gradients: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        part_settings = [_read_settings(row) for row in settings.tolist()]
        sums = self._sums_on_device(row_gradients, store.device)
        store.update(
            row_gradients.slots, row_gradients.offsets, sums, optimizers.tolist(), part_settings
        )

    def squared_norms(self, view: RowView, slots: Tensor) -> Tensor:
        assert view.rows is not None
        return rules.sum_squares(view.rows[slots.to(view.rows.device).long()].double()).cpu()

    def _sums_on_device(self, row_gradients: RowGradients, device: torch.device) -> list[Tensor]:
        """Return summed gradients on the device by table, (O_t, W_t)."""
        if isinstance(row_gradients.source, DeviceRowSums):
            return row_gradients.source.by_table
        _, values = self.host.sum_entries(row_gradients)
        counts = row_gradients.offsets.diff().tolist()
        widths = self.declaration.widths.tolist()
        parts = values.to(device).split([n * w for n, w in zip(counts, widths, strict=True)])
        return [part.view(n, w) for part, n, w in zip(parts, counts, widths, strict=True)]

    def _bags_on_device(
        self, lookups: Lookups, device: torch.device
    ) -> list[tuple[Tensor | None, reference.Pooling, Tensor | None]]:
        bags: list[Tensor | None] = []
        kinds: list[reference.Pooling] = []
        for bag, pooling in zip(lookups.bags, self.poolings, strict=True):
            # Where a sample has one lookup, and for sequences, there is nothing to add up or to divide by.
            is_alone = bag is None or pooling == "sequence"
            bags.append(None if is_alone else bag)
            kinds.append("sequence" if is_alone else pooling)
        dtype = self.declaration.compute_dtype
        weights = [None if column is None else column.to(dtype) for column in lookups.weights]
        return list(
            zip(_copy_to_device(bags, device), kinds, _copy_to_device(weights, device), strict=True)
        )


def _copy_to_device(parts: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Return tensors on the device, with one copy for all of them."""
    present = [part for part in parts if part is not None]
    if not present:
        return list(parts)
    moved = iter(torch.cat(present).to(device).split([len(part) for part in present]))
    return [None if part is None else next(moved) for part in parts]


def _read_settings(row: Sequence[float]) -> rules.Settings:
    """Return the settings in a row of the tensor that `_native.update` takes."""
    names = (settings_field.name for settings_field in fields(rules.Settings))
    values: dict[str, Any] = dict(zip(names, row, strict=False))
    return rules.Settings(**values)
