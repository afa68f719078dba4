"""Lookups in exported rows, which nobody changes: prediction, in a world of one."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.lookup.kernels import NativeKernels
from colonnade.lookup.layout import Declaration, collect, consumption, explain_range, outputs
from colonnade.lookup.outputs import build_outputs
from colonnade.store.mapped import MappedRows


class MappedLookup:
    """Reader of a declaration's features in mapped rows: no plan of a batch, nothing pinned, no graph."""

    def __init__(self, declaration: Declaration, rows: MappedRows) -> None:
        self.declaration, self.rows = declaration, rows
        self.outputs, self.consumption = outputs(declaration), consumption(declaration)
        self.table_rows = torch.tensor([table.rows or 0 for table in declaration.tables])
        self.kernels = NativeKernels(declaration, self.consumption, self.outputs, 1)

    def read(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Return what `Exchange.values` would. Raises IdRangeError, DataError as training does, CorruptionError and
        StorageError where a file of rows is damaged."""
        lookups = collect(batch, self.declaration, self.consumption)
        try:
            slots = self.rows.find(lookups.ids, lookups.feature_offsets, self.consumption.tables)
        except IndexError:
            try:  # which feature and lookup it is
                one_owner = torch.ones(len(self.table_rows), dtype=torch.int64)
                _native.make_plan(lookups.native, self.table_rows, one_owner)
            except IndexError as error:
                features = self.consumption.features
                raise explain_range(error, self.declaration, features) from None
            raise
        pooled = self.kernels.pool(lookups, (*self.rows.places(), slots, None))
        self.rows.check()
        return build_outputs(self.declaration, self.outputs, pooled, device, batch.dense)
