"""The slow twin of every exchange: plain PyTorch, one process, any world. It is also the definition.

Rows live in a dictionary. The order of sums is the one that makes all ranks and all shardings agree
to the bit: a row's gradients are summed per source rank in lookup order, then in rank order.

Legend: B samples of one rank's batch, D dim, E lookups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.exchange.layout import Declaration, outputs
from colonnade.ops import reference as ops
from colonnade.store.dram import table_seed
from colonnade.table import SGD, Feature, Table


class ReferenceRows:
    """All tables, all rows that were ever read, on no rank in particular."""

    def __init__(self, declaration: Declaration, seed: int = 0) -> None:
        self.declaration = declaration
        self.seed = seed
        self.weights: dict[tuple[str, int], Tensor] = {}
        self.states: dict[tuple[str, int], Tensor] = {}
        self.clocks: dict[tuple[str, int], int] = {}

    def row(self, table: Table, row_id: int) -> Tensor:
        """(D,). Born if never read."""
        key = (table.name, row_id)
        if key not in self.weights:
            seed, ids = table_seed(self.seed, table.name), torch.tensor([row_id])
            dtype = getattr(torch, table.dtype)
            self.weights[key] = ops.birth_values(ids, table.dim, seed, table.init_scale, dtype)[0]
            self.states[key] = torch.full(
                (table.state_floats,), table.optimizer.initial_state, dtype=dtype
            )
            self.clocks[key] = 0
        return self.weights[key]

    def pooled(self, batch: Batch, feature: Feature) -> Tensor:
        """(B, D), or (E, D) for a sequence: rows added one by one in lookup order (`ops.reference.pool`)."""
        table = self.declaration.tables[self.declaration.table_of(feature)]
        ids = batch.ids[feature.name]
        found = [self.row(table, row_id) for row_id in ids.values.tolist()]
        rows = torch.stack(found) if found else torch.zeros(0, table.dim, dtype=row_dtype(table))
        return ops.pool(rows, bags(ids, batch.size), feature.pooling, weights_of(ids, rows.dtype))

    def outputs(self, batch: Batch) -> list[Tensor]:
        """The tensors of `layout.outputs`, before any consumer: fields side by side."""
        return [
            torch.cat(
                [self.pooled(batch, self.declaration.features[f]) for f in output.features], 1
            )
            for output in outputs(self.declaration)
        ]

    def apply(self, batches: Sequence[Batch], gradients: Sequence[Sequence[Tensor]]) -> None:
        """One application of what all ranks pushed. gradients: by rank, by output, shaped like `outputs`."""
        for table in self.declaration.tables:
            by_rank = [
                self._row_sums(table, batch, parts)
                for batch, parts in zip(batches, gradients, strict=True)
            ]
            for row_id in sorted({row_id for sums in by_rank for row_id in sums}):
                shares = [sums[row_id] for sums in by_rank if row_id in sums]
                self._update(table, row_id, sum(shares[1:], shares[0]))

    def _row_sums(
        self, table: Table, batch: Batch, gradients: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """One rank's gradients summed per row, in lookup order: feature by feature as the outputs list them."""
        sums: dict[int, Tensor] = {}
        for output, gradient in zip(outputs(self.declaration), gradients, strict=True):
            for f, column in zip(output.features, output.columns, strict=True):
                feature = self.declaration.features[f]
                if feature.table != table.name:
                    continue
                ids = batch.ids[feature.name]
                mine = gradient[:, column : column + table.dim]
                shares = ops.lookup_gradients(
                    mine, bags(ids, batch.size), feature.pooling, weights_of(ids, mine.dtype)
                )
                for row_id, share in zip(ids.values.tolist(), shares, strict=True):
                    sums[row_id] = sums[row_id] + share if row_id in sums else share
        return sums

    def _update(self, table: Table, row_id: int, gradient: Tensor) -> None:
        self.row(table, row_id)
        key, optimizer = (table.name, row_id), table.optimizer
        weights, state = self.weights[key][None], self.states[key][None]
        if isinstance(optimizer, SGD):
            ops.sgd(weights, gradient[None], optimizer.lr, optimizer.weight_decay)
        else:
            ops.rowwise_adagrad(
                weights,
                state[:, 0],
                gradient[None],
                optimizer.lr,
                optimizer.weight_decay,
                optimizer.eps,
            )
        self.clocks[key] += 1


def row_dtype(table: Table) -> torch.dtype:
    return getattr(torch, table.dtype)


def bags(ids: Ids, size: int) -> Tensor:
    """(B + 1,): where each sample's lookups begin and end."""
    return torch.arange(size + 1) if ids.offsets is None else ids.offsets


def weights_of(ids: Ids, dtype: torch.dtype) -> Tensor | None:
    return None if ids.weights is None else ids.weights.to(dtype)
