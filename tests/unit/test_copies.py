"""Copies of rows: what is pending there, by a twin in plain NumPy; records of all tables in one message."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import DEVICES

from colonnade import Adam, Table, _native
from colonnade.cache.cached_rows import DeviceCachedRows, NativeCachedRows
from colonnade.cache.messages import row_tables
from colonnade.lookup.row_layout import RowSums, build_row_layout
from colonnade.store.dram import open_dram_store

WIDTHS = np.array([3, 1, 5])
TABLES = [
    Table(f"t{t}", int(width), rows=40, optimizer=Adam(lr=0.1)) for t, width in enumerate(WIDTHS)
]


def counted(random, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return counts (N, T) of rows, and their slots, each once, as messages list them."""
    per_table = [random.permutation(40)[: random.integers(0, 30)] for _ in WIDTHS]
    ends = [np.sort(random.integers(0, len(rows) + 1, num_ranks - 1)) for rows in per_table]
    blocks = [np.split(rows, end) for rows, end in zip(per_table, ends, strict=True)]
    counts = np.array([[len(blocks[t][n]) for t in range(len(WIDTHS))] for n in range(num_ranks)])
    listed = [blocks[t][n] for n in range(num_ranks) for t in range(len(WIDTHS))]
    return counts, np.concatenate(listed).astype(np.int64)


PLACES = [None, *DEVICES]
"""Device of cached rows; None: main memory, for the native core."""


def opened(tables, place: str | None):
    rooms = [40] * len(tables)
    if place is None:
        return NativeCachedRows(tables, rooms)
    return DeviceCachedRows(tables, [11] * len(tables), torch.device(place))


def made(place: str | None, sums: torch.Tensor, index: torch.Tensor, counts: np.ndarray):
    """Sums as these copies take them."""
    if place is None:
        return RowSums(sums, index)
    parts = sums.to(place).split((counts * WIDTHS).tolist())
    return [part.view(-1, int(width)) for part, width in zip(parts, WIDTHS, strict=True)]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_pending_is_what_a_twin_says(seed, dtype, device):
    random = np.random.default_rng(seed)
    tables = [
        Table(f"t{t}", int(w), rows=40, optimizer=Adam(lr=0.1), dtype=dtype)
        for t, w in enumerate(WIDTHS)
    ]
    copies = opened(tables, device)
    for t in range(len(WIDTHS)):
        copies.grow_table(t, 40)
    twin: dict[tuple[int, int], np.ndarray] = {}
    for _ in range(12):
        (counts,), slots = (item for item in counted(random, 1))
        tables_here = row_tables(counts[None, :])
        layout = build_row_layout(counts[None, :], WIDTHS)
        sums = torch.randn(layout.num_elements, dtype=getattr(torch, dtype))
        sums[torch.rand(len(sums)) < 0.1] = -0.0
        index = layout.rank_major_index(WIDTHS)
        leaves = random.random(len(slots)) < 0.4
        rows = {
            (int(t), int(slot)): sums.numpy()[i : i + WIDTHS[t]].copy()
            for t, slot, i in zip(tables_here, slots, index.tolist(), strict=True)
        }
        # Rows that leave, and some of no batch that are driven out, on their way to two ranks.
        out_counts, out = counted(random, 2)
        keys = list(zip(row_tables(out_counts).tolist(), out.tolist(), strict=True))
        place = {key: i for i, key in enumerate(rows)}
        names = [key for key in keys if (leaves[place[key]] if key in place else key in twin)]
        named_by = np.array([key in set(names) for key in keys], bool)
        leaves = np.array([key in set(names) for key in rows], bool)
        sent_counts = np.array(
            [
                [np.sum(row_tables(out_counts[:1])[named_by[: out_counts[0].sum()]] == t) for t in range(3)],
                [np.sum(row_tables(out_counts[1:])[named_by[out_counts[0].sum() :]] == t) for t in range(3)],
            ]
        )  # fmt: skip
        origin = np.array([place.get(key, -1) for key in names], np.int64)
        message = torch.empty(int((sent_counts * WIDTHS).sum()), dtype=sums.dtype)
        settings = made(device, sums, index, counts)
        copies.take_pending_gradients(sent_counts, out[named_by], origin, settings, message)
        copies.add_pending_gradients(counts, slots, settings, leaves)
        none = {t: np.zeros(WIDTHS[t], dtype) for t in range(3)}
        wanted = [
            (rows[key] + twin[key] if key in twin else rows[key]) if key in rows else twin[key]
            for key in names
        ]
        flat = np.concatenate([*wanted, none[0][:0]])
        assert message.numpy().tobytes() == flat.tobytes()  # a zero's sign, too
        for key, leaving in zip(rows, leaves, strict=True):
            if not leaving:
                twin[key] = twin[key] + rows[key] if key in twin else rows[key]
        for key in names:
            twin.pop(key, None)
        for t in range(3):
            assert sorted(copies.dirty_slots(t).tolist()) == sorted(s for u, s in twin if u == t)
            for slot in copies.dirty_slots(t).tolist():
                (waiting,) = copies.table_pending_sums(t, np.array([slot])).numpy()
                np.testing.assert_array_equal(waiting, twin[t, slot])


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("seed", range(3))
def test_records_of_all_tables_travel_in_one_message(seed, device):
    random = np.random.default_rng(seed)
    store = open_dram_store(TABLES, [40] * 3, seed=seed)
    every, offsets = torch.arange(40).repeat(3), torch.tensor([0, 40, 80, 120])
    slots, _ = store.acquire(every, offsets)
    sizes = [(40, table.record_bytes) for table in TABLES]
    whole = [torch.from_numpy(random.integers(0, 100, size).astype(np.uint8)) for size in sizes]
    for records in whole:
        records[:, -4:] = 0  # of a clock, what a slot has room for
    for t, records in enumerate(whole):
        store.native.unpack(t, slots[offsets[t] : offsets[t + 1]], records)
    counts, rows = counted(random, 3)
    widths = np.array([table.record_bytes for table in TABLES]) - np.array([0, 8, 13])
    message = torch.empty(int((counts * widths).sum()), dtype=torch.uint8)
    store.native.pack_blocks(
        torch.from_numpy(rows.astype(np.int32)), counts.ravel(), widths, message
    )
    tables = row_tables(counts)
    wanted = [whole[t][row, : widths[t]] for t, row in zip(tables.tolist(), rows.tolist(), strict=True)]  # fmt: skip
    assert torch.equal(message, torch.cat([*wanted, message[:0]]))

    copies = opened(TABLES, device)
    for t in range(3):
        copies.grow_table(t, 40)
    ids = rows + 1000
    assert not copies.store_received_rows(counts, rows, ids, message, widths).any()
    for t in range(3):
        own = np.flatnonzero(tables == t)
        result = copies.read_records(t, rows[own])
        assert torch.equal(result[:, : widths[t]], whole[t][rows[own], : widths[t]])
        assert not result[:, widths[t] :].any()
        assert copies.ids[t][rows[own]].tolist() == ids[own].tolist()


@pytest.mark.parametrize("device", PLACES)
def test_a_checkpoint_has_no_sums_where_nothing_waits(device):
    copies = opened(TABLES, device)
    copies.grow_table(0, 4)
    copies.pending[0][:] = 7  # as memory may be before anything was written there
    copies.num_pending[0][:4] = [0, 2, 0, 1]
    assert copies.export_rows(0, np.arange(4))["pending"][:, 0].tolist() == [0, 7, 0, 7]


def test_what_does_not_fit_is_refused():
    store = open_dram_store(TABLES, [40] * 3, seed=0)
    slots, bytes_of = torch.tensor([1, 2], dtype=torch.int32), TABLES[0].record_bytes
    widths = np.array([t.record_bytes for t in TABLES])
    for counts, inputs, message in (
        ([2, 0, 0], widths, 2 * bytes_of - 1),
        ([3, 0, 0], widths, 3 * bytes_of),
        ([1, 0, 0], widths, bytes_of),
        ([-1, 3, 0], widths, 0),
        ([2, 0], widths, 2 * bytes_of),
        ([2, 0, 0], widths + 1, 2 * bytes_of + 2),
    ):
        for call in (store.native.pack_blocks, store.native.unpack_blocks):
            with pytest.raises(ValueError, match="got"):
                call(slots, np.array(counts), inputs, torch.zeros(message, dtype=torch.uint8))
    sums, ticks = [np.zeros((4, 3), np.float32)], [np.zeros(4, np.int32)]
    batch, index = torch.zeros(6), torch.tensor([0, 3], dtype=torch.int32)
    one = np.array([2]), np.array([0, 3])
    _native.add_pending(sums, ticks, *one, index, batch, np.zeros(2, np.uint8))
    for counts, slots_, index_ in (
        ([2], [0, 4], [0, 3]),
        ([2], [0, -1], [0, 3]),
        ([3], [0, 1], [0, 3]),
        ([2], [0, 1], [0, 4]),
    ):
        inputs = np.array(counts), np.array(slots_), torch.tensor(index_, dtype=torch.int32)
        with pytest.raises(ValueError, match="pending sums"):
            _native.add_pending(sums, ticks, *inputs, batch, np.zeros(2, np.uint8))
        out = torch.zeros(3 * counts[0])
        with pytest.raises(ValueError, match="pending sums"):
            _native.take_pending(
                sums, ticks, inputs[0], inputs[1], np.array([0, 1]), inputs[2], batch, out
            )
