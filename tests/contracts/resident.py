"""The conformance suite of `Resident`: a subclass says how to open one, with room for few rows or for all.

Rows are checked against a dictionary; training adds one to each weight of a row.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from colonnade import Table, Uniform
from colonnade.errors import BudgetExceeded
from colonnade.store.contract import Resident

TABLES = [
    Table("vocabulary", 3, rows=97, initializer=Uniform(scale=1.0)),
    Table("open", 5, initializer=Uniform(scale=1.0)),
]
IDS = [list(range(97)), [k * 0x1234567890ABCDE - 5 for k in range(60)] + [2**63 - 1, -(2**63)]]


class ResidentContract:
    def open(self, place, capacity_rows: list[int] | None) -> Resident:
        """`capacity_rows` None: room for every row."""
        raise NotImplementedError

    def train(self, store: Resident, slots: Tensor, offsets: Tensor) -> None:
        """Add one to every weight of these rows, as an optimizer would."""
        raise NotImplementedError

    @settings(
        max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(seed=st.integers(0, 10**9), window=st.integers(1, 4))
    def test_rows_are_those_of_a_dictionary(self, tmp_path_factory, seed, window):
        random = torch.Generator().manual_seed(seed)
        store = self.open(tmp_path_factory.mktemp("resident"), [40, 40])
        births = read_all(store)
        truth = [rows.clone() for rows in births]
        in_flight: list[tuple[Tensor, object, Tensor, list[Tensor]]] = []
        for _ in range(30):
            chosen = [torch.randperm(len(ids), generator=random)[:8] for ids in IDS]
            ids, offsets = grouped(chosen)
            in_flight.append((*store.acquire(ids, offsets), offsets, chosen))
            if len(in_flight) < window:
                continue
            slots, job, offsets, chosen = in_flight.pop(0)
            store.wait(job)
            is_dirty = bool(torch.randint(0, 4, (1,), generator=random))
            if is_dirty:
                for t, numbers in enumerate(chosen):
                    table_slots = slots[offsets[t] : offsets[t + 1]]
                    for slot, number in zip(table_slots.tolist(), numbers.tolist(), strict=True):
                        assert torch.equal(row_at(store, t, slot), truth[t][number])
                        truth[t][number] += 1
                store.before_update(slots, offsets)
                self.train(store, slots, offsets)
            store.release(slots, offsets, dirty=is_dirty)
        for result, wanted in zip(read_all(store), truth, strict=True):
            assert torch.equal(result, wanted)

    def test_too_many_rows_are_refused_and_nothing_changes(self, tmp_path):
        store = self.open(tmp_path, [10, 10])
        chosen = [torch.arange(8), torch.arange(4)]
        ids, offsets = grouped(chosen)
        slots, job = store.acquire(ids, offsets)
        more = grouped([torch.arange(8, 20), torch.arange(4, 6)])
        with pytest.raises(BudgetExceeded, match="vocabulary"):
            store.acquire(*more)
        store.wait(job)
        for t, numbers in enumerate(chosen):
            for slot, number in zip(
                slots[offsets[t] : offsets[t + 1]].tolist(), numbers, strict=True
            ):
                assert torch.equal(row_at(store, t, slot), read_all(store)[t][number])
        store.release(slots, offsets, dirty=False)
        slots, _ = store.acquire(*grouped([torch.arange(8, 18), torch.arange(4, 6)]))
        assert len(slots) == 12

    def test_reading_leaves_no_trace(self, tmp_path):
        store = self.open(tmp_path, [10, 10])
        before, _ = store.acquire(*grouped([torch.arange(10), torch.arange(10)]))
        read_all(store)  # more rows than there is room for
        again, _ = store.acquire(*grouped([torch.arange(10), torch.arange(10)]))
        assert torch.equal(before, again)

    def test_the_same_row_is_in_one_place(self, tmp_path):
        store = self.open(tmp_path, None)
        ids, offsets = grouped([torch.tensor([5, 6]), torch.tensor([0])])
        (one, _), (two, _) = store.acquire(ids, offsets), store.acquire(ids, offsets)
        assert torch.equal(one, two)

    def test_nothing_at_all(self, tmp_path):
        store = self.open(tmp_path, None)
        none = grouped([torch.arange(0), torch.arange(0)])
        slots, _ = store.acquire(*none)
        store.release(slots, none[1], dirty=True)
        assert len(slots) == 0 and [len(rows) for rows in store.read(*none)] == [0, 0]

    def test_addresses_stay(self, tmp_path):
        store = self.open(tmp_path, None)
        before = store.views()
        store.acquire(*grouped([torch.arange(97), torch.arange(62)]))
        assert store.views() == before


def grouped(chosen: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers into IDS, by table -> ids (U,) and offsets (T + 1,)."""
    parts = [torch.tensor(ids, dtype=torch.int64)[c] for ids, c in zip(IDS, chosen, strict=True)]
    return torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0)


def read_all(store: Resident) -> list[Tensor]:
    return store.read(*grouped([torch.arange(len(ids)) for ids in IDS]))


def row_at(store: Resident, t: int, slot: int) -> Tensor:
    """A row in place, as compute reads it."""
    view = store.views()[t]
    if view.rows is not None:
        return view.rows[slot].cpu()
    address = view.address + (slot & 0xFFFFFFFF) * view.stride_bytes
    memory = (ctypes.c_byte * (4 * view.dim)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32)
