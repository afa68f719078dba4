"""Codecs of a run's exchanges, and the seeds of their random bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.lookup.contract import Exactness
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.row_layout import RowLayout
from colonnade.ops.memory import empty
from colonnade.plan.plan import EXACT, Codecs
from colonnade.store.dram import table_seed
from colonnade.wire.codec import (
    CODECS,
    Codec,
    RoundingKey,
    RowBlock,
    decode_elements,
    decode_rows,
    encode_elements,
    encode_rows,
)

NARROW_ROW_ERROR = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Additional relative error of values where rows have 16 bits."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Codecs of a run, and the seed of their random bits."""

    codecs: Codecs = EXACT
    run_seed: int = 0

    def gradient_seed(self, name: str, rank: int, number: int) -> int:
        """Return the seed for gradients of a table or field `name`, from this rank, of the `number`-th batch of a step.
        It differs between ranks, so that their rounding errors in one row do not add up."""
        return table_seed(self.run_seed, f"{name}/gradients/{rank}/{number}")

    def describe_exactness(
        self, uncoded_exactness: Exactness, dtype: torch.dtype, num_ranks: int
    ) -> Exactness:
        """Return the exactness of an exchange whose sums are `uncoded_exactness` without codecs, for rows of this
        dtype."""
        if self.codecs.is_exact or num_ranks == 1:
            return uncoded_exactness
        values = CODECS[self.codecs.values].nearest_error
        if values:
            values += NARROW_ROW_ERROR.get(dtype, 0.0)
        return Exactness("lossy", max(values, CODECS[self.codecs.gradients].random_error))


NO_CODING = Coding()


class RowCodec:
    """Codecs of the rows of a declaration's tables, and of their gradients."""

    def __init__(self, declaration: EmbeddingDeclaration, rank: int, coding: Coding) -> None:
        """Take the rank whose gradients are rounded, with random bits of `coding`."""
        self.values = CODECS[coding.codecs.values]
        self.gradients = CODECS[coding.codecs.gradients]
        self.coding = coding
        self.rank = rank
        self.names = [table.name for table in declaration.tables]
        self.dims = [tuple(part.dim for part in table.parts) for table in declaration.tables]

    def encode_values(self, elements: Tensor, layout: RowLayout) -> Tensor:
        """Return rows as they are sent, uint8."""
        return encode_elements(self.values, elements, self._blocks(layout))

    def decode_values(self, data: Tensor, layout: RowLayout, out: Tensor) -> None:
        """Decode the result of `encode_values` into `out`, rounded to its dtype."""
        decode_elements(self.values, data, self._blocks(layout), out)

    def encode_gradients(
        self, elements: Tensor, layout: RowLayout, rounding_keys: Sequence[RoundingKey]
    ) -> Tensor:
        """Return sums of gradients as they are sent, uint8. rounding_keys: by block."""
        return encode_elements(self.gradients, elements, self._blocks(layout), rounding_keys)

    def decode_gradients(self, data: Tensor, layout: RowLayout, dtype: torch.dtype) -> Tensor:
        """Decode the result of `encode_gradients` to elements of `dtype`."""
        elements = empty(layout.num_elements, dtype=dtype)
        decode_elements(self.gradients, data, self._blocks(layout), elements)
        return elements

    def encode_records(
        self, records: Tensor, row_counts: np.ndarray, record_bytes: np.ndarray, dtype: torch.dtype
    ) -> Tensor:
        """Return records as they are sent, uint8: their weights as values are sent, and the other bytes as they are.
        records: the first `record_bytes` (T,) bytes of each record, for row_counts (N, T) rows."""
        parts = []
        for t, block in self._split_records(records, row_counts, record_bytes):
            num_bytes = sum(self.dims[t]) * dtype.itemsize
            weights = block[:, :num_bytes].contiguous().view(dtype)
            coded = encode_rows(self.values, weights, self.dims[t], None)
            parts.append(torch.cat([coded, block[:, num_bytes:]], dim=1).flatten())
        return torch.cat([*parts, torch.empty(0, dtype=torch.uint8)])

    def decode_records(
        self, data: Tensor, row_counts: np.ndarray, record_bytes: np.ndarray, dtype: torch.dtype
    ) -> Tensor:
        """Decode the result of `encode_records`, with weights rounded to `dtype`."""
        parts = []
        sent_bytes = self.count_sent_bytes(record_bytes, dtype)
        for t, block in self._split_records(data, row_counts, sent_bytes):
            num_bytes = self.values.row_bytes(self.dims[t], dtype)
            weights = decode_rows(self.values, block[:, :num_bytes], self.dims[t]).to(dtype)
            row = [weights.view(torch.uint8), block[:, num_bytes:]]
            parts.append(torch.cat(row, dim=1).flatten())
        return torch.cat([*parts, torch.empty(0, dtype=torch.uint8)])

    def count_sent_bytes(self, record_bytes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        """Return the bytes that `encode_records` sends of a record, by table."""
        saved = [
            sum(dims) * dtype.itemsize - self.values.row_bytes(dims, dtype) for dims in self.dims
        ]
        return np.asarray(record_bytes - np.array(saved))

    @staticmethod
    def _split_records(
        records: Tensor, row_counts: np.ndarray, record_bytes: np.ndarray
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the table and the rows (n, bytes) of each block that has some."""
        sizes = (row_counts * record_bytes).ravel().tolist()
        for number, block in enumerate(records.split(sizes)):
            t = number % len(record_bytes)
            if len(block):
                yield t, block.view(-1, int(record_bytes[t]))

    def rank_bytes(self, codec: Codec, layout: RowLayout, dtype: torch.dtype) -> list[int]:
        """Return the number of bytes to or from each rank, for elements of `dtype`."""
        widths = [codec.row_bytes(dims, dtype) for dims in self.dims]
        num_bytes: list[int] = (layout.counts @ np.array(widths)).tolist()
        return num_bytes

    def build_rounding_keys(
        self, lookup_plan: _native.Plan, block_offsets: np.ndarray, step: int, batch_index: int
    ) -> list[RoundingKey]:
        """Return the rounding keys of a plan's unique rows, rank by rank, table by table. block_offsets:
        `OwnerMap.block_offsets` of it; step, batch_index: see `ExchangePart.begin_push`."""
        borders = block_offsets.tolist()
        unique = torch.as_tensor(lookup_plan.unique_ids)
        num_tables = len(self.names)
        num_ranks = (len(borders) - 1) // num_tables
        block_order = [t * num_ranks + r for r in range(num_ranks) for t in range(num_tables)]
        ids_by_block = [unique[borders[b] : borders[b + 1]] for b in block_order]
        return self.build_block_keys(ids_by_block, step, batch_index)

    def build_block_keys(
        self, ids_by_block: Sequence[Tensor], step: int, batch_index: int
    ) -> list[RoundingKey]:
        """Return the rounding keys of blocks of rows, rank by rank, table by table."""
        seeds = [self.coding.gradient_seed(name, self.rank, batch_index) for name in self.names]
        return [
            RoundingKey(ids, seeds[number % len(seeds)], step)
            for number, ids in enumerate(ids_by_block)
        ]

    def _blocks(self, layout: RowLayout) -> list[RowBlock]:
        """Return the blocks of a message, rank by rank, table by table."""
        counts = layout.counts.tolist()
        return [
            RowBlock(n, self.dims[t]) for rank_counts in counts for t, n in enumerate(rank_counts)
        ]
