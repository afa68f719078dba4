from __future__ import annotations

import torch
from resident import TABLES, ResidentContract

from colonnade import Feature, _native
from colonnade.exchange.layout import declare
from colonnade.store.dram import open_dram
from colonnade.store.ssd import open_ssd


def add_one(store, slots, offsets):
    """SGD with lr 1 on a gradient of -1."""
    num_rows, dims = len(slots), [table.dim for table in TABLES]
    gradients = torch.full((num_rows * max(dims),), -1.0)
    index = torch.zeros(num_rows, dtype=torch.int32)
    source = _native.RowGradients(gradients.data_ptr(), index, "float32")
    _native.update(
        store.native,
        slots,
        offsets,
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32),
        source,
        declare(TABLES, [Feature(t.name, t.name) for t in TABLES], {}).native_parts,
        torch.zeros(len(TABLES), dtype=torch.int32),
        torch.tensor(
            [[1.0] + [0.0] * 8 + [torch.inf] * 2 + [1.0] + [0.0] * 4] * len(TABLES),
            dtype=torch.float64,
        ),
    )


class TestDramOverFiles(ResidentContract):
    def train(self, store, slots, offsets):
        add_one(store, slots, offsets)

    def open(self, place, capacity_rows):
        backings = [
            open_ssd(
                place / table.name,
                table_name=table.name,
                record_bytes=table.record_bytes,
                identity="contract",
                step=None,
            )
            for table in TABLES
        ]
        return open_dram(TABLES, capacity_rows or [97, 97], seed=1, num_ranks=1, backings=backings)


class TestDramOnItsOwn(ResidentContract):
    """Without a backing nothing is evicted, so what needs eviction is refused."""

    test_rows_are_those_of_a_dictionary = None
    test_too_many_rows_are_refused_and_nothing_changes = None

    def open(self, place, capacity_rows):
        return open_dram(TABLES, [97, 97], seed=1, num_ranks=1)
