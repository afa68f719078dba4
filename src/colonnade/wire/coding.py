"""Codecs of a run's exchanges, and the seeds of their random bits."""

from __future__ import annotations

from collections.abc import Sequence
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
    encode_elements,
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
        seeds = [self.coding.gradient_seed(name, self.rank, batch_index) for name in self.names]
        block_order = [(t, t * num_ranks + r) for r in range(num_ranks) for t in range(num_tables)]
        return [
            RoundingKey(unique[borders[b] : borders[b + 1]], seeds[t], step) for t, b in block_order
        ]

    def _blocks(self, layout: RowLayout) -> list[RowBlock]:
        """Return the blocks of a message, rank by rank, table by table."""
        counts = layout.counts.tolist()
        return [
            RowBlock(n, self.dims[t]) for rank_counts in counts for t, n in enumerate(rank_counts)
        ]
