"""The slow twin of every exchange: plain PyTorch, one process, any world. It is also the definition.

Rows live in a dictionary. The order of sums is the one that makes all ranks and all shardings agree
to the bit: a row's gradients are summed per source rank in lookup order, then in rank order.

Legend: B samples of one rank's batch, D dim, E lookups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.lookup.layout import EmbeddingDeclaration, build_lookup_columns, list_lookup_outputs
from colonnade.ops import optimizers
from colonnade.ops import reference as ops
from colonnade.store.dram import table_seed
from colonnade.table import Part, Table


class ReferenceRows:
    """All tables, all rows that were ever read, on no rank in particular."""

    def __init__(self, declaration: EmbeddingDeclaration, seed: int = 0) -> None:
        self.declaration = declaration
        self.consumption = build_lookup_columns(declaration)
        self.seed = seed
        self.weights: dict[tuple[str, int], Tensor] = {}
        self.states: dict[tuple[str, int], Tensor] = {}
        self.clocks: dict[tuple[str, int], int] = {}

    def row(self, table: Table, row_id: int) -> Tensor:
        """Return a row (D,), initialised if it was never read."""
        key = (table.name, row_id)
        if key not in self.weights:
            name, first = table.origin
            seed, ids = table_seed(self.seed, name), torch.tensor([row_id])
            dtype = getattr(torch, table.dtype)
            born = [
                ops.initial_values(
                    ids, p.dim, seed, p.init_scale, dtype, first_column=first + p.column
                )[0]
                for p in table.parts
            ]
            self.weights[key] = torch.cat(born)
            self.states[key] = torch.zeros(table.state_floats, dtype=dtype)
            for part in table.parts:
                value, count = part.optimizer.initial_state(part.dim)
                self.states[key][part.state : part.state + count] = value
            self.clocks[key] = 0
        return self.weights[key]

    def read(self, batch: Batch, column: int, p: int) -> Tensor:
        """Read (B, D), or (E, D) for a sequence: rows added one by one in lookup order (`ops.reference.pool`).

        `column` of lookups, part `p` of its table.
        """
        feature = self.declaration.features[self.consumption.features[column]]
        t, part = self.declaration.parts[p]
        ids, table = batch.ids[feature.name], self.declaration.tables[t]
        results = [self.row(table, row_id) for row_id in ids.values.tolist()]
        rows = (
            torch.stack(results) if results else torch.zeros(0, table.width, dtype=row_dtype(table))
        )
        rows = rows[:, part.column : part.column + part.dim]
        return ops.pool(rows, bags(ids, batch.size), feature.pooling, weights_of(ids, rows.dtype))

    def outputs(self, batch: Batch) -> list[Tensor]:
        """The tensors of `layout.outputs`, before any consumer: fields side by side."""
        reads = iter(self.consumption.reads)
        return [
            torch.cat([self.read(batch, *next(reads)) for _ in output.fields], 1)
            for output in list_lookup_outputs(self.declaration)
        ]

    def apply(self, batches: Sequence[Batch], gradients: Sequence[Sequence[Tensor]]) -> None:
        """One application of what all ranks pushed. gradients: by rank, by output, shaped like `outputs`."""
        for t, table in enumerate(self.declaration.tables):
            by_rank = [
                self._row_sums(t, batch, parts)
                for batch, parts in zip(batches, gradients, strict=True)
            ]
            for row_id in sorted({row_id for sums in by_rank for row_id in sums}):
                shares = [sums[row_id] for sums in by_rank if row_id in sums]
                self._update(table, row_id, sum(shares[1:], shares[0]))

    def _row_sums(self, t: int, batch: Batch, gradients: Sequence[Tensor]) -> dict[int, Tensor]:
        """One rank's gradients summed per row: column of lookups by column, in lookup order; whole rows (width,)."""
        table, sums = self.declaration.tables[t], dict[int, Tensor]()
        for column, f in enumerate(self.consumption.features):
            feature = self.declaration.features[f]
            if feature.table != table.name:
                continue
            ids = batch.ids[feature.name]
            whole = torch.zeros(len(ids.values), table.width, dtype=row_dtype(table))
            for part, own in self._read_gradients(column, gradients):
                whole[:, part.column : part.column + part.dim] = ops.lookup_gradients(
                    own, bags(ids, batch.size), feature.pooling, weights_of(ids, own.dtype)
                )
            for row_id, share in zip(ids.values.tolist(), whole, strict=True):
                sums[row_id] = sums[row_id] + share if row_id in sums else share
        return sums

    def _read_gradients(self, column: int, gradients: Sequence[Tensor]):
        """Yield (part, gradient) of every part that is read of a column of lookups: the sum over the outputs that read
        it."""
        reads, own = iter(self.consumption.reads), dict[Part, Tensor]()
        for output, gradient in zip(list_lookup_outputs(self.declaration), gradients, strict=True):
            for start in output.columns:
                read_column, p = next(reads)
                part = self.declaration.parts[p][1]
                if read_column == column:
                    columns = gradient[:, start : start + part.dim]
                    own[part] = own[part] + columns if part in own else columns
        yield from own.items()

    def _update(self, table: Table, row_id: int, gradient: Tensor) -> None:
        self.row(table, row_id)
        key = (table.name, row_id)
        weights, state = self.weights[key][None], self.states[key][None]
        clock = torch.tensor([self.clocks[key]])
        for part in table.parts:
            columns = slice(part.column, part.column + part.dim)
            states = slice(part.state, part.state + part.optimizer.state_floats(part.dim))
            optimizers.apply_optimizer(
                part.optimizer.kernel, weights[:, columns], state[:, states], clock,
                gradient[None, columns], settings_of(part, table),
            )  # fmt: skip
        self.clocks[key] += 1


def settings_of(part: Part, table: Table) -> optimizers.Settings:
    """Return settings as RowOptimizer passes them to the core."""
    settings = {
        name: value
        for name, value in part.optimizer.settings().items()
        if name not in ("betas", "momentum", "initial_accumulator")
    }
    betas = getattr(part.optimizer, "betas", (getattr(part.optimizer, "momentum", 0.0), 0.0))
    max_norm = math.inf if table.max_norm is None else table.max_norm
    bound = math.inf if table.weight_bound is None else table.weight_bound
    return optimizers.Settings(
        beta1=betas[0], beta2=betas[1], max_norm=max_norm, weight_bound=bound, **settings
    )


def row_dtype(table: Table) -> torch.dtype:
    return getattr(torch, table.dtype)


def bags(ids: Ids, size: int) -> Tensor:
    """Return offsets (B + 1,) of the samples' lookups."""
    return torch.arange(size + 1) if ids.offsets is None else ids.offsets


def weights_of(ids: Ids, dtype: torch.dtype) -> Tensor | None:
    return None if ids.weights is None else ids.weights.to(dtype)
